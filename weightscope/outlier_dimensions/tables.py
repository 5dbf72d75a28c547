"""The outlier-dimensions analysis on disk."""

from pathlib import Path

import numpy as np

from weightscope.folder import write_csv, write_npz
from weightscope.outlier_dimensions.guess import Guess, agreement, extremity
from weightscope.outlier_dimensions.measure import Contributions, Stream, score_gaps


def guess_table(guessed: Guess, stream: Stream, found: Contributions) -> dict[str, np.ndarray]:
    """Rank correlations, over dimensions, of what the weights say with what is measured; (L,) numbers by name."""
    return {
        "columns and |C|": agreement(guessed.columns, found.sizes),
        "extreme columns and |C|": agreement(extremity(guessed.columns), found.sizes),
        "gains and |mean|": agreement(guessed.gains, stream.means[:-1]),
        "extreme gains and |mean|": agreement(extremity(guessed.gains), stream.means[:-1]),
        "C at beta and |C|": agreement(guessed.contributions, found.sizes),
    }


def write_outliers(stream: Stream, found: Contributions, guessed: Guess, out: Path) -> None:
    """Write tables of the outlier dimensions and arrays of all.

    stream.csv (Figs 1 and 3), attention.csv (Fig. 2), contributions.csv (Table 1), preferences.csv,
    guess.csv and outliers.npz.

    Parameters
    ----------
    stream : Stream
    found : Contributions
    guessed : Guess
    out : Path

    Raises
    ------
    CheckpointError
        The folder cannot be written to.
    """
    means = np.concatenate((stream.means[..., None], stream.hidden), axis=-1)  # (L + 1, d, 1 + n_kinds)
    dimensions, z, heads = stream.outliers, stream.z, range(found.by_kind.shape[1])
    write_csv(
        out / "stream.csv",
        ("output", "dimension", "tokens", "mean", "robust_z"),
        (
            (output, j, scope, means[output, j, i], z[output, j, i])
            for output in range(len(means))
            for j in dimensions
            for i, scope in enumerate(("all", *stream.kinds))
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
    gaps = score_gaps(found)
    write_csv(
        out / "preferences.csv",
        ("layer", "key", "score_above_other", "of_outliers", *(f"of {j}" for j in dimensions)),
        (
            (layer, kind, gaps[i, k].sum(), gaps[i, k, dimensions].sum(), *gaps[i, k, dimensions])
            for i, layer in enumerate(found.layers)
            for k, kind in enumerate(found.kinds[:-1])
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
