"""What each dimension of a key adds to attention scores (outlier-dimensions paper, section 4).

A score is S = q_m k_n' = (q_m W_K') x_n' + terms of the keys' bias, a sum over the dimensions j of x_n:
C = (q_m W_K') * x_n with q_m = x_m W_Q + b_Q (eq. 7). Means of C over queries and keys come from d x r products; no
array of all queries, keys and dimensions is made. Averages over tokens run on the arrays' own device, by the
array API standard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.attention.rotation import Rotation
from weightscope.compute.device import namespace, vecdot
from weightscope.formulas import plain
from weightscope.metrics.norms import counts_by_kind
from weightscope.outliers.stream import mask_of, over_all
from weightscope.results import ShowsShapes
from weightscope.runner.runner import Activations, Runner
from weightscope.tables import Column, Table, crossed
from weightscope.text.kinds import TokenKinds


def mean_queries(queries: Any, mask: np.ndarray, rotation: Rotation | None = None) -> Any:
    """The mean query that each key meets: mean over m of q_m R(m - n), over the queries m that may attend to key n;
    queries (..., n, r), mask (n, n) -> (..., n, r)."""
    shares = mask / np.maximum(mask.sum(axis=0), 1)  # (n, n), columns sum to 1
    weights = namespace(queries).asarray(shares, dtype=queries.dtype)
    if rotation is None:
        return weights.T @ queries
    angles = rotation.angles(np.arange(len(mask)))
    turned = rotation.turn(queries, angles, rotation.factor)
    return rotation.turn(weights.T @ turned, -angles, rotation.factor)


def summed_contributions(keys: Any, queries: Any, w_k: Any) -> Any:
    """C of eq. 7 summed over keys, each meeting its own query: sum over n of (q_n W_K')_j x_nj = (W_K * (X' Q))_j 1;
    keys (n, d), queries (H, n, r), w_k (G, d, r) -> (H, d)."""
    (h, n, r), g, xp = queries.shape, w_k.shape[0], namespace(queries)
    together = keys.T @ xp.reshape(xp.permute_dims(queries, (1, 0, 2)), (n, h * r))  # (d, H r), one large product
    of_heads = xp.reshape(together, (-1, g, h // g, r))  # (d, G, H/G, r)
    summed = vecdot(of_heads, xp.permute_dims(w_k, (1, 0, 2))[:, :, None, :])  # (d, G, H/G)
    return xp.reshape(summed, (-1, h)).T


def contributions_by_kind(keys: Any, queries: Any, w_k: Any, kinds: np.ndarray, n_kinds: int) -> Any:
    """`summed_contributions` of the keys of each kind: kinds (n,) -> (n_kinds, H, d)."""
    xp = namespace(keys)
    members = [xp.asarray(np.flatnonzero(kinds == kind)) for kind in range(n_kinds)]
    of_kinds = ((xp.take(keys, indices, axis=0), xp.take(queries, indices, axis=1)) for indices in members)
    return xp.stack([summed_contributions(*pair, w_k) for pair in of_kinds])


@dataclass(frozen=True, eq=False, repr=False)
class Contributions(ShowsShapes):
    """Means of C (eq. 7) of every layer, head and dimension by the kind of the key, against each key's mean query.

    Without 1/sqrt(d'), as in the paper.
    """

    kind_names: tuple[str, ...]
    counts: np.ndarray  # (K,): Keys
    layer_indices: np.ndarray  # (L,)
    by_kind: np.ndarray  # (L, H, d, K): NaN for kinds without tokens
    left_out: tuple[str, ...]  # Terms of the scores that differ between keys but belong to no dimension

    @property
    def apart_from(self) -> str:
        """The terms left out, for a sentence that calls sums of C scores."""
        return f", apart from {'; '.join(self.left_out)}" if self.left_out else ""

    @cached_property
    def overall(self) -> np.ndarray:
        """The mean over all keys, (L, H, d): Figs 4 and 5."""
        return over_all(self.by_kind, self.counts)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Mean over heads of |C|, (L, d)."""
        return np.abs(self.overall).mean(axis=1)

    @cached_property
    def gaps(self) -> np.ndarray:
        """What each dimension adds to the scores of a kind of key, compared with the last kind.

        -> (L, K - 1, d).

        C adds up to the score without its terms constant in the key, so a difference of sums of C is one of scores.
        """
        gaps = (self.by_kind[..., :-1] - self.by_kind[..., -1:]).mean(axis=1)  # (L, d, K - 1)
        return np.moveaxis(gaps, -1, 1)

    def table(self, dimensions: np.ndarray) -> Table:
        """Mean C of these dimensions in every head, by layer and kind of key (Table 1)."""
        rows = crossed(layer=self.layer_indices, dimension=dimensions, key=self.kind_names)
        of_heads = np.moveaxis(self.by_kind[:, :, dimensions], 1, 0)  # (H, L, dimensions, K)
        return Table([*rows, *(Column(f"head {head}", c.ravel()) for head, c in enumerate(of_heads))])

    def preferences(self, dimensions: np.ndarray) -> Table:
        """How much higher each kind of key scores than the last kind, and which dimensions cause it, by layer."""
        gaps = self.gaps.reshape(-1, self.gaps.shape[-1])  # (L (K - 1), d)
        return Table(
            [
                *crossed(layer=self.layer_indices, key=self.kind_names[:-1]),
                Column("score_above_other", gaps.sum(axis=-1), f"score above {plain(self.kind_names[-1])}"),
                Column("of_outliers", gaps[:, dimensions].sum(axis=-1), "of it, outlier dimensions"),
                *(Column(f"of {j}", gaps[:, j]) for j in dimensions),
            ]
        )


def observe_contributions(runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds) -> Contributions:
    """Run a model and average C; see `measure_outliers`."""
    n_kinds, device = len(kinds.names), runner.device
    sums = {i: np.zeros((n_kinds, layer.n_heads, runner.model.config.d_model)) for i, layer in runner.layers.items()}
    on_device = {index: (layer.on(device), device.put(key_maps(layer))) for index, layer in runner.layers.items()}

    def observe(seen: Activations) -> None:
        of_keys = kinds(seen.tokens).ravel()
        layer, w_k = on_device[seen.layer.index]
        keys, queries = keys_and_queries(layer, device.put(seen.x), mask_of(seen.attention))
        sums[seen.layer.index] += device.get(contributions_by_kind(keys, queries, w_k, of_keys, n_kinds))

    runner.observe(sequences, observe)
    counts = counts_by_kind(kinds(np.concatenate(sequences)), n_kinds)
    with np.errstate(invalid="ignore"):
        by_kind = np.stack([np.moveaxis(of_layer, 0, -1) / counts for of_layer in sums.values()])
    reasons = dict.fromkeys(reason for layer in runner.layers.values() for reason in left_out(layer))
    return Contributions(
        kinds.names, counts, np.array(list(sums)), by_kind, (*reasons, *runner.model.family.notes)
    )  # fmt: skip


def key_maps(layer: Layer) -> np.ndarray:
    """W_K of every key-value head, (G, d, r)."""
    return np.stack([layer.k.of(group)[0] for group in range(layer.n_kv_heads)])


def keys_and_queries(layer: Layer, x: Any, mask: np.ndarray) -> tuple[Any, Any]:
    """The factors of C in one layer other than W_K: keys, and the mean query that each key meets.

    x (b, n, d), mask (n, n) -> (b n, d), (H, b n, r).

    Exact under rotation and under norms of queries and keys, whose per-token scalars go to the queries' side.
    """
    (b, n, d), xp = x.shape, namespace(x)
    flat = xp.reshape(x, (b * n, d))
    queries = layer.queries(flat)  # (H, b n, r)
    r = queries.shape[-1]
    queries = mean_queries(xp.reshape(queries, (-1, b, n, r)), mask, layer.rotation)
    queries = xp.reshape(queries, (-1, b * n, r))
    if layer.k_norm is not None:
        of_keys = xp.repeat(layer.scalars(flat)[1], layer.n_heads // layer.n_kv_heads, axis=0)  # (H, b n)
        queries[..., : layer.k_norm.dims] *= of_keys[..., None]
    return layer.normalised(flat), queries


def left_out(layer: Layer) -> Iterator[str]:
    """Terms of a layer's scores that differ between keys and are in no C."""
    shifted = layer.k_norm is not None and layer.k_norm.shift is not None
    biased = shifted or any(layer.k.of(group)[1].any() for group in range(layer.n_kv_heads))
    if biased and (layer.rotation is not None or layer.k_norm is not None):
        yield "the keys' bias, which varies with the key under rotation or a norm of keys"
    if layer.gain is not None:
        yield "the effect of norms after rotation beyond their mean over a pair of dimensions"
    if layer.temperature is not None:
        yield "the factor that scales queries by their position"
    if layer.relative:
        yield "scores of queries and keys with embeddings of distances"
    if layer.additive is not None:
        yield "terms that depend on distance and are added to scores"
    if layer.softcap is not None:
        yield "the softcap: C adds up to the scores before it"
    if layer.clip is not None:
        yield "the clipping of keys"
