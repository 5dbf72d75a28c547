"""The tensors that answers depend on and no head's map is made of: biases, norms, sinks, embeddings, unembedding."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite, log, prod, sqrt

import numpy as np

from weightscope.architectures import Family
from weightscope.architectures.layer import NO_WEIGHTS
from weightscope.audits.changes import SAME
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.checkpoint import blocks_of
from weightscope.checkpoint.gguf import GgufFile
from weightscope.errors import counted
from weightscope.findings import Finding, Member, listed
from weightscope.model import Model
from weightscope.tables import Column, Table
from weightscope.tensors.changes import BITS, UNKNOWN_SIZE, Pair, TensorChange, TensorChanges, first_pass, unpaired
from weightscope.tensors.findings import LARGEST_RMS, scale_finding
from weightscope.tensors.measure import row_squares

RESCALED = 1000.0  # times its norm before, or as many times less: no training does that to a tensor
GAIN = re.compile(r"(norm|[._]ln)[^.]*\.weight$", re.IGNORECASE)  # the gain of a norm, by its name
NAMED = 4  # tensors in a sentence; all are among the finding's members
ROWS = "unembedding"  # which a file may leave out where they are the embedding's


@dataclass(frozen=True)
class OtherChanges(TensorChanges):
    """How these tensors changed, and the part of it that a limit applies to."""

    # |B - A| / |A| by name, of a bias relative to the larger of its norm and its weight's; without tensors that heads
    # show as well, such as biases of queries.
    limited: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def moved(self) -> list[TensorChange]:
        """Those that a limit applies to and that changed by more than float32's rounding, or contain NaN."""
        return [change for change in self.changes if change.name in self.limited and not change.change <= SAME]

    def moved_most(self, n: int) -> Table:
        """Those that changed most, for people."""
        order = sorted(self.moved, key=lambda change: -np.nan_to_num(change.change, nan=np.inf))
        rows = [(change.name, change.change) for change in order[:n]]
        return Table.of_rows((Column("tensor"), Column("change", symbol="$‖ΔW‖/‖W‖$")), rows)

    @property
    def headline(self) -> str:
        """How many changed, and which most, in a sentence; empty where none did."""
        if not self.moved:
            return ""
        most = max(self.moved, key=lambda change: inf if np.isnan(change.change) else change.change)
        how_far = "by an unknown amount" if np.isnan(most.change) else f"by {most.change:.3g}"
        return f"{len(self.moved)} of {counted(len(self.limited), 'other tensor')} changed, {most.name} {how_far}."


def other_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors by name without the prefix: what attention, embeddings and unembedding are read from, and vectors.

    Matrices that W_QK and W_VO are products of, and those of feed-forward networks, are not among them.
    """
    needed, checkpoint = _needed(model), model.checkpoint
    vectors = (name for name in checkpoint.names_under(model.prefix) if sum(n > 1 for n in checkpoint[name].shape) <= 1)
    return {name.removeprefix(model.prefix): checkpoint[name] for name in vectors} | needed


def _needed(model: Model) -> dict[str, Tensor]:
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
    modules = family.query, family.key, family.value, family.output, *family.others
    matrix = name.rpartition(".")[0] in modules or (name in family.loose and name.endswith("weight"))
    return matrix and len(tensor.shape) > 1


def _folded(model: Model, index: int, tensor: Tensor) -> bool:
    """Whether a tensor is a bias or a norm that is part of the heads' matrices and biases."""
    family, name = _in_layer(model, index, tensor)
    norms = [norm.module for norm in (family.norm, family.memory and family.memory.norm) if norm]
    norms += [family.qk_norm.query, family.qk_norm.key] if family.qk_norm else []
    modules = {family.query, family.key, family.value, *family.others, *norms} - {family.output, ""}
    loose = name in family.loose and len(tensor.shape) == 1 and not name.startswith(family.output)
    return loose or any(name.startswith(f"{module}.") for module in modules)


def _in_layer(model: Model, index: int, tensor: Tensor) -> tuple[Family, str]:
    """The row of a layer, and a tensor's name in it."""
    stem = model.stem(index)
    return model.family.in_layer(model.config.layer_types[index]), tensor.name.removeprefix(stem)


def other_changes(a: Model, b: Model) -> OtherChanges:
    """How these tensors of two models changed, each read once in blocks; of two families those of the same name."""
    of_a, of_b = other_tensors(a), other_tensors(b)
    tokens = [model.prefix + model.family.inputs.tokens for model in (a, b)]
    tied = all(
        ROWS in tensors and tensors[ROWS].name == name for tensors, name in zip((of_a, of_b), tokens, strict=True)
    )
    if tied:
        del of_a[ROWS], of_b[ROWS]
    pairs = [Pair(tensor, of_b[key]) for key, tensor in of_a.items() if key in of_b]
    unmatched: list[TensorChange] = []
    if a.family.name == b.family.name:
        in_a, in_b = (_in_layers(model) if _names_alike(a, b) else {} for model in (a, b))
        needed = ((_needed(a) | in_a, of_b | in_b), (_needed(b) | in_b, of_a | in_a))
        unmatched = unpaired(
            *(
                [ours[key] for key in ours if key not in theirs and not (tied and key == ROWS)]
                for ours, theirs in needed
            )
        )
    changes = [*map(_with_kind, first_pass(a, b, pairs)), *unmatched]
    return OtherChanges(changes, limited_changes(a, changes))


def _names_alike(a: Model, b: Model) -> bool:
    """Whether both files name tensors in one way: a GGUF file has names of its own for feed-forward networks."""
    return len({isinstance(file, GgufFile) for model in (a, b) for file in model.checkpoint.files[:1]}) < 2


def _in_layers(model: Model) -> dict[str, Tensor]:
    """Everything that layers store, by name without the prefix; buffers, which files may leave out, are not."""
    stems = {model.stem(i) for i, kind in enumerate(model.config.layer_types) if kind != "none"}
    stored = {name: stem for stem in stems for name in model.checkpoint.names_under(stem)}
    names = {name: name.removeprefix(stem) for name, stem in stored.items()}
    kept = (name for name, inner in names.items() if not _is_buffer(inner, model.checkpoint[name].shape))
    return {name.removeprefix(model.prefix): model.checkpoint[name] for name in kept}


def _is_buffer(inner: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a layer is no weight: rotary frequencies, or a causal mask that is called a bias."""
    return NO_WEIGHTS.fullmatch(inner) is not None or (len(shape) == 4 and shape[:2] == (1, 1))


def _with_kind(change: TensorChange) -> TensorChange:
    """The change with its kind as far as one reading shows it."""
    if change.kind in UNKNOWN_SIZE or not change.values_changed:
        return change
    if not isfinite(change.moved):
        return replace(change, kind="not finite")
    return replace(change, kind="rounded" if change.casts else "changed")


def limited_changes(a: Model, changes: Iterable[TensorChange]) -> dict[str, float]:
    """|B - A| / |A| by name of the tensors that heads do not show; of a bias relative to its weight if that is larger.

    A bias of next to nothing may double without effect, and its weight says how large it would have to be.
    """
    changes, shown = list(changes), shown_by_heads(a)
    squares = {change.name: change.squares for change in changes}
    limited: dict[str, float] = {}
    for change in changes:
        if change.kind in UNKNOWN_SIZE or change.name in shown:
            continue
        far = change.change
        weight = change.name.removesuffix("bias") + "weight"
        if change.name.endswith(".bias") and change.moved > 0 and weight in a.checkpoint:
            of_weight = squares[weight] if weight in squares else _squares(a.checkpoint[weight])
            if of_weight > change.squares:
                far = sqrt(change.moved / of_weight)
        limited[change.name] = float(np.maximum(far, limited.get(change.name, 0.0)))  # NaN stays NaN
    return limited


def _squares(tensor: Tensor, offset: float = 0.0) -> float:
    """The sum of the squares of a tensor plus an offset, read in blocks."""
    values = (block.values() + offset if offset else block.values() for block in blocks_of(tensor))
    return sum(float(row_squares(block.reshape(1, -1))[0].sum()) for block in values)


def _root_size(change: TensorChange) -> float:
    """The root of how many values a tensor has afterwards: the norm of as many ones."""
    return sqrt(prod(change.shapes[1]))


def rescaled(changes: Iterable[TensorChange], label: str) -> Iterator[Finding]:
    """Tensors of a checkpoint that became zero, or whose norm became a thousand times as large or as small."""
    zero: list[tuple[TensorChange, float]] = []
    scaled: list[tuple[TensorChange, float]] = []
    for change in changes:
        before, after = sqrt(change.squares), sqrt(change.squares_b)
        if change.kind in UNKNOWN_SIZE or not isfinite(before + after):
            continue
        if before > after == 0:
            zero.append((change, 0.0))
        elif not 1 / RESCALED <= after / before <= RESCALED if before else after > LARGEST_RMS * _root_size(change):
            scaled.append((change, after / before if before else inf))
    for kind, tensors, measure in (("zero_tensor", zero, "norm"), ("out_of_scale", scaled, "norm_ratio")):
        if not tensors:
            continue
        names = listed([change.name for change, _ in tensors], NAMED)
        change, ratio = max(tensors, key=lambda each: abs(log(each[1])) if each[1] else 0.0)
        text = f"{names} of {label}: zero throughout, and not before."
        if kind == "out_of_scale":
            text = f"{names} of {label}: the norm of {change.name} is {ratio:.3g} times that before."
        members = tuple(Member("tensor", None, name=change.name, number=ratio) for change, ratio in tensors)
        yield Finding(kind=kind, measure=measure, number=ratio, usual=1.0, text=text, members=members)


def other_gains(model: Model) -> dict[str, Tensor]:
    """Gains of norms in the layers that attention does not read."""
    needed = {tensor.name for tensor in _needed(model).values()}
    names = (name for i in model.attention_layers for name in model.checkpoint.names_under(model.stem(i)))
    gains = (name for name in names if GAIN.search(name) and name not in needed)
    return {name: model.checkpoint[name] for name in gains if len(model.checkpoint[name].shape) == 1}


def _offset_of_gains(model: Model) -> float:
    """What is added to stored gains of other norms: as to those of the norms that the row names."""
    row = model.family
    of_network = None if row.mlp is None else row.mlp.norm
    known = [row.closing, of_network, *(row.norm_of(i) for i in model.attention_layers)]
    return max((norm.offset for norm in known if norm is not None), default=0.0)


def scale_findings(model: Model) -> Iterator[Finding]:
    """Tensors of one model that have no scale of trained weights: gains of zero, dropped biases, very large values.

    Rows of embeddings and what heads show are judged with them; the unembedding is not read here.
    """
    inputs, outputs = model.family.inputs, model.family.outputs
    norms = [norm for norm in (inputs.norm, outputs and outputs.norm) if norm]
    judged = shown_by_heads(model) | {model.prefix + name for name in (inputs.tokens, inputs.positions)}
    noted, gains = model.checkpoint.noted, other_gains(model)
    offsets = {f"{norm.module}.{norm.gain}": norm.offset for norm in norms} | dict.fromkeys(
        gains, _offset_of_gains(model)
    )
    for name, tensor in (*_needed(model).items(), *gains.items()):
        if tensor.name in judged or name == ROWS or name.rpartition(".")[0].endswith(model.family.output):
            continue
        if prod(tensor.shape) and tensor.dtype in BITS:
            rms = sqrt(_squares(tensor, offsets.get(name, 0.0)) / prod(tensor.shape))
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
        zero = {i: bias.name for i, bias in biases.items() if _squares(bias) == 0}
        if zero and 2 * len(zero) < len(biases):
            text = f"{listed(list(zero.values()), NAMED)}: zero throughout, {len(zero)} of {len(biases)} of {role}."
            members = tuple(Member("tensor", None, layer=i, name=name, number=0.0) for i, name in zero.items())
            yield Finding(kind="zero_tensor", measure="rms", number=0.0, text=text, members=members)
