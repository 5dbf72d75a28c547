"""What stands out among all tensors of a checkpoint, whatever they are for."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from weightscope.audits.findings import Finding, Member
from weightscope.audits.tensors import Everything, TensorFacts, by_role, role_of
from weightscope.errors import counted
from weightscope.metrics.outliers import log_measure, off_trend, robust_z

ROLE_Z, ROLE_FACTOR = 8.0, 4.0  # a tensor off the trend of its role: both, in spread of the role and as a plain factor
LEAST_ROLE = 5  # tensors that make a trend
PLAIN = ("F64", "F32", "F16", "BF16")  # a format of fewer bits mixes its dtypes by design
SHOWN = 4  # names in a sentence; all are among the finding's members

Facts = Sequence[TensorFacts]


def tensor_findings(
    everything: Everything, judged: Collection[str] = (), padding: int | None = None
) -> Iterator[Finding]:
    """Everything that a person should look at; nothing in a fresh initialisation.

    Parameters
    ----------
    everything : Everything
    judged : collection of str
        Tensors whose values and rows an audit has judged already, with the heads and tokens that they make.
    padding : int, optional
        The row of token embeddings that is zero by design.
    """
    facts, known = everything.facts, set(judged)
    others = [one for one in facts if one.name not in known]
    yield from _not_finite(others)
    yield from _zero_tensors(facts)
    yield from _flat_rows(others, padding)
    yield from _duplicates(facts)
    yield from _dtypes(facts)
    yield from _norms(facts)


def _finding(
    kind: str, measure: str, number: float, text: str, tensors: Iterable[tuple[TensorFacts, float]]
) -> Finding:
    members = tuple(Member("tensor", None, name=one.name, number=value) for one, value in tensors)
    return Finding(kind, None, None, None, measure, number, None, text, members)


def _names(names: Sequence[str]) -> str:
    """The first few of some names."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _not_finite(facts: Facts) -> Iterator[Finding]:
    broken = [one for one in facts if one.not_finite]
    if broken:
        total = sum(one.not_finite for one in broken)
        where = _names([f"{one.not_finite:,} in {one.name}" for one in broken])
        text = f"NaN or infinite values in {counted(len(broken), 'tensor')}: {where}."
        yield _finding("not_finite", "values_not_finite", total, text, [(one, float(one.not_finite)) for one in broken])


def _zero_tensors(facts: Facts) -> Iterator[Finding]:
    """Matrices that are zero, and vectors that are where most others of their role are not."""
    for role, members in by_role(facts).items():
        zero = [one for one in members if one.size > 1 and one.least == one.most == 0]
        matrices = zero and row_count(zero[0]) > 1
        if zero and zero[0].kind == "f" and (matrices or 2 * len(zero) < len(members)):
            names = _names([one.name for one in zero])
            text = f"{names}: zero throughout, {len(zero)} of {len(members)} of {role}."
            yield _finding("zero_tensor", "rms", 0.0, text, [(one, 0.0) for one in zero])


def row_count(one: TensorFacts) -> int:
    """Rows of a tensor that has several axes longer than one; 1 of a vector."""
    return one.rows if sum(size > 1 for size in one.shape) > 1 else 1


def _flat_rows(facts: Facts, padding: int | None) -> Iterator[Finding]:
    for one in facts:
        if one.constant or row_count(one) == 1:
            continue
        padded = one.first_zero == (padding,)
        for what, count, first in (
            ("zero", 0 if padded else one.zero_rows, one.first_zero),
            ("one other value", one.constant_rows, one.first_constant),
        ):
            if count:
                rows_of = f"{count:,} of {one.rows:,} rows of {one.name}"
                text = f"{rows_of} are {what} throughout, the first {first[0]}."
                rows = tuple(Member("row", index, name=one.name) for index in first)
                yield Finding("constant_rows", None, None, None, "rows", count, 0.0, text, rows)


def _layer_of(name: str) -> tuple[str, int] | None:
    """What stands before a name's first number, and that number."""
    role, numbers = role_of(name)
    return (role.partition("*")[0], numbers[0]) if numbers else None


def _duplicates(facts: Facts) -> Iterator[Finding]:
    """Layers that hold the same tensors throughout, and tensors elsewhere that are the same."""
    content = {one.name: one.same_as or one.name for one in facts if not one.constant and one.size > 1}
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
            text = f"Layers {which} of {stem}* hold the same values in each of their {len(shared)} tensors."
            members = tuple(Member("layer", number, name=f"{stem}{number}") for number in sorted(numbers))
            yield Finding("duplicate_layers", None, None, None, "tensors_in_common", len(shared), None, text, members)
    yield from _equal_tensors([one for one in facts if one.name in content and _layer_of(one.name) not in copied])


def _equal_tensors(facts: Facts) -> Iterator[Finding]:
    """Tensors of the same values; where those of the same roles are equal again and again, one finding."""
    groups: dict[str, list[TensorFacts]] = defaultdict(list)
    for one in facts:
        groups[one.same_as or one.name].append(one)
    alike: dict[tuple[str, ...], list[list[TensorFacts]]] = defaultdict(list)
    for group in groups.values():
        if len(group) > 1:
            alike[tuple(sorted({one.role for one in group}))].append(group)
    for sets in alike.values():
        names = [one.name for one in sets[0]]
        more = f", and {counted(len(sets) - 1, 'other set')} of such names" if len(sets) > 1 else ""
        text = f"{_names(names)} hold exactly the same values{more}."
        tensors = [(one, one.rms) for group in sets for one in group]
        yield _finding("duplicate_tensors", "tensors", float(len(tensors)), text, tensors)


def _dtypes(facts: Facts) -> Iterator[Finding]:
    """dtypes that a slip brings about: another one within a role, a lone one, float64, integers for weights."""
    odd: dict[str, dict[str, TensorFacts]] = defaultdict(dict)
    for members in by_role(facts).values():
        usual, count = Counter(one.dtype for one in members).most_common(1)[0]
        if usual in PLAIN and 2 * count > len(members):
            for one in members:
                if one.dtype != usual:
                    odd[f"{one.dtype} where others of the role are {usual}"][one.name] = one
    plain = Counter(one.dtype for one in facts if one.dtype in PLAIN)
    for dtype, count in plain.items():
        usual = plain.most_common(1)[0][0]
        if dtype != usual and (count == 1 or dtype == "F64"):
            odd[f"{dtype} where others of the checkpoint are {usual}"] |= {o.name: o for o in facts if o.dtype == dtype}
    for one in facts:
        mask = one.least >= 0 and one.most <= 1  # truth values, of which GPT-2 calls one a bias
        if one.kind == "i" and one.name.endswith((".weight", ".bias")) and not mask:
            odd["integers where floats are expected"][one.name] = one
    for what, found in odd.items():
        text = f"{_names([f'{one.name} ({one.dtype})' for one in found.values()])}: {what}."
        yield _finding("odd_dtype", "tensors", float(len(found)), text, [(one, one.rms) for one in found.values()])


def _norms(facts: Facts) -> Iterator[Finding]:
    """Tensors whose norm is off that of their neighbours in role."""
    for role, members in by_role(facts).items():
        if len(members) < LEAST_ROLE or members[0].kind != "f":
            continue
        logs = log_measure(np.array([one.rms for one in members]))
        differences = off_trend(logs)
        z = robust_z(differences)
        far = np.flatnonzero((np.abs(z) >= ROLE_Z) & (np.abs(differences) >= np.log(ROLE_FACTOR)))
        if len(far):
            order = sorted(far.tolist(), key=lambda i: -abs(z[i]))
            one, difference = members[order[0]], float(differences[order[0]])
            others = f"; {counted(len(order) - 1, 'other')} of {role} too" if len(order) > 1 else ""
            text = (
                f"{one.name} has a root mean square of {one.rms:.3g}; its neighbours' is "
                f"{one.rms / np.exp(difference):.3g} (z = {z[order[0]]:.1f}){others}."
            )
            yield _finding("norm_off_role", "rms", one.rms, text, [(members[i], members[i].rms) for i in order])
