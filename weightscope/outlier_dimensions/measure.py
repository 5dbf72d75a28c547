"""Outlier dimensions and attention: what a model shows on sentences, and what its weights alone would have told."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightscope.folder import Files
from weightscope.outlier_dimensions.contributions import Contributions, observe_contributions
from weightscope.outlier_dimensions.guess import Guess, guess
from weightscope.outlier_dimensions.stream import Stream, observe_stream
from weightscope.runner.runner import Runner
from weightscope.text.kinds import TokenKinds


@dataclass(frozen=True, eq=False, repr=False)
class OutlierAnalysis:
    """Which dimensions of the residual stream stand out, what they add to attention scores, and what foretells it.

    Attributes
    ----------
    model : str
        Its name.
    stream : Stream
        Figs 1 to 3.
    contributions : Contributions
        Figs 4 and 5, and Table 1.
    guess : Guess
        What the weights alone say.
    """

    model: str
    stream: Stream
    contributions: Contributions
    guess: Guess

    @property
    def dimensions(self) -> np.ndarray:
        """The outlier dimensions, the farthest first."""
        return self.stream.outliers

    def write(self, files: Files) -> None:
        """Write tables of the outlier dimensions, and arrays of all dimensions."""
        stream, contributions, guessed = self.stream, self.contributions, self.guess
        files.table("stream.csv", stream.table())
        files.table("attention.csv", stream.attention_table())
        files.table("contributions.csv", contributions.table(self.dimensions))
        files.table("preferences.csv", contributions.preferences(self.dimensions))
        files.table("guess.csv", guessed.agreement(stream, contributions))
        files.npz(
            "outliers.npz",
            kinds=np.array(stream.kind_names), layers=stream.layer_indices, dimensions=self.dimensions,
            tokens=stream.counts, keys=contributions.counts,
            hidden=stream.hidden.astype(np.float32), attention=stream.attention.astype(np.float32),
            contributions=contributions.by_kind.astype(np.float32),
            guessed_columns=guessed.columns, guessed_gains=guessed.gains, guessed_contributions=guessed.contributions,
        )  # fmt: skip

    def __repr__(self) -> str:
        d, dimensions = self.stream.hidden.shape[1], self.dimensions.tolist()
        return f"OutlierAnalysis({self.model}: {len(dimensions)} of {d} dimensions stand out)"


def measure_outliers(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, sampled: int = 100
) -> OutlierAnalysis:
    """Run a model over sentences, and read its weights.

    Parameters
    ----------
    runner : Runner
    sequences : sequence of (n,) int arrays
        In random order.
    kinds : TokenKinds
    sampled : int
        How many of the sequences, the first, eq. 7 is averaged over.

    Raises
    ------
    CheckpointError
        The sequences are images, or a layer does not compute what its weights say.
    """
    return OutlierAnalysis(
        runner.model.title,
        observe_stream(runner, sequences, kinds),
        observe_contributions(runner, sequences[:sampled], kinds),
        guess(runner.model),
    )
