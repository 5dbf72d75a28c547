"""Shrink a config to a tiny model's: the name of a key says which size it is.

Keys that are not sizes stay unchanged, so the tiny model has the norms, biases, scales, rotations
and kinds of layers of its architecture. Limits (windows, original contexts, buckets) become shorter
than the texts, so that positions beyond them are tested too.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib.util import find_spec
from itertools import count
from operator import getitem
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adopting.tiny_models import FILLED, PLANS, Plan, Size
from weightscope.core.files import regular_file

MOST_LAYERS = 6


@cache
def exceptions() -> dict[str, dict[str, dict[str, Any]]]:
    """The table of types that need more than their keys' names say."""
    with regular_file(Path(__file__).parent / "exceptions.toml") as file:
        return tomllib.load(file)


@dataclass(frozen=True)
class Part:
    """One section of a config (text, vision, ...) while it is shrunk; each has its own heads and
    widths.
    """

    values: Mapping[str, Any]
    size: Size
    plan: Plan

    @property
    def latent(self) -> bool:
        return bool(self.values.get("kv_lora_rank"))

    @property
    def width(self) -> int:
        heads = self.values.get("num_heads", self.values.get("num_attention_heads"))
        # a pyramid: its width doubles with its heads
        if "depths" in self.values and isinstance(heads, list):
            return 8 * int(heads[0] if isinstance(heads[0], int) else 1)
        sized = ("head_dim", "kv_lora_rank", "d_kv", "kv_channels")
        if self.plan.free_width and any(map(self.values.get, sized)):
            return self.size.free
        return self.size.heads * self.plain_head_dim

    @property
    def plain_head_dim(self) -> int:
        return self.own_head_dim if self.plan.own_heads else self.size.head_dim

    @property
    def own_head_dim(self) -> int:
        """A head's width as the architecture has it."""
        if named := self.values.get("head_dim"):
            return named
        keys = ("hidden_size", "d_model", "n_embd"), ("num_attention_heads", "num_heads")
        width, heads = (
            next((self.values[key] for key in names if key in self.values), None) for names in keys
        )
        return width // heads if isinstance(width, int) and isinstance(heads, int) else 64

    @property
    def groups(self) -> int:
        return self.size.groups if self.plan.grouped and not self.latent else self.size.heads

    @property
    def head_dim(self) -> int:
        """A head's width; for latent attention, the width that the key means."""
        s, v = self.size, self.values
        if not self.latent:
            return self.plain_head_dim
        widths = {v.get("qk_rope_head_dim"): s.rope, v.get("v_head_dim"): s.value}
        if v.get("qk_rope_head_dim") and v.get("qk_nope_head_dim"):
            widths = {v["qk_rope_head_dim"] + v["qk_nope_head_dim"]: s.rope + s.nope} | widths
        return widths.get(v.get("head_dim"), s.rope + s.nope)

    @property
    def turning(self) -> int:
        """Pairs that a rotation turns."""
        rope = self.values.get("rope_parameters")
        rope = rope if isinstance(rope, Mapping) else {}
        share = rope.get("partial_rotary_factor") or self.values.get("partial_rotary_factor") or 1.0
        return int((self.size.rope if self.latent else self.head_dim * share) // 2)


# Meanings by name: the first pattern that fits a key wins. A key that fits none stays as it is.
INTEGERS: tuple[tuple[str, Callable[[Part, int], int]], ...] = (
    (
        r"chunk_size_feed_forward|.*dropout.*|num_channels|in_channels|.*_token_ids?"
        r"|.*_token_index|type_vocab_size|.*conv_kernel.*|.*kernel_size|.*stride.*|num_labels"
        r"|.*num_conv_pos_embedding_groups",
        lambda p, v: v,
    ),
    (r"qk_rope_head_dim", lambda p, v: p.size.rope if v else 0),
    (r"qk_nope_head_dim", lambda p, v: p.size.nope),
    (r"qk_head_dim", lambda p, v: p.size.rope + p.size.nope),
    (r"v_head_dim", lambda p, v: p.size.value),
    (r"kv_lora_rank", lambda p, v: p.size.kv_rank),
    (r"q_lora_rank", lambda p, v: p.size.q_rank),
    (r"adapter_input_size", lambda p, v: p.width),
    (r"rotary_dim", lambda p, v: 2 * (p.head_dim // 4)),
    (r"index_head_dim", lambda p, v: p.size.head_dim),
    (r"index_kpool", lambda p, v: 2),
    (r"index_topk", lambda p, v: p.size.window),
    (r"mamba_n_heads|mamba_num_heads", lambda p, v: 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", lambda p, v: p.width // 2),
    (r"mamba_d_ssm", lambda p, v: 2 * p.width),
    (r"mamba_d_state|ssm_state_size|mamba_state_dim|state_size", lambda p, v: 8),
    (r"mamba_dt_rank|time_step_rank", lambda p, v: 4),
    (r"linear_(key|value)_head_dim", lambda p, v: 8),
    (r"linear_num_key_heads", lambda p, v: 2),
    (r"linear_num_value_heads", lambda p, v: 4),
    (r"codebook_size", lambda p, v: min(v, 64)),
    (r".*vocab_size(_per_layer_input)?|.*vocabulary_size|n_tokens", lambda p, v: p.size.vocabulary),
    (r"hidden_size_per_layer_input", lambda p, v: 12),
    (r".*(head_dim|d_kv|d_head|kv_channels|head_size)", lambda p, v: p.head_dim),
    (
        r".*(num_key_value_heads|n_kv_heads|kv_n_heads|num_kv_heads|n_head_kv|num_query_groups)",
        lambda p, v: p.groups,
    ),
    (
        r"decoder_(num_)?(attention_)?heads|decoder_num_attention_heads",
        lambda p, v: p.size.heads // 2,
    ),
    (r".*(attention_heads|n_heads?|num_heads|nheads?|encoder_heads)", lambda p, v: p.size.heads),
    (
        r".*(num_layers|hidden_layers|n_layers?|depth|num_blocks)"
        r"|(encoder|decoder|text|vision|speech_encoder)_layers|.*_layers_(count|num)"
        r"|t2u_(en|de)coder_layers|num_(en|de)coder_layers|(en|de)coder_num_hidden_layers",
        lambda p, v: layers_of(p.values) if v > 1 else v,
    ),
    (r"num_kv_shared_layers", lambda p, v: min(v, layers_of(p.values) // 2)),
    (
        r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_layers",
        lambda p, v: min(v, 1),
    ),
    (r"max_window_layers", lambda p, v: 1),
    (
        r".*(interval|period|_pattern|global_attn_every_n_layers|every_n_layers|_step)",
        lambda p, v: min(v, 2),
    ),
    (r".*(period_offset|layer_offset)", lambda p, v: min(v, 1)),
    (
        r"(moe|expert|shared_expert|moe_shared_expert)_?(intermediate|ffn|hidden)_(size|dim)"
        r"|expert_dim",
        lambda p, v: p.size.ffn // 2,
    ),
    (
        r".*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|d_inner|n_inner|ffn_size"
        r"|intermediate_dim|ff_dim|feedforward_dim|dim_feedforward|intermediate_size_mlp"
        r"|encoder_ffn_embed_dim|linear_units)",
        lambda p, v: p.size.ffn,
    ),
    (
        r"(num_|n_)?(routed_|local_)?experts|.*num_(local_|routed_)?experts|n_routed_experts"
        r"|moe_num_experts",
        lambda p, v: min(v, 4),
    ),
    (
        r".*(experts_per_tok(en)?|experts_top_k|moe_topk?|moe_top_?k|top_k_experts"
        r"|num_selected_experts|moe_k)",
        lambda p, v: min(v, 2),
    ),
    (r"n_groups?|num_expert_group", lambda p, v: min(v, 2)),
    (r"topk_group", lambda p, v: 1),
    (r"original_max_position_embeddings", lambda p, v: 8),
    (r"coordinate_size|shape_size", lambda p, v: p.width // 6),  # LayoutLMv3 has four and two
    (r"context_size", lambda p, v: p.size.length),
    (r"floor_scale|log_scaling_n_floor", lambda p, v: 4),
    (
        r"sliding_window.*|attention_chunk_size|local_attention|local_window|attention_window.*"
        r"|local_window_size",
        lambda p, v: p.size.window,
    ),
    (r"relative_attention_num_buckets|num_buckets", lambda p, v: 8),
    (
        r"relative_attention_max_distance|max_distance|relative_max_distance|max_bucket_distance",
        lambda p, v: 12,
    ),
    (r"encoder_max_relative_position", lambda p, v: 6),
    (r"position_buckets", lambda p, v: min(v, 8)),
    (r"max_source_positions", lambda p, v: 2 * p.size.length),
    (
        r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length"
        r"|max_target_positions|max_seq_length|context_length|max_context_length)",
        lambda p, v: 64 if v >= 16 else v,
    ),
    (
        r"window_size",
        lambda p, v: (
            2 * p.values["spatial_merge_size"] * _patch(p.values)
            if "spatial_merge_size" in p.values
            else p.size.window
        ),
    ),
    (
        r"image_size|img_size|pretrain_image_size|input_size",
        lambda p, v: v if v == 1 else _image_side(p),
    ),
    (r"mm_tokens_per_image|image_seq_len(gth)?", lambda p, v: 4),
    (r"num_mel_bins|n_mels|num_queries|num_query_tokens", lambda p, v: min(v, 16)),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|dim|model_dim|hidden_dim|hidden"
        r"|embedding_size|proj_dim|projection_dim|output_dim|embd?_size|projection_size|proj_size"
        r"|channels|hidden_channels|input_dim|projector_dim)",
        lambda p, v: p.width if v >= 32 else v,
    ),
)
MEANINGS = tuple((re.compile(pattern), meaning) for pattern, meaning in INTEGERS)
PERIODIC = re.compile(
    r".*(interval|period|pattern|cross_attention_layers|indexes|indices|_step)", re.ASCII
)


def _image_side(part: Part) -> int:
    """A side that leaves several patches after merges of windows and strides."""
    patches = 8 * part.size.window if "depths" in part.values else part.size.grid
    return patches * int(part.values.get("output_stride", _patch(part.values)))


def _patch(values: Mapping[str, Any]) -> int:
    """Pixels along a patch: of a part, or of a tower within it."""
    patch = _patch_within(values) or 4
    return int(patch if isinstance(patch, int) else patch[-1])


def _patch_within(values: Mapping[str, Any]) -> Any:
    patch = values.get("patch_size") or values.get("vision_patch_size")
    inner = (_patch_within(value) for value in values.values() if isinstance(value, Mapping))
    return patch or next(filter(None, inner), None)


LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers",
    "decoder_layers",
)  # fmt: skip


def lists_of_layers(values: Mapping[str, Any]) -> list[str]:
    """The keys of lists with an item for every layer."""
    counts = {values.get(key) for key in LAYER_COUNTS}
    lists = {key: value for key, value in values.items() if isinstance(value, list)}
    return [key for key, items in lists.items() if len(items) > 2 and len(items) in counts]


def kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Layers that stay: the first of every kind, at least two; twice as many if kinds may share."""
    lists = [values[key] for key in lists_of_layers(values)]
    if not lists:
        return []

    def kind(layer: int) -> str:
        return repr([items[layer] if layer < len(items) else None for items in lists])

    kinds = [kind(layer) for layer in range(len(lists[0]))]
    first = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    if len(first) == 1:
        return [0, 1]
    return first * 2 if len(first) <= MOST_LAYERS // 2 else first


def layers_of(values: Mapping[str, Any]) -> int:
    """The number of layers of a part: one per kind, or enough to include layers at intervals."""
    if kept := kept_layers(values):
        return len(kept)
    periodic = any(value and PERIODIC.fullmatch(key) for key, value in values.items())
    return 4 if periodic else 2


def inside(values: Any, path: str) -> Any:
    """The part of a config that a path of keys with dots between leads to."""
    for key in filter(None, path.split(".")):
        values = values.get(key) or {}
    return values


def unnamed(values: Mapping[str, Any], *known: re.Pattern[str]) -> dict[str, int | float]:
    """The numbers of a config whose keys do not say what they are: neither known ones nor sizes."""
    patterns = (SPECIAL, *known, *(pattern for pattern, _ in MEANINGS))
    return {
        key: value
        for key, value in values.items()
        if type(value) in (int, float)
        and not any(pattern.fullmatch(str(key)) for pattern in patterns)
    }


SPECIAL = re.compile(
    r".*_token_(id|index)|(bos|eos|pad|sep|cls|mask|unk|image|video|audio)_(token|id|index)",
    re.ASCII,
)
DERIVED = {
    "out_features", "out_indices", "stage_names", "_out_features", "_out_indices",
    "transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "num_labels",
}  # fmt: skip
VARIED = re.compile(
    r".*(theta|emb_base|softcap\w*|multiplier|attn_scalar)|attention_scale", re.ASCII
)
EPSILON = re.compile(r".*(eps|epsilon)", re.ASCII)


def _list(key: str, values: list[Any], part: Part) -> list[Any]:
    """A list shrunk: one of layers to the layers kept, others by their items' meaning."""
    kept = kept_layers(part.values)
    if key in lists_of_layers(part.values) and key != "depths" and values == list(part.values[key]):
        return [_value(key, values[i], part) for i in kept]
    if key in {"depths", "layers"}:
        return [min(value, 2) for value in values]
    if re.fullmatch(r".*(mrope_section|rope_section|axes_dim)", key):
        return _sections(values, part.turning)
    if key in {"long_factor", "short_factor"}:
        return [values[i * len(values) // part.turning] for i in range(part.turning)]
    if values and all(type(value) is int for value in values):
        if re.fullmatch(r".*(indexes|indices|_layers|_idxs|_layer_ids)", key):
            n = layers_of(part.values)
            few = [value for value in values if value < n]
            return few if len(few) not in (0, n) else [n - 1]
        if key == "conv_dim":
            return [16] * len(values)
        if key == "attention_window":
            return [4, 4]
    return [_shrunk(value, part) if isinstance(value, dict) else value for value in values]


def _sections(values: list[int], pairs: int) -> list[int]:
    """Sections of a rotation in the same proportions, in sum `pairs`, the last the larger."""
    total = sum(values)
    if not total:
        return values
    ends = [round(pairs * sum(values[: i + 1]) / total) for i in range(len(values))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@cache
def sections_of(kind: Any) -> dict[str, list[int]]:
    """Sections of a rotation by three axes that a model's code has as a default."""
    if kind not in CONFIG_MAPPING:
        return {}
    name = CONFIG_MAPPING[kind].__module__.replace(".configuration_", ".modeling_")
    spec = find_spec(name)
    loader: Any = spec.loader if spec else None
    source = loader.get_source(name) if loader else ""
    return {"mrope_section": [16, 24, 24]} if '"mrope_section"' in source else {}


SCALED = re.compile(
    r"(.+_)?(head_dim|(num_)?(attention_)?heads|num_key_value_heads|kv_lora_rank|qk_nope_head_dim)"
)
BASES = (
    "head_dim", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim"
)  # fmt: skip
OWN_SIZES = re.compile("index|linear|mamba|decoder|encoder|vision|qk_|v_", re.ASCII)


def _by_base(key: str, value: int, part: Part) -> int | None:
    """A size of some layers, such as wider global heads, in proportion to all others' size."""
    base = next((name for name in BASES if key.endswith(name.removeprefix("num_"))), "")
    usual = part.values.get(base)
    if not isinstance(usual, int) or usual == value:
        return None
    if key in part.values and (key == base or part.latent or OWN_SIZES.match(key)):
        return None
    return max(1, _value(base, usual, part) * value // usual)


def _value(key: Any, value: Any, part: Part) -> Any:
    if not isinstance(key, str):
        return value
    if isinstance(value, dict):
        if key in {"rope_parameters", "rope_scaling"}:
            sections = {}
            by_type = all(isinstance(section, dict) for section in value.values())
            if not by_type and "mrope_section" not in value:
                sections = sections_of(part.values.get("model_type"))
            return {k: _value(k, v, part) for k, v in {**sections, **value}.items()}
        if key == "per_layer_config":
            layers = {}
            for new, old in enumerate(kept_layers(part.values)):
                of_layer = value.get(f"{old:02}", value.get(str(old), value.get(old)))
                if of_layer:
                    layers[str(new)] = {k: _value(k, v, part) for k, v in of_layer.items()}
            return layers
        return _shrunk(value, part)
    if isinstance(value, list | tuple):
        return _list(key, list(value), part)
    if key == "partial_rotary_factor" and part.latent and value not in (None, 1.0):
        return part.size.rope / part.head_dim
    if value is None and part.plan.filled and key in FILLED:
        return _value(key, 1, part) if FILLED[key] == 0 and key != "pad_token_id" else FILLED[key]
    if isinstance(value, int) and not isinstance(value, bool):
        if SCALED.fullmatch(key) and (scaled := _by_base(key, value, part)) is not None:
            return scaled
        for pattern, meaning in MEANINGS:
            if pattern.fullmatch(key):
                return meaning(part, value)
    return value


def _shrunk(values: Mapping[str, Any], outer: Part) -> dict[str, Any]:
    kind = values.get("model_type", "")
    if kind in exceptions()["instead"]:
        return dict(exceptions()["instead"][kind])
    for mark, given in exceptions()["given"].items():
        if mark in values or mark == kind:
            values = {**values, **given}
    part = Part(values, outer.size, outer.plan)
    shrunk = {key: _value(key, value, part) for key, value in values.items() if key not in DERIVED}
    return _fixed(shrunk, exceptions()["fixed"].get(kind, {}), shrunk)


def _fixed(
    values: dict[str, Any], exceptions: Mapping[str, Any], part: Mapping[str, Any]
) -> dict[str, Any]:
    """The values with `exceptions` in their place; text is a product of numbers and the part's
    keys.
    """

    def number(product: str) -> int:
        result = 1
        for operator, factor in re.findall(r"([*/]?) ?([\w.]+)", product):
            value: Any = factor
            value = int(value) if value.isdigit() else reduce(getitem, value.split("."), part)
            result = result // value if operator == "/" else result * value
        return result

    fixed = dict(values)
    for key, value in exceptions.items():
        nested = _fixed(values[key], value, part) if isinstance(value, dict) else value
        fixed[key] = number(value) if isinstance(value, str) else nested
    return fixed


def _with_small_ids(values: Any, known: dict[str, int]) -> Any:
    """Ids of special tokens as small numbers, the same wherever the same key stands."""
    if not isinstance(values, dict):
        return values
    small = {}
    for key, value in values.items():
        is_id = SPECIAL.fullmatch(str(key))
        small[key] = _small(key, value, known) if is_id else _with_small_ids(value, known)
    return small


def _small(key: str, value: Any, known: dict[str, int]) -> Any:
    if isinstance(value, list) and value and type(value[0]) is int:
        return [_small(key, value[0], known)]
    if type(value) is int and value >= 0:
        usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return known.setdefault(key, usual.get(key, 3 + len(known)))
    return value


def tiny_config(config: Any, size: Size, plan: Plan = PLANS[0]) -> Any:
    """The config of a tiny model of the same architecture."""
    values = config.to_dict()
    if plan.shrunk:
        values = _with_small_ids(_shrunk(values, Part(values, size, plan)), {})
        texts = [values.get(key) for key in ("text_config", "llm_config", "language_config")]
        text: Any = next(filter(None, texts), {})
        parts = [part for part in values.values() if isinstance(part, dict)]
        for part in parts if isinstance(text, dict) and "hidden_size" in text else ():
            if "out_hidden_size" in part:
                part["out_hidden_size"] = text["hidden_size"]
    else:
        kept = {key: value for key, value in values.items() if key not in DERIVED}
        values = {key: _few_layers(key, value) for key, value in kept.items()}
    values["use_cache"] = False
    return type(config).from_dict(values)


def _few_layers(key: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _few_layers(k, v) for k, v in value.items()}
    counts = {"num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"}
    return 2 if str(key) in counts and type(value) is int else value


def varied(values: Mapping[str, Any], epsilons: Iterator[int] | None = None) -> dict[str, Any]:
    """A config's values with bases, caps and score factors times 1.5, and distinct large epsilons.

    With these, the model's output shows which keys it reads, and from which part of the config.
    """
    epsilons = count(1) if epsilons is None else epsilons
    changed = dict(values)
    for key, value in values.items():
        if isinstance(value, Mapping):
            changed[key] = varied(value, epsilons)
        elif EPSILON.fullmatch(str(key)) and type(value) is float:
            changed[key] = 0.02 * next(epsilons)
        elif type(value) in (int, float) and VARIED.fullmatch(str(key)):
            changed[key] = type(value)(1.5 * value)
    return changed
