"""What stands out between checkpoints: heads that are broken, gone, in another order, or moved beyond the others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from weightscope.audits.broken import heads_without_numbers
from weightscope.audits.changes import SAME
from weightscope.audits.findings import Finding, Findings, Member, aggregated, indexed
from weightscope.audits.head_findings import HEAD_FACTOR, HEAD_Z
from weightscope.audits.measures import MAPS
from weightscope.errors import counted
from weightscope.metrics.medians import known_median
from weightscope.metrics.outliers import log_measure, robust_z

if TYPE_CHECKING:
    from weightscope.audits.compare import Comparison

FEW = 0.1  # of all heads: where no more than these moved, each of them stands out
NAMED = 8  # heads or tensors that a sentence names


def comparison_findings(comparison: "Comparison") -> Findings:
    """Everything between checkpoints that a person should look at."""
    single = [*_zeroed(comparison), *_moved_most(comparison)]
    return Findings(
        [
            *_not_finite(comparison),
            *_overflowing(comparison),
            *_families(comparison),
            *aggregated(single, comparison.measured[0].n_heads),
            *_permuted(comparison),
            *_unmoved_layers(comparison),
            *(comparison.everything.findings if comparison.everything else ()),
        ]
    )


def _not_finite(comparison: "Comparison") -> Iterator[Finding]:
    """Heads of which a map or its bias is NaN or infinite in some checkpoint, and the tensors in which that stands.

    Those that overflow have findings of their own.
    """
    told = {(one.layer, one.map, label) for label, one in _overflowing_by_label(comparison)}
    for name, w in MAPS.items():
        for i, layer in enumerate(comparison.measured[0].layers.tolist()):
            broken = [
                [] if (layer, name, label) in told else heads_without_numbers(heads, i, name)
                for label, heads in zip(comparison.labels, comparison.measured, strict=True)
            ]
            reached = sorted(set().union(*broken))
            if not reached:
                continue
            labelled = zip(comparison.labels, broken, strict=True)
            where = "; ".join(f"{indexed('head', own)} of {label}" for label, own in labelled if own)
            text = f"{w} or its bias is NaN or infinite in {where}: how far that moved is unknown."
            members = tuple(Member("head", head) for head in reached)
            one = reached[0] if len(reached) == 1 else None
            yield Finding("not_finite", layer, one, name, "heads_not_finite", len(reached), 0.0, text, members)
    for label, tensors in zip(comparison.labels, comparison.broken, strict=True):
        if tensors:
            text = (
                f"NaN or infinity stands in {', '.join(tensors[:NAMED])}{' ...' * (len(tensors) > NAMED)} of {label}."
            )
            members = tuple(Member("tensor", None, name=tensor) for tensor in tensors)
            yield Finding("not_finite", None, None, None, "tensors_not_finite", len(tensors), 0.0, text, members)


def _overflowing_by_label(comparison: "Comparison") -> Iterator[tuple[str, Finding]]:
    for label, findings in zip(comparison.labels, comparison.overflowing, strict=True):
        yield from ((label, finding) for finding in findings)


def _overflowing(comparison: "Comparison") -> Iterator[Finding]:
    """Heads that finite weights of some checkpoint leave without numbers."""
    for label, finding in _overflowing_by_label(comparison):
        yield replace(finding, text=f"In {label}: {finding.text}")


def _families(comparison: "Comparison") -> Iterator[Finding]:
    families = list(dict.fromkeys(comparison.families))
    if len(families) > 1:
        text = f"The checkpoints are {', '.join(families[:-1])} and {families[-1]}."
        yield Finding("different_families", None, None, None, "families", len(families), 1.0, text)


def _zeroed(comparison: "Comparison") -> Iterator[Finding]:
    """Heads that were something in the first checkpoint and are zero in the last."""
    first, last = comparison.measured[0], comparison.measured[-1]
    for name, w in MAPS.items():
        before, after = first.grid(f"{name}_frobenius"), last.grid(f"{name}_frobenius")
        for i, h in np.argwhere((before > 0) & (after == 0)).tolist():
            text = f"{w} is exactly zero, and was {before[i, h]:.3g} in the Frobenius norm."
            yield _of_head(comparison, "zero_head", i, h, name, "frobenius", 0.0, float(before[i, h]), text)


def _moved_most(comparison: "Comparison") -> Iterator[Finding]:
    """Heads that moved far beyond the others that moved; where few did, those."""
    for name, w in MAPS.items():
        change = comparison.from_first[f"{name}_change"][-1]  # (L, H)
        moved = change > SAME
        known = int(np.count_nonzero(~np.isnan(change)))
        if 0 < moved.sum() <= max(1, FEW * known):
            usual, beyond, others = 0.0, moved, f"{counted(known - int(moved.sum()), 'head')} did not move"
        else:
            logs = log_measure(np.where(moved & np.isfinite(change), change, np.nan))
            if not np.isfinite(logs).any():
                continue
            usual = float(np.exp(known_median(logs)))
            far = (robust_z(logs) >= HEAD_Z) & (change >= HEAD_FACTOR * usual)
            beyond, others = far | np.isposinf(change), f"the median of those that moved is {usual:.3g}"
        for i, h in np.argwhere(beyond).tolist():
            number = float(change[i, h])
            text = f"{w} changed by {number:.3g}; {others}."
            yield _of_head(comparison, "moved_most", i, h, name, "change", number, usual, text)


def _of_head(
    comparison: "Comparison", kind: str, i: int, h: int, name: str, measure: str, number: float, usual: float, text: str
) -> Finding:
    layer, member = int(comparison.measured[0].layers[i]), Member("head", h, number=number)
    return Finding(kind, layer, h, name, f"{name}_{measure}", number, usual, text, (member,))


def _permuted(comparison: "Comparison") -> Iterator[Finding]:
    """Layers whose heads are the same functions in another order in the last checkpoint."""
    same = comparison.unmoved  # (L, H)
    for i, layer in enumerate(comparison.measured[0].layers.tolist()):
        order = comparison.order[-1, i]
        places = np.flatnonzero(same[i] & (order != np.arange(len(order)))).tolist()
        if places:
            pairs = ", ".join(f"{h} is now {order[h]}" for h in places[:NAMED])
            more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
            text = f"{counted(len(places), 'head')} of {len(order)} are the same in another order: {pairs}{more}."
            members = tuple(Member("head", h, name=f"now {order[h]}", number=float(order[h])) for h in places)
            yield Finding("permuted_heads", layer, None, None, "heads_permuted", len(places), 0.0, text, members)


def _unmoved_layers(comparison: "Comparison") -> Iterator[Finding]:
    """Layers of which no head moved while others' did."""
    same = comparison.unmoved
    still = np.flatnonzero(same.all(axis=1))
    if not len(still) or len(still) == len(same):
        return
    layers = comparison.measured[0].layers[still].tolist()
    moved = np.delete(~same, still, axis=0)
    text = f"No head of {indexed('layer', layers)} moved; of the others {int(moved.sum())} of {moved.size} heads did."
    members = tuple(Member("layer", layer) for layer in layers)
    yield Finding("unmoved_layers", None, None, None, "layers_unmoved", len(layers), 0.0, text, members)
