"""The computation that two checkpoints' configs describe, compared key by key.

Both configs are read by their rows first, so that the dialects of transformers 4 and 5, a GGUF
file's metadata and what is left out mean what they mean to transformers. Any key that differs then
counts, unless it is known to have no effect on what a trained model computes: an unknown key may
decide anything.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isclose, prod
from pathlib import Path
from typing import Any, NamedTuple, Self

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import LARGEST, Config, read_json
from weightscope.checkpoint.gguf import GgufFile
from weightscope.core.errors import CheckpointError
from weightscope.model.config.alike import computed_by, differs_for_sure
from weightscope.model.config.config import ModelConfig, all_full, class_says, values_of
from weightscope.model.config.dialects import GIVEN, SCALING, TRAINED, settings
from weightscope.model.config.effects import (
    COMPUTATION,
    EFFECTS,
    HEAD,
    NONE,
    UNKNOWN,
    Reader,
    effect_of,
    tables,
    values_by_type,
)
from weightscope.model.config.reading import part_of, parts
from weightscope.model.config.rope import GridRope, Rope
from weightscope.model.config.rules import (
    always,
    global_sizes,
    is_rotated,
    listed,
    windowed,
    windowed_if_any,
    windowed_or_leading,
    windows_without_rotation,
)
from weightscope.model.rows.family import Family
from weightscope.model.rows.gguf import KEYS as OF_GGUF
from weightscope.model.rows.gguf import READ_BY, shortest
from weightscope.model.rows.stanzas import stanza_of
from weightscope.model.rows.table import known_rows

# Values that mean the same as no such key; versions of transformers leave them out or write null.
NEUTRAL = {"position_embedding_type": "absolute", "sliding_window": 0, "partial_rotary_factor": 1.0}
ON = {"is_causal", "truncate"}  # keys that are on where a config leaves them out, in any class
# Suffix of a key whose value the row takes from elsewhere; transformers' code may read it.
AS_WRITTEN = " as written"
# Suffix of a key that only transformers 4 reads, as the file says it in another way too.
OLDER = " for transformers 4"
ROTARY = {GIVEN, SCALING, "rope_theta", "partial_rotary_factor", "rotary_emb_base"}
PLAIN_TURNS = ("default", "axial")  # kinds of rotation that nothing scales
# Values that transformers takes for an empty key by another key: key -> (other key, its value,
# value taken).
IMPLIED = {"num_ln_in_parallel_attn": ("new_decoder_architecture", True, 2)}
FOLLOWS = {"qk_head_dim", "q_head_dim", "head_dim"}  # keys computed from others wherever they are
# Keys that follow from others where they are left out, in a way that neither a row nor a tensor's
# shape shows.
UNTOLD = {
    "activation_sparsity_pattern",
    "attention_multiplier",
    "kv_source_layers",
    "layer_rope_theta",
    "layer_types",
    "no_rope_layers",
    "rope_scaling_layers",
    "window_block_indexes",
}
WINDOW, GATE = "sliding_window", "use_sliding_window"
TYPES = "layer_types"
OF_WINDOWS = (WINDOW, GATE, TYPES)
LISTED = ("layer_types", "layers_block_type", "sliding_window_pattern")
PATTERN_OF_BLOCKS = "hybrid_override_pattern"  # Nemotron-H's letters for layers
LIKE = {"mamba": "linear_attention", "attention": "full_attention"}  # types of layers by one name
# Keys that only decide the layers' types.
OF_TYPES = {
    GATE,
    "max_window_layers",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "full_attention_interval",
    "global_attn_every_n_layers",
}
# Keys that the code sets or ignores where another is on.
SHADOWED = {
    "decoder_vocab_size": "share_encoder_decoder_embeddings",
    "is_decoder": "is_encoder_decoder",
}
BY_LAYER = "per_layer_config"
KV_HEADS = "num_key_value_heads"  # read by no code where the row does not read it
GATING = "expert_gating_func"
LEADING, OF_NETWORKS = "leading_dense_block_count", "mlp_layer_types"
# Keys of a GGUF file besides sizes -> names in configs; the first present counts. A name may be a
# product of names.
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
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "moe_num_shared_experts * moe_intermediate_size",
        "num_shared_experts * moe_intermediate_size",
    ),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "route_scale",
        "moe_router_scaling_factor",
    ),
    "expert_weights_norm": ("norm_topk_prob", "route_norm", "norm_expert_weight"),
    GATING: ("score_function", "scoring_func", "score_func", "moe_router_activation_func"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    LEADING: (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_start_index",
    ),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "nextn_predict_layers": ("num_nextn_predict_layers",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size", "state_size"),
    "ssm.group_count": ("mamba_n_groups", "n_groups"),
    "ssm.inner_size": (
        "mamba_expand * hidden_size",
        "linear_num_value_heads * linear_value_head_dim",
        "mamba_num_heads * mamba_head_dim",
        "num_heads * head_dim",
        "intermediate_size",
    ),
    "ssm.time_step_rank": (
        "mamba_dt_rank",
        "mamba_n_heads",
        "mamba_num_heads",
        "num_heads",
        "time_step_rank",
    ),
    "kda.head_dim": ("linear_head_dim",),
}
# A GGUF file's number -> scores of experts.
GATES = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
# Types whose code scores experts by the sigmoid without a key for it.
BY_SIGMOID = ("glm4_moe", "glm4_moe_lite", "hy_v4", "laguna", "lfm2_moe")
NORMED = ("step3p5",)  # types whose code divides the scores of chosen experts by their sum
PATTERN = "attention.sliding_window_pattern"  # a GGUF file's key of the layers with a window
# Keys of a GGUF file that the config is made from, that tensors' shapes show, or that do not
# concern the computation.
NOTHING_MORE = re.compile(
    r"rope\.(dimension_(count|sections)|scaling\.(type|factor|finetuned|attn_factor|original_context_length"
    r"|yarn_beta_(fast|slow)))|attention\.((key|value)_length_mla|value_length|max_alibi_bias"
    r"|clamp_kqv|causal|recurrent_layers)|use_parallel_residual|vocab_size|pooling_type|tensor_data_layout",
    re.ASCII,
)
# Scalings of rotations that do not depend on the longest text. A tuned model computes the same with
# another limit of its texts, and with rows added to or cut from its vocabulary, which the
# comparison of tensors shows.
ANY_LENGTH = {"default", "linear", "llama3"}
# Sizes, as `ModelConfig` names them.
LEAST = {"n_layers", "d_model", "n_heads", "n_positions", "vocab_size", "norm_eps"}
FLOAT32 = 2.0**-24  # relative change by rounding to float32, which models and GGUF files use


SETS = ("present", "follows", "read", "idle")  # fields of `Stated` that are sets of keys


class Difference(NamedTuple):
    """A key with different values in two configs."""

    key: str  # as the second config spells it, nested ones dotted
    a: Any  # None where it has no value
    b: Any
    effect: str  # "computation", "unknown", or "none"
    reader: str = ""  # the only one that reads it, if that is an older one

    def __str__(self) -> str:
        unknown = " (unknown effect)" if self.effect == UNKNOWN else ""
        return f"{self.key} {_short(self.a)} -> {_short(self.b)}{unknown}"

    @property
    def named(self) -> str:
        """The key, with its reader if that is an older one."""
        return f"{self.key} (read by {self.reader} alone)" if self.reader else self.key


@dataclass(frozen=True)
class Stated:
    """A config's values, in one dialect."""

    values: Mapping[str, Any]  # values by dotted key, defaults filled in
    # key -> the file's own spelling, where it differs
    spelled: Mapping[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()  # keys that the file itself has a value for
    follows: frozenset[str] = frozenset()  # keys that follow from others where they are left out
    read: frozenset[str] = frozenset()  # words of the row: keys among them decide the computation
    # a GGUF file's own keys, which may say less than a config.json
    metadata: Mapping[str, Any] | None = None
    # section's place -> class that reads it
    readers: Mapping[str, Reader] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()  # keys of sizes that decide nothing that is computed
    # list -> keys that it is made of, which decide nothing where the lists are the same
    makes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    kind: str = ""  # the key of the model_type that chose the row
    computes: Family | None = None  # the row's computation, where it describes all of a layer

    def as_json(self) -> dict[str, Any]:
        """Everything but the row's computation, for a file."""
        sets = {name: sorted(getattr(self, name)) for name in SETS}
        makes = {key: sorted(names) for key, names in self.makes.items()}
        held = {name: getattr(self, name) for name in ("values", "spelled", "metadata", "kind")}
        readers = {place: [*reader] for place, reader in self.readers.items()}
        return held | sets | {"makes": makes, "readers": readers}

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Read what `as_json` made; a TypeError, KeyError or AttributeError if it did not."""
        sets: Any = {name: frozenset(value[name]) for name in SETS}
        makes = {key: frozenset(names) for key, names in value["makes"].items()}
        readers = {place: Reader(*reader) for place, reader in value["readers"].items()}
        held: Any = {name: value[name] for name in ("values", "spelled", "metadata", "kind")}
        texts = [held["kind"], *held["spelled"].values(), *(each.kind for each in readers.values())]
        words = frozenset().union(*sets.values(), *makes.values())
        if not {*map(type, texts), *map(type, words)} <= {str}:
            raise TypeError("settings have texts for names")
        held["values"].items(), ({} if held["metadata"] is None else held["metadata"]).items()
        return cls(**held, **sets, makes=makes, readers=readers)


def differences(a: Stated, b: Stated) -> list[Difference]:
    """Keys in which two configs differ, those that decide the computation first."""
    read, differing = a.read | b.read, []
    made = (key for key in a.makes if key in b.makes and a.values.get(key) == b.values.get(key))
    idle = (a.idle & b.idle).union(*(a.makes[key] | b.makes[key] for key in made))
    for key in sorted({*a.values, *b.values}):
        x, y = (_plain(key, side.values.get(key)) for side in (a, b))
        silent = any(side.metadata is not None and key not in side.present for side in (a, b))
        if (a.metadata is None) != (b.metadata is None) and key in OF_GGUF and None in (x, y):
            silent = True  # one of the files has no such key
        follows = key in a.follows | b.follows and not {key} <= a.present & b.present
        is_untold = follows and key.rpartition(".")[2] in UNTOLD
        if silent or (follows and not is_untold) or _same(x, y):
            continue
        if key.endswith(OLDER):
            differing.append(Difference(key.removesuffix(OLDER), x, y, NONE, "transformers 4"))
            continue
        key = key.removesuffix(AS_WRITTEN)
        spelled = (b if y is not None else a).spelled.get(key, key)
        sides = [side for side, value in ((a, x), (b, y)) if value is not None]
        effects = [effect_of(key, read, side.readers) for side in sides]
        if is_untold:
            effects = [UNKNOWN]
        elif key.rpartition(".")[2] == "model_type":
            effects = [_of_types(a, b) if key == a.kind == b.kind else UNKNOWN]
        effect = NONE if key in idle else min(effects, key=EFFECTS.index)
        if key.rpartition(".")[2] == TYPES and effect == NONE and key not in idle:
            effect = UNKNOWN  # transformers may choose another class by it
        if key.rpartition(".")[2] in OF_WINDOWS and effect == COMPUTATION:
            effect = UNKNOWN if _exceeds_positions(key, (a, b)) else effect
        if a.kind == b.kind and None in (x, y) and a.values.get(a.kind) != b.values.get(b.kind):
            effect = _of_lacking(key, effect, a if x is None else b)
        differing.append(Difference(spelled, x, y, effect))
    differing += _of_files(a, b, read)
    return sorted(differing, key=lambda difference: EFFECTS.index(difference.effect))


def _of_types(a: Stated, b: Stated) -> str:
    """The effect of another model_type: none if both rows compute the same of the same tensors.

    Rows do not say who sees whom: code of others than transformers may have another mask (LLaDA).
    """
    place = a.kind.rpartition("model_type")[0].removesuffix(".")
    known = all(side.readers.get(place, Reader()).is_known for side in (a, b))
    if a.computes is None or b.computes is None or not known:
        return UNKNOWN
    if a.computes == b.computes:
        return NONE
    return COMPUTATION if differs_for_sure(a.computes, b.computes) else UNKNOWN


@lru_cache(None)
def windowed_types(how: str) -> frozenset[str]:
    """Types whose code in transformers 5 has windows in the layers of that type, or in "all"."""
    by_reader: Any = read_json(Path(__file__).with_name("readers.json"))["transformers 5"]
    return frozenset(by_reader["windows"][how].split())


def _exceeds_positions(key: str, sides: tuple[Stated, Stated]) -> bool:
    """True if no window is shorter than the longest text that a config says.

    Types of layers count all the same where they decide how positions turn.
    """
    if key.rpartition(".")[2] == TYPES and any(map(_turns_by_type, sides)):
        return False
    place = key.removesuffix(key.rpartition(".")[2])
    longest = [side.values.get(f"{place}max_position_embeddings") for side in sides]
    windows = [side.values.get(place + WINDOW) or LARGEST for side in sides]
    known = [each for each in (*longest, *windows) if isinstance(each, int)]
    return len(known) == 4 and min(known[2:]) >= max(known[:2])


def _turns_by_type(side: Stated) -> bool:
    """True unless all layers are known to rotate alike."""
    rope = side.computes.positions.rope if side.computes else None
    is_alike = isinstance(rope, Rope) and rope.rotates is always
    return not is_alike or any(re.search(r"sliding_attention|local", key) for key in side.values)


def _of_lacking(key: str, effect: str, lacking: Stated) -> str:
    """The effect of a key that one config lacks: not known where its class has no such key.

    It may do what a value of the other's key says: one expert of one, a factor of 1.
    """
    name = key.rpartition(".")[2]
    reader = lacking.readers.get(key.rpartition(".")[0], Reader())
    is_foreign = reader.is_known and not reader.takes(name) and name not in lacking.read
    return UNKNOWN if is_foreign and effect == COMPUTATION and name != WINDOW else effect


def _of_files(a: Stated, b: Stated, read: frozenset[str]) -> Iterator[Difference]:
    """Differences in keys of GGUF files: of two files, or of a file and another's config."""
    if a.metadata is not None and b.metadata is not None:
        for key in sorted({*a.metadata, *b.metadata}):
            x, y = a.metadata.get(key), b.metadata.get(key)
            if not _same(x, y) and key.partition(".")[2] not in OF_GGUF.values():
                yield Difference(key, x, y, effect_of(key, read, {}))
        return
    file, config = (b, a) if a.metadata is None else (a, b)
    named = {key.partition(".")[2] for key in file.metadata or ()} & BESIDES.keys()
    besides = {key: _besides(key, config.values) for key in named}
    for key, value in sorted((file.metadata or {}).items()):
        plain_key = key.partition(".")[2]
        # compared as the list of layers then
        is_listed = plain_key == PATTERN and isinstance(value, list)
        if is_listed or plain_key in OF_GGUF.values() or NOTHING_MORE.fullmatch(plain_key):
            continue
        known = besides.get(plain_key)
        name, in_config = known or (key, None)
        x = _plain(name, _score(value) if plain_key == GATING else shortest(value))
        y = _plain(name, in_config)
        # compared as a key of the config
        is_compared = name in file.present and _same(x, _plain(name, file.values.get(name)))
        if not (is_compared or _same(x, y)):
            effect = COMPUTATION if known else effect_of(name, read, {})
            first, second = (x, y) if file is a else (y, x)
            yield Difference(config.spelled.get(name, name), first, second, effect)


def _score(value: Any) -> Any:
    """The function that scores experts, by a GGUF file's number."""
    return GATES.get(value, value) if isinstance(value, int) else value


def _besides(key: str, values: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first name in a config of a GGUF file's key, and its value; for a product the key."""
    known: list[tuple[str, Any]] = []
    by_layer = next((path for path in values if f".{path}".endswith(f".{OF_NETWORKS}")), "")
    types = values.get(by_layer) if key == LEADING else None
    if isinstance(types, list) and "dense" not in types[(dense := types.count("dense")) :]:
        return by_layer, dense
    for names in BESIDES.get(key, ()):
        factors = [
            next((path for path in values if f".{path}".endswith(f".{name}")), "")
            for name in names.split(" * ")
        ]
        numbers = [values.get(path) for path in factors]
        if len(factors) == 1 and factors[0]:
            known.append((factors[0], numbers[0]))
        elif all(isinstance(number, int) and abs(number) <= LARGEST for number in numbers):
            known += [(key, prod(numbers))]
    return next((each for each in known if each[1] is not None), next(iter(known), None))


def stated(checkpoint: Checkpoint, row: Family) -> Stated:
    """A checkpoint's config, read by its row; parts for other stacks by rows of their own."""
    config, part = checkpoint.config, part_of(checkpoint, row)
    path = next((path for path, inner in parts(config) if inner.raw is part.raw), "")
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    present: set[str] = set()
    follows: set[str] = set()
    makes: dict[str, frozenset[str]] = {}
    idle: set[str] = set()
    projected = any("projection" in name for name in checkpoint)
    for place, section, kind in _sections(config, path):
        before = f"{place}." if place else ""
        normal = _normal(config, row, section, kind, part if place == path else None)
        values |= {before + key: value for key, value in normal.values.items()}
        spelled |= {before + key: before + name for key, name in normal.spelled.items()}
        present |= {before + key for key in normal.present}
        follows |= {before + key for key in normal.follows}
        idle |= {before + key for key in normal.idle}
        makes |= {
            before + key: frozenset(before + name for name in names)
            for key, names in normal.makes.items()
        }
        # a key of the whole, or of no projection
        if (place and "projection_dim" in config) or not projected:
            idle.add(f"{before}projection_dim")
    metadata = None
    if isinstance(checkpoint.files[0], GgufFile):
        keys = checkpoint.files[0].config
        start = f"{keys.get('general.architecture')}."
        of_row = (*row.gguf.keys.values(), *READ_BY.get(row.gguf.config, ())) if row.gguf else ()
        in_config = {start + key for key in of_row}
        metadata = {
            key: value
            for key, value in keys.items()
            if key.startswith(start) and key not in in_config
        }
        # Several model_types share one architecture in GGUF, and few of these files list their
        # layers' types.
        present.discard("model_type")
        if f"{start}{PATTERN}" not in metadata:
            present.discard(row.config.listed)
    before = f"{path}." if path else ""
    turns = {
        value
        for key, value in values.items()
        if key.startswith(before + GIVEN) and key.endswith("rope_type")
    }
    yarns = [
        key.removesuffix("rope_type")
        for key, value in values.items()
        if key.endswith("rope_type") and value == "yarn"
    ]
    if all(values.get(each + TRAINED) and values.get(f"{each}factor") for each in yarns):
        turns -= {"yarn"}
    try:
        read = settings(config, part, row).family
    except CheckpointError:
        read = row
    any_length = (
        not isinstance(read.rope, GridRope) and turns <= ANY_LENGTH and not read.inputs.positions
    )
    sizes = ("vocab_size", "n_positions") if any_length else ("vocab_size",)
    idle |= {before + name for size in sizes for name in row.size_keys.get(size, ())}
    words = frozenset(re.findall(r"[a-z_]\w+", stanza_of(row)))
    idle |= {before + KV_HEADS} - {before + name for name in (*row.names, *words)}
    if turns <= {"default"}:
        idle.add(before + TRAINED)
    return Stated(
        values,
        spelled,
        present=frozenset(present),
        follows=frozenset(follows),
        read=words,
        metadata=metadata,
        readers=_readers(config, path),
        idle=frozenset(idle),
        makes=makes,
        kind=f"{before}model_type",
        computes=computed_by(read),
    )


def as_written(checkpoint: Checkpoint) -> Stated:
    """A checkpoint's config where no row reads it: no key is known to have another's value."""
    values = dict(_flat(checkpoint.config.raw))
    return Stated(values, present=frozenset(values), readers=_readers(checkpoint.config, ""))


def _readers(config: Config, chosen: str) -> dict[str, Reader]:
    """The classes of a config's sections, by their places."""
    names = config.get("architectures")
    has_head = isinstance(names, list) and any(HEAD.fullmatch(str(name)) for name in names)
    rows = {kind: _rows(kind) for _, _, kind in _sections(config, chosen)}
    turning = {kind for kind, known in rows.items() if not known or any(row.rope for row in known)}
    return {
        place: Reader(kind, has_head, kind in turning)
        for place, _, kind in _sections(config, chosen)
    }


def _sections(config: Config, chosen: str) -> Iterator[tuple[str, Config, str]]:
    """Sections of a config with a class of their own: place, values, model_type.

    A section's values leave out the sections within it.
    """
    kinds = class_says(config.get("model_type"), "parts")
    inner = {path: part for path, part in parts(config) if path}
    classes = {
        path: str(part.get("model_type") or kinds.get(path) or "") for path, part in inner.items()
    }
    classes = {
        "": str(config.get("model_type") or ""),
        **{p: kind for p, kind in classes.items() if kind or p == chosen},
    }
    for path, kind in classes.items():
        section = inner[path] if path else config
        start = f"{path}." if path else ""
        nested = {
            p.removeprefix(start).partition(".")[0]
            for p in classes
            if p != path and p.startswith(start)
        }
        values = {key: value for key, value in section.items() if key not in nested}
        yield path, Config(values, config.file), kind


def _normal(root: Config, row: Family, section: Config, kind: str, chosen: Config | None) -> Stated:
    """One section with its sizes, heads, layers and rotation as its row reads them.

    `chosen` is the part of the config that the row was chosen for, if the section is that part.
    """
    aliases, nulls = tables()["names"].get(kind, {}), tables()["nulls"]
    given = {  # a null that means the default is as if left out
        key: value
        for key, value in section.items()
        if value is not None or kind not in nulls.get(key, ())
    }
    section = Config(given, section.file)
    raw = {
        aliases.get(key, key): value
        for key, value in section.items()
        if aliases.get(key, key) not in section
    }
    raw |= {key: value for key, value in section.items() if key not in raw and key not in aliases}
    spelled = {
        stored: key for key, stored in aliases.items() if key in section and stored not in section
    }
    usual = {**values_of([kind]), **usual_values(kind)}
    values = {**{key: value for key, value in usual.items() if key not in raw}, **raw}
    follows = {key for key, kinds in tables()["derived"].items() if kind in kinds} | FOLLOWS
    present = {key for key, value in raw.items() if value is not None}
    makes: dict[str, frozenset[str]] = {}
    for read in (row,) if chosen is not None else _rows(kind):
        try:
            if chosen is not None:
                meant = settings(root, chosen, read)
            else:
                meant = settings(root, section, read, kind, usual_values(kind))
            config, family, numbers = meant.values, meant.family, meant.numbers
        except CheckpointError:  # as it stands, then
            continue
        made = {
            key: value
            for key, value in config.items()
            if key not in section or section[key] is not None
        }
        made = {aliases.get(key, key): value for key, value in made.items()}
        values = {key: value for key, value in values.items() if key not in made} | made
        for meaning, names in family.size_keys.items():
            if meaning in LEAST:
                name = next((name for name in names if name in values), names[0])
                stored = aliases.get(name, name)
                _replace(values, spelled, section, names, stored, getattr(numbers, meaning))
                present |= {stored} if present & {*names} else set()
        if isinstance(family.heads.kv_heads, tuple) and family.heads.kv_heads:
            _replace(
                values,
                spelled,
                section,
                family.heads.kv_heads,
                family.heads.kv_heads[0],
                numbers.n_kv_heads,
            )
        if len(family.heads.head_dim) < 2:
            _replace(
                values,
                spelled,
                section,
                ("head_dim", *family.heads.head_dim),
                "head_dim",
                numbers.head_dim,
            )
        if "n_layers" in family.size_keys:
            period = getattr(family.config.layer_types, "key", PATTERN_OF_BLOCKS)
            names = (family.config.listed, str(period), *LISTED)
            types = [LIKE.get(kind, kind) for kind in numbers.layer_types]
            _replace(values, spelled, section, names, family.config.listed, types)
            makes |= _by_layer(values, numbers, family, kind)
            if kind in windowed_types("all") and section.get(TYPES):
                values[TYPES + AS_WRITTEN] = section[TYPES]  # its own class does not ask for types
        present |= {key for key in ("head_dim", family.config.listed, *makes) if key in values}
        if isinstance(family.rope, Rope):
            present |= _rotation(values, spelled, section, family.rope, config.get(GIVEN))
        elif family.rope is None and read.rope is not None:  # this config turns it off
            values = {key: value for key, value in values.items() if key not in ROTARY}
        break
    if kind in BY_SIGMOID:
        values.setdefault("scoring_func", "sigmoid")
    if kind in NORMED:
        values.setdefault("norm_topk_prob", True)
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
        idle=frozenset(key for key, condition in SHADOWED.items() if values.get(condition)),
        makes=makes,
    )


def _by_layer(
    values: dict[str, Any], numbers: ModelConfig, family: Family, kind: str
) -> dict[str, frozenset[str]]:
    """Replace keys by the lists by layer made from them; drop a window that no layer has.

    Returns list -> keys that serve nothing else.
    """
    made = {family.config.listed: frozenset(OF_TYPES)}
    rope = family.rope
    turning = rope.rotates if isinstance(rope, Rope) else None
    by_type = family.config.layer_types is not all_full or kind in tables()["derived"].get(
        "layer_types", ()
    )
    gated = (
        kind in tables()["values"].get(GATE, ())
        and family.config.layer_types is not windows_without_rotation
    )
    is_off = gated and values.get(GATE) is not True
    is_seen = "sliding_attention" in numbers.layer_types and not is_off
    is_unused = is_off or (not is_seen and kind in windowed_types("by type"))
    turns = turning in (windowed, windowed_if_any, windowed_or_leading)
    if by_type and not is_seen and is_unused and not turns:
        values.pop(WINDOW, None)
    if family.config.sizes is global_sizes:
        sizes = [dict(global_sizes(numbers, i)) for i in range(numbers.n_layers)]
        values[BY_LAYER] = sizes if any(sizes) else None
        made[BY_LAYER] = frozenset({"global_head_dim", "num_global_key_value_heads"})
    if turning is listed:
        values["no_rope_layers"] = [int(is_rotated(numbers, i)) for i in range(numbers.n_layers)]
        made["no_rope_layers"] = frozenset({"no_rope_layer_interval"})
    if isinstance(rope, Rope) and rope.thetas:
        base = numbers.inside(GIVEN).get("rope_theta")
        values.setdefault(rope.thetas, [base] * numbers.n_layers)
        made[rope.thetas] = frozenset({f"{GIVEN}.rope_theta"})
    return made


def _rows(kind: str) -> tuple[Family, ...]:
    """Rows to read a section of another stack by, the best first."""
    return tuple(row for row in known_rows(kinds={kind}) if kind in row.types) if kind else ()


def _replace(
    values: dict[str, Any],
    spelled: dict[str, str],
    section: Config,
    names: tuple[str, ...],
    stored: str,
    value: Any,
) -> None:
    """Put a number in place of all the names that it may have; keep one that differs."""
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
    """Put the rotation in place of all that a config says of it; return its keys."""
    local = rope.local[0] if rope.local else ""
    older = _for_older(section, rope, parameters)
    names = {
        rope.theta_key,
        rope.fraction_key,
        rope.width_key,
        local,
        "rope_theta",
        "rotary_emb_base",
    }
    for key in {*names, "partial_rotary_factor", SCALING, GIVEN, TRAINED} - {""}:
        if key != TRAINED or isinstance(parameters, Mapping):
            values.pop(key, None)
    flat = {
        key: value
        for key, value in _flat({GIVEN: parameters or {}})
        if key.rpartition(".")[2] != "type"
    }
    if rope.fraction is None and not rope.dims_key:  # whole heads turn, unless something scales
        for key in [key for key in flat if key.endswith("partial_rotary_factor")]:
            if flat.get(key.replace("partial_rotary_factor", "rope_type"), "default") == "default":
                values["partial_rotary_factor"] = flat.pop(key)
    tops = {
        "rope_theta": rope.theta_key or "rope_theta",
        "partial_rotary_factor": rope.fraction_key,
    }
    for key in flat:
        last = key.rpartition(".")[2]
        if tops.get(last) in section:
            spelled[key] = tops[last]
        elif SCALING in section and isinstance(section[SCALING], Mapping):
            spelled[key] = f"{SCALING}.{last}"
    values |= flat | older
    return {*flat}


def _for_older(section: Config, rope: Rope, parameters: Any) -> dict[str, Any]:
    """Rotary keys at the top of a config that differ from its rope_parameters."""
    given = isinstance(section.get(GIVEN), Mapping) and isinstance(parameters, Mapping)
    if not given or any(isinstance(entry, Mapping) for entry in parameters.values()):
        return {}
    read_inside = {rope.theta_key: "rope_theta", rope.fraction_key: "partial_rotary_factor"}
    unread = {
        key
        for key, name in read_inside.items()
        if section.get(key) not in (None, parameters.get(name))
    }
    return {key + OLDER: section[key] for key in unread}


def _as_stated(values: dict[str, Any], spelled: dict[str, str], section: Config) -> None:
    """Put words for rotation into one form where no row says what they mean."""
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
    """Values that the class of a model_type takes for keys left out."""
    return values_by_type(tables()["usual"], kind)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and "__float__" not in value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + str(key), value


def _top(key: str) -> str:
    return key if key.startswith(f"{GIVEN}.") else key.partition(".")[0]


def _plain(key: str, value: Any) -> Any:
    """A value, or None where it means the same as none."""
    if key.rpartition(".")[2] in ON:
        return None if value is True else value
    return None if value in (None, False, {}, [], NEUTRAL.get(key.rpartition(".")[2])) else value


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, float) and isinstance(y, float) and isclose(x, y, rel_tol=FLOAT32):
        return True  # transformers writes a GGUF file's numbers with every digit
    return bool(x == y) or str(x) == str(y)  # NaN is NaN


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
