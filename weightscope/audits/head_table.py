"""The table of an audit: one row a head, one column a measure, each measure said in words once."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightscope.metrics import spectra
from weightscope.metrics.value_output import copying_score, eigenvalue_balance


@dataclass(frozen=True)
class Measure:
    """One column of heads.csv that a heat map can show.

    Attributes
    ----------
    name : str
    symbol : str
        As in the papers, for axes.
    meaning : str
        What a high or low value says, in a sentence.
    log : bool
        Compare on a logarithmic scale.
    """

    name: str
    symbol: str
    meaning: str
    log: bool = False


def _of_spectrum(prefix: str, w: str) -> tuple[Measure, ...]:
    return (
        Measure(f"{prefix}_sigma1", f"σ₁({w})", "Spectral norm: the most the map makes of a unit input.", log=True),
        Measure(f"{prefix}_gap", f"σ₁/σ₂({w})", "Spectral gap: a large one is a spike, one direction rules.", log=True),
        Measure(f"{prefix}_frobenius", f"‖{w}‖F", "Frobenius norm: what the map makes of inputs on average.", log=True),
        Measure(f"{prefix}_stable_rank", f"‖{w}‖F²/σ₁²", "Stable rank: how many directions carry what the first does."),
        Measure(
            f"{prefix}_effective_rank", f"erank({w})", "exp of the entropy of σᵢ/Σσ: how many directions are used."
        ),
        Measure(f"{prefix}_participation_ratio", f"(Σσ²)²/Σσ⁴({w})", "How many directions share the energy."),
        Measure(f"{prefix}_condition", f"σ₁/σmin({w})", "Largest over smallest non-zero singular value.", log=True),
    )


_SYMMETRY = "1: score(i, j) = score(j, i); 0: the score turns its sign; ½: neither, as in a random matrix."
_LIKES = "Leading eigenvalue of the symmetric part: positive where like attends to like, negative where it avoids it."

MEASURES: tuple[Measure, ...] = (
    *_of_spectrum("qk", "W_QK"),
    Measure("qk_symmetric_share", "‖sym W_QK‖F²/‖W_QK‖F²", _SYMMETRY),
    Measure("qk_sym_eig1", "λ₁(sym W_QK)", _LIKES),
    Measure("qk_bias_norm", "‖b_QK‖", "What keys score whatever the query is.", log=True),
    *_of_spectrum("vo", "W_VO"),
    Measure("vo_affine_sigma1", "σ₁(f̃)", "Spectral norm of the value-output map with its bias, on [x 1].", log=True),
    Measure(
        "vo_affine_condition", "σ₁/σmin(f̃)", "Largest over smallest non-zero stretch of f, with its bias.", log=True
    ),
    Measure(
        "vo_copying_score", "Σ⁺Re λ/Σ|λ|(W_VO)", "Share of positive eigenvalue mass: near 1 it writes what it reads."
    ),
    Measure("vo_bias_norm", "‖b_V W_O‖", "What the head writes whatever it attends to.", log=True),
)


def head_columns(measured: Mapping[str, np.ndarray], d: int) -> dict[str, np.ndarray]:
    """Every measure of every head, from what was measured of the layers.

    Parameters
    ----------
    measured : mapping of str to (L, H, ...) arrays
        What `measure_layer` returns, stacked over layers.
    d : int
        The model's width, which sets the null space's tolerance.

    Returns
    -------
    dict of (L, H) arrays
        In the order of the columns of heads.csv.
    """
    qk, vo = measured["qk_singular_values"], measured["vo_singular_values"]
    affine, eigenvalues = measured["vo_affine_singular_values"], measured["vo_eigenvalues"]
    symmetric = measured["qk_symmetric_eigenvalues"]
    columns = _spectrum_columns("qk", qk, d)
    columns |= {
        "qk_symmetric_share": measured["qk_symmetric_share"],
        "qk_antisymmetric_share": 1 - measured["qk_symmetric_share"],
        **{f"qk_sym_eig{i + 1}": symmetric[..., i] for i in range(min(3, symmetric.shape[-1]))},
        "qk_bias_norm": measured["qk_bias_norm"],
        "qk_route": measured["qk_route"],
    }
    for name in middle_names(measured):
        s = measured[f"qk_singular_values_{name}"]
        columns |= {
            f"qk_sigma1_{name}": s[..., 0],
            f"qk_frobenius_{name}": spectra.frobenius(s),
            f"qk_stable_rank_{name}": spectra.stable_rank(s),
            f"qk_effective_rank_{name}": spectra.effective_rank(s),
        }
    columns |= _spectrum_columns("vo", vo, d)
    return columns | {
        "vo_affine_sigma1": affine[..., 0],
        "vo_affine_condition": spectra.condition_number(affine, d + 1),
        "vo_copying_score": copying_score(eigenvalues),
        "vo_eigenvalue_balance": eigenvalue_balance(eigenvalues),
        "vo_bias_norm": measured["vo_bias_norm"],
        "vo_route": measured["vo_route"],
    }


def middle_names(measured: Mapping[str, np.ndarray]) -> list[str]:
    """What other forms of W_QK were measured: delta1, mean64, free, turning ..."""
    stem = "qk_singular_values_"
    return [name.removeprefix(stem) for name in measured if name.startswith(stem)]


def _spectrum_columns(prefix: str, s: np.ndarray, d: int) -> dict[str, np.ndarray]:
    """The measures of one spectrum (L, H, r); NaN stands behind the last value of a shorter one."""
    padded = np.isfinite(s[..., :1]) & np.isnan(s)  # layers may have narrower heads than the widest
    s = np.where(padded, 0.0, s)
    columns = {
        "sigma1": s[..., 0],
        "sigma2": s[..., 1] if s.shape[-1] > 1 else np.zeros(s.shape[:-1]),
        "gap": spectra.spectral_gap(s),
        "frobenius": spectra.frobenius(s),
        "stable_rank": spectra.stable_rank(s),
        "effective_rank": spectra.effective_rank(s),
        "participation_ratio": spectra.participation_ratio(s),
        "rank": spectra.numerical_rank(s, d),
        "condition": spectra.condition_number(s, d),
    }
    return {f"{prefix}_{name}": column for name, column in columns.items()}
