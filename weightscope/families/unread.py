"""What an attention module stores and its row does not read: with weights left out every number is wrong."""

import re
from itertools import takewhile

from weightscope.checkpoint import Checkpoint
from weightscope.errors import CheckpointError
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family

# Buffers that older versions of transformers saved, and scales of caches that other programs quantise: no weights.
NO_WEIGHTS = re.compile(
    r"(.*\.)?(masked_bias|inv_freq|rotary_emb\..*|position_ids|relative_position_index|[qkv]_scale|prob_output_scale)"
    r"|bias",
    re.ASCII,
)


def attention_names(
    checkpoint: Checkpoint, prefix: str, row: Family, config: ModelConfig, index: int
) -> list[str]:  # fmt: skip
    """The names of what one layer reads of a checkpoint: projections, the norms around them, sinks.

    Raises
    ------
    CheckpointError
        Attention has tensors there that the row does not read.
    """
    family = row.in_layer(config.layer_types[index])
    stem, maker = (prefix + family.stored_name(config, i) for i in (index, family.keys_of(config, index)))
    names = {name for module in family.modules for name in checkpoint.names_under(f"{stem}{module}.")}
    lone = (*(stem + name for name in family.lone), *(prefix + name for name in family.shared))
    names |= {name for name in lone if name in checkpoint}
    refuse_unread(checkpoint, stem, family, config, names)
    if maker != stem:  # keys and values of a layer before: its modules, and its norm
        names -= {name for module in family.of_keys for name in checkpoint.names_under(f"{stem}{module}.")}
        lent = (*family.of_keys, *([family.norm.module] if family.norm else ()))
        names |= {name for module in lent for name in checkpoint.names_under(f"{maker}{module}.")}
    return sorted(names)


def refuse_unread(checkpoint: Checkpoint, stem: str, family: Family, config: ModelConfig, read: set[str]) -> None:
    """Refuse a layer that stores more of attention than its row reads.

    What transformers itself passes over, a bias that the config of a listed model_type denies, is no reason.

    Parameters
    ----------
    checkpoint : Checkpoint
    stem : str
        A layer's name before its modules.
    family : Family
        As configured.
    config : ModelConfig
    read : set of str
        The names that the row reads in that layer, every tensor of a module that it names among them.

    Raises
    ------
    CheckpointError
        A tensor is neither read nor known to be beside the heads.
    """
    inside = _attention(family)
    beside = tuple(f"{stem}{module}." for module in (*family.beside, *family.choosing))
    names = checkpoint.names_under(stem + inside) if inside else []
    left = [name for name in names if name not in read and not name.startswith(beside)]
    left = [name for name in left if not NO_WEIGHTS.fullmatch(name.removeprefix(stem + inside))]
    if family.origin:
        left += [stem + name for name in _denied(family, config) if stem + name in checkpoint]
    if left:
        more = f", nor {len(left) - 1} more beside it" if len(left) > 1 else ""
        problem = f"is part of attention, and {family.called} does not read it{more}"
        raise CheckpointError(problem, file=checkpoint.name, tensor=left[0])


def _attention(family: Family) -> str:
    """The module that all four projections are in, and its dot; empty where that is the layer."""
    paths = [module.split(".")[:-1] for module in (family.query, family.key, family.value, family.output)]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return "".join(f"{parts[0]}." for parts in shared)


def _denied(family: Family, config: ModelConfig) -> list[str]:
    """Biases that the row says modules have not."""
    has = family.biases
    flags = {family.query: has.query, family.key: has.key, family.value: has.value, family.output: has.output}
    stated = {module: bool(config.get(flag) if isinstance(flag, str) else flag) for module, flag in flags.items()}
    if family.norm is not None:
        stated[family.norm.module] = family.norm.bias
    if family.qk_norm is not None:
        stated |= dict.fromkeys((family.qk_norm.query, family.qk_norm.key), family.qk_norm.bias)
    return [f"{module}.bias" for module, there in stated.items() if module and not there]
