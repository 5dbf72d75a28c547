"""Roles of heads, judged by where they look among random tokens followed upwards (`stream`)."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.core.compute.cores import in_threads, one_blas_thread
from weightscope.core.errors import CheckpointError, TooLargeError, sized
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits.passes import multiplications, wiring, wiring_by_keys
from weightscope.heads.circuits.stream import (
    ANY,
    FREQUENT,
    ShortTexts,
    down_column,
    follow_exactly,
    joining,
    lacking_first_token,
    said_once,
    short_sequences,
    streams,
    why_no_stream,
    why_not_exact,
)
from weightscope.heads.circuits.wiring import Wiring
from weightscope.model.layers.kernel import NEAR, peak_and_fast_share
from weightscope.model.layers.layer import Head, Layer
from weightscope.model.metrics.sinks import (
    Massive,
    first_token_kind,
    first_token_share,
    massive_activation,
)
from weightscope.model.model import Model

RESAMPLES = 400
AFFORDABLE = 2 * 10**11  # multiplications, seconds; `weightscope circuits` takes larger models
RIGHT_ENOUGH = 2 / 3  # share of heads so named that had the role in models left out


def shares_by_distance(attention: np.ndarray, *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean attention (H, P, P) by distance i - j, over queries with keys at all: (D,), (H, D)."""
    n = attention.shape[-1]
    queries = np.arange(2 * n // 3, n) if causal else np.arange(n // 3, 2 * n // 3)
    distances = np.arange(0, 2 * n // 3) if causal else np.arange(-(n // 3), n // 3)
    keys = queries[:, None] - distances  # (queries, D)
    return distances, attention[:, queries[:, None], keys].mean(axis=1)


def interval(of_tokens: np.ndarray, n_tokens: int) -> np.ndarray:
    """A 95 % bootstrap interval, (2, H), of the mean over all tokens from those drawn, (H, T)."""
    n = of_tokens.shape[1]
    if n >= n_tokens:
        return np.repeat(of_tokens.mean(axis=1)[None], 2, axis=0)
    # (RESAMPLES, T) weight of each token in each resample
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
    return np.quantile(of_tokens @ drawn.T, (0.025, 0.975), axis=1)


def own_match(scores: np.ndarray) -> np.ndarray:
    """Standard deviations, (H, T), of a token's score with itself above its scores with all."""
    diagonal = np.diagonal(scores, axis1=-2, axis2=-1)  # (H, T)
    spread = scores.std(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread == 0, 0.0, (diagonal - scores.mean(axis=-1)) / spread)


def identity(layer: Layer) -> np.ndarray:
    """Cosine of W_VO with the identity on r dimensions, tr(W_VO) / (sqrt(r) |W_VO|_F): (H,)."""

    def of_head(head: Head) -> float:
        w = head.vo
        size = w.frobenius() * np.sqrt(w.rank_bound)
        if not size:
            return 0.0
        return float(np.einsum("dr,dr->", w.left, w.right, dtype=np.float64)) / size

    return np.array(list(in_threads(of_head, layer.heads)))


# Names of heads: every role's score, its threshold, and its hits when models were run


class RoleTrials(NamedTuple):
    """Hits of a role in models that had no part in its threshold (figures/head-roles/roles.csv)."""

    right: int  # heads that had the role when run
    named: int
    models: int  # models in which a head is named so
    low: float  # 95 % interval of the share: models are drawn again, then the heads of each
    high: float
    lowest: float  # range of the share with any one model left out
    highest: float

    @property
    def share(self) -> float:
        """Share of names that were right."""
        return self.right / self.named


@dataclass(frozen=True)
class Role:
    """A role, the score that decides it, and how well it was tried."""

    role: str
    score: str  # the column of roles.csv that decides it
    least: float  # threshold for the name; no head of a randomly initialised model comes near it
    tried: RoleTrials | None = None  # None where attention cannot show the role
    sign: int = 1  # -1 if the score is at most minus the threshold
    otherwise: str = ""  # name for such a head if the role's is not right often enough

    @property
    def is_given(self) -> bool:
        """True if the role's name is right often enough."""
        return self.tried is None or self.tried.share >= RIGHT_ENOUGH

    @property
    def name(self) -> str:
        """Name for such a head; may be empty."""
        return self.role if self.is_given else self.otherwise

    @property
    def sure(self) -> tuple[float, float, float]:
        """Share of names that were right, and its interval."""
        if self.tried is None or not self.is_given:
            return np.nan, np.nan, np.nan
        return self.tried.share, self.tried.low, self.tried.high

    @property
    def often(self) -> str:
        """Share of names that were right, in words; empty where it was not tried."""
        if np.isnan(self.sure[0]):
            return ""
        share, low, high = (f"{number:.0%}".replace("%", " %") for number in self.sure)
        models = 0 if self.tried is None else self.tried.models
        return f"{share} of heads so named did it when run ({low} to {high} over {models} models)"

    def reached(self, scores: Mapping[str, np.ndarray]) -> np.ndarray:
        """Mask of the heads whose score reaches the threshold; arrays of any shape."""
        values = scores[self.score]
        values = np.abs(values) if self.role == "identity" else self.sign * values
        return np.asarray(np.nan_to_num(values, nan=-np.inf) >= self.least)


# A head above several thresholds gets the first name. Wiring alone never names a previous-token
# head: being read by keys identifies such heads of GPT-2, SmolLM2 and MiniLM no better than |W_QK|
# does. Nor does it name a sink: that score is no better than the layer's index.
ROLES = (
    Role("previous token", "previous_token", 0.26, RoleTrials(56, 73, 5, 0.51, 0.96, 0.66, 0.83)),
    Role("induction", "induction", 0.15, RoleTrials(25, 27, 3, 0.50, 1.00, 0.82, 1.00)),
    Role("duplicate token", "duplicate_token", 0.22, RoleTrials(21, 24, 4, 0.67, 1.00, 0.81, 0.93)),
    # One of 17 first-layer heads joins words: it has 0.74, the rest under 0.56
    Role("detokenization", "detokenization", 0.65),
    Role("identity", "identity", 0.8),
    Role("copying", "copying", 1.35, RoleTrials(48, 82, 6, 0.37, 0.77, 0.51, 0.67)),
    Role("anti-copying", "copying", 1.87, RoleTrials(16, 20, 5, 0.43, 1.00, 0.73, 0.88), sign=-1),
)
FEEDS_KEYS = Role("feeds keys", "read_by_keys", 0.4)
ROLES_BY_WIRING = (
    Role(
        "induction",
        "reads_by_keys",
        0.24,
        RoleTrials(25, 44, 5, 0.24, 0.82, 0.43, 0.64),
        otherwise="keys read a head",
    ),
    Role("identity", "identity", 0.8),
    FEEDS_KEYS,
)
GIVEN = {role.name: role for role in (*ROLES_BY_WIRING, *ROLES) if role.name}  # by name
NO_NAME = ""
NAME = "the best name; empty where no score reaches its threshold"
SURE = {
    "sure": (
        "share of such names that were right",
        "share of heads so named that did it when run, in models that had no part in setting the "
        "threshold",
    ),
    "sure_low": (
        "share that were right, low",
        "low end of its 95 % interval over models (models drawn again, then heads)",
    ),
    "sure_high": ("share that were right, high", "high end of it"),
}
LEAST_Z = 20.0  # standard deviations above random spaces, for a shared space to count
# Scores that are means over a sample of the vocabulary
SAMPLED = ("previous_token", "duplicate_token", "induction", "copying")
COLUMNS = {
    "previous_token": (
        "previous token",
        "share of attention that tokens, drawn as often as they occur in text, give to the token "
        "before",
    ),
    "distance": ("distance", "positions back that get most of it"),
    "duplicate_token": (
        "duplicate token",
        "share that any tokens give to where the same token was said first",
    ),
    "induction": ("induction", "share that goes to the token after that"),
    "detokenization": (
        "detokenization",
        "bigram AUROC of a first-layer head, less what is the same for all current tokens, where "
        "counts are given",
    ),
    "copying": (
        "copying",
        "how far the token itself stands out among tokens in what the head writes for it",
    ),
    "first_token": ("first token", "share that goes to the first token"),
    "identity": (
        "identity",
        "$tr(W_VO)/(√(r) ‖W_VO‖_F)$: ±1 where the head passes its input on, times one number",
    ),
    "reads_by_keys": (
        "keys read",
        "the largest share of what an earlier head writes that the keys read, beyond chance",
    ),
    "read_by_keys": (
        "read by keys",
        "the largest share of what the head writes that a later head's keys read, beyond chance "
        "and beyond its queries",
    ),
}


@holds_arrays
class HeadRoles(ShowsShapes):
    """Scores of every head and the names they give."""

    # (L, H) each, NaN where unavailable; those in `SAMPLED` have a 95 % interval, _low and _high
    scores: dict[str, np.ndarray]
    names: np.ndarray  # (L, H), empty for a head without one
    sure: np.ndarray  # (3, L, H) share of such names that are right, and its interval
    lacking: str | None  # reason why scores by tokens and feed-forward networks are missing


def head_roles(model: Model, wired: Wiring, counts: str | Path | None = None) -> HeadRoles:
    """Every score that the checkpoint allows, and the names."""
    scores, lacking = _without_wiring(model, wired.layers, wired.n_heads, counts)
    scores["reads_by_keys"], scores["read_by_keys"] = by_wiring(wired)
    names, sure = assign_names(scores, ROLES if lacking is None else ROLES_BY_WIRING)
    return HeadRoles(scores, names, sure, lacking)


def head_names(model: Model) -> np.ndarray:
    """The names alone, (L, H); computes the wiring, in part, only where tokens give no names."""
    scores, lacking = _without_wiring(model, np.array(model.own_layers), model.config.n_heads)
    if lacking is None:
        return assign_names(scores, ROLES)[0]
    if len(model.own_layers) > 1:  # else no head reads what another has written
        # Queries count where a writer would feed keys without their share subtracted.
        least = FEEDS_KEYS.least
        wired = wiring_by_keys(model, lambda wired, layers: _shares(wired, layers, "k") >= least)
        scores["reads_by_keys"], scores["read_by_keys"] = by_wiring(wired)
    return assign_names(scores, ROLES_BY_WIRING)[0]


Roles = dict[tuple[int, int], str]  # by layer and head


def affordable_names(model: Model) -> Roles:
    """The names that heads have; none of a large model, or where a tensor is missing or broken."""
    if model.family.memory is not None or not _is_affordable(model):
        return {}
    try:
        # Broken scales overflow, and are findings
        with np.errstate(over="ignore", invalid="ignore"):
            names = head_names(copy(model))  # a copy, because a model caches its last layer
    except CheckpointError:
        return {}
    places = np.argwhere(names != NO_NAME)
    return {(model.own_layers[i], int(head)): str(names[i, head]) for i, head in places}


def affordable_wiring(model: Model) -> tuple[Wiring, np.ndarray] | None:
    """The wiring and the names (L, H); None if the model is large or a tensor missing or broken."""
    if not _is_affordable(model):
        return None
    model = copy(model)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            wired = wiring(model)
            return wired, head_roles(model, wired).names
    except CheckpointError:  # a finding says what is wrong
        return None


def _is_affordable(model: Model) -> bool:
    return multiplications(model, len(model.own_layers)) <= AFFORDABLE


def _without_wiring(
    model: Model, layers: np.ndarray, n_heads: int, counts: str | Path | None = None
) -> tuple[dict[str, np.ndarray], str | None]:
    """All scores, with NaN for those by wiring, and why scores by tokens are missing."""
    intervals = [f"{name}_{end}" for name in SAMPLED for end in ("low", "high")]
    scores = {name: np.full((len(layers), n_heads), np.nan) for name in (*COLUMNS, *intervals)}
    place = {int(layer): i for i, layer in enumerate(layers)}
    lacking = why_no_stream(model)
    if lacking is None:
        try:
            n_layers = len(model.attention_layers)
            by_layer = list(bar(token_scores(model), "roles", "layer", total=n_layers))
        except CheckpointError as error:  # a later layer lacks what the first has
            lacking, by_layer = str(error), []
        for layer, layer_scores in by_layer:
            for name, values in layer_scores.items():
                if layer in place:
                    scores[name][place[layer]] = values
    for layer, i in place.items():
        scores["identity"][i] = identity(model.layer(layer))
    if counts is not None and 0 in place:
        # Imported here because an audit, which has no counts, never needs it
        from weightscope.heads.detok.heads import bigram_auroc

        scores["detokenization"][place[0]] = bigram_auroc(model, counts).heads["auroc_specific"]
    return scores, lacking


def token_scores(model: Model) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Scores from following random tokens upwards, by layer: its index, and (H,) arrays by name."""
    causal = model.family.mlp is None or model.family.mlp.causal  # `why_no_stream` has asked
    directions = unembedding(model, said_once(model)[FREQUENT])
    n = len(directions)
    again = np.arange(n + 1, 2 * n + 1)  # where tokens are said for the second time
    for stream in streams(model):
        layer = stream.layer
        distances, shares = shares_by_distance(stream.attention[FREQUENT], causal=causal)
        # (H, N, N) logits of all tokens from what each writes where it is said first
        outputs = joining(model, layer, layer.values(stream.first_time)) @ directions.T
        sampled = {}  # (H, N) each
        for name, back in looks_back(n).items():
            if causal or name != "induction":
                sequence = FREQUENT if name == "previous_token" else ANY
                sampled[name] = stream.attention[sequence][:, again, again - back]
        sampled["copying"] = own_match(outputs - outputs.mean(axis=1, keepdims=True))
        scores = {
            "distance": distances[shares.argmax(axis=1)].astype(float),
            "first_token": stream.attention[FREQUENT][:, again, 0].mean(axis=1),
        }
        for name, of_tokens in sampled.items():
            scores[name] = of_tokens.mean(axis=1)
            low, high = interval(of_tokens, model.embeddings.n_tokens)
            scores[f"{name}_low"], scores[f"{name}_high"] = low, high
        if not all(np.isfinite(values).all() for values in scores.values()):
            raise TooLargeError(f"following tokens up to layer {layer.index} overflows")
        yield layer.index, scores


def looks_back(n: int) -> dict[str, int]:
    """Distance back to the key that each role looks at where `n` tokens are said again."""
    return {"previous_token": 1, "duplicate_token": n, "induction": n - 1}


class SuperWeight(NamedTuple):
    """The entry of a down-projection that writes most of a massive activation."""

    layer: int  # the network's layer
    unit: int  # the hidden unit that it reads
    dimension: int  # the dimension of the stream that it writes
    weight: float
    share: float  # share of what the network writes there for the first token


# Sinks at the first token, which depends on nothing but itself in a causal model.

SHORT = 5  # tokens in a sequence: the last one chooses between the first, three others and itself
DRAWS = 24  # sequences that begin with the config's first token, and as many that begin with any
# Qwen2.5 makes its sink of a text's own first token, not of the one that its config names: that one
# gets half as much attention there as any token in its place, in SmolLM2 nine tenths, in Gemma 3
# four times as much.
NAMED_AT_LEAST = 3 / 4
UNASKED = 2 * 10**9  # stored bytes of feed-forward networks that an audit reads without `--sinks`


@holds_arrays
class FirstTokenSinks(ShowsShapes):
    """Sinks at the first token of short random texts; NaN where `note` says why."""

    share: np.ndarray  # (L, H) mean attention that the last token gives the first
    kind: np.ndarray  # (L, H) objects: nop, broadcast, neither; none below half of the attention
    peak: np.ndarray  # (L, H) distance with the highest mean score of the tokens after the first
    fast: np.ndarray  # (L, H) share of |q||k| in pairs of dimensions that turn fast
    note: str = ""
    massive: Massive | None = None  # the largest coordinate of the first token, if it is massive
    super_weight: SuperWeight | None = None  # the weight that wrote most of it


def first_token_sinks(
    model: Model, layers: Sequence[int], asked: bool | None = None
) -> FirstTokenSinks:
    """Follow short texts exactly to find sinks; unless `asked`, only small models on this machine.

    `asked` is True or False if the user said so, and None if not.
    """
    unknown = np.full((len(layers), model.config.n_heads), np.nan)
    model = model.unchecked()  # non-finite weights are a finding, and show where tokens reach them
    try:
        # Broken scales overflow, and are findings
        with one_blas_thread(), np.errstate(over="ignore", invalid="ignore"):
            problem = _why_no_sinks(model, max(layers), asked)
            if not problem:
                return _sinks(model, layers)
    except CheckpointError as error:
        problem = str(error)
    note = f"Sinks at the first token are not known: {problem}."
    return FirstTokenSinks(unknown, unknown.astype(object), unknown, unknown, note)


def _why_no_sinks(model: Model, last: int, asked: bool | None) -> str | None:
    if asked is False:
        return "they were not asked for"
    if model.family.memory is not None:
        return "cross-attention reads what an encoder made"
    row = model.family.mlp
    if row is not None and not asked:
        modules = [module for module in dict.fromkeys((row.up, row.gate, row.down)) if module]
        stems = map(model.stem, range(last + 1))
        names = [f"{stem}{module}.weight" for stem in stems for module in modules]
        stored = model.checkpoint.bytes_to_read(names)
        remote = model.checkpoint.bytes_to_fetch(names)
        if remote or stored > UNASKED:
            where = "not on this machine" if remote else "read only if asked for"
            how = "`weightscope audit --sinks` follows tokens through them"
            return f"{sized(stored)} of feed-forward networks are {where}; {how}"
    return why_not_exact(model, last) or lacking_first_token(model)


def _sinks(model: Model, layers: Sequence[int]) -> FirstTokenSinks:
    """Measure both ways to begin a text; the named token's counts unless others get far more."""
    tokens = short_sequences(model, SHORT, DRAWS)
    starts = [slice(start, start + DRAWS) for start in range(0, len(tokens), DRAWS)]
    distances = min(NEAR, model.config.n_positions or NEAR)
    # By layer, for S ways to begin
    shares: list[list[np.ndarray]] = []  # (S, H)
    kinds: list[list[np.ndarray]] = []  # (S, H)
    near = []  # (2, H) peak and fast share
    first, medians, hidden = [], [], []  # first token's (S, d), (S,), (S, width)
    followed = follow_exactly(model, tokens, max(layers))
    for short in bar(followed, "sinks", "layer", total=max(layers) + 1):
        share_of = [first_token_share(short.attention[start]) for start in starts]
        if not np.isfinite(share_of).all():
            index = short.layer.index
            raise CheckpointError(f"what random tokens become up to layer {index} is not finite")
        shares.append(share_of)
        kinds.append(
            [_kinds(short, start, share) for start, share in zip(starts, share_of, strict=True)]
        )
        following = short.x[:, 1:].reshape(-1, short.x.shape[-1])  # the first is like no other
        near.append(peak_and_fast_share(short.layer, following, distances))
        first.append([short.x[start, 0].mean(axis=0) for start in starts])
        medians.append([np.median(np.abs(short.x[start])) for start in starts])
        units = short.hidden
        hidden.append([] if units is None else [units[start, 0].mean(axis=0) for start in starts])
    share, kind = np.stack(shares, axis=1), np.stack(kinds, axis=1)  # (S, layers, H)
    chosen = 0 if share[0].mean() >= NAMED_AT_LEAST * share[-1].mean() else len(starts) - 1
    first_tokens = np.stack([tokens_of[chosen] for tokens_of in first])
    massive = massive_activation(first_tokens, np.array(medians)[:, chosen])
    written_by = None
    if massive is not None and massive.layer > 0:
        written_by = _super_weight(model, massive, hidden[massive.layer][chosen])
    asked = list(layers)
    peak, fast = np.stack(near, axis=1)[:, asked]  # (layers, H) each
    return FirstTokenSinks(
        share[chosen][asked], kind[chosen][asked], peak, fast, "", massive, written_by
    )


def _super_weight(model: Model, massive: Massive, hidden: np.ndarray) -> SuperWeight | None:
    """Find the weight below that writes most of the activation, given the hidden units (width,)."""
    layer, dimension = massive.layer - 1, massive.dimension
    weights = down_column(model, layer, dimension).astype(np.float64)
    written = hidden * weights  # (width,)
    unit = int(np.abs(written).argmax())
    share = float(written[unit] / written.sum())
    if not share > 0:
        return None  # it writes the opposite, or nothing is written
    return SuperWeight(layer, unit, dimension, float(weights[unit]), share)


def _kinds(short: ShortTexts, start: slice, share: np.ndarray) -> np.ndarray:
    """Kind of every head's sink, (H,); NaN where values are not finite or not simply added up."""
    layer, kinds = short.layer, np.full(len(share), np.nan, object)
    if layer.modulated:
        return kinds
    x = short.x[start]  # (D, n, d)
    values = layer.inner_values(x.reshape(-1, x.shape[-1]))  # (G, D n, r_v)
    for head in layer.heads:
        updates = (values[head.kv_head] @ head.w_o).reshape(x.shape)
        if np.isfinite(updates).all():
            kinds[head.index] = first_token_kind(
                share[head.index], short.attention[start, head.index], updates
            )
    return kinds


def by_wiring(wiring: Wiring) -> tuple[np.ndarray, np.ndarray]:
    """Largest share of a space that keys read, for the reader and for the writer; (L, H) twice.

    Shares are above chance: 0 is the share of random spaces and 1 is the whole space. If queries
    read a head's output too, it writes what all heads need, so the queries' share is subtracted for
    the writer.
    """
    of_readers, of_writers = np.full(wiring.rank["k"].shape, np.nan), []
    for spaces in wiring.by_layer:
        by_keys, by_queries = (_shares(wiring, spaces, kind) for kind in ("k", "q"))
        of_readers = np.fmax(of_readers, _largest(by_keys, (0, 1)))
        of_writers.append(_largest(by_keys - by_queries, (2, 3))[0])
    return of_readers, np.array(of_writers)


def _shares(wiring: Wiring, layers: slice, kind: str) -> np.ndarray:
    """Share beyond chance of what heads read that these layers write; NaN where unknown."""
    random = wiring.random_pk(kind, layers).mean
    most = np.minimum(wiring.rank["o"][layers, :, None, None], wiring.rank[kind])
    with np.errstate(divide="ignore", invalid="ignore"):
        beyond = (wiring.pk[kind][layers] - random) / (most - random)
    shares = np.where(most > random, beyond, np.nan)
    # Narrow models have large shares by chance: only shares that stand out count.
    not_counted = np.where(np.isnan(shares), np.nan, 0.0)
    return np.where(wiring.z_of("pk", kind, layers) > LEAST_Z, shares, not_counted)


def _largest(values: np.ndarray, axes: tuple[int, int]) -> np.ndarray:
    """The largest over two axes, NaN where there is none."""
    largest = np.where(np.isnan(values), -np.inf, values).max(axis=axes, initial=-np.inf)
    return np.where(np.isfinite(largest), largest, np.nan)


def assign_names(
    scores: dict[str, np.ndarray], roles: Sequence[Role]
) -> tuple[np.ndarray, np.ndarray]:
    """Names of heads, (L, H), and how sure they are, (3, L, H), from scores (L, H)."""
    shape = next(iter(scores.values())).shape
    names, sure = np.full(shape, NO_NAME, object), np.full((3, *shape), np.nan)
    for role in (role for role in reversed(roles) if role.name):
        reached = role.reached(scores)
        names[reached] = role.name
        sure[:, reached] = np.array(role.sure)[:, None]
    return names, sure


def roles_table(wiring: Wiring, roles: HeadRoles) -> Table:
    """roles.csv: one row per head."""
    n, h = roles.names.shape
    layers, heads = np.repeat(wiring.layers, h), np.tile(np.arange(h), n)
    return Table(
        [
            Column("layer", layers),
            Column("head", heads),
            Column("kv_head", heads * wiring.n_kv_heads // h),
            Column("role", roles.names.ravel(), "name", meaning=NAME),
            *(
                Column(name, values.ravel(), symbol=symbol, format=".2f", meaning=meaning)
                for (name, (symbol, meaning)), values in zip(SURE.items(), roles.sure, strict=True)
            ),
            *(column for name in COLUMNS for column in _columns(name, roles)),
        ]
    )


def _columns(name: str, roles: HeadRoles) -> Iterator[Column]:
    """The columns of a score, and of its interval if it has one."""
    symbol, meaning = COLUMNS[name]
    yield Column(name, roles.scores[name].ravel(), symbol=symbol, meaning=meaning, format=".2f")
    for end in ("low", "high") if name in SAMPLED else ():
        meaning = f"{end} end of a 95 % interval over the tokens that were drawn (bootstrap)"
        values = roles.scores[f"{name}_{end}"].ravel()
        yield Column(
            f"{name}_{end}", values, symbol=f"{symbol}, {end}", meaning=meaning, format=".2f"
        )


def unembedding(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Directions of some tokens' logits, (T, d); embedding rows where there is no unembedding."""
    try:
        return model.unembedding.rows(tokens)
    except CheckpointError:
        return model.ends.into_stream(model.embeddings.rows(tokens))
