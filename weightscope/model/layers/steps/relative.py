"""Keys and values of distances, added to the tokens'; see `layers.positions`."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.config.rules import position_kinds
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Affine
from weightscope.model.layers.positions import RelativeKeys, RelativeValues
from weightscope.model.layers.steps import Place, Reads, Step
from weightscope.model.rows.cells import LayerTensors, StoredNorm

Terms = tuple[RelativeKeys, ...]


@dataclass(frozen=True)
class Relative(Step):
    """A mechanism of keys of distances."""

    place = Place.POSITIONS
    portable = True

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        """The layer's keys of distances."""
        raise NotImplementedError

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, relative=self.terms(tensors, config, model))

    def caveat(self, layer: Layer) -> str:
        if not layer.relative:
            return ""
        terms = "relative-position terms, of one token and the distance to the other"
        return f"{terms} (layer.relative)"


def _biased(layer: Layer, tensors: LayerTensors, name: str) -> Layer:
    """Add a tensor (H, r) to the layer's queries."""
    if not isinstance(layer.q, Affine):
        return layer
    more = tensors.read(name, (layer.n_heads, layer.head_dim))
    return replace(layer, q=replace(layer.q, bias=layer.q.bias + more))


def interleaved_sinusoids(distances: np.ndarray, width: int) -> np.ndarray:
    """Sine and cosine of each frequency side by side, (D,) distances -> (D, width)."""
    angles = np.outer(distances, 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(len(distances), -1)[
        :, :width
    ]


def halved_sinusoids(distances: np.ndarray, width: int) -> np.ndarray:
    """Sines of all frequencies, then cosines, (D,) distances -> (D, width)."""
    angles = np.outer(distances, 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=-1)


@dataclass(frozen=True)
class ProjectedDistances(Relative):
    """Transformer-XL's projected sinusoids; queries have another bias for them than for keys."""

    name = "projected_distances"

    module: str  # the projection
    content: str  # bias (H, r) of queries that meet tokens' keys
    position: str  # bias (H, r) of queries that meet distances' keys

    def reads(self) -> Reads:
        return Reads(modules=(self.module,), tensors=(self.content, self.position))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        d, h, r = config.d_model, config.n_heads, config.head_dim
        w = tensors.read(self.module + ".weight", (h * r, d)).reshape(h, r, d).transpose(0, 2, 1)
        bias = tensors.read(self.position, (h, r)) - tensors.read(self.content, (h, r))
        return (RelativeKeys(lambda distances: interleaved_sinusoids(distances, d) @ w, bias),)

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return _biased(super().apply(layer, tensors, config, model), tensors, self.content)


@dataclass(frozen=True)
class XLNetDistances(Relative):
    """XLNet's, as Transformer-XL's; no further away than clamp_len where there is one."""

    name = "xlnet_distances"

    module: str = "rel_attn"

    def reads(self) -> Reads:
        return Reads(
            tensors=tuple(f"{self.module}.{name}" for name in ("r", "r_r_bias", "r_w_bias"))
        )

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        d, h, r = config.d_model, config.n_heads, config.head_dim
        w = tensors.read(f"{self.module}.r", (d, h, r)).transpose(1, 0, 2)
        of_position = tensors.read(f"{self.module}.r_r_bias", (h, r))
        of_content = tensors.read(f"{self.module}.r_w_bias", (h, r))
        furthest = config.number("clamp_len", default=-1, smallest=-1)

        def keys(distances: np.ndarray) -> np.ndarray:
            if furthest > 0:
                distances = np.clip(distances, -furthest, furthest)
            return halved_sinusoids(distances, d) @ w

        return (RelativeKeys(keys, of_position - of_content),)

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        layer = super().apply(layer, tensors, config, model)
        return _biased(layer, tensors, f"{self.module}.r_w_bias")


@dataclass(frozen=True)
class ListedDistances(Relative):
    """Shaw's learned key for each distance up to a bound on either side, shared by heads."""

    name = "listed_distances"

    module: str  # the table
    before: str  # config key of the furthest key before the query that has a row to itself
    after: str  # likewise after the query

    def reads(self) -> Reads:
        return Reads(modules=(self.module,))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        before, after = config.count(self.before), config.count(self.after)
        table = tensors.read(self.module + ".weight", (before + after + 1, config.head_dim))

        def row(distances: np.ndarray) -> np.ndarray:
            return np.clip(-distances, -before, after) + before

        return (RelativeKeys.of_table(table[None], row),)


@dataclass(frozen=True)
class SharedDistances(Relative):
    """SpeechT5's learned key for each distance, shared by all layers and heads."""

    name = "shared_distances"

    # in the model: keys of the distances from `most` after the query to `most` - 1 before it
    table: str
    most: str  # config key

    def reads(self) -> Reads:
        return Reads(shared=(self.table,))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        most = config.count(self.most)
        table = model.read(self.table, (2 * most, config.head_dim))

        def row(distances: np.ndarray) -> np.ndarray:
            return np.clip(distances, -most, most - 1) + most

        return (RelativeKeys.of_table(table[None], row),)


def _near(
    tensors: LayerTensors, config: ModelConfig, name: str
) -> Callable[[np.ndarray], np.ndarray]:
    """VITS's table of distances up to `window_size` on either side; zero further away."""
    most = config.count("window_size")
    table = np.pad(tensors.read(name, (1, 2 * most + 1, config.head_dim)), ((0, 0), (1, 1), (0, 0)))
    return lambda distances: table[:, np.clip(-distances, -most - 1, most + 1) + most + 1]


@dataclass(frozen=True)
class NearKeys(Relative):
    """VITS's keys of distances."""

    name = "near_keys"

    tensor: str

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        most = config.count("window_size")
        near = _near(tensors, config, self.tensor)
        return (RelativeKeys(near, every=near(np.arange(-most, most + 1))),)


@dataclass(frozen=True)
class NearValues(Step):
    """VITS's values of distances, added to the tokens'."""

    name = "near_values"
    place = Place.GATHERED

    tensor: str

    def reads(self) -> Reads:
        return Reads(tensors=(self.tensor,))

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        return replace(layer, relative_values=RelativeValues(_near(tensors, config, self.tensor)))

    def caveat(self, layer: Layer) -> str:
        return "values of distances, which a head adds to the tokens' (layer.relative_values)"


@dataclass(frozen=True)
class DistancesInBlocks(Relative):
    """Granite Speech's: Shaw's keys, for at least as many distances as a block of tokens has."""

    name = "distances_in_blocks"

    module: str  # the table

    def reads(self) -> Reads:
        return Reads(modules=(self.module,))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        most, block = config.size("max_pos_emb"), config.size("context_size")
        table = tensors.read(self.module + ".weight", (2 * most + 1, config.head_dim))
        block = min(block, most)

        def row(distances: np.ndarray) -> np.ndarray:
            return np.clip(distances, -block, block) + most

        return (RelativeKeys.of_table(table[None], row),)


@dataclass(frozen=True)
class RowsAndColumns(Relative):
    """SAM's keys of distances: one by rows, one by columns (MViTv2, eq. 5).

    The layer's tokens are a window of the image, or all of it, row by row.
    """

    name = "rows_and_columns"

    rows: str
    columns: str

    def reads(self) -> Reads:
        return Reads(tensors=(self.rows, self.columns))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        r = config.head_dim
        tables = [tensors.read(name, (None, r)) for name in (self.rows, self.columns)]
        sides = [(len(table) + 1) // 2 for table in tables]

        def keys(axis: int) -> RelativeKeys:
            # the model does not scale this term
            table, side = tables[axis] * np.float32(r**0.5), sides[axis]

            def at(distances: np.ndarray) -> np.ndarray:
                if len(distances) and max(-distances[0], distances[-1]) >= side:
                    raise CheckpointError(
                        f"tokens are more than this layer's window of {sides[0]} x {sides[1]}"
                    )
                return table[None, distances + side - 1]

            def coordinate(positions: np.ndarray) -> np.ndarray:
                if positions.ndim > 1:
                    return positions[:, axis]
                return np.asarray(divmod(positions, sides[1]))[axis]

            return RelativeKeys(at, coordinate=coordinate, every=table[None])

        return keys(0), keys(1)


@dataclass(frozen=True)
class Disentangled(Relative):
    """DeBERTa's table of distances, projected to keys and to queries, as pos_att_type asks for."""

    name = "disentangled"

    table: str  # in the model, outside its layers
    key: str  # a layer's projection to keys
    query: str  # likewise, to queries
    key_bias: bool = True  # bias of the projection to keys
    # the projections of tokens, which replace them where share_att_key says so
    shared: tuple[str, str] | None = None

    @property
    def _norm(self) -> str:
        """The module of the table's norm, where norm_rel_ebd asks for one."""
        return self.table.rpartition(".")[0] + ".LayerNorm"

    def reads(self) -> Reads:
        norm = (f"{self._norm}.weight", f"{self._norm}.bias") if self.shared else ()
        return Reads(modules=(self.key, self.query), shared=(f"{self.table}.weight", *norm))

    def terms(self, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Terms:
        d, h, r = config.d_model, config.n_heads, config.head_dim
        most = config.number("max_relative_positions", default=-1, smallest=-1)
        most = int(most) if most >= 1 else config.size("max_position_embeddings")
        buckets = -1
        if self.shared:
            buckets = int(config.number("position_buckets", default=-1, smallest=-1))
        # no distances are left for logarithmic ones
        if buckets > 0 and not 2 <= buckets < 2 * (most - 1):
            raise config.error(
                "position_buckets",
                f"2 or more, and fewer than {2 * (most - 1)}: twice the distances",
            )
        span = buckets if buckets > 0 else most
        rows = model.read(self.table + ".weight", (2 * span, d))
        if self.shared and "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower():
            rows = StoredNorm(self._norm, centred=True, bias=True).read(model, config)(rows)

        def which(distances: np.ndarray) -> np.ndarray:
            near = distances if buckets <= 0 else logarithmic(distances, buckets, most)
            return np.clip(near + span, 0, 2 * span - 1)

        def projected(module: str, *, bias: bool) -> np.ndarray:
            b = tensors.read(module + ".bias", (h * r,)) if bias else 0.0
            w = tensors.read(module + ".weight", (h * r, d))
            return (rows @ w.T + b).reshape(2 * span, h, r).transpose(1, 0, 2)

        key, query, bias = self.key, self.query, self.key_bias
        if self.shared and config.get("share_att_key"):
            (key, query), bias = self.shared, True
        kinds = position_kinds(config)
        terms = []
        if "c2p" in kinds:
            keys = projected(key, bias=bias)
            terms.append(RelativeKeys.of_table(keys, which))
        if "p2c" in kinds:
            queries = projected(query, bias=True)
            terms.append(RelativeKeys.of_table(queries, which, of_keys=True))
        return tuple(terms)


def logarithmic(distances: np.ndarray, buckets: int, most: int) -> np.ndarray:
    """DeBERTa-v2's buckets: small distances as they are, larger ones by logarithm, up to `most`."""
    middle = buckets // 2
    size = np.where(np.abs(distances) < middle, middle - 1, np.abs(distances)).astype(np.float32)
    exact = np.log(np.maximum(size, 1) / middle) / np.log((most - 1) / middle) * (middle - 1)
    nearest = np.rint(exact)
    tied = (np.abs(exact - nearest) < 1e-6 * nearest) & (size > middle) & (size != most - 1)
    # rounding decides in transformers, which has float32
    if (tied & (nearest + middle < buckets)).any():
        distance = int(size[tied].min())
        raise CheckpointError(
            f"distance {distance} lies between two of {buckets} buckets of {most} positions"
        )
    steps = np.where(size == most - 1, middle - 1, np.ceil(exact))
    return np.where(size <= middle, distances, (steps + middle) * np.sign(distances)).astype(int)
