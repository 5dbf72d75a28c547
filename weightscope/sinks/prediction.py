"""Which heads will sink, asked of the weights before anything is run, and how good the answer was.

Each head is shown what the model's embeddings alone would give it: the first token at position 0, and tokens drawn
from the vocabulary after it. In layer 0 that is the truth for texts of such tokens, sliding windows aside. Further up
the residual stream has become something else, and it is a guess.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from weightscope.attention.layer import Layer
from weightscope.metrics.auroc import weighted_auroc
from weightscope.metrics.spectra import spectral_gap
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.sinks.strength import sink_strength
from weightscope.tables import Column, Table

SAMPLE = 255  # tokens after the first
SINKS_ABOVE = 0.3  # attention that the average query gives token 0; Gu et al. 2024 draw the line there


class Predictor(NamedTuple):
    """One number a head that may tell whether it sinks.

    Attributes
    ----------
    name : str
    meaning : str
        What it is, for a reader.
    sign : int
        1 where large numbers should mean a sink, -1 where small ones should.
    """

    name: str
    meaning: str
    sign: int = 1


PREDICTORS = (
    Predictor("qk_gap", "sigma1 / sigma2 of W_QK (content form)"),
    Predictor("key_bias", "b_QK of the first token's embedding, less that of others"),
    Predictor("score_margin", "score of the first token's embedding, less that of others"),
    Predictor("embedding_strength", "attention to the first token were the layer given bare embeddings"),
    Predictor("value_ratio", "|f(x_0)| / mean |f(x_j)| of embeddings, small ones first", -1),
    Predictor("layer", "layer index (nothing is read)"),
)
READINGS = PREDICTORS[:-1]  # those that read something


def predict_sinks(model: Model, first: int, seed: int = 0) -> Table:
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
    Table
        A row a head of every attention layer: layer, head, and the predictors by their names.
    """
    x = _embeddings(model, first, seed)
    indices = bar(model.attention_layers, "heads that may sink", "layer")
    layers = {index: predict_layer(model.layer(index), x) for index in indices}
    heads = [(index, head) for index, values in layers.items() for head in range(len(values["qk_gap"]))]
    keys = [Column(name, values) for name, values in zip(("layer", "head"), zip(*heads, strict=True), strict=True)]
    readings = [
        Column(each.name, np.concatenate([values[each.name] for values in layers.values()]), meaning=each.meaning)
        for each in READINGS
    ]
    return Table([*keys, *readings])


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
        "embedding_strength": sink_strength(softmax(masked, axis=-1))[:, 0],
        "value_ratio": norms[:, 0] / norms[:, 1:].mean(axis=-1),
    }


def prediction_aurocs(predicted: Mapping[str, np.ndarray] | Table, strength: np.ndarray) -> Table:
    """How well each predictor ranks the heads that sink above those that do not.

    Parameters
    ----------
    predicted : Table, or mapping of str to (n,) arrays
        The predictors of n heads.
    strength : (n,) array
        Attention that the average query gives token 0, measured.

    Returns
    -------
    Table
        A row a predictor; its AUROC is NaN where all heads sink or none does, or where it is the same for all heads.
    """
    sinks = np.flatnonzero(strength > SINKS_ABOVE)
    aurocs = []
    for each in PREDICTORS:
        values = each.sign * np.asarray(predicted[each.name], float)
        same = np.ptp(values) == 0
        aurocs.append(np.nan if same else weighted_auroc(values, sinks, np.ones(len(sinks), np.int64)))
    names, meanings, _ = zip(*PREDICTORS, strict=True)
    return Table([Column("name", names), Column("meaning", meanings, "reading"), Column("auroc", aurocs, "AUROC")])


def _embeddings(model: Model, first: int, seed: int) -> np.ndarray:
    embeddings = model.embeddings
    n = SAMPLE if model.positions is None else min(SAMPLE, len(model.positions) - 1)
    others = np.random.default_rng(seed).integers(embeddings.n_tokens, size=n)
    x = embeddings.rows(np.array([first, *others]))
    return x if model.positions is None else x + model.positions[: len(x)]
