"""Both measures of all pairs of heads: the passes over a checkpoint's layers, as tasks for an engine.

In a pass, what some layers write is held, while these and all later layers are read one at a time. A model that is
small enough is computed exactly so, and any model on a device. In a larger one a pass with sketches comes first
(`sketches`); then the strongest pairs by their estimates are computed, and then all others that may be stronger than
the last of these.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.circuitry.edges import MEASURES, all_strongest, strongest
from weightscope.circuitry.products import Written, pair_scores
from weightscope.circuitry.sketches import FAILURE, LEADING, PROBES, doubt, sketched
from weightscope.circuitry.spaces import LayerSpaces, Spaces, layer_spaces
from weightscope.circuitry.wiring import KINDS, Wiring
from weightscope.device import CPU, Device, open_device
from weightscope.engine import Engine, ThisProcess
from weightscope.errors import CheckpointError, TooLargeError
from weightscope.model import Model
from weightscope.overflow import overflow
from weightscope.parallel import in_threads
from weightscope.progress import bar
from weightscope.shapes import ShowsShapes

WRITTEN_BYTES = 224 << 20  # of what is written, held at a time
SMALL_BYTES = 1 << 20  # of the product of two layers; smaller ones are made of several layers at once
TASKS_ELSEWHERE = 8  # at least, where other processes share the work
EXACT_UP_TO = 10**13  # multiplications; a 7B model's 10^14 would take two cores half an hour
MOST_PAIRS = 20_000  # that are computed one by one
GetModel = Callable[[], Model]


def wiring(
    model: Model,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    top: int = 20,
    engine: Engine | None = None,
    on_worker: GetModel | None = None,
) -> Wiring:
    """Projection kernel and composition score of every pair of heads in different layers.

    Parameters
    ----------
    model : Model
    layers : sequence of int, optional
        Only these; all that are attention by default.
    device : str
        Where the products are computed; see `open_device`. On another than "cpu" all are exact.
    top : int
        Pairs of each kind that stand out most, by each measure, which are exact in a model of any size.
    engine : Engine, optional
        Where tasks run; in this process if not given.
    on_worker : function returning the model, optional
        For an engine outside this process.

    Raises
    ------
    CheckpointError
        The model's heads read another stream than the one they write to.
    """
    if model.family.memory is not None:
        problem = "is cross-attention: its heads read what an encoder made, not what earlier heads write"
        raise CheckpointError(problem, file=model.checkpoint.name)
    if engine is None:
        with ThisProcess() as own:
            return wiring(model, layers, device, top, own)
    indices = tuple(sorted(set(model.attention_layers if layers is None else layers)))
    get_model = on_worker if engine.elsewhere and on_worker is not None else partial(_itself, model)
    exact = device != "cpu" or multiplications(model, len(indices)) <= EXACT_UP_TO
    exact = exact or model.config.head_dim <= LEADING + 2 * PROBES
    found = _all_pairs(model, indices, device, exact, engine, get_model)
    return found.wiring if exact else _with_the_strongest(model, found, top, engine, get_model)


def _itself(model: Model) -> Model:
    return model


def multiplications(model: Model, n_layers: int) -> int:
    """What all pairs of so many layers take."""
    config = model.config
    return (
        n_layers * (n_layers - 1) // 2 * config.n_heads * config.head_dim**2 * config.d_model
        * (config.n_heads + 2 * config.n_kv_heads)
    )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class _Pass(ShowsShapes):
    """What a pass found: the wiring, and the largest shares of directions that bound its estimates."""

    wiring: Wiring
    largest: dict[str, np.ndarray]


def _all_pairs(
    model: Model, layers: tuple[int, ...], device: str, exact: bool, engine: Engine, get_model: GetModel
) -> _Pass:
    n, h, config = len(layers), model.config.n_heads, model.config
    pk, cs = ({kind: np.full((n, h, n, h), np.nan, np.float32) for kind in KINDS} for _ in range(2))
    facts = {fact: {kind: np.zeros((n, h)) for kind in ("o", *KINDS)} for fact in FACTS}
    rows = config.head_dim if exact else LEADING + 2 * PROBES
    bytes_a_layer = 4 * h * (rows * config.d_model + 2 * len(KINDS) * n * h)  # what is written, and all its scores
    for group in _groups(n, bytes_a_layer, TASKS_ELSEWHERE if engine.elsewhere else 1):
        engine.submit(group, pass_task, get_model, layers, group, exact, device)
    shown = bar(what="wiring", unit="pair of layers", total=n * (n - 1) // 2)
    for group, value in _values(engine):
        scores, own = value
        for number, kind in enumerate(KINDS):
            pk[kind][group.start : group.stop, :, group.start :] = scores[0, number]
            cs[kind][group.start : group.stop, :, group.start :] = np.sqrt(np.maximum(scores[1, number], 0))
        for fact, kind in ((fact, kind) for fact in FACTS for kind in ("o", *KINDS)):
            facts[fact][kind][group.start :] = own[fact][kind]
        shown.update(sum(n - 1 - i for i in group))
    shown.close()
    wired = Wiring(
        np.array(layers), pk, cs, {kind: rank.astype(int) for kind, rank in facts["rank"].items()},
        facts["concentration"], config.n_kv_heads, config.d_model - _centred(model),
        {kind: np.isfinite(pk[kind]) & exact for kind in KINDS},
    )  # fmt: skip
    return _Pass(wired, facts["largest"])


def _values(engine: Engine) -> Iterator[tuple[Any, Any]]:
    """The key and the value of every task that is under way; what one raises is raised."""
    while engine.busy:
        key, value, error = engine.next()
        if error is not None:
            raise error
        yield key, value


def _groups(n_layers: int, bytes_a_layer: int, tasks: int) -> Iterator[range]:
    """Runs of layers that write, which fit `WRITTEN_BYTES`; the last layer writes for nobody here."""
    size = max(1, min(WRITTEN_BYTES // bytes_a_layer, ceil(n_layers / tasks)))
    for start in range(0, max(1, n_layers - 1), size):
        yield range(start, min(start + size, n_layers))


def _centred(model: Model) -> bool:
    return model.family.norm is not None and model.family.norm.centred


def _spaces_of(model: Model, layer: Layer, groups: Sequence[int] | None = None) -> LayerSpaces:
    try:
        return layer_spaces(layer, centred=_centred(model), groups=groups)
    except TooLargeError as error:
        raise overflow(model, f"{error} of layer {layer.index}", layer.index) from None


FACTS: dict[str, Callable[[Spaces], np.ndarray]] = {
    "rank": lambda own: own.of_heads(own.rank),
    "concentration": lambda own: (own.use**2).sum(axis=-1).ravel(),
    "largest": lambda own: own.use.max(axis=-1).ravel(),
}  # of a head's spaces, (H,) each


def pass_task(
    get_model: GetModel, layers: Sequence[int], group: range, exact: bool, device_name: str
) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
    """The task that a pass consists of: the layers of a group write, they and all later ones read.

    Returns
    -------
    (2, 3, G, H, L, H) float32 array
        PK and CS^2 by kind for the layers of the group and those from its first on; NaN where no later layer reads.
    dict of dict of (L, H) arrays
        `FACTS` of the layers from the group's first on.
    """
    model, device = get_model(), open_device(device_name)
    h, n = model.config.n_heads, len(layers) - group.start
    scores = np.full((2, len(KINDS), len(group), h, n, h), np.nan, np.float32)
    facts = {fact: {kind: np.zeros((n, h)) for kind in ("o", *KINDS)} for fact in FACTS}
    written: list[Written] = []  # each of one layer, or of some that are small
    together = SMALL_BYTES // (4 * model.config.head_dim * h) if device is CPU else 0  # rows of heads

    def read_by(m: int, layer: Layer) -> None:
        """In a function of its own, so that one layer's spaces are let go before the next one's are found."""
        spaces = _spaces_of(model, layer)
        for kind, own in {"o": spaces.written, **spaces.read}.items():
            for fact, of in FACTS.items():
                facts[fact][kind][m] = of(own)
        if not exact:
            facts["largest"]["o"][m] = spaces.written.use[:, 0, LEADING:].max(axis=-1, initial=0)
        if written:
            _meet(written, spaces, device, scores[..., m, :])
        if m < len(group):
            whole = Written.whole(spaces.written, device)
            _keep(written, whole if exact else sketched(spaces.written, layers[group.start + m]), together)

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


def _keep(written: list[Written], own: Written, together: int) -> None:
    """Add what a layer writes: to what the last ones write where all have so few rows, else by itself."""
    alike = written and written[-1].rows.shape[1:] == own.rows.shape[1:]
    if alike and (len(written[-1].weights) + len(own.weights)) * own.rows.shape[1] <= together:
        last = written.pop()
        own = Written(np.concatenate([last.rows, own.rows]), np.concatenate([last.weights, own.weights]))
    written.append(own)


def _meet(written: Sequence[Written], spaces: LayerSpaces, device: Device, scores: np.ndarray) -> None:
    """Write the scores of all that was written with what one layer reads into their place, (2, 3, G, H, H)."""
    columns = {kind: device.put(read.directions) for kind, read in spaces.read.items()}
    tasks = [(i, number) for i in range(len(written)) for number in range(len(KINDS))]

    def meet(task: tuple[int, int]) -> np.ndarray:
        i, kind = task[0], KINDS[task[1]]
        return pair_scores(written[i], spaces.read[kind], device, columns[kind])

    h = scores.shape[-1]
    ends = np.cumsum([len(own.weights) // h for own in written])
    for (i, number), found in zip(tasks, in_threads(meet, tasks), strict=True):
        of_layers = found.reshape(2, -1, h, h)
        scores[:, number, ends[i] - of_layers.shape[1] : ends[i]] = of_layers


def _with_the_strongest(model: Model, found: _Pass, top: int, engine: Engine, get_model: GetModel) -> Wiring:
    """The wiring with exact values for all pairs that can be among the `top` of a kind by a measure."""
    wired = found.wiring
    chosen = all_strongest(wired, top)
    first = np.array([(KINDS.index(edge.kind), edge.i, edge.a, edge.j, edge.b // wired.shared) for edge in chosen])
    _compute(model, wired, first, engine, get_model)
    doubts = np.stack([_doubts(found, kind, top) for kind in KINDS])  # (3, L, H, L, G)
    pairs = np.argwhere(np.isfinite(doubts))
    order = np.argsort(doubts[tuple(pairs.T)], kind="stable")
    _compute(model, wired, pairs[order[:MOST_PAIRS]], engine, get_model)
    return replace(wired, left=max(0, len(pairs) - MOST_PAIRS))


def _doubts(found: _Pass, kind: str, top: int) -> np.ndarray:
    """How doubtful it is that a pair that is not exact is among the `top` by a measure, (L, H, L, G); NaN beyond doubt.

    Compared is with the last of the `top` that are exact: no fewer than so many pairs stand out as much.
    """
    wired = found.wiring
    shape = wired.pk[kind].shape
    scales = {"pk": np.ones(()), "cs": found.largest["o"][:, :, None, None] * found.largest[kind]}
    estimates = {"pk": wired.pk[kind], "cs": wired.cs[kind] ** 2}
    random = {"pk": wired.random_pk(kind), "cs": wired.random_cs_squared(kind)}
    limit = np.log(len(KINDS) * len(MEASURES) * top / FAILURE)
    least = np.full(shape, np.inf)
    for measure in MEASURES:
        edges = strongest(wired, kind, measure, top, among=wired.exact[kind])
        z = wired.z(measure, kind)
        reached = z[edges[-1].pair] if len(edges) == top else -np.inf
        needed = np.maximum(random[measure].mean + reached * random[measure].spread, 0)
        with np.errstate(invalid="ignore"):
            least = np.fmin(least, doubt(estimates[measure], needed, np.maximum(scales[measure], 1e-30)))
    open_question = (least <= limit) & np.isfinite(wired.pk[kind]) & ~wired.exact[kind]
    least = np.where(open_question, least, np.inf).reshape(*shape[:3], wired.n_kv_heads, -1).min(axis=-1)
    return np.where(np.isfinite(least), least, np.nan)


def _compute(model: Model, wired: Wiring, pairs: np.ndarray, engine: Engine, get_model: GetModel) -> None:
    """Put exact values into the wiring for pairs (kind, i, a, j, key-value head), for all query heads that share it."""
    pairs = np.unique(pairs.reshape(-1, 5), axis=0)
    heads, of_pair = np.unique(pairs[:, 1:3], axis=0, return_inverse=True)
    size = max(1, WRITTEN_BYTES // (4 * model.config.head_dim * model.config.d_model))
    if engine.elsewhere:
        size = max(1, min(size, ceil(len(heads) / TASKS_ELSEWHERE)))
    layers, shared = tuple(int(layer) for layer in wired.layers), wired.shared
    for start in range(0, len(heads), size):
        own = pairs[(of_pair >= start) & (of_pair < start + size)]
        engine.submit(start, pairs_task, get_model, layers, own)
    for _, (own, values) in _values(engine):
        for (number, i, a, j, group), (pk, squared) in zip(own, values, strict=True):
            at = (i, a, j, slice(group * shared, (group + 1) * shared))
            kind = KINDS[number]
            wired.pk[kind][at], wired.cs[kind][at] = pk, np.sqrt(np.maximum(squared, 0))
            wired.exact[kind][at] = True


def pairs_task(get_model: GetModel, layers: Sequence[int], pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The task that computes single pairs exactly: PK and CS^2, (n, 2, S), of what S query heads read together."""
    model = get_model()
    shared = model.config.n_heads // model.config.n_kv_heads
    values = np.full((len(pairs), 2, shared), np.nan)
    held: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # rows and weights

    def read_by(m: int) -> None:
        writers = sorted({int(a) for i, a in pairs[:, 1:3] if i == m})
        reading = pairs[:, 3] == m
        groups = sorted({a // shared for a in writers} | {int(group) for group in pairs[reading, 4]})
        spaces = _spaces_of(model, model.layer(layers[m]), groups)
        spots = sorted({(int(kind), int(group)) for kind, group in pairs[reading][:, [0, 4]]})

        def meet(spot: tuple[int, int]) -> None:
            number, group = spot
            at = np.flatnonzero(reading & (pairs[:, 0] == number) & (pairs[:, 4] == group))
            heads = [held[int(i), int(a)] for i, a in pairs[at, 1:3]]
            together = Written(*(np.concatenate(parts) for parts in zip(*heads, strict=True)))
            own = range(group * shared, (group + 1) * shared) if KINDS[number] == "q" else [group]
            values[at] = pair_scores(together, spaces.read[KINDS[number]].only(own)).transpose(1, 0, 2)

        list(in_threads(meet, spots))
        for a in writers:
            whole = Written.whole(spaces.written.only([a]))
            held[m, a] = whole.rows, whole.weights

    for m in sorted({int(m) for m in pairs[:, [1, 3]].ravel()}):
        read_by(m)
    return pairs, values
