"""The tensors that answers depend on and no head's map is made of: biases, norms, sinks, embeddings, unembedding."""

import re
from collections.abc import Iterator
from math import isfinite, prod, sqrt

from weightscope.architectures import Family
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import blocks_of
from weightscope.findings import Finding, Member, listed
from weightscope.model import Model
from weightscope.tensors.findings import scale_finding
from weightscope.tensors.measure import BITS, row_squares

GAIN = re.compile(r"(norm|[._]ln)[^.]*\.weight$", re.IGNORECASE)  # the gain of a norm, by its name
NAMED = 4  # tensors in a sentence; all are among the finding's members
ROWS = "unembedding"  # which a file may leave out where they are the embedding's


def other_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors by name without the prefix: what attention, embeddings and unembedding are read from, and vectors.

    Matrices that W_QK and W_VO are products of, and those of feed-forward networks, are not among them.
    """
    needed, checkpoint = needed_tensors(model), model.checkpoint
    vectors = (name for name in checkpoint.names_under(model.prefix) if sum(n > 1 for n in checkpoint[name].shape) <= 1)
    return {name.removeprefix(model.prefix): checkpoint[name] for name in vectors} | needed


def needed_tensors(model: Model) -> dict[str, Tensor]:
    """Of these, the ones that a model cannot do without."""
    tensors = [t for i in model.attention_layers for t in model.attention_tensors(i) if not _in_maps(model, i, t)]
    tensors += [t for i in model.borrowing_layers for t in model.attention_tensors(i)]  # no head of these is measured
    outputs = model.output_tensors
    rows = {ROWS: outputs.pop(ROWS)} if ROWS in outputs else {}
    if rows and not model.tied and rows[ROWS].name == model.prefix + model.family.inputs.tokens:
        rows = {}  # it has no unembedding: that of a language model was dropped
    return {
        t.name.removeprefix(model.prefix): t for t in (*tensors, *model.embedding_tensors, *outputs.values())
    } | rows


def shown_by_heads(model: Model) -> set[str]:
    """Names of the tensors that heads' matrices and biases contain, and change with."""
    every = ((i, tensor) for i in model.attention_layers for tensor in model.attention_tensors(i))
    return {tensor.name for i, tensor in every if _in_maps(model, i, tensor) or _folded(model, i, tensor)}


def _in_maps(model: Model, index: int, tensor: Tensor) -> bool:
    """Whether a tensor is one of the matrices of a layer's heads."""
    family, name = _in_layer(model, index, tensor)
    modules = (*family.heads.projections, *family.heads.others)
    matrix = name.rpartition(".")[0] in modules or (name in family.heads.loose and name.endswith("weight"))
    return matrix and len(tensor.shape) > 1


def _folded(model: Model, index: int, tensor: Tensor) -> bool:
    """Whether a tensor is a bias or a norm that is part of the heads' matrices and biases."""
    family, name = _in_layer(model, index, tensor)
    norms = [norm.module for norm in (family.norms.before, family.memory and family.memory.norm) if norm]
    norms += [family.scores.qk_norm.query, family.scores.qk_norm.key] if family.scores.qk_norm else []
    modules = {*family.heads.projections[:3], *family.heads.others, *norms} - {family.heads.out, ""}
    loose = name in family.heads.loose and len(tensor.shape) == 1 and not name.startswith(family.heads.out)
    return loose or any(name.startswith(f"{module}.") for module in modules)


def _in_layer(model: Model, index: int, tensor: Tensor) -> tuple[Family, str]:
    """The row of a layer, and a tensor's name in it."""
    stem = model.stem(index)
    return model.family.in_layer(model.config.layer_types[index]), tensor.name.removeprefix(stem)


def squares_of(tensor: Tensor, offset: float = 0.0) -> float:
    """The sum of the squares of a tensor plus an offset, read in blocks."""
    values = (block.values() + offset if offset else block.values() for block in blocks_of(tensor))
    return sum(float(row_squares(block.reshape(1, -1))[0].sum()) for block in values)


def other_gains(model: Model) -> dict[str, Tensor]:
    """Gains of norms in the layers that attention does not read."""
    needed = {tensor.name for tensor in needed_tensors(model).values()}
    names = (name for i in model.attention_layers for name in model.checkpoint.names_under(model.stem(i)))
    gains = (name for name in names if GAIN.search(name) and name not in needed)
    return {name: model.checkpoint[name] for name in gains if len(model.checkpoint[name].shape) == 1}


def _offset_of_gains(model: Model) -> float:
    """What is added to stored gains of other norms: as to those of the norms that the row names."""
    row = model.family
    of_network = None if row.mlp is None else row.mlp.norm
    known = [row.norms.after, of_network, *(row.norm_of(i) for i in model.attention_layers)]
    return max((norm.offset for norm in known if norm is not None), default=0.0)


def scale_findings(model: Model) -> Iterator[Finding]:
    """Tensors of one model that have no scale of trained weights: gains of zero, dropped biases, very large values.

    Rows of embeddings and what heads show are judged with them; the unembedding is not read here.
    """
    inputs, outputs = model.family.inputs, model.family.outputs
    norms = [norm for norm in (inputs.norm, outputs and outputs.norm) if norm]
    judged = shown_by_heads(model) | {model.prefix + name for name in (inputs.tokens, inputs.positions)}
    noted, gains = model.checkpoint.noted, other_gains(model)
    offsets = {f"{norm.module}.{norm.gain}": norm.offset for norm in norms}
    offsets |= dict.fromkeys(gains, _offset_of_gains(model))
    for name, tensor in (*needed_tensors(model).items(), *gains.items()):
        if tensor.name in judged or name == ROWS or name.rpartition(".")[0].endswith(model.family.heads.out):
            continue
        if prod(tensor.shape) and tensor.dtype in BITS:
            rms = sqrt(squares_of(tensor, offsets.get(name, 0.0)) / prod(tensor.shape))
            if noted is not None and not isfinite(rms):
                noted.add(tensor.name)
            yield from scale_finding(tensor.name, rms, name in offsets, offsets.get(name, 0.0))
    yield from _dropped_biases(model)


def _dropped_biases(model: Model) -> Iterator[Finding]:
    """Biases of attention that are zero in fewer than half of the layers."""
    by_role: dict[str, dict[int, Tensor]] = {}
    for i in model.attention_layers:
        for tensor in model.attention_tensors(i):
            if tensor.name.endswith(".bias") and tensor.dtype in BITS:
                by_role.setdefault(tensor.name.removeprefix(model.stem(i)), {})[i] = tensor
    for role, biases in by_role.items():
        zero = {i: bias.name for i, bias in biases.items() if squares_of(bias) == 0}
        if zero and 2 * len(zero) < len(biases):
            text = f"{listed(list(zero.values()), NAMED)}: zero throughout, {len(zero)} of {len(biases)} of {role}."
            members = tuple(Member("tensor", None, layer=i, name=name, number=0.0) for i, name in zero.items())
            yield Finding(kind="zero_tensor", measure="rms", number=0.0, text=text, members=members)
