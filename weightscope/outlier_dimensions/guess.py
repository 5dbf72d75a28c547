"""Which dimensions will carry attention scores, guessed from the weights alone."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from weightscope.metrics.outliers import robust_z
from weightscope.model import Model
from weightscope.outlier_dimensions.contributions import column_norms, summed_contributions


@dataclass(frozen=True)
class Guess:
    """What the weights say of every dimension before anything is run.

    Attributes
    ----------
    columns : (L, d) array
        Mean over heads of the norm of W_QK's column, the gain of a pre-norm folded in.
    gains : (L, d) array
        |gamma| of the norm that attention's input has come out of, the layer's own or in post-norm models the one
        before it; NaN where there is none.
    contributions : (L, d) array
        Mean over heads of |C| (eq. 7) for a token that is that norm's beta, its output where the mean of what it
        normalises is 0. In pre-norm models, whose W_QK acts on what comes before the norm, the query alone is known
        and this is |b_QK|; 0 where nothing has a bias.
    """

    columns: np.ndarray
    gains: np.ndarray
    contributions: np.ndarray


def guess(model: Model) -> Guess:
    """Read every attention layer's projections and norms.

    Raises
    ------
    CheckpointError
        A tensor is missing or broken.
    """
    found = [_of_layer(model, index) for index in model.attention_layers]
    return Guess(*(np.stack(arrays) for arrays in zip(*found, strict=True)))


def _of_layer(model: Model, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, gains and contributions of one layer, (d,) each."""
    layer, stream = model.layer(index), model.stream_norm(index)
    w_q, b_q = (np.stack(parts) for parts in zip(*(layer.q.of(head) for head in range(layer.n_heads)), strict=True))
    w_k = np.stack([layer.k.of(group)[0] for group in range(layer.n_kv_heads)])
    if stream is None:
        gains, query, key = _pre_norm_gains(model, index), b_q, np.ones_like(w_k[0, :, 0])
    else:
        gains, key = stream
        query = key @ w_q + b_q  # (H, r)
    c = summed_contributions(key[None], query[:, None], w_k)  # (H, d)
    return column_norms(w_q, w_k).mean(axis=0), np.abs(gains), np.abs(c).mean(axis=0)


def _pre_norm_gains(model: Model, index: int) -> np.ndarray:
    norm = model.family.norm_of(index)
    if norm is None:
        return np.full(model.config.d_model, np.nan)
    return norm.read(model.tensors(model.family.stored_name(model.config, index, model.file)), model.config.d_model)[0]


def extremity(values: np.ndarray) -> np.ndarray:
    """How far a size is from its layer's others, up or down: |robust z-score| of its log, (L, d) -> (L, d).

    Training may shrink the gain of a dimension that has grown, so that small gains tell as much as large ones.
    """
    return np.stack([np.abs(robust_z(np.log(np.maximum(row, 1e-30)))) for row in values])


def agreement(guessed: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over dimensions, layer by layer: two (L, d) arrays -> (L,); NaN where one is unknown.

    Only magnitudes are compared.
    """
    pairs = zip(np.abs(guessed), np.abs(measured), strict=True)
    return np.array([spearmanr(g, m).statistic if np.ptp(g) > 0 and np.ptp(m) > 0 else np.nan for g, m in pairs])


def ranks(values: np.ndarray) -> np.ndarray:
    """Place of every dimension in its layer by magnitude, 1 for the largest: (L, d) -> (L, d) int."""
    return np.argsort(np.argsort(-np.abs(values), axis=1, kind="stable"), axis=1, kind="stable") + 1
