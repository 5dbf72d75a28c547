"""Percentiles of a checkpoint's measures among other checkpoints: is a number usual?

Percentiles are over checkpoints, not over heads: in each checkpoint, the share of heads below a
value is counted, among heads in the same third of its layers; the percentile is the mean of these
shares. So every checkpoint has the same weight however many heads it has: a value above all heads
of 13 of 14 checkpoints and half of the last one's is at the 96th percentile. Equal values count
half. Ranks are compared as shares of a head's width, which bounds them; everything else is compared
as it is, whatever the model's width.

Matrices (of `audit --all`) are ranked in the same way, each among the matrices of its role: ranks,
and the number of singular values beyond the edge, as shares of the smaller side. Embeddings have no
depth, and count as the middle third.
"""

import json
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError, counted
from weightscope.core.files import new_file, regular_file
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.heads.tensors.matrices import MEASURES, Matrices, sides
from weightscope.model.model import Model
from weightscope.model.run_identity import weights_digest, weights_size
from weightscope.report.findings import Finding

THIRDS = ("first", "middle", "last")  # thirds of a checkpoint's attention layers
SHARES = np.linspace(0, 1, 21)  # shares of a checkpoint's heads at the quantiles that are kept
# compared as shares of a head's width
OF_WIDTH = ("stable_rank", "effective_rank", "participation_ratio")
# measures by which matrices are ranked
OF_MATRICES = ("sigma1", "stable_rank", "effective_rank", "beyond_edge", "alpha", "snr")
# compared as shares of a matrix's smaller side
OF_SIDE = ("stable_rank", "effective_rank", "beyond_edge")
# comes with the package; reference.csv lists its checkpoints
OWN = Path(__file__).with_name("reference.npz")
LARGEST = 64 << 20  # bytes of such a file, packed and unpacked
SHA256 = re.compile("[0-9a-f]{64}")
# findings on the checkpoint's own scale
WITHIN = ("outlier_head", "layer_off_trend", "near_dead_head", "zero_head")
FEW = 20  # checkpoints: with fewer, a page says how coarse their percentiles are
UNREADABLE = (
    OSError, EOFError, ValueError, OverflowError, KeyError, TypeError, MemoryError, RecursionError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A checkpoint that a reference is made of."""

    name: str
    source: str  # as it was opened
    licence: str  # licence of its weights
    origin: str  # where they come from
    sha256: str  # digest of its weights; of a single file, the file's
    size: int  # bytes of its weights
    family: str
    layers: int
    heads: int
    d_model: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)) is not field.type:
                raise TypeError(f"{field.name} is of another type")


@holds_arrays
class Reference(ShowsShapes):
    """Distributions of the measures of heads and matrices over checkpoints, by third of layers."""

    checkpoints: tuple[Known, ...]
    measures: tuple[str, ...]  # names; measures of matrices are `up.alpha`, with their role
    quantiles: np.ndarray  # (checkpoints, measures, 3, 21) at `SHARES` by third; NaN if unknown

    @classmethod
    def of(cls, parts: Iterable[tuple[Known, Mapping[str, np.ndarray]]]) -> "Reference":
        """The reference of checkpoints, each with its `distribution`, its matrices' included."""
        known, distributions = zip(*parts, strict=True)
        measures = tuple(dict.fromkeys(name for quantiles in distributions for name in quantiles))
        unknown = np.full((len(THIRDS), len(SHARES)), np.nan, np.float32)
        rows = [[quantiles.get(name, unknown) for name in measures] for quantiles in distributions]
        return cls(known, measures, np.array(rows))

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Read a file that `save` wrote."""
        path = Path(path)
        try:
            packed = path.stat().st_size
            with regular_file(path) as file, zipfile.ZipFile(file) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
                if max(packed, unpacked) > LARGEST:
                    problem = f"has more than {LARGEST >> 20} MB; a reference is far smaller"
                    raise CheckpointError(problem, file=path)
            with regular_file(path) as file, np.load(file, allow_pickle=False) as stored:
                known = tuple(Known(**facts) for facts in json.loads(str(stored["checkpoints"])))
                measures, quantiles = tuple(map(str, stored["measures"])), stored["quantiles"]
        except FileNotFoundError:
            problem = "there is no such reference; `weightscope reference` makes one"
            raise CheckpointError(problem, file=path) from None
        except UNREADABLE as error:
            problem = "is not a reference written by `weightscope reference`"
            raise CheckpointError(f"{problem} ({type(error).__name__})", file=path) from None
        wanted = (len(known), len(measures), len(THIRDS), len(SHARES))
        if quantiles.shape != wanted or quantiles.dtype != np.float32 or not known:
            stored = f"{quantiles.dtype} {quantiles.shape}"
            problem = f"has quantiles of {stored}; float32 {wanted} were expected"
            raise CheckpointError(problem, file=path)
        if problem := _problem(known, measures, quantiles):
            remedy = "make it again with `weightscope reference`"
            raise CheckpointError(f"has {problem}; {remedy}", file=path)
        return cls(known, measures, quantiles)

    def save(self, path: Path) -> None:
        """Write it as .npz; it holds numbers and names only."""
        facts = [asdict(checkpoint) for checkpoint in self.checkpoints]
        checkpoints = np.array(json.dumps(facts, ensure_ascii=False))
        measures, quantiles = np.array(self.measures), self.quantiles
        with new_file(path) as file:
            np.savez_compressed(
                file, checkpoints=checkpoints, measures=measures, quantiles=quantiles
            )

    def without(self, sha256: str) -> "Reference":
        """The reference without one checkpoint, which is not compared with itself."""
        kept = [i for i, checkpoint in enumerate(self.checkpoints) if checkpoint.sha256 != sha256]
        checkpoints = tuple(self.checkpoints[i] for i in kept)
        return Reference(checkpoints, self.measures, self.quantiles[kept])

    def percentiles(self, measure: str, third: int, values: np.ndarray) -> tuple[np.ndarray, int]:
        """The percentiles of values, from 0 to 100, and among how many checkpoints."""
        known = np.empty((0, len(SHARES)))
        if measure in self.measures:
            quantiles = self.quantiles[:, self.measures.index(measure), third]  # (C, 21)
            known = quantiles[~np.isnan(quantiles).any(axis=1)]
        if not len(known):
            return np.full(values.shape, np.nan), 0
        shares = [share_below(quantiles, values) for quantiles in known]
        return 100 * np.mean(shares, axis=0), len(known)

    @property
    def table(self) -> Table:
        """One row per checkpoint. `weightscope reference` makes it again from its csv()."""
        names = [field.name for field in fields(Known)]
        cells = {name: [getattr(known, name) for known in self.checkpoints] for name in names}
        return Table([Column(name, values) for name, values in cells.items()])


def _problem(known: Sequence[Known], measures: Sequence[str], quantiles: np.ndarray) -> str:
    """Describe the first part of a file that `Reference.of` never makes; empty if there is none."""
    for checkpoint in known:
        texts = (checkpoint.name, checkpoint.source, checkpoint.family)
        sizes = (checkpoint.size, checkpoint.layers, checkpoint.heads, checkpoint.d_model)
        if not all(text.strip() for text in texts) or min(sizes) < 1:
            return f"a checkpoint '{checkpoint.name}' without a name, source, family or size"
        if not SHA256.fullmatch(digest := checkpoint.sha256):
            return f"the SHA-256 '{digest[:64]}' of '{checkpoint.name}', which is not valid"
    if len({checkpoint.sha256 for checkpoint in known}) < len(known):
        return "a checkpoint twice"
    words = [word for name in measures for word in name.split(".")]
    if not all(map(str.isidentifier, words)) or len(set(measures)) < len(measures):
        return f"the measures '{', '.join(measures)}', which are not plain names, each once"
    unknown = np.isnan(quantiles)
    if (unknown.any(axis=-1) != unknown.all(axis=-1)).any():
        return "distributions in which some quantiles are NaN"
    if empty := [known[i].name for i, row in enumerate(unknown) if row.all()]:
        return f"no number for {counted(len(empty), 'checkpoint')}, '{empty[0]}' the first"
    with np.errstate(invalid="ignore"):
        descending = (quantiles[..., 1:] < quantiles[..., :-1]).any()
    return "quantiles that do not ascend" if descending else ""


def compared(heads: MeasuredHeads) -> list[str]:
    """The measures that a reference contains: those that a page shows as maps."""
    return [measure.name for measure in heads.measures if measure.scale]


def comparable(heads: MeasuredHeads, name: str) -> np.ndarray:
    """The values of a measure (L, H) in the unit in which checkpoints are compared."""
    return heads.grid(name) / width_of(heads, name)


def width_of(heads: MeasuredHeads, name: str) -> int:
    """The divisor of that unit: the head's width for ranks, else 1."""
    map_name, _, measure = name.partition("_")
    return heads.arrays[f"{map_name}_singular_values"].shape[-1] if measure in OF_WIDTH else 1


def thirds_of(layers: Sequence[int], every: Sequence[int]) -> list[int]:
    """Third of the depth of each of `layers` among every attention layer; one layer is middle."""
    places = {layer: int(3 * (i + 0.5) / len(every)) for i, layer in enumerate(every)}
    return [places[layer] for layer in layers]


def distribution(heads: MeasuredHeads) -> dict[str, np.ndarray]:
    """Quantiles (3, 21) of every measure by third of the layers; NaN for an unknown third."""
    layers = heads.layers.tolist()
    thirds = np.array(thirds_of(layers, layers))
    return {name: quantiles_of(comparable(heads, name), thirds) for name in compared(heads)}


def quantiles_of(values: np.ndarray, thirds: np.ndarray) -> np.ndarray:
    """The quantiles at `SHARES` of values (n, ...) whose thirds (n,) are known: (3, 21)."""
    quantiles = np.full((len(THIRDS), len(SHARES)), np.nan, np.float32)
    for third in range(len(THIRDS)):
        known = values[thirds == third]
        if (known := known[~np.isnan(known)]).size:
            # does not average finite with infinite
            quantiles[third] = np.quantile(known, SHARES, method="nearest")
    return quantiles


def stack_of(role: str) -> str:
    """The name of the stack that a role of matrices.csv begins with; empty for the audited one."""
    return role.rpartition(" ")[0]


class ComparableMatrices(NamedTuple):
    """The rows of matrices.csv in the unit in which checkpoints are compared."""

    roles: np.ndarray  # (n,) empty where no row of the table of architectures names it
    thirds: np.ndarray  # (n,) thirds of the layers of the row's stack
    values: np.ndarray  # (n, 6) `OF_MATRICES`; NaN for vectors

    @classmethod
    def of(cls, matrices: Matrices) -> "ComparableMatrices":
        """Convert all rows."""
        places = [(row.facts.known_as, row.layer) for row in matrices.rows]
        layers: dict[str, set[int]] = defaultdict(set)  # by stack, whose name precedes the role
        for role, layer in places:
            if layer is not None:
                layers[stack_of(role)].add(layer)
        thirds: dict[tuple[str, int | None], int] = {}
        for stack, indices in layers.items():
            in_order = sorted(indices)
            for layer, third in zip(in_order, thirds_of(in_order, in_order), strict=True):
                thirds[stack, layer] = third
        names = [column.name for column in MEASURES]
        numbers = np.array([row.numbers for row in matrices.rows])
        numbers = numbers.reshape(len(places), len(MEASURES))
        values = numbers[:, [names.index(name) for name in OF_MATRICES]]
        smaller = np.array([min(sides(row.facts.shape) or (1,)) for row in matrices.rows])
        values[:, [OF_MATRICES.index(name) for name in OF_SIDE]] /= smaller[:, None]
        middle = THIRDS.index("middle")  # also for rows outside layers
        depths = [thirds.get((stack_of(role), layer), middle) for role, layer in places]
        return cls(np.array([role for role, _ in places], dtype=str), np.array(depths, int), values)

    @property
    def groups(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Role, third and mask (n,) of the rows that are ranked together."""
        places = zip(self.roles.tolist(), self.thirds.tolist(), strict=True)
        for role, third in dict.fromkeys(places):
            yield role, third, (self.roles == role) & (self.thirds == third)

    def distribution(self) -> dict[str, np.ndarray]:
        """Quantiles (3, 21) by role, measure and third of the layers, named `up.alpha`."""
        distributions = {}
        for role in dict.fromkeys(self.roles.tolist()):
            if not all(map(str.isidentifier, role.split("."))):
                continue
            rows = self.roles == role
            for name, column in zip(OF_MATRICES, self.values[rows].T, strict=True):
                quantiles = quantiles_of(column, self.thirds[rows])
                if not np.isnan(quantiles).all():
                    distributions[f"{role}.{name}"] = quantiles
        return distributions

    def percentiles(self, reference: Reference) -> Iterator[Column]:
        """The columns of matrices.csv that say where a matrix lies among others of its role."""
        among, percentiles = np.zeros(len(self.roles), int), np.full(self.values.shape, np.nan)
        for role, third, rows in self.groups:
            for i, name in enumerate(OF_MATRICES):
                measure, values = f"{role}.{name}", self.values[rows, i]
                percentiles[rows, i], count = reference.percentiles(measure, third, values)
                among[rows] = np.maximum(among[rows], count)
        for name, column in zip(OF_MATRICES, percentiles.T, strict=True):
            meaning = f"Of {name} among matrices of the role in other checkpoints, at this depth."
            yield Column(f"{name}_percentile", np.round(column, 1), format=".0f", meaning=meaning)
        meaning = "How many the percentiles are of."
        yield Column("compared_with", among, "compared with", "checkpoints", meaning)


def share_below(quantiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of a distribution below values, in [0, 1]; equal ones count half: quantiles (21,)."""
    with np.errstate(over="ignore"):  # too large for float32 is above every quantile
        rounded = np.asarray(values, np.float32)  # like quantiles, so that equal values match
    left, right = (np.searchsorted(quantiles, rounded, side) for side in ("left", "right"))
    low, high = np.maximum(left - 1, 0), np.minimum(left, len(quantiles) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        step = quantiles[high] - quantiles[low]
        within = np.where(np.isfinite(step) & (step > 0), (rounded - quantiles[low]) / step, 0.0)
    between = SHARES[low] + within * (SHARES[high] - SHARES[low])
    equal = (SHARES[np.minimum(left, len(SHARES) - 1)] + SHARES[np.maximum(right - 1, 0)]) / 2
    share = np.select([left < right, left == 0, left == len(quantiles)], [equal, 0.0, 1.0], between)
    return np.where(np.isnan(rounded), np.nan, share)


class Standing:
    """Percentiles of a checkpoint's heads among other checkpoints, itself left out."""

    reference: Reference  # the other checkpoints
    itself: bool  # True if the checkpoint was left out of them
    grids: dict[str, np.ndarray]  # (L, H) percentiles by measure
    counts: dict[str, np.ndarray]  # (L,) among how many checkpoints, by measure and layer

    def __init__(self, model: Model, heads: MeasuredHeads, reference: Reference) -> None:
        self._heads, self.reference = heads, reference
        sizes = {checkpoint.size for checkpoint in reference.checkpoints}
        if weights_size(model) in sizes:  # else a digest is not needed
            self.reference = reference.without(weights_digest(model))
        self.itself = len(self.reference.checkpoints) < len(reference.checkpoints)
        self._thirds = thirds_of(heads.layers.tolist(), model.attention_layers)
        self.grids, self.counts = {}, {}
        thirds = np.array(self._thirds)
        for name in compared(heads):
            values, counts = comparable(heads, name), 0 * thirds
            grid = np.full((len(thirds), heads.n_heads), np.nan)
            for third in set(self._thirds):
                rows = thirds == third
                grid[rows], counts[rows] = self.reference.percentiles(name, third, values[rows])
            if counts.any():
                self.grids[name], self.counts[name] = grid, counts

    @property
    def table(self) -> Table:
        """One row per head: layer, head and its percentiles; its csv() is percentiles.csv."""
        labels = self._heads.table.select("layer", "head").columns
        percentiles = (
            Column(name, np.round(grid.ravel(), 1), format=".0f")
            for name, grid in self.grids.items()
        )
        return Table([*labels, *percentiles])

    def percentile(self, measure: str, layer: int, value: float) -> tuple[float, int]:
        """Percentile of a head's value at the depth of a layer, and of how many checkpoints."""
        third = self._thirds[self._heads.layers.tolist().index(layer)]
        in_unit = np.array(value) / width_of(self._heads, measure)
        known, count = self.reference.percentiles(measure, third, in_unit)
        return float(known), count

    def of(self, finding: Finding) -> str:
        """Percentile of a finding's number for its layer, as a sentence; empty if unknown.

        Heads and layers that are judged against others of the same checkpoint have none: a norm
        that is far above its layer's median may be small among other checkpoints, whose widths
        differ.
        """
        if finding.measure not in self.grids or finding.layer is None or finding.kind in WITHIN:
            return ""
        return phrase(*self.percentile(finding.measure, finding.layer, finding.number))

    @property
    def described(self) -> str:
        """Meaning of the percentiles, among how many checkpoints, and how coarse they are."""
        count = len(self.reference.checkpoints)
        if not count:
            return "There is no other checkpoint to compare with."
        few = f" That is few: each is {100 / count:.0f} percentiles." if count < FEW else ""
        itself = " This checkpoint is in the reference too, and is left out." if self.itself else ""
        return (
            f"Percentiles are of {counted(count, 'checkpoint')}.{few}{itself} A percentile is the "
            "share of their heads with a lower value, in the same third of the layers; every "
            "checkpoint has the same weight, however many heads it has. Ranks are compared as "
            "shares of a head's width; norms are not scaled, and grow with a model's width. "
            "Matrices are ranked in the same way among matrices of the same role."
        )


def phrase(percentile: float, count: int) -> str:
    """A percentile among other checkpoints' heads in a sentence; empty where it is unknown.

    Examples
    --------
    >>> phrase(96.6, 14)
    'Higher than 97% of the heads of 14 other checkpoints.'
    >>> phrase(100.0, 1)
    'Higher than every head of 1 other checkpoint.'
    """
    if np.isnan(percentile) or not count:
        return ""
    checkpoints = counted(count, "other checkpoint")
    if percentile in (0, 100):
        return f"{'Higher' if percentile else 'Lower'} than every head of {checkpoints}."
    rounded = min(max(round(percentile), 1), 99)
    return f"Higher than {rounded}% of the heads of {checkpoints}."
