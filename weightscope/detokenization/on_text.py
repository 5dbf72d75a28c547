"""The first layer's attention on text, beside what its weights say (detokenization paper, section 5 and Fig. 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.detokenization.term_contributions import TERMS, log_softmax, term_contributions
from weightscope.errors import CheckpointError
from weightscope.folder import write_csv, write_npz
from weightscope.runner.runner import Activations, Runner

MOST_DIFFERENCE = 1e-4  # of an attention weight, between the model's and that of the six terms


@dataclass(frozen=True)
class EmpiricalCheck:
    """What the first layer's heads do on text.

    Attributes
    ----------
    query : int
        The position i at which attention is shown.
    texts : int
    attention : (n_heads, query + 1) float64 array
        alpha_ij over j, averaged over texts.
    contributions : dict of str to (n_heads, n) float64 array
        c^ee, c^pp, ... of eq. 18 in nats by position i, averaged over texts.
    difference : float
        The largest between an attention weight of the model and the softmax of the six terms' sum.
    """

    query: int
    texts: int
    attention: np.ndarray
    contributions: dict[str, np.ndarray]
    difference: float


def empirical_check(first: FirstLayer, runner: Runner, sequences: Sequence[np.ndarray], query: int) -> EmpiricalCheck:
    """Run the first layer on texts and take its scores apart.

    Parameters
    ----------
    first : FirstLayer
        Of layer 0.
    runner : Runner
        Of the same model; it is not run beyond layer 0.
    sequences : sequence of (n,) int arrays
        Of one length.
    query : int
        Less than that length.

    Raises
    ------
    CheckpointError
        The six terms do not add up to the model's attention: something per token, as a q/k-norm, stands between.
    """
    n_heads, n = len(first.heads), len(sequences[0])
    positions = np.arange(n)
    attention = np.zeros((n_heads, query + 1))
    contributions = {name: np.zeros((n_heads, n)) for name in TERMS}
    largest = 0.0

    def observe(seen: Activations) -> None:
        nonlocal largest
        assert seen.tokens is not None
        for tokens, alpha in zip(seen.tokens, seen.attention, strict=True):
            attention[:] += alpha[:, query, : query + 1]
            visible = alpha.max(axis=0) > 0  # (n, n): what the mask lets through
            for head in range(n_heads):
                terms = first.terms(head, tokens, positions)
                expected = np.exp(log_softmax(first.heads[head].scale * terms.total(), visible))
                largest = max(largest, float(np.abs(expected - alpha[head]).max()))
                if not largest < MOST_DIFFERENCE:
                    caveats = "; ".join(first.attention.caveats)
                    problem = f"head {head}'s attention differs from its six terms' by {largest:.1e} ({caveats})"
                    raise CheckpointError(problem, file=first.model.name)
                for name, c in term_contributions(terms, first.heads[head].scale, visible).items():
                    contributions[name][head] += c

    runner.observe(sequences, observe, layers=[0])
    texts = len(sequences)
    means = {name: total / texts for name, total in contributions.items()}
    return EmpiricalCheck(query, texts, attention / texts, means, largest)


def write_empirical(found: EmpiricalCheck, out: Path) -> None:
    """Write contributions.csv, a row a head and term, and contributions.npz into `out`."""
    arrays = {f"c_{name}": c for name, c in found.contributions.items()}
    write_npz(out / "contributions.npz", attention=found.attention, query=np.array(found.query), **arrays)
    write_csv(
        out / "contributions.csv",
        ["head", "term", "mean_over_positions", f"at_{found.query}"],
        (
            [head, name, c[head, 1:].mean(), c[head, found.query]]
            for head in range(len(found.attention))
            for name, c in found.contributions.items()
        ),
    )
