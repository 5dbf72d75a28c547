"""What stands out in a checkpoint: the kinds of findings, their list, and those that the heads' measures give."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np

from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.errors import printable
from weightscope.metrics.outliers import layer_medians, log_measure, off_trend, robust_z
from weightscope.metrics.spectra import effective_rank
from weightscope.tables import Table

SHOWN = 12  # findings on a terminal
NEAR_DEAD = 1e-3  # of the median Frobenius norm: a head of a thousandth writes or scores next to nothing
COLLAPSED = 1e-3  # singular values below this share of the first do not count when a rank is judged
COLLAPSED_TO = 0.25  # of the head's width: fewer that count are a collapse
BULK = 0.15  # of the head's width: an effective rank below it, the first value aside, is a collapse too
SPIKE = 3.0  # sigma_1 / sigma_2; random products of width 8 stay under 1.9, GPT-2's W_QK under 2.1
WIDE = 8  # heads narrower than this have larger gaps by chance and need a larger one in proportion
HEAD_Z, HEAD_FACTOR = 5.0, 3.0  # a head outside: both, in spread of the checkpoint's heads and as a plain factor
LAYER_Z, LAYER_FACTOR = 6.0, 2.0  # a layer off the trend of its neighbours
COMPARED = ("sigma1", "frobenius", "effective_rank", "bias_norm")

# What each kind is called, and what to look at next, the gravest first.
KINDS: dict[str, tuple[str, str]] = {
    "not_finite": (
        "weights that are not finite",
        "Read the tensor again from its source; if it is the same there, the training run or the conversion broke it.",
    ),
    "zero_head": (
        "zero head",
        "Check whether the head was pruned on purpose; if not, compare with the checkpoint before it.",
    ),
    "near_dead_head": (
        "near-dead head",
        "Zero the head and measure the loss: it may be pruned, or its learning rate was too small.",
    ),
    "rank_collapsed": (
        "rank-collapsed head",
        "Look at its spectrum in the report and at the singular values of its two factors: which one collapsed?",
    ),
    "spectral_spike": (
        "spectral spike",
        "A sink candidate: see which tokens lie along its first direction, then measure its attention on text.",
    ),
    "duplicate_heads": (
        "duplicate heads",
        "Compare the two heads' attention on text; copied layers and unbroken symmetry look like this.",
    ),
    "outlier_head": (
        "head outside the distribution",
        "Compare its spectrum with its layer's other heads, and with the same head at another training step.",
    ),
    "layer_off_trend": (
        "layer off the trend",
        "Compare the layer with its neighbours: another scale here means another norm gain, learning rate or merge.",
    ),
    "outlier_dimension": (
        "outlier dimension",
        "Expect massive activations in this dimension; keep it in higher precision when the model is quantised.",
    ),
    "undertrained_rows": (
        "undertrained embedding rows",
        "Prompt with these tokens: rows that training hardly met give erratic output; padding rows may be removed.",
    ),
    "oversized_rows": (
        "oversized embedding rows",
        "See which tokens or positions these are: the first position and special tokens often carry a sink's norm.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """Something in a checkpoint that a person should look at.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    layer, head : int or None
        Where; None where it concerns a whole layer or the model.
    map : str or None
        "qk" or "vo".
    measure : str
        What `number` is.
    number : float
        The value that made it a finding.
    usual : float or None
        What it is in the rest of the checkpoint.
    text : str
        The finding in a sentence.
    items : tuple of int
        Other heads, dimensions or rows that belong to it, by index.
    """

    kind: str
    layer: int | None
    head: int | None
    map: str | None
    measure: str
    number: float
    usual: float | None
    text: str
    items: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What its kind is called."""
        return KINDS[self.kind][0]

    @property
    def look_next(self) -> str:
        """What to look at next."""
        return KINDS[self.kind][1]

    @property
    def where(self) -> str:
        """`layer 3 head 7 qk`, as far as it is known."""
        indices = (("layer", self.layer), ("head", self.head))
        parts = [f"{name} {index}" for name, index in indices if index is not None]
        return " ".join([*parts, *([self.map] if self.map else [])]) or "model"

    def __str__(self) -> str:
        return printable(f"{self.title:30s} {self.where:22s} {self.text}")


class Findings(list[Finding]):
    """Findings, the gravest kind first, then by layer and head.

    Parameters
    ----------
    findings : iterable of Finding
        In any order.
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        ranks, last = list(KINDS), float("inf")

        def place(finding: Finding) -> tuple[float, float, float]:
            layer, head = (last if index is None else index for index in (finding.layer, finding.head))
            return ranks.index(finding.kind), layer, head

        super().__init__(sorted(findings, key=place))

    def __repr__(self) -> str:
        more = [f"and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([*map(str, self[:SHOWN]), *more]) or "no findings"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no findings</p>"
        rows = [(finding.title, finding.where, finding.text) for finding in self]
        return Table.of_rows(("finding", "where", "what"), rows)._repr_html_()

    @property
    def headline(self) -> str:
        """How many there are of each kind, in a sentence."""
        counts = Counter(finding.kind for finding in self)
        kinds = ", ".join(f"{counts[kind]} × {title}" for kind, (title, _) in KINDS.items() if counts[kind])
        return f"Findings: {kinds}." if kinds else "No findings."

    def as_json(self) -> list[dict[str, Any]]:
        """What findings.json holds; infinities as text."""

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, float) and not isfinite(value) else value

        return [
            {name: plain(value) for name, value in asdict(finding).items()}
            | {"title": finding.title, "look_next": finding.look_next}
            for finding in self
        ]


def head_findings(heads: MeasuredHeads, explained: Collection[int] = ()) -> Iterator[Finding]:
    """One finding a head and map at most, the gravest that holds; what a layer's heads share is the layer's.

    Parameters
    ----------
    heads : MeasuredHeads
    explained : collection of int
        Rows of `heads.grid`: layers whose spikes and scale an outlier dimension explains.
    """
    for name in MAPS:
        faulty = _faulty_heads(heads, name, explained)
        layers, far = _far_from_others(heads, name, explained)
        yield from (*faulty.values(), *layers)
        yield from (finding for at, finding in far.items() if at not in faulty and at[0] not in explained)


def _faulty_heads(heads: MeasuredHeads, name: str, explained: Collection[int]) -> dict[tuple[int, int], Finding]:
    """Zero, near-dead, collapsed and spiked heads of one map; heads that are not finite are left out."""
    norms, gaps = heads.grid(f"{name}_frobenius"), heads.grid(f"{name}_gap")
    alive = norms[np.isfinite(norms) & (norms > 0)]
    usual = float(np.median(alive)) if len(alive) else float("nan")
    findings = {}
    for i, h in np.argwhere(np.isfinite(norms)).tolist():
        s = heads.arrays[f"{name}_singular_values"][i, h]
        fault = _fault(MAPS[name], s[np.isfinite(s)], float(norms[i, h]), usual)
        gap, wide = float(gaps[i, h]), np.isfinite(s).sum()
        if fault is None and gap >= SPIKE * max(1.0, WIDE / wide) and i not in explained:
            rest = float(np.nanmedian(gaps))
            text = (
                f"The first singular value of {MAPS[name]} is {gap:.1f} times the second (the median head: {rest:.2f})."
            )
            fault = "spectral_spike", "gap", gap, rest, text
        if fault is not None:
            kind, measure, number, rest, text = fault
            findings[i, h] = Finding(kind, int(heads.layers[i]), h, name, f"{name}_{measure}", number, rest, text)
    return findings


def _fault(w: str, s: np.ndarray, norm: float, usual: float) -> tuple[str, str, float, float, str] | None:
    """What is wrong with a map of these singular values: kind, measure, its value, what it should be near, text."""
    if norm == 0:
        return "zero_head", "frobenius", 0.0, usual, f"{w} is exactly zero."
    if norm < NEAR_DEAD * usual:
        text = f"The Frobenius norm of {w} is {norm:.3g}, {usual / norm:,.0f} times below the checkpoint's median."
        return "near_dead_head", "frobenius", norm, usual, text
    counted, r = int((s > COLLAPSED * s[0]).sum()), len(s)
    if counted <= COLLAPSED_TO * r:
        text = f"Only {counted} of {r} singular values of {w} exceed a thousandth of the first."
        return "rank_collapsed", "singular_values_counted", counted, r, text
    bulk = float(effective_rank(s[1:]))
    if bulk < BULK * r:
        text = f"The effective rank of {w}, its first direction aside, is {bulk:.1f} of {r}."
        return "rank_collapsed", "effective_rank_of_the_rest", bulk, r, text
    return None


def _far_from_others(
    heads: MeasuredHeads, name: str, explained: Collection[int]
) -> tuple[list[Finding], dict[tuple[int, int], Finding]]:
    """Layers off their neighbours' trend, and heads far from their layer's median: each by its farthest measure."""
    layers: dict[int, tuple[float, Finding]] = {}
    far: dict[tuple[int, int], tuple[float, Finding]] = {}
    for measure in (f"{name}_{compared}" for compared in COMPARED):
        logs = log_measure(heads.grid(measure))  # (L, H)
        medians = layer_medians(logs)  # (L,)
        trend = medians.copy()
        trend[list(explained)] = np.nan  # neither judged nor anybody's standard
        differences = off_trend(trend)
        z = robust_z(differences)
        for i in np.flatnonzero((np.abs(z) >= LAYER_Z) & (np.abs(differences) >= np.log(LAYER_FACTOR))).tolist():
            value, usual = float(np.exp(medians[i])), float(np.exp(medians[i] - differences[i]))
            text = f"The median {measure} of its heads is {value:.3g}; its neighbours' is {usual:.3g} (z = {z[i]:.1f})."
            finding = Finding("layer_off_trend", int(heads.layers[i]), None, name, measure, value, usual, text)
            if i not in layers or abs(z[i]) > layers[i][0]:
                layers[i] = abs(float(z[i])), finding
        own = logs - medians[:, None]
        z = robust_z(own)
        for i, h in np.argwhere((np.abs(z) >= HEAD_Z) & (np.abs(own) >= np.log(HEAD_FACTOR))).tolist():
            value, usual = float(np.exp(logs[i, h])), float(np.exp(medians[i]))
            text = (
                f"{measure} is {value:.3g}; the median of its layer is {usual:.3g} (z = {z[i, h]:.1f} among all heads)."
            )
            finding = Finding("outlier_head", int(heads.layers[i]), h, name, measure, value, usual, text)
            if (i, h) not in far or abs(z[i, h]) > far[i, h][0]:
                far[i, h] = abs(float(z[i, h])), finding
    return [finding for _, finding in layers.values()], {at: finding for at, (_, finding) in far.items()}
