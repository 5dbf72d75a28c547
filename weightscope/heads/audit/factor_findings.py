"""Compare the four factors W_Q, W_K, W_V and W_O: faults that no spectrum of one map shows.

The Gram matrices of W_Q and W_K are alike, as they are trained together, and so are W_V's and
W_O's; W_Q and W_V share nothing. Where this is not so, factors were swapped, mixed up or
initialised anew. Noise that is added to weights lifts what is weakest in them. Each factor uses the
dimensions of the stream as it does in the other layers: where its other axis does instead, it is
transposed. docs/audit.md says which checkpoints the limits were set on.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weightscope.core.compute.cores import in_threads
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.heads.tensors.findings import beyond_siblings, lower_median, other_gains
from weightscope.heads.tensors.measure import BITS
from weightscope.heads.tensors.untrained_parts import untrained_weights
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.head_factors import FEWEST, cosines, profiles, share
from weightscope.model.metrics.matrix_spectra import SHUFFLED_SIDE, like_its_shuffled_entries
from weightscope.model.metrics.outliers import (
    known_median,
    layer_medians,
    log_measure,
    off_trend,
    robust_z,
)
from weightscope.model.metrics.spectra import evenly_spread, spread_error
from weightscope.model.model import Model
from weightscope.report.findings import (
    Finding,
    FindingKind,
    Member,
    aggregated,
    finding,
    indexed,
)

FACTORS = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("query", "key", "value", "output")
# a bias over its factor's norm; Qwen2.5's first layer has 183 for keys, values have at most 2
OUT_OF_PROPORTION = (1e3, 1e3, 30.0, 30.0)
# log likeness of factors that belong together over others'; at least 2.7 in every trained layer
TRAINED = 2.0
UNRELATED = 1.3  # log likeness below which factors do not belong together
SWAPPED = -1.0  # log likeness below which they are swapped
HEADS = 16  # heads of all layers; fewer random ones may reach TRAINED on average
# log likeness of one pair; one that belongs together has at least 1.3, in one Gemma 3 layer 0.87
APART = 0.6
# times the usual distance of layers past the first from their median: four standard deviations
APART_TIMES = 6.0
# factors by which |W_Q| / |W_K| and |W_V| / |W_O| leave their trend
UNBALANCED = ((0, 1, 8.0), (2, 3, 20.0))
UNBALANCED_Z = 6.0
NOISY = 2.0  # mean z-score of a layer's floors; trained layers reach 1.7
CUT_Z = 6.0  # limit of each z-score
LAYERS_FOR_NOISE = 8  # fewer have no trend to leave
AGREEING = 5.0  # over the root of the width; above the chance cosine of two layers' profiles
ALL_LAYERS = 0.15  # share of profiles more in common along the other axis, if all are transposed
EXCHANGED = 0.4  # minus the cosine of two factors' profile difference with that in other layers
BIAS_RATIO = 5.0  # ratio of query and key biases' norms, reversed in a layer and its neighbours
TOO_NARROW = 0.5  # error of the spread; each of nine real checkpoints has a factor 1.1 off random

CosinePair = tuple[float, float]  # as it is read, and transposed


def factor_findings(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases out of proportion, and layers with misplaced, mixed, untrained or noisy factors."""
    yield from _large_biases(heads)
    yield from _without_scales(heads)
    misplaced = _misplaced(heads)
    yield from _misplaced_findings(heads, misplaced)
    exchanged = _exchanged(model, heads, misplaced)
    for name, layers in exchanged.items():
        which = "W_Q and W_K" if name == "qk" else "W_V and W_O"
        for i, (number, usual, sentence) in layers.items():
            about = {"measure": "factors_exchanged", "number": number, "usual": usual}
            text = f"{which} look exchanged: {sentence}."
            yield swapped_factors(layer=heads.layers[i], map=name, text=text, **about)
    known = misplaced.layers.union(*exchanged.values())
    strange = dict(_unrelated(model, heads))
    yield from strange.values()
    known = known.union(strange)
    yield from _unrelated_pairs(heads, known)
    unbalanced = dict(_unbalanced(model, heads, known))
    yield from unbalanced.values()
    yield from _noisy(heads, known.union(unbalanced))


large_bias = finding(
    "large_bias",
    "bias out of proportion",
    severity="warning",
    rank=90,
    look_next="Read the tensor again from its source; compare it with the same bias of other "
    "layers.",
)


def _large_biases(heads: MeasuredHeads) -> Iterator[Finding]:
    """Biases that are far larger than what their projection makes of a normalised input."""
    norms = heads.arrays["factor_norm"]  # (L, H, 4)
    usual_norms = np.median(norms[..., :3], axis=1, keepdims=True)  # (L, 1, 3); a head may be dead
    with np.errstate(divide="ignore", invalid="ignore"):
        biases = heads.arrays["factor_bias"] / usual_norms  # (L, H, 3)
    findings = []
    for i, h, which in np.argwhere(np.isfinite(biases) & (biases > OUT_OF_PROPORTION[:3])).tolist():
        ratio, usual = biases[i, h, which], known_median(biases[..., which])
        times = f"{ratio:,.3g} times as long as {FACTORS[which]} (median head: {usual:.2g})"
        about = {"map": _map_of(which), "measure": f"{BIASES[which]}_bias", "usual": usual}
        text = f"Its {BIASES[which]} bias is {times}."
        findings.append(large_bias.of_head(heads.layers[i], h, number=ratio, text=text, **about))
    yield from aggregated(findings, heads.n_heads)
    # (L,) lower bound of what a layer writes
    summed = np.sqrt((norms[..., 2] ** 2 * norms[..., 3] ** 2).sum(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = heads.arrays["output_bias_norm"] / summed  # (L,)
    for i in np.flatnonzero(np.isfinite(ratios) & (ratios > OUT_OF_PROPORTION[3])).tolist():
        ratio, usual = ratios[i], known_median(ratios)
        times = (
            f"{ratio:,.3g} times as long as W_V and W_O together (the median layer: {usual:.2g})"
        )
        yield large_bias(
            layer=heads.layers[i],
            map="vo",
            measure="output_bias",
            number=ratio,
            usual=usual,
            text=f"The output bias is {times}.",
        )


def _map_of(factor: int) -> str:
    return "qk" if factor < 2 else "vo"


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
        layer = heads.layers[i]
        yield from beyond_siblings(what, size, *usual, layer=layer, map=_map_of(which))


def factor_relation(heads: MeasuredHeads) -> np.ndarray:
    """Log likeness of factors that belong together over other pairs' likeness, (L,)."""
    likeness = _mean(heads.arrays["factor_likeness"], axis=1)  # (L, 4)
    return log_measure(likeness[:, :2].sum(axis=1)) - log_measure(likeness[:, 2:].sum(axis=1))


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the finite values along an axis; NaN where none is."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum(axis=axis) / finite.sum(axis=axis)


mixed_factors = finding(
    "mixed_factors",
    "factors that do not belong together",
    severity="warning",
    rank=60,
    look_next="Check the conversion: some of its tensors may belong to another layer, or to "
    "another checkpoint.",
)
untrained_layer = finding(
    "untrained_layer",
    "layer as initialised",
    severity="warning",
    rank=70,
    look_next="Check whether the layer was added or reset on purpose, and whether it was trained "
    "since.",
)
swapped_factors = finding(
    "swapped_factors",
    "two factors swapped",
    severity="warning",
    rank=50,
    look_next="Check the conversion: swap the two tensors back, and measure the loss of both.",
)


def _unrelated(model: Model, heads: MeasuredHeads) -> Iterator[tuple[int, Finding]]:
    """Layers whose factors do not belong together, by position; none if that is so in all."""
    relation = factor_relation(heads)
    everywhere = known_median(relation) <= -TRAINED  # swapped in most layers
    if not _enough(heads):
        return
    limit = SWAPPED if everywhere else UNRELATED
    for i in np.flatnonzero(np.isfinite(relation)).tolist():
        is_random = _random(model, heads, i)
        # where q/k-norms leave W_V and W_O alone, these are too few to judge by
        if not (relation[i] < limit or (is_random and model.family.scores.qk_norm is None)):
            continue
        usual = known_median(np.delete(relation, i))
        if not (everywhere or usual >= TRAINED):
            continue
        times, elsewhere = np.exp(relation[i]), np.exp(usual)
        usually = f"{elsewhere:.2g}, which is as wrong" if everywhere else f"{elsewhere:.0f}"
        compared = f"{times:.2g} times as alike as W_Q and W_V, W_K and W_O (elsewhere {usually})"
        kind = mixed_factors
        text = f"W_Q and W_K, W_V and W_O are only {compared}: they do not belong together."
        if is_random:  # of any likeness, in a narrow layer
            kind = untrained_layer
            text = f"Its factors have the spectra of random matrices. {text}"
        elif relation[i] < SWAPPED:
            kind = swapped_factors
            text = f"W_Q and W_K, W_V and W_O are {compared}: W_K and W_V look swapped."
        layer, measure = heads.layers[i], "factor_relation"
        yield i, kind(layer=layer, measure=measure, number=times, usual=elsewhere, text=text)


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
    read = [t for name, t in tensors.items() if name.endswith((".weight", ".bias"))]
    vectors = [  # gains and biases
        t for t in read if t.dtype in BITS and sum(size > 1 for size in t.shape) == 1
    ]
    varied = any((values != values.flat[0]).any() for values in (t.read() for t in vectors))
    if not varied and (vectors or _enough(heads)):
        ratios = [ratio for i in range(len(layers)) for ratio in _spread(model, heads, i)]
        which = f"W_Q, W_K, W_V and W_O of {indexed('layer', layers)}"
        constant = (
            ", and every gain and bias of attention and every gain of the network holds one value"
        )
        looks = f"have the spectra of random matrices{constant * bool(vectors)}"
        yield untrained_weights(
            measure="factor_spread",
            number=np.mean(ratios),
            usual=1.0,
            text=f"{which} {looks}: they are as initialised.",
            members=_layer_members(layers),
        )
    else:
        yield from _unlearned_findings(model, heads)


def _unlearned_findings(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Untrained layers drawn by any law, if they are most; fewer are `_unrelated` to the others."""
    relation = factor_relation(heads)
    few = len(heads.layers) / 2
    alone = np.flatnonzero(relation < TRAINED).tolist() if _enough(heads) else []
    if len(alone) <= few or not known_median(relation[alone]) < UNRELATED:
        return
    layers = [layer for layer in heads.layers[alone].tolist() if _is_shuffled(model.layer(layer))]
    if len(layers) > few:
        times = np.exp(known_median(relation[alone]))
        text = (
            f"In {indexed('layer', layers)} W_Q, W_K, W_V and W_O have no singular value beyond "
            "the spectrum of the same entries shuffled, and W_Q and W_K, W_V and W_O are "
            f"{times:.2g} times as alike as other pairs (at least {np.exp(TRAINED):.0f} where they "
            "were trained): they are as initialised."
        )
        yield untrained_weights(
            measure="factor_relation",
            number=times,
            usual=1.0,
            text=text,
            members=_layer_members(layers),
        )


def _layer_members(layers: Iterable[int]) -> tuple[Member, ...]:
    return tuple(Member("layer", layer, layer=layer) for layer in layers)


def _is_shuffled(layer: Layer) -> bool:
    """True if the heads' factors, side by side, look like matrices of independent entries."""
    every = range(layer.n_heads)
    shared = every[:: layer.n_heads // layer.n_kv_heads]  # one per key-value head
    factors = ("w_q", every), ("w_k", shared), ("w_v", shared), ("w_o", every)

    def looks_shuffled(factor: tuple[str, range]) -> bool:
        return like_its_shuffled_entries(_entries(layer, *factor))

    return all(in_threads(looks_shuffled, factors))


def _entries(layer: Layer, name: str, heads: range) -> np.ndarray:
    """Entries of the heads' factors side by side, (d, H r): those that are shuffled."""
    factors = (getattr(layer.heads[h], name) for h in heads)  # one at a time
    parts: list[np.ndarray] = []
    begin, columns = 0, np.empty(0, int)
    for w in factors:
        w = w.T if name == "w_o" else w
        if not parts:
            columns = evenly_spread(len(heads) * w.shape[1], SHUFFLED_SIDE)
        rows = evenly_spread(len(w), SHUFFLED_SIDE)
        mine = columns[(columns >= begin) & (columns < begin + w.shape[1])] - begin
        parts.append(w[np.ix_(rows, mine)])
        begin += w.shape[1]
    return np.concatenate(parts, axis=1)


def _enough(heads: MeasuredHeads) -> bool:
    """True if there are too many heads for random ones to be alike on average."""
    return len(heads.table) >= HEADS


def _unrelated_pairs(heads: MeasuredHeads, known: set[int]) -> Iterator[Finding]:
    """Layers in which one pair of factors does not belong together while the other does.

    A layer is held to the spread of its own model's layers; the first, whose pairs are unlike the
    others', is not.
    """
    if not _enough(heads):
        return
    likeness = log_measure(_mean(heads.arrays["factor_likeness"], axis=1))  # (L, 4)
    with np.errstate(invalid="ignore"):
        unrelated = np.logaddexp(likeness[:, 2], likeness[:, 3])[:, None]
        relations = likeness[:, :2] - unrelated + np.log(2)  # (L, 2)
    for pair, (name, which) in enumerate((("qk", "W_Q and W_K"), ("vo", "W_V and W_O"))):
        partners = relations[:, 1 - pair]
        if not known_median(partners) >= TRAINED:
            continue
        for i in np.flatnonzero((relations[:, pair] < APART) & (partners >= TRAINED)).tolist():
            other_layers = [j for j in range(1, len(relations)) if j != i]  # past the first
            if len(other_layers) < 2:
                other_layers = [j for j in range(len(relations)) if j != i]
            others = relations[other_layers, pair]
            usual = known_median(others)
            far = usual - relations[i, pair] > APART_TIMES * known_median(np.abs(others - usual))
            alone = i > 0 and usual >= TRAINED and far
            if i in known or not (alone or usual < APART):
                continue
            times, elsewhere = np.exp(relations[i, pair]), np.exp(usual)
            text = (
                f"{which} are only {times:.2g} times as alike as W_Q and W_V, W_K and W_O "
                f"(elsewhere {elsewhere:.2g}): one of them may be transposed, or of another layer."
            )
            yield mixed_factors(
                layer=heads.layers[i],
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

    transposed: dict[int, dict[int, CosinePair]]  # by factor: cosines with the other layers
    exchanged: dict[int, CosinePair]  # W_V and W_O: cosines of what agrees best
    as_read: dict[int, np.ndarray]  # by factor: profiles (L, d) along the axis read as the stream

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
    across = {}  # profiles of square factors along the other axis; others would not fit transposed
    for f in range(4):
        columns = heads.arrays[f"{_map_of(f)}_column_energies"]  # (L, H, 2, r)
        if columns.shape[-1] * n_heads == d and not (f in (1, 2) and heads.shares_keys):
            across[f] = profiles(columns[:, :, f % 2].reshape(n_layers, -1), n_heads)
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
    transposed = misplaced.transposed
    alone = transposed.keys() == {2, 3} and len(across) == 4
    for i in sorted({*transposed.get(2, ()), *transposed.get(3, ())}):
        pairs = {f: transposed[f][i] for f in (2, 3) if i in transposed.get(f, ())}
        if as_partner.keys() == {2, 3}:
            gain = sum(float(as_partner[f][i]) - right for f, (_, right) in pairs.items())
            exchanged = gain > 0
        else:
            # No layer shows what is usual; a conversion that transposes squares transposes W_Q and
            # W_K too.
            exchanged = alone
        if not exchanged:
            continue
        misplaced.exchanged[i] = max(pairs.values(), key=lambda pair: pair[1])
        if as_partner:
            best = max(pairs, key=lambda f: float(as_partner[f][i]))
            misplaced.exchanged[i] = pairs[best][0], float(as_partner[best][i])
        for f in pairs:
            del transposed[f][i]
    return misplaced


transposed_factors = finding(
    "transposed_factors",
    "factor transposed",
    severity="warning",
    rank=40,
    look_next="Check the conversion: transpose the tensor, and measure the loss of both.",
)


def _misplaced_findings(heads: MeasuredHeads, misplaced: Misplaced) -> Iterator[Finding]:
    """One finding per transposed factor, and one for the layers with W_V and W_O exchanged."""

    def about(
        kind: FindingKind, map_name: str, places: dict[int, CosinePair], looks: str
    ) -> Finding:
        layers = heads.layers[list(places)].tolist()
        wrong, right = np.median([*places.values()], axis=0).tolist()
        cosines_by_layer = zip(layers, places.values(), strict=True)
        return kind(
            layer=layers[0] if len(layers) == 1 else None,
            map=map_name,
            measure="stream_profile",
            number=wrong,
            usual=right,
            text=f"{looks.format(indexed('layer', layers))} sizes along the heads' dimensions "
            f"follow other layers' sizes along the stream (cosine {right:.2f}), and the sizes "
            f"along the stream do not ({wrong:.2f}).",
            members=tuple(
                Member("layer", layer, layer=layer, number=as_read)
                for layer, (as_read, _) in cosines_by_layer
            ),
        )

    for f, places in misplaced.transposed.items():
        if places:
            looks = f"{FACTORS[f]} of {{}} looks transposed: its"
            yield about(transposed_factors, _map_of(f), places, looks)
    if misplaced.exchanged:
        looks = "W_V and W_O of {} look exchanged, or transposed: their"
        yield about(swapped_factors, "vo", misplaced.exchanged, looks)


class Exchange(NamedTuple):
    """A sign that two factors of a layer were exchanged."""

    number: float
    usual: float
    sentence: str


def _exchanged(
    model: Model, heads: MeasuredHeads, misplaced: Misplaced
) -> dict[str, dict[int, Exchange]]:
    """Layers whose W_Q and W_K, or W_V and W_O, are exchanged: by map and position."""
    exchanged: dict[str, dict[int, Exchange]] = {"qk": {}, "vo": {}}
    if heads.shares_keys:
        return exchanged  # the two have other shapes
    if misplaced.as_read:
        for name, (a, b) in {"qk": (0, 1), "vo": (2, 3)}.items():
            differences = misplaced.as_read[a] - misplaced.as_read[b]
            differences[list(misplaced.layers)] = np.nan
            exchanged[name] = _reversed_profiles(differences)
    if all(rotation is None for rotation in model.rotations.values()):
        exchanged["qk"] = _exchanged_biases(heads) | exchanged["qk"]  # rotated, it may be of use
    return exchanged


def _reversed_profiles(differences: np.ndarray) -> dict[int, Exchange]:
    """Layers in which two factors' profiles differ (L, d) as in other layers, but reversed."""
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = differences / np.linalg.norm(differences, axis=1, keepdims=True)
    (along,) = cosines(differences)
    limit = AGREEING / np.sqrt(differences.shape[1])
    opposite = np.flatnonzero(along < -max(EXCHANGED, limit)).tolist()
    if (along > limit).sum() < max(FEWEST - 1, 2 * len(opposite)):
        return {}
    exchanged, usual = {}, known_median(along)
    for i in opposite:
        cosine = f"cosine {along[i]:.2f}, usually {usual:.2f}"
        sentence = f"along the stream they differ as they do in other layers, reversed ({cosine})"
        exchanged[i] = Exchange(along[i], usual, sentence)
    return exchanged


def _exchanged_biases(heads: MeasuredHeads) -> dict[int, Exchange]:
    """Layers with a small query and a large key bias, where both neighbours have the reverse."""
    biases = np.sqrt((heads.arrays["factor_bias"][..., :2] ** 2).sum(axis=1))  # (L, 2)
    ratios = log_measure(biases[:, 0]) - log_measure(biases[:, 1])
    exchanged: dict[int, Exchange] = {}
    if len(ratios) < FEWEST:
        return exchanged
    for i in range(len(ratios)):
        nearest = sorted((j for j in range(len(ratios)) if j != i), key=lambda j: abs(j - i))[:2]
        signs = np.sign(ratios[nearest])
        least = np.abs(ratios[nearest]).min()
        # NaN without a bias
        if abs(signs.sum()) == 2 and np.minimum(least, -ratios[i] * signs[0]) > np.log(BIAS_RATIO):
            ratio, usual = np.exp(ratios[i]), np.exp(np.median(ratios[nearest]))
            times = (
                f"{ratio:.2g} times as long as the key bias, in the neighbours {usual:.2g} times"
            )
            exchanged[i] = Exchange(ratio, usual, f"the query bias is {times}")
    return exchanged


unbalanced_factors = finding(
    "unbalanced_factors",
    "factor off its partner's scale",
    severity="warning",
    rank=80,
    look_next="Compare both tensors with an earlier checkpoint: a scale may have been applied to "
    "one alone.",
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
        far = np.abs(differences) >= np.log(limit)
        far &= np.abs(robust_z(differences)) >= UNBALANCED_Z
        for i in np.flatnonzero(far).tolist():
            ratio, usual = np.exp(ratios[i]), np.exp(ratios[i] - differences[i])
            times = (
                f"{ratio:.3g} times as large as {FACTORS[b]}; in its neighbours {usual:.3g} times"
            )
            about = {"measure": "factor_balance", "number": ratio, "usual": usual}
            text = f"{FACTORS[a]} is {times}."
            yield i, unbalanced_factors(layer=heads.layers[i], map=_map_of(a), text=text, **about)


noise_floor = finding(
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
    factors, rows = heads.arrays["factor_floor"], heads.arrays["row_floor"]  # (L, H, 4), (L, 4)
    floors = [layer_medians(log_measure(factors[..., f])) for f in range(4)]
    floors += [log_measure(rows[:, f]) for f in range(4)]
    scores = []
    for floor in floors:
        floor[list(known)] = np.nan
        scores.append(np.clip(robust_z(off_trend(floor)), -CUT_Z, CUT_Z))
    score = np.mean(scores, axis=0)  # (L,)
    for i in np.flatnonzero(score > NOISY).tolist():
        text = (
            "What is weakest in its four factors is stronger than in its neighbours, by "
            f"{score[i]:.1f} standard deviations on average: noise may have been added to its "
            "weights."
        )
        yield noise_floor(
            layer=heads.layers[i],
            measure="noise_floor",
            number=score[i],
            usual=known_median(score),
            text=text,
            members=(Member("layer", int(heads.layers[i])),),
        )
