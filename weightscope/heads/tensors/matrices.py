"""Every matrix of a checkpoint: its singular values, and how they differ from a random matrix's."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial, reduce
from math import nan, prod
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import NATIVE, batches, blocks_of
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar
from weightscope.core.results import holds_arrays
from weightscope.core.tables import Column, Table, column, columns_of
from weightscope.heads.tensors.measure import (
    Everything,
    SharedTensor,
    TensorFacts,
    by_role,
    facts_of_values,
    read_facts,
    shown_shape,
    spread_of,
    unreadable,
    with_twins,
)
from weightscope.heads.tensors.networks import JudgedNetwork, Networks, Neurons
from weightscope.model.metrics.matrix_spectra import (
    Sketch,
    beyond_edge,
    condition,
    power_law,
    random_edge,
    signal_to_noise,
    singular_values,
    sketched_singular_values,
)
from weightscope.model.metrics.spectra import effective_rank, frobenius, stable_rank
from weightscope.model.model import Model, TensorsOnly
from weightscope.model.rows.names import NamedTensor, Tensors

ROOM = 1 << 29  # bytes for the matrices that are measured at a time; one alone may need more
EXACT_SIDE = 2048  # smaller side; with a larger one the spectrum is a sketch, unless `exact`
LARGEST_EXACT = 20_000  # smaller side, even if `exact`: LAPACK counts larger Grams beyond 32 bits
PROJECTIONS = {"q", "k", "v", "o", "output_gate"}
HELD = 64 << 20  # values of a sketched matrix in memory; a larger one is read for each step


class Measures(NamedTuple):
    """Measures of a matrix."""

    sigma1: float = column("The largest singular value, the spectral norm.", symbol="$σ_1$")
    frobenius: float = column(
        "Root of the sum of the squared singular values.", symbol="Frobenius norm"
    )
    stable_rank: float = column("Squared Frobenius norm over $σ_1^2$.", symbol="stable rank")
    effective_rank: float = column(
        "Exponential of the entropy of the singular values.", symbol="effective rank"
    )
    mp_edge: float = column(
        "The largest singular value of a random matrix with the same shape and mean square.",
        symbol="Marchenko-Pastur edge",
    )
    beyond_edge: float = column(
        "How many singular values are above that edge.", symbol="beyond the edge"
    )
    alpha: float = column(
        "Exponent of a power law of the largest squared singular values.", symbol="$α$"
    )
    alpha_distance: float = column(
        "Of these from that law, at the lower steps of their distribution.",
        symbol="Kolmogorov distance",
    )
    snr: float = column(
        "Spectrum's: singular values above the noise over the others, in sum, over $σ_1$.",
        symbol="signal to noise",
    )
    condition: float = column(
        "$σ_1$ over the smallest singular value; not of a sketch.", symbol="condition number"
    )
    rank_error: float = column(
        "Estimate of how far the share of singular values below any value is off at most: "
        "no bound, as clusters and spikes over a bulk may exceed it. 0 where they are exact.",
        symbol="error of ranks",
    )


MEASURES = columns_of(Measures)
NOT_MEASURED = Measures(*[nan] * len(MEASURES))


def measures(spectrum: Sketch, shape: tuple[int, int]) -> Measures:
    """Measures of a matrix from its singular values; a sketch lacks the condition number."""
    s, error = spectrum
    if not np.isfinite(s).all():
        return NOT_MEASURED
    alpha, alpha_distance = power_law(s**2)
    return Measures(
        sigma1=float(s[0]),
        frobenius=float(frobenius(s)),
        stable_rank=float(stable_rank(s)),
        effective_rank=float(effective_rank(s)),
        mp_edge=random_edge(s, shape),
        beyond_edge=beyond_edge(s, shape),
        alpha=alpha,
        alpha_distance=alpha_distance,
        snr=signal_to_noise(s, shape),
        condition=nan if error else condition(s, shape),
        rank_error=error,
    )


class Row(NamedTuple):
    """A tensor, or a matrix that one of the file fuses or stacks, with its measures."""

    facts: TensorFacts
    layer: int | None
    expert: int | None
    numbers: Measures = NOT_MEASURED
    spectrum: str = ""  # exact or sketch; empty where it has none
    is_part: bool = False  # True for a part of a tensor of the file


class MatrixRow(NamedTuple):
    """A tensor or a matrix and its measures, as a row of a table."""

    tensor: str = column()
    role: str = column("Its role; the name without numbers where no row knows it.")
    layer: int | str = column()
    expert: int | str = column()
    dtype: str = column("As stored.")
    shape: str = column()
    values: int = column("How many it has.")
    bytes: int = column("As stored.")
    rms: float = column("Root of the mean square: a norm that does not grow with the size.")
    least: float = column()
    most: float = column()
    not_finite: int = column("Values that are NaN or infinite.", symbol="not finite")
    zero_rows: int = column("Rows that are zero throughout.", symbol="zero rows")
    constant_rows: int = column(
        "Rows that hold one other value throughout.", symbol="constant rows"
    )
    same_as: str = column(
        "The first tensor that holds exactly the same values.", symbol="same values as"
    )
    tensors: int = column("How many rows have this role.")
    rms_median: float = column("Of the role.", symbol="median rms")
    rms_least: float = column("Of the role.", symbol="least rms")
    rms_most: float = column("Of the role.", symbol="largest rms")
    measures: Measures = MEASURES  # type: ignore[assignment]
    spectrum: str = column(
        "How singular values were computed: exact or sketch; empty for vectors and integers."
    )

    @classmethod
    def of(cls, row: Row, tensors: int, median: float, least: float, most: float) -> "MatrixRow":
        """The row of a tensor whose role has so many tensors, and these norms."""
        facts = row.facts
        return cls(
            tensor=facts.name,
            role=facts.role,
            layer="" if row.layer is None else row.layer,
            expert="" if row.expert is None else row.expert,
            dtype=facts.dtype,
            shape=shown_shape(facts.shape),
            values=facts.size,
            bytes=facts.nbytes,
            rms=facts.rms,
            least=facts.least,
            most=facts.most,
            not_finite=facts.not_finite,
            zero_rows=facts.zero_rows,
            constant_rows=facts.constant_rows,
            same_as=facts.same_as,
            tensors=tensors,
            rms_median=median,
            rms_least=least,
            rms_most=most,
            measures=row.numbers,
            spectrum=row.spectrum,
        )


@holds_arrays
class Matrices(Everything):
    """All tensors of a checkpoint in numbers, and all its matrices."""

    rows: Sequence[Row] = ()  # in the order of the file
    networks: Sequence[JudgedNetwork] = ()  # in the stack that is read
    percentiles: Sequence[Column] = ()  # among other checkpoints' matrices; an audit adds them

    @cached_property
    def table(self) -> Table:
        """One row per matrix, and per vector; its csv() is matrices.csv."""
        roles = by_role(row.facts for row in self.rows)
        spreads = {role: (len(tensors), *spread_of(tensors)) for role, tensors in roles.items()}
        rows = [MatrixRow.of(row, *spreads[row.facts.role]) for row in self.rows]
        return Table([*Table.of(MatrixRow, rows).columns, *self.percentiles])

    def grids(self, names: Iterable[str]) -> tuple[np.ndarray, list[str], dict[str, np.ndarray]]:
        """Layers (L,), roles (R,) and measures (L, R) of matrices; the median of several."""
        in_layers = [row for row in self.rows if row.spectrum and row.layer is not None]
        layers = sorted({row.layer for row in in_layers if row.layer is not None})
        roles = [*dict.fromkeys(row.facts.role for row in in_layers)]
        columns = [column.name for column in MEASURES]
        cells: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in in_layers:
            cells[layers.index(row.layer or 0), roles.index(row.facts.role)].append(row)
        grids = {}
        for name in names:
            column = columns.index(name)
            grids[name] = np.full((len(layers), len(roles)), nan)
            for place, rows in cells.items():
                grids[name][place] = np.median([row.numbers[column] for row in rows])
        return np.array(layers), roles, grids


def read_matrices(model: Model | TensorsOnly, exact: bool = False) -> Matrices:
    """Read every tensor of a model once, and measure every matrix; large ones by a sketch.

    Of feed-forward networks, neurons are judged by the same reading. Memory is two Gram matrices
    for each matrix that is measured at a time, and all of one that is wider than high, or that is
    one with others in the file; of a sketch at most 256 MB.
    """
    unchecked = model.unchecked()
    checkpoint, tensors = unchecked.checkpoint, unchecked.tensors
    unread = unreadable(checkpoint)
    named = [tensor for tensor in tensors if tensor.name not in unread]
    networks, roles = Networks(tensors, named), tensors.roles
    rows, facts = measured_rows(checkpoint, tensors, [*filter(is_matrix, named)], exact, networks)
    facts |= {name: first.facts for name, (first, *_) in rows.items() if not first.is_part}
    facts |= read_facts(checkpoint, [tensor.name for tensor in named if tensor.name not in facts])
    in_file = [(name, facts[name]) for name in checkpoint if name in facts]
    known = [replace(fact, known_as=roles.get(name, "")) for name, fact in in_file]
    complete = {fact.name: fact for fact in with_twins(checkpoint, known)}
    in_order: list[Row] = []
    for tensor in named:
        tensor_facts = complete[tensor.name]
        for row in rows.get(tensor.name) or [Row(tensor_facts, tensor.layer, tensor.expert)]:
            in_order.append(row if row.is_part else row._replace(facts=tensor_facts))
    return Matrices([*complete.values()], unread, in_order, networks.finished())


class Measured(NamedTuple):
    """Matrices that were measured, by name in the file."""

    rows: dict[str, list[Row]]  # one, or one for each matrix that the tensor fuses or stacks
    facts: dict[str, TensorFacts]  # about tensors that fuse or stack several, if wholly read


def measured_rows(
    checkpoint: Checkpoint,
    tensors: Tensors,
    named: Sequence[NamedTensor],
    exact: bool,
    networks: Networks | None = None,
) -> Measured:
    """Measure these matrices, and add their values to the networks that they are part of."""
    largest = LARGEST_EXACT if exact else EXACT_SIDE
    works = [Work(tensor, pieces_of(tensors, tensor), largest) for tensor in named]
    most_room = max((work.room for work in works), default=1)
    threads = max(1, min(usable_cores(), ROOM // most_room))
    if networks is not None:
        for work in works:
            for matrix in work.pieces or [work.tensor]:
                networks.expect(matrix)
    measured = Measured({}, {})
    total = sum(work.tensor.tensor.nbytes for work in works)
    matrices = _matrices(checkpoint, tensors, works, networks, measured.facts)
    with bar(what="matrices", unit="B", total=total, unit_scale=True) as done:
        for row, neurons in in_threads(partial(_measured, largest=largest), matrices, threads):
            measured.rows.setdefault(row.facts.name, []).append(row)
            if networks is not None and neurons is not None:
                networks.add(neurons)
            done.update(row.facts.nbytes)
    return measured


def is_matrix(tensor: NamedTensor) -> bool:
    """True if a tensor is a matrix, or several, of numbers that are not integers."""
    dtype = tensor.tensor.dtype
    return sides(tensor.shape) is not None and (dtype == "F64" or dtype not in NATIVE)


def sides(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The two sides of a matrix, its last axes joined; None for a vector.

    Examples
    --------
    >>> sides((768, 3, 16, 16)), sides((1, 768))
    ((768, 768), None)
    """
    sizes = [size for size in shape if size != 1]
    return (sizes[0], prod(sizes[1:])) if len(sizes) > 1 and 0 not in sizes else None


def pieces_of(tensors: Tensors, tensor: NamedTensor) -> list[NamedTensor]:
    """The matrices that one tensor fuses or stacks; empty where it is one itself."""
    if tensor.role.endswith(".bias"):
        return []
    if len(tensor.shape) > 2 and (experts := tensor.experts):
        return [piece for expert in experts for piece in pieces_of(tensors, expert) or [expert]]
    return [part for part in tensors.parts(tensor) if sides(part.shape)]


class Work(NamedTuple):
    """A tensor to measure, or the matrices that it fuses or stacks."""

    tensor: NamedTensor
    pieces: list[NamedTensor]
    largest: int  # smaller side whose spectrum is exact

    @property
    def room(self) -> int:
        """Bytes that one of its matrices needs."""
        m, n = sides(self.pieces[0].shape if self.pieces else self.tensor.tensor.shape) or (1, 1)
        if min(m, n) > self.largest:
            return 4 * (m * n if self.pieces else min(m * n, HELD))
        return 16 * min(m, n) ** 2 + 4 * m * n * (m < n or bool(self.pieces))


class Matrix(NamedTuple):
    """A matrix to measure; a part of a tensor with its values, (m, n)."""

    tensor: NamedTensor
    stored: Tensor
    role: str  # as in the table
    neurons: Neurons | None  # to add its values to
    values: np.ndarray | None = None


def _matrices(
    checkpoint: Checkpoint,
    tensors: Tensors,
    works: Sequence[Work],
    networks: Networks | None,
    facts: dict[str, TensorFacts],
) -> Iterator[Matrix]:
    """Every matrix in turn; parts are read here, in one thread, as neighbours share one reading."""
    sharing, current, shared = _sharing(works), None, dict[str, SharedTensor]()

    def matrix(tensor: NamedTensor, values: np.ndarray | None = None) -> Matrix:
        neurons = None if networks is None else networks.neurons_of(tensor, values is not None)
        stored = shared.get(tensor.name, tensor.tensor)
        return Matrix(tensor, stored, tensors.known_as(tensor), neurons, values)

    for batch in batches(works, lambda work: work.tensor.tensor.nbytes):
        checkpoint.prefetch([work.tensor.name for work in batch])
        for tensor, pieces, _ in batch:
            if (place := (tensor.stack, tensor.layer)) in sharing and place != current:
                current = place
                shared = {name: SharedTensor(*how) for name, how in sharing[place].items()}
                tensors.read_through(shared)
            readable = False
            for piece in pieces:
                # the tensor has a row of its own where its parts cannot be told
                with suppress(CheckpointError):
                    yield matrix(piece, piece.array())
                    readable = True
            if not readable:
                yield matrix(tensor)
            elif tensor.name in shared and (all_facts := shared[tensor.name].facts):
                facts[tensor.name] = all_facts


LayerPlace = tuple[str | None, int | None]  # stack and layer
Sharing = dict[str, tuple[Tensor, bool, bool]]  # tensors by name, with keep and note


def _sharing(works: Sequence[Work]) -> dict[LayerPlace, Sharing]:
    """Tensors that share a reading, by stack and layer; whether to keep them, and to note facts.

    Where a tensor fuses projections, all those of its layer are split together.
    """
    projections = {w.tensor.name for w in works if {*w.tensor.role.split("+")} <= PROJECTIONS}
    fused = [w.tensor for w in works if w.pieces and w.tensor.name in projections]
    split = {(tensor.stack, tensor.layer) for tensor in fused}
    sharing: dict[LayerPlace, Sharing] = defaultdict(dict)
    for tensor, pieces, _ in works:
        place = tensor.stack, tensor.layer
        keep = place in split and tensor.name in projections
        if (keep or pieces) and tensor.tensor.dtype not in NATIVE:
            sharing[place][tensor.name] = tensor.tensor, keep, bool(pieces)
    return sharing


def _measured(matrix: Matrix, largest: int) -> tuple[Row, Neurons | None]:
    """Facts and measures of one matrix; its values are added to its neurons."""
    tensor, stored, role, neurons, values = matrix
    noted = list[TensorFacts]()
    shape = sides(stored.shape if values is None else tensor.shape)
    assert shape is not None
    is_exact = min(shape) <= largest
    if values is not None:
        n_bytes = round(stored.nbytes * prod(tensor.shape) / prod(stored.shape))
        about = TensorFacts(tensor.name, stored.dtype, tensor.shape, n_bytes, known_as=role)
        held = values.reshape(-1)
        noted.append(facts_of_values(about, held))
        if neurons is not None:
            neurons.add(held, 0)
    elif not is_exact and prod(shape) <= HELD:
        held, filled = np.empty(prod(shape), np.float32), 0
        for chunk in _noted(stored, noted, neurons):
            held[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
    else:
        held = None
    if is_exact:
        s = singular_values(_noted(stored, noted, neurons) if held is None else [held], shape)
        spectrum = Sketch(s, 0.0)
    else:
        if held is None:
            deque(_noted(stored, noted, neurons), maxlen=0)
        again = partial(_stored_values, stored) if held is None else lambda: [held]
        squares = reduce(TensorFacts.and_then, noted).squares
        spectrum = sketched_singular_values(again, shape, squares)
    numbers = measures(spectrum, shape)
    how = "exact" if is_exact else "sketch"
    facts = reduce(TensorFacts.and_then, noted)
    return Row(facts, tensor.layer, tensor.expert, numbers, how, values is not None), neurons


def _stored_values(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor's values in blocks."""
    return (block.values() for block in blocks_of(tensor))


def _noted(
    tensor: Tensor, facts: list[TensorFacts], neurons: Neurons | None
) -> Iterator[np.ndarray]:
    """A tensor's values in blocks, the facts of each block noted, and added to its neurons."""
    about = TensorFacts(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)
    for block in blocks_of(tensor):
        values = block.values()
        facts.append(facts_of_values(about, values, block.start))
        if neurons is not None:
            neurons.add(values, block.start)
        yield values
