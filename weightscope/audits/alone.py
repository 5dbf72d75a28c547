"""One audit at a time in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightscope.errors import CheckpointError
from weightscope.folder import writing

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other audits out of a folder until the block ends.

    The lock is the system's, on the folder itself: it leaves no file behind, and ends with the process however that
    ends. Where there is no such lock (Windows, some network file systems) the block runs without.

    Raises
    ------
    CheckpointError
        Another audit is at work there, or the folder cannot be made.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    held = _lock(folder)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(folder: Path) -> int | None:
    """An open descriptor that holds the folder, or None where it cannot be locked."""
    if fcntl is None:
        return None
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            problem = "another audit is writing into this folder; wait until it has ended, or give another --out"
            raise CheckpointError(problem, file=folder) from None
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return None
