"""What a checkpoint is, before anything of it is read: inspect."""

from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from weightscope.cli.options import with_source
from weightscope.cli.terminal import Listed, show
from weightscope.errors import printable, sized

if TYPE_CHECKING:
    from weightscope.checkpoint import Checkpoint
    from weightscope.model import Model
    from weightscope.sources import Source
    from weightscope.tables import Table


@click.command()
@with_source
@click.option("--check", is_flag=True, help="Read every tensor once and say what stands out; of any architecture.")
def inspect(named: Any, source: str, check: bool) -> None:
    """Family, shapes, dtypes, and the bytes an audit would read."""
    show(*(checked(named(source)) if check else describe(named(source).open())))


def checked(source: "Source") -> Iterator["str | Table"]:
    """Lines and a table for a person: what is in the file, by role, and what stands out; no family needs to know it."""
    from weightscope.audits.findings import Findings
    from weightscope.audits.tensor_findings import tensor_findings
    from weightscope.audits.tensors import read_everything
    from weightscope.errors import CheckpointError

    try:
        checkpoint = source.open().checkpoint
    except CheckpointError:  # of no known family, or not whole
        checkpoint = source.checkpoint()
    yield from _stored(checkpoint)
    began = perf_counter()
    everything = read_everything(checkpoint)
    seconds = perf_counter() - began
    findings = Findings(tensor_findings(everything, padding=checkpoint.config.get("pad_token_id")))
    rate = f"{sized(everything.nbytes)} in {seconds:.2f} s, {sized(int(everything.nbytes / seconds))}/s"
    yield f"{everything.lead} {findings.headline} ({rate})"
    yield everything.roles
    yield from map(str, findings)


def _stored(checkpoint: "Checkpoint") -> Iterator[str]:
    dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
    yield f"checkpoint  {printable(checkpoint.name)}: {len(checkpoint)} tensors, {sized(checkpoint.nbytes)}"
    yield f"dtypes      {', '.join(f'{count} {dtype}' for dtype, count in dtypes.most_common())}"


def describe(model: "Model") -> Iterator[str | Listed]:
    """Lines for a person: family, sizes, dtypes, embeddings, bytes; the tensors of the first attention layer."""
    checkpoint, config, family = model.checkpoint, model.config, model.family
    yield from _stored(checkpoint)
    yield f"family      {family.name} (model_type {printable(config.model_type)})"
    if family.origin:
        yield f"            {printable(family.origin)}"
    yield f"layers      {config.n_layers}, width {config.d_model}"
    borrowing = model.borrowing_layers
    if borrowing:
        yield f"            to keys and values of a layer before: {', '.join(map(str, borrowing))}"
    others = [i for i in range(config.n_layers) if i not in (*model.attention_layers, *borrowing)]
    if others:
        yield f"            not attention: {', '.join(map(str, others))}"
    yield f"heads       {config.n_heads} of {config.head_dim}, {config.n_kv_heads} key-value"
    yield f"tokens      {_embedding(model, family.inputs.tokens)}"
    yield f"positions   {_embedding(model, family.inputs.positions)}"
    if len(model.stacks) > 1:
        yield from _stacks(model)
    if model.attention_layers:
        yield from _budget(model)
        yield _first_tensors(model)


def _stacks(model: "Model") -> Iterator[str]:
    """A line for every attention model in the file."""
    for number, stack in enumerate(model.stacks.values()):
        sizes = f"{stack.n_layers} layers of {stack.n_heads} heads, {stack.family and stack.family.name}"
        what = f"not read: {printable(stack.refusal)}" if stack.refusal else f"{sizes} ({printable(stack.model_type)})"
        where = ", ".join(filter(None, (printable(stack.prefix) + "*", printable(stack.part))))
        yield f"{'' if number else 'stacks':<11} {printable(stack.name)}: {what}; {where}"


def _budget(model: "Model") -> Iterator[str]:
    """What an audit reads of all layers and of the first, W_QK's share of it, and what has still to be fetched."""
    checkpoint, layers = model.checkpoint, model.attention_layers
    names = {i: [tensor.name for tensor in model.attention_tensors(i)] for i in layers}
    everything = {name for of_layer in names.values() for name in of_layer}  # ALBERT's layers share theirs
    for label, chosen in (("audit reads", everything), (f"layer {layers[0]:<5}", set(names[layers[0]]))):
        of_qk = {name for name in chosen if any(f".{m}." in f".{name}" for m in (model.family.query, model.family.key))}
        whole, share = (sized(checkpoint.bytes_to_read(those)) for those in (chosen, of_qk))
        yield f"{label} {whole} of {sized(checkpoint.nbytes)}, {share} of it queries and keys"
    if checkpoint.bytes_fetched or checkpoint.bytes_to_fetch(everything):
        headers, rest = sized(checkpoint.bytes_fetched), sized(checkpoint.bytes_to_fetch(everything))
        yield f"network     {headers} fetched for the headers; an audit fetches {rest}"


def _first_tensors(model: "Model") -> Listed:
    """Names, dtypes and shapes of what is read of the first attention layer."""
    from weightscope.tables import Table

    tensors = model.attention_tensors(model.attention_layers[0])
    rows = [(printable(tensor.name), tensor.dtype, str(tensor.shape)) for tensor in tensors]
    return Listed(Table.of_rows(["tensor", "dtype", "shape"], rows), "\n".join(f"  {'  '.join(row)}" for row in rows))


def _embedding(model: "Model", name: str) -> str:
    if not name:
        return "none in this family"
    full = model.prefix + name
    if full not in model.checkpoint:
        return f"not in this checkpoint (looked for {full})"
    tensor = model.checkpoint[full]
    return f"{printable(full)}  {tensor.dtype}  {tensor.shape}"
