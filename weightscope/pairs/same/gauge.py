"""Certificate that matrices of a layer are the other checkpoint's in another gauge, value by value.

Outputs on random inputs do not show one value among millions. With the stream along its rows, a
matrix W is another one in another order, sign, scale or basis within heads, with a norm's gains
absorbed and the stream's coordinates changed, if

    W_b diag(gains_b) = L W_a diag(gains_a) Q

with one L that takes each row from one row, times a number, or mixes the rows of a head. L is
fitted; every value of the product has to be W_b's, up to the rounding of both. That the factors of
L cancel within the layer is seen in its outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.model import Model
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.deeds.deed import Proof
from weightscope.pairs.deeds.recomputed import ARITHMETIC
from weightscope.pairs.deeds.rounding import FRACTION, SMALLEST
from weightscope.pairs.deeds.thresholds import FARTHEST
from weightscope.pairs.same.judge import Judged

SKETCHED = 8  # directions that rows are matched in; heads in as many more than they have rows


@dataclass(frozen=True, eq=False, repr=False)
class Rounded(ShowsShapes):
    """A matrix in float64, and the rounding of what stores it."""

    values: np.ndarray
    unit: float  # half a step, relative
    least: float  # the smallest normal number

    @classmethod
    def of(cls, tensor: NamedTensor, values: np.ndarray) -> "Rounded":
        """Some values of a tensor."""
        dtype = tensor.tensor.dtype
        unit, least = 2.0 ** -(FRACTION.get(dtype, 23) + 1), 2.0 ** SMALLEST.get(dtype, -126)
        return cls(values.astype(np.float64), unit, least)

    @property
    def room(self) -> np.ndarray:
        """Half a step at each value."""
        return self.unit * np.maximum(np.abs(self.values), self.least)

    def at(self, rows: np.ndarray | slice | int) -> "Rounded":
        """Some rows."""
        return replace(self, values=self.values[rows])


@dataclass(frozen=True, eq=False, repr=False)
class Gains(ShowsShapes):
    """The gains and the bias of a norm in A and B, (d,)."""

    stem: str = ""  # its label
    gains: tuple[np.ndarray | float, np.ndarray | float] = (1.0, 1.0)
    added: tuple[np.ndarray | float, np.ndarray | float] = (0.0, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class Gauges(ShowsShapes):
    """Tensors of a layer, or of what follows the last, that may be A's in another gauge."""

    a: Model
    b: Model
    changed: Sequence[Judged]
    experts: np.ndarray | None = None  # A's expert that each of B is
    turn: np.ndarray | None = None  # Q, (d, d)
    loose: float = 0.0  # error of Q, over a row's usual value
    unseen: float = 0.0  # change of all outputs, relative, that a run does not see

    def uncertified(self) -> list[Judged]:
        """The tensors whose values no gauge gives."""
        stems = {_stem(each): each for each in self.changed}
        norms = [*(self._gains(stem) for stem, each in stems.items() if _is_norm(each)), Gains()]
        held: set[str] = set()
        for stem, each in stems.items():
            norm = None if _is_norm(each) else self._norm_of(stem, each, norms)
            if norm is not None:
                held |= {stem, norm.stem}
        by_deed = {Proof.VALUES, Proof.GRID}  # enough for vectors, which no matrix certifies
        return [
            each
            for each in self.changed
            if _stem(each) not in held
            and not (self._is_vector(each) and each.done.proof in by_deed)
        ]

    def _gains(self, stem: str) -> Gains:
        """The gains and the bias of a norm, in both."""
        sides = []
        for model in (self.a, self.b):
            keys = (stem, f"{stem}.bias")
            sides.append(
                [model.tensors[key].array() if key in model.tensors else None for key in keys]
            )
        (gain_a, added_a), (gain_b, added_b) = sides
        gains = tuple(1.0 if each is None else each.astype(np.float64) for each in (gain_a, gain_b))
        added = tuple(
            0.0 if each is None else each.astype(np.float64) for each in (added_a, added_b)
        )
        return Gains(stem, (gains[0], gains[1]), (added[0], added[1]))

    def _is_vector(self, judged: Judged) -> bool:
        return len(self.b.tensors[judged.name_b].shape) == 1

    def _norm_of(self, stem: str, judged: Judged, norms: Sequence[Gains]) -> Gains | None:
        """The norm with which a gauge gives a matrix, and its bias; None without one."""
        try:
            pairs = [*self._matrices(stem, judged)]
        except (CheckpointError, ValueError):
            return None
        head_dim = self.b.config.head_dim
        for norm in norms:
            if pairs and all(self._is_gauge(*pair, norm, head_dim) for pair in pairs):
                return norm
        return None

    def _matrices(self, stem: str, judged: Judged) -> Iterator[tuple[list[Rounded], list[Rounded]]]:
        """A matrix, and a bias if it has one, in A and in B; of a stack, each expert's."""
        before = stem
        if self.experts is not None and judged.expert is not None:
            before = stem.replace(
                f" expert {judged.expert} ", f" expert {self.experts[judged.expert]} "
            )
        sides: list[list[Rounded]] = []
        for model, key in ((self.a, before), (self.b, stem)):
            named = [model.tensors[each] for each in (key, f"{key}.bias") if each in model.tensors]
            sides.append([Rounded.of(each, each.array()) for each in named])
        if sides[0][0].values.ndim != 3:
            yield sides[0], sides[1]
            return
        for i in range(len(sides[1][0].values)):
            place = i if self.experts is None else int(self.experts[i])
            yield [each.at(place) for each in sides[0]], [each.at(i) for each in sides[1]]

    def _is_gauge(self, x: list[Rounded], y: list[Rounded], norm: Gains, head_dim: int) -> bool:
        """True if some L gives every value: of matrices that read the stream, or write to it."""
        if len(x) != len(y) or x[0].values.shape != y[0].values.shape or x[0].values.ndim != 2:
            return False
        width = x[0].values.shape[1]
        if all(np.size(each) in (1, width) for each in (*norm.gains, *norm.added)):
            sides = enumerate((x, y))
            p, q = (_reading(side, norm.gains[i], norm.added[i]) for i, side in sides)
            if (turned := self._turned(p)) is not None and self._fits(turned, q, head_dim):
                return True
        if norm.stem:
            return False
        p, q = (replace(side[0], values=side[0].values.T) for side in (x, y))
        if (turned := self._turned(p)) is None or not self._fits(turned, q, head_dim):
            return False
        biases = [replace(each, values=each.values[None]) for each in (*x[1:], *y[1:])]
        if not biases:
            return True
        written = self._turned(biases[0])
        return written is not None and bool(
            _is_near(written, np.abs(written.values), biases[1], self.loose).all()
        )

    def _turned(self, x: Rounded) -> Rounded | None:
        """A matrix in B's coordinates of the stream, a bias in its last column left as it is."""
        if self.turn is None:
            return x
        d = len(self.turn)
        if x.values.shape[1] - d not in (0, 1):
            return None
        return replace(x, values=np.hstack([x.values[:, :d] @ self.turn, x.values[:, d:]]))

    def _fits(self, x: Rounded, y: Rounded, head_dim: int) -> bool:
        # a row is one of many in an output
        unseen = self.unseen * np.sqrt(len(y.values))
        return _rows_fit(x, y, self.loose, unseen) or _heads_fit(x, y, head_dim, self.loose, unseen)


def _stem(judged: Judged) -> str:
    """The label of a bias's matrix or norm, or its own."""
    return judged.label.removesuffix(".bias")


def _is_norm(judged: Judged) -> bool:
    return judged.role.startswith("norm.")


def _reading(side: list[Rounded], gains: np.ndarray | float, added: np.ndarray | float) -> Rounded:
    """A matrix times the gains that it reads, with what else it adds as a last column."""
    matrix, *biases = side
    values = matrix.values * gains
    if biases or np.ndim(added):
        bias = biases[0].values if biases else np.zeros(len(values))
        values = np.column_stack(
            [values, bias + matrix.values @ (added * np.ones(matrix.values.shape[1]))]
        )
    return replace(matrix, values=values)


def _is_near(made: Rounded, sizes: np.ndarray, y: Rounded, loose: float) -> np.ndarray:
    """True for rows of y that were made so; sizes of the summands of each value."""
    usual = np.sqrt(np.mean(y.values**2, axis=1, keepdims=True)) if loose else 0.0
    allowed = FARTHEST * (made.unit * sizes + y.room) + ARITHMETIC * sizes + loose * usual
    return np.asarray((np.abs(made.values - y.values) <= allowed).all(axis=1))


def _rows_fit(x: Rounded, y: Rounded, loose: float, unseen: float) -> bool:
    """True if each row of y is a row of x times a number."""
    left = np.flatnonzero(~_scaled(x, y, loose, unseen))
    if not len(left):
        return True
    places = _likely_rows(x.values, y.values[left])
    return places is not None and bool(_scaled(x.at(places), y.at(left), loose, unseen).all())


def _scaled(x: Rounded, y: Rounded, loose: float, unseen: float) -> np.ndarray:
    """True for each row of y that is the row of x times a number.

    The number is 1 where a run would not see another one, unless most rows have others.
    """
    squares = np.vecdot(x.values, x.values)
    factors = np.vecdot(x.values, y.values) / np.where(squares > 0, squares, 1.0)
    is_one = np.abs(np.abs(factors) - 1) <= unseen
    if 2 * is_one.sum() >= len(factors):
        factors = np.where(is_one, np.sign(factors), factors)
    made = replace(x, values=x.values * factors[:, None])
    return _is_near(made, np.abs(made.values), y, loose)


def _likely_rows(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The row of x that each row of y is along, (n,), by a few random directions."""
    turn = np.random.default_rng(0).standard_normal((x.shape[1], SKETCHED))
    sides = []
    for side in (x, y):
        sizes = np.linalg.norm(side, axis=1, keepdims=True)
        sides.append((side / np.where(sizes > 0, sizes, 1.0)) @ turn)
    both_ways = np.concatenate([sides[0], -sides[0]])
    points, numbers = np.unique(both_ways, axis=0, return_index=True)
    if not (np.isfinite(points).all() and np.isfinite(sides[1]).all()):
        return None
    from scipy.spatial import cKDTree  # SciPy takes a while to import

    return np.asarray(numbers[cKDTree(points).query(sides[1])[1]] % len(x))


def _heads_fit(x: Rounded, y: Rounded, head_dim: int, loose: float, unseen: float) -> bool:
    """True if each head of y has the rows of one head of x, in another basis."""
    n, width = y.values.shape
    if not 1 < head_dim <= width or n % head_dim:
        return False
    turn = np.random.default_rng(0).standard_normal((width, head_dim + SKETCHED))
    before, after = (side.values.reshape(-1, head_dim, width) @ turn for side in (x, y))
    bases = np.linalg.qr(before.swapaxes(1, 2))[0]  # (H, m, r)
    for h, sketch in enumerate(after):
        left = np.linalg.norm(sketch - (sketch @ bases) @ bases.swapaxes(1, 2), axis=(1, 2))
        p, q = x.at(_rows_of(int(left.argmin()), head_dim)), y.at(_rows_of(h, head_dim))
        mix = np.linalg.lstsq(p.values.T, q.values.T, rcond=None)[0].T  # (r, r)
        if np.abs(mix - np.rint(mix)).max() <= unseen:
            mix = np.rint(mix)
        made = replace(p, values=mix @ p.values)
        fitted = loose + p.unit + ARITHMETIC  # the error of the fit, in all values of a row
        if not _is_near(made, np.abs(mix) @ np.abs(p.values), q, fitted).all():
            return False
    return True


def _rows_of(head: int, head_dim: int) -> slice:
    return slice(head * head_dim, (head + 1) * head_dim)
