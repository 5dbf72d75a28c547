"""Which layers of a model have something that others lack: rotation, norms of queries and keys."""

from weightscope.families.config import ModelConfig


def always(config: ModelConfig, layer: int) -> bool:
    """Every layer."""
    return True


def sliding(config: ModelConfig, layer: int) -> bool:
    """Those that see a window (Cohere 2, Trinity)."""
    return config.layer_types[layer] == "sliding_attention"


def windowed(config: ModelConfig, layer: int) -> bool:
    """Those that see a window; none where the config has none, whatever the layers are called."""
    return sliding(config, layer) and config.has("sliding_window")


def windowed_if_any(config: ModelConfig, layer: int) -> bool:
    """Those that see a window; all where the config has none (EXAONE 4)."""
    return sliding(config, layer) or not config.has("sliding_window")


def listed(config: ModelConfig, layer: int) -> bool:
    """Those that no_rope_layers has 1 for; without it all but every fourth, or whatever no_rope_layer_interval says."""
    given = config.get("no_rope_layers")
    if not given:
        return (layer + 1) % config.size("no_rope_layer_interval") != 0
    if not isinstance(given, list) or len(given) <= layer or given[layer] not in (0, 1):
        raise config.error("no_rope_layers", "a list with 0 or 1 for every layer")
    return bool(given[layer])


def with_parameters(config: ModelConfig, layer: int) -> bool:
    """Those whose type has an entry in rope_parameters that is not null."""
    given = config.inside("rope_parameters")
    return given.get(config.layer_types[layer], given) is not None


def with_a_base(config: ModelConfig, layer: int) -> bool:
    """All where rope_parameters has a base, or the config in the older dialect has one or scales it; else none."""
    return config.inside("rope_parameters").has("rope_theta") or config.has("rope_theta", "rope_scaling")
