"""Findings that a head's own numbers give: dead, collapsed or spiked, far outside, or in a layer off the trend."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from weightscope.audits.finding import Finding
from weightscope.metrics.outliers import layer_medians, log_measure, off_trend, robust_z
from weightscope.metrics.spectra import effective_rank

MAPS = {"qk": "W_QK", "vo": "W_VO"}
NEAR_DEAD = 1e-3  # of the median Frobenius norm: a head of a thousandth writes or scores next to nothing
COLLAPSED = 1e-3  # singular values below this share of the first do not count when a rank is judged
COLLAPSED_TO = 0.25  # of the head's width: fewer that count are a collapse
BULK = 0.15  # of the head's width: an effective rank below it, the first value aside, is a collapse too
SPIKE = 3.0  # sigma_1 / sigma_2; random products of width 8 stay under 1.9, GPT-2's W_QK under 2.1
WIDE = 8  # heads narrower than this have larger gaps by chance and need a larger one in proportion
HEAD_Z, HEAD_FACTOR = 5.0, 3.0  # a head outside: both, in spread of the checkpoint's heads and as a plain factor
LAYER_Z, LAYER_FACTOR = 6.0, 2.0  # a layer off the trend of its neighbours
COMPARED = ("sigma1", "frobenius", "effective_rank", "bias_norm")
SHARE_THAT_EXPLAINS = 0.25  # of W_QK's energy in one residual dimension: it explains its layer's spikes and scale


@dataclass(frozen=True)
class Heads:
    """What the findings about heads are drawn from.

    Attributes
    ----------
    layers : (L,) int array
    columns : mapping of str to (L, H) arrays
    spectra : mapping of "qk" and "vo" to (L, H, r) arrays
    explained : set of int
        Indices into `layers` of those whose spikes and scale an outlier dimension explains.
    """

    layers: np.ndarray
    columns: Mapping[str, np.ndarray]
    spectra: Mapping[str, np.ndarray]
    explained: frozenset[int] = frozenset()


def head_findings(heads: Heads) -> list[Finding]:
    """One finding a head and map at most, the gravest that holds; what a layer's heads share is the layer's."""
    found: list[Finding] = []
    for name in MAPS:
        alone = {(i, h): finding for i, h, finding in _alone(heads, name)}
        off, far = _compared(heads, name)
        found += alone.values()
        found += off.values()
        found += [finding for at, finding in far.items() if at not in alone and at[0] not in heads.explained]
    return found


def _alone(heads: Heads, name: str) -> Iterator[tuple[int, int, Finding]]:
    """Zero, near-dead, collapsed and spiked heads of one map; heads that are not finite are left out."""
    w, spectra = MAPS[name], heads.spectra[name]
    frobenius, gaps = heads.columns[f"{name}_frobenius"], heads.columns[f"{name}_gap"]
    alive = frobenius[np.isfinite(frobenius) & (frobenius > 0)]
    usual = float(np.median(alive)) if len(alive) else float("nan")
    for i, h in np.ndindex(frobenius.shape):
        s = spectra[i, h][np.isfinite(spectra[i, h])]
        if not np.isfinite(frobenius[i, h]):
            continue
        norm, gap = float(frobenius[i, h]), float(gaps[i, h])

        def finding(kind: str, measure: str, number: float, rest: float | None, text: str) -> Finding:
            return Finding(kind, int(heads.layers[i]), h, name, measure, number, rest, text)  # noqa: B023

        if norm == 0:
            yield i, h, finding("zero_head", f"{name}_frobenius", 0.0, usual, f"{w} is exactly zero.")
        elif norm < NEAR_DEAD * usual:
            text = f"The Frobenius norm of {w} is {norm:.3g}, {usual / norm:,.0f} times below the checkpoint's median."
            yield i, h, finding("near_dead_head", f"{name}_frobenius", norm, usual, text)
        elif (counted := int((s > COLLAPSED * s[0]).sum())) <= COLLAPSED_TO * len(s):
            text = f"Only {counted} of {len(s)} singular values of {w} exceed a thousandth of the first."
            yield i, h, finding("rank_collapsed", f"{name}_singular_values_counted", counted, len(s), text)
        elif (bulk := float(effective_rank(s[1:]))) < BULK * len(s):
            text = f"The effective rank of {w}, its first direction aside, is {bulk:.1f} of {len(s)}."
            yield i, h, finding("rank_collapsed", f"{name}_effective_rank_of_the_rest", bulk, len(s), text)
        elif gap >= SPIKE * max(1.0, WIDE / len(s)) and i not in heads.explained:
            rest = float(np.nanmedian(gaps))
            text = f"The first singular value of {w} is {gap:.1f} times the second (the median head: {rest:.2f})."
            yield i, h, finding("spectral_spike", f"{name}_gap", gap, rest, text)


def _compared(heads: Heads, name: str) -> tuple[dict[int, Finding], dict[tuple[int, int], Finding]]:
    """Layers off the trend, and heads far from their layer's, by index: for each its farthest measure."""
    layers: dict[int, tuple[float, Finding]] = {}
    far: dict[tuple[int, int], tuple[float, Finding]] = {}
    for measure in COMPARED:
        column = f"{name}_{measure}"
        logs = log_measure(heads.columns[column])  # (L, H)
        medians = layer_medians(logs)  # (L,)
        trend = medians.copy()
        trend[list(heads.explained)] = np.nan  # neither judged nor anybody's standard
        differences = off_trend(trend)
        z = robust_z(differences)
        for i in np.flatnonzero((np.abs(z) >= LAYER_Z) & (np.abs(differences) >= np.log(LAYER_FACTOR))).tolist():
            here, around = float(np.exp(medians[i])), float(np.exp(medians[i] - differences[i]))
            text = f"The median {column} of its heads is {here:.3g}; its neighbours' is {around:.3g} (z = {z[i]:.1f})."
            finding = Finding("layer_off_trend", int(heads.layers[i]), None, name, column, here, around, text)
            layers[i] = max(layers.get(i, (0.0, finding)), (abs(float(z[i])), finding), key=lambda pair: pair[0])
        own = logs - medians[:, None]
        z = robust_z(own)
        for i, h in np.argwhere((np.abs(z) >= HEAD_Z) & (np.abs(own) >= np.log(HEAD_FACTOR))).tolist():
            here, around = float(np.exp(logs[i, h])), float(np.exp(medians[i]))
            text = (
                f"{column} is {here:.3g}; the median of its layer is {around:.3g} (z = {z[i, h]:.1f} among all heads)."
            )
            finding = Finding("outlier_head", int(heads.layers[i]), h, name, column, here, around, text)
            at = (i, h)
            far[at] = max(far.get(at, (0.0, finding)), (abs(float(z[i, h])), finding), key=lambda pair: pair[0])
    return {i: finding for i, (_, finding) in layers.items()}, {at: finding for at, (_, finding) in far.items()}
