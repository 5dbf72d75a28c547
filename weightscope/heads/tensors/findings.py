"""Find what stands out among all tensors of a checkpoint, and between two checkpoints."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod, sqrt
from typing import Any

import numpy as np

from weightscope.checkpoint.blocks import blocks_of
from weightscope.checkpoint.checkpoint import Tensor, WeightFiles
from weightscope.core.errors import counted, shortened
from weightscope.heads.tensors.measure import (
    BITS,
    Everything,
    TensorFacts,
    by_role,
    role_of,
    row_squares,
)
from weightscope.model.metrics.outliers import log_measure, off_trend, robust_z
from weightscope.model.model import Model
from weightscope.model.rows.family import Family
from weightscope.report.findings import Finding, FindingKind, Member, Tried, finding, listed

ROLE_Z = 8.0  # robust z in the role; a tensor off the role's trend exceeds ROLE_FACTOR too
ROLE_FACTOR = 4.0  # times the trend, or as many times less
LEAST_ROLE = 5  # tensors that make a trend
PLAIN = ("F64", "F32", "F16", "BF16")  # a format of fewer bits mixes its dtypes by design
NAMED = 4  # names in a sentence; all are among the finding's members
LARGEST_RMS = 1e5  # no format of 16 bits but BF16 holds more; no trained weights come near it
SIBLINGS = 1e3  # times a layer's or role's other matrices; at most 4 in 62 layers of 5 checkpoints
LEAST_RMS = 1e-12  # an embedding or a gain has more, unless it is zero throughout
NOT_COMPARABLE = ("missing", "new", "reshaped")  # kinds of change
# Modules that transformers puts on top of a stack, outside its layers.
LANGUAGE_HEADS = (
    "lm_head", "cls", "embed_out", "mlm_head", "generator_predictions", "generator_lm_head",
    "predictions", "vocab_transform", "vocab_layer_norm", "vocab_projector",
)  # fmt: skip
TASK_HEADS = (
    "classifier", "pre_classifier", "score", "qa_outputs", "pooler", "sop_classifier",
    "classification_head", "sequence_summary", "discriminator_predictions",
)  # fmt: skip
ON_TOP = dict.fromkeys(LANGUAGE_HEADS, "the language-model head")
ON_TOP |= dict.fromkeys(TASK_HEADS, "a head for another task")
# classes that need a language-model head
PREDICTS_TOKENS = re.compile("LM|PreTraining|ConditionalGeneration")
GAIN = re.compile(r"(norm|[._]ln)[^.]*\.weight$", re.IGNORECASE)  # the gain of a norm, by its name
ROWS = "unembedding"  # may be missing from a file if it is the embedding

Facts = Sequence[TensorFacts]

not_finite = finding(
    "not_finite",
    "weights that are not finite",
    severity="error",
    rank=10,
    look_next="Read the tensor again from its source; if it is the same there, the training run or "
    "the conversion broke it.",
)


def tensor_findings(
    everything: Everything, judged: Collection[str] = (), padding: int | None = None
) -> Iterator[Finding]:
    """Everything about tensors that a person should look at; nothing at initialisation.

    Tensors whose values the audit of heads has `judged` are checked only for other faults; the row
    of an embedding at index `padding` may be zero.
    """
    facts, judged = everything.facts, set(judged)
    unjudged = [tensor for tensor in facts if tensor.name not in judged]
    yield from _not_finite(unjudged)
    yield from _zero_tensors(facts)
    yield from _scales(unjudged)
    yield from _constant_rows(unjudged, padding)
    yield from _duplicates(facts)
    yield from _dtypes(facts)
    yield from _norms(facts)


def count_finding(kind: FindingKind, names: Sequence[str], text: str) -> Finding:
    """A finding whose number is how many tensors it names."""
    members = tuple(Member("tensor", None, name=name) for name in names)
    number = float(len(names))
    return kind(measure="tensors", number=number, usual=0.0, text=text, members=members)


def on_top(name: str) -> str:
    """Head on top of the layers that a tensor is part of; empty if it is part of none."""
    outside, *_ = re.split(r"\.\d+\.", name, maxsplit=1)
    return next((ON_TOP[module] for module in outside.split(".")[:-1] if module in ON_TOP), "")


def described(names: Sequence[str]) -> str:
    """The head that all of these tensors are parts of, or the names."""
    (part, *rest) = dict.fromkeys(map(on_top, names))
    return listed(names, NAMED) if rest or not part else part


def _other_head(kinds: Mapping[str, str], architectures: str) -> list[str]:
    """Tensors of heads on top that one checkpoint lacks, if the last is for another task.

    `architectures` are the classes that the last checkpoint's config names: a language model needs
    its head, and of one that says nothing a lost head is not excused. Nor is a head that has lost
    only a part.
    """
    if not architectures or PREDICTS_TOKENS.search(architectures):
        return []
    tops = {name: part for name in kinds if (part := on_top(name))}
    kept = {part for name, part in tops.items() if kinds[name] not in ("missing", "new")}
    lost = {name for name, part in tops.items() if kinds[name] == "missing" and part not in kept}
    return [name for name in tops if kinds[name] == "new" or name in lost]


tensor_missing = finding(
    "tensor_missing",
    "tensors that one checkpoint lacks",
    severity="warning",
    rank=140,
    look_next="Check that both were saved completely: tied weights may be left out, others may "
    "have been lost.",
)
other_head = finding(
    "other_head",
    "another head on top",
    rank=40,
    look_next="Usual where a language model was tuned for another task; if the head was to stay, "
    "it was lost on the way.",
)


def incomparable_tensors(kinds: Mapping[str, str], architectures: str = "") -> Iterator[Finding]:
    """Tensors of two checkpoints that cannot be compared, from their kinds of change by name.

    `architectures` are the classes that the last checkpoint's config names.
    """
    if head := _other_head(kinds, architectures):
        parts = []
        for change, where in (("missing", "first"), ("new", "last")):
            if names := [name for name in head if kinds[name] == change]:
                parts.append(f"{described(names)} is only in the {where}")
        text = f"{' and '.join(parts)}; the last is a {architectures}."
        yield count_finding(other_head, head, f"{text[0].upper()}{text[1:]}")
    for kind, changes in ((not_finite, ("not finite",)), (tensor_missing, NOT_COMPARABLE)):
        names = [name for name, change in kinds.items() if change in changes and name not in head]
        if names:
            changed = listed([f"{name} ({kinds[name]})" for name in names], NAMED)
            yield count_finding(kind, names, f"Cannot be compared: {changed}.")


other_weights = finding(
    "other_weights",
    "transformers loads other weights",
    severity="warning",
    rank=210,
    look_next="Move the files that are not meant to another folder, or name the file that is "
    "meant.",
)
weights_beside = finding(
    "weights_beside",
    "weight files that were not read",
    rank=10,
    look_next="Name one of them to read it; move those that are not meant to another folder.",
)


def beside_findings(files: WeightFiles, label: str = "") -> Iterator[Finding]:
    """Weight files next to those that were read; graver where transformers loads them."""
    if files.telling:
        kind = other_weights if files.is_other else weights_beside
        number = float(len({*files.unread, *files.stale}))
        text = f"{label and f'{label}: '}{files.sentence}"
        yield kind(text=text, measure="files", number=number, usual=0.0)


unprintable_name = finding(
    "unprintable_name",
    "tensor names with control characters",
    severity="warning",
    rank=200,
    look_next="Find out what wrote them: no loader asks for such a name, and a terminal or a log "
    "may obey it.",
)


def name_findings(names: Iterable[str]) -> Iterator[Finding]:
    """Tensors with NUL in the name, or another character that is not shown."""
    odd = [name for name in names if not name.isprintable()]
    if odd:
        names_shown = listed([*map(shortened, odd)], NAMED)
        text = f"{counted(len(odd), 'tensor')} with control characters in the name: {names_shown}."
        yield count_finding(unprintable_name, odd, text)


def _members(tensors: Facts) -> tuple[Member, ...]:
    return tuple(Member("tensor", None, name=each.name, number=each.rms) for each in tensors)


def _names(facts: Facts) -> str:
    return listed([tensor.name for tensor in facts], NAMED)


def _not_finite(facts: Facts) -> Iterator[Finding]:
    broken = [tensor for tensor in facts if tensor.not_finite]
    if broken:
        counts = {tensor.name: tensor.not_finite for tensor in broken}
        where = listed([f"{count:,} in {name}" for name, count in counts.items()], NAMED)
        text = f"NaN or infinite values in {counted(len(broken), 'tensor')}: {where}."
        yield not_finite(
            measure="values_not_finite",
            number=sum(counts.values()),
            text=text,
            members=tuple(Member("tensor", None, name=n, number=float(counts[n])) for n in counts),
        )


def _zero_tensors(facts: Facts) -> Iterator[Finding]:
    """Matrices that are zero, and vectors that are zero where most others of their role are not."""
    for role, members in by_role(facts).items():
        zero = [
            tensor for tensor in members if tensor.size > 1 and tensor.least == tensor.most == 0
        ]
        matrices = zero and row_count(zero[0]) > 1
        if zero and zero[0].kind == "f" and (matrices or 2 * len(zero) < len(members)):
            text = f"{_names(zero)}: zero throughout, {len(zero)} of {len(members)} of {role}."
            yield zero_tensor(measure="rms", number=0.0, text=text, members=_members(zero))


zero_tensor = finding(
    "zero_tensor",
    "tensor of zeros",
    severity="warning",
    rank=110,
    look_next="Check whether this is intended: a conversion that skipped the tensor leaves zeros "
    "too.",
)
out_of_scale = finding(
    "out_of_scale",
    "tensor out of scale",
    severity="warning",
    rank=120,
    look_next="Read the tensor again from its source, and compare it with an earlier checkpoint: "
    "an exponent may be wrong.",
)


def scale_finding(
    name: str, rms: float, not_zero: bool = True, offset: float = 0.0
) -> Iterator[Finding]:
    """A tensor whose root mean square, with an offset added, no trained weights have.

    One that may be zero is judged by the upper limit only.
    """
    shown = f"{name} + {offset:g}" if offset else name
    about: dict[str, Any] = {
        "measure": "rms",
        "number": rms,
        "members": (Member("tensor", None, name=name, number=rms),),
    }
    if rms == 0 and not_zero:
        yield zero_tensor(text=f"{shown}: zero throughout.", **about)
    elif LARGEST_RMS < rms < np.inf or (0 < rms < LEAST_RMS and not_zero):
        expected = f"{LEAST_RMS:g} to {LARGEST_RMS:g} were expected"
        text = f"{shown} has a root mean square of {rms:.3g}; {expected}."
        yield out_of_scale(text=text, **about)


def _scales(facts: Facts) -> Iterator[Finding]:
    """Weights whose values are too large; buffers, such as masks and running means, may be."""
    for tensor in facts:
        if tensor.kind == "f" and tensor.name.endswith((".weight", ".bias")) and tensor.size:
            yield from scale_finding(tensor.name, tensor.rms, not_zero=False)
    weights = [t for t in facts if t.kind == "f" and t.name.endswith(".weight")]
    matrices = [tensor for tensor in weights if row_count(tensor) > 1]
    in_layers = [(tensor, layer) for tensor in matrices if (layer := _layer_of(tensor.name))]
    by_layer: dict[tuple[str, int], list[float]] = defaultdict(list)
    rms_by_role: dict[str, list[float]] = defaultdict(list)
    for tensor, layer in in_layers:
        by_layer[layer].append(tensor.rms)
        rms_by_role[tensor.role].append(tensor.rms)
    usual_in_layer = {layer: lower_median(sizes) for layer, sizes in by_layer.items()}
    usual_in_role = {role: lower_median(sizes) for role, sizes in rms_by_role.items()}
    for tensor, layer in in_layers:
        yield from beyond_siblings(
            f"{tensor.name}: the root mean square",
            tensor.rms,
            usual_in_layer[layer],
            usual_in_role[tensor.role],
            members=_members([tensor]),
        )


def lower_median(sizes: Iterable[float]) -> float:
    """The median of the finite sizes; of two the smaller."""
    ordered = sorted(size for size in sizes if isfinite(size))
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def beyond_siblings(
    what: str, size: float, in_layer: float, in_role: float, **about: Any
) -> Iterator[Finding]:
    """A size a thousand times the usual one in the layer, or of this matrix in other layers."""
    for usual, where in (
        (in_layer, "the matrices of the layer"),
        (in_role, "the same matrix of the layers"),
    ):
        if usual > 0 and SIBLINGS * usual <= size < np.inf:
            times = f"{size / usual:,.0f} times what is usual of {where} ({usual:.3g})"
            text = f"{what} is {size:.3g}, {times}: it may have lost its scales."
            yield out_of_scale(measure="rms", number=size, usual=usual, text=text, **about)
            return


def row_count(tensor: TensorFacts) -> int:
    """Rows of a tensor that has several axes longer than one; 1 of a vector."""
    return tensor.rows if sum(size > 1 for size in tensor.shape) > 1 else 1


constant_rows = finding(
    "constant_rows",
    "rows of one value",
    rank=130,
    look_next="See what the rows are for: padding, tokens that training never saw and pruned "
    "neurons are common.",
)


def _constant_rows(facts: Facts, padding: int | None) -> Iterator[Finding]:
    for tensor in facts:
        if tensor.constant or row_count(tensor) == 1:
            continue
        zero_rows = 0 if tensor.first_zero == (padding,) else tensor.zero_rows
        for value, count, first in (
            ("zero", zero_rows, tensor.first_zero),
            ("one other value", tensor.constant_rows, tensor.first_constant),
        ):
            if count:
                rows = f"{count:,} of {tensor.rows:,} rows of {tensor.name}"
                text = f"{rows} are {value} throughout, the first {first[0]}."
                members = tuple(Member("row", index, name=tensor.name) for index in first)
                yield constant_rows(
                    measure="rows", number=count, usual=0.0, text=text, members=members
                )


duplicate_layers = finding(
    "duplicate_layers",
    "layers with the same tensors",
    severity="warning",
    rank=130,
    look_next="Check whether the layers were copied on purpose, to make a model deeper; if so, "
    "expect them to do the same.",
)


def _duplicates(facts: Facts) -> Iterator[Finding]:
    """Layers that hold the same tensors throughout, and tensors elsewhere that are the same."""
    content = {
        tensor.name: tensor.same_as or tensor.name
        for tensor in facts
        if not tensor.constant and tensor.size > 1
    }
    layers: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    for name, same in content.items():
        if layer := _layer_of(name):
            layers[layer].add((name.removeprefix("".join(map(str, layer))), same))
    copies: dict[tuple[str, frozenset[tuple[str, str]]], list[int]] = defaultdict(list)
    for (stem, number), tensors in layers.items():
        copies[stem, frozenset(tensors)].append(number)
    copied: set[tuple[str, int]] = set()
    for (stem, shared), numbers in copies.items():
        if len(numbers) > 1 and len(shared) > 1:
            copied |= {(stem, number) for number in numbers[1:]}
            which = ", ".join(map(str, sorted(numbers)))
            values = f"the same values in each of their {len(shared)} tensors"
            yield duplicate_layers(
                measure="tensors_in_common",
                number=len(shared),
                text=f"Layers {which} of {stem}* hold {values}.",
                members=tuple(Member("layer", n, name=f"{stem}{n}") for n in sorted(numbers)),
            )
    comparable = [tensor for tensor in facts if tensor.name in content]
    yield from _equal_tensors([t for t in comparable if _layer_of(t.name) not in copied])


def _layer_of(name: str) -> tuple[str, int] | None:
    """Stem before a name's first number, and that number."""
    role, numbers = role_of(name)
    return (role.partition("*")[0], numbers[0]) if numbers else None


duplicate_tensors = finding(
    "duplicate_tensors",
    "tensors with the same values",
    rank=120,
    look_next="Tied weights are meant to be equal, and buffers often are; other copies waste "
    "memory.",
)


def _equal_tensors(facts: Facts) -> Iterator[Finding]:
    """Tensors with the same values; sets of the same roles, as in tied layers, are one finding."""
    groups: dict[str, list[TensorFacts]] = defaultdict(list)
    for tensor in facts:
        groups[tensor.same_as or tensor.name].append(tensor)
    by_roles: dict[tuple[str, ...], list[list[TensorFacts]]] = defaultdict(list)
    for group in groups.values():
        if len(group) > 1:
            by_roles[tuple(sorted({tensor.role for tensor in group}))].append(group)
    for sets in by_roles.values():
        more = f", and {counted(len(sets) - 1, 'other set')} of such names" if len(sets) > 1 else ""
        text = f"{_names(sets[0])} hold exactly the same values{more}."
        tensors = [tensor for group in sets for tensor in group]
        yield _tensors(duplicate_tensors, tensors, text)


def _tensors(kind: FindingKind, tensors: Facts, text: str) -> Finding:
    """A finding that counts tensors, each with its root mean square."""
    number, members = float(len(tensors)), _members(tensors)
    return kind(measure="tensors", number=number, text=text, members=members)


odd_dtype = finding(
    "odd_dtype",
    "unexpected dtype",
    severity="warning",
    rank=150,
    look_next="Check how the checkpoint was saved: one tensor kept in another precision is often a "
    "slip.",
)


def _dtypes(facts: Facts) -> Iterator[Finding]:
    """dtypes that look like a slip: unlike their role's, a lone one, float64, integer weights."""
    odd: dict[str, dict[str, TensorFacts]] = defaultdict(dict)
    for members in by_role(facts).values():
        usual, count = Counter(tensor.dtype for tensor in members).most_common(1)[0]
        if usual in PLAIN and 2 * count > len(members):
            for tensor in members:
                if tensor.dtype != usual:
                    problem = f"{tensor.dtype} where others of the role are {usual}"
                    odd[problem][tensor.name] = tensor
    plain = Counter(tensor.dtype for tensor in facts if tensor.dtype in PLAIN)
    for dtype, count in plain.items():
        usual = plain.most_common(1)[0][0]
        if dtype != usual and (count == 1 or dtype == "F64"):
            same = {tensor.name: tensor for tensor in facts if tensor.dtype == dtype}
            odd[f"{dtype} where others of the checkpoint are {usual}"] |= same
    for tensor in facts:
        mask = tensor.least >= 0 and tensor.most <= 1  # GPT-2 calls its causal mask a bias
        if tensor.kind == "i" and tensor.name.endswith((".weight", ".bias")) and not mask:
            odd["integers where floats are expected"][tensor.name] = tensor
    for problem, tensors in odd.items():
        names = listed([f"{tensor.name} ({tensor.dtype})" for tensor in tensors.values()], NAMED)
        yield _tensors(odd_dtype, list(tensors.values()), f"{names}: {problem}.")


norm_off_role = finding(
    "norm_off_role",
    "tensor off its role's norms",
    rank=110,
    look_next="Compare it with the same tensor of neighbouring layers, and with an earlier "
    "checkpoint.",
)


def _norms(facts: Facts) -> Iterator[Finding]:
    """Tensors whose norm is off the norms of their neighbours in the role."""
    for role, members in by_role(facts).items():
        if len(members) < LEAST_ROLE or members[0].kind != "f":
            continue
        differences = off_trend(log_measure(np.array([tensor.rms for tensor in members])))
        z = robust_z(differences)
        far = np.flatnonzero((np.abs(z) >= ROLE_Z) & (np.abs(differences) >= np.log(ROLE_FACTOR)))
        if len(far):
            order = sorted(far.tolist(), key=lambda i: -abs(z[i]))
            farthest, difference = members[order[0]], float(differences[order[0]])
            more = f"; {counted(len(order) - 1, 'other')} of {role} too" if len(order) > 1 else ""
            text = (
                f"{farthest.name} has a root mean square of {farthest.rms:.3g}; its neighbours' is "
                f"{farthest.rms / np.exp(difference):.3g} (z = {z[order[0]]:.1f}){more}."
            )
            far_members = _members([members[i] for i in order])
            yield norm_off_role(measure="rms", number=farthest.rms, text=text, members=far_members)


# Tensors that a model depends on outside its heads' maps: biases, norms, sinks, embeddings,
# unembedding.


def other_tensors(model: Model) -> dict[str, Tensor]:
    """Vectors, and tensors that attention and embeddings need, by name without the prefix.

    Matrices that W_QK and W_VO are products of, and matrices of feed-forward networks, are not
    among them.
    """
    vectors = {}
    for name in model.checkpoint.names_under(model.prefix):
        tensor = model.checkpoint[name]
        if sum(n > 1 for n in tensor.shape) <= 1:
            vectors[name.removeprefix(model.prefix)] = tensor
    return vectors | needed_tensors(model)


def needed_tensors(model: Model) -> dict[str, Tensor]:
    """Tensors among `other_tensors` that a model cannot do without."""
    tensors: list[Tensor] = []
    for i in model.attention_layers:
        tensors += [t for t in model.attention_tensors(i) if not _in_maps(model, i, t)]
    for i in model.borrowing_layers:  # no head of these is measured
        tensors += model.attention_tensors(i)
    outputs = model.ends.output_tensors
    rows = {ROWS: outputs.pop(ROWS)} if ROWS in outputs else {}
    tokens = model.prefix + model.family.inputs.tokens
    if rows and not model.ends.tied and rows[ROWS].name == tokens:
        rows = {}  # it has no unembedding: the language model's was dropped
    tensors += [*model.ends.input_tensors, *outputs.values()]
    return {tensor.name.removeprefix(model.prefix): tensor for tensor in tensors} | rows


def shown_by_heads(model: Model) -> set[str]:
    """Names of the tensors that heads' matrices and biases contain, and change with."""
    names: set[str] = set()
    for i in model.attention_layers:
        tensors = model.attention_tensors(i)
        names |= {t.name for t in tensors if _in_maps(model, i, t) or _folded(model, i, t)}
    return names


def _in_maps(model: Model, index: int, tensor: Tensor) -> bool:
    """True if a tensor is one of the matrices of a layer's heads."""
    family, name = _in_layer(model, index, tensor)
    if len(tensor.shape) < 2:
        return False
    modules = (*family.heads.projections, *family.heads.others)
    loose = name in family.heads.loose and name.endswith("weight")
    return loose or name.rpartition(".")[0] in modules


def _folded(model: Model, index: int, tensor: Tensor) -> bool:
    """True if a tensor is a bias or a norm that the heads' matrices and biases contain."""
    family, name = _in_layer(model, index, tensor)
    heads, qk_norm = family.heads, family.scores.qk_norm
    before = (family.norms.before, family.memory and family.memory.norm)
    norms = [norm.module for norm in before if norm]
    if name.endswith("_scale"):  # of activations
        return False
    if qk_norm and not name.endswith("bias"):  # what it adds is in no head's numbers
        norms += [qk_norm.query, qk_norm.key]
    modules = {*heads.projections[:3], *heads.others, *norms} - {heads.out, ""}
    loose = name in heads.loose and len(tensor.shape) == 1 and not name.startswith(heads.out)
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
    gains = {}
    for i in model.attention_layers:
        for name in model.checkpoint.names_under(model.stem(i)):
            if GAIN.search(name) and name not in needed:
                tensor = model.checkpoint[name]
                if len(tensor.shape) == 1:
                    gains[name] = tensor
    return gains


def scale_findings(model: Model) -> Iterator[Finding]:
    """Tensors without the scale of trained weights: zero gains, dropped biases, large values.

    Rows of embeddings and what heads show are judged with them; the unembedding is not read here.
    """
    inputs, outputs = model.family.inputs, model.family.outputs
    norms = [norm for norm in (inputs.norm, outputs and outputs.norm) if norm]
    judged = shown_by_heads(model)
    judged |= {model.prefix + name for name in (inputs.tokens, inputs.positions)}
    noted, gains = model.checkpoint.noted, other_gains(model)
    offsets = {f"{norm.module}.{norm.gain}": norm.offset for norm in norms}
    # the norms that the row names have the offset of the others
    row = model.family
    named = [row.norms.after, row.mlp and row.mlp.norm, *map(row.norm_of, model.attention_layers)]
    offsets |= dict.fromkeys(gains, max((norm.offset for norm in named if norm), default=0.0))
    for name, tensor in (*needed_tensors(model).items(), *gains.items()):
        is_output = name.rpartition(".")[0].endswith(model.family.heads.out)
        if tensor.name in judged or name == ROWS or is_output:
            continue
        if prod(tensor.shape) and tensor.dtype in BITS:
            offset = offsets.get(name, 0.0)
            rms = sqrt(squares_of(tensor, offset) / prod(tensor.shape))
            if noted is not None and not isfinite(rms):
                noted.add(tensor.name)
            yield from scale_finding(tensor.name, rms, name in offsets, offset)
    # biases of attention that are zero in fewer than half of the layers
    biases_by_role: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for i in model.attention_layers:
        for tensor in model.attention_tensors(i):
            if tensor.name.endswith(".bias") and tensor.dtype in BITS:
                biases_by_role[tensor.name.removeprefix(model.stem(i))][i] = tensor
    for role, biases in biases_by_role.items():
        zero = {i: bias.name for i, bias in biases.items() if squares_of(bias) == 0}
        if zero and 2 * len(zero) < len(biases):
            share = f"{len(zero)} of {len(biases)} of {role}"
            text = f"{listed(list(zero.values()), NAMED)}: zero throughout, {share}."
            members = tuple(
                Member("tensor", None, layer=i, name=name, number=0.0) for i, name in zero.items()
            )
            yield zero_tensor(measure="rms", number=0.0, text=text, members=members)


no_head = finding(
    "untied_head",
    "no language-model head",
    rank=60,
    tried=Tried(planted=5, found=5, healthy=9),
    look_next="transformers draws a new head, with a warning alone. Usual where a language model "
    "became one that embeds; else the head was lost, or config.json should tie it to the "
    "embedding.",
)


def untied_head(model: Model) -> Iterator[Finding]:
    """Detect a config whose class needs a head of its own while the file has none."""
    classes, tokens = model.config.get("architectures"), model.prefix + model.family.inputs.tokens
    named = " ".join(map(str, classes)) if isinstance(classes, list) else ""
    untied = model.family.outputs is not None and model.config.get("tie_word_embeddings") is False
    if not untied or not PREDICTS_TOKENS.search(named):
        return
    checkpoint, head = model.checkpoint, model.ends.output_tensors.get(ROWS)
    known = {tensor.name for tensor in model.ends.input_tensors}
    for i in range(model.config.n_layers):
        known.update(checkpoint.names_under(model.stem(i)))
    matrices = [t for name, t in checkpoint.items() if name not in known and len(t.shape) == 2]
    # under a name that no row has
    may_be_head = any(tensor.shape[1] == model.ends.width for tensor in matrices)
    if (head is None or head.name == tokens) and not may_be_head:
        text = f"config.json says {named} and tie_word_embeddings false; the file has no head."
        yield no_head(measure="tensors", number=0.0, usual=1.0, text=text)


# Gains that are stored as if the norm counted them from another number: 1 too little, or 1 too
# much.
#
# Trained gains are hardly ever negative, and in every stack some are below 1. As they multiply, the
# mean share over the tensors of a stack is, in nine real checkpoints (284 tensors):
#     negative  at most 0.008; with 1 missing at least 0.108
#     below 1   at least 0.108; with 1 too much at most 0.008
# One tensor alone shows it where it has what its neighbours lack: no false alarm in the same
# tensors, and found in 145 of 284 (1 missing) and 135 of 284 (1 too much), in eight and five of the
# nine.
NEGATIVE = 0.04  # share of gains
SMALL = 0.02  # share of gains below 1
NEAR_ONE = 1.1  # usual gain of a stack whose gains training may have moved upwards, from 1
BELOW_ONE = 0.1  # share of gains less one below 1, in a stack to which 1 was added
MOST_USUAL = 3.0  # usual gain of such a stack; gains of another scale are no gains plus one
ALIKE = 1.5  # times the neighbours' median gain, or as many times less, once the 1 is undone
SPREADS = 3.0  # times the neighbours' spread: scaled gains spread as many times more
FEWEST_GAINS = 4  # tensors

# by role and layer: name, what multiplies, offset
Gains = dict[str, dict[int, tuple[str, np.ndarray, float]]]


norm_offset = finding(
    "norm_offset",
    "gains off by one",
    severity="warning",
    rank=125,
    tried=Tried(planted=9, found=9, healthy=9),
    look_next="See whether the architecture multiplies by w or by 1 + w, and whether the "
    "conversion added or subtracted 1 once too often.",
)


def offset_findings(model: Model, layers: Sequence[int]) -> Iterator[Finding]:
    """Gains that look as if 1 had been added once too often, or was missing."""
    gains = layer_gains(model, layers)
    tensors = [tensor for of_role in gains.values() for tensor in of_role.values()]
    if len(tensors) < FEWEST_GAINS:
        return
    negative = {name: _share_below(gain, 0) for name, gain, _ in tensors}
    small = {name: _share_below(gain, 1) for name, gain, _ in tensors}
    odd_ones = _off_alone(gains, negative, small)
    alone = {name: off for name, off in odd_ones if _resembles(gains, name, off)}
    few = [name for name, off in alone.items() if off == -1]
    more = [name for name, off in alone.items() if off == 1]
    rest = [name for name in negative if name not in alone]
    typical = float(np.median([np.median(gain) for _, gain, _ in tensors]))
    if _mean_of(negative, rest) > NEGATIVE:
        few = [name for name, share in negative.items() if share > NEGATIVE]
    elif _mean_of(small, negative) < SMALL and typical >= NEAR_ONE:
        less_one = [_share_below(gain - 1, 1) for _, gain, _ in tensors]
        all_off = np.mean(less_one) >= BELOW_ONE and typical - 1 <= MOST_USUAL
        more = list(negative) if all_off else []
    for names, shares, what, deed in (
        (few, negative, "negative", "1 is missing"),
        (more, small, "below 1", "1 was added once too often"),
    ):
        if names:
            number = _mean_of(shares, names)
            offset = next(offset for name, _, offset in tensors if name == names[0])
            multiplier = "1 + the stored numbers" if offset else "the stored numbers"
            text = (
                f"Norms of {model.family.name} multiply by {multiplier}. So read, {number:.0%} of "
                f"the gains are {what} in {listed(names, NAMED)}: it looks as if {deed}."
            )
            yield norm_offset(
                measure="share_of_gains",
                number=number,
                usual=_mean_of(shares, [name for name in shares if name not in names]),
                text=text.replace("%", " %"),
                members=tuple(Member("tensor", None, name=n, number=shares[n]) for n in names),
            )


def layer_gains(model: Model, layers: Sequence[int]) -> Gains:
    """Gains of the norms of layers that the row names, except queries' and keys'."""
    gains: Gains = defaultdict(dict)
    for i in layers:
        row = model.family.in_layer(model.config.layer_types[i])
        for norm in {norm.module: norm for norm in row.stored_norms.values()}.values():
            name = f"{model.stem(i)}{norm.module}.{norm.gain}"
            tensor = model.checkpoint.get(name)
            if tensor is not None and len(tensor.shape) == 1 and tensor.dtype in BITS:
                gain = norm.offset + tensor.read().astype(np.float64)
                gains[norm.module][i] = name, gain, norm.offset
    return gains


def _resembles(gains: Gains, name: str, off: int) -> bool:
    """True if gains resemble their neighbours' once the 1 is taken away or added back.

    By their median and by their spread, which a 1 does not change.
    """
    role, layer = next(
        (role, i) for role, layers in gains.items() for i, (n, *_) in layers.items() if n == name
    )
    layers = gains[role]
    near = sorted((i for i in layers if i != layer), key=lambda i: abs(i - layer))[:FEWEST_GAINS]
    around, undone = [layers[i][1] for i in near], layers[layer][1] - off
    middle = float(np.median([np.median(gain) for gain in around]))
    spread = float(np.median([np.std(gain) for gain in around]))
    ratio = float(np.median(undone)) / middle if middle > 0 else 0.0
    return 1 / ALIKE <= ratio <= ALIKE and float(np.std(undone)) <= SPREADS * spread


def _share_below(gain: np.ndarray, limit: float) -> float:
    return float(np.mean(gain < limit))


def _mean_of(shares: Mapping[str, float], names: Collection[str]) -> float:
    return float(np.mean([shares[name] for name in names])) if names else float("nan")


def _off_alone(
    gains: Gains, negative: Mapping[str, float], small: Mapping[str, float]
) -> Iterator[tuple[str, int]]:
    """Tensors unlike their role's neighbours: mostly negative, -1; none below 1, +1."""
    for of_role in gains.values():
        names = [name for _, (name, _, _) in sorted(of_role.items())]
        for i, name in enumerate(names):
            rest = [j for j in range(len(names)) if j != i]
            near = [names[j] for j in sorted(rest, key=lambda j: abs(j - i))[:FEWEST_GAINS]]
            if len(near) < FEWEST_GAINS - 1:
                continue
            negative_around = np.median([negative[neighbour] for neighbour in near])
            small_around = np.median([small[neighbour] for neighbour in near])
            if negative[name] > 0.5 and negative_around < NEGATIVE:
                yield name, -1
            elif small[name] < SMALL and small_around > 0.5:
                yield name, 1
