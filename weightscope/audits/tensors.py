"""Everything in a checkpoint's files, attention or not: each tensor read once, in blocks, and told in numbers."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod, sqrt
from typing import Any

import numpy as np

from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.blocks import BLOCK, Block, batches, blocks_of, row_width, streamed
from weightscope.checkpoint.tensor import StoredTensor
from weightscope.errors import CheckpointError, counted, printable
from weightscope.folder import Files
from weightscope.parallel import in_threads
from weightscope.progress import bar
from weightscope.tables import Column, Table

NAMED = 20  # rows of a tensor that are listed by index
LONG_ROW = 1 << 14  # values: sums of squares over longer rows, and over vectors, are taken in float64
TINY = 1e-30  # a float32 sum of squares below it has lost digits and is taken again in float64
NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")  # a whole part of a name between dots


@lru_cache(maxsize=1 << 17)
def role_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A tensor's name with its numbers taken out, and the numbers: of its layer, and of its expert.

    Examples
    --------
    >>> role_of("model.layers.3.mlp.experts.17.w1.weight")
    ('model.layers.*.mlp.experts.*.w1.weight', (3, 17))
    """
    return NUMBER.sub("*", name), tuple(int(number) for number in NUMBER.findall(name))


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor once all its values have been seen.

    Attributes
    ----------
    name, dtype : str
    shape : tuple of int
    nbytes : int
        As it is stored.
    squares : float
        The sum of the squares of its values; NaN where one is NaN.
    least, most : float
        Of its values.
    not_finite : int
        How many values are NaN or infinite.
    kind : str
        "f" for floats and whatever reads as floats, "i" for integers and truth values.
    zero_rows, constant_rows : int
        Rows that are zero throughout, and others that hold one value throughout.
    first_zero, first_constant : tuple of int
        The first of them, by index.
    same_as : str
        The first tensor with the same values, if that is another.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    squares: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")
    not_finite: int = 0
    kind: str = "f"
    zero_rows: int = 0
    constant_rows: int = 0
    first_zero: tuple[int, ...] = ()
    first_constant: tuple[int, ...] = ()
    same_as: str = ""

    @property
    def role(self) -> str:
        """Its name without numbers."""
        return role_of(self.name)[0]

    @property
    def size(self) -> int:
        """How many values it has."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """How many rows are judged; see `row_width`."""
        return self.size // (row_width(self.shape) or self.size or 1)

    @property
    def rms(self) -> float:
        """The root of the mean square of its values: its norm, whatever its size."""
        return sqrt(self.squares / self.size) if self.size else float("nan")

    @property
    def constant(self) -> bool:
        """It holds one value throughout, as norms' gains and biases of a fresh model do."""
        return self.least == self.most

    def and_then(self, more: "TensorFacts") -> "TensorFacts":
        """With another block's facts."""
        return replace(
            self,
            squares=self.squares + more.squares,
            least=float(np.minimum(self.least, more.least)),  # NaN stays NaN
            most=float(np.maximum(self.most, more.most)),
            not_finite=self.not_finite + more.not_finite,
            kind=more.kind,
            zero_rows=self.zero_rows + more.zero_rows,
            constant_rows=self.constant_rows + more.constant_rows,
            first_zero=(*self.first_zero, *more.first_zero)[:NAMED],
            first_constant=(*self.first_constant, *more.first_constant)[:NAMED],
        )


def facts_of(block: Block) -> TensorFacts:
    """What one block says of its tensor."""
    tensor, values = block.tensor, block.values()
    width = row_width(tensor.shape) if values.dtype.kind == "f" else 0
    kind = values.dtype.kind.replace("u", "i")
    if not len(values):
        return TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, kind=kind)
    rows = values.reshape(-1, width or len(values))
    with np.errstate(all="ignore"):
        squares, broken = row_squares(rows)
        zero, constant = _constant_rows(rows, squares) if width else (np.empty(0, int), np.empty(0, int))
        first = block.start // width if width else 0
        return TensorFacts(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tensor.nbytes,
            squares=float(squares.sum()),
            least=float(values.min()),
            most=float(values.max()),
            not_finite=broken,
            kind=kind,
            zero_rows=len(zero),
            constant_rows=len(constant),
            first_zero=tuple((zero[:NAMED] + first).tolist()),
            first_constant=tuple((constant[:NAMED] + first).tolist()),
        )


def row_squares(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Sums of the squares of rows, in float64, and how many values are not finite."""
    narrow = rows.dtype == np.float32 and rows.shape[1] < LONG_ROW
    wide = rows if narrow else rows.astype(np.float64, copy=False)
    squares = np.einsum("ij,ij->i", wide, wide).astype(np.float64)
    again = ~(squares > TINY) | ~np.isfinite(squares)  # too small or too large for float32, or not finite indeed
    if not again.any():
        return squares, 0
    doubtful = rows[again].astype(np.float64)
    squares[again] = np.einsum("ij,ij->i", doubtful, doubtful)
    return squares, int(np.count_nonzero(~np.isfinite(doubtful)))


def _constant_rows(rows: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows that are zero throughout, and of those that hold another value throughout."""
    ends = (rows[:, 0] == rows[:, -1]) & (rows[:, 0] == rows[:, rows.shape[1] // 2])
    likely = np.flatnonzero(ends | (squares == 0))
    found = likely[(rows[likely] == rows[likely, :1]).all(axis=1)]
    return found[rows[found, 0] == 0], found[rows[found, 0] != 0]


@dataclass(frozen=True)
class Everything:
    """All tensors of a checkpoint in numbers.

    Attributes
    ----------
    facts : list of TensorFacts
        In the order of the file.
    unread : dict of str
        Why the values of a tensor could not be read, by its name.
    """

    facts: Sequence[TensorFacts]
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were read."""
        return sum(one.nbytes for one in self.facts)

    @property
    def lead(self) -> str:
        """What was read, and what was not, in a sentence or two."""
        said = f"Every value of {counted(len(self.facts), 'tensor')} was read."
        if self.unread:
            why = next(iter(self.unread.values()))
            said += f" {counted(len(self.unread), 'tensor')} could not be: {printable(why)}."
        return said

    @cached_property
    def table(self) -> Table:
        """A row a tensor, in the order of the file; its csv() is tensors.csv."""
        rows = [
            (one.name, one.role, one.dtype, shown_shape(one.shape), one.size, one.nbytes, one.rms, one.least, one.most,
             one.not_finite, one.zero_rows, one.constant_rows, one.same_as)
            for one in self.facts
        ]  # fmt: skip
        return Table.of_rows(TENSOR_COLUMNS, rows)

    @cached_property
    def roles(self) -> Table:
        """A row a role, in the order of the file; its csv() is roles.csv."""
        rows = []
        for role, members in by_role(self.facts).items():
            norms = np.array([one.rms for one in members])
            known = norms[np.isfinite(norms)] if np.isfinite(norms).any() else np.array([np.nan])
            stored = zip(*((one.dtype, shown_shape(one.shape)) for one in members), strict=True)
            dtype, shape = (", ".join(dict.fromkeys(found)) for found in stored)
            totals = (sum(getattr(one, name) for one in members) for name in ("nbytes", "not_finite", "zero_rows"))
            n_bytes, not_finite, zero_rows = totals
            spread = float(np.median(known)), known.min(), known.max()
            rows.append((role, len(members), dtype, shape, n_bytes, *spread, not_finite, zero_rows))
        return Table.of_rows(ROLE_COLUMNS, rows)

    def write(self, files: Files) -> None:
        """Write tensors.csv, a row a tensor, and roles.csv."""
        files.table("tensors.csv", self.table)
        files.table("roles.csv", self.roles)


TENSOR_COLUMNS = (
    Column("tensor"),
    Column("role", meaning="The name without the numbers of layers and experts."),
    Column("dtype", meaning="As it is stored."), Column("shape"), Column("values", meaning="How many."),
    Column("bytes", meaning="As they are stored."),
    Column("rms", meaning="Root of the mean square: the norm, whatever the size."),
    Column("least"), Column("most"),
    Column("not_finite", symbol="not finite", meaning="Values that are NaN or infinite."),
    Column("zero_rows", symbol="zero rows", meaning="Rows that are zero throughout."),
    Column("constant_rows", symbol="constant rows", meaning="Rows that hold one other value throughout."),
    Column("same_as", symbol="same values as", meaning="The first tensor that holds exactly the same."),
)  # fmt: skip
ROLE_COLUMNS = (
    Column("role", meaning="Tensors of one name, the numbers of layers and experts taken out."),
    Column("tensors"), Column("dtype"), Column("shape"), Column("bytes"),
    Column("rms_median", symbol="median rms", meaning="Of the tensors' root mean squares."),
    Column("rms_least", symbol="least rms"), Column("rms_most", symbol="largest rms"),
    Column("not_finite", symbol="not finite"), Column("zero_rows", symbol="zero rows"),
)  # fmt: skip


def shown_shape(shape: tuple[int, ...]) -> str:
    """`768 x 2304`."""
    return " x ".join(map(str, shape)) or "scalar"


def by_role(facts: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Tensors by role, those of a role in the order of their numbers."""
    found: dict[str, list[TensorFacts]] = defaultdict(list)
    for one in facts:
        found[one.role].append(one)
    return {role: sorted(members, key=lambda one: role_of(one.name)[1]) for role, members in found.items()}


def read_everything(checkpoint: Checkpoint) -> Everything:
    """Read every value of a checkpoint once, and once more those of tensors that may be equal.

    Memory is a few blocks of a million values a core, however large tensors are, and a kilobyte for each of them; where
    a quantised format keeps no rows together (GPTQ, AWQ, bitsandbytes, FP8 with scales), one whole weight a core.

    Raises
    ------
    CheckpointError
        A file cannot be read. A tensor of a dtype that holds no known numbers is no error: it is listed as unread.
    """
    unread: dict[str, str] = {}
    readable: set[Any] = set()  # kinds of tensor: all of a dtype in a file are read alike
    for name, tensor in checkpoint.items():
        kind = type(tensor), tensor.dtype, id(tensor.file)
        if kind not in readable:
            if why := why_unread(tensor):
                unread[name] = why
            else:
                readable.add(kind)
    names = [name for name in checkpoint if name not in unread]
    found: dict[str, TensorFacts] = {}
    with bar(what="tensors", unit="B", total=sum(checkpoint[name].nbytes for name in names), unit_scale=True) as moved:
        parts = batches(streamed(checkpoint, names), lambda block: block.stop - block.start, BLOCK)
        for facts_of_some in in_threads(lambda blocks: [*map(_facts_and_bytes, blocks)], parts):
            for facts, share in facts_of_some:
                found[facts.name] = found[facts.name].and_then(facts) if facts.name in found else facts
                moved.update(share)
    return Everything(list(_with_twins(checkpoint, found)), unread)


def _facts_and_bytes(block: Block) -> tuple[TensorFacts, int]:
    tensor = block.tensor
    return facts_of(block), tensor.nbytes * (block.stop - block.start) // max(1, prod(tensor.shape))


def why_unread(tensor: Tensor) -> str:
    """Why a stored tensor's values cannot be read; empty where they can."""
    try:
        if isinstance(tensor, StoredTensor):
            Block(tensor, 0, 0).values()
    except CheckpointError as error:
        return str(error)
    return ""


def _with_twins(checkpoint: Checkpoint, found: Mapping[str, TensorFacts]) -> Iterator[TensorFacts]:
    """The same facts, each with the first tensor that holds the same values.

    Only tensors that agree in shape, dtype, norm and range are read again, for a digest of their content. Those that
    hold one value throughout are equal to many, which says nothing.
    """
    alike: dict[Any, list[TensorFacts]] = defaultdict(list)
    for one in found.values():
        numbers = np.array([one.squares, one.least, one.most]).tobytes()  # as bytes, so that NaN is like NaN
        alike[one.shape, one.dtype, numbers].append(one)
    twins = [
        one for group in alike.values() if len(group) > 1 and not group[0].constant for one in group if one.size > 1
    ]
    digests = in_threads(lambda one: _digest(checkpoint[one.name]), twins)
    first: dict[Any, str] = {}
    same = {
        one.name: first.setdefault((one.shape, digest), one.name) for one, digest in zip(twins, digests, strict=True)
    }
    for one in found.values():
        twin = same.get(one.name, one.name)
        yield one if twin == one.name else replace(one, same_as=twin)


def _digest(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's values."""
    digest = hashlib.sha256()
    for block in blocks_of(tensor):
        digest.update(np.ascontiguousarray(block.values()))
    return digest.digest()
