"""What a head's own measures say of it: dead, collapsed, spiked, or far from the others."""

from collections.abc import Collection, Iterator

import numpy as np

from weightscope.audits.findings import Finding, Member, aggregated
from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.metrics.medians import known_median
from weightscope.metrics.outliers import layer_medians, log_measure, off_trend, robust_z
from weightscope.metrics.spectra import effective_rank

NEAR_DEAD = 1e-3  # of the median Frobenius norm: a head of a thousandth writes or scores next to nothing
COLLAPSED = 1e-3  # singular values below this share of the first do not count when a rank is judged
COLLAPSED_TO = 0.25  # of the head's width: fewer that count are a collapse
BULK = 0.15  # of the head's width: an effective rank below it, the first value aside, is a collapse too
SPIKE = 3.0  # sigma_1 / sigma_2; random products of width 8 stay under 1.9, GPT-2's W_QK under 2.1
WIDE = 8  # heads narrower than this have larger gaps by chance and need a larger one in proportion
HEAD_Z, HEAD_FACTOR = 5.0, 3.0  # a head outside: both, in spread of the checkpoint's heads and as a plain factor
LAYER_Z, LAYER_FACTOR = 6.0, 2.0  # a layer off the trend of its neighbours
COMPARED = ("sigma1", "frobenius", "effective_rank", "bias_norm")


def head_findings(heads: MeasuredHeads, explained: Collection[int] = ()) -> Iterator[Finding]:
    """One finding a head and map at most, the gravest that holds; heads of a layer with one fault are one finding.

    What all heads of a layer share in size is the layer's.

    Parameters
    ----------
    heads : MeasuredHeads
    explained : collection of int
        Rows of `heads.grid`: layers whose spikes and scale an outlier dimension explains.
    """
    for name in MAPS:
        faulty = _faulty_heads(heads, name, explained)
        layers, far = _far_from_others(heads, name, explained)
        others = (finding for at, finding in far.items() if at not in faulty and at[0] not in explained)
        yield from (*aggregated([*faulty.values(), *others], heads.n_heads), *layers)


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
            rest = known_median(gaps)
            text = (
                f"The first singular value of {MAPS[name]} is {gap:.1f} times the second (the median head: {rest:.2f})."
            )
            fault = "spectral_spike", "gap", gap, rest, text
        if fault is not None:
            kind, measure, number, rest, text = fault
            findings[i, h] = _of_head(kind, int(heads.layers[i]), h, name, f"{name}_{measure}", number, rest, text)
    return findings


def _of_head(
    kind: str, layer: int, head: int, map_name: str, measure: str, number: float, usual: float, text: str
) -> Finding:
    member = Member("head", head, number=number)
    return Finding(kind, layer, head, map_name, measure, number, usual, text, (member,))


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
            finding = _of_head("outlier_head", int(heads.layers[i]), h, name, measure, value, usual, text)
            if (i, h) not in far or abs(z[i, h]) > far[i, h][0]:
                far[i, h] = abs(float(z[i, h])), finding
    return [finding for _, finding in layers.values()], {at: finding for at, (_, finding) in far.items()}
