"""Find directions that were removed from what layers of a checkpoint write into the stream or read.

A matrix that writes into the stream is W (n, d), row vectors x W. It writes the energy |W v|^2
along a unit vector v. The Gram matrices W'W of several layers add up, and a direction removed from
all of them has the least energy of the sum. How far below the rest it lies is the question.
Dimensions are scaled to one energy first, because trained streams have dimensions that little is
written into, and rounding to zero makes more.

Sets of layers are judged by such sums: runs of layers, all layers, and layers anywhere whose own
least directions agree. A set that stands out is then judged again by its energies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, comb, log10, prod, sqrt
from typing import NamedTuple

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.compute.cores import hand_back, in_threads, one_blas_thread
from weightscope.core.compute.half import Half
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.progress import phase
from weightscope.heads.audit.directions import TOKENS_IN_FINDING, token_rows
from weightscope.model.layers.layouts import conv1d_crossing, conv1d_fused
from weightscope.model.model import Model
from weightscope.model.text.tokenizer import Tokenizer, token_names
from weightscope.report.findings import Finding, Member, finding, indexed

GAPS = 24  # gaps between eigenvalues that one is compared with
RANKS = 8  # directions that may have been removed together
EIGENVALUES = RANKS + GAPS + 1
NARROW = 2 * EIGENVALUES  # dimensions that a stream needs, at least
BLOCK = 16  # vectors per step of the Krylov space in which least eigenvectors are looked for
STEPS = 5  # steps of that space
LIFTED = 128  # rows of a Gram matrix that are changed at a time
WHOLE = 200  # dimensions up to which all eigenvectors are cheap
SHIFT = 1e-6  # times the mean energy; float32 leaves as much of none
EMPTY = 1e-6  # times the mean energy; a dimension below it is padding, and is not scaled up
CONSTANT = 0.5  # times the mean energy along ones, which a norm that subtracts the mean never reads
PENALTY = 10.0  # mean energies added along ones then
SPREAD = 3.0  # times the median size of dimensions, or its inverse; one beyond is not in ones
OF_LAYER = 8  # least directions of a single layer
MEMBER = 0.5  # squared cosine of a shared direction with a layer's least directions
SHARED = 3  # layers that share one, at least
SEEDS = 4  # directions that layers are asked to share


class Least(NamedTuple):
    """The directions that some layers write least along."""

    score: float  # -log10 of the chance that gaps as those above have one as large
    directions: np.ndarray  # (d, k), orthonormal
    eigenvalues: np.ndarray  # (EIGENVALUES,) over the mean, dimensions scaled to one energy

    @property
    def ratio(self) -> float:
        """The least eigenvalue over the first above the gap."""
        return float(max(self.eigenvalues[0], 0.0) / self.eigenvalues[self.directions.shape[1]])


def gap_scores(eigenvalues: np.ndarray) -> np.ndarray:
    """Score the first gaps by those above them: (EIGENVALUES,) ascending -> (RANKS,).

    Of ordered exponential variables the k-th gap times k is exponential again (Renyi 1953), and one
    such gap over the sum of n others exceeds t with probability (1 + t)^-n. Gaps between
    eigenvalues, which repel each other, vary less.
    """
    logs = np.log(np.maximum(eigenvalues, SHIFT / 10))
    gaps = np.diff(logs) * np.arange(1, len(logs))
    above = np.array([gaps[k + 1 : k + 1 + GAPS].sum() for k in range(RANKS)])
    return GAPS * np.log10(1 + gaps[:RANKS] / np.maximum(above, 1e-12))


def scale_dimensions(gram: np.ndarray, centred: bool) -> np.ndarray:
    """Scale the dimensions of a Gram matrix to one energy, in place; their sizes (d,), 0 if empty.

    With `centred`, norms subtract the mean from the stream, and nothing may be written along the
    vector of ones.
    """
    d = len(gram)
    gram *= np.float32(d / max(float(np.trace(gram, dtype=np.float64)), 1e-300))
    energies = np.diag(gram).copy()
    sizes = np.sqrt(np.where(energies < EMPTY, 0, energies))
    divide(gram, sizes)
    if centred:
        usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
        ones = np.minimum(sizes, SPREAD * usual)  # after the division
        if float(ones @ gram @ ones) < CONSTANT * float(ones @ ones):
            lift_ones(gram, sizes)
    return sizes


def divide(gram: np.ndarray, sizes: np.ndarray) -> None:
    """Divide the dimensions of a Gram matrix by their sizes (d,), in place."""
    divisors = np.where(sizes > 0, sizes, 1)
    gram /= divisors
    gram /= divisors[:, None]
    empty = np.flatnonzero(sizes == 0)
    gram[empty] = gram[:, empty] = 0.0
    gram[empty, empty] = 1.0  # padding: as if something were written there


def lift_ones(gram: np.ndarray, sizes: np.ndarray) -> None:
    """Add energy along the vector of ones, in place, to dimensions divided by `sizes` (d,).

    A dimension much smaller than most is not scaled up in that vector, or it would be all of it.
    """
    usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
    row = np.where(sizes > 0, usual / np.maximum(sizes, usual / SPREAD), 0).astype(np.float32)
    factor = np.float32(PENALTY / len(gram))
    for start in range(0, len(gram), LIFTED):  # no second matrix
        part = slice(start, start + LIFTED)
        gram[part] += factor * row[part, None] * row


def least_eigenvectors(
    gram: np.ndarray, count: int, steps: int = STEPS
) -> tuple[np.ndarray, np.ndarray]:
    """Least eigenvalues (count,) and eigenvectors (d, count) of a Gram matrix of mean energy one.

    From a block Krylov space of the inverse, which holds the least ones first.
    """
    d = len(gram)
    if d <= WHOLE:
        values, vectors = np.linalg.eigh(gram.astype(np.float64))
        return values[:count], vectors[:, :count]
    root = _root(gram)
    block = np.random.default_rng(d).standard_normal((d, BLOCK), dtype=np.float32)
    basis = np.empty((d, 0), np.float32)
    for _ in range(steps):
        block = solve_triangular(root, block, trans="T", check_finite=False)
        block = solve_triangular(root, block, check_finite=False)
        for _ in range(2):
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
        basis = np.hstack([basis, block])
    inside = (basis.T @ (gram @ basis)).astype(np.float64)
    values, vectors = np.linalg.eigh((inside + inside.T) / 2)
    return values[:count], basis @ vectors[:, :count]


def _root(gram: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor of a Gram matrix, shifted as little as float32's rounding allows."""
    diagonal = np.diag(gram).copy()
    for shift in (SHIFT, 100 * SHIFT, 1e4 * SHIFT, 1.0):
        gram[np.diag_indices(len(gram))] = diagonal + np.float32(shift)
        try:
            # symmetric, and in LAPACK's order
            root: np.ndarray = cholesky(gram.T, check_finite=False)
        except LinAlgError:
            continue
        gram[np.diag_indices(len(gram))] = diagonal
        return root
    raise AssertionError("a Gram matrix is positive definite but for its rounding")


def least_of(gram: np.ndarray, centred: bool) -> Least:
    """Directions below the most unusual gap of the sum of some layers' Gram matrices (d, d).

    `gram` is overwritten.
    """
    sizes = scale_dimensions(gram, centred)
    values, vectors = least_eigenvectors(gram, EIGENVALUES)
    scores = gap_scores(values)
    rank = int(scores.argmax()) + 1
    # a dimension that little is written into says little of a direction
    noise = max(float(values[rank - 1]), SHIFT)
    weights = sizes / (sizes.astype(np.float64) ** 2 + noise)  # (d,)
    directions = np.linalg.qr(vectors[:, :rank] * weights[:, None])[0]
    return Least(float(scores[rank - 1]), directions, values)


def sum_grams(grams: Sequence[np.ndarray]) -> np.ndarray:
    """Their sum, without a copy of all of them."""
    total = grams[0].copy()
    for gram in grams[1:]:
        total += gram
    return total


def agreeing(grams: Sequence[np.ndarray], centred: bool) -> list[tuple[int, ...]]:
    """Sets of layers, by place, whose own least directions share one, wherever they stand."""
    sizes = scale_dimensions(sum_grams(grams), centred)

    def least_own(gram: np.ndarray) -> np.ndarray:
        matrix = gram.copy()
        divide(matrix, sizes)
        matrix *= np.float32(len(gram) / float(np.trace(matrix, dtype=np.float64)))
        if centred:  # along ones, every layer may write little
            lift_ones(matrix, sizes)
        return least_eigenvectors(matrix, OF_LAYER, steps=2)[1]

    parts = list(in_threads(least_own, grams))
    stacked = np.hstack(parts)  # (d, L OF_LAYER)
    with one_blas_thread():  # several threads wait for each other in a small problem
        values, directions = _highest(stacked, SEEDS)
    sets = []
    for value, seed in zip(values, directions.T, strict=True):
        if value < SHARED * MEMBER:
            break
        shares = [float(((part.T @ seed) ** 2).sum() / (seed @ seed)) for part in parts]
        layers = tuple(i for i, share in enumerate(shares) if share >= MEMBER)
        if len(layers) >= SHARED:
            sets.append(layers)
    return list(dict.fromkeys(sets))


def _highest(stacked: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The highest eigenvalues of a matrix times its transpose, and their vectors as columns."""
    d, n = stacked.shape
    if n > d:
        values, vectors = np.linalg.eigh(stacked @ stacked.T)
    else:
        values, vectors = np.linalg.eigh(stacked.T @ stacked)
        vectors = stacked @ vectors[:, -count:]
    return values[: -count - 1 : -1], vectors[:, : -count - 1 : -1]


def choices(layers: int, out_of: int) -> float:
    """log10 of the number of sets with this many layers."""
    return log10(comb(out_of, layers))


# Sides of a checkpoint

# -log10 of a probability, for sides that write (True) or read; layers learn to ignore some
# directions that they could read (docs/audit.md)
FOUND = {True: 2.0, False: 4.0}
LOOKED_AT = 1.0  # sets of layers that score less are not judged again
RUN = 0.4  # share of the layers; a run this long has to be found
KEPT = 128 << 20  # bytes of Gram matrices; in wider streams they are summed a run at a time
WIDEST = 8192  # dimensions; a wider Gram matrix exceeds a quarter of a gigabyte
ROWS = 2  # rows of a run that are read in a wide stream, times the width
STRIP = 512  # columns of a Gram matrix that are computed at a time
ENOUGH = 1.5  # rows that a set of layers needs, times the width
LEFT = 0.25  # times a layer's mean energy; with less along it, a direction counts as removed
PARALLEL = 0.7  # cosine above which two directions are one finding
STEPS_OF_ERROR = 1.7  # times 4^-b of the energy: the errors of rounding to b bits


@dataclass(frozen=True)
class StreamMatrix:
    """A tensor that writes into the stream or reads from it; `axis` is the stream's axis."""

    tensor: Tensor
    axis: int

    @property
    def width(self) -> int:
        """d, the width of the stream."""
        return self.tensor.shape[self.axis]

    def rows(self, most: float = np.inf) -> np.ndarray:
        """Rows (n, d), evenly thinned to about `most`."""
        stored = self.tensor.weights()
        oriented = stored if self.axis else stored.T
        step = max(1, ceil(oriented.shape[0] / most))
        part = oriented[::step]
        if isinstance(part, Half):
            return np.asarray(part, np.float32)
        return part.astype(np.float32, copy=False)


@dataclass(frozen=True)
class StreamSide:
    """All matrices of one kind, by layer."""

    what: str  # in words
    writes: bool
    layers: dict[int, list[StreamMatrix]]

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        tensors = [matrix.tensor for matrices in self.layers.values() for matrix in matrices]
        return 8 * sum(t.nbytes for t in tensors) / max(1, sum(prod(t.shape) for t in tensors))

    def rows(self, layer: int) -> int:
        """Number of rows of a layer."""
        return sum(matrix.tensor.shape[1 - matrix.axis] for matrix in self.layers[layer])

    def gram(self, layer: int) -> np.ndarray:
        """The Gram matrix of a layer, with trace one; zero if a weight is not finite."""
        width = self.layers[layer][0].width
        total = np.zeros((width, width), np.float32)
        self.add(total, layer)
        return total

    def add(
        self, total: np.ndarray, layer: int, most: float = np.inf, *, wide: bool = False
    ) -> None:
        """Add a layer's Gram matrix to a sum (d, d), from about `most` rows, `wide` in threads.

        Nothing is added if a weight is not finite.
        """
        parts = [matrix.rows(most / len(self.layers[layer])) for matrix in self.layers[layer]]
        squares = sum(float(np.einsum("nd,nd->", rows, rows, dtype=np.float64)) for rows in parts)
        if not 0 < squares < np.inf:  # nor NaN
            return
        starts = range(0, len(total), STRIP)
        for part in parts:
            rows = np.divide(
                part, np.float32(sqrt(squares)), out=part if part.flags.writeable else None
            )

            def add(start: int, rows: np.ndarray = rows) -> None:
                strip = slice(start, start + STRIP)  # a few columns of the lower half
                total[start:, strip] += rows[:, start:].T @ rows[:, strip]

            for _ in in_threads(add, starts) if wide else map(add, starts):
                pass
        for start in starts:
            strip, rest = slice(start, start + STRIP), slice(start + STRIP, None)
            total[strip, rest] = total[rest, strip].T

    def energy(self, layer: int, directions: np.ndarray) -> float:
        """Energy of a layer along directions (d, k) over its mean; infinite if unknown."""
        along = total = 0.0
        for matrix in self.layers[layer]:
            rows = matrix.rows()
            squares = (rows @ directions.astype(np.float32)) ** 2  # (n, k)
            along += float(squares.sum(dtype=np.float64)) / directions.shape[1]
            total += float(np.einsum("nd,nd->", rows, rows, dtype=np.float64)) / rows.shape[1]
        return along / total if np.isfinite(along) and total > 0 else np.inf


@dataclass(frozen=True)
class Removed:
    """Directions that were removed from some layers."""

    side: StreamSide
    least: Least
    score: float  # -log10 of the probability of such a gap among random ones
    energies: dict[int, float]  # by layer, over its mean energy along a direction

    @property
    def layers(self) -> list[int]:
        """The layers from which they were removed."""
        return [layer for layer, energy in self.energies.items() if energy <= LEFT]

    @property
    def left(self) -> float:
        """Share of the layers' size that is left along a direction."""
        return sqrt(float(np.mean([self.energies[layer] for layer in self.layers])))


def removed_directions(
    model: Model, layers: Sequence[int], everything: bool = False
) -> tuple[list[Removed], tuple[str, ...]]:
    """Directions that were removed, and a note for each undecided side.

    Always judges what attention writes in these layers; `everything` adds what networks write and
    what both read. Weights that are not finite are ignored.
    """
    removed: list[Removed] = []
    notes = []
    with phase("looking for removed directions"), np.errstate(over="ignore", invalid="ignore"):
        for side in sides(model, layers, everything):
            why = _undecided(model, side)
            if not why:
                try:
                    more, why, _ = judge(side, model.config.d_model, centred_norms(model))
                    removed += more
                except CheckpointError as error:  # a format that cannot be decoded
                    why = str(error)
            if why:
                question = f"Whether a direction was removed from {side.what}"
                notes.append(f"{question} cannot be told: {why}.")
    return removed, tuple(notes)


def sides(model: Model, layers: Sequence[int], everything: bool) -> Iterator[StreamSide]:
    """Sides that write into the stream or read from it, as far as the row knows them."""
    mlp, d = model.family.mlp, model.config.d_model
    conv1d = model.family.heads.layout in (conv1d_fused, conv1d_crossing)

    def matrices(index: int, modules: Iterable[str], axis: int) -> list[StreamMatrix]:
        stem = model.stem(index)
        names = (f"{stem}{module}.weight" for module in dict.fromkeys(modules) if module)
        tensors = [model.checkpoint[name] for name in names if name in model.checkpoint]
        return [StreamMatrix(t, axis) for t in tensors if len(t.shape) == 2 and t.shape[axis] == d]

    def side(what: str, writes: bool, modules: Sequence[str], transposed: bool) -> StreamSide:
        axis = int(writes == transposed)
        by_layer = {i: matrices(i, modules, axis) for i in layers}
        return StreamSide(what, writes, {i: found for i, found in by_layer.items() if found})

    row = model.family
    yield side("what attention writes (W_O)", True, (row.heads.out,), conv1d)
    if everything:
        yield side("what attention reads (W_Q, W_K, W_V)", False, row.heads.projections[:3], conv1d)
        if mlp is not None:
            yield side("what feed-forward networks write", True, (mlp.down,), mlp.transposed)
            yield side("what feed-forward networks read", False, (mlp.up, mlp.gate), mlp.transposed)


def _undecided(model: Model, side: StreamSide) -> str:
    """Why a side cannot be judged, whatever its weights; empty if it can."""
    d = model.config.d_model
    if len(side.layers) < 2:
        return "fewer than two of these layers are in the file"
    if not NARROW <= d <= WIDEST:
        return f"the stream has {d:,} dimensions; only {NARROW} to {WIDEST:,} can be judged"
    if sum(map(side.rows, side.layers)) < ENOUGH * d:
        return "all layers together have too few rows for the width of the stream"
    return ""


def _too_coarse(side: StreamSide, sets: Sequence[Least]) -> str:
    """Why a direction that was removed wholly would not stand out from these spectra; or empty."""

    def score(left: float) -> float:
        spectra = (np.sort(np.concatenate([[left], least.eigenvalues[:-1]])) for least in sets)
        return min(float(gap_scores(spectrum)[:RANKS].max()) for spectrum in spectra)

    if score(STEPS_OF_ERROR * 4.0 ** -int(side.bits)) >= FOUND[side.writes]:
        return ""
    if score(0.0) >= FOUND[side.writes]:
        bits = f"{side.bits:.2g} bits"
        return f"rounding to {bits} leaves more along any direction than a removal would"
    use = "write next to nothing along" if side.writes else "hardly read"
    return f"layers {use} so many directions that one more would not stand out"


def runs(n_layers: int) -> list[tuple[int, ...]]:
    """Runs of layers, by place, such that any run of `RUN` of them contains one; and all layers."""
    run, step = ceil(RUN * n_layers), max(1, n_layers // 6)
    width = max(2, run - step + 1)
    starts = dict.fromkeys((*range(0, n_layers - width + 1, step), max(0, n_layers - width)))
    some = (tuple(range(a, min(a + width, n_layers))) for a in starts)
    return list(dict.fromkeys((*some, tuple(range(n_layers)))))


def groups(n_layers: int) -> list[tuple[int, ...]]:
    """Runs of layers that do not overlap, for when Gram matrices are not kept."""
    width = max(1, (ceil(RUN * n_layers) + 1) // 2)
    cuts = [*range(0, n_layers - width + 1, width), n_layers]
    return [tuple(range(a, b)) for a, b in pairwise(cuts)]


def centred_norms(model: Model) -> bool:
    """True if a norm that reads the stream subtracts its mean."""
    row = model.family
    network_norm = None if row.mlp is None else row.mlp.norm
    norms = (*(row.norm_of(i) for i in model.attention_layers), row.norms.after, network_norm)
    return any(norm is not None and norm.centred for norm in norms)


class SideResult(NamedTuple):
    """The result for one side."""

    removed: list[Removed]
    why: str  # why it is undecided; empty if it is decided
    score: float  # score of the set that stands out most


def judge(side: StreamSide, d: int, centred: bool) -> SideResult:
    """The directions of one side that stand out, in a stream of width d; `centred` if norms are."""
    layers, limit = list(side.layers), FOUND[side.writes]
    kept: list[np.ndarray] = []

    def pooled(places: Sequence[int]) -> np.ndarray:
        if kept:
            return sum_grams([kept[place] for place in places])
        total = np.zeros((d, d), np.float32)
        for place in places:
            side.add(total, layers[place], ROWS * d / len(places), wide=True)
        hand_back()  # this sum and its Cholesky factor are the most that an audit holds
        return total

    def least_in(places: tuple[int, ...]) -> Least | None:
        if sum(side.rows(layers[place]) for place in places) < ENOUGH * d:
            return None
        gram = pooled(places)
        return least_of(gram, centred) if gram.any() else None

    narrow = 4 * d * d * len(layers) <= KEPT
    if narrow:
        kept += in_threads(side.gram, layers)
    usable = [bool(gram.any()) for gram in kept]
    sets = groups(len(layers))
    if narrow:
        sets = [places for places in runs(len(layers)) if all(usable[i] for i in places)]
        if all(usable):
            sets += agreeing(kept, centred)
    candidates = in_threads(least_in, sets) if narrow else map(least_in, sets)
    scored = [
        (least, least.score - _paid(places, len(layers)))
        for least, places in zip(candidates, sets, strict=True)
        if least is not None
    ]
    if not scored:
        why = "no run of layers has enough finite rows for the width of the stream"
        return SideResult([], why, 0.0)
    removed: list[Removed] = []
    most = max(score for _, score in scored)
    for candidate, score in sorted(scored, key=lambda pair: -pair[1]):
        if score < LOOKED_AT or any(_same(earlier.least, candidate) for earlier in removed):
            continue
        energies = {layer: side.energy(layer, candidate.directions) for layer in layers}
        chosen = tuple(place for place, layer in enumerate(layers) if energies[layer] <= LEFT)
        again = least_in(chosen) if len(chosen) > 1 else None
        if again is not None and again.score - _paid(chosen, len(layers)) >= limit:
            candidate, score = again, max(score, again.score - _paid(chosen, len(layers)))
            energies = {layer: side.energy(layer, candidate.directions) for layer in layers}
        most = max(most, score)
        edit = Removed(side, candidate, score, energies)
        new = not any(_same(earlier.least, candidate) for earlier in removed)
        if score >= limit and len(edit.layers) > 1 and new:
            removed.append(edit)
    why = "" if removed else _too_coarse(side, [least for least, _ in scored])
    return SideResult(removed, why, most)


def _paid(places: Sequence[int], n_layers: int) -> float:
    """Cost of choosing a set of layers by what they share; runs were not chosen."""
    is_run = places[-1] - places[0] + 1 == len(places)
    return 0.0 if is_run else choices(len(places), n_layers)


def _same(a: Least, b: Least) -> bool:
    """True if two sets of directions share one."""
    return float(np.linalg.norm(a.directions.T @ b.directions, 2)) >= PARALLEL


removed_direction = finding(
    "removed_direction",
    "one direction removed",
    severity="warning",
    rank=190,
    look_next="See which tokens lie along the direction: removing one is how refusals or a style "
    "are edited out of a model.",
)


def removed_findings(model: Model, removed: Sequence[Removed]) -> list[Finding]:
    """One finding for each set of directions that was removed."""
    return [*map(_finding, removed, _tokens(model, removed))]


def _finding(removed: Removed, tokens: str) -> Finding:
    k, side = removed.least.directions.shape[1], removed.side
    which, pronoun = ("One direction was", "it") if k == 1 else (f"{k} directions were", "them")
    elsewhere = [e for layer, e in removed.energies.items() if layer not in removed.layers]
    usual = [energy for energy in elsewhere if np.isfinite(energy)]
    sizes = {layer: sqrt(removed.energies[layer]) for layer in removed.layers}
    tensors = [
        Member("tensor", None, layer=layer, name=matrix.tensor.name, number=size)
        for layer, size in sizes.items()
        for matrix in side.layers[layer]
    ]
    text = (
        f"{which} removed from {side.what} in {indexed('layer', removed.layers)}: the size along "
        f"{pronoun} is {removed.left:.2g} of the mean over directions (probability of such a gap "
        f"among random ones: {10**-removed.score:.0e}){tokens}."
    )
    return removed_direction(
        measure="size_left_along_it",
        number=removed.left,
        usual=sqrt(float(np.median(usual))) if usual else 1.0,
        text=text,
        members=(*(Member("layer", layer, number=size) for layer, size in sizes.items()), *tensors),
    )


def _tokens(model: Model, removed: Sequence[Removed]) -> list[str]:
    """Tokens along each set of directions, as the end of a sentence; empty if unknown."""
    read, written, _ = token_rows(model) if removed else (None, None, "")
    names = token_names(Tokenizer.at_hand(model)) if removed else repr
    endings = []
    for each in removed:
        rows = written if each.side.writes else read
        if rows is None:
            endings.append("")
            continue
        named = []
        for pole in rows.nearest([each.least.directions])[0]:
            shown = pole.rows[:TOKENS_IN_FINDING]
            named.append(", ".join(repr(printable(names(int(row)))) for row in shown))
        endings.append(f"; along it: {'; against it: '.join(filter(None, named))}")
    return endings
