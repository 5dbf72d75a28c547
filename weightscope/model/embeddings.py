"""Embeddings into a model's first layer, and the unembedding that turns its output into logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.layers.norms import Norm

BLOCK_BYTES = 16 << 20  # embedding rows are streamed in float32 blocks of about this size


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings(ShowsShapes):
    """Token and position embeddings as the first layer sees them.

    A token's row is what the file holds with everything done to it that does not depend on
    position: a scale (Gemma), the row of token type 0 added (BERT), a projection to the model's
    width (OPT), a norm where no position is added after the row is looked up (BLOOM). The sum of a
    token's row and a position's, divided by `sigma` of the two, is what the heads of
    `Model.first_layer` act on.
    """

    token_tensor: Tensor  # (vocab, e): as stored, unread
    positions: np.ndarray | None  # (n_positions, d): row p belongs to position p
    first_norm: Norm | None  # its sigma divides the sum of the rows
    scale: float = 1.0  # multiplies stored rows
    projection: np.ndarray | None = None  # (e, d): brings them to the model's width
    shift: np.ndarray | None = None  # (d,): added to every row
    norm: Norm | None = None  # a norm of the rows themselves
    lacks: str = ""  # why a model's positions are missing here; empty if none are

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.token_tensor.shape[0]

    @property
    def as_stored(self) -> bool:
        """Rows enter the model as the file holds them."""
        nothing_added = self.projection is None and self.shift is None and self.norm is None
        return self.scale == 1 and nothing_added

    def entering(self, rows: np.ndarray) -> np.ndarray:
        """Stored rows (..., e) as they enter the model, (..., d)."""
        if self.as_stored:
            return rows
        rows = rows * np.float32(self.scale)
        if self.projection is not None:
            rows = rows @ self.projection
        if self.shift is not None:
            rows = rows + self.shift
        return rows if self.norm is None else self.norm(rows)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token rows, float32 (vocab, d); a read-only view of the file where it holds them so."""
        return self.entering(self.token_tensor.read())

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Some tokens' rows, (...) ids -> float32 (..., d); no others are read unless all have
        been.

        Raises
        ------
        CheckpointError
            There is no such token.
        """
        tokens = ids_of(tokens, "tokens")
        ids, where = np.unique(tokens, return_inverse=True)
        if (wrong := outside(ids, self.n_tokens)) is not None:
            problem = f"no token {wrong}: the vocabulary has {self.n_tokens}"
            raise CheckpointError(problem, file=self.token_tensor.file.path)
        if "tokens" in self.__dict__:
            return self.tokens[tokens]
        runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1) if ids.size else []
        stored = [self.token_tensor.rows(int(run[0]), int(run[-1]) + 1) for run in runs]
        empty = np.empty((0, self.token_tensor.shape[1]), np.float32)
        return self.entering(np.concatenate([empty, *stored]))[where.reshape(tokens.shape)]

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Token rows [start, stop) in blocks of about 16 MB, each with its first row's index."""
        stop = stop or self.n_tokens
        n_rows = max(1, BLOCK_BYTES // (4 * self.token_tensor.shape[1]))
        if (start, stop) == (0, self.n_tokens):
            for first, rows in self.token_tensor.blocks(n_rows):
                yield first, self.entering(rows)
            return
        for first in range(start, stop, n_rows):
            rows = self.token_tensor.rows(first, min(first + n_rows, stop))
            yield first, self.entering(rows)

    def sigma(self, tokens: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """sigma(e_t + p_p), the first norm's divisor (detokenization paper, eq. 3); 1 without a
        norm.

        Parameters
        ----------
        tokens, positions : int arrays that broadcast against each other
            Token ids and positions; without positions, of the token rows alone.

        Returns
        -------
        float32 array of the broadcast shape

        Raises
        ------
        CheckpointError
            There is no such token or position, or the checkpoint lacks its position embedding.
        """
        rows = self.rows(tokens)  # (..., d)
        if positions is not None and self.lacks:
            raise CheckpointError(self.lacks)
        if positions is not None and self.positions is not None:
            positions, known = ids_of(positions, "positions"), len(self.positions)
            if (wrong := outside(positions, known)) is not None:
                problem = f"no position {wrong}: the model has {known}"
                raise CheckpointError(problem, file=self.token_tensor.file.path)
            rows = rows + self.positions[positions]
        if self.first_norm is None:
            return np.ones(rows.shape[:-1], rows.dtype)
        return self.first_norm.sigma(rows)


def ids_of(given: ArrayLike, what: str) -> np.ndarray:
    """Token ids or positions as an array of whole numbers, int64 if empty."""
    ids = np.asarray(given)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"{what} have dtype {ids.dtype}; expected whole numbers")
    return ids if ids.size else ids.astype(np.int64)


def outside(ids: np.ndarray, count: int | None) -> int | None:
    """An id below 0, else one not below `count` (None: no bound), else None."""
    if not ids.size:
        return None
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0:
        return lowest
    return highest if count is not None and highest >= count else None


@dataclass(frozen=True, eq=False, repr=False)
class Unembedding(ShowsShapes):
    """Every token's logit as a direction of the residual stream, the final norm folded in.

    logit_t(x) = x u_t' / sigma(x) + what does not depend on x, with u_t = w_t diag(gamma) (I -
    11'/d); an RMSNorm does not centre. So x u_t' is what a direction x adds to the logit of t, the
    scalar aside.
    """

    tensor: Tensor  # (vocab, e): as stored, unread
    norm: Norm | None  # the final norm; None where the family has none, or the checkpoint lacks it
    projection: np.ndarray | None = None  # (d, e): between the norm and the rows
    tied: bool = False  # the rows are the token embedding's
    lacks: str = ""  # tensor of the final norm that the checkpoint should have; empty if it has it

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.tensor.shape[0]

    @property
    def described(self) -> str:
        """The rows and the norm, in words."""
        also = ", the input embedding too" if self.tied else ""
        rows = f"the unembedding ({self.tensor.name}{also})"
        if self.lacks:
            return f"{rows} without the final norm, which is not in this checkpoint ({self.lacks})"
        return rows if self.norm is None else f"{rows}, the final norm folded in"

    def folded(self, rows: np.ndarray) -> np.ndarray:
        """u_t of stored rows, (n, e) -> (n, d)."""
        if self.projection is not None:
            rows = rows @ self.projection.T
        if self.norm is None:
            return rows
        scaled = rows * self.norm.gamma
        return scaled - scaled.mean(axis=1, keepdims=True) if self.norm.centred else scaled

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """u_t of some tokens, (n,) ids -> (n, d)."""
        return self.folded(np.concatenate([self.tensor.rows(int(t), int(t) + 1) for t in tokens]))

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All u_t in blocks of about 16 MB, each with the index of its first token."""
        for first, rows in self.stored_blocks():
            yield first, self.folded(rows)

    def stored_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Rows as stored, (n, e), in blocks of about 16 MB."""
        return self.tensor.blocks(max(1, BLOCK_BYTES // (4 * self.tensor.shape[1])))

    def shifts(self, rows: np.ndarray) -> np.ndarray:
        """Logits that the bias of the final norm adds, by stored row: (n, e) -> (n,)."""
        if self.norm is None:
            return np.zeros(len(rows), rows.dtype)
        beta = self.norm.beta
        return rows @ (beta if self.projection is None else beta @ self.projection)
