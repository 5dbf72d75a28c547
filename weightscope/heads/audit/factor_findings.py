"""Compare the four factors W_Q, W_K, W_V and W_O: faults that no spectrum of one map shows.

The Gram matrices of W_Q and W_K are alike, as they are trained together, and so are W_V's and
W_O's; W_Q and W_V share nothing. Where this is not so, factors were swapped, mixed up or
initialised anew. Noise that is added to weights lifts what is weakest in them. Each factor uses the
dimensions of the stream as it does in the other layers: where its other axis does instead, it is
transposed. docs/audit.md says which checkpoints the limits were set on.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.heads.tensors.findings import beyond_siblings, lower_median, other_gains
from weightscope.heads.tensors.measure import BITS
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.head_factors import FEWEST, cosines, profiles, share
from weightscope.model.metrics.matrix_spectra import beyond_shuffled, shuffled_error
from weightscope.model.metrics.outliers import (
    known_median,
    layer_medians,
    log_measure,
    off_trend,
    robust_z,
)
from weightscope.model.metrics.spectra import spread_error
from weightscope.model.model import Model
from weightscope.report.findings import (
    Finding,
    Member,
    Tried,
    aggregated,
    finding,
    indexed,
    of_head,
)

FACTORS = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("query", "key", "value", "output")
# Biases relative to their factor's norm; Qwen2.5's first layer has 183 for keys, values have at
# most 2.
OUT_OF_PROPORTION = (1e3, 1e3, 30.0, 30.0)
# log of how much more alike factors that belong together are: at least 2.7 in every trained layer
TRAINED = 2.0
UNRELATED, SWAPPED = 1.3, -1.0
HEADS = 16  # of all layers: of fewer random ones, the log of a relation may exceed 2 on average
# the same of one pair; one that belongs together has 1.3 at least, in one layer of Gemma 3 0.87
APART = 0.6
# times the usual distance of layers past the first from their median: four standard deviations
APART_TIMES = 6.0
# factors by which |W_Q| / |W_K| and |W_V| / |W_O| leave their trend
UNBALANCED = ((0, 1, 8.0), (2, 3, 20.0))
UNBALANCED_Z = 6.0
NOISY, MOST_Z = 2.0, 6.0  # mean of z-scores, each cut at the second; trained layers reach 1.7
LAYERS_FOR_NOISE = 8  # fewer have no trend to leave
# over the root of the width: above the cosine that profiles of two layers have by chance
AGREEING = 5.0
# of the profiles: more of them is common along the other axis where all layers are transposed
ALL_LAYERS = 0.15
EXCHANGED = (
    # cosine of the difference of two factors' profiles with that in other layers, if it is below
    # minus this
    0.4
)
# of the norms of query and key biases, on either side of 1 in a layer and in its neighbours
BIAS_RATIO = 5.0
# of that error; in each of nine real checkpoints some layer's factor is 1.1 from random at least
TOO_NARROW = 0.5

Pair = tuple[float, float]


def factor_findings(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases out of proportion, and layers with misplaced, mixed, untrained or noisy factors."""
    yield from _large_biases(heads)
    yield from _without_scales(heads)
    misplaced = _misplaced(heads)
    yield from _misplaced_findings(heads, misplaced)
    exchanged = _exchanged(model, heads, misplaced)
    yield from _exchanged_findings(heads, exchanged)
    known = misplaced.layers.union(*exchanged.values())
    strange = dict(_unrelated(model, heads))
    yield from strange.values()
    known = known.union(strange)
    yield from _unrelated_pairs(heads, known)
    unbalanced = dict(_unbalanced(model, heads, known))
    yield from unbalanced.values()
    yield from _noisy(heads, known.union(unbalanced))


@finding(
    "large_bias",
    "bias out of proportion",
    severity="warning",
    rank=90,
    look_next="Read the tensor again from its source; compare it with the same bias of other layers.",
)
def _large_biases(heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases that are far larger than what their projection makes of a normalised input."""
    norms = heads.arrays["factor_norm"]  # (L, H, 4)
    # (L, 1, 3): one head may be dead
    usual_norms = np.median(norms[..., :3], axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        biases = heads.arrays["factor_bias"] / usual_norms  # (L, H, 3)
    findings = []
    for i, h, which in np.argwhere(np.isfinite(biases) & (biases > OUT_OF_PROPORTION[:3])).tolist():
        ratio, usual = float(biases[i, h, which]), known_median(biases[..., which])
        text = f"Its {BIASES[which]} bias is {ratio:,.3g} times as long as {FACTORS[which]} (median head: {usual:.2g})."
        about = {
            "map": "qk" if which < 2 else "vo",
            "measure": f"{BIASES[which]}_bias",
            "usual": usual,
            "text": text,
        }
        findings.append(of_head(int(heads.layers[i]), h, kind="large_bias", number=ratio, **about))
    yield from aggregated(findings, heads.n_heads)
    # (L,) at least what a layer writes
    summed = np.sqrt((norms[..., 2] ** 2 * norms[..., 3] ** 2).sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_outputs = heads.arrays["output_bias_norm"] / summed  # (L,)
    for i in np.flatnonzero(np.isfinite(of_outputs) & (of_outputs > OUT_OF_PROPORTION[3])).tolist():
        ratio, usual = float(of_outputs[i]), known_median(of_outputs)
        text = f"The output bias is {ratio:,.3g} times as long as W_V and W_O together (the median layer: {usual:.2g})."
        yield Finding(
            kind="large_bias",
            layer=int(heads.layers[i]),
            map="vo",
            measure="output_bias",
            number=ratio,
            usual=usual,
            text=text,
        )


def _without_scales(heads: MeasuredHeads) -> Iterator[Finding]:
    """Factors a thousand times as large as their layer's others, or as in other layers.

    W_O is held to other layers only: a norm of what heads read, as DiffLlama's, leaves it any
    scale.
    """
    squares = heads.arrays["factor_norm"] ** 2  # (L, H, 4)
    norms = np.sqrt(_mean(squares, axis=1))  # (L, 4)
    for i, which in np.argwhere(np.isfinite(norms)).tolist():
        what, size = f"{FACTORS[which]}: the norm of a head's factor", float(norms[i, which])
        in_layer = norms[i, :3] if which < 3 else norms[i, 3:]
        usual = lower_median(in_layer), lower_median(norms[:, which])
        layer, name = int(heads.layers[i]), "qk" if which < 2 else "vo"
        yield from beyond_siblings(what, size, *usual, layer=layer, map=name)


def _relation(heads: MeasuredHeads) -> np.ndarray:
    """Log likeness of factors that belong together over that of those that do not, (L,)."""
    likeness = _mean(heads.arrays["factor_likeness"], axis=1)  # (L, 4)
    return log_measure(likeness[:, :2].sum(axis=1)) - log_measure(likeness[:, 2:].sum(axis=1))


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite values along an axis; NaN where none is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum(axis=axis) / finite.sum(axis=axis)


@finding(
    "mixed_factors",
    "factors that do not belong together",
    severity="warning",
    rank=60,
    look_next="Check the conversion: some of its tensors may belong to another layer, or to another "
    "checkpoint.",
)
@finding(
    "untrained_layer",
    "layer as initialised",
    severity="warning",
    rank=70,
    look_next="Check whether the layer was added or reset on purpose, and whether it was trained "
    "since.",
)
def _unrelated(model: Model, heads: MeasuredHeads) -> Iterator[tuple[int, Finding]]:
    """Layers whose factors do not belong together, by position; none if that is so in all."""
    relation = _relation(heads)
    everywhere = known_median(relation) <= -TRAINED  # swapped in most layers
    if not _enough(heads):
        return
    for i in np.flatnonzero(relation < (SWAPPED if everywhere else UNRELATED)).tolist():
        usual = known_median(np.delete(relation, i))
        if not (everywhere or usual >= TRAINED):
            continue
        times, elsewhere = float(np.exp(relation[i])), float(np.exp(usual))
        usually = f"{elsewhere:.2g}, which is as wrong" if everywhere else f"{elsewhere:.0f}"
        compared = f"{times:.2g} times as alike as W_Q and W_V, W_K and W_O (elsewhere {usually})"
        kind, text = (
            "mixed_factors",
            f"W_Q and W_K, W_V and W_O are only {compared}: they do not belong together.",
        )
        if relation[i] < SWAPPED:
            kind, text = (
                "swapped_factors",
                f"W_Q and W_K, W_V and W_O are {compared}: W_K and W_V look swapped.",
            )
        elif _random(model, heads, i):
            kind, text = (
                "untrained_layer",
                f"Its factors have the spectra of random matrices. {text}",
            )
        yield (
            i,
            Finding(
                kind=kind,
                layer=int(heads.layers[i]),
                measure="factor_relation",
                number=times,
                usual=elsewhere,
                text=text,
            ),
        )


@finding(
    "untrained",
    "weights as initialised",
    severity="warning",
    rank=65,
    tried=Tried(planted=9, found=9, healthy=9),
    look_next="If they should be trained, check the names they were saved under: transformers initialises anew "
    "every tensor that it does not find under the name it expects.",
)
def untrained(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Detect that all layers are as initialised: random factors, constant gains and biases.

    Folded gains hold one value too: then the factors alone decide, unless heads are too narrow. No
    layer of nine real checkpoints (124 layers) has four random factors. Where gains and biases look
    trained, so that only they may have been loaded, most layers must be `_unlearned`.
    """
    layers = heads.layers.tolist()
    if not layers or _error(heads) > TOO_NARROW:
        return
    if not looks_random(model, heads):
        yield from _unlearned_findings(model, heads)
        return
    tensors = {t.name: t for i in layers for t in model.attention_tensors(i)} | other_gains(model)
    read = [
        t for t in tensors.values() if t.dtype in BITS and t.name.endswith((".weight", ".bias"))
    ]
    # gains and biases
    vectors = [tensor for tensor in read if sum(size > 1 for size in tensor.shape) == 1]
    if all(map(_is_constant, vectors)) and (vectors or _enough(heads)):
        number = float(
            np.mean([ratio for i in range(len(layers)) for ratio in _spread(model, heads, i)])
        )
        constant = (
            ", and every gain and bias of attention and every gain of the network holds one value"
        )
        text = f"W_Q, W_K, W_V and W_O of {indexed('layer', layers)} have the spectra of random matrices"
        yield Finding(
            kind="untrained",
            measure="factor_spread",
            number=number,
            usual=1.0,
            text=f"{text}{constant * bool(vectors)}: they are as initialised.",
            members=tuple(Member("layer", layer, layer=layer) for layer in layers),
        )
    else:
        yield from _unlearned_findings(model, heads)


def _unlearned_findings(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Untrained layers drawn by any law, if they are most; fewer are `_unrelated` to the others."""
    relation = _relation(heads)
    few = len(heads.layers) / 2
    alone = np.flatnonzero(relation < TRAINED).tolist() if _enough(heads) else []
    if len(alone) <= few or not known_median(relation[alone]) < UNRELATED:
        return
    layers = [layer for layer in heads.layers[alone].tolist() if _is_shuffled(model.layer(layer))]
    if len(layers) > few:
        times = float(np.exp(known_median(relation[alone])))
        text = (
            f"In {indexed('layer', layers)} W_Q, W_K, W_V and W_O have no singular value beyond those of the same "
            f"entries shuffled, and W_Q and W_K, W_V and W_O are {times:.2g} times as alike as other pairs (at least "
            f"{np.exp(TRAINED):.0f} where they were trained): they are as initialised."
        )
        members = tuple(Member("layer", layer, layer=layer) for layer in layers)
        yield Finding(
            kind="untrained",
            measure="factor_relation",
            number=times,
            usual=1.0,
            text=text,
            members=members,
        )


def _is_shuffled(layer: Layer) -> bool:
    """True if the heads' factors, side by side, look like matrices of independent entries."""
    group = layer.n_heads // layer.n_kv_heads
    heads = list(layer.heads)
    factors = [
        np.concatenate([head.w_q for head in heads], axis=1),
        np.concatenate([head.w_k for head in heads[::group]], axis=1),
        np.concatenate([head.w_v for head in heads[::group]], axis=1),
        np.concatenate([head.w_o.T for head in heads], axis=1),
    ]  # (d, H r)
    return all(beyond_shuffled(w) <= shuffled_error(w) for w in factors)


def _is_constant(tensor: Tensor) -> bool:
    values = tensor.read()
    return bool((values == values.flat[0]).all())


def _enough(heads: MeasuredHeads) -> bool:
    """True if there are too many heads for random ones to be alike on average."""
    return len(heads.table) >= HEADS


def _unrelated_pairs(heads: MeasuredHeads, known: set[int]) -> Iterator[Finding]:
    """Layers in which one pair of factors does not belong together while the other does.

    A layer is held to the spread of its own model's layers; the first, whose pairs are unlike the
    others', is not.
    """
    likeness = log_measure(_mean(heads.arrays["factor_likeness"], axis=1))  # (L, 4)
    with np.errstate(invalid="ignore"):
        # (L, 2)
        relations = (
            likeness[:, :2] - np.logaddexp(likeness[:, 2], likeness[:, 3])[:, None] + np.log(2)
        )
    for pair, (name, which) in enumerate(
        (("qk", "W_Q and W_K"), ("vo", "W_V and W_O")) if _enough(heads) else ()
    ):
        partners = relations[:, 1 - pair]
        low = np.flatnonzero((relations[:, pair] < APART) & (partners >= TRAINED)).tolist()
        for i in low if known_median(partners) >= TRAINED else ():
            past_first = [j for j in range(1, len(relations)) if j != i]
            others = relations[
                past_first if len(past_first) > 1 else np.arange(len(relations)) != i, pair
            ]
            usual = known_median(others)
            usual_distance = known_median(np.abs(others - usual))
            alone = (
                i > 0
                and usual >= TRAINED
                and usual - relations[i, pair] > APART_TIMES * usual_distance
            )
            if i in known or not (alone or usual < APART):
                continue
            times, elsewhere = float(np.exp(relations[i, pair])), float(np.exp(usual))
            text = (
                f"{which} are only {times:.2g} times as alike as W_Q and W_V, W_K and W_O (elsewhere {elsewhere:.2g}): "
                "one of them may be transposed, or of another layer."
            )
            yield Finding(
                kind="mixed_factors",
                layer=int(heads.layers[i]),
                map=name,
                measure="pair_relation",
                number=times,
                usual=elsewhere,
                text=text,
            )


def looks_random(model: Model, heads: MeasuredHeads) -> bool:
    """True if all measured layers may be random; layers of narrow heads always may."""
    return all(_random(model, heads, i) for i in range(len(heads.layers)))


def _random(model: Model, heads: MeasuredHeads, i: int) -> bool:
    """True if the factors of the i-th layer have the second moments of Gaussian matrices.

    tr(G^2) / (tr G)^2 is 1/r + 1/d for a Gaussian (d, r) factor (Marchenko and Pastur 1967), with
    an error of about 2 / (d r) for each head.
    """
    return bool((np.abs(_spread(model, heads, i) - 1) < _error(heads)).all())


def _error(heads: MeasuredHeads) -> float:
    """Largest distance from 1 of the spread of a layer's random factors."""
    r = heads.arrays["qk_singular_values"].shape[-1]
    return spread_error(r * np.sqrt(heads.n_heads))


def _spread(model: Model, heads: MeasuredHeads, i: int) -> np.ndarray:
    """Spread of each factor's spectrum in the i-th layer, 1 if random: (4,), or (2,) of W_V, W_O.

    A gain of q/k-norms that is folded into W_Q and W_K changes their spread, so they are left out.
    """
    spread = heads.arrays["factor_spread"][i] * heads.arrays["factor_width"][i]  # (H, 4)
    return _mean(spread[:, 0 if model.family.scores.qk_norm is None else 2 :], axis=0)


# Factors that are transposed or exchanged, by the dimensions of the stream that they use.


class Misplaced(NamedTuple):
    """Factors that are not what they are read as, each by position of the layer."""

    # by factor: cosines with the other layers as it is read, and transposed
    transposed: dict[int, dict[int, Pair]]
    exchanged: dict[int, Pair]  # W_V and W_O: the same of what agrees best
    # by factor: profiles (L, d) along the axis that is read as the stream
    as_read: dict[int, np.ndarray]

    @property
    def layers(self) -> set[int]:
        """Positions of the layers."""
        return set(self.exchanged).union(*self.transposed.values())


def _misplaced(heads: MeasuredHeads) -> Misplaced:
    """Factors whose other axis is the stream: transposed, or W_V and W_O exchanged."""
    energies, n_heads = heads.arrays["row_energies"], heads.n_heads  # (L, 4, d)
    n_layers, _, d = energies.shape
    misplaced = Misplaced({}, {}, {})
    if d % n_heads or n_layers < FEWEST:
        return misplaced
    limit = AGREEING / np.sqrt(d)
    misplaced.as_read.update({f: profiles(energies[:, f], n_heads) for f in range(4)})
    columns = [heads.arrays[f"{name}_column_energies"] for name in ("qk", "vo")]  # (L, H, 2, r)
    across = {
        f: profiles(columns[f // 2][:, :, f % 2].reshape(n_layers, -1), n_heads)
        for f in range(4)
        if columns[f // 2].shape[-1] * n_heads == d and not (f in (1, 2) and heads.shares_keys)
    }  # of factors that are square: others would not fit if they were transposed
    as_partner: dict[int, np.ndarray] = {}
    for f, profile in across.items():
        read, partner = misplaced.as_read[f], 5 - f
        all_layers = share(profile) > share(read) + ALL_LAYERS
        first, second = (profile, read) if all_layers else (read, profile)
        wrong, right = np.abs(cosines(first, second))[:: -1 if all_layers else 1]
        if f > 1 and partner in across and not all_layers:
            as_partner[f] = np.abs(cosines(misplaced.as_read[partner], profile)[1])
        best = np.fmax(right, as_partner.get(f, right))
        places = np.flatnonzero(best - wrong > limit).tolist()
        if places and (len(places) > n_layers / 2) == all_layers:
            misplaced.transposed[f] = {i: (float(wrong[i]), float(right[i])) for i in places}
    alone = misplaced.transposed.keys() == {2, 3} and len(across) == 4
    for i in sorted(set(misplaced.transposed.get(2, ())).union(misplaced.transposed.get(3, ()))):
        pairs = [
            (f, misplaced.transposed[f][i]) for f in (2, 3) if i in misplaced.transposed.get(f, ())
        ]
        if as_partner.keys() == {2, 3}:
            instead = sum(float(as_partner[f][i]) - right for f, (_, right) in pairs)
        # no layer tells what is usual; a conversion that transposes squares transposes W_Q and W_K
        # too
        else:
            instead = 1.0 if alone else -1.0
        if instead > 0:
            misplaced.exchanged[i] = max((pair for _, pair in pairs), key=lambda pair: pair[1])
            if as_partner:
                best = max(pairs, key=lambda each: float(as_partner[each[0]][i]))
                misplaced.exchanged[i] = best[1][0], float(as_partner[best[0]][i])
            for f, _ in pairs:
                del misplaced.transposed[f][i]
    return misplaced


@finding(
    "transposed_factors",
    "factor transposed",
    severity="warning",
    rank=40,
    look_next="Check the conversion: transpose the tensor, and measure the loss of both.",
)
@finding(
    "swapped_factors",
    "two factors swapped",
    severity="warning",
    rank=50,
    look_next="Check the conversion: swap the two tensors back, and measure the loss of both.",
)
def _misplaced_findings(heads: MeasuredHeads, misplaced: Misplaced) -> Iterator[Finding]:
    """One finding per transposed factor, and one for the layers with W_V and W_O exchanged."""
    for f, layers in misplaced.transposed.items():
        if layers:
            about = FACTORS[f], "looks transposed: its"
            yield _of_layers(heads, "transposed_factors", "qk" if f < 2 else "vo", layers, *about)
    if misplaced.exchanged:
        about = "W_V and W_O", "look exchanged, or transposed: their"
        yield _of_layers(heads, "swapped_factors", "vo", misplaced.exchanged, *about)


def _of_layers(
    heads: MeasuredHeads, kind: str, map_name: str, found: dict[int, Pair], which: str, looks: str
) -> Finding:
    """A finding about a factor of some layers, from its cosines as it is read and transposed."""
    layers = heads.layers[list(found)].tolist()
    wrong, right = (float(np.median(values)) for values in zip(*found.values(), strict=True))
    text = (
        f"{which} of {indexed('layer', layers)} {looks} sizes along the heads' dimensions follow those of other layers "
        f"along the stream (cosine {right:.2f}), and the sizes along the stream do not ({wrong:.2f})."
    )
    members = tuple(
        Member("layer", layer, layer=layer, number=found[i][0])
        for i, layer in zip(found, layers, strict=True)
    )
    return Finding(
        kind=kind,
        layer=layers[0] if len(layers) == 1 else None,
        map=map_name,
        measure="stream_profile",
        number=wrong,
        usual=right,
        text=text,
        members=members,
    )


def _exchanged(
    model: Model, heads: MeasuredHeads, misplaced: Misplaced
) -> dict[str, dict[int, tuple[float, float, str]]]:
    """Layers whose W_Q and W_K, or W_V and W_O, are exchanged: by map and position."""
    exchanged: dict[str, dict[int, tuple[float, float, str]]] = {"qk": {}, "vo": {}}
    if heads.shares_keys:
        return exchanged  # the two have other shapes
    for name, (a, b) in {"qk": (0, 1), "vo": (2, 3)}.items() if misplaced.as_read else ():
        differences = misplaced.as_read[a] - misplaced.as_read[b]
        differences[list(misplaced.layers)] = np.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            differences /= np.linalg.norm(differences, axis=1, keepdims=True)
        (along,) = cosines(differences)
        limit = AGREEING / np.sqrt(differences.shape[1])
        opposite = np.flatnonzero(along < -max(EXCHANGED, limit)).tolist()
        if (along > limit).sum() >= max(FEWEST - 1, 2 * len(opposite)):
            what = "along the stream they differ as they do in other layers, reversed (cosine {:.2f}, usually {:.2f})"
            usual = known_median(along)
            exchanged[name] |= {i: (float(along[i]), usual, what) for i in opposite}
    # turned, a key's bias is of use
    if not any(rotation is not None for rotation in model.rotations.values()):
        exchanged["qk"] = _exchanged_biases(heads) | exchanged["qk"]
    return exchanged


def _exchanged_biases(heads: MeasuredHeads) -> dict[int, tuple[float, float, str]]:
    """Layers with a small query and a large key bias, where both neighbours have the reverse."""
    biases = np.sqrt((heads.arrays["factor_bias"][..., :2] ** 2).sum(axis=1))  # (L, 2)
    ratios, exchanged = log_measure(biases[:, 0]) - log_measure(biases[:, 1]), {}
    for i in range(len(ratios)) if len(ratios) >= FEWEST else ():
        nearest = sorted((j for j in range(len(ratios)) if j != i), key=lambda j: abs(j - i))[:2]
        signs = np.sign(ratios[nearest])
        least = np.abs(ratios[nearest]).min()
        # NaN: no bias
        if abs(signs.sum()) == 2 and np.minimum(least, -ratios[i] * signs[0]) > np.log(BIAS_RATIO):
            what = "the query bias is {:.2g} times as long as the key bias, in the neighbours {:.2g} times"
            exchanged[i] = float(np.exp(ratios[i])), float(np.exp(np.median(ratios[nearest]))), what
    return exchanged


def _exchanged_findings(
    heads: MeasuredHeads, exchanged: dict[str, dict[int, tuple[float, float, str]]]
) -> Iterator[Finding]:
    for name, layers in exchanged.items():
        which = "W_Q and W_K" if name == "qk" else "W_V and W_O"
        for i, (number, usual, what) in layers.items():
            yield Finding(
                kind="swapped_factors",
                layer=int(heads.layers[i]),
                map=name,
                measure="factors_exchanged",
                number=number,
                usual=usual,
                text=f"{which} look exchanged: {what.format(number, usual)}.",
            )


@finding(
    "unbalanced_factors",
    "factor off its partner's scale",
    severity="warning",
    rank=80,
    look_next="Compare both tensors with an earlier checkpoint: a scale may have been applied to one "
    "alone.",
)
def _unbalanced(
    model: Model, heads: MeasuredHeads, known: set[int]
) -> Iterator[tuple[int, Finding]]:
    """Layers in which one factor has another size than its partner, unlike their neighbours'."""
    logs = log_measure(heads.arrays["factor_norm"])  # (L, H, 4)
    for a, b, limit in UNBALANCED:
        if a == 0 and model.family.scores.qk_norm is not None:
            continue  # a norm follows: the size of W_Q means nothing
        ratios = layer_medians(logs[..., a] - logs[..., b])  # (L,)
        ratios[list(known)] = np.nan
        differences = off_trend(ratios)
        far = (np.abs(differences) >= np.log(limit)) & (
            np.abs(robust_z(differences)) >= UNBALANCED_Z
        )
        for i in np.flatnonzero(far).tolist():
            ratio, usual = float(np.exp(ratios[i])), float(np.exp(ratios[i] - differences[i]))
            text = f"{FACTORS[a]} is {ratio:.3g} times as large as {FACTORS[b]}; in its neighbours {usual:.3g} times."
            yield (
                i,
                Finding(
                    kind="unbalanced_factors",
                    layer=int(heads.layers[i]),
                    map="qk" if a == 0 else "vo",
                    measure="factor_balance",
                    number=ratio,
                    usual=usual,
                    text=text,
                ),
            )


@finding(
    "noise_floor",
    "layer with a noise floor",
    severity="warning",
    rank=100,
    look_next="Compare the layer with an earlier checkpoint, and check how it was quantised or "
    "merged.",
)
def _noisy(heads: MeasuredHeads, known: set[int]) -> Iterator[Finding]:
    """Layers in which what is weakest in every factor is stronger than in their neighbours."""
    if len(heads.layers) < LAYERS_FOR_NOISE:
        return
    floors = [
        layer_medians(log_measure(heads.arrays["factor_floor"][..., which])) for which in range(4)
    ]
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
            kind="noise_floor",
            layer=int(heads.layers[i]),
            measure="noise_floor",
            number=float(score[i]),
            usual=known_median(score),
            text=text,
            members=(Member("layer", int(heads.layers[i])),),
        )
