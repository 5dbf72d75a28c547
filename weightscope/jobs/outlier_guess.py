"""Which dimensions will carry attention scores, guessed from the weights alone."""

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from weightscope.attention import Layer
from weightscope.metrics.contributions import column_norms
from weightscope.model import Model


@dataclass(frozen=True)
class Guess:
    """What the weights say of every dimension before anything is run.

    Attributes
    ----------
    columns : (L, d) array
        Mean over heads of the norm of W_QK's column, the gain of a pre-norm folded in.
    gains : (L, d) array
        sqrt(gamma^2 + beta^2) of the norm that attention's input came out of: a dimension's root mean square where the
        norm's own output has mean 0 and variance 1 over tokens. |gamma| of the pre-norm where the stream itself is not
        normalised; NaN where there is no norm.
    contributions : (L, d) array
        The size of C that these predict: columns times the root mean square in post-norm models, columns alone where
        the stream's own size is unknown.
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
    columns, gains, contributions = [], [], []
    for index in model.attention_layers:
        columns.append(column_norms(*_qk(model.layer(index))).mean(axis=0))
        sizes = _stream_sizes(model, index)
        gains.append(_pre_norm_gains(model, index) if sizes is None else sizes)
        contributions.append(columns[-1] if sizes is None else columns[-1] * sizes)
    return Guess(np.stack(columns), np.stack(gains), np.stack(contributions))


def agreement(guessed: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over dimensions, layer by layer: two (L, d) arrays -> (L,); NaN where one is unknown.

    Only magnitudes are compared.
    """
    pairs = zip(np.abs(guessed), np.abs(measured), strict=True)
    return np.array([spearmanr(g, m).statistic if np.ptp(g) > 0 and np.ptp(m) > 0 else np.nan for g, m in pairs])


def ranks(values: np.ndarray) -> np.ndarray:
    """Place of every dimension in its layer by magnitude, 1 for the largest: (L, d) -> (L, d) int."""
    return np.argsort(np.argsort(-np.abs(values), axis=1, kind="stable"), axis=1, kind="stable") + 1


def _qk(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    queries = np.stack([layer.q.of(head)[0] for head in range(layer.n_heads)])  # (H, d, r)
    return queries, np.stack([layer.k.of(group)[0] for group in range(layer.n_kv_heads)])  # (G, d, r)


def _stream_sizes(model: Model, index: int) -> np.ndarray | None:
    found = model.stream_norm(index)
    return None if found is None else np.hypot(*found)


def _pre_norm_gains(model: Model, index: int) -> np.ndarray:
    norm = model.family.norm_of(index)
    if norm is None:
        return np.full(model.config.d_model, np.nan)
    stem = model.family.stored_name(model.config, index, model.file)
    return np.abs(norm.read(model.tensors(stem), model.config.d_model)[0])
