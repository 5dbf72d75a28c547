"""The first layer's attention on text against its weights (detokenization paper, section 5)."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from weightscope.core.compute.cores import in_threads
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Files
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import (
    TERMS,
    FirstLayer,
    TermContributions,
    term_contributions,
)
from weightscope.model.text.sequences import Texts, token_windows
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, Runner, open_runner

PASSAGES = 50  # texts at most
BAND = (2.5, 97.5)  # percentiles over texts, as in the authors' Fig. 4
MOST_DIFFERENCE = 1e-4  # difference of an attention weight of the model and of the six terms


@holds_arrays
class TextCheck(ShowsShapes):
    """Attention of the first layer's heads on text, and the contributions of its terms."""

    query: int  # the position i at which attention is shown
    n_texts: int
    source: str  # the texts' origin
    attention: np.ndarray  # (n_heads, query + 1) alpha_ij over j, averaged over texts
    spread: np.ndarray  # (2, n_heads, query + 1) 2.5th and 97.5th percentile over texts
    # (n_heads, n) c^ee, c^pp, ... of eq. 18 in nats by position i, averaged over texts
    contributions: dict[str, np.ndarray]
    # (n_heads, n) as the paper's figure has them; see `TermContributions`
    drawn: dict[str, np.ndarray]
    difference: float  # largest difference of an attention weight of the model and of the six terms

    @cached_property
    def heads(self) -> Table:
        """One row per head: each term's contribution, averaged over positions from 1 on."""
        means = {name: c[:, 1:].mean(axis=1) for name, c in self.contributions.items()}
        columns = [Column(name, mean, f"$c^{name}$", "nats") for name, mean in means.items()]
        head = Column("head", np.arange(len(self.attention)))
        caption = "What each term decides, averaged over positions and texts (eq. 18)."
        return Table([head, *columns], caption)

    def write_tables(self, files: Files) -> None:
        """Write contributions.csv, one row per head and term, and contributions.npz."""
        rows = []
        for head in range(len(self.attention)):
            for name, c in self.contributions.items():
                drawn = self.drawn[name][head, 1:].mean()
                rows.append((head, name, self.heads[name][head], c[head, self.query], drawn))
        header = ("head", "term", "mean_over_positions", f"at_{self.query}", "c_paper")
        files.table("contributions.csv", Table.of_rows(header, rows))
        arrays = {f"c_{name}": c for name, c in self.contributions.items()}
        arrays |= {f"c_paper_{name}": c for name, c in self.drawn.items()}
        files.npz(
            "contributions.npz",
            attention=self.attention,
            spread=self.spread,
            query=np.array(self.query),
            **arrays,
        )


def run_on_texts(first: FirstLayer, texts: Texts, query: int) -> TextCheck:
    """Run the first layer of a model with learned positions on passages as long as it takes."""
    model = first.model
    if model.positions is None:
        name = model.family.name
        problem = f"a {name} has no position embedding to compare attention on text with"
        raise CheckpointError(problem, file=model.checkpoint.name)
    runner, n_positions = open_runner(model, device=first.device), len(model.positions)
    passages = token_windows(framing_of(model), texts.texts, PASSAGES, n_positions)
    if not passages:
        raise CheckpointError(
            f"no text in {texts.source} has {n_positions} tokens, as many as the model has "
            "positions"
        )
    return check_on_text(first, runner, passages, query, texts.source)


def check_on_text(
    first: FirstLayer, runner: Runner, sequences: Sequence[np.ndarray], query: int, source: str = ""
) -> TextCheck:
    """Run the first layer on texts and take its scores apart: sequences (n,)."""
    n_heads, n = len(first.heads), len(sequences[0])
    positions = np.arange(n)
    attention: list[np.ndarray] = []  # (n_heads, query + 1) by text
    contributions = {name: np.zeros((n_heads, n)) for name in TERMS}
    drawn = {name: np.zeros((n_heads, n)) for name in TERMS}
    largest = 0.0

    def observe(seen: Activations) -> None:
        nonlocal largest
        for index, alpha in zip(seen.inputs, seen.attention, strict=True):
            attention.append(alpha[:, query, : query + 1].copy())
            visible = alpha.max(axis=0) > 0  # (n, n) bool, keys that the mask lets through

            def of_head(
                head: int, tokens: np.ndarray = sequences[index], visible: np.ndarray = visible
            ) -> TermContributions:
                terms = first.terms(head, tokens, positions)
                return term_contributions(terms, first.heads[head].scale, visible)

            for head, moved in enumerate(in_threads(of_head, range(n_heads))):
                largest = max(largest, float(np.abs(moved.attention - alpha[head]).max()))
                if not largest < MOST_DIFFERENCE:
                    caveats = "; ".join(first.attention.caveats)
                    problem = (
                        f"head {head}'s attention differs from its six terms' by "
                        f"{largest:.1e} ({caveats})"
                    )
                    raise CheckpointError(problem, file=first.model.name)
                for name in TERMS:
                    contributions[name][head] += moved.contributions[name]
                    drawn[name][head] += moved.drawn[name]

    runner.observe(sequences, observe, layers=[0])
    n_texts = len(sequences)
    return TextCheck(
        query,
        n_texts,
        source,
        np.mean(attention, axis=0),
        np.percentile(attention, BAND, axis=0),
        {name: total / n_texts for name, total in contributions.items()},
        {name: total / n_texts for name, total in drawn.items()},
        largest,
    )
