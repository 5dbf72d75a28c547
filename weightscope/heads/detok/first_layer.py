"""The first layer by tokens and positions: the six terms of the detokenization paper, eq. 14."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.device import open_device
from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Table, column
from weightscope.heads.detok.positions import (
    FEWEST,
    QUERY,
    SPREAD,
    PositionTerms,
    SigmaStatistics,
    Spread,
    in_runs,
    position_numerators,
    sigma_statistics,
)
from weightscope.model.embeddings import ids_of
from weightscope.model.layers.layer import Head, Layer
from weightscope.model.layers.maps import InnerNorm
from weightscope.model.metrics.outliers import undertrained_rows
from weightscope.model.model import Model, as_model, overflow
from weightscope.model.text.tokenizer import Tokenizer, token_names

TERMS = ("ee", "pp", "pe", "ep", "e", "p")


@holds_arrays
class Parts(ShowsShapes):
    """Summands of queries or keys, (n, r) for a sequence, rotated if its layer rotates."""

    e: np.ndarray  # e W / sigma, the token's
    p: np.ndarray  # p W / sigma, the position's
    b: np.ndarray  # the bias


@holds_arrays
class SixTerms(ShowsShapes):
    """Eq. 14 for one head and one sequence, without 1/sqrt(d').

    Rows are the current token i, columns the previous token j; every term is (n, n).
    """

    ee: np.ndarray  # token with token
    pp: np.ndarray  # position with position
    pe: np.ndarray  # position i with token j
    ep: np.ndarray  # token i with position j
    e: np.ndarray  # token j by itself: the same in every row unless rotation turns the bias
    p: np.ndarray  # position j by itself
    # the keys' bias, constant in j without rotation, and terms by distance as ALiBi's; not in
    # eq. 14
    rest: np.ndarray

    def total(self) -> np.ndarray:
        """s_ij, the sum of all terms, (n, n)."""
        return self.ee + self.pp + self.pe + self.ep + self.e + self.p + self.rest


def six_terms(query: Parts, key: Parts) -> SixTerms:
    """Multiply out s_ij = (q_e + q_p + q_b)_i (k_e + k_p + k_b)_j' (eqs 6-8 and 14)."""
    return SixTerms(
        ee=query.e @ key.e.T,
        pp=query.p @ key.p.T,
        pe=query.p @ key.e.T,
        ep=query.e @ key.p.T,
        e=query.b @ key.e.T,
        p=query.b @ key.p.T,
        rest=(query.e + query.p + query.b) @ key.b.T,
    )


ROWS = 64  # rows of scores taken apart at a time, few enough for a core's cache


class TermContributions(NamedTuple):
    """Distance that attention from each position moves without each term, and the attention."""

    contributions: dict[str, np.ndarray]  # (n,): c_i of every term, in nats (eqs 15-18)
    drawn: dict[str, np.ndarray]  # (n,): c_i as the authors' script draws it in Fig. 4
    attention: np.ndarray  # (n, n), 0 where a key is not visible


def term_contributions(terms: SixTerms, scale: float, visible: np.ndarray) -> TermContributions:
    """Measure how far attention from position i moves without a term (section 5); visible (n, n).

    P_i is the attention without the term, Q_i with it. Eq. 18 is D_KL(P_i || Q_i) of scores divided
    by sqrt(d'). The paper's Fig. 4 shows, by its authors' script, D_KL(Q_i || P_i) / (i + 1) of
    undivided scores.
    """
    n, total = len(visible), terms.total()
    contributions = {name: np.zeros(n) for name in TERMS}
    drawn = {name: np.zeros(n) for name in TERMS}
    attention = np.zeros((n, n))
    for start in range(0, n, ROWS):
        rows = slice(start, start + ROWS)
        keys = slice(int(np.flatnonzero(visible[rows].any(axis=0))[-1]) + 1)
        seen = visible[rows, keys]
        scores = np.where(seen, total[rows, keys].astype(np.float64), -np.inf)  # (b, m)
        attention[rows, keys], log_sum = _softmax(scale * scores)
        undivided, undivided_log_sum = _softmax(scores)
        for name in TERMS:
            term = np.where(seen, getattr(terms, name)[rows, keys], 0.0)
            without, log_sum_without = _softmax(scale * (scores - term))
            # log P - log Q = log_sum - log_sum_without - term
            mean_term = scale * (without * term).sum(axis=1)
            contributions[name][rows] = log_sum - log_sum_without - mean_term
            _, undivided_without = _softmax(scores - term)
            undivided_mean = (undivided * term).sum(axis=1)
            drawn[name][rows] = undivided_without - undivided_log_sum + undivided_mean
    keys_seen = np.arange(1, n + 1)
    return TermContributions(
        contributions, {name: c / keys_seen for name, c in drawn.items()}, attention
    )


def _softmax(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax over the last axis, and the logarithm of its denominator."""
    highest = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - highest)
    sums = exponentials.sum(axis=-1, keepdims=True)
    exponentials /= sums
    return exponentials, (highest + np.log(sums))[..., 0]


PIECE = 512  # rows of the embedding that a thread projects at a time
SHARE_KEPT = 0.3  # share of a device's free memory for token rows kept from head to head


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """Embeddings seen by one layer's heads, sigma taken care of.

    Attributes
    ----------
    model : Model
    layer : int
        0, or another layer to ask how its heads would see the bare embeddings.
    delta : int
        Distance i - j at which token types are compared under rotation; 1 is the token before.
        Without rotation it makes no difference.
    device : str
        Device that computes sigma, the factors of T^ee and their products; see `open_device`.

    Examples
    --------
    >>> import weightscope as ws
    >>> first = ws.FirstLayer(ws.open_model("embedded"))
    >>> first.query_factor(5).shape, first.key_factor(5).shape
    ((8000, 32), (8000, 32))
    """

    model: Model
    layer: int = 0
    delta: int = 1
    device: str = "cpu"

    @cached_property
    def attention(self) -> Layer:
        """The layer on embeddings divided by sigma, norms and projections before it folded in."""
        if self.layer == 0 or self.model.family.memory is not None:  # it refuses the latter
            return self.model.first_layer
        return self.model.layer(self.layer)

    @property
    def bare(self) -> str:
        """A caveat on scores in layers other than the first; empty for the first."""
        return bare_embeddings(self.layer)

    @cached_property
    def heads(self) -> list[Head]:
        return list(self.attention.heads)

    def head(self, index: int) -> Head:
        """One of `heads`, with its cached products; raises CheckpointError for a wrong index."""
        return self.heads[self.attention.head(index).index]

    @cached_property
    def sigma(self) -> SigmaStatistics:
        """sigma(e_t + p_j) over all tokens t and positions j.

        Raises
        ------
        CheckpointError
            The model has no learned positions, or no token embedding.
        """
        embeddings, positions = self.model.embeddings, self.model.positions
        if positions is None:
            problem = (
                f"a {self.model.family.name} has no position embedding, hence no sigma of "
                "tokens at positions"
            )
            raise CheckpointError(problem, file=self.model.checkpoint.name)
        if embeddings.first_norm is None:
            return SigmaStatistics.of_no_norm(embeddings.n_tokens, len(positions))
        with bar(what="sigma", unit="position", total=len(positions)) as done:
            statistics = sigma_statistics(
                embeddings.blocks,
                embeddings.n_tokens,
                positions,
                embeddings.first_norm.eps,
                done.update,
                open_device(self.device),
            )
        self.check_finite("sigma of tokens at positions", statistics.token_mean)
        return statistics

    @cached_property
    def divisor(self) -> np.ndarray:
        """c_t, each token's sigma averaged over learned positions, float32 (vocab,).

        This is the paper's code's choice for comparing token types with no position in view.
        """
        embeddings = self.model.embeddings
        if self.model.positions is not None:
            return self.sigma.token_mean.astype(np.float32)
        if embeddings.first_norm is None:
            return np.ones(embeddings.n_tokens, np.float32)
        norm = embeddings.first_norm
        sigma = np.concatenate([norm.sigma(block) for _, block in embeddings.blocks()])
        self.check_finite("sigma of tokens", sigma)
        return sigma

    def query_factor(self, head: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """E~ W_Q R(delta) of one head, the left factor of T^ee between all token types (eq. 14).

        float32 (vocab, r), or its rows start .. stop - 1 alone.
        """
        w, norm = self.head(head).query_at(self.delta)[0], self.attention.q_norm
        n_tokens = self.model.embeddings.n_tokens
        if not 0 <= start <= (n_tokens if stop is None else stop) <= n_tokens:
            raise CheckpointError(f"no tokens {start} to {stop}: the vocabulary has {n_tokens}")
        factor = self._projected(w, norm and norm.of(head), start, stop)
        self.check_finite(f"the query side of T^ee of head {head}", factor, self.layer)
        return factor

    def query_rows(self, head: int, tokens: np.ndarray) -> np.ndarray:
        """Rows of `query_factor`, float32 (n, r), for token ids (n,); reads no other rows."""
        w, norm = self.head(head).query_at(self.delta)[0], self.attention.q_norm
        if np.ndim(tokens) != 1:
            raise ValueError(f"tokens have shape {np.shape(tokens)}; expected (n,)")
        rows = self.model.embeddings.rows(tokens)
        scaled = rows / self.divisor[np.asarray(tokens), None]  # (n, d)
        factor = scaled @ w  # (n, r)
        if norm is not None:
            factor[:, : norm.dims] *= self._scalars(norm.of(head), scaled)[0][:, None]
        self.check_finite(f"the query side of T^ee of head {head}", factor, self.layer)
        return factor

    def mean_row(self, tokens: np.ndarray) -> np.ndarray:
        """Mean row divided by `divisor`, float64 (d,), over a mask of tokens (V,); 0 for none."""
        total: Any = 0.0
        for first, block in self.model.embeddings.blocks():
            rows = slice(first, first + len(block))
            total = total + (tokens[rows] / self.divisor[rows].astype(np.float64)) @ block
        return np.asarray(total / max(1, np.count_nonzero(tokens)))

    def mean_query(self, head: int, tokens: np.ndarray, mean_row: np.ndarray) -> np.ndarray:
        """Mean row of `query_factor`, float64 (r,), over a mask of tokens (V,).

        Without a norm of queries it is the mean row's query; with one, every query has to be made.
        """
        if self.attention.q_norm is None:
            return mean_row @ self.head(head).query_at(self.delta)[0]
        total = self.query_factor(head).sum(axis=0, where=tokens[:, None], dtype=np.float64)
        return np.asarray(total / max(1, np.count_nonzero(tokens)))

    def key_factor(self, kv_head: int) -> np.ndarray:
        """E~ W_K of a key-value head, float32 (vocab, r): the right factor for all its heads."""
        n_kv_heads = self.attention.n_kv_heads
        if not 0 <= kv_head < n_kv_heads:
            raise CheckpointError(f"no key-value head {kv_head}: a layer has {n_kv_heads}")
        w, norm = self.attention.k.of(kv_head)[0], self.attention.k_norm
        factor = self._projected(w, norm and norm.of(kv_head))
        self.check_finite(f"the key side of T^ee of key-value head {kv_head}", factor, self.layer)
        return factor

    def check_finite(self, what: str, values: np.ndarray, layer: int | None = None) -> None:
        """Refuse values that overflowed: the resulting zeros and NaN would be ranked as scores."""
        if not np.isfinite(values).all():
            raise overflow(self.model, what, layer)

    def _scalars(self, norm: InnerNorm, x: np.ndarray) -> np.ndarray:
        """The factor by which a norm multiplies the queries or keys of x (n, d), (heads, n)."""
        scalars = norm.scalars(x)
        # An infinite sum of squares makes a scalar 0
        self.check_finite("a q/k-norm", 1 / scalars, self.layer)
        return scalars

    def _projected(
        self, w: np.ndarray, norm: InnerNorm | None, start: int = 0, stop: int | None = None
    ) -> np.ndarray:
        """Scaled token rows times w (d, r), and a norm's scalars if given: (stop - start, r).

        Pieces of fixed size, spread over threads with one BLAS thread each: the same bits on any
        number of cores.
        """
        if self.device != "cpu" and norm is None:
            return self._projected_on_device(w, start, stop)
        embeddings = self.model.embeddings
        divisor = self.divisor
        factor = np.empty(((stop or embeddings.n_tokens) - start, w.shape[1]), np.float32)

        def project(piece: tuple[int, np.ndarray]) -> None:
            first, tokens = piece
            scaled = tokens / divisor[first : first + len(tokens), None]  # (b, d)
            rows = slice(first - start, first - start + len(tokens))
            np.matmul(scaled, w, out=factor[rows])
            if norm is not None:
                factor[rows, : norm.dims] *= self._scalars(norm, scaled)[0][:, None]

        pieces = (
            (first + i, block[i : i + PIECE])
            for first, block in embeddings.blocks(start, stop)
            for i in range(0, len(block), PIECE)
        )
        deque(in_threads(project, pieces), maxlen=0)
        return factor

    def _projected_on_device(self, w: np.ndarray, start: int, stop: int | None) -> np.ndarray:
        """Scaled token rows times w on the device."""
        device, stop = open_device(self.device), stop or self.model.embeddings.n_tokens
        w = device.put(w)
        if self._rows_kept is None:
            blocks = self._rows_on_device(start, stop)
            return np.concatenate([device.get(rows @ w) for rows in blocks])
        first, parts = 0, []
        for rows in self._rows_kept:
            end = first + rows.shape[0]
            if first < stop and start < end:
                part = rows[max(start, first) - first : min(stop, end) - first, :]
                parts.append(device.get(part @ w))
            first = end
        return np.concatenate(parts)

    def _rows_on_device(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Scaled token rows on the device, in blocks of (b, d)."""
        blocks = self.model.embeddings.blocks(start, stop)
        divisor = self.divisor
        scaled = ((block / divisor[first : first + len(block), None],) for first, block in blocks)
        return (rows for (rows,) in open_device(self.device).put_ahead(scaled))

    @cached_property
    def _rows_kept(self) -> list[Any] | None:
        """All rows, if they are small enough to keep for the next head."""
        size = 4 * self.model.embeddings.n_tokens * self.model.config.d_model
        if size < SHARE_KEPT * open_device(self.device).free_bytes():
            return list(self._rows_on_device())
        return None

    def token_scores(self, token: int) -> np.ndarray:
        """T^ee of a current token with all previous ones, every head: float32 (n_heads, vocab)."""
        layer = self.attention
        current = self.model.embeddings.rows(np.array([token]))[0] / self.divisor[token]  # (d,)
        by_head = [current @ head.query_at(self.delta)[0] for head in self.heads]
        queries = np.stack(by_head)  # (H, r)
        if layer.q_norm is not None:
            queries[:, : layer.q_norm.dims] *= self._scalars(layer.q_norm, current[None])
        if layer.k_norm is None:
            embeddings = self.model.embeddings
            by_head = [head.w_k @ queries[head.index] for head in self.heads]
            maps = np.stack(by_head, axis=1)  # (d, H)
            scores = np.empty((embeddings.n_tokens, len(self.heads)), np.float32)  # (V, H)
            for first, block in embeddings.blocks():
                rows = slice(first, first + len(block))
                np.matmul(block / self.divisor[rows, None], maps, out=scores[rows])
            scores = scores.T
        else:  # the norm scales each key, so keys are made before they are compared
            keys = [self.key_factor(kv_head) for kv_head in range(layer.n_kv_heads)]
            scores = np.stack([keys[head.kv_head] @ queries[head.index] for head in self.heads])
        self.check_finite("T^ee", scores, self.layer)
        return scores

    def neighbours(
        self, *tokens: str | int, top: int = 10, heads: Sequence[int] | None = None
    ) -> Table:
        """Previous tokens that heads score highest for current tokens, by T^ee (Tables 1 and 3).

        Parameters
        ----------
        *tokens : str or int
            Each spelled as in a document (" Jackson") or as in the vocabulary, or its id.
        top : int
            Number of previous tokens per head and current token.
        heads : sequence of int, optional
            All by default.

        Raises
        ------
        CheckpointError
            There is no such token, or a text and no tokenizer.

        Examples
        --------
        >>> import weightscope as ws
        >>> first = ws.first_layer(ws.open_model("embedded"))
        >>> first.neighbours(" ship", top=2, heads=[3])["joined"].tolist()
        ["'s ship", ' was ship']
        """
        tokenizer: Any
        if any(isinstance(token, str) for token in tokens):
            tokenizer = Tokenizer.load(self.model.tokenizer)
        else:
            tokenizer = Tokenizer.at_hand(self.model)
        ids = [tokenizer.id_of(token) if isinstance(token, str) else token for token in tokens]
        return ranked(self, tokenizer, ids, top, heads)

    def positions(
        self, query: int | None = None, unscaled: bool = False, spread: float = SPREAD
    ) -> PositionTerms:
        """T^p and T^pp of every head at a query position (section 4, Fig. 3); `position_terms`."""
        return position_terms(self, query, unscaled, spread)

    def terms(self, head: int, tokens: np.ndarray, positions: np.ndarray) -> SixTerms:
        """The six terms of eq. 14 for one head over a sequence of tokens at given positions.

        They add up to the model's scores before scaling, up to a constant in j, unless the head's
        caveats name a norm or a cap inside attention.

        Parameters
        ----------
        head : int
        tokens, positions : (n,) int arrays

        Raises
        ------
        CheckpointError
            There is no such head, token or position.
        ValueError
            Not as many positions as tokens.
        """
        layer, embeddings, learned = self.attention, self.model.embeddings, self.model.positions
        tokens, positions = ids_of(tokens, "tokens"), ids_of(positions, "positions")
        if tokens.shape != positions.shape or tokens.ndim != 1:
            raise ValueError(
                f"tokens of shape {tokens.shape} at positions of shape {positions.shape}; both are "
                "(n,)"
            )
        sigma = embeddings.sigma(tokens, positions)[:, None]  # (n, 1)
        e = embeddings.tokens[tokens] / sigma  # (n, d)
        p = np.zeros_like(e) if learned is None else learned[positions] / sigma  # (n, d)

        def parts(w: np.ndarray, b: np.ndarray) -> Parts:
            stacked = np.stack([e @ w, p @ w, np.broadcast_to(b, (len(e), len(b)))])  # (3, n, r)
            if layer.rotation is not None:
                stacked = layer.rotation.rotate(stacked, positions)
            return Parts(*stacked)

        kv_head = layer.head(head).kv_head
        terms = six_terms(parts(*layer.q.of(head)), parts(*layer.k.of(kv_head)))
        self.check_finite(f"a term of head {head}", terms.total(), self.layer)
        if layer.additive is None:
            return terms
        bias = layer.position_bias(positions[:, None] - positions)[head]  # (n, n)
        return replace(terms, rest=terms.rest + bias * layer.additive.times / layer.scale)


def bare_embeddings(layer: int) -> str:
    """A caveat on a layer's scores of token embeddings; empty for the first, which reads them."""
    if not layer:
        return ""
    before = "the layer before it adds" if layer == 1 else f"the {layer} layers before it add"
    return (
        f"These are scores of bare token embeddings, which are not what reaches layer {layer}: "
        f"{before} to them."
    )


def first_layer(
    model: Model | str | Path, layer: int = 0, delta: int = 1, device: str = "cpu"
) -> FirstLayer:
    """A model's first attention layer as a function of token types and positions.

    Parameters
    ----------
    model : Model, str or Path
        A model, or what `open_model` opens.
    layer, delta, device
        As in `FirstLayer`.

    Examples
    --------
    >>> import weightscope as ws
    >>> terms = ws.first_layer("embedded").terms(5, [11, 12, 13], [0, 1, 2])
    >>> terms.ee.shape
    (3, 3)
    """
    return FirstLayer(as_model(model), layer, delta, device)


def neighbours(
    model: Model | str | Path,
    *tokens: str | int,
    top: int = 10,
    heads: Sequence[int] | None = None,
    layer: int = 0,
    delta: int = 1,
) -> Table:
    """Previous tokens that heads score highest for current tokens; see `FirstLayer.neighbours`.

    Examples
    --------
    >>> import weightscope as ws
    >>> ws.neighbours("embedded", " ship", top=2, heads=[3])["joined"].tolist()
    ["'s ship", ' was ship']
    """
    return first_layer(model, layer, delta).neighbours(*tokens, top=top, heads=heads)


def position_terms(
    first: FirstLayer, query: int | None = None, unscaled: bool = False, spread: float = SPREAD
) -> PositionTerms:
    """Compute the position terms of every head of the first layer.

    With `unscaled` no token embedding is read: sigma is for tokens of standard deviation
    `spread` over their dimensions, uncorrelated with the positions.
    """
    if not 0 < spread < np.inf:
        raise ValueError(f"a spread of {spread}; a standard deviation above 0 is needed")
    model, positions = first.model, first.model.positions
    if positions is None:
        problem = f"a {model.family.name} has no position embedding, hence no T^p and T^pp"
        hint = _instead(first.heads[0].layer)
        raise CheckpointError(f"{problem}; {hint}", file=model.checkpoint.name)
    # T^p has a cliff at the last trained position, so a shorter model is read in mid-context.
    query = min(QUERY, max((len(positions) - 1) // 2, FEWEST - 1)) if query is None else query
    if not FEWEST - 1 <= query < len(positions):
        problem = (
            f"query position {query} is outside {FEWEST - 1} .. {len(positions) - 1}, the "
            "model's positions"
        )
        raise CheckpointError(problem, file=model.checkpoint.name)
    undertrained = undertrained_rows(positions, model.config.initial_std)
    trained = np.setdiff1d(np.arange(query + 1), undertrained)
    if len(trained) < FEWEST:
        problem = (
            f"only {len(trained)} of the positions up to {query} look trained, and a trend "
            f"needs {FEWEST}"
        )
        untrained = f"untrained are {in_runs(undertrained)}"
        raise CheckpointError(f"{problem}; {untrained}", file=model.checkpoint.name)
    if unscaled:
        sigma, stand_in = SigmaStatistics.of_no_norm(0, len(positions)), None
        if model.ends.first_norm is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # found and named with the terms
                squares = model.ends.first_norm.sigma(positions).astype(np.float64) ** 2
                stand_in = Spread(spread, squares)
                sigma = stand_in.sigma
    else:
        sigma, stand_in = first.sigma, None
    with np.errstate(over="ignore", invalid="ignore"):  # found and named below
        numerators = [
            position_numerators(head.qk, head.qk_bias, positions, query) for head in first.heads
        ]
    t_p, t_pp = (np.stack(terms).astype(np.float64) for terms in zip(*numerators, strict=True))
    network, provenance = model.family.mlp, Provenance.of(model.checkpoint)
    causal = network is not None and network.causal
    scale = first.heads[0].scale
    terms = PositionTerms(
        query, scale, t_p, t_pp, sigma, undertrained, causal, provenance, stand_in
    )
    for what, values in (("T^p", terms.t_p), ("T^pp", terms.t_pp)):
        first.check_finite(what, values, first.layer)
    return terms


def _instead(layer: Layer) -> str:
    """Advice on seeing what positions do in a layer that gets none from embeddings."""
    command = "`weightscope positions SOURCE`"
    if layer.rotation is not None:
        return f"it rotates queries and keys: {command} has its scores by distance"
    if layer.additive is not None:
        return f"it adds biases by distance to the scores: {command} has them"
    if layer.relative:
        return "it has terms of a token and a distance"
    return f"layer {layer.index} sees no positions"


# The previous tokens that each head scores highest (Tables 1 and 3)


class RankedRow(NamedTuple):
    """A previous token that a head scores high before a current one."""

    head: int = column()
    current: str = column("the current token", symbol="current token")
    rank: int = column("1 is the highest score in the whole vocabulary")
    token_id: int = column()
    token: str = column()
    score: float = column("$T^ee$, before 1/√d'", format=".3f")
    joined: str = column("what the head would put together: the previous token and the current one")


def ranked(
    first: FirstLayer,
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    top: int = 10,
    heads: Sequence[int] | None = None,
    less: np.ndarray | float = 0.0,
) -> Table:
    """Rank the vocabulary as previous tokens of some current tokens, by scores less (H, V)."""
    rows, name = [], token_names(tokenizer)
    for token in tokens:
        scores = first.token_scores(token) - less  # (H, V)
        all_heads = range(len(scores))
        chosen = all_heads if heads is None else [first.head(head).index for head in heads]
        for head in chosen:
            best = np.argsort(-scores[head], kind="stable")[:top]
            for rank, previous in enumerate(best.tolist(), start=1):
                score = float(scores[head, previous])
                named, joined = name(previous), name(previous, token)
                rows.append(RankedRow(head, name(token), rank, previous, named, score, joined))
    caption = f"Tables 1 and 3. {first.bare}".rstrip()
    return Table.of(RankedRow, rows, caption)
