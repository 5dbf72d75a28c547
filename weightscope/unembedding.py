"""What leaves a model's last layer: the final norm and the rows that make logits of the residual stream."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weightscope.attention.norms import Norm
from weightscope.checkpoint import Tensor
from weightscope.embeddings import BLOCK_BYTES
from weightscope.shapes import ShowsShapes


@dataclass(frozen=True, eq=False, repr=False)
class Unembedding(ShowsShapes):
    """Every token's logit as a direction of the residual stream, the final norm folded in.

    logit_t(x) = x u_t' / sigma(x) + what does not depend on x, with u_t = w_t diag(gamma) (I - 11'/d); an RMSNorm does
    not centre. So x u_t' is what a direction x adds to the logit of t, the scalar aside.

    Attributes
    ----------
    tensor : Tensor of shape (vocab, e)
        As stored, unread.
    norm : Norm or None
        The final norm; None where the family has none, or the checkpoint lacks it.
    projection : (d, e) array, or None
        Between the norm and the rows.
    tied : bool
        The rows are those of the token embedding.
    lacks : str
        Tensor of the final norm that the checkpoint should have and has not; empty where nothing is missing.
    """

    tensor: Tensor
    norm: Norm | None
    projection: np.ndarray | None = None
    tied: bool = False
    lacks: str = ""

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.tensor.shape[0]

    @property
    def described(self) -> str:
        """The rows and the norm, in words."""
        rows = f"the unembedding ({self.tensor.name}{', the input embedding too' if self.tied else ''})"
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
        """All of them in blocks of about 16 MB, each with the index of its first token."""
        for first, rows in self.tensor.blocks(max(1, BLOCK_BYTES // (4 * self.tensor.shape[1]))):
            yield first, self.folded(rows)
