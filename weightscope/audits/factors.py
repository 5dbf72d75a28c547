"""The four factors of a head, W_Q, W_K, W_V and W_O, compared: faults that no spectrum of one map shows.

The Gram matrices of W_Q and W_K are alike, as they are trained together, and so are those of W_V and W_O; those of W_Q
and W_V share nothing. Where this is not so, factors were swapped, mixed up or initialised anew. Noise that is added to
weights lifts what is weakest in them. The limits were set on eight trained checkpoints (docs/audit.md).
"""

from collections.abc import Iterator

import numpy as np

from weightscope.audits.measures import MeasuredHeads
from weightscope.findings import Finding, Member, aggregated, of_head
from weightscope.metrics.outliers import known_median, layer_medians, log_measure, off_trend, robust_z
from weightscope.model import Model

FACTORS = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("query", "key", "value", "output")
# Biases relative to their factor's norm; Qwen2.5's first layer has 183 for keys, values have at most 2.
OUT_OF_PROPORTION = (1e3, 1e3, 30.0, 30.0)
TRAINED = 2.0  # log of how much more alike factors that belong together are: at least 2.7 in every trained layer
UNRELATED, SWAPPED = 1.3, -1.0
UNBALANCED = ((0, 1, 8.0), (2, 3, 20.0))  # factors by which |W_Q| / |W_K| and |W_V| / |W_O| leave their trend
UNBALANCED_Z = 6.0
NOISY, MOST_Z = 2.0, 6.0  # mean of z-scores, each cut at the second; trained layers reach 1.7
LAYERS_FOR_NOISE = 8  # fewer have no trend to leave
RANDOM_Z, RANDOM_SHARE = 5.0, 0.05  # how far spectra of a random factor stray from their expectation


def factor_findings(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases out of proportion, and layers whose factors are swapped, mixed up, untrained, unbalanced or noisy."""
    yield from _large_biases(heads)
    strange = dict(_unrelated(model, heads))
    yield from strange.values()
    unbalanced = dict(_unbalanced(model, heads, strange))
    yield from unbalanced.values()
    yield from _noisy(heads, {**strange, **unbalanced})


def _large_biases(heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases that are far larger than what their projection makes of a normalised input."""
    norms = heads.arrays["factor_norm"]  # (L, H, 4)
    usual_norms = np.median(norms[..., :3], axis=1, keepdims=True)  # (L, 1, 3): one head may be dead
    with np.errstate(divide="ignore", invalid="ignore"):
        biases = heads.arrays["factor_bias"] / usual_norms  # (L, H, 3)
    findings = []
    for i, h, which in np.argwhere(np.isfinite(biases) & (biases > OUT_OF_PROPORTION[:3])).tolist():
        ratio, usual = float(biases[i, h, which]), known_median(biases[..., which])
        text = f"Its {BIASES[which]} bias is {ratio:,.3g} times as long as {FACTORS[which]} (median head: {usual:.2g})."
        about = {"map": "qk" if which < 2 else "vo", "measure": f"{BIASES[which]}_bias", "usual": usual, "text": text}
        findings.append(of_head(int(heads.layers[i]), h, kind="large_bias", number=ratio, **about))
    yield from aggregated(findings, heads.n_heads)
    summed = np.sqrt((norms[..., 2] ** 2 * norms[..., 3] ** 2).sum(axis=1))  # (L,) at least what a layer writes
    with np.errstate(divide="ignore", invalid="ignore"):
        of_outputs = heads.arrays["output_bias_norm"] / summed  # (L,)
    for i in np.flatnonzero(np.isfinite(of_outputs) & (of_outputs > OUT_OF_PROPORTION[3])).tolist():
        ratio, usual = float(of_outputs[i]), known_median(of_outputs)
        text = f"The output bias is {ratio:,.3g} times as long as W_V and W_O together (the median layer: {usual:.2g})."
        yield Finding(
            kind="large_bias", layer=int(heads.layers[i]), map="vo", measure="output_bias", number=ratio, usual=usual,
            text=text,
        )  # fmt: skip


def _relation(heads: MeasuredHeads) -> np.ndarray:
    """Log of how much more alike the factors are that belong together than those that do not, (L,)."""
    likeness = _mean(heads.arrays["factor_likeness"], axis=1)  # (L, 4)
    return log_measure(likeness[:, :2].sum(axis=1)) - log_measure(likeness[:, 2:].sum(axis=1))


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite values along an axis; NaN where none is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum(axis=axis) / finite.sum(axis=axis)


def _unrelated(model: Model, heads: MeasuredHeads) -> Iterator[tuple[int, Finding]]:
    """Layers whose factors do not belong together, by position; none where the others' do not either."""
    relation = _relation(heads)
    for i in np.flatnonzero(relation < UNRELATED).tolist():
        usual = known_median(np.delete(relation, i))
        if not usual >= TRAINED:
            continue
        times, elsewhere = float(np.exp(relation[i])), float(np.exp(usual))
        compared = f"{times:.2g} times as alike as W_Q and W_V, W_K and W_O (elsewhere {elsewhere:.0f})"
        kind, text = "mixed_factors", f"W_Q and W_K, W_V and W_O are only {compared}: they do not belong together."
        if relation[i] < SWAPPED:
            kind, text = "swapped_factors", f"W_Q and W_K, W_V and W_O are {compared}: W_K and W_V look swapped."
        elif _random(model, heads, i):
            kind, text = "untrained_layer", f"Its factors have the spectra of random matrices. {text}"
        yield i, Finding(
            kind=kind, layer=int(heads.layers[i]), measure="factor_relation", number=times,
            usual=elsewhere, text=text,
        )  # fmt: skip


def _random(model: Model, heads: MeasuredHeads, i: int) -> bool:
    """Whether the factors of the i-th layer have the second moments of Gaussian matrices.

    tr(G^2) / (tr G)^2 is 1/r + 1/d for a Gaussian (d, r) factor (Marchenko and Pastur 1967), with an error of about
    2 / (d r) for each head.
    """
    spread = heads.arrays["factor_spread"][i] * heads.arrays["factor_width"][i]  # (H, 4): 1 where random
    r = heads.arrays["qk_singular_values"].shape[-1]
    error = RANDOM_SHARE + RANDOM_Z * 2 / (r * np.sqrt(heads.n_heads))
    judged = slice(0 if model.family.qk_norm is None else 2, 4)  # a q/k-norm's gain is folded into W_Q and W_K
    return bool((np.abs(_mean(spread[:, judged], axis=0) - 1) < error).all())


def _unbalanced(model: Model, heads: MeasuredHeads, known: dict[int, Finding]) -> Iterator[tuple[int, Finding]]:
    """Layers in which one factor has another size than its partner, unlike their neighbours'."""
    logs = log_measure(heads.arrays["factor_norm"])  # (L, H, 4)
    for a, b, limit in UNBALANCED:
        if a == 0 and model.family.qk_norm is not None:
            continue  # a norm follows: the size of W_Q means nothing
        ratios = layer_medians(logs[..., a] - logs[..., b])  # (L,)
        ratios[list(known)] = np.nan
        differences = off_trend(ratios)
        far = (np.abs(differences) >= np.log(limit)) & (np.abs(robust_z(differences)) >= UNBALANCED_Z)
        for i in np.flatnonzero(far).tolist():
            ratio, usual = float(np.exp(ratios[i])), float(np.exp(ratios[i] - differences[i]))
            text = f"{FACTORS[a]} is {ratio:.3g} times as large as {FACTORS[b]}; in its neighbours {usual:.3g} times."
            yield i, Finding(
                kind="unbalanced_factors", layer=int(heads.layers[i]), map="qk" if a == 0 else "vo",
                measure="factor_balance", number=ratio, usual=usual, text=text,
            )  # fmt: skip


def _noisy(heads: MeasuredHeads, known: dict[int, Finding]) -> Iterator[Finding]:
    """Layers in which what is weakest in every factor is stronger than in their neighbours."""
    if len(heads.layers) < LAYERS_FOR_NOISE:
        return
    floors = [layer_medians(log_measure(heads.arrays["factor_floor"][..., which])) for which in range(4)]
    rows = [log_measure(heads.arrays["row_floor"][:, which]) for which in range(4)]
    scores = []
    for floor in (*floors, *rows):
        floor[list(known)] = np.nan
        scores.append(np.clip(robust_z(off_trend(floor)), -MOST_Z, MOST_Z))
    score = np.mean(scores, axis=0)  # (L,)
    for i in np.flatnonzero(score > NOISY).tolist():
        text = (
            f"What is weakest in its four factors is stronger than in its neighbours, by {score[i]:.1f} standard "
            "deviations on average: noise may have been added to its weights."
        )
        yield Finding(
            kind="noise_floor", layer=int(heads.layers[i]), measure="noise_floor", number=float(score[i]),
            usual=known_median(score), text=text, members=(Member("layer", int(heads.layers[i])),),
        )  # fmt: skip
