"""Both measures of how two heads fit, for all heads of two layers, from one product.

With orthonormal directions U of what head a writes and V of what head b reads, chosen along the
singular directions of W_VO(a) and of the matrix that V belongs to, and N = U'V, which is r x r:

    PK = sum_ij N_ij^2              squared cosines of the angles between the spaces, from 0 to r
    CS^2 = sum_ij p_i N_ij^2 q_j    p, q: each direction's share in |W_VO(a)|_F^2, |W(b)|_F^2

Where query heads share what they read, q is a quadratic form Q, and CS^2 = tr(N' diag(p) N Q).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from threading import local
from typing import Any

import numpy as np

from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.device import CPU, Device, open_device
from weightscope.core.engine import Engine, ThisProcess, array_of
from weightscope.core.errors import CheckpointError, TooLargeError
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.heads.circuits.stream import attention_norm
from weightscope.heads.circuits.wiring import (
    MEASURES,
    PROJECTIONS,
    Wiring,
    all_strongest,
    strongest,
)
from weightscope.model.layers.factored import triangle
from weightscope.model.layers.layer import Layer
from weightscope.model.model import Model, distinct, overflow

# The space a head writes into the stream, and the spaces its queries, keys and values read, as
# orthonormal directions, together with how strongly each of them is used.

# Least use of a direction that counts, times sqrt(d), as a share of the strongest's. Rounding a
# factor of low rank to float32 leaves singular values of about a thirtieth of that.
LEAST_USED = float(np.finfo(np.float32).eps)
# |R| |R^-1|, at least r, above which a factor is made orthonormal in float64; below, rounding is a
# few millionths.
WELL_CONDITIONED = 1e3


@holds_arrays
class Spaces(ShowsShapes):
    """Spaces of A heads, or of A key-value heads that S query heads share, in a stream of d."""

    # (A, r, d): B', with B B' the projection onto the space: orthonormal rows, then zero ones if
    # the space has fewer than r dimensions.
    directions: np.ndarray
    rank: np.ndarray  # (A,)
    # (A, S, r): share of each direction in |W|_F^2 of the space's matrix, falling, 1 in all
    use: np.ndarray
    # (A, S, r, r): `use` as a quadratic form on the space's directions, where query heads share the
    # space and each has directions of its own in it; None where the space is one head's.
    form: np.ndarray | None = None

    @classmethod
    def empty(cls, n_spaces: int, shared_by: int, r: int, d: int) -> "Spaces":
        """Empty arrays for spaces to be computed."""
        return cls(
            np.zeros((n_spaces, r, d), np.float32),
            np.zeros(n_spaces, int),
            np.zeros((n_spaces, shared_by, r)),
            np.zeros((n_spaces, shared_by, r, r), np.float32) if shared_by > 1 else None,
        )

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.use.shape[0] * self.use.shape[1]

    def of_heads(self, of_spaces: np.ndarray) -> np.ndarray:
        """Repeat values of the spaces, (A, ...), for each query head, (A S, ...)."""
        return np.repeat(of_spaces, self.use.shape[1], axis=0)

    def only(self, spaces: Sequence[int]) -> "Spaces":
        """Some of the spaces."""
        indices = list(spaces)
        form = None if self.form is None else self.form[indices]
        return Spaces(self.directions[indices], self.rank[indices], self.use[indices], form)


@dataclass(frozen=True)
class LayerSpaces:
    """Spaces that the heads of one layer write, and read by queries, keys and values."""

    written: Spaces
    queries: Spaces
    keys: Spaces
    values: Spaces

    @property
    def read(self) -> dict[str, Spaces]:
        """The spaces read, by the letter of the projection."""
        return {"q": self.queries, "k": self.keys, "v": self.values}


def layer_spaces(
    layer: Layer,
    *,
    centred: bool,
    gain: np.ndarray | None = None,
    groups: Sequence[int] | None = None,
) -> LayerSpaces:
    """All spaces that the heads of a layer write and read.

    The norm before the layer is in its maps, and `gain`, (d,), belongs to a norm which attention's
    output passes. In post-norm models, which have none there, the spaces belong to the layer's
    input itself; the effect of the norms in between is left out. A rotation acts on the r
    dimensions of queries and keys and not on the stream: W_Q R has the columns of W_Q, recombined,
    so the space that a head reads is the same at every position. How strongly its directions are
    used is not; here it is taken at distance 0.
    """
    h, g, d = layer.n_heads, layer.n_kv_heads, layer.d_model
    shared = h // g
    spaces = LayerSpaces(
        Spaces.empty(h, 1, layer.w_o.shape[1], d),
        Spaces.empty(h, 1, layer.head_dim, d),
        Spaces.empty(g, shared, layer.head_dim, d),
        Spaces.empty(g, shared, layer.v.shape[2], d),
    )

    def find(kv: int) -> None:
        key, value = _factor(layer.k.of(kv)[0]), _factor(layer.v.of(kv)[0])
        for s in range(shared):
            head = kv * shared + s
            w_o = layer.w_o[head] if gain is None else layer.w_o[head] * gain
            w_o = np.asarray(w_o).T  # (d, r_v)
            output = _factor(w_o - w_o.mean(axis=0) if centred else w_o)
            query = _factor(layer.q.of(head)[0])
            turned = query.r if layer.rotation is None else layer.rotation.rotate_at(query.r, 0)
            # W_QK = Q_q (turned key.r') Q_k' and W_VO = Q_v (value.r output.r') Q_o'
            q, qk, k = lapack.svd(turned @ key.r.T)
            v, vo, o = lapack.svd(value.r @ output.r.T)
            _put(spaces.written, head, 0, output, o.T, vo)
            _put(spaces.queries, head, 0, query, q, qk)
            _put(spaces.keys, kv, s, key, k.T, qk)
            _put(spaces.values, kv, s, value, v, vo)

    list(in_threads(find, range(g) if groups is None else groups))
    return spaces


@holds_arrays
class _Factor(ShowsShapes):
    """A (d, r) matrix as Q R: Q = columns @ inverse has orthonormal columns up to the rank."""

    columns: np.ndarray
    inverse: np.ndarray
    r: np.ndarray
    rank: int


def _factor(w: np.ndarray) -> _Factor:
    """The columns of w, (d, r), made orthonormal."""
    wide = w.astype(np.float64)
    if not np.isfinite(wide).all():
        raise TooLargeError("a projection")
    d, width = wide.shape
    root = triangle(wide, wide.T @ wide)
    if root.route == "gram":
        from scipy.linalg.lapack import dtrtri

        inverse = dtrtri(root.r)[0]
        well = np.linalg.norm(root.r) * np.linalg.norm(inverse) < WELL_CONDITIONED
        return _Factor(w if well else wide, inverse, root.r, width)
    # the columns are dependent: as many directions as there are
    u, s, vt = np.linalg.svd(wide, full_matrices=False)
    rank = int(np.count_nonzero(s > LEAST_USED * np.sqrt(d) * s[:1]))
    columns, r = np.zeros((d, width)), np.zeros((width, width))
    columns[:, :rank], r[:rank] = u[:, :rank], s[:rank, None] * vt[:rank]
    return _Factor(columns, np.eye(width), r, rank)


def _put(
    spaces: Spaces, a: int, s: int, factor: _Factor, turn: np.ndarray, singular_values: np.ndarray
) -> None:
    """Write one head's space into its place: the directions along `turn`, and the share of each."""
    squares = singular_values**2
    share = squares / squares.sum() if squares.any() else squares
    spaces.rank[a], spaces.use[a, s] = factor.rank, share
    if spaces.form is not None:
        spaces.form[a, s] = (turn * share) @ turn.T
    if s == 0:
        inside = factor.inverse if spaces.form is not None else factor.inverse @ turn
        spaces.directions[a] = inside.T.astype(factor.columns.dtype) @ factor.columns.T


PRODUCT_BYTES = 16 << 20  # bytes of one product: small enough to be summed while in the cache


@holds_arrays
class WrittenRows(ShowsShapes):
    """Rows that represent a layer's writing heads, to multiply with what other heads read."""

    rows: Any  # (H, n, d)
    weights: np.ndarray  # (H, 2, n), of the rows' squared products in PK and in CS^2

    @classmethod
    def whole(cls, spaces: Spaces, device: Device = CPU) -> "WrittenRows":
        """Every direction: all alike for PK, by their shares for CS."""
        weights = np.stack([np.ones_like(spaces.use[:, 0]), spaces.use[:, 0]], axis=1)
        return cls(device.put(spaces.directions), weights.astype(np.float32))


def pair_scores(
    written: WrittenRows, read: Spaces, device: Device = CPU, columns: Any = None
) -> np.ndarray:
    """PK and CS^2 of all heads a of one layer with all heads b of a later one: (2, H, H)."""
    xp = device.xp
    (h, r_a, d), (g, r_b, _) = written.rows.shape, read.directions.shape
    if columns is None:
        columns = device.put(read.directions)
    columns = xp.reshape(columns, (g * r_b, d))
    use = read.use[:, 0] if read.form is None else read.form.reshape(g, -1, r_b * r_b)
    use = device.put(use.astype(np.float32))
    tables = []
    at_once = max(1, PRODUCT_BYTES // (4 * r_a * g * r_b))
    for start in range(0, h, at_once):
        n = min(at_once, h - start)
        weights = device.put(written.weights[start : start + n])
        rows = xp.reshape(written.rows[start : start + n, ...], (n * r_a, d))
        product = _product(rows, columns, device)
        composed = None
        if read.form is not None:
            composed = _by_form(xp.reshape(product, (n, r_a, g, r_b)), weights, use, xp)
        product *= product
        sums = xp.reshape(weights @ xp.reshape(product, (n, r_a, g * r_b)), (n, 2, g, r_b))
        pk = xp.sum(sums[:, 0, ...], axis=-1)  # (n, G)
        if composed is None:
            composed = xp.sum(sums[:, 1, ...] * use, axis=-1)
        pk_of_heads = np.repeat(device.get(pk), read.use.shape[1], axis=1)
        tables.append(np.stack([pk_of_heads, device.get(composed)]))
    return np.concatenate(tables, axis=1)


def _by_form(product: Any, weights: Any, forms: Any, xp: Any) -> Any:
    """tr(N' diag(p) N Q) for every query head, (n, G S): (n, r_a, G, r_b) and (G, S, r_b^2)."""
    n, _, g, r_b = product.shape
    scaled = product * xp.sqrt(weights[:, 1, :, None, None])
    # (G, n, r_b, r_b)
    inside = xp.permute_dims(scaled, (2, 0, 3, 1)) @ xp.permute_dims(scaled, (2, 0, 1, 3))
    # (G, n, S)
    composed = xp.reshape(inside, (g, n, r_b * r_b)) @ xp.permute_dims(forms, (0, 2, 1))
    return xp.reshape(xp.permute_dims(composed, (1, 0, 2)), (n, -1))


_scratch = local()


def _product(rows: Any, columns: Any, device: Device) -> Any:
    """rows @ columns.T, on this machine into memory that the thread keeps."""
    if device is not CPU:
        return rows @ columns.T
    # Fresh pages would cost a third as much as the product
    size = len(rows) * len(columns)
    if getattr(_scratch, "kept", np.empty(0)).size < size:
        _scratch.kept = np.empty(size, np.float32)
    return np.matmul(rows, columns.T, out=_scratch.kept[:size].reshape(len(rows), len(columns)))


# Estimates of both measures from a few rows a head, and how far they can be off.
#
# A sketch keeps the LEADING directions that a head writes, and PROBES random combinations of the
# others, once with equal weights and once weighted by the directions' use. Their products with what
# another head reads give estimates of PK and of CS^2 without bias, at a cost of (LEADING + 2
# PROBES) / r of the exact one.
#
# An estimate is a sum of lambda_i times a chi-squared variable of PROBES degrees of freedom over
# PROBES. The lambda_i add up to the true value v, and none exceeds a scale s: 1 for PK, whose
# lambda_i are squared cosines, and for CS^2 the largest share of a sketched direction times the
# largest share on the reader's side. By Chernoff's bound, and because ln(1 + t) is concave, the
# probability of an estimate of at most x < v is at most
#
#     exp(-PROBES / (2 s) * (x - v + v ln(v / x)))
#
# as for a chi-squared variable of PROBES v / s degrees of freedom; directions that are kept, and so
# not random, make it no larger. `doubt` is the exponent, and grows with v. A pair is left an
# estimate where it exceeds ln(n / FAILURE) at the value that the last of the strongest known pairs
# has. Each of the n pairs that truly are the strongest has at least that value, so that with
# probability 1 - FAILURE none of them is left out.

LEADING = 8
PROBES = 8
FAILURE = 1e-4  # probability that any of the strongest pairs is left out


def sketched(spaces: Spaces, layer: int) -> WrittenRows:
    """Random sketches of what the heads of a layer write, as rows; the same at every call."""
    h, r, d = spaces.directions.shape
    rows = np.empty((h, LEADING + 2 * PROBES, d), np.float32)
    weights = np.zeros((h, 2, LEADING + 2 * PROBES), np.float32)
    use = spaces.use[:, 0]  # (H, r)
    for head in range(h):
        drawn = np.random.default_rng([layer, head]).standard_normal((2, PROBES, r - LEADING))
        drawn[1] *= np.sqrt(use[head, LEADING:])
        directions = spaces.directions[head]
        combined = drawn.reshape(-1, r - LEADING).astype(np.float32)
        rows[head, :LEADING] = directions[:LEADING]
        rows[head, LEADING:] = combined @ directions[LEADING:]
    weights[:, 0, :LEADING], weights[:, 1, :LEADING] = 1, use[:, :LEADING]
    weights[:, 0, LEADING : LEADING + PROBES] = weights[:, 1, LEADING + PROBES :] = 1 / PROBES
    return WrittenRows(CPU.put(rows), weights)


def doubt(estimate: np.ndarray, value: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Doubt that the true value is at least `value`, which has probability at most exp(-doubt)."""
    low = np.clip(estimate, 0, value)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = PROBES / (2 * np.asarray(scale)) * (low - value + value * np.log(value / low))
    return np.where(low >= value, 0.0, exponent)


# Passes over the layers, as tasks for an engine: hold what some layers write, read these and all
# later layers one at a time.

WRITTEN_BYTES = 224 << 20  # bytes of written spaces, held at a time
SMALL_BYTES = 1 << 20  # bytes of a product; smaller ones are made of several layers at once
TASKS_ELSEWHERE = 8  # tasks at least, where other processes share the work
EXACT_UP_TO = 10**13  # multiplications; a 7B model's 10^14 would take two cores half an hour
MOST_PAIRS = 20_000  # pairs computed one by one
GetModel = Callable[[], Model]


def wiring(
    model: Model,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    top: int = 20,
    engine: Engine | None = None,
    on_worker: GetModel | None = None,
) -> Wiring:
    """Projection kernel and composition score of every pair of heads in different layers."""
    if model.family.memory is not None:
        problem = (
            "is cross-attention: its heads read what an encoder made, not what earlier heads write"
        )
        raise CheckpointError(problem, file=model.checkpoint.name)
    if engine is None:
        with ThisProcess() as local_engine:
            return wiring(model, layers, device, top, local_engine)
    indices = distinct(sorted(model.attention_layers if layers is None else layers), model)
    get_model = on_worker if engine.elsewhere and on_worker is not None else partial(_itself, model)
    exact = device != "cpu" or multiplications(model, len(indices)) <= EXACT_UP_TO
    exact = exact or model.config.head_dim <= LEADING + 2 * PROBES
    scores = _all_pairs(model, indices, device, exact, engine, get_model)
    return scores.wiring if exact else _with_the_strongest(model, scores, top, engine, get_model)


def wiring_by_keys(model: Model, doubtful: Callable[[Wiring, slice], np.ndarray]) -> Wiring:
    """The exact wiring by keys; by queries only of pairs that `doubtful` marks.

    `doubtful` gets the wiring and a layer of writers, and returns (1, H, L, H) bool.
    """
    with ThisProcess() as engine:
        get_model = partial(_itself, model)
        wired = _all_pairs(model, model.own_layers, "cpu", True, engine, get_model, ("k",)).wiring
        pairs = [
            np.argwhere(doubtful(wired, writers)) + np.array([writers.start, 0, 0, 0])
            for writers in wired.by_layer
        ]
        i, a, j, b = np.concatenate(pairs).T
        queries = np.full_like(i, PROJECTIONS.index("q"))
        by_queries = np.stack([queries, i, a, j, b // wired.shared], axis=1)
        _compute(model, wired, by_queries, engine, get_model)
    return wired


def _itself(model: Model) -> Model:
    return model


def multiplications(model: Model, n_layers: int) -> int:
    """Multiplications needed for all pairs of this many layers."""
    config = model.config
    pairs = n_layers * (n_layers - 1) // 2
    read = config.n_heads + 2 * config.n_kv_heads  # spaces that a layer's heads read
    return pairs * config.n_heads * read * config.head_dim**2 * config.d_model


@holds_arrays
class _Pass(ShowsShapes):
    """The wiring, and the largest shares of directions that bound its estimates."""

    wiring: Wiring
    largest: dict[str, np.ndarray]


def _all_pairs(
    model: Model,
    layers: tuple[int, ...],
    device: str,
    exact: bool,
    engine: Engine,
    get_model: GetModel,
    kinds: Sequence[str] = PROJECTIONS,
) -> _Pass:
    n, h, config = len(layers), model.config.n_heads, model.config
    pk = {kind: np.full((n, h, n, h), np.nan, np.float32) for kind in PROJECTIONS}
    cs = {kind: values.copy() for kind, values in pk.items()}
    facts = _no_facts(n, h)
    rows = config.head_dim if exact else LEADING + 2 * PROBES
    # A layer's written rows, and all their scores
    bytes_a_layer = 4 * h * (rows * config.d_model + 2 * len(PROJECTIONS) * n * h)
    for group in _groups(n, bytes_a_layer, TASKS_ELSEWHERE if engine.elsewhere else 1):
        engine.submit(group, pass_task, get_model, layers, group, exact, device, kinds)
    shown = bar(what="wiring", unit="pair of layers", total=n * (n - 1) // 2)
    for group, value in _values(engine):
        scores, measured = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        rest = n - group.start
        scores = array_of(scores, (2, len(kinds), len(group), h, rest, h), "pairs of layers")
        place = slice(group.start, group.stop), slice(None), slice(group.start, None)
        for number, kind in enumerate(kinds):
            pk[kind][place] = scores[0, number]
            cs[kind][place] = np.sqrt(np.maximum(scores[1, number], 0))
        # A worker elsewhere may have sent anything
        for fact, by_kind in facts.items():
            known = measured.get(fact) if isinstance(measured, dict) else None
            for kind, values in by_kind.items():
                sent = known.get(kind) if isinstance(known, dict) else None
                values[group.start :] = array_of(sent, (rest, h), fact)
        shown.update(sum(n - 1 - i for i in group))
    shown.close()
    wired = Wiring(
        np.array(layers),
        pk,
        cs,
        {kind: rank.astype(int) for kind, rank in facts["rank"].items()},
        facts["concentration"],
        config.n_kv_heads,
        config.d_model - _centred(model),
        {kind: np.isfinite(pk[kind]) & exact for kind in PROJECTIONS},
    )
    return _Pass(wired, facts["largest"])


def _values(engine: Engine) -> Iterator[tuple[Any, Any]]:
    """The key and the value of every task under way; an error in a task is raised here."""
    while engine.busy:
        key, value, error = engine.next()
        if error is not None:
            raise error
        yield key, value


def _groups(n_layers: int, bytes_a_layer: int, tasks: int) -> Iterator[range]:
    """Runs of writing layers that fit `WRITTEN_BYTES`; no layer reads what the last one writes."""
    size = max(1, min(WRITTEN_BYTES // bytes_a_layer, ceil(n_layers / tasks)))
    for start in range(0, max(1, n_layers - 1), size):
        yield range(start, min(start + size, n_layers))


def _centred(model: Model) -> bool:
    norm = model.family.norms.before
    return norm is not None and norm.centred


def _spaces_of(model: Model, layer: Layer, groups: Sequence[int] | None = None) -> LayerSpaces:
    norm = attention_norm(model, layer.index)
    gain = None if norm is None else norm.gamma
    try:
        return layer_spaces(layer, centred=_centred(model), gain=gain, groups=groups)
    except TooLargeError as error:
        raise overflow(model, f"{error} of layer {layer.index}", layer.index) from None


# Measures of the heads' spaces, (H,) each
FACTS: dict[str, Callable[[Spaces], np.ndarray]] = {
    "rank": lambda spaces: spaces.of_heads(spaces.rank),
    "concentration": lambda spaces: (spaces.use**2).sum(axis=-1).ravel(),
    "largest": lambda spaces: spaces.use.max(axis=-1).ravel(),
}


def _no_facts(n: int, h: int) -> dict[str, dict[str, np.ndarray]]:
    """Zeros for every fact of what n layers of h heads write ("o") and read, (n, h) each."""
    return {fact: {kind: np.zeros((n, h)) for kind in ("o", *PROJECTIONS)} for fact in FACTS}


def pass_task(
    get_model: GetModel,
    layers: Sequence[int],
    group: range,
    exact: bool,
    device_name: str,
    kinds: Sequence[str],
) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
    """Score what a group of layers writes with what these and all later layers read.

    Returns scores (2, K, G, H, L, H) and `FACTS` of the reading layers, (L, H) each.
    """
    model, device = get_model(), open_device(device_name)
    h, n = model.config.n_heads, len(layers) - group.start
    scores = np.full((2, len(kinds), len(group), h, n, h), np.nan, np.float32)
    facts = _no_facts(n, h)
    written: list[WrittenRows] = []  # one layer's each, or several small ones'
    # rows of heads that one product takes
    together = SMALL_BYTES // (4 * model.config.head_dim * h) if device is CPU else 0

    # A function, so that one layer's spaces are freed before the next layer's are computed
    def read_by(m: int, layer: Layer) -> None:
        spaces = _spaces_of(model, layer)
        for kind, head_spaces in {"o": spaces.written, **spaces.read}.items():
            for fact, measure in FACTS.items():
                facts[fact][kind][m] = measure(head_spaces)
        if not exact:
            facts["largest"]["o"][m] = spaces.written.use[:, 0, LEADING:].max(axis=-1, initial=0)
        if written:
            _meet(written, spaces.read, kinds, device, scores[..., m, :])
        if m < len(group):
            rows = WrittenRows.whole(spaces.written, device)
            if not exact:
                rows = sketched(spaces.written, layers[group.start + m])
            _keep(written, rows, together)

    for m, layer in enumerate(_one_ahead(model.layer, layers[group.start :])):
        read_by(m, layer)
    return scores, facts


def _one_ahead(read: Callable[[int], Layer], indices: Sequence[int]) -> Iterator[Layer]:
    """The layers, each read while the one before it is worked on."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, indices[0])
        for index in indices[1:]:
            layer, coming = coming.result(), reader.submit(read, index)
            yield layer
        yield coming.result()


def _keep(written: list[WrittenRows], more: WrittenRows, together: int) -> None:
    """Add what a layer writes, joined to the last ones' while both have few rows `together`."""
    alike = written and written[-1].rows.shape[1:] == more.rows.shape[1:]
    if alike and (len(written[-1].weights) + len(more.weights)) * more.rows.shape[1] <= together:
        last = written.pop()
        rows = np.concatenate([last.rows, more.rows])
        more = WrittenRows(rows, np.concatenate([last.weights, more.weights]))
    written.append(more)


def _meet(
    written: Sequence[WrittenRows],
    read: Mapping[str, Spaces],
    kinds: Sequence[str],
    device: Device,
    scores: np.ndarray,
) -> None:
    """Fill in the scores, (2, K, G, H, H), of all that was written with what one layer reads."""
    columns = {kind: device.put(read[kind].directions) for kind in kinds}
    tasks = [(i, number) for i in range(len(written)) for number in range(len(kinds))]

    def meet(task: tuple[int, int]) -> np.ndarray:
        i, kind = task[0], kinds[task[1]]
        return pair_scores(written[i], read[kind], device, columns[kind])

    h = scores.shape[-1]
    ends = np.cumsum([len(part.weights) // h for part in written])
    for (i, number), values in zip(tasks, in_threads(meet, tasks), strict=True):
        of_layers = values.reshape(2, -1, h, h)
        scores[:, number, ends[i] - of_layers.shape[1] : ends[i]] = of_layers


def _with_the_strongest(
    model: Model, estimate: _Pass, top: int, engine: Engine, get_model: GetModel
) -> Wiring:
    """Compute exact values for all pairs that can be among the `top` of a kind by a measure."""
    wired = estimate.wiring
    first = []
    for edge in all_strongest(wired, top):
        kind, kv_head = PROJECTIONS.index(edge.kind), edge.b // wired.shared
        first.append((kind, edge.i, edge.a, edge.j, kv_head))
    _compute(model, wired, np.array(first), engine, get_model)
    doubts = np.stack([_doubts(estimate, kind, top) for kind in PROJECTIONS])  # (3, L, H, L, G)
    pairs = np.argwhere(np.isfinite(doubts))
    order = np.argsort(doubts[tuple(pairs.T)], kind="stable")
    _compute(model, wired, pairs[order[:MOST_PAIRS]], engine, get_model)
    return replace(wired, left=max(0, len(pairs) - MOST_PAIRS))


def _doubts(estimate: _Pass, kind: str, top: int) -> np.ndarray:
    """Doubt that an estimated pair is among the `top` by a measure, (L, H, L, G); NaN if ruled out.

    Pairs are compared with the last of the `top` exact ones: at least that many pairs stand out as
    much.
    """
    wired = estimate.wiring
    shape = wired.pk[kind].shape
    largest = estimate.largest["o"][:, :, None, None] * estimate.largest[kind]
    scales = {"pk": np.ones(()), "cs": largest}
    estimates = {"pk": wired.pk[kind], "cs": wired.cs[kind] ** 2}
    random = {"pk": wired.random_pk(kind), "cs": wired.random_cs_squared(kind)}
    limit = np.log(len(PROJECTIONS) * len(MEASURES) * top / FAILURE)
    least = np.full(shape, np.inf)
    for measure in MEASURES:
        edges = strongest(wired, kind, measure, top, among=wired.exact[kind])
        z = wired.z(measure, kind)
        reached = z[edges[-1].pair] if len(edges) == top else -np.inf
        needed = np.maximum(random[measure].mean + reached * random[measure].spread, 0)
        scale = np.maximum(scales[measure], 1e-30)
        with np.errstate(invalid="ignore"):
            least = np.fmin(least, doubt(estimates[measure], needed, scale))
    is_open = (least <= limit) & np.isfinite(wired.pk[kind]) & ~wired.exact[kind]
    by_kv_head = np.where(is_open, least, np.inf).reshape(*shape[:3], wired.n_kv_heads, -1)
    least = by_kv_head.min(axis=-1)
    return np.where(np.isfinite(least), least, np.nan)


def _compute(
    model: Model, wired: Wiring, pairs: np.ndarray, engine: Engine, get_model: GetModel
) -> None:
    """Put exact values into the wiring for pairs (kind, i, a, j, key-value head)."""
    pairs = np.unique(pairs.reshape(-1, 5), axis=0)
    heads, of_pair = np.unique(pairs[:, 1:3], axis=0, return_inverse=True)
    size = max(1, WRITTEN_BYTES // (4 * model.config.head_dim * model.config.d_model))
    if engine.elsewhere:
        size = max(1, min(size, ceil(len(heads) / TASKS_ELSEWHERE)))
    layers, shared = tuple(int(layer) for layer in wired.layers), wired.shared
    batches: dict[int, np.ndarray] = {}
    for start in range(0, len(heads), size):
        batch = pairs[(of_pair >= start) & (of_pair < start + size)]
        engine.submit(start, pairs_task, get_model, layers, batch)
        batches[start] = batch
    for start, values in _values(engine):
        batch = batches[start]
        values = array_of(values, (len(batch), 2, shared), "pairs of heads")
        for (number, i, a, j, group), (pk, squared) in zip(batch, values, strict=True):
            index = (i, a, j, slice(group * shared, (group + 1) * shared))
            kind = PROJECTIONS[number]
            wired.pk[kind][index], wired.cs[kind][index] = pk, np.sqrt(np.maximum(squared, 0))
            wired.exact[kind][index] = True


def pairs_task(get_model: GetModel, layers: Sequence[int], pairs: np.ndarray) -> np.ndarray:
    """Compute single pairs exactly: PK and CS^2, (n, 2, S), for the S query heads that share."""
    model = get_model()
    shared = model.config.n_heads // model.config.n_kv_heads
    values = np.full((len(pairs), 2, shared), np.nan)
    held: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # rows and weights

    def read_by(m: int) -> None:
        writers = sorted({int(a) for i, a in pairs[:, 1:3] if i == m})
        reading = pairs[:, 3] == m
        groups = {a // shared for a in writers} | set(pairs[reading, 4].tolist())
        spaces = _spaces_of(model, model.layer(layers[m]), sorted(groups))
        spots = sorted({(int(kind), int(group)) for kind, group in pairs[reading][:, [0, 4]]})

        def meet(spot: tuple[int, int]) -> None:
            number, group = spot
            positions = np.flatnonzero(reading & (pairs[:, 0] == number) & (pairs[:, 4] == group))
            heads = [held[int(i), int(a)] for i, a in pairs[positions, 1:3]]
            together = WrittenRows(*(np.concatenate(parts) for parts in zip(*heads, strict=True)))
            readers: Sequence[int] = [group]
            if PROJECTIONS[number] == "q":
                readers = range(group * shared, (group + 1) * shared)
            read = spaces.read[PROJECTIONS[number]].only(readers)
            values[positions] = pair_scores(together, read).transpose(1, 0, 2)

        list(in_threads(meet, spots))
        for a in writers:
            rows = WrittenRows.whole(spaces.written.only([a]))
            held[m, a] = rows.rows, rows.weights

    for m in sorted({int(m) for m in pairs[:, [1, 3]].ravel()}):
        read_by(m)
    return values
