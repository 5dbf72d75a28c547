"""Which heads will sink, asked of the weights before anything is run, and how good the answer was.

Each head is shown what the model's embeddings alone would give it: the first token at position 0, and tokens drawn
from the vocabulary after it. In layer 0 that is the truth for texts of such tokens, sliding windows aside; further up
the residual stream has become something else, and it is a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.detokenization.position_curves import softmax
from weightscope.metrics.auroc import weighted_auroc
from weightscope.metrics.spectra import spectral_gap
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.sinks.strength import sink_strength

SAMPLE = 255  # tokens after the first
SINKS_ABOVE = 0.3  # attention that the average query gives token 0; Gu et al. 2024 draw the line there


@dataclass(frozen=True)
class Predictor:
    """One number a head that may tell whether it sinks.

    Attributes
    ----------
    name : str
    label : str
        What it is, for a reader.
    sign : int
        1 where large numbers should mean a sink, -1 where small ones should.
    """

    name: str
    label: str
    sign: int = 1


PREDICTORS = (
    Predictor("qk_gap", "sigma1 / sigma2 of W_QK (content form)"),
    Predictor("key_bias", "b_QK of the first token's embedding, less that of others"),
    Predictor("score_margin", "score of the first token's embedding, less that of others"),
    Predictor("embedding_strength", "attention to the first token were the layer given bare embeddings"),
    Predictor("value_ratio", "|f(x_0)| / mean |f(x_j)| of embeddings, small ones first", -1),
    Predictor("layer", "layer index (nothing is read)"),
)


def predict_sinks(model: Model, first: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Every predictor for every head, from the weights of attention and the embeddings.

    Parameters
    ----------
    model : Model
    first : int
        The token that texts begin with.
    seed : int
        Of the draw of the other tokens.

    Returns
    -------
    dict of (n_attention_layers, n_heads) arrays
        By the names of `PREDICTORS`.
    """
    x = _embeddings(model, first, seed)
    layers = bar(model.attention_layers, "heads that may sink", "layer")
    found = [predict_layer(model.layer(index), x) for index in layers]
    return {each.name: np.stack([layer[each.name] for layer in found]) for each in PREDICTORS}


def predict_layer(layer: Layer, x: np.ndarray) -> dict[str, np.ndarray]:
    """The predictors of one layer's heads.

    Parameters
    ----------
    layer : Layer
    x : (n, d) array
        What to take for the residual stream; row 0 is the first token's.

    Returns
    -------
    dict of (n_heads,) arrays
    """
    heads, z = layer.heads, layer.normalised(x)
    causal = np.tri(len(x), dtype=bool)[1:]  # (n - 1, n) queries from 1 on
    scores = layer.scores(x)[:, 1:].astype(np.float64)  # (H, n - 1, n)
    context = causal.copy()
    context[:, 0] = False
    of_others = np.where(context, scores, 0).sum(axis=-1) / context.sum(axis=-1)
    masked = np.where(causal, scores, -np.inf)
    if layer.sinks is not None:  # one more key, which takes attention and gives nothing
        more = np.broadcast_to(layer.sinks[:, None, None], (*masked.shape[:2], 1))
        masked = np.concatenate((masked, more), axis=-1)
    norms = np.linalg.norm(layer.values(x), axis=-1)  # (H, n)
    return {
        "qk_gap": np.array([float(spectral_gap(head.qk.svdvals())) for head in heads]),
        "key_bias": np.array([head.scale * float(head.qk_bias @ (z[0] - z[1:].mean(axis=0))) for head in heads]),
        "score_margin": (scores[:, :, 0] - of_others).mean(axis=-1),
        "embedding_strength": sink_strength(softmax(masked))[:, 0],
        "value_ratio": norms[:, 0] / norms[:, 1:].mean(axis=-1),
        "layer": np.full(len(heads), float(layer.index)),
    }


def prediction_aurocs(predicted: Mapping[str, np.ndarray], strength: np.ndarray) -> dict[str, float]:
    """How well each predictor ranks the heads that sink above those that do not.

    Parameters
    ----------
    predicted : mapping of str to (n_layers, n_heads) arrays
    strength : (n_layers, n_heads) array
        Attention that the average query gives token 0, measured.

    Returns
    -------
    dict of float
        AUROC by predictor; NaN where all heads sink or none does, or where the predictor is the same for all heads.
    """
    sinks = np.flatnonzero(strength > SINKS_ABOVE)
    found = {}
    for each in PREDICTORS:
        values = each.sign * predicted[each.name].ravel()
        same = np.ptp(values) == 0
        found[each.name] = np.nan if same else weighted_auroc(values, sinks, np.ones(len(sinks), np.int64))
    return found


def _embeddings(model: Model, first: int, seed: int) -> np.ndarray:
    embeddings = model.embeddings
    n = SAMPLE if model.positions is None else min(SAMPLE, len(model.positions) - 1)
    others = np.random.default_rng(seed).integers(embeddings.n_tokens, size=n)
    x = embeddings.rows(np.array([first, *others]))
    return x if model.positions is None else x + model.positions[: len(x)]
