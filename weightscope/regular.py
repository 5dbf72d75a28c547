"""Opening a file that somebody names: never a pipe, which would be waited for, nor a device."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from weightscope.errors import CheckpointError


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, opened without waiting for the other end of a pipe.

    Raises
    ------
    CheckpointError
        It cannot be opened, or is a folder, pipe, socket or device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None
    except ValueError as error:  # a name that no file can have: null bytes, lone surrogates
        raise CheckpointError(f"cannot be a file's name ({error})", file=path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError("is not a regular file", file=path)
    return descriptor


def regular_file(path: Path) -> BufferedReader:
    """A regular file, open to read; errors as for `open_regular`."""
    return os.fdopen(open_regular(path), "rb")
