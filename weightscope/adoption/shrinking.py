"""A config shrunk to that of a tiny model, by what its keys mean.

What is no size stays as it is: which norms, biases, scales, kinds of layers and rotations a model has is what is to be
looked at. Limits (windows, original contexts, buckets) shrink below the length of the texts, so that what is beyond
them is seen.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adoption.meanings import MEANINGS, Part, kept_layers, layers_of, lists_of_layers
from weightscope.adoption.sizes import CONVOLVED, FILLED, LACKED, PLANS, Plan, Size

SPECIAL = re.compile(r".*_token_(id|index)|(bos|eos|pad|sep|cls|mask|unk|image|video|audio)_(token|id|index)", re.ASCII)
DERIVED = {"out_features", "out_indices", "stage_names", "_out_features", "_out_indices", "transformers_version",
           "architectures", "_name_or_path", "id2label", "label2id", "num_labels"}  # fmt: skip
VARIED = re.compile(r".*(theta|emb_base|softcap\w*|multiplier|attn_scalar)|attention_scale", re.ASCII)
EPSILON = re.compile(r".*(eps|epsilon)", re.ASCII)
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip


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
    if (
        re.fullmatch(r".*(indexes|indices|_layers|_idxs|_layer_ids)", key)
        and values
        and all(type(v) is int for v in values)
    ):
        n = layers_of(part.values)
        few = [v for v in values if v < n]
        return few if len(few) not in (0, n) else [n - 1]
    if values and all(type(value) is int for value in values) and re.fullmatch(r"conv_dim|attention_window", key):
        return [16 if key == "conv_dim" else 4] * (len(values) if key == "conv_dim" else 2)
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
    """Sections of a rotation by three axes where a model's code has them as a default: every checkpoint names them."""
    if kind not in CONFIG_MAPPING:
        return {}
    name = CONFIG_MAPPING[kind].__module__.replace(".configuration_", ".modeling_")
    found = find_spec(name)
    source = found.loader.get_source(name) if found and found.loader else ""  # type: ignore[attr-defined]
    return {"mrope_section": [16, 24, 24]} if '"mrope_section"' in source else {}


SCALED = re.compile(r"(.+_)?(head_dim|(num_)?(attention_)?heads|num_key_value_heads|kv_lora_rank|qk_nope_head_dim)")
BASES = ("head_dim", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim")


def _by_base(key: str, value: int, part: Part) -> int | None:
    """A size of some layers in proportion to that of the others: heads of global layers that are twice as wide."""
    base = next((one for one in BASES if key.endswith(one.removeprefix("num_"))), "")
    usual = part.values.get(base)
    if (
        (key in part.values and key == base)
        or not isinstance(usual, int)
        or usual == value
        or (part.latent and key in part.values)
    ):
        return None
    if re.match("index|linear|mamba|decoder|encoder|vision|qk_|v_", key) and key in part.values:
        return None
    return max(1, _value(base, usual, part) * value // usual)


def _value(key: Any, value: Any, part: Part) -> Any:
    if not isinstance(key, str):
        return value
    if isinstance(value, dict):
        if key in {"rope_parameters", "rope_scaling"}:
            by_type = value.values() if all(isinstance(one, dict) for one in value.values()) else ()
            sections = (
                {} if not value or by_type or "mrope_section" in value else sections_of(part.values.get("model_type"))
            )
            return {k: _value(k, v, part) for k, v in {**sections, **value}.items()}
        if key == "per_layer_config":
            kept = kept_layers(part.values)
            own = {new: value.get(f"{old:02}", value.get(str(old), value.get(old))) for new, old in enumerate(kept)}
            return {str(new): {k: _value(k, v, part) for k, v in one.items()} for new, one in own.items() if one}
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
    if values.get("model_type") == "timm_backbone":
        return dict(RESNET)
    for mark, lacked in LACKED.items():
        if mark in values or mark == values.get("model_type"):
            values = {**values, **lacked}
    part = Part(values, outer.size, outer.plan)
    shrunk = {key: _value(key, value, part) for key, value in values.items() if key not in DERIVED}
    return {**shrunk, **CONVOLVED.get(values.get("model_type", ""), {})}


def _with_small_ids(values: Any, known: dict[str, int]) -> Any:
    """Ids of special tokens as small numbers, the same wherever the same key stands."""
    if isinstance(values, dict):
        return {
            key: _small(key, value, known) if SPECIAL.fullmatch(str(key)) else _with_small_ids(value, known)
            for key, value in values.items()
        }
    return values


def _small(key: str, value: Any, known: dict[str, int]) -> Any:
    if isinstance(value, list) and value and type(value[0]) is int:
        return [_small(key, value[0], known)]
    if type(value) is int and value >= 0:
        return known.setdefault(key, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(key, 3 + len(known)))
    return value


def tiny_config(config: Any, size: Size, plan: Plan = PLANS[0]) -> Any:
    """The config of a tiny model of the same architecture.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        A class's default, or a checkpoint's own.
    size : Size
    plan : Plan
    """
    values = config.to_dict()
    if plan.shrunk:
        values = _with_small_ids(_shrunk(values, Part(values, size, plan)), {})
        text: dict[str, Any] = next(
            (values[key] for key in ("text_config", "llm_config", "language_config") if values.get(key)), {}
        )
        for part in values.values():
            if (
                isinstance(part, dict)
                and "out_hidden_size" in part
                and isinstance(text, dict)
                and "hidden_size" in text
            ):
                part["out_hidden_size"] = text["hidden_size"]
    else:
        values = {key: _few_layers(key, value) for key, value in values.items() if key not in DERIVED}
    values["use_cache"] = False
    return type(config).from_dict(values)


def _few_layers(key: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _few_layers(k, v) for k, v in value.items()}
    return (
        2
        if re.fullmatch(r"num_hidden_layers|encoder_layers|decoder_layers|num_layers", str(key)) and type(value) is int
        else value
    )


def varied(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values with half as much again of every base, cap and factor of scores, and with epsilons that are
    felt, each its own: which key a model goes by is then told by what it does.
    """
    epsilons = [key for key, value in values.items() if EPSILON.fullmatch(str(key)) and type(value) is float]
    return {
        key: varied(value) if isinstance(value, Mapping)
        else 0.02 * (1 + epsilons.index(key)) if key in epsilons
        else type(value)(1.5 * value) if type(value) in (int, float) and VARIED.fullmatch(str(key)) else value
        for key, value in values.items()
    }  # fmt: skip
