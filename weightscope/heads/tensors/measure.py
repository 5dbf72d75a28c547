"""Every tensor of a checkpoint, attention or not, in numbers: each is read once, in blocks."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from math import prod, sqrt
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import BLOCK, Block, batches, blocks_of, row_width, streamed
from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, StoredTensor, Tensor
from weightscope.core.compute.cores import in_threads
from weightscope.core.compute.half import Weights
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.progress import bar
from weightscope.core.tables import Table, column

BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}  # bits of the fraction
NAMED = 20  # rows of a tensor that are listed by index
LONG_ROW = 1 << 14  # values; squares of longer rows, and of vectors, are summed in float64
TINY = 1e-30  # a float32 sum of squares below it has lost digits and is taken again in float64
NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")  # a number between two dots of a name


@lru_cache(maxsize=1 << 17)
def role_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A tensor's name without its numbers, and the numbers: of its layer, then of its expert.

    Examples
    --------
    >>> role_of("model.layers.3.mlp.experts.17.w1.weight")
    ('model.layers.*.mlp.experts.*.w1.weight', (3, 17))
    """
    return NUMBER.sub("*", name), tuple(int(number) for number in NUMBER.findall(name))


@dataclass(frozen=True)
class TensorFacts:
    """Facts about a tensor once all its values have been read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # as stored
    squares: float = 0.0  # sum of the squares of its values; NaN where one is NaN
    least: float = float("inf")  # least value
    most: float = float("-inf")
    not_finite: int = 0  # number of values that are NaN or infinite
    # "f" for floats and formats that are read as floats, "i" for integers and truth values
    kind: str = "f"
    zero_rows: int = 0  # rows that are zero throughout
    constant_rows: int = 0  # rows that hold one other value throughout
    first_zero: tuple[int, ...] = ()  # indices of the first of them
    first_constant: tuple[int, ...] = ()
    same_as: str = ""  # the first tensor with the same values, if that is another one
    known_as: str = ""  # its role in `Model.tensors`; empty where no row knows it

    @property
    def role(self) -> str:
        """Its role, or its name without numbers; see `role_of`."""
        return self.known_as or role_of(self.name)[0]

    @property
    def size(self) -> int:
        """Number of its values."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows that are judged; see `row_width`."""
        return self.size // (row_width(self.shape) or self.size or 1)

    @property
    def rms(self) -> float:
        """Root of the mean square of its values: a norm that does not grow with its size."""
        return sqrt(self.squares / self.size) if self.size else float("nan")

    @property
    def constant(self) -> bool:
        """True if it holds one value throughout, as gains and biases of a new model do."""
        return self.least == self.most

    def and_then(self, more: "TensorFacts") -> "TensorFacts":
        """Add the facts of another block."""
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
    """The facts of one block of a tensor."""
    tensor = block.tensor
    about = TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)
    return facts_of_values(about, block.values(), block.start)


def facts_of_values(about: TensorFacts, values: np.ndarray, start: int = 0) -> TensorFacts:
    """The facts of a tensor's values from `start` on: values (n,)."""
    width = row_width(about.shape) if values.dtype.kind == "f" else 0
    facts = replace(about, kind=values.dtype.kind.replace("u", "i"))
    if not len(values):
        return facts
    rows = values.reshape(-1, width or len(values))
    with np.errstate(all="ignore"):
        squares, broken = row_squares(rows)
        zero = constant = np.empty(0, int)
        if width:
            zero, constant = _constant_rows(rows, squares)
        first = start // width if width else 0
        return replace(
            facts,
            squares=float(squares.sum()),
            least=float(values.min()),
            most=float(values.max()),
            not_finite=broken,
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
    # too small or too large for float32, or not finite
    again = ~(squares > TINY) | ~np.isfinite(squares)
    if not again.any():
        return squares, 0
    doubtful = rows[again].astype(np.float64)
    squares[again] = np.einsum("ij,ij->i", doubtful, doubtful)
    return squares, int(np.count_nonzero(~np.isfinite(doubtful)))


def _constant_rows(rows: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the rows that are zero throughout, and of those that hold another value."""
    ends = (rows[:, 0] == rows[:, -1]) & (rows[:, 0] == rows[:, rows.shape[1] // 2])
    likely = np.flatnonzero(ends | (squares == 0))
    constant = likely[(rows[likely] == rows[likely, :1]).all(axis=1)]
    zero = rows[constant, 0] == 0
    return constant[zero], constant[~zero]


class SharedTensor(DerivedTensor):
    """A tensor that several matrices share; keeps its values, notes their facts, or both."""

    def __init__(self, stored: Tensor, keep: bool, note: bool) -> None:
        super().__init__(stored)
        self.keep, self.note = keep, note
        self._kept: Weights | None = None
        # by the first row of what was read: where it ends, facts
        self._noted: dict[int, tuple[int, TensorFacts]] = {}
        self._lock = Lock()

    @property
    def piece(self) -> int:
        return self.stored.piece

    def unchecked(self, noted: set[str]) -> Tensor:
        """Itself: it is as unchecked as what is stored."""
        return self

    def weights(self) -> Weights:
        with self._lock:
            if self._kept is not None:
                return self._kept
            weights = self.stored.weights()
            if self.keep:
                self._kept = weights
            self._note(weights, 0)
            return weights

    def read(self) -> np.ndarray:
        return np.asarray(self.weights(), np.float32)

    def rows(self, start: int, stop: int) -> np.ndarray:
        if self.keep:
            return np.asarray(self.weights()[start:stop], np.float32)
        rows = self.stored.rows(start, stop)
        self._note(rows, start)
        return rows

    def _note(self, weights: Weights, start: int) -> None:
        """Note the facts of rows from `start` on, as `facts_of` of each block would."""
        width, size = row_width(self.shape), prod(self.shape[1:])
        if not self.note or (width and (len(weights) * size % width or start * size % width)):
            return
        about = TensorFacts(self.name, self.dtype, self.shape, self.nbytes)
        facts: list[TensorFacts] = []
        flat, step = weights.reshape(-1), max(1, BLOCK // (width or 1)) * (width or 1)
        for first in range(0, len(flat), step):
            values = np.asarray(flat[first : first + step], np.float32)
            facts.append(facts_of_values(about, values, start * size + first))
        if facts:
            self._noted[start] = start + len(weights), reduce(TensorFacts.and_then, facts)

    @property
    def facts(self) -> TensorFacts | None:
        """The facts of all values; None unless each has been read."""
        end, facts = 0, list[TensorFacts]()
        while end in self._noted:
            end, more = self._noted[end]
            facts.append(more)
        return reduce(TensorFacts.and_then, facts) if facts and end == self.shape[0] else None


class RoleRow(NamedTuple):
    """Tensors of one role, as a row of a table."""

    role: str = column(
        "Tensors of one role; of one name, apart from numbers, where no row knows it."
    )
    tensors: int = column()
    dtype: str = column()
    shape: str = column()
    bytes: int = column()
    rms_median: float = column("Of the tensors' rms.", symbol="median rms")
    rms_least: float = column(symbol="least rms")
    rms_most: float = column(symbol="largest rms")
    not_finite: int = column(symbol="not finite")
    zero_rows: int = column(symbol="zero rows")


@dataclass(frozen=True)
class Everything:
    """All tensors of a checkpoint in numbers."""

    facts: Sequence[TensorFacts]  # in the order of the file
    # why the values of a tensor could not be read, by its name
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were read."""
        return sum(tensor.nbytes for tensor in self.facts)

    @property
    def lead(self) -> str:
        """Summary of what was read, and of what could not be, in a sentence or two."""
        text = f"Every value of {counted(len(self.facts), 'tensor')} was read."
        if self.unread:
            why = next(iter(self.unread.values()))
            text += f" {counted(len(self.unread), 'tensor')} could not be: {printable(why)}."
        return text

    @cached_property
    def roles(self) -> Table:
        """One row per role, in the order of the file."""
        rows = []
        for role, members in by_role(self.facts).items():
            dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in members))
            shapes = ", ".join(dict.fromkeys(shown_shape(tensor.shape) for tensor in members))
            median, least, most = spread_of(members)
            row = RoleRow(
                role=role,
                tensors=len(members),
                dtype=dtypes,
                shape=shapes,
                bytes=sum(tensor.nbytes for tensor in members),
                rms_median=median,
                rms_least=least,
                rms_most=most,
                not_finite=sum(tensor.not_finite for tensor in members),
                zero_rows=sum(tensor.zero_rows for tensor in members),
            )
            rows.append(row)
        return Table.of(RoleRow, rows)


def spread_of(tensors: Collection[TensorFacts]) -> tuple[float, float, float]:
    """Median, least and most of the norms that are finite; NaN where none is."""
    norms = np.array([tensor.rms for tensor in tensors])
    known = norms[np.isfinite(norms)]
    if not len(known):
        known = np.array([np.nan])
    return float(np.median(known)), float(known.min()), float(known.max())


def shown_shape(shape: tuple[int, ...]) -> str:
    """`768 x 2304`."""
    return " x ".join(map(str, shape)) or "scalar"


def by_role(facts: Iterable[TensorFacts]) -> dict[str, list[TensorFacts]]:
    """Tensors by role, in the order of their numbers."""
    roles: dict[str, list[TensorFacts]] = defaultdict(list)
    for tensor in facts:
        roles[tensor.role].append(tensor)
    for members in roles.values():
        members.sort(key=lambda tensor: role_of(tensor.name)[1])
    return dict(roles)


def read_everything(checkpoint: Checkpoint, roles: Mapping[str, str] | None = None) -> Everything:
    """Read every value of a checkpoint once, and once more the values of tensors that may be equal.

    `roles` are those that are known, by name; see `Tensors.roles`. Facts have the names of the
    file, wrappers' included.

    Memory is a few blocks of a million values per core, however large tensors are, and a kilobyte
    per tensor; where a quantised format scatters rows (GPTQ, AWQ, bitsandbytes, FP8 with scales),
    one whole weight per core.
    """
    roles, unread = roles or {}, unreadable(checkpoint)
    facts = read_facts(checkpoint, [name for name in checkpoint if name not in unread])
    known = [replace(fact, known_as=roles.get(name, "")) for name, fact in facts.items()]
    every, stored = list(with_twins(checkpoint, known)), checkpoint.stored_names
    if not stored:
        return Everything(every, unread)
    for i, fact in enumerate(every):
        same_as = stored.get(fact.same_as, fact.same_as)
        every[i] = replace(fact, name=stored.get(fact.name, fact.name), same_as=same_as)
    return Everything(every, {stored.get(name, name): why for name, why in unread.items()})


def unreadable(checkpoint: Checkpoint) -> dict[str, str]:
    """Why the values of a tensor cannot be read, by its name."""
    unread: dict[str, str] = {}
    readable: set[Any] = set()  # kinds: all tensors of one dtype in one file are read alike
    for name, tensor in checkpoint.items():
        kind = type(tensor), tensor.dtype, id(tensor.file)
        if kind in readable:
            continue
        if why := why_unread(tensor):
            unread[name] = why
        else:
            readable.add(kind)
    return unread


def read_facts(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, TensorFacts]:
    """The facts of some tensors by name, each read once."""
    facts: dict[str, TensorFacts] = {}
    total = sum(checkpoint[name].nbytes for name in names)
    with bar(what="tensors", unit="B", total=total, unit_scale=True) as progress:
        parts = batches(streamed(checkpoint, names), lambda block: block.stop - block.start, BLOCK)
        for part in in_threads(lambda blocks: [(facts_of(each), each) for each in blocks], parts):
            for more, block in part:
                facts[more.name] = facts[more.name].and_then(more) if more.name in facts else more
                size = block.stop - block.start
                progress.update(more.nbytes * size // max(1, more.size))
    return facts


def why_unread(tensor: Tensor) -> str:
    """Why a stored tensor's values cannot be read; empty where they can."""
    try:
        if isinstance(tensor, DerivedTensor):
            return why_unread(tensor.stored)
        if isinstance(tensor, StoredTensor):
            Block(tensor, 0, 0).values()
    except CheckpointError as error:
        return str(error)
    return ""


def with_twins(checkpoint: Checkpoint, facts: Collection[TensorFacts]) -> Iterator[TensorFacts]:
    """Add to each tensor's facts the first tensor that holds the same values.

    Only tensors that agree in shape, dtype, norm and range are read again, for a digest of their
    content. Constant tensors equal many others, which means nothing.
    """
    candidates: dict[Any, list[TensorFacts]] = defaultdict(list)
    for tensor in facts:
        # as bytes, so that NaN equals NaN
        numbers = np.array([tensor.squares, tensor.least, tensor.most]).tobytes()
        candidates[tensor.shape, tensor.dtype, numbers].append(tensor)
    groups = (group for group in candidates.values() if len(group) > 1 and not group[0].constant)
    twins = [tensor for group in groups for tensor in group if tensor.size > 1]
    digests = in_threads(lambda tensor: _digest(checkpoint[tensor.name]), twins)
    first: dict[Any, str] = {}
    same_as = {
        tensor.name: first.setdefault((tensor.shape, digest), tensor.name)
        for tensor, digest in zip(twins, digests, strict=True)
    }
    for tensor in facts:
        twin = same_as.get(tensor.name, tensor.name)
        yield tensor if twin == tensor.name else replace(tensor, same_as=twin)


def _digest(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's values."""
    digest = hashlib.sha256()
    for block in blocks_of(tensor):
        digest.update(np.ascontiguousarray(block.values()))
    return digest.digest()
