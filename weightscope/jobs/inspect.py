"""What a checkpoint is, before anything of it is read."""

from collections import Counter
from collections.abc import Iterator

from weightscope.checkpoint import Tensor
from weightscope.errors import printable
from weightscope.model import Model


def attention_tensors(model: Model, layer: int) -> list[Tensor]:
    """The tensors of one layer that an audit reads: projections and the norm before them."""
    family = model.family
    prefix = model.prefix + family.layer.format(i=layer)
    modules = {family.query, family.key, family.value, family.output, family.norm.module}
    names = (f"{prefix}{module}.{part}" for module in modules for part in ("weight", "bias"))
    return [model.checkpoint[name] for name in sorted(names) if name in model.checkpoint]


def describe(model: Model) -> Iterator[str]:
    """Lines for a person: family, sizes, dtypes, embeddings, bytes."""
    checkpoint, config, family = model.checkpoint, model.config, model.family
    dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
    yield f"checkpoint  {printable(checkpoint.name)}: {len(checkpoint)} tensors, {_size(checkpoint.nbytes)}"
    yield f"dtypes      {', '.join(f'{count} {dtype}' for dtype, count in dtypes.most_common())}"
    yield f"family      {family.name} (model_type {printable(config.model_type)})"
    yield f"layers      {config.n_layers}, width {config.d_model}"
    yield f"heads       {config.n_heads} of {config.head_dim}, {config.n_kv_heads} key-value"
    yield f"tokens      {_embedding(model, family.tokens)}"
    yield f"positions   {_embedding(model, family.positions)}"
    per_layer = [sum(t.nbytes for t in attention_tensors(model, layer)) for layer in range(config.n_layers)]
    yield f"audit reads {_size(sum(per_layer))} of {_size(checkpoint.nbytes)}; layer 0 alone {_size(per_layer[0])}"
    for tensor in attention_tensors(model, 0):
        yield f"  {printable(tensor.name)}  {tensor.dtype}  {tensor.shape}"


def _embedding(model: Model, name: str) -> str:
    if not name:
        return "none in this family"
    full = model.prefix + name
    if full not in model.checkpoint:
        return f"not in this checkpoint (looked for {full})"
    tensor = model.checkpoint[full]
    return f"{printable(full)}  {tensor.dtype}  {tensor.shape}"


def _size(n_bytes: int) -> str:
    """Bytes in decimal units, as disks and networks count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes} bytes"
