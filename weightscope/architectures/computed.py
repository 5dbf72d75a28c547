"""What the configs of two checkpoints say of the computation, compared key by key.

Both configs are read by their rows first, so that the dialects of transformers 4 and 5, a GGUF file's metadata and
what is left out mean what they mean to transformers. Any key that differs then counts, unless it is known to have no
effect on what a trained model computes: an unknown key may decide anything.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isclose, prod
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.architectures.config import Every, class_says, values_of
from weightscope.architectures.family import Family
from weightscope.architectures.gguf import KEYS as OF_GGUF
from weightscope.architectures.gguf import shortest
from weightscope.architectures.numbers import (
    GIVEN,
    SCALING,
    TRAINED,
    completed_part,
    read_config,
    renamed,
    standardised,
)
from weightscope.architectures.reading import part_of, parts
from weightscope.architectures.rope import Rope
from weightscope.architectures.stanzas import stanza_of
from weightscope.architectures.table import known_rows
from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config, read_json
from weightscope.checkpoint.gguf import GgufFile
from weightscope.errors import CheckpointError

FILE = Path(__file__).with_name("config_defaults.json")
# Keys that say who wrote a file, how weights are stored or begin, what training drops or adds to its loss, which of
# several outputs are handed over, how text is generated, and what classes are called. No trained model computes
# anything else for them; a key that the model's row reads counts all the same.
NO_EFFECT = re.compile(
    r"transformers_version|_?(model_)?name_or_path|_commit_hash|(torch_)?dtype|architectures|use_bfloat16"
    r"|(quantization|compression|generation)(_config)?(\..*)?"
    r"|_?(attn|experts)_implementation(_internal)?|attn_implementation|use_kernels?|kernel_config|verbose"
    r"|.*dropout(_p|_prob|_rate)?|.*_p?drop|.*layerdrop|drop_path_rate|stochastic_depth_prob|gradient_checkpointing"
    r"|(initializer|init)_(range|std|scale|factor|method|config)|.*_initializer_(range|factor|std)|_?init_\w+"
    r"|(use_)?cache|use_cache|return_dict|torchscript|tf_legacy_loss|output_(attentions|hidden_states|router_logits)"
    r"|output_scores|return_dict_in_generate|chunk_size_feed_forward|keys_to_ignore_at_inference"
    r"|(id2label|label2id)(\..*)?|num_labels|problem_type|finetuning_task|task_specific_params(\..*)?|tokenizer_class"
    r"|prefix|seq_aux|(router_)?(aux|z)_loss_(alpha|coef|weight|coefficient)|router_jitter_noise|.*_loss_(coef|weight)"
    r"|.*_loss_coefficient|repad_logits_with_grad|apply_spec_augment|mask_(time|feature)_\w+|ctc_\w+"
    r"|(bos|eos|pad|sep|cls|mask|unk|eod|decoder_start|forced_bos|forced_eos)_token_id|forced_decoder_ids"
    r"|(begin_)?suppress_tokens|bad_words_ids|max_length|min_length|do_sample|early_stopping|num_beams"
    r"|num_beam_groups|diversity_penalty|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty"
    r"|no_repeat_ngram_size|encoder_no_repeat_ngram_size|num_return_sequences|remove_invalid_values"
    r"|exponential_decay_length_penalty|max_new_tokens|begin_suppress_tokens|transformers_weights",
    re.ASCII,
)
STORAGE = {"quantization", "quantization_config", "compression_config"}  # how weights are packed: read with them
# Values that mean the same as no such key: versions of transformers leave them out, or put nothing in their place.
NEUTRAL = {"position_embedding_type": "absolute", "sliding_window": 0}
AS_WRITTEN = " as written"  # of a key whose value the row takes from elsewhere: transformers' code may read it
PLAIN_TURNS = ("default", "axial")  # kinds of rotation that nothing scales
# What transformers takes for a key without a value where another key has one: key -> (other, its value, what is taken).
IMPLIED = {"num_ln_in_parallel_attn": ("new_decoder_architecture", True, 2)}
FOLLOWS = {"qk_head_dim", "head_dim"}  # computed of other keys wherever it is
KV_HEADS = "num_key_value_heads"  # no code reads it where the row does not
GATING = "expert_gating_func"
# What a GGUF file has besides the sizes: its key -> the names that configs may have for it, the first that a config
# has counts; or a product of such names.
BESIDES = {
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "attention.sliding_window": ("sliding_window",),
    "rope.freq_base_swa": ("rope_parameters.sliding_attention.rope_theta",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_num_shared_experts * moe_intermediate_size"
    ),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    GATING: ("score_function", "scoring_func", "score_func", "moe_router_activation_func"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("mamba_d_conv",),
    "ssm.state_size": ("mamba_d_state",),
    "ssm.group_count": ("mamba_n_groups",),
    "ssm.inner_size": ("mamba_expand * hidden_size",),
    "ssm.time_step_rank": ("mamba_dt_rank", "mamba_n_heads"),
}  # fmt: skip
GATES = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}  # how experts are scored, by the number in a GGUF file
# Types whose code scores experts by the sigmoid without a key that says it.
BY_SIGMOID = ("glm4_moe", "glm4_moe_lite", "hy_v4", "laguna", "lfm2_moe")
PATTERN = "attention.sliding_window_pattern"  # of a GGUF file: which layers have a window
# Keys of a GGUF file that the config is made from, that tensors' shapes show, or that say nothing of the computation.
NOTHING_MORE = re.compile(
    r"rope\.(dimension_count|scaling\.(type|factor|finetuned|attn_factor|original_context_length|yarn_beta_(fast|slow)))"
    r"|attention\.((key|value)_length_mla|value_length|max_alibi_bias|clamp_kqv|causal)|use_parallel_residual|vocab_size"
    r"|pooling_type|tensor_data_layout",
    re.ASCII,
)
# Scalings of rotations in which the longest text has no part. A model that was tuned computes the same with another
# limit of its texts, and with rows added to or cut from its vocabulary, which the comparison of tensors tells.
ANY_LENGTH = {"default", "linear", "llama3"}
LEAST = {"n_layers", "d_model", "n_heads", "n_positions", "vocab_size", "norm_eps"}  # sizes, as `ModelConfig` has them
FLOAT32 = 2.0**-24  # what rounding to float32, in which models compute and GGUF files store, changes of a number
COMPUTATION, UNKNOWN, NONE = "computation", "unknown", "none"
# Keys that decide the computation, whether attention's row reads them or not.
KNOWN = re.compile(
    r".*(multiplier|scal(e|ing)|softcap(ping)?|logit_scale|window|rope|rotary|eps|epsilon|hidden_act|activation\w*"
    r"|experts_per_tok|top_?k|layer_types|bias|norm\w*|tie_word_embeddings|num_\w+|\w+_size|\w+_dim|causal).*"
    r"|auto_map(\..*)?|model_type|query_pre_attn_scalar|relative_attention_\w+|(scale_)?attn_\w+|(original_)?max_position_embeddings|is_decoder|add_cross_attention",
    re.ASCII,
)


class Difference(NamedTuple):
    """A key of two configs with other values."""

    key: str  # as the second config spells it, nested ones dotted
    a: Any  # None where it has no value
    b: Any
    effect: str  # "computation", "unknown", or "none"

    def __str__(self) -> str:
        unknown = " (unknown effect)" if self.effect == UNKNOWN else ""
        return f"{self.key} {_short(self.a)} -> {_short(self.b)}{unknown}"


@dataclass(frozen=True)
class Stated:
    """What a config says, in one dialect."""

    values: Mapping[str, Any]  # values by dotted key, defaults filled in
    # the file's own spelling of keys that have another one there
    spelled: Mapping[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()  # keys that the file itself has a value for
    follows: frozenset[str] = frozenset()  # keys that, where a file leaves them out, follow from others
    read: frozenset[str] = frozenset()  # words of the row that read it: keys among them decide what is computed
    metadata: Mapping[str, Any] | None = None  # of a GGUF file its own keys, which may say less than a config.json
    idle: frozenset[str] = frozenset()  # keys of sizes that decide nothing that is computed


def differences(a: Stated, b: Stated) -> list[Difference]:
    """The keys in which two configs differ, those that decide the computation first."""
    read, differing = a.read | b.read, []
    for key in sorted({*a.values, *b.values}):
        x, y = (_plain(key, side.values.get(key)) for side in (a, b))
        silent = any(side.metadata is not None and key not in side.present for side in (a, b))
        silent |= (
            (a.metadata is None) != (b.metadata is None) and key in OF_GGUF and None in (x, y)
        )  # no such key there
        follows = key in a.follows | b.follows and not {key} <= a.present & b.present
        if not (silent or follows or _same(x, y)):
            key = key.removesuffix(AS_WRITTEN)
            spelled = (b if y is not None else a).spelled.get(key, key)
            differing.append(Difference(spelled, x, y, NONE if key in a.idle & b.idle else _effect(key, read)))
    differing += _of_files(a, b, read)
    return sorted(differing, key=lambda difference: (COMPUTATION, UNKNOWN, NONE).index(difference.effect))


def _of_files(a: Stated, b: Stated, read: frozenset[str]) -> Iterator[Difference]:
    """What only keys of GGUF files say: of two such files, or of one and the config of the other checkpoint."""
    if a.metadata is not None and b.metadata is not None:
        for key in sorted({*a.metadata, *b.metadata}):
            x, y = a.metadata.get(key), b.metadata.get(key)
            if not _same(x, y) and key.partition(".")[2] not in OF_GGUF.values():
                yield Difference(key, x, y, _effect(key, read))
        return
    file, config = (b, a) if a.metadata is None else (a, b)
    for key, value in sorted((file.metadata or {}).items()):
        plain_key = key.partition(".")[2]
        is_listed = plain_key == PATTERN and isinstance(value, list)  # as the list of layers, then, which is compared
        if is_listed or plain_key in OF_GGUF.values() or NOTHING_MORE.fullmatch(plain_key):
            continue
        known = _besides(plain_key, config.values)
        name, in_config = known or (key, None)
        x = _plain(name, GATES.get(value, value) if plain_key == GATING else shortest(value))
        y = _plain(name, in_config)
        is_compared = name in file.present and _same(x, _plain(name, file.values.get(name)))  # as a key of the config
        if not (is_compared or _same(x, y)):
            effect = COMPUTATION if known else _effect(name, read)
            yield Difference(config.spelled.get(name, name), *((x, y) if file is a else (y, x)), effect)


def _besides(key: str, values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first name that a config has for a GGUF file's key, and its value; of a product the key itself."""
    known: list[tuple[str, Any]] = []
    for names in BESIDES.get(key, ()):
        factors = [
            next((path for path in values if f".{path}".endswith(f".{name}")), "") for name in names.split(" * ")
        ]
        numbers = [values.get(path) for path in factors]
        if len(factors) == 1 and factors[0]:
            known.append((factors[0], numbers[0]))
        elif sizes := [number for number in numbers if isinstance(number, int)]:
            known += [(key, prod(sizes))] if len(sizes) == len(factors) else []
    return next((each for each in known if each[1] is not None), next(iter(known), None))


def stated(checkpoint: Checkpoint, row: Family) -> Stated:
    """What the config of a checkpoint says, read by its row; parts for other stacks by rows of their own."""
    config, part = checkpoint.config, part_of(checkpoint, row)
    path = next((path for path, inner in parts(config) if inner.raw is part.raw), "")
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    present: set[str] = set()
    follows: set[str] = set()
    for place, section, kind in _sections(config, path):
        before = f"{place}." if place else ""
        normal = _normal(config, row, section, kind, part if place == path else None)
        values |= {before + key: value for key, value in normal.values.items()}
        spelled |= {before + key: before + name for key, name in normal.spelled.items()}
        present |= {before + key for key in normal.present}
        follows |= {before + key for key in normal.follows}
    metadata = None
    if isinstance(checkpoint.files[0], GgufFile):
        keys = checkpoint.files[0].config
        start = f"{keys.get('general.architecture')}."
        in_config = {start + key for key in row.gguf.keys.values()} if row.gguf else set()
        metadata = {key: value for key, value in keys.items() if key.startswith(start) and key not in in_config}
        # Several model_types share one architecture in GGUF, and few of these files list their layers' types.
        present -= {"model_type"} if f"{start}{PATTERN}" in metadata else {"model_type", row.config.listed}
    before = f"{path}." if path else ""
    turns = {value for key, value in values.items() if key.startswith(before + GIVEN) and key.endswith("rope_type")}
    any_length = isinstance(row.rope, Rope) and turns <= ANY_LENGTH and not row.inputs.positions
    sizes = ("vocab_size", "n_positions") if any_length else ("vocab_size",)
    idle = {before + name for size in sizes for name in row.size_keys.get(size, ())}
    words = frozenset(re.findall(r"[a-z_]\w+", stanza_of(row)))
    idle |= {before + KV_HEADS} - {before + name for name in (*row.names, *words)}
    return Stated(values, spelled, frozenset(present), frozenset(follows), words, metadata, frozenset(idle))


def as_written(checkpoint: Checkpoint) -> Stated:
    """What the config of a checkpoint says where no row reads it: no key is known to have the value of another."""
    values = dict(_flat(checkpoint.config.raw))
    return Stated(values, present=frozenset(values))


def _sections(config: Config, chosen: str) -> Iterator[tuple[str, Config, str]]:
    """The parts of a config that have a class of their own: where they are, without parts in them, their model_type."""
    kinds = class_says(config.get("model_type"), "parts")
    inner = {path: part for path, part in parts(config) if path}
    classes = {path: str(part.get("model_type") or kinds.get(path) or "") for path, part in inner.items()}
    classes = {
        "": str(config.get("model_type") or ""),
        **{p: kind for p, kind in classes.items() if kind or p == chosen},
    }
    for path, kind in classes.items():
        section = inner[path] if path else config
        start = f"{path}." if path else ""
        nested = {p.removeprefix(start).partition(".")[0] for p in classes if p != path and p.startswith(start)}
        yield path, Config({key: value for key, value in section.items() if key not in nested}, config.file), kind


def _normal(whole: Config, row: Family, section: Config, kind: str, chosen: Config | None) -> Stated:
    """One section with its sizes, heads, layers and rotation as the row that reads it says them.

    `chosen` is the part of the config that the row was chosen for, if the section is that part.
    """
    aliases = _table()["names"].get(kind, {})
    raw = {aliases.get(key, key): value for key, value in section.items() if aliases.get(key, key) not in section}
    raw |= {key: value for key, value in section.items() if key not in raw and key not in aliases}
    spelled = {stored: key for key, stored in aliases.items() if key in section and stored not in section}
    usual = {**values_of([kind]), **usual_values(kind)}
    values = {**{key: value for key, value in usual.items() if key not in raw}, **raw}
    follows = {key for key, kinds in _table()["derived"].items() if kind in kinds.split()} | FOLLOWS
    present = {key for key, value in raw.items() if value is not None}
    for read in (row,) if chosen is not None else _rows(kind):
        try:
            config = completed_part(whole, chosen, read) if chosen is not None else _read(section, read, kind, whole)
            family = read.configured(config)
            numbers = read_config(config, family)
        except CheckpointError:  # as it stands, then
            continue
        made = {key: value for key, value in config.items() if key not in section or section[key] is not None}
        made = {aliases.get(key, key): value for key, value in made.items()}
        values = {key: value for key, value in values.items() if key not in made} | made
        for meaning, names in family.size_keys.items():
            name = next((name for name in names if name in values), names[0])
            stored = aliases.get(name, name)
            if meaning in LEAST:
                _replace(values, spelled, section, names, stored, getattr(numbers, meaning))
                present |= {stored} if present & {*names} else set()
        if isinstance(family.heads.kv_heads, tuple) and family.heads.kv_heads:
            _replace(values, spelled, section, family.heads.kv_heads, family.heads.kv_heads[0], numbers.n_kv_heads)
        if len(family.heads.head_dim) < 2:
            _replace(values, spelled, section, ("head_dim", *family.heads.head_dim), "head_dim", numbers.head_dim)
        if "n_layers" in family.size_keys:
            listed = family.config.layer_types.key if isinstance(family.config.layer_types, Every) else "layer_types"
            names = (family.config.listed, "layer_types", listed, "sliding_window_pattern")
            _replace(values, spelled, section, names, family.config.listed, [*numbers.layer_types])
        present |= {key for key in ("head_dim", family.config.listed) if key in values}
        if isinstance(family.rope, Rope):
            present |= _rotation(values, spelled, section, family.rope, config.get(GIVEN))
        break
    if kind in BY_SIGMOID:
        values.setdefault("scoring_func", "sigmoid")
    if not any(key.startswith(f"{GIVEN}.") for key in values):
        _as_stated(values, spelled, section)
    for key, (condition, wanted, implied) in IMPLIED.items():
        if values.get(condition) == wanted and values.get(key) is None:
            values[key] = implied
    return Stated(
        dict(_flat(values)),
        spelled,
        frozenset(key for key, _ in _flat(values) if _top(key) in present),
        frozenset(follows),
    )


def _read(section: Config, row: Family, kind: str, whole: Config) -> Config:
    """A section of another stack in the dialect of transformers 5."""
    written = Config(renamed(section, row, kind), section.file)
    same_meaning = row.synonyms([key for key in written if written.has(key)])
    usual = {
        key: value for key, value in {**usual_values(kind), **row.config.defaults}.items() if key not in same_meaning
    }
    values = {key: value for key, value in {**usual, **written}.items() if value is not None}
    completed = row.completed(values, section.file)
    return standardised(section, completed.raw, row.configured(completed), kind, whole)


def _rows(kind: str) -> tuple[Family, ...]:
    """The rows to read a section of another stack by, the best first."""
    return tuple(row for row in known_rows(kinds={kind}) if kind in row.types) if kind else ()


def _replace(
    values: dict[str, Any], spelled: dict[str, str], section: Config, names: tuple[str, ...], stored: str, value: Any
) -> None:
    """Put a number in the place of all the names that it may have; one that says something else stays."""
    for name in names:
        given = section.get(name)
        if given is None or given == value or name == stored or isinstance(value, list):
            values.pop(name, None)
            if given is not None and name != stored:
                spelled[stored] = name
    values.pop(stored + AS_WRITTEN, None)
    if section.get(stored) not in (None, value) and not isinstance(value, list):
        values[stored + AS_WRITTEN] = section[stored]
    values[stored] = value


def _rotation(
    values: dict[str, Any], spelled: dict[str, str], section: Config, rope: Rope, parameters: Any
) -> set[str]:
    """Put the rotation in the place of all that a config says of it; the keys that it has."""
    local = rope.local[0] if rope.local else ""
    names = {rope.theta_key, rope.fraction_key, rope.width_key, local, "rope_theta", "rotary_emb_base"}
    for key in {*names, "partial_rotary_factor", SCALING, GIVEN, TRAINED} - {""}:
        if key != TRAINED or isinstance(parameters, Mapping):
            values.pop(key, None)
    flat = {key: value for key, value in _flat({GIVEN: parameters or {}}) if key.rpartition(".")[2] != "type"}
    tops = {"rope_theta": rope.theta_key or "rope_theta", "partial_rotary_factor": rope.fraction_key}
    for key in flat:
        last = key.rpartition(".")[2]
        if tops.get(last) in section:
            spelled[key] = tops[last]
        elif SCALING in section and isinstance(section[SCALING], Mapping):
            spelled[key] = f"{SCALING}.{last}"
    values |= flat
    return {*flat}


def _as_stated(values: dict[str, Any], spelled: dict[str, str], section: Config) -> None:
    """The words for rotation in one form where no row says what they mean."""
    given = values.pop(GIVEN, None) or {}
    scaling = values.pop(SCALING, None) or {}
    if not (isinstance(given, Mapping) and isinstance(scaling, Mapping)):
        values |= {GIVEN: given, SCALING: scaling}
        return
    theta = {"rope_theta": values.pop("rope_theta")} if "rope_theta" in values else {}
    made = {f"{GIVEN}.{key}": value for key, value in _flat({**theta, **given, **scaling})}
    spelled |= {f"{GIVEN}.{key}": key for key in theta if key in section}
    values |= {key: value for key, value in made.items() if value not in PLAIN_TURNS}


def usual_values(kind: str) -> dict[str, Any]:
    """What the class of a model_type takes for the keys that a config leaves out."""
    values = _table()["values"].items()
    return {key: json.loads(text) for key, texts in values for text, kinds in texts.items() if kind in kinds.split()}


@lru_cache(None)
def _table() -> dict[str, Any]:
    return read_json(FILE)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and "__float__" not in value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + str(key), value


def _top(key: str) -> str:
    return key if key.startswith(f"{GIVEN}.") else key.partition(".")[0]


def _plain(key: str, value: Any) -> Any:
    """A value, or None where it means the same as none."""
    return None if value in (None, False, {}, [], NEUTRAL.get(key.rpartition(".")[2])) else value


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, float) and isinstance(y, float) and isclose(x, y, rel_tol=FLOAT32):
        return True  # of a GGUF file, whose numbers transformers writes with every digit
    return bool(x == y) or str(x) == str(y)  # NaN is NaN


def _effect(key: str, read: frozenset[str]) -> str:
    """What is known of a key's effect on what a trained model computes."""
    words = key.split(".")
    if not STORAGE.isdisjoint(words):
        return NONE
    if any(word in read for word in words[-1:]):
        return COMPUTATION
    if any(NO_EFFECT.fullmatch(".".join(words[i:])) for i in range(len(words))):
        return NONE
    return COMPUTATION if KNOWN.fullmatch(words[-1]) or words[0] == GIVEN else UNKNOWN


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
