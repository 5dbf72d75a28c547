"""The outlier-dimensions analysis on disk."""

from pathlib import Path

import numpy as np

from weightscope.jobs.outlier_guess import Guess, agreement, extremity
from weightscope.output import write_csv, write_npz
from weightscope.runner.outlier_analysis import Contributions, Stream


def score_gaps(found: Contributions, dimensions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much higher keys of a kind score than those of the last kind, and what single dimensions add to that.

    C adds up to the score without its terms constant in the key, so a difference of sums of C is one of scores.

    Parameters
    ----------
    found : Contributions
    dimensions : (m,) int array

    Returns
    -------
    (L, n_kinds - 1) array, (L, m, n_kinds - 1) array
        Means over heads, before 1/sqrt(d').
    """
    gaps = (found.by_kind[..., :-1] - found.by_kind[..., -1:]).mean(axis=1)  # (L, d, n_kinds - 1)
    return gaps.sum(axis=1), gaps[:, dimensions]


def guess_table(guessed: Guess, stream: Stream, found: Contributions) -> dict[str, np.ndarray]:
    """Rank correlations over dimensions of what the weights say with what is measured, a column each of (L,) numbers."""
    return {
        "columns and |C|": agreement(guessed.columns, found.sizes),
        "extreme columns and |C|": agreement(extremity(guessed.columns), found.sizes),
        "gains and |mean|": agreement(guessed.gains, stream.means[:-1]),
        "extreme gains and |mean|": agreement(extremity(guessed.gains), stream.means[:-1]),
        "C at beta and |C|": agreement(guessed.contributions, found.sizes),
    }


def write_outliers(stream: Stream, found: Contributions, guessed: Guess, dimensions: np.ndarray, out: Path) -> None:
    """Write stream.csv (Figs 1 and 3), attention.csv (Fig. 2), contributions.csv (Table 1), guess.csv and outliers.npz.

    Parameters
    ----------
    stream : Stream
    found : Contributions
    guessed : Guess
    dimensions : (m,) int array
        The outlier dimensions, which the tables are about; outliers.npz has all.
    out : Path

    Raises
    ------
    CheckpointError
        The folder cannot be written to.
    """
    means, z, heads = stream.means, stream.z, range(found.by_kind.shape[1])
    write_csv(
        out / "stream.csv",
        ("output", "dimension", "mean", "robust_z", *(f"mean {kind}" for kind in stream.kinds)),
        (
            (output, j, means[output, j], z[output, j], *stream.hidden[output, j])
            for output in range(len(means))
            for j in dimensions
        ),
    )
    write_csv(
        out / "attention.csv",
        ("layer", *stream.kinds),
        ((layer, *row) for layer, row in zip(stream.layers, stream.attention.mean(axis=1), strict=True)),
    )
    write_csv(
        out / "contributions.csv",
        ("layer", "dimension", "key", *(f"head {head}" for head in heads)),
        (
            (layer, j, kind, *found.by_kind[i, :, j, k])
            for i, layer in enumerate(found.layers)
            for j in dimensions
            for k, kind in enumerate(found.kinds)
        ),
    )
    correlations = guess_table(guessed, stream, found)
    rows = zip(stream.layers, *correlations.values(), strict=True)
    write_csv(out / "guess.csv", ("layer", *correlations), rows)
    write_npz(
        out / "outliers.npz",
        kinds=np.array(stream.kinds),
        layers=stream.layers,
        dimensions=dimensions,
        tokens=stream.counts,
        keys=found.counts,
        hidden=stream.hidden.astype(np.float32),
        attention=stream.attention.astype(np.float32),
        contributions=found.by_kind.astype(np.float32),
        guessed_columns=guessed.columns,
        guessed_gains=guessed.gains,
        guessed_contributions=guessed.contributions,
    )
