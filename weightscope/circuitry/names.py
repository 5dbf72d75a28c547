"""The names of heads: every role's score, its threshold, and how often heads that reach it had the role when run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.circuitry import roles
from weightscope.circuitry.passes import wiring
from weightscope.circuitry.stream import sample_tokens, streams, why_no_stream
from weightscope.circuitry.wiring import Wiring
from weightscope.detokenization.heads import bigram_auroc
from weightscope.errors import CheckpointError, TooLargeError
from weightscope.families.feed_forward import ROWS
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.shapes import ShowsShapes
from weightscope.tables import Column, Table


@dataclass(frozen=True)
class Role:
    """What a head can be called, and by which column.

    Attributes
    ----------
    name : str
    score : str
        The column of roles.csv that it is given by.
    least : float
        The name is given from here on. In a model at its random start no head comes near.
    sure : float or None
        Share of the heads scoring at least that in the models measured here that had the role when they were run;
        None where that cannot be measured by attention.
    """

    name: str
    score: str
    least: float
    sure: float | None


# A head that reaches several thresholds is called by the first. By wiring alone none is called a previous-token head:
# being read by keys tells those of GPT-2, SmolLM2 and MiniLM apart no better than |W_QK| does. Nor is any called a
# sink: that score does not beat the layer's index.
ROLES = (
    Role("previous token", "previous_token", 0.25, 0.64),
    Role("induction", "induction", 1.7, 0.75),
    Role("duplicate token", "duplicate_token", 2.4, 0.6),
    Role("detokenization", "detokenization", 0.75, None),
    Role("identity", "identity", 0.8, None),
    Role("copying", "copying", 1.5, 0.64),
    Role("anti-copying", "anti_copying", 1.5, 0.5),
)
ROLES_BY_WIRING = (
    Role("induction", "reads_by_keys", 0.4, 0.83),
    Role("identity", "identity", 0.8, None),
    Role("feeds keys", "read_by_keys", 0.4, None),
)
NO_NAME = ""
LEAST_Z = 20.0  # standard deviations; shares of spaces that random ones could have in common do not count
SAMPLED = ("duplicate_token", "induction", "copying")  # means over a sample of the vocabulary
COLUMNS = {
    "previous_token": ("previous token", "share of the mean query's attention that the mean key one place back gets"),
    "distance": ("distance", "positions back at which that share is largest"),
    "duplicate_token": ("duplicate token", "how far a token's score with itself stands out, in standard deviations"),
    "induction": (
        "induction",
        "the same with keys that hold what previous-token heads bring: a query finds the place after its token",
    ),
    "detokenization": (
        "detokenization",
        "bigram AUROC of a first-layer head, where counts are given: tokens that come before it score higher",
    ),
    "copying": ("copying", "how far the token itself stands out among tokens in what the head writes for it"),
    "first_token": ("first token", "logits by which the mean query prefers the first token of a text"),
    "identity": ("identity", "$tr(W_VO)/(√(r) ‖W_VO‖_F)$: ±1 where the head passes on what it reads, times one number"),
    "reads_by_keys": (
        "keys read",
        "the largest share of what an earlier head writes that the keys read, beyond chance",
    ),
    "read_by_keys": (
        "read by keys",
        "the largest share of what the head writes that a later head's keys read, beyond chance and beyond its queries",
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class HeadRoles(ShowsShapes):
    """Scores of every head and the names they give.

    Attributes
    ----------
    scores : dict of (L, H) arrays
        NaN where a score cannot be had. Those of `SAMPLED` have a 95 % interval beside them, _low and _high.
    names : (L, H) array of str
        Empty for a head without one.
    sure : (L, H) array
    lacking : str or None
        Why scores that need tokens and feed-forward networks are not there.
    """

    scores: dict[str, np.ndarray]
    names: np.ndarray
    sure: np.ndarray
    lacking: str | None


def head_roles(model: Model, wired: Wiring, counts: str | Path | None = None) -> HeadRoles:
    """Every score that the checkpoint allows, and the names.

    Parameters
    ----------
    model : Model
    wired : Wiring
        Of the same model.
    counts : str or Path, optional
        Bigram counts, for the role of detokenization.
    """
    scores, lacking = _without_wiring(model, wired.layers, wired.n_heads, counts)
    scores["reads_by_keys"], scores["read_by_keys"] = by_wiring(wired)
    return HeadRoles(scores, *named(scores, ROLES if lacking is None else ROLES_BY_WIRING), lacking)


def head_names(model: Model) -> np.ndarray:
    """The names alone, (L, H); the wiring, most of the work, is looked at only where tokens give none."""
    scores, lacking = _without_wiring(model, np.array(model.attention_layers), model.config.n_heads)
    if lacking is None:
        return named(scores, ROLES)[0]
    if len(model.attention_layers) > 1:  # else no head reads what another has written
        scores["reads_by_keys"], scores["read_by_keys"] = by_wiring(wiring(model))
    return named(scores, ROLES_BY_WIRING)[0]


def _without_wiring(
    model: Model, layers: np.ndarray, n_heads: int, counts: str | Path | None = None
) -> tuple[dict[str, np.ndarray], str | None]:
    """All scores, those by wiring still NaN, and why those by tokens are not there."""
    intervals = [f"{name}_{end}" for name in SAMPLED for end in ("low", "high")]
    scores = {name: np.full((len(layers), n_heads), np.nan) for name in (*COLUMNS, *intervals)}
    place = {int(layer): i for i, layer in enumerate(layers)}
    lacking = why_no_stream(model)
    if lacking is None:
        try:
            by_layer = list(bar(token_scores(model), "roles", "layer", total=len(model.attention_layers)))
        except CheckpointError as error:  # a later layer lacks what the first has
            lacking, by_layer = str(error), []
        for layer, found in by_layer:
            for name, values in found.items():
                if layer in place:
                    scores[name][place[layer]] = values
    for layer, i in place.items():
        scores["identity"][i] = roles.identity(model.layer(layer))
    if counts is not None and 0 in place:
        scores["detokenization"][place[0]] = bigram_auroc(model, counts).heads["auroc"]
    return scores, lacking


def token_scores(model: Model) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Layer by layer, the scores that are had by following single tokens upwards: index, and (H,) arrays by name."""
    causal = ROWS[model.family.name].causal
    first = _first_token(model)
    carried: np.ndarray | float = 0.0  # (T, d): what previous-token heads have brought from the token before
    directions = None
    for depth, stream in enumerate(streams(model, 0 if first is None else first)):
        distances, shares = roles.shares_by_distance(roles.attention_by_position(stream, causal=causal), causal=causal)
        previous = shares[:, list(distances).index(1)]
        written = roles.written(stream)  # (H, T, d)
        found = {
            "previous_token": previous,
            "distance": distances[shares.argmax(axis=1)].astype(float),
        }
        sampled = {"duplicate_token": roles.own_match(roles.content_scores(stream))}
        if depth and causal:
            keys = roles.carried_keys(stream, np.asarray(carried))
            sampled["induction"] = roles.own_match(roles.content_scores(stream, keys))
        if directions is None:
            directions = unembedding(model, sample_tokens(model, len(stream.x)))
        outputs = written @ directions.T  # (H, T, T)
        sampled["copying"] = roles.own_match(outputs - outputs.mean(axis=1, keepdims=True))
        for name, of_tokens in sampled.items():
            found[name] = of_tokens.mean(axis=1)
            found[f"{name}_low"], found[f"{name}_high"] = roles.interval(of_tokens, model.embeddings.n_tokens)
        if first is not None:
            found["first_token"] = roles.first_excess(stream)
        if not all(np.isfinite(values).all() for values in found.values()):
            raise TooLargeError(f"following tokens up to layer {stream.layer.index} overflows")
        carried = carried + np.einsum("h,htd->td", previous, written)
        yield stream.layer.index, found


def by_wiring(wiring: Wiring) -> tuple[np.ndarray, np.ndarray]:
    """Share of a space that keys read, at most, for the reader and for the writer; (L, H) twice.

    Chance is taken away, 0 being that of random spaces and 1 all of it. A head whose output queries read as well moves
    what all heads need, so that for the writer what queries read is taken away too.
    """
    of_readers, of_writers = np.full(wiring.rank["k"].shape, np.nan), []
    for one in wiring.by_layer:
        by_keys, by_queries = (_shares(wiring, kind, one) for kind in ("k", "q"))
        of_readers = np.fmax(of_readers, _largest(by_keys, (0, 1)))
        of_writers.append(_largest(by_keys - by_queries, (2, 3))[0])
    return of_readers, np.array(of_writers)


def _shares(wiring: Wiring, kind: str, layers: slice) -> np.ndarray:
    """Share beyond chance of what heads read that these layers write; NaN where nothing can be said."""
    random = wiring.random_pk(kind, layers).mean
    most = np.minimum(wiring.rank["o"][layers, :, None, None], wiring.rank[kind])
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(most > random, (wiring.pk[kind][layers] - random) / (most - random), np.nan)
    # In narrow models a large share is no surprise: only what stands out counts.
    return np.where(wiring.z_of("pk", kind, layers) > LEAST_Z, shares, np.where(np.isnan(shares), np.nan, 0.0))


def _largest(values: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    """The largest over two axes, NaN where there is none."""
    largest = np.where(np.isnan(values), -np.inf, values).max(axis=axes, initial=-np.inf)
    return np.where(np.isfinite(largest), largest, np.nan)


def named(scores: dict[str, np.ndarray], roles: Sequence[Role]) -> tuple[np.ndarray, np.ndarray]:
    """Names of heads and how sure they are, (L, H) twice.

    Parameters
    ----------
    scores : dict of (L, H) arrays
    roles : sequence of Role
        The first that a head's scores reach names it.
    """
    shape = next(iter(scores.values())).shape
    names, sure = np.full(shape, NO_NAME, object), np.full(shape, np.nan)
    for role in reversed(roles):
        of_role = scores | {"identity": np.abs(scores["identity"]), "anti_copying": -scores["copying"]}
        reached = np.nan_to_num(of_role[role.score], nan=-np.inf) >= role.least
        names[reached] = role.name
        sure[reached] = np.nan if role.sure is None else role.sure
    return names, sure


def roles_table(wiring: Wiring, found: HeadRoles) -> Table:
    """roles.csv: a row a head."""
    n, h = found.names.shape
    layers, heads = np.repeat(wiring.layers, h), np.tile(np.arange(h), n)
    return Table(
        [
            Column("layer", layers),
            Column("head", heads),
            Column("kv_head", heads * wiring.n_kv_heads // h),
            Column("role", found.names.ravel(), meaning="the best name; empty where no score reaches its threshold"),
            Column(
                "sure", found.sure.ravel(), format=".2f",
                meaning="share of heads with such a score that had the role when the models measured here were run",
            ),
            *(column for name in COLUMNS for column in _columns(name, found)),
        ]
    )  # fmt: skip


def _columns(name: str, found: HeadRoles) -> Iterator[Column]:
    """A score, and its interval where it has one."""
    symbol, meaning = COLUMNS[name]
    yield Column(name, found.scores[name].ravel(), symbol=symbol, meaning=meaning, format=".2f")
    for end in ("low", "high") if name in SAMPLED else ():
        said = f"{end} end of a 95 % interval over the tokens that were drawn (bootstrap)"
        values = found.scores[f"{name}_{end}"].ravel()
        yield Column(f"{name}_{end}", values, symbol=f"{symbol}, {end}", meaning=said, format=".2f")


def _first_token(model: Model) -> int | None:
    """The token that a text begins with, as far as the config says."""
    for key in ("bos_token_id", "cls_token_id", "eos_token_id"):
        token = model.config.get(key)
        if isinstance(token, int) and 0 <= token < model.embeddings.n_tokens:
            return token
    return None


def unembedding(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Directions of some tokens' logits in the stream, (T, d); rows of the embedding where there is no unembedding."""
    try:
        return model.unembedding.rows(tokens)
    except CheckpointError:
        return model.into_stream(model.embeddings.rows(tokens))
