"""One config said in many ways: the older, mixed and contradictory dialects that files have."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from weightscope.model.config.config import KEYS

Values = dict[str, Any]
THETA = 37000.0  # no class's own
LINEAR = {"factor": 2.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
# What some architecture calls its base, its share of a head, or the base of its sliding layers.
BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "local_rope_theta", "global_rope_theta", "rope_base",
         "swa_rope_theta", "compress_rope_theta", "rope_freq_base")  # fmt: skip
SHARES = ("partial_rotary_factor", "rotary_pct", "rope_percent", "rope_pct")
KINDS = ("full_attention", "sliding_attention")


def of_rotation(base: Values) -> Iterator[tuple[str, Values]]:
    """A config with rotary parameters in other words, each with a name."""
    bare = {key: value for key, value in base.items() if key not in ROPE}
    saved = base.get("rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in saved.values())
    flat = next((dict(value) for value in saved.values() if value), {}) if nested else dict(saved)
    flat |= {"rope_theta": THETA}
    by_type = {kind: {"rope_type": "default", "rope_theta": THETA + 1000 * index} for index, kind in enumerate(KINDS)}
    by_type |= {kind: {"rope_type": "default", "rope_theta": THETA + 7 * len(kind)} for kind in saved if nested}

    yield "as it is saved", base
    yield "nothing said", bare
    yield "a base at the top", bare | {"rope_theta": THETA}
    for kind, more in (("linear", LINEAR), ("yarn", YARN), ("llama3", LLAMA3), ("dynamic", LINEAR)):
        for key in ("type", "rope_type"):
            yield f"{kind} scaling by {key}", bare | {"rope_theta": THETA, "rope_scaling": {key: kind, **more}}
        yield f"{kind} in rope_parameters", bare | {"rope_parameters": {**flat, "rope_type": kind, **more}}
        pasted = base | {"rope_scaling": {"rope_type": kind, **more}}
        yield f"{kind} scaling and rope_parameters", pasted
        yield f"{kind} scaling and rope_parameters and a base", pasted | {"rope_theta": THETA}
    yield "type and rope_parameters", base | {"rope_scaling": {"type": "yarn", **YARN}}
    yield "two kinds", bare | {"rope_scaling": {"type": "linear", "rope_type": "dynamic", **LINEAR}}
    yield "scaling with a base", bare | {"rope_scaling": {"rope_type": "linear", "rope_theta": THETA, **LINEAR}}
    yield "scaling without a base", bare | {"rope_scaling": {"rope_type": "linear", **LINEAR}}
    yield "scaling without a kind", bare | {"rope_theta": THETA, "rope_scaling": LINEAR}
    yield "scaling of one axis a section", bare | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    yield "yarn without positions", bare | {"rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    yield "yarn with a temperature", bare | {
        "rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.4}
    }  # fmt: skip
    top = {"original_max_position_embeddings": 256}
    yield "positions at the top", bare | top | {"rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", **YARN}}
    for key in ("rope_scaling", "rope_parameters"):
        for what, value in (("null", None), ("empty", {})):
            yield f"{what} {key}", bare | {key: value}
            yield f"{what} {key} and a base", bare | {key: value, "rope_theta": THETA}
            yield f"{what} {key} and the other", base | {key: value}
    yield "rope_parameters by type, the old word", bare | {"rope_parameters": {"type": "linear", **LINEAR}}
    yield "rope_parameters without a base", bare | {"rope_parameters": {"rope_type": "linear", **LINEAR}}
    yield "flat rope_parameters", bare | {"rope_parameters": flat}
    yield "flat rope_parameters and another base", bare | {"rope_parameters": flat, "rope_theta": 2 * THETA}
    yield "rope_parameters and another base", base | {"rope_theta": 2 * THETA}
    yield "rope_parameters by layer type", bare | {"rope_parameters": by_type}
    yield "rope_parameters by one layer type", bare | {"rope_parameters": {KINDS[0]: by_type[KINDS[0]]}}
    yield "rope_parameters by layer type and flat", bare | {"rope_parameters": {**flat, **by_type}}
    yield "scaling by layer type", bare | {"rope_scaling": by_type}
    for key in BASES:
        yield f"{key}", bare | {key: THETA}
        yield f"{key} and rope_parameters", base | {key: THETA}
    for key in SHARES:
        yield f"{key}", bare | {key: 0.5}
        yield f"{key} and rope_parameters", base | {key: 0.5}
        yield f"{key} and scaling", bare | {key: 0.5, "rope_scaling": {"rope_type": "linear", **LINEAR}}
    yield "a share in rope_parameters", bare | {"rope_parameters": {**flat, "partial_rotary_factor": 0.5}}
    yield "rotary_dim", base | {"rotary_dim": 16}
    yield "unknown keys", base | {"rope_freqs": 3.0, "rope_scale": 2.0, "use_rope": True, "rotary_interleaved": True}
    gone = {name: {k: v for k, v in part.items() if k != "rope_theta"} if isinstance(part, Mapping) else part
            for name, part in saved.items() if name != "rope_theta"}  # fmt: skip
    yield "its own rope_parameters without bases", bare | {"rope_parameters": gone}
    yield "its own rope_parameters without bases and a base", bare | {"rope_parameters": gone, "rope_theta": THETA}


SIZES = tuple(KEYS[meaning] for meaning in ("n_layers", "d_model", "n_heads", "norm_eps", "n_positions"))
WIDTHS = (("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
          ("head_dim", "attention_head_size", "kv_channels", "attention_head_dim", "d_kv"))  # fmt: skip


def of_sizes(base: Values, synonyms: Mapping[str, str]) -> Iterator[tuple[str, Values]]:
    """A config with sizes under other names, under two, null or left out; `synonyms` are the class's own names."""
    for key, stored in synonyms.items():
        value = base.get(stored)
        if isinstance(value, int | float) and not isinstance(value, bool):
            without = {name: given for name, given in base.items() if name != stored}
            yield f"{key} for {stored}", without | {key: value}
            yield f"{key} as well as {stored}", base | {key: value}
            yield f"{key} unlike {stored}", base | {key: value * 2 if value > 1e-4 else 1e-4}
    for same in (*SIZES, *WIDTHS):
        there = [key for key in same if base.get(key) is not None]
        for key in there:
            value = base[key]
            if not isinstance(value, int | float):
                continue
            without = {name: given for name, given in base.items() if name != key}
            yield f"no {key}", without
            yield f"null {key}", without | {key: None}
            changed = max(value // 2, 1) if isinstance(value, int) else value * 2
            for foreign in same:
                if foreign not in base and foreign not in synonyms:
                    yield f"{foreign} for {key}", without | {foreign: changed}
                    yield f"{foreign} and {key}", base | {foreign: changed}
    for key in ("head_dim", "num_key_value_heads", "attention_head_size", "kv_channels"):
        if key not in base and key not in synonyms:
            yield f"{key}, which the class has not", base | {key: 16}
    yield "layer types of another version", base | {"layer_types": None}


def variants(config: Values, path: str, synonyms: Mapping[str, str], rotates: bool) -> Iterator[tuple[str, Values]]:
    """Every variant of the part of a config that stands under `path`."""
    part = config
    for key in path.split(".") if path else ():
        part = part[key]
    several = (*(of_rotation(part) if rotates else ()), *of_sizes(part, synonyms))
    for name, values in several:
        yield name, _placed(config, path.split(".") if path else [], deepcopy(values))


def _placed(config: Values, path: list[str], part: Values) -> Values:
    return {**config, path[0]: _placed(config[path[0]], path[1:], part)} if path else part
