"""What a checkpoint is, before anything of it is read: inspect."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from weightscope.cli.options import with_model
from weightscope.errors import printable

if TYPE_CHECKING:
    from weightscope.model import Model


@click.command()
@with_model
def inspect(model: "Model") -> None:
    """Family, shapes, dtypes, and the bytes an audit would read."""
    click.echo("\n".join(describe(model)))  # all of it or an error, not half of it and then one


def describe(model: "Model") -> Iterator[str]:
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
    if model.attention_layers:
        yield from _budget(model)


def _budget(model: "Model") -> Iterator[str]:
    """What an audit reads of all layers and of the first, W_QK's share of it, and what has still to be fetched."""
    checkpoint, layers = model.checkpoint, model.attention_layers
    names = {i: [tensor.name for tensor in model.attention_tensors(i)] for i in layers}
    everything = {name for of_layer in names.values() for name in of_layer}  # ALBERT's layers share theirs
    for label, chosen in (("audit reads", everything), (f"layer {layers[0]:<5}", set(names[layers[0]]))):
        of_qk = {name for name in chosen if any(f".{m}." in f".{name}" for m in (model.family.query, model.family.key))}
        whole, share = (_size(checkpoint.bytes_to_read(those)) for those in (chosen, of_qk))
        yield f"{label} {whole} of {_size(checkpoint.nbytes)}, {share} of it queries and keys"
    if checkpoint.bytes_fetched or checkpoint.bytes_to_fetch(everything):
        headers, rest = _size(checkpoint.bytes_fetched), _size(checkpoint.bytes_to_fetch(everything))
        yield f"network     {headers} fetched for the headers; an audit fetches {rest}"
    for name in names[layers[0]]:
        yield f"  {printable(name)}  {checkpoint[name].dtype}  {checkpoint[name].shape}"


def _embedding(model: "Model", name: str) -> str:
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
