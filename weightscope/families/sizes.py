"""How many heads there are and how wide they are: in a model, and in one of its layers."""

from dataclasses import replace

from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family


def head_sizes(config: Config, family: Family) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of a head's queries and keys.

    Raises
    ------
    CheckpointError
        A size is absurd, or heads do not divide into groups, or the width into heads.
    """
    keys, kv_heads = family.size_keys, family.kv_heads
    d_model, n_heads = config.size(*keys["d_model"]), config.size(*keys["n_heads"])
    n_kv_heads = kv_heads if isinstance(kv_heads, int) else config.size(*kv_heads, default=n_heads)
    if n_heads % n_kv_heads:
        raise CheckpointError(f"{n_heads} heads do not divide into {n_kv_heads} key-value heads", file=config.file)
    if family.head_dim and all(config.has(key) for key in family.head_dim):
        head_dim = sum(config.count(key) for key in family.head_dim)
    elif d_model % n_heads:
        raise CheckpointError(f"width {d_model} does not divide into {n_heads} heads", file=config.file)
    else:
        head_dim = d_model // n_heads
    return n_heads, n_kv_heads, head_dim


def in_layer(config: ModelConfig, family: Family, index: int) -> tuple[ModelConfig, Family]:
    """A model's numbers and its row as one layer has them: heads and their widths may differ from layer to layer.

    Parameters as of `read_layer`, errors as of `head_sizes`.
    """
    row, own = family.in_layer(config.layer_types[index]), family.sizes(config, index)
    if row is family and not own:
        return config, family
    values = Config({**config.raw, **own}, config.file)
    n_heads, n_kv_heads, head_dim = head_sizes(values, row)
    return replace(config, raw=values.raw, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim), row


def attends(config: ModelConfig, family: Family, index: int) -> bool:
    """Whether a layer is attention to what enters it; in hybrid models others are not."""
    kinds = family.attention_types
    return (not kinds or config.layer_types[index] in kinds) and family.keys_of(config, index) == index


def borrows(config: ModelConfig, family: Family, index: int) -> bool:
    """Whether a layer is attention of what enters it to keys and values that an earlier layer has made."""
    source = family.keys_of(config, index)
    return source != index and attends(config, family, source)


def kind_of(config: ModelConfig, family: Family, index: int) -> str:
    """What a layer is, in words."""
    source = family.keys_of(config, index)
    said = config.layer_types[index]
    return said if source == index else f"{said} to keys and values that layer {source} has made of another stream"
