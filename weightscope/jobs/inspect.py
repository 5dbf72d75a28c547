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
    if len(model.attention_layers) < config.n_layers:
        others = Counter(kind for i, kind in enumerate(config.layer_types) if i not in model.attention_layers)
        said = ", ".join(f"{count} {printable(kind)}" for kind, count in others.items())
        yield f"attention   layers {', '.join(map(str, model.attention_layers)) or 'none'}; not attention: {said}"
    yield f"heads       {config.n_heads} of {config.head_dim}, {config.n_kv_heads} key-value"
    yield f"tokens      {_embedding(model, family.inputs.tokens)}"
    yield f"positions   {_embedding(model, family.inputs.positions)}"
    if not model.attention_layers:
        return
    first = model.attention_layers[0]
    read = {t.name: t.nbytes for layer in model.attention_layers for t in model.attention_tensors(layer)}
    of_first = model.attention_tensors(first)
    one = _size(sum(tensor.nbytes for tensor in of_first))
    yield f"audit reads {_size(sum(read.values()))} of {_size(checkpoint.nbytes)}; layer {first} alone {one}"
    for tensor in of_first:
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
