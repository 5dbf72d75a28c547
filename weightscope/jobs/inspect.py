"""What a checkpoint is, before anything of it is read."""

from collections import Counter
from collections.abc import Iterator

from weightscope.errors import printable
from weightscope.model import Model


def describe(model: Model) -> Iterator[str]:
    """Lines for a person: family, sizes, dtypes, embeddings, bytes."""
    checkpoint, config, family = model.checkpoint, model.config, model.family
    dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
    yield f"checkpoint  {printable(checkpoint.name)}: {len(checkpoint)} tensors, {_size(checkpoint.nbytes)}"
    yield f"dtypes      {', '.join(f'{count} {dtype}' for dtype, count in dtypes.most_common())}"
    yield f"family      {family.name} (model_type {printable(config.model_type)})"
    yield f"layers      {config.n_layers}, width {config.d_model}"
    others = [i for i in range(config.n_layers) if i not in model.attention_layers]
    if others:
        yield f"            not attention: {', '.join(map(str, others))}"
    yield f"heads       {config.n_heads} of {config.head_dim}, {config.n_kv_heads} key-value"
    yield f"tokens      {_embedding(model, family.inputs.tokens)}"
    yield f"positions   {_embedding(model, family.inputs.positions)}"
    read = {tensor.name: tensor for i in model.attention_layers for tensor in model.attention_tensors(i)}
    first = model.attention_tensors(model.attention_layers[0]) if model.attention_layers else []
    total, one = (sum(t.nbytes for t in tensors) for tensors in (read.values(), first))
    yield f"audit reads {_size(total)} of {_size(checkpoint.nbytes)}; one layer {_size(one)}"
    for tensor in first:
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
