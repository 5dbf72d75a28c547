"""Measure heads: the arrays computed for each layer, and the table of numbers made from them.

Each projection is read once, for its Gram matrix, its triangle and its sketch. Every spectrum of a
head, rotated or not, is then the spectrum of a small core. Heads are spread over threads with one
BLAS thread each: on such small matrices that is faster than one head on all cores, and gives the
same bits on any number of cores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.device import CPU, Device
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.model.layers.factored import (
    Triangle,
    coordinates,
    core_singular_values,
    inner,
    inner_products,
    route_of,
    triangle,
)
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.logits import LogitBounds
from weightscope.model.metrics import spectra
from weightscope.model.metrics.head_factors import column_energies, factor_arrays, row_arrays
from weightscope.model.metrics.spaces import (
    SpaceProbes,
    leading_blocks,
    probes,
    shown,
    space_sketch,
)
from weightscope.model.metrics.spectra import (
    affine_singular_values,
    copying_score,
    directionality,
    eigenvalue_balance,
    eigenvalues,
    symmetric_eigenvalues,
    symmetric_share,
)

Arrays = Mapping[str, np.ndarray]  # by name: (H, ...) for one layer, or (L, H, ...) for all
MAPS = {"qk": "W_QK", "vo": "W_VO"}  # maps of a head: attention, and value-output
VECTORS = frozenset({"qk_left", "qk_right", "vo_left", "vo_right"})  # arrays that grow with heads
# prefix of the spectra of other forms of W_QK: delta1, mean64, free, turning
FORM = "qk_singular_values_"
NOT_STACKED = ("caveats", "kv_head", "broken", "unbounded")  # arrays of a layer
LEADING = 8  # eigenvalues of the symmetric part that are kept
TASKS = 8  # a layer's heads are handed out in at least about this many pieces


def measure_layer(
    layer: Layer,
    forms: Mapping[str, np.ndarray],
    device: Device = CPU,
    directions: int = 0,
    bounds: LogitBounds | None = None,
) -> dict[str, np.ndarray]:
    """Spectra, sketches and related arrays (H, ...) of every head of a layer.

    forms: (r, r) matrices that go between W_Q and W_K'. bounds: bounds on the layer's logits; by
    default of the layer as it is, for sequences of any length.

    What belongs to a key-value head is computed once for the query heads that share it. In addition
    to the layer as it is stored, a thread holds four (d, r) factors in float32 and blocks of them
    in float64; nothing of size (d, H r).
    """
    n_heads, n_kv = layer.n_heads, layer.n_kv_heads
    shared_by = n_heads // n_kv
    per_task = min(shared_by, max(1, n_heads // TASKS))
    tasks = []
    for kv in range(n_kv):
        last = (kv + 1) * shared_by
        for first in range(kv * shared_by, last, per_task):
            tasks.append((kv, range(first, min(first + per_task, last))))
    against = probes(layer.d_model), probes(layer.k.shape[1])
    bounds = bounds or LogitBounds(layer)

    def measure_heads(task: tuple[int, range]) -> MeasuredPart:
        return _measure_heads(layer, *task, forms, against, device, directions, bounds)

    # NaN weights make NaN measures, which are a finding
    with np.errstate(invalid="ignore", over="ignore"):
        parts = list(in_threads(measure_heads, tasks))
    heads = [head for part in parts for head in part.heads]
    columns = np.sum([part.columns for part in parts], axis=0)  # (d,)
    squares = [np.sum(rows, axis=0) for rows in zip(*(p.squares for p in parts), strict=True)]
    if columns.sum() == 0 and any(head["qk_route"] == "none" for head in heads):
        columns = np.full_like(columns, np.nan)  # no head is finite, so the shares are unknown
    with np.errstate(invalid="ignore"):
        shares = columns / columns.sum() if columns.sum() > 0 else columns
    sinks = np.full(n_heads, np.nan) if layer.sinks is None else layer.sinks.astype(np.float64)
    of_layer = {
        "qk_column_share": shares,
        "kv_head": np.repeat(np.arange(n_kv), shared_by),
        "caveats": np.array(layer.caveats, dtype=str),
        "unbounded": np.array([bounds.reason], dtype=str),
        "score_scale": np.full(n_heads, abs(layer.scale)),
        "learned_sink": sinks,
        **row_arrays(squares, _gains(layer), layer.output_bias),
    }
    return {name: stacked([head[name] for head in heads]) for name in heads[0]} | of_layer


def _gains(layer: Layer) -> list[np.ndarray]:
    """The gain (d,) that is folded into each of W_Q, W_K, W_V and W_O; ones where none is."""
    read = layer.memory_norm if layer.cross else layer.norm  # norm of what keys and values read
    widths = layer.d_model, layer.k.shape[1], layer.v.shape[1], layer.d_model
    return [
        np.ones(width) if norm is None or not len(norm.gamma) else norm.gamma.astype(np.float64)
        for norm, width in zip((layer.norm, read, read, None), widths, strict=True)
    ]


@holds_arrays
class Projection(ShowsShapes):
    """Products of one head's (d, r) factor that are computed once."""

    gram: np.ndarray
    triangle: Triangle
    sketch: np.ndarray

    @classmethod
    def of(cls, factor: np.ndarray, gram: np.ndarray, against: SpaceProbes) -> "Projection":
        """The triangle and sketch of a factor, from its Gram matrix."""
        root = triangle(factor, gram)
        return cls(gram, root, space_sketch(factor, root.r, against))


class MeasuredPart(NamedTuple):
    """Arrays of heads that share a key-value head, and sums over these heads."""

    heads: list[dict[str, np.ndarray]]
    columns: np.ndarray  # (d,) sum of |column of W_QK|^2 / |W_QK|_F^2
    squares: list[np.ndarray]  # four of (d,): squares of each dimension of W_Q, W_K, W_V and W_O


def _measure_heads(
    layer: Layer,
    kv: int,
    heads: Sequence[int],
    forms: Mapping[str, np.ndarray],
    against: tuple[SpaceProbes, SpaceProbes],
    device: Device,
    directions: int,
    bounds: LogitBounds,
) -> MeasuredPart:
    """Measure heads that share a key-value head."""
    (w_k, b_k), (w_v, b_v) = layer.k.of(kv), layer.v.of(kv)
    on_device = device.put(w_k), device.put(w_v)
    products = _two_spaces if layer.cross else inner_products  # memory may have another width
    key: Projection | None = None
    value: Projection | None = None
    measured, squares = [], np.zeros(len(w_k))
    of_keys, of_values = _row_squares(w_k), _row_squares(w_v)
    if heads[0] % (layer.n_heads // layer.n_kv_heads):  # counted with the first heads of the group
        of_keys, of_values = np.zeros_like(of_keys), np.zeros_like(of_values)
    of_queries, of_outputs = np.zeros(layer.d_model), np.zeros(layer.d_model)
    for head in heads:
        w_q, b_q = layer.head(head).query_at(0)
        w_o = np.asarray(layer.w_o[head]).T
        known = [None if side is None else side.gram for side in (key, value)]
        key_gram, query_gram, qk = products(on_device[0], device.put(w_q), device, known[0])
        value_gram, output_gram, vo = products(on_device[1], device.put(w_o), device, known[1])
        key = key or Projection.of(w_k, key_gram, against[1])
        value = value or Projection.of(w_v, value_gram, against[1])
        query = Projection.of(w_q, query_gram, against[0])
        output = Projection.of(w_o, output_gram, against[0])
        arrays: dict[str, np.ndarray] = {}
        for name, between in forms.items():
            arrays[FORM + name] = core_singular_values(query.triangle, key.triangle, between)
        for name, left, right, bias in (("qk", query, key, b_q), ("vo", value, output, b_v)):
            arrays |= _spectrum(name, left, right, layer.d_model, directions)
            # |b_Q W_K'| = |R_K b_Q'|
            bias_norm = np.linalg.norm(right.triangle.r @ bias.astype(np.float64))
            arrays[f"{name}_bias_norm"] = np.array(bias_norm)
            arrays[f"{name}_route"] = np.array(route_of(left.triangle, right.triangle))
            arrays |= {f"{name[0]}_sketch": left.sketch, f"{name[1]}_sketch": right.sketch}
        linear = arrays["vo_singular_values"]
        affine = affine_singular_values(value.triangle, b_v, output.triangle, linear)
        symmetric = symmetric_eigenvalues(query.gram, key.gram, qk)[:LEADING]
        if bounds.layer is layer:
            bound = bounds.of(head, (query.gram, key.gram), arrays["qk_singular_values"][0])
        else:
            bound = bounds.of(head)
        rows, columns = _lengths(w_q, key.triangle), _lengths(w_k, query.triangle)  # (d,), W_QK's
        arrays |= {
            "vo_affine_singular_values": affine,
            "qk_symmetric_share": np.array(symmetric_share(query.gram, key.gram, qk)),
            "qk_symmetric_eigenvalues": symmetric,
            "vo_eigenvalues": eigenvalues(vo.T),
            "qk_logit_bound": np.array(bound),
            "qk_directionality": np.array(directionality(rows, columns)),
        }
        grams = query.gram, key.gram, value.gram, output.gram
        measured.append(arrays | factor_arrays(grams, (b_q, b_k, b_v)) | column_energies(grams))
        of_queries, of_outputs = of_queries + _row_squares(w_q), of_outputs + _row_squares(w_o)
        squared = (query.gram * key.gram).sum()
        if np.isfinite(squared) and squared > 0:
            squares += columns**2 / squared
    return MeasuredPart(measured, squares, [of_queries, of_keys, of_values, of_outputs])


def _row_squares(factor: np.ndarray) -> np.ndarray:
    """Sums of squares of the rows of a factor, (d, r) -> (d,)."""
    return np.einsum("dr,dr->d", factor, factor, dtype=np.float64)


def _lengths(factor: np.ndarray, root: Triangle) -> np.ndarray:
    """Lengths of the rows of factor @ other', (d,), where other = Q root: factor (d, r)."""
    product = factor @ root.r.T.astype(np.float32)
    return np.sqrt(np.einsum("dr,dr->d", product, product)).astype(np.float64)


def _two_spaces(
    a: Any, b: Any, device: Device, gram: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gram matrices of factors on two spaces; NaN for their product, which needs a common one."""
    nothing = np.full((a.shape[1], b.shape[1]), np.nan)
    known = inner(a, device=device) if gram is None else gram
    return known, inner(b, device=device), nothing


def _spectrum(
    name: str, left: Projection, right: Projection, d: int, directions: int
) -> dict[str, np.ndarray]:
    """Singular values of a map and, on request, coordinates of its leading singular vectors.

    The coordinates are (r, k); (r, 0) where R is not enough.
    """
    if not directions:
        return {f"{name}_singular_values": core_singular_values(left.triangle, right.triangle)}
    of_left, of_right = np.empty((len(left.gram), 0)), np.empty((len(right.gram), 0))
    if route_of(left.triangle, right.triangle) == "gram":
        u, s, vt = lapack.svd(left.triangle.r @ right.triangle.r.T)
        columns = slice(shown(leading_blocks(s, d, directions)))
        of_left = coordinates(left.triangle, u[:, columns])
        of_right = coordinates(right.triangle, vt[columns].T)
    else:
        s = core_singular_values(left.triangle, right.triangle)
    return {f"{name}_singular_values": s, f"{name}_left": of_left, f"{name}_right": of_right}


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stack arrays, shorter ones filled with NaN at their ends: L of (H, r) -> (L, H, r)."""
    shape = np.max([array.shape for array in arrays], axis=0)
    if all(array.shape == tuple(shape) for array in arrays):
        return np.stack(arrays)
    filled = np.full((len(arrays), *shape), np.nan, arrays[0].dtype)
    for row, array in zip(filled, arrays, strict=True):
        row[tuple(slice(n) for n in array.shape)] = array
    return filled


# The measures, one row each.


@dataclass(frozen=True)
class Measure:
    """One number per head, a function of one array."""

    name: str  # its column in heads.csv
    symbol: str  # as in the papers, a formula (`weightscope.core.formulas`)
    array: str  # name of the array it is computed from
    compute: Callable[[np.ndarray, int], np.ndarray]  # (L, H, ...), model width d -> (L, H)
    meaning: str = ""  # explanation of a high or a low value
    scale: str = ""  # colour map's scale, "log" or "linear"; "" where a map would add little
    words: str = ""  # its name where the symbol is long
    equation: str = ""  # its definition, a formula too
    source: str = ""  # the paper it comes from

    @property
    def label(self) -> str:
        """Its words if it has any, else its symbol."""
        return self.words or self.symbol


def _second(s: np.ndarray, d: int) -> np.ndarray:
    return s[..., 1] if s.shape[-1] > 1 else np.zeros(s.shape[:-1])


def _as_it_is(values: np.ndarray, d: int) -> np.ndarray:
    return values


# Measures of the singular values s (L, H, r) of a map W. The width d of the model decides which are
# rounding.
_SPECTRUM = (
    Measure(
        "sigma1",
        "σ₁(W)",
        "",
        lambda s, d: s[..., 0],
        "Spectral norm: the largest output for a unit input.",
        "log",
        equation="max_(|x| = 1) |x W|",
    ),
    Measure(
        "sigma2",
        "σ₂(W)",
        "",
        _second,
        "The second singular value.",
        equation="max_(|x| = 1, x ⊥ u_1) |x W|",
    ),
    Measure(
        "gap",
        "σ₁/σ₂(W)",
        "",
        lambda s, d: spectra.spectral_gap(s),
        "Spectral gap: where it is large (a spike), one direction dominates.",
        "log",
        equation="frac(σ_1, σ_2)",
        source="two-sink-mechanisms, Lemma 2",
    ),
    Measure(
        "frobenius",
        "‖W‖_F",
        "",
        lambda s, d: spectra.frobenius(s),
        "Frobenius norm: the size of outputs for random inputs.",
        "log",
        equation="sqrt(sum_i σ_i^2)",
    ),
    Measure(
        "stable_rank",
        "‖W‖_F²/σ₁²",
        "",
        lambda s, d: spectra.stable_rank(s),
        "Stable rank: the energy, in directions as strong as the first.",
        "linear",
        equation="frac(sum_i σ_i^2, σ_1^2)",
        source="Rudelson and Vershynin 2007",
    ),
    Measure(
        "effective_rank",
        "erank(W)",
        "",
        lambda s, d: spectra.effective_rank(s),
        "exp of the entropy of $σᵢ/Σσ$: how many directions are used.",
        "linear",
        "effective rank of W",
        equation="exp(-sum_i p_i ln p_i), p_i = frac(σ_i, sum_j σ_j)",
        source="Roy and Vetterli 2007",
    ),
    Measure(
        "participation_ratio",
        "(Σσ²)²/Σσ⁴(W)",
        "",
        lambda s, d: spectra.participation_ratio(s),
        "How many directions share the energy.",
        "linear",
        equation="frac((sum_i σ_i^2)^2, sum_i σ_i^4)",
    ),
    Measure(
        "rank",
        "rank(W)",
        "",
        spectra.numerical_rank,
        "How many singular values are more than rounding; -1 where they are not finite.",
        equation="#{i: σ_i > d ε σ_1}",
    ),
    Measure(
        "condition",
        "σ₁/σ_min(W)",
        "",
        spectra.condition_number,
        "Largest over smallest non-zero singular value.",
        "log",
        equation="frac(σ_1, min_(σ_i > d ε σ_1) σ_i)",
        source="norm-based-attention, Fig. 2",
    ),
)
UNSCALED = "Without the factor 1/√d' of scores."  # part of the meaning of every size of W_QK
_SIZES = ("sigma1", "sigma2", "frobenius")
# measures of the other forms of W_QK
_OF_FORMS = ("sigma1", "frobenius", "stable_rank", "effective_rank")

_LIKES = (
    "eigenvalue of the symmetric part: positive where like attends to like, negative where it "
    "avoids it."
)
_ROUTE = (
    "How the spectra were computed: from Gram matrices (gram), or by QR (qr) where those are not "
    "accurate enough."
)
_QK = (
    Measure(
        "qk_symmetric_share",
        "‖sym W_QK‖_F²/‖W_QK‖_F²",
        "qk_symmetric_share",
        _as_it_is,
        "1: $score(i, j) = score(j, i)$; 0: $score(i, j) = −score(j, i)$; ½: neither, as in "
        "random maps.",
        "linear",
        equation="frac(‖W_QK + W_QK'‖_F^2, 4 ‖W_QK‖_F^2)",
    ),
    Measure(
        "qk_antisymmetric_share",
        "‖asym W_QK‖_F²/‖W_QK‖_F²",
        "qk_symmetric_share",
        lambda share, d: 1 - share,
        "The rest: 1 minus the symmetric share.",
        equation="frac(‖W_QK - W_QK'‖_F^2, 4 ‖W_QK‖_F^2)",
    ),
    Measure(
        "qk_directionality",
        "(r − c)/(r + c)(W_QK)",
        "qk_directionality",
        _as_it_is,
        "-1: some dimensions of keys stand out, and none of queries; 1: the other way round.",
        "",
        "directionality of W_QK",
        equation="frac(r - c, r + c), r = sum_i max(0, ‖w_i‖ - μ - 2 s) of rows w_i",
        source="Saponati et al. 2025, arXiv 2502.10927",
    ),
    Measure(
        "qk_sym_eig1",
        "λ₁(sym W_QK)",
        "qk_symmetric_eigenvalues",
        lambda eig, d: eig[..., 0],
        f"Leading {_LIKES}",
        "linear",
        equation="λ_1(frac(W_QK + W_QK', 2))",
    ),
    Measure(
        "qk_sym_eig2",
        "λ₂(sym W_QK)",
        "qk_symmetric_eigenvalues",
        lambda eig, d: eig[..., 1],
        f"Second {_LIKES}",
        equation="λ_2(frac(W_QK + W_QK', 2))",
    ),
    Measure(
        "qk_sym_eig3",
        "λ₃(sym W_QK)",
        "qk_symmetric_eigenvalues",
        lambda eig, d: eig[..., 2],
        f"Third {_LIKES}",
        equation="λ_3(frac(W_QK + W_QK', 2))",
    ),
    Measure(
        "qk_bias_norm",
        "‖b_QK‖",
        "qk_bias_norm",
        _as_it_is,
        "The part of the score that depends on the key alone.",
        "log",
        equation="‖b_Q W_K'‖",
        source="detokenization, eq. 14",
    ),
    Measure(
        "qk_logit_bound",
        "max |score|",
        "qk_logit_bound",
        _as_it_is,
        "No input makes a score before the softmax larger, at any distance; NaN where nothing "
        "bounds it.",
        equation="d σ_1(W_QK) scale + biases' terms",
    ),
    Measure(
        "qk_token_logit",
        "max |score| of tokens",
        "qk_token_logit",
        _as_it_is,
        "The largest score of two tokens of the vocabulary in the first layer, at any distance; "
        "NaN in others.",
    ),
    Measure(
        "learned_sink",
        "sink",
        "learned_sink",
        _as_it_is,
        "The head's learned sink: a logit that every softmax has besides.",
    ),
    Measure("qk_route", "route of W_QK", "qk_route", _as_it_is, _ROUTE),
)
_VO = (
    Measure(
        "vo_affine_sigma1",
        "σ₁(f̃)",
        "vo_affine_singular_values",
        lambda s, d: s[..., 0],
        "Spectral norm of the value-output map with its bias, on $[x 1]$.",
        "log",
        equation="max_(|[x 1]| = 1) |[x 1] f̃|",
        source="norm-based-attention, eqs 9-11",
    ),
    Measure(
        "vo_affine_condition",
        "σ₁/σ_min(f̃)",
        "vo_affine_singular_values",
        lambda s, d: spectra.condition_number(s, d + 1),
        "Largest over smallest non-zero stretch of $f$, with its bias.",
        "log",
        equation="frac(σ_1(f̃), min_i σ_i(f̃))",
        source="norm-based-attention, Fig. 2",
    ),
    Measure(
        "vo_copying_score",
        "Σ⁺Re λ/Σ|λ|(W_VO)",
        "vo_eigenvalues",
        lambda eig, d: copying_score(eig),
        "Share of positive eigenvalue mass: near 1, the head writes what it reads.",
        "linear",
        "copying score",
        equation="frac(sum_i max(0, Re λ_i), sum_i |λ_i|)",
        source="after Elhage et al. 2021",
    ),
    Measure(
        "vo_eigenvalue_balance",
        "ΣRe λ/Σ|λ|(W_VO)",
        "vo_eigenvalues",
        lambda eig, d: eigenvalue_balance(eig),
        "1: the head writes what it reads; -1: it writes the opposite.",
        equation="frac(sum_i Re λ_i, sum_i |λ_i|)",
        source="Elhage et al. 2021",
    ),
    Measure(
        "vo_bias_norm",
        "‖b_V W_O‖",
        "vo_bias_norm",
        _as_it_is,
        "What the head writes wherever it attends.",
        "log",
        equation="‖b_V W_O‖",
    ),
    Measure("vo_route", "route of W_VO", "vo_route", _as_it_is, _ROUTE),
)


def _of(map_name: str, form: str = "") -> Iterator[Measure]:
    """The measures of the spectrum of one map, or of another form of W_QK."""
    w = f"{MAPS[map_name]} {form}".strip()
    array = FORM + form if form else f"{map_name}_singular_values"
    for measure in _SPECTRUM:
        if form and measure.name not in _OF_FORMS:
            continue
        meaning = measure.meaning
        if map_name == "qk" and measure.name in _SIZES:
            meaning = f"{meaning} {UNSCALED}"
        yield replace(
            measure,
            name="_".join(filter(None, (map_name, measure.name, form))),
            symbol=measure.symbol.replace("W", w),
            array=array,
            meaning=meaning,
            scale="" if form else measure.scale,
            words=measure.words.replace("W", w),
            equation=measure.equation.replace("W", w),
        )


def measures_of(arrays: Arrays) -> tuple[Measure, ...]:
    """Every measure of these arrays, in the order of the columns of heads.csv."""
    forms = [measure for form in forms_of(arrays) for measure in _of("qk", form)]
    widest = arrays["qk_symmetric_eigenvalues"].shape[-1]  # 2 where heads are 1 wide
    lacking = {"qk_sym_eig3"} if widest <= 2 else set()
    for name in ("learned_sink", "qk_token_logit"):
        if not np.isfinite(arrays.get(name, np.nan)).any():
            lacking.add(name)
    qk = [measure for measure in _QK if measure.name not in lacking]
    return (*_of("qk"), *qk, *forms, *_of("vo"), *_VO)


def forms_of(arrays: Arrays) -> list[str]:
    """The other forms of W_QK that were measured."""
    return [name.removeprefix(FORM) for name in arrays if name.startswith(FORM)]


class MeasuredHeads:
    """Heads of a checkpoint in numbers, from each layer's arrays and the model's width d."""

    layers: np.ndarray  # (L,) their indices in the checkpoint
    arrays: dict[str, np.ndarray]  # (L, H, ...) arrays of all layers, without singular vectors
    by_layer: Mapping[int, Arrays]  # with singular vectors, which may not fit into memory at once
    table: Table  # one row per head: layer, head, kv_head, measures and `more`; it is heads.csv
    caveats: tuple[str, ...]  # parts of the heads' scores that the matrices leave out
    unbounded: dict[int, str]  # reasons why nothing bounds a layer's logits, where nothing does
    broken: dict[int, list[str]]  # by layer, the tensors in which NaN or infinity was read

    def __init__(self, layers: Mapping[int, Arrays], d: int, more: Sequence[Column] = ()) -> None:
        self.layers, self.by_layer = np.array(list(layers)), layers
        every = []  # without singular vectors
        for of_layer in layers.values():
            every.append({name: array for name, array in of_layer.items() if name not in VECTORS})
        caveats, self.unbounded, self.broken = dict[str, None](), {}, {}
        for layer, arrays in zip(layers, every, strict=True):
            caveats |= dict.fromkeys(map(str, arrays["caveats"]))
            self.broken[layer] = [str(name) for name in arrays.get("broken", ())]
            if reason := str(arrays["unbounded"][0]):
                self.unbounded[layer] = reason
        self.caveats = tuple(caveats)
        first = every[0]
        names = [name for name in first if name not in NOT_STACKED]
        common = [name for name in names if all(name in arrays for arrays in every)]
        self.arrays = {name: stacked([arrays[name] for arrays in every]) for name in common}
        self.measures = measures_of(self.arrays)
        kv_heads = first["kv_head"]  # (H,)
        layer, head = np.meshgrid(self.layers, np.arange(len(kv_heads)), indexing="ij")  # (L, H)
        kv_head = np.tile(kv_heads, len(self.layers))
        columns = [
            Column("layer", layer.ravel(), meaning="Its index in the checkpoint."),
            Column("head", head.ravel(), meaning="Query head."),
            Column("kv_head", kv_head, meaning="The key-value head that it uses."),
        ]
        for measure in self.measures:
            values = self.arrays[measure.array]
            if values.ndim > 2:  # spectra, shorter ones with NaN at their ends
                padding = np.isfinite(values[..., :1]) & np.isnan(values)
                values = np.where(padding, 0.0, values)
            numbers, symbol = measure.compute(values, d).ravel(), f"${measure.symbol}$"
            columns.append(Column(measure.name, numbers, symbol, meaning=measure.meaning))
        self.table = Table([*columns, *more])

    def append(self, column: Column) -> None:
        """Give the table one column more."""
        self.table = Table([*self.table.columns, column])

    def __repr__(self) -> str:
        return f"MeasuredHeads({len(self.layers)} layers of {self.n_heads} heads)"

    @property
    def n_heads(self) -> int:
        """H, query heads per layer."""
        return len(self.table) // len(self.layers)

    @property
    def shares_keys(self) -> bool:
        """True if several query heads share a key-value head."""
        return bool(self.table["kv_head"].max() + 1 < self.n_heads)

    def measure(self, name: str) -> Measure:
        """The measure of this name."""
        return next(measure for measure in self.measures if measure.name == name)

    def grid(self, name: str) -> np.ndarray:
        """A column of the table by layer and head, (L, H)."""
        return self.table[name].reshape(len(self.layers), -1)

    def spectra(self) -> dict[str, np.ndarray]:
        """The arrays of spectra.npz."""
        names = ["qk_singular_values", *(FORM + form for form in forms_of(self.arrays))]
        names += ["vo_singular_values", "vo_affine_singular_values", "vo_eigenvalues"]
        names += ["qk_symmetric_eigenvalues", "qk_column_share"]
        return {"layers": self.layers} | {name: self.arrays[name] for name in names}
