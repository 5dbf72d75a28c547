"""The measures of a head, one row each, and the heads of a checkpoint as a table of their values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from weightscope.audit.measure_layer import FORM, stacked
from weightscope.metrics import spectra
from weightscope.metrics.spectra import copying_score, eigenvalue_balance
from weightscope.tables import Column, Table

Arrays = Mapping[str, np.ndarray]  # by name, of one layer (H, ...) as `measure_layer` gives them, or of all (L, H, ...)
MAPS = {"qk": "W_QK", "vo": "W_VO"}  # the two maps of a head: what it attends to, and what it passes on
VECTORS = frozenset(f"{name}_{side}" for name in MAPS for side in ("left", "right"))  # arrays that grow with every head


@dataclass(frozen=True)
class Measure:
    """One number per head, a function of one array."""

    name: str  # its column in heads.csv
    symbol: str  # as in the papers, a formula (`weightscope.formulas`)
    array: str  # name of the array it is computed from
    compute: Callable[[np.ndarray, int], np.ndarray]  # (array (L, H, ...), model width d) -> values (L, H)
    meaning: str = ""  # what a high or a low value says
    scale: str = ""  # of its colour map, "log" or "linear"; "" where a map would add little
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


# Measures of the singular values s (L, H, r) of a map W. The width d of the model decides which are rounding.
_SPECTRUM = (
    Measure("sigma1", "σ₁(W)", "", lambda s, d: s[..., 0],
            "Spectral norm: the largest output for a unit input.", "log",
            equation="max_(|x| = 1) |x W|"),
    Measure("sigma2", "σ₂(W)", "", _second, "The second singular value.",
            equation="max_(|x| = 1, x ⊥ u_1) |x W|"),
    Measure("gap", "σ₁/σ₂(W)", "", lambda s, d: spectra.spectral_gap(s),
            "Spectral gap: where it is large (a spike), one direction dominates.", "log",
            equation="frac(σ_1, σ_2)", source="two-sink-mechanisms, Lemma 2"),
    Measure("frobenius", "‖W‖_F", "", lambda s, d: spectra.frobenius(s),
            "Frobenius norm: the size of outputs for random inputs.", "log",
            equation="sqrt(sum_i σ_i^2)"),
    Measure("stable_rank", "‖W‖_F²/σ₁²", "", lambda s, d: spectra.stable_rank(s),
            "Stable rank: the energy, in directions as strong as the first.", "linear",
            equation="frac(sum_i σ_i^2, σ_1^2)", source="Rudelson and Vershynin 2007"),
    Measure("effective_rank", "erank(W)", "", lambda s, d: spectra.effective_rank(s),
            "exp of the entropy of $σᵢ/Σσ$: how many directions are used.", "linear", "effective rank of W",
            equation="exp(-sum_i p_i ln p_i), p_i = frac(σ_i, sum_j σ_j)", source="Roy and Vetterli 2007"),
    Measure("participation_ratio", "(Σσ²)²/Σσ⁴(W)", "", lambda s, d: spectra.participation_ratio(s),
            "How many directions share the energy.", "linear",
            equation="frac((sum_i σ_i^2)^2, sum_i σ_i^4)"),
    Measure("rank", "rank(W)", "", spectra.numerical_rank,
            "How many singular values are more than rounding; -1 where they are not finite.",
            equation="#{i: σ_i > d ε σ_1}"),
    Measure("condition", "σ₁/σ_min(W)", "", spectra.condition_number,
            "Largest over smallest non-zero singular value.", "log",
            equation="frac(σ_1, min_(σ_i > d ε σ_1) σ_i)", source="norm-based-attention, Fig. 2"),
)  # fmt: skip
UNSCALED = "Without the factor 1/√d' of scores."  # said of every size of W_QK
_SIZES = ("sigma1", "sigma2", "frobenius")
_OF_FORMS = ("sigma1", "frobenius", "stable_rank", "effective_rank")  # also measured of the other forms of W_QK

_LIKES = "eigenvalue of the symmetric part: positive where like attends to like, negative where it avoids it."
_ROUTE = "How the spectra were computed: from Gram matrices (gram), or by QR (qr) where those are not accurate enough."
_QK = (
    Measure("qk_symmetric_share", "‖sym W_QK‖_F²/‖W_QK‖_F²", "qk_symmetric_share", _as_it_is,
            "1: $score(i, j) = score(j, i)$; 0: $score(i, j) = −score(j, i)$; ½: neither, as in random maps.", "linear",
            equation="frac(‖W_QK + W_QK'‖_F^2, 4 ‖W_QK‖_F^2)"),
    Measure("qk_antisymmetric_share", "‖asym W_QK‖_F²/‖W_QK‖_F²", "qk_symmetric_share", lambda share, d: 1 - share,
            "The rest: 1 minus the symmetric share.",
            equation="frac(‖W_QK - W_QK'‖_F^2, 4 ‖W_QK‖_F^2)"),
    Measure("qk_sym_eig1", "λ₁(sym W_QK)", "qk_symmetric_eigenvalues", lambda eig, d: eig[..., 0],
            f"Leading {_LIKES}", "linear",
            equation="λ_1(frac(W_QK + W_QK', 2))"),
    Measure("qk_sym_eig2", "λ₂(sym W_QK)", "qk_symmetric_eigenvalues", lambda eig, d: eig[..., 1], f"Second {_LIKES}",
            equation="λ_2(frac(W_QK + W_QK', 2))"),
    Measure("qk_sym_eig3", "λ₃(sym W_QK)", "qk_symmetric_eigenvalues", lambda eig, d: eig[..., 2], f"Third {_LIKES}",
            equation="λ_3(frac(W_QK + W_QK', 2))"),
    Measure("qk_bias_norm", "‖b_QK‖", "qk_bias_norm", _as_it_is,
            "The part of the score that depends on the key alone.", "log",
            equation="‖b_Q W_K'‖", source="detokenization, eq. 14"),
    Measure("qk_route", "route of W_QK", "qk_route", _as_it_is, _ROUTE),
)  # fmt: skip
_VO = (
    Measure("vo_affine_sigma1", "σ₁(f̃)", "vo_affine_singular_values", lambda s, d: s[..., 0],
            "Spectral norm of the value-output map with its bias, on $[x 1]$.", "log",
            equation="max_(|[x 1]| = 1) |[x 1] f̃|", source="norm-based-attention, eqs 9-11"),
    Measure("vo_affine_condition", "σ₁/σ_min(f̃)", "vo_affine_singular_values",
            lambda s, d: spectra.condition_number(s, d + 1),
            "Largest over smallest non-zero stretch of $f$, with its bias.", "log",
            equation="frac(σ_1(f̃), min_i σ_i(f̃))", source="norm-based-attention, Fig. 2"),
    Measure("vo_copying_score", "Σ⁺Re λ/Σ|λ|(W_VO)", "vo_eigenvalues", lambda eig, d: copying_score(eig),
            "Share of positive eigenvalue mass: near 1, the head writes what it reads.", "linear", "copying score",
            equation="frac(sum_i max(0, Re λ_i), sum_i |λ_i|)", source="after Elhage et al. 2021"),
    Measure("vo_eigenvalue_balance", "ΣRe λ/Σ|λ|(W_VO)", "vo_eigenvalues", lambda eig, d: eigenvalue_balance(eig),
            "1: the head writes what it reads; -1: it writes the opposite.",
            equation="frac(sum_i Re λ_i, sum_i |λ_i|)", source="Elhage et al. 2021"),
    Measure("vo_bias_norm", "‖b_V W_O‖", "vo_bias_norm", _as_it_is, "What the head writes wherever it attends.", "log",
            equation="‖b_V W_O‖"),
    Measure("vo_route", "route of W_VO", "vo_route", _as_it_is, _ROUTE),
)  # fmt: skip


def _of(map_name: str, form: str = "") -> Iterator[Measure]:
    """The measures of the spectrum of one map, or of another form of W_QK."""
    w = f"{MAPS[map_name]} {form}".strip()
    array = FORM + form if form else f"{map_name}_singular_values"
    for measure in _SPECTRUM:
        if not form or measure.name in _OF_FORMS:
            name = "_".join(filter(None, (map_name, measure.name, form)))
            texts = {text: getattr(measure, text).replace("W", w) for text in ("symbol", "words", "equation")}
            if map_name == "qk" and measure.name in _SIZES:
                texts["meaning"] = f"{measure.meaning} {UNSCALED}"
            yield replace(measure, name=name, array=array, scale="" if form else measure.scale, **texts)


def measures_of(arrays: Arrays) -> tuple[Measure, ...]:
    """Every measure of these arrays, in the order of the columns of heads.csv."""
    of_forms = [measure for form in forms_of(arrays) for measure in _of("qk", form)]
    widest = arrays["qk_symmetric_eigenvalues"].shape[-1]  # 2 where heads are 1 wide
    symmetric = (measure for measure in _QK if measure.name != "qk_sym_eig3" or widest > 2)
    return (*_of("qk"), *symmetric, *of_forms, *_of("vo"), *_VO)


def forms_of(arrays: Arrays) -> list[str]:
    """The other forms of W_QK that were measured."""
    return [name.removeprefix(FORM) for name in arrays if name.startswith(FORM)]


class MeasuredHeads:
    """The heads of a checkpoint as numbers, from the arrays of each layer (`measure_layer`) and the model's width d."""

    layers: np.ndarray  # (L,) their indices in the checkpoint
    arrays: dict[str, np.ndarray]  # (L, H, ...) what all layers have, but for singular vectors: spectra, sketches
    by_layer: Mapping[int, Arrays]  # with the singular vectors, a layer at a time: all of them may not fit into memory
    table: Table  # one row per head: layer, head, kv_head and the measures; it is heads.csv
    caveats: tuple[str, ...]  # what the matrices leave out of the heads' scores
    broken: dict[int, list[str]]  # by layer, the tensors in which NaN or infinity was read

    def __init__(self, layers: Mapping[int, Arrays], d: int) -> None:
        self.layers, self.by_layer = np.array(list(layers)), layers
        first, *rest = every = [_without_vectors(layers[layer]) for layer in layers]
        self.caveats = tuple(dict.fromkeys(str(caveat) for arrays in every for caveat in arrays["caveats"]))
        self.broken = {
            layer: [str(name) for name in arrays.get("broken", ())] for layer, arrays in zip(layers, every, strict=True)
        }
        names = [name for name in first if name not in {"caveats", "kv_head", "broken"}]
        common = [name for name in names if all(name in arrays for arrays in rest)]
        self.arrays = {name: stacked([arrays[name] for arrays in every]) for name in common}
        self.measures = measures_of(self.arrays)
        kv_heads = first["kv_head"]  # (H,)
        layer, head = np.meshgrid(self.layers, np.arange(len(kv_heads)), indexing="ij")  # (L, H)
        columns = [
            Column("layer", layer.ravel(), meaning="Its index in the checkpoint."),
            Column("head", head.ravel(), meaning="Query head."),
            Column("kv_head", np.tile(kv_heads, len(self.layers)), meaning="The key-value head that it uses."),
        ]
        for measure in self.measures:
            values = measure.compute(_without_padding(self.arrays[measure.array]), d)
            columns.append(Column(measure.name, values.ravel(), f"${measure.symbol}$", meaning=measure.meaning))
        self.table = Table(columns)

    def __repr__(self) -> str:
        return f"MeasuredHeads({len(self.layers)} layers of {self.n_heads} heads)"

    @property
    def n_heads(self) -> int:
        """H, query heads per layer."""
        return len(self.table) // len(self.layers)

    @property
    def shares_keys(self) -> bool:
        """Whether several query heads share a key-value head."""
        return bool(self.table["kv_head"].max() + 1 < self.n_heads)

    def measure(self, name: str) -> Measure:
        """The measure of this name."""
        return next(measure for measure in self.measures if measure.name == name)

    def grid(self, name: str) -> np.ndarray:
        """A column of the table by layer and head, (L, H)."""
        return self.table[name].reshape(len(self.layers), -1)

    def spectra(self) -> dict[str, np.ndarray]:
        """The arrays of spectra.npz."""
        names = ["qk_singular_values", *(FORM + form for form in forms_of(self.arrays)), "vo_singular_values"]
        names += ["vo_affine_singular_values", "vo_eigenvalues", "qk_symmetric_eigenvalues", "qk_column_share"]
        return {"layers": self.layers} | {name: self.arrays[name] for name in names}


def _without_vectors(arrays: Arrays) -> Arrays:
    return {name: array for name, array in arrays.items() if name not in VECTORS}


def _without_padding(values: np.ndarray) -> np.ndarray:
    """Spectra (L, H, r) with zeros for the NaN behind the last value of shorter ones; other arrays unchanged."""
    if values.ndim < 3:
        return values
    return np.where(np.isfinite(values[..., :1]) & np.isnan(values), 0.0, values)
