"""A model's first attention layer as a function of token types, which is what detokenization is read from."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tqdm import tqdm

from weightscope.metrics.sigma import SigmaStatistics, sigma_statistics
from weightscope.metrics.terms import SixTerms, six_terms
from weightscope.model import Head, Model

PROGRESS = {"delay": 2, "leave": False, "dynamic_ncols": True}  # a bar for whatever takes over two seconds


@dataclass(frozen=True)
class FirstLayer:
    """Embeddings seen by one layer's heads, sigma taken care of.

    Attributes
    ----------
    model : Model
    layer : int
        0, unless somebody asks how another layer's heads would see the bare embeddings.
    """

    model: Model
    layer: int = 0

    @cached_property
    def heads(self) -> list[Head]:
        return self.model.layer(self.layer).heads()

    @cached_property
    def sigma(self) -> SigmaStatistics:
        """sigma(e_t + p_j) over all tokens and positions; a model with learned positions has it."""
        embeddings, positions = self.model.embeddings, self.model.positions
        assert positions is not None
        with tqdm(total=len(positions), desc="sigma", unit="position", **PROGRESS) as bar:
            return sigma_statistics(
                embeddings.blocks, embeddings.n_tokens, positions, self.model.config.norm_eps, bar.update
            )

    @cached_property
    def divisor(self) -> np.ndarray:
        """c_t, what each token's embedding is divided by: its sigma averaged over positions, float32 (vocab,).

        This is the paper's code's choice for comparing token types with no position in view.
        """
        if self.model.positions is None:
            embeddings = self.model.embeddings
            return np.concatenate([embeddings.sigma(np.arange(s, s + len(b))) for s, b in embeddings.blocks()])
        return self.sigma.token_mean.astype(np.float32)

    def token_factors(self, head: Head) -> tuple[np.ndarray, np.ndarray]:
        """E~ W_Q and E~ W_K, whose product is T^ee of every pair of token types (eq. 14), without 1/sqrt(d').

        Returns
        -------
        left, right : float32 arrays of shape (vocab, r)
        """
        embeddings = self.model.embeddings
        qk = head.qk
        left, right = (np.empty((embeddings.n_tokens, qk.rank_bound), np.float32) for _ in range(2))
        for first, block in embeddings.blocks():
            rows = slice(first, first + len(block))
            scaled = block / self.divisor[rows, None]  # (b, d)
            np.matmul(scaled, qk.left, out=left[rows])
            np.matmul(scaled, qk.right, out=right[rows])
        return left, right

    def token_scores(self, token: int) -> np.ndarray:
        """T^ee of one current token with every previous token type, for every head: float32 (n_heads, vocab)."""
        embeddings = self.model.embeddings
        current = embeddings.tokens[token] / self.divisor[token]  # (d,)
        maps = np.stack([head.qk.right @ (current @ head.qk.left) for head in self.heads], axis=1)  # (d, H)
        scores = np.empty((embeddings.n_tokens, len(self.heads)), np.float32)  # (V, H)
        for first, block in embeddings.blocks():
            rows = slice(first, first + len(block))
            scores[rows] = (block / self.divisor[rows, None]) @ maps
        return scores.T

    def terms(self, head: int, tokens: np.ndarray, positions: np.ndarray) -> SixTerms:
        """The six terms of eq. 14 for one head over a sequence of tokens at given positions.

        Parameters
        ----------
        head : int
        tokens, positions : (n,) int arrays
        """
        embeddings = self.model.embeddings
        learned = self.model.positions
        e = embeddings.tokens[tokens]  # (n, d)
        p = np.zeros_like(e) if learned is None else learned[positions]  # (n, d)
        chosen = self.heads[head]
        return six_terms(chosen.qk, chosen.qk_bias, e, p, embeddings.sigma(tokens, positions))
