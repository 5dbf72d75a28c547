"""One checkpoint of an atlas: its fingerprint from a sample of its weights.

Besides the sketches of heads (see `lineage.sketches`) it holds a few blocks of W_K, norm folded in,
as bfloat16: the number of differing bits tells relatives of one shape from strangers, cheaply (bit
distance, as in ZipLLM, arXiv 2505.06252). It also holds the ranks of each layer's value dimensions;
see `values`.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weightscope.checkpoint.config import LARGEST
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.opening import locate
from weightscope.checkpoint.provenance import is_source, source_of
from weightscope.core.engine import unexpected
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.metrics.spectra import evenly_spread
from weightscope.model.run_identity import RunIdentity, arrays_of
from weightscope.model.sources import Source
from weightscope.pairs.atlas.sampling import (
    MOST_WEIGHTS,
    keys_are_values,
    read_sample,
    sample_of,
)
from weightscope.pairs.atlas.values import value_ranks
from weightscope.pairs.lineage.probes import PUBLIC
from weightscope.pairs.lineage.sketches import (
    LONGEST_TEXT,
    MOST_HEADS,
    MOST_LAYERS,
    POINTS,
    SKETCH,
    HeadSketches,
    Sketches,
    as_bytes,
    described,
    layer_sketches,
    unit_length,
)

BLOCKS = 16  # blocks of W_K, of as many layers
VALUES = 256  # values of a block
# numbers and texts in every description
COUNTS = ("d_model", "layers", "heads", "kv_heads", "head_dim", "weights_read", "bytes")
TEXTS = ("name", "family", "tower", "config", "state")
# arrays of a fingerprint: dtype and shape, N heads in L layers, B blocks, V value dimensions
FORMS = {
    "heads": (np.int32, (3, "N")),
    "direct": (np.int8, ("N", 2, SKETCH)),
    "spectra": (np.float16, ("N", 2, POINTS)),
    "norms": (np.float32, ("N", 2)),
    "blocks": (np.uint16, ("B", VALUES)),
    "values": (np.int32, ("L", "V")),
    "about": (np.uint8, ("A",)),
}


@dataclass(frozen=True, eq=False, repr=False)
class Outline(ShowsShapes):
    """The part of a fingerprint that stays in memory: all but the sketches of its N heads."""

    about: dict[str, Any]  # sizes, and what tells whether the checkpoint is still the same
    blocks: np.ndarray  # (B, VALUES) bits of bfloat16
    sums: np.ndarray  # (L, 2 K) sums of sketches over the heads of each layer
    values: np.ndarray  # (L, V) ranks of value dimensions, centred, of unit length
    layer: np.ndarray  # (N,)
    head: np.ndarray  # (N,)
    # files that it was made from; see `source_of`
    read: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes that two checkpoints must share for their blocks to be compared."""
        return (*(self.about[name] for name in COUNTS[:5]), self.about["tower"], self.blocks.shape)

    @property
    def is_whole(self) -> bool:
        """True if all heads were read whole."""
        return bool(self.about["whole"])

    @property
    def commit(self) -> str:
        """The commit on the Hub; empty for another place."""
        commits = (file["commit"] for file in self.read.get("files", ()) if "commit" in file)
        return str(next(commits, ""))

    @property
    def is_in_part(self) -> bool:
        """True if some heads of each layer were read, and some rows of their W_VO."""
        return len(self.layer) < self.about["heads"] * len(self.sums)


@dataclass(frozen=True, eq=False, repr=False)
class Print(ShowsShapes):
    """A checkpoint's fingerprint."""

    sketches: Sketches
    blocks: np.ndarray  # (B, VALUES) bits of bfloat16
    values: np.ndarray  # (L, V) ranks of value dimensions, summed over heads; see `value_ranks`
    read: dict[str, Any] = field(default_factory=dict)  # files that it was made from

    def outline(self) -> Outline:
        """All but the sketches of heads."""
        s = self.sketches
        layer, head = s.layer.astype(np.int16), s.head.astype(np.int16)  # fewer than MOST_HEADS
        values = unit_length(self.values - self.values.mean(axis=1, keepdims=True))
        return Outline(s.about, self.blocks, s.of_layers("direct"), values, layer, head, self.read)

    def arrays(self) -> dict[str, np.ndarray]:
        """The fingerprint as plain arrays, as it is sent and kept."""
        s = self.sketches
        text = json.dumps(s.about | {"read": self.read}, sort_keys=True).encode()
        return {
            "heads": np.stack([s.layer, s.head, s.kv_head]).astype(np.int32),
            "direct": as_bytes(s.direct),
            "spectra": s.spectra.astype(np.float16),
            "norms": s.norms.astype(np.float32),
            "blocks": self.blocks,
            "values": self.values,
            "about": np.frombuffer(text, np.uint8),
        }

    @classmethod
    def of_arrays(cls, answer: Any, name: str) -> "Print":
        """The fingerprint of such arrays; a worker may run another version, or be hostile.

        Raises
        ------
        CheckpointError
            They are none.
        """
        arrays, sizes = arrays_of(answer, name), dict[str, int]()
        for key, (dtype, shape) in FORMS.items():
            array = arrays.get(key, np.empty(()))
            fits = array.dtype == dtype and array.ndim == len(shape)
            for axis, length in zip(shape, array.shape, strict=False):
                needed = sizes.setdefault(axis, length) if isinstance(axis, str) else axis
                fits = fits and length == needed
            if not fits or (array.dtype.kind == "f" and not np.isfinite(array).all()):
                numbers = f"{np.dtype(dtype)} numbers of the shape {shape}"
                raise unexpected(name, f"other {key}", numbers)
        about = _described(arrays["about"], name)
        layer, head, kv_head = arrays["heads"].astype(np.int64)
        n_layers = len(np.unique(layer))
        too_many = len(layer) > MOST_HEADS or n_layers > MOST_LAYERS
        if not len(layer) or too_many or arrays["heads"].min() < 0:
            raise unexpected(name, f"{len(layer):,} heads", f"at most {MOST_HEADS:,}")
        if sizes["L"] != n_layers or not sizes["V"]:
            raise unexpected(name, f"values of {sizes['L']:,} layers", "one row per layer")
        read = about.pop("read")
        direct = unit_length(arrays["direct"].astype(np.float32))
        none = np.empty((len(layer), 2, 0), np.float32)
        spectra = arrays["spectra"].astype(np.float32)
        norms = arrays["norms"]
        sketches = Sketches(about, layer, head, kv_head, direct, none, spectra, norms, read=read)
        return cls(sketches, arrays["blocks"], arrays["values"], read)


def _described(text: np.ndarray, name: str) -> dict[str, Any]:
    """Read a fingerprint's description; its values are shown, and sizes are computed with."""
    try:
        about = json.loads(text.tobytes())
        fits = (
            isinstance(about, dict)
            and about["vocabulary"] is None
            and is_source(about.get("read"))
            and isinstance(about.get("whole"), bool)
            and all(type(n := about.get(key)) is int and 1 <= n <= LARGEST**2 for key in COUNTS)
            and all(isinstance(about.get(key), str) for key in TEXTS)
            and all(len(about[key]) <= LONGEST_TEXT for key in TEXTS)
            and isinstance(about.get("dtypes"), list)
            and all(isinstance(dtype, str) for dtype in about["dtypes"])
        )
    except (ValueError, KeyError, RecursionError):
        fits = False
    if not fits:
        raise unexpected(name, "another description", "its sizes and files")
    return dict(about)


def make_print(
    source: Source, state: str = "", most: int = MOST_WEIGHTS
) -> tuple[dict[str, np.ndarray], int] | None:
    """Run the task of one checkpoint: its fingerprint as arrays, and the bytes fetched.

    None if it is still in `state`. A repository is read at one commit, whatever is pushed
    meanwhile; if that commit is known, nothing is fetched.
    """
    where = locate(source.source, source.revision)
    if isinstance(where, Repository):
        now = where.commit()
        if state == now:
            return None
        source = replace(source, source=where.id, revision=now)
    model = source.open()
    if not isinstance(where, Repository):
        now = RunIdentity.of_model(model).digest
        if state == now:
            return None
    if not model.attention_layers:
        needed = "a fingerprint needs attention heads"
        raise CheckpointError(f"has no attention layer; {needed}", file=model.name)
    sample = sample_of(model, most)
    parts, blocks, values = [], [], list[np.ndarray]()
    chosen = set(evenly_spread(len(sample.layers), BLOCKS).tolist())
    for place, read in enumerate(read_sample(model, sample)):
        sketches = layer_sketches(read.layer, None, PUBLIC)
        parts.append(sketches._replace(head=read.heads, kv_head=read.kv_heads))
        ranks = value_ranks(read.layer)
        is_unlike = bool(values) and len(ranks) != len(values[0])
        if is_unlike or keys_are_values(model, read.layer.index):
            ranks = np.zeros_like(values[0] if values else ranks)  # evidence of nothing
        values.append(ranks)
        if place in chosen:
            blocks.append(bits_of(read.layer.k.of(0)[0]))
    heads = HeadSketches(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    broken = np.unique(heads.layer[~np.isfinite(heads.norms).all(axis=1)])
    if len(broken):
        problem = "W_QK or W_VO of a head exceeds float32, and cannot be compared"
        raise CheckpointError(f"layer {broken[0]}: {problem}", file=model.name)
    is_whole = sample.groups is None and len(sample.layers) == len(model.attention_layers)
    about = described(model) | {
        "name": source.given or source.source,
        "head_dim": model.config.head_dim,
        "vocabulary": None,
        "whole": is_whole,
        "weights_read": sample.weights,
        "state": now,
    }
    of_heads = Sketches(about, *heads, probes=PUBLIC)
    made = Print(of_heads, np.stack(blocks), np.stack(values), source_of(model.checkpoint))
    return made.arrays(), model.checkpoint.bytes_fetched


def bits_of(w: np.ndarray) -> np.ndarray:
    """The first VALUES values of a factor (d, r) by column, as bits of bfloat16, zero-padded."""
    columns = -(-VALUES // len(w))
    values = np.asarray(w[:VALUES, :columns], np.float32).T.ravel()[:VALUES]
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    return np.pad(rounded.astype(np.uint16), (0, VALUES - len(values)))
