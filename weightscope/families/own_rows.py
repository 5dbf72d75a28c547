"""The rows that a checkpoint may be read by: those of a file that was asked for, the table's, and a user's own."""

from dataclasses import replace
from pathlib import Path

import click

from weightscope.errors import CheckpointError
from weightscope.families.family import Family
from weightscope.families.rows import FAMILIES
from weightscope.families.stored import read_rows

MOST_FILES = 1000  # of rows in a user's folder


def own_folder() -> Path:
    """Where a user's rows lie: `families` in the configuration folder of weightscope, as the system has these."""
    return Path(click.get_app_dir("weightscope")) / "families"


def known_rows(families: str | Path | None = None) -> tuple[Family, ...]:
    """Every row, an earlier one first: what it reads, a later one does not.

    Parameters
    ----------
    families : path, optional
        A file of rows, which stand before the table's.

    Raises
    ------
    CheckpointError
        A file of rows cannot be read, or holds what is none.
    """
    given = () if families is None else read_rows(Path(families))
    rows: list[Family] = []
    taken: set[tuple[str, str]] = set()
    for group in (given, FAMILIES, _own_rows()):
        left = [(row, tuple(kind for kind in row.model_types if (kind, row.tower) not in taken)) for row in group]
        rows += [row if kinds == row.model_types else replace(row, model_types=kinds) for row, kinds in left if kinds]
        taken |= {(kind, row.tower) for row in group for kind in row.model_types}
    return tuple(rows)


def _own_rows() -> tuple[Family, ...]:
    folder = own_folder()
    try:
        files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot be looked at ({error.strerror})", file=folder) from None
    if len(files) > MOST_FILES:
        raise CheckpointError(f"holds {len(files)} files of rows; at most {MOST_FILES} are read", file=folder)
    return tuple(row for file in files for row in read_rows(file))
