"""Files that appear under their names whole or not at all, and what to say where the system refuses one."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from weightscope.errors import CheckpointError

_unfinished: set[Path] = set()  # what this process has begun to write, under names of its own


@contextmanager
def new_file(path: Path, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write into, which appears under its name when the block ends without an error.

    Until then it has a name that nobody can guess, and is opened only if nothing has that name, not even a link. It is
    on the disk before it gets its name, so that a machine that fails leaves no empty file.

    Parameters
    ----------
    path : Path
        Its folder is made if it is not there.
    beside : Path, optional
        Folder for the unfinished file, on the same disk; by default the file's own. Made likewise.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    partial = (beside or path.parent) / f".{os.urandom(8).hex()}.partial"
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError("is not a regular file", file=path)  # a pipe or device would be replaced by one
    _unfinished.add(partial)
    try:
        with writing(path):
            for folder in (path.parent, partial.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with open(partial, "x+b", opener=_open_no_link) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):  # a folder that could not be made holds nothing to remove
            partial.unlink()
        _unfinished.discard(partial)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that nobody else can read, gone with all that is in it when the block ends."""
    import tempfile  # which whoever asks for help alone does not wait for

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def remove_unfinished() -> None:
    """Remove what this process has begun to write; it is about to end in the middle of it."""
    for partial in list(_unfinished):
        with suppress(OSError):
            partial.unlink()


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextmanager
def writing(path: Path, done: str = "written") -> Iterator[None]:
    """Work on a file or folder whose failure is that it cannot be written.

    Raises
    ------
    CheckpointError
        The system refused.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be {done} ({error.strerror})", file=path) from None


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
