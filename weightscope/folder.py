"""Results on disk: every file is written under a temporary name and renamed, so none is ever half written."""

import csv
import errno
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.escape import csv_safe


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Work on a file or folder whose failure is that it cannot be written.

    Raises
    ------
    CheckpointError
        The system refused.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be written ({error.strerror})", file=path) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well and removed when it does not.

    Raises
    ------
    CheckpointError
        The folder cannot be made or written to.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):  # a folder that could not be made holds nothing to remove
            partial.unlink()


def check_writable(folder: Path) -> None:
    """Find out whether results can be written into a folder, before the work that makes them; nothing is made yet.

    Raises
    ------
    CheckpointError
        They cannot.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        problem = error.strerror
    else:
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return
        problem = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
    raise CheckpointError(f"nothing can be written to {folder} ({problem})")


def remove_earlier(folder: Path, names: str) -> None:
    """Remove an earlier run's results that this run may not write again.

    They would lie beside results that they do not belong to. A folder is for one kind of run: what another recipe has
    written there under these names goes too, as its report.html does.

    Parameters
    ----------
    folder : Path
    names : str
        Regular expression of whole names.

    Raises
    ------
    CheckpointError
        One cannot be removed.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(names, path.name):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(f"cannot be removed ({error.strerror})", file=path) from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; see `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes; see `replacing`."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, indented; see `replacing`."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table: floats with six significant digits, NaN as an empty cell, no cell that a spreadsheet would run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    write_text(path, text.getvalue())


def _cell(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return "" if np.isnan(value) else f"{value:.6g}"
    if isinstance(value, str):
        return csv_safe(value)
    return str(value)


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays to an .npz; see `replacing`."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
