"""Is a number usual? How the heads of other checkpoints are distributed, and where a head stands among them.

A percentile here is of checkpoints, not of heads. In each checkpoint the share of heads below a value is counted, among
heads of the same third of its layers; the percentile is the mean of these shares. Every checkpoint counts as one
however many heads it has, and a value above all heads of 13 of 14 checkpoints and above half of those of the last is at
the 96th percentile. Values that are equal count half. Ranks are compared as shares of a head's width, since no head has
a rank above it; everything else is compared as it is, whatever the model's width.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from weightscope.audits.measures import MeasuredHeads
from weightscope.errors import CheckpointError
from weightscope.regular import regular_file
from weightscope.shapes import ShowsShapes
from weightscope.tables import Column, Table
from weightscope.writing import new_file

THIRDS = ("first", "middle", "last")  # of a checkpoint's attention layers
SHARES = np.linspace(0, 1, 21)  # of a checkpoint's heads, at which its distribution is kept
OF_WIDTH = ("stable_rank", "effective_rank", "participation_ratio")  # compared as shares of a head's width
OWN = Path(__file__).with_name("reference.npz")  # what comes with the package; reference.csv beside it is its list
LARGEST = 64 << 20  # bytes of such a file, packed and unpacked
UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, TypeError, MemoryError, RecursionError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A checkpoint that a reference is made of.

    Attributes
    ----------
    name : str
    source, licence, origin : str
        What it was opened as, what its weights are licensed under, and where they are from.
    sha256 : str
        Of its weights; of a single file its own.
    size : int
        Bytes of them.
    family : str
    layers, heads, d_model : int
    """

    name: str
    source: str
    licence: str
    origin: str
    sha256: str
    size: int
    family: str
    layers: int
    heads: int
    d_model: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not field.type:
                raise TypeError(f"{field.name} is of another type")


@dataclass(frozen=True, eq=False, repr=False)
class Reference(ShowsShapes):
    """How measures of heads are distributed in some checkpoints, by third of their layers.

    Attributes
    ----------
    checkpoints : tuple of Known
    measures : tuple of str
    quantiles : float32 array of shape (checkpoints, measures, 3, 21)
        Of the heads of a checkpoint and a third, at `SHARES`; NaN where it has none there, or the measure is unknown.
    """

    checkpoints: tuple[Known, ...]
    measures: tuple[str, ...]
    quantiles: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[tuple[Known, MeasuredHeads]]) -> "Reference":
        """Of checkpoints that have been measured."""
        known, spread = zip(*((one, distribution(heads)) for one, heads in parts), strict=True)
        measures = tuple(dict.fromkeys(name for own in spread for name in own))
        unknown = np.full((len(THIRDS), len(SHARES)), np.nan, np.float32)
        return cls(known, measures, np.array([[own.get(name, unknown) for name in measures] for own in spread]))

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """What `save` has written.

        Raises
        ------
        CheckpointError
            The file is not there, or is not such a file.
        """
        path = Path(path)
        try:
            packed = path.stat().st_size
            with regular_file(path) as file, zipfile.ZipFile(file) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
                if max(packed, unpacked) > LARGEST:
                    raise CheckpointError(f"has more than {LARGEST >> 20} MB; a reference is far smaller", file=path)
            with regular_file(path) as file, np.load(file, allow_pickle=False) as stored:
                known = tuple(Known(**one) for one in json.loads(str(stored["checkpoints"])))
                measures, quantiles = tuple(map(str, stored["measures"])), stored["quantiles"]
        except FileNotFoundError:
            raise CheckpointError("there is no such reference; `weightscope reference` makes one", file=path) from None
        except UNREADABLE as error:
            problem = f"is no reference as `weightscope reference` writes it ({type(error).__name__})"
            raise CheckpointError(problem, file=path) from None
        wanted = (len(known), len(measures), len(THIRDS), len(SHARES))
        if quantiles.shape != wanted or quantiles.dtype != np.float32 or not known:
            problem = f"has quantiles of {quantiles.dtype} {quantiles.shape}; float32 {wanted} were expected"
            raise CheckpointError(problem, file=path)
        with np.errstate(invalid="ignore"):
            if (np.diff(quantiles, axis=-1) < 0).any():
                raise CheckpointError("has quantiles that do not ascend; make it again", file=path)
        return cls(known, measures, quantiles)

    def save(self, path: Path) -> None:
        """Write it, numbers and names only, as .npz."""
        text = json.dumps([asdict(one) for one in self.checkpoints], ensure_ascii=False)
        with new_file(path) as file:
            np.savez_compressed(
                file, checkpoints=np.array(text), measures=np.array(self.measures), quantiles=self.quantiles
            )

    def without(self, sha256: str) -> "Reference":
        """The others: a checkpoint is not compared with itself."""
        kept = [i for i, one in enumerate(self.checkpoints) if one.sha256 != sha256]
        return Reference(tuple(self.checkpoints[i] for i in kept), self.measures, self.quantiles[kept])

    def percentiles(self, measure: str, third: int, values: np.ndarray) -> tuple[np.ndarray, int]:
        """Where values stand, from 0 to 100, and among how many checkpoints.

        Parameters
        ----------
        measure : str
        third : int
            0, 1 or 2.
        values : array
            As `comparable` gives them.

        Returns
        -------
        array of the same shape
            NaN where a value is, or nothing is known.
        int
        """
        if measure not in self.measures:
            return np.full(values.shape, np.nan), 0
        known = self.quantiles[:, self.measures.index(measure), third]  # (C, 21)
        known = known[~np.isnan(known).any(axis=1)]
        if not len(known):
            return np.full(values.shape, np.nan), 0
        return 100 * np.mean([share_below(own, values) for own in known], axis=0), len(known)

    @property
    def table(self) -> Table:
        """A row a checkpoint: what it is, where from, under which licence. Its csv() is a list to make it of again."""
        return Table(
            [Column(field.name, [getattr(one, field.name) for one in self.checkpoints]) for field in fields(Known)]
        )


def compared(heads: MeasuredHeads) -> list[str]:
    """The measures that a reference has: those that a page maps."""
    return [measure.name for measure in heads.measures if measure.scale]


def comparable(heads: MeasuredHeads, name: str) -> np.ndarray:
    """A measure's values (L, H) as they are compared between checkpoints."""
    return heads.grid(name) / width_of(heads, name)


def width_of(heads: MeasuredHeads, name: str) -> int:
    """What a measure is divided by: the head's width for ranks, else 1."""
    map_name, _, measure = name.partition("_")
    return heads.arrays[f"{map_name}_singular_values"].shape[-1] if measure in OF_WIDTH else 1


def thirds_of(layers: Sequence[int], every: Sequence[int]) -> list[int]:
    """The third of the depth that each of some layers is in, among `every` attention layer; one alone is the middle."""
    places = {layer: int(3 * (i + 0.5) / len(every)) for i, layer in enumerate(every)}
    return [places[layer] for layer in layers]


def distribution(heads: MeasuredHeads) -> dict[str, np.ndarray]:
    """Quantiles of every measure by third of the layers, (3, 21) each; NaN for a third without a known value."""
    layers, found = heads.layers.tolist(), {}
    thirds = np.array(thirds_of(layers, layers))
    for name in compared(heads):
        values, own = comparable(heads, name), np.full((len(THIRDS), len(SHARES)), np.nan, np.float32)
        for third in range(len(THIRDS)):
            known = values[thirds == third]
            if (known := known[~np.isnan(known)]).size:
                own[third] = np.quantile(known, SHARES, method="nearest")  # no mean of a finite and an infinite value
        found[name] = own
    return found


def share_below(quantiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The share of a distribution below values, between 0 and 1; what is equal counts half, NaN for NaN.

    Parameters
    ----------
    quantiles : (21,) array
        At `SHARES`, ascending.
    values : array
    """
    with np.errstate(over="ignore"):  # what is past float32 is past all that it holds
        rounded = np.asarray(values, np.float32)  # as quantiles are, so that equal is equal
    left, right = (np.searchsorted(quantiles, rounded, side) for side in ("left", "right"))
    low, high = np.maximum(left - 1, 0), np.minimum(left, len(quantiles) - 1)
    step = quantiles[high] - quantiles[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        within = np.where(np.isfinite(step) & (step > 0), (rounded - quantiles[low]) / step, 0.0)
    between = SHARES[low] + within * (SHARES[high] - SHARES[low])
    equal = (SHARES[np.minimum(left, len(SHARES) - 1)] + SHARES[np.maximum(right - 1, 0)]) / 2
    share = np.where(left < right, equal, np.where(left == 0, 0.0, np.where(left == len(quantiles), 1.0, between)))
    return np.where(np.isnan(rounded), np.nan, share)
