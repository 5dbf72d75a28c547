"""Results as files: in memory by name, or in a folder where each file appears whole or not at all."""

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.regular import regular_file
from weightscope.tables import Table
from weightscope.writing import new_file, writing

HIDDEN = ".weightscope"  # the one folder within OUT that holds what is no result
PIECES = 1000  # of JSON, numbers and brackets, that are put together at a time
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # what some network file systems answer
Bytes = bytes  # `Files.bytes` hides the built-in name within the class


class Files:
    """Results by name, kept in memory: what a worker makes and sends back.

    Attributes
    ----------
    contents : dict of str to bytes
        What has been written so far; empty where files go to disk. Subfolders end in a forward slash.
    """

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write into. It counts as written when the block ends without an error."""
        file = io.BytesIO()
        yield file
        self.contents[name] = file.getvalue()

    def bytes(self, name: str, content: Bytes) -> None:
        """Write bytes."""
        with self.open(name) as file:
            file.write(content)

    def text(self, name: str, text: str) -> None:
        """Write text in UTF-8."""
        self.bytes(name, text.encode())

    def json(self, name: str, value: Any) -> None:
        """Write JSON, indented, without holding all of its text."""
        pieces = json.JSONEncoder(indent=1).iterencode(value)
        with self.open(name) as file:
            while text := "".join(islice(pieces, PIECES)):
                file.write(text.encode())
            file.write(b"\n")

    def table(self, name: str, table: Table) -> None:
        """Write a table as CSV."""
        self.text(name, table.csv())

    def npz(self, name: str, **arrays: np.ndarray) -> None:
        """Write arrays as a compressed .npz."""
        with self.open(name) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    def add(self, contents: Mapping[str, Bytes]) -> None:
        """Write files that were made elsewhere."""
        for name, content in contents.items():
            self.bytes(name, content)

    def within(self, subfolder: str) -> "Files":
        """The same files, under names that begin with `subfolder/`."""
        return _Within(self, subfolder)


class _Within(Files):
    def __init__(self, outer: Files, subfolder: str) -> None:
        super().__init__()
        self._outer, self._subfolder = outer, subfolder

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with self._outer.open(f"{self._subfolder}/{name}") as file:
            yield file


class Folder(Files):
    """Files in a folder, each under its name at once, whole or not at all. What else lies there stays.

    Attributes
    ----------
    path : Path
        Made with the first file if it is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write into, under its name once the block ends without an error."""
        with new_file(self.path / name) as file:
            yield file


class OutputFolder(Folder):
    """A folder for the results of one run, to be used in a `with` statement (or by `begin`, `finish` and `release`).

    Each file appears under its name at once, whole or not at all. A lock keeps a second run out until the block ends.
    When it ends without an error, the files of earlier runs that this run did not write again are removed: they would
    lie beside results that they do not belong to. A file is removed only if weightscope wrote it and nobody has changed
    it since. A run that is killed leaves a list of its files behind, so that the next run can remove them. A file that
    no run has listed is somebody else's: it is not written over.

    What is no result lies in `.weightscope` within the folder: the lock, the manifest, and what a run keeps in order to
    go on later.

    Parameters
    ----------
    path : Path
        Made on entry if it is not there.
    fingerprint : mapping, optional
        Everything that the results depend on, as JSON has it.
    names : sequence of str
        Results that it will write, as far as they are known: if one is there and somebody else's, nothing is begun.

    Attributes
    ----------
    path : Path
    hidden : Path
        The folder `.weightscope`.

    Raises
    ------
    CheckpointError
        On entry: the folder cannot be written to, holds a file that a result would be written over, or another run is
        writing into it.
    """

    def __init__(
        self, path: Path, fingerprint: Mapping[str, Any] | None = None, names: Sequence[str] = ("report.html",)
    ) -> None:
        super().__init__(path)
        self._names = names
        self.hidden = path / HIDDEN
        self._unfinished = self.hidden / "unfinished"
        self._fingerprint = dict(fingerprint or {})
        self._written: dict[str, str] = {}  # digests by name
        self._earlier: frozenset[tuple[str, str]] = frozenset()  # names and digests of what earlier runs have written
        self._lock: Any = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.release()

    def begin(self) -> None:
        """Keep other runs out, and note that one has begun."""
        self.refuse_foreign()
        with writing(self.path):
            self.hidden.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.hidden / "lock", self.path)
        try:
            with writing(self.hidden):
                if self._unfinished.is_dir():  # of a run that was killed
                    shutil.rmtree(self._unfinished)
            manifest = self._manifest()
            self._written = {}
            self._earlier = manifest.earlier | set(manifest.files.items())
            self._note(finished=False)
        except BaseException:
            self.release()
            raise

    def finish(self) -> None:
        """End well: remove what earlier runs left, and note that the results are whole."""
        for name, digest in sorted(self._earlier):
            if name in self._written or not self._holds(name, digest):
                continue
            path = self.path / name
            with writing(path, "removed"):
                path.unlink()
            if path.parent != self.path:
                with suppress(OSError):  # it holds other files
                    path.parent.rmdir()
        self._earlier = frozenset()
        self._note(finished=True)

    def release(self) -> None:
        """Let other runs in; what was not finished stays as it is."""
        with suppress(OSError):  # nothing was written, or another run writes where the file system has no locks
            self._unfinished.rmdir()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def refuse_foreign(self) -> None:
        """Look for files that the results would be written over.

        Raises
        ------
        CheckpointError
            There is one, and no run has written it.
        """
        manifest = self._manifest()
        listed = {*manifest.files, *(name for name, _ in manifest.earlier)}
        for name in self._names:
            self._refuse_foreign(name, listed)

    def _refuse_foreign(self, name: str, listed: Collection[str]) -> None:
        path = self.path / name
        if name not in listed and HIDDEN not in path.parts and os.path.lexists(path):
            problem = "is there already, and no run of weightscope wrote it: move it away, or choose another folder"
            raise CheckpointError(problem, file=path)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write into, under its name once the block ends without an error."""
        self._refuse_foreign(name, {*self._written, *(earlier for earlier, _ in self._earlier)})
        with new_file(self.path / name, beside=self._unfinished) as file:
            yield file
            self._written[name] = _digest(file)
            self._note(finished=False)  # before the file appears, so that no kill leaves one that is not listed

    def is_finished(self) -> bool:
        """A run with this fingerprint has ended well, and its files are as it wrote them."""
        manifest = self._manifest()
        return (
            manifest.finished
            and manifest.fingerprint == json.loads(json.dumps(self._fingerprint))
            and all(self._holds(name, digest) for name, digest in manifest.files.items())
        )

    def _holds(self, name: str, digest: str) -> bool:
        """A file is in this folder, whoever wrote the manifest that names it, and nobody has changed it."""
        try:
            path = self.path / name
            inside = path.parent.resolve().is_relative_to(self.path.resolve())
            with regular_file(path) as file:
                return inside and _digest(file) == digest
        except (OSError, ValueError, CheckpointError):  # not there, or no file's name
            return False

    def _manifest(self) -> "_Manifest":
        """What the last run has noted; nothing where there is no manifest, or a broken one."""
        try:
            with regular_file(self.hidden / "manifest.json") as file:
                found = json.load(file)
            return _Manifest(
                found["finished"] is True,
                found["fingerprint"],
                {str(name): str(digest) for name, digest in found["files"].items()},
                frozenset((str(name), str(digest)) for name, digest in found["earlier"]),
            )
        except (OSError, CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _Manifest()

    def _note(self, *, finished: bool) -> None:
        manifest = {
            "finished": finished,
            "fingerprint": self._fingerprint,
            "files": self._written,
            "earlier": sorted(self._earlier),
        }
        with new_file(self.hidden / "manifest.json", beside=self._unfinished) as file:
            file.write((json.dumps(manifest, indent=1) + "\n").encode())


class _Manifest(NamedTuple):
    """What a run notes of its files.

    Attributes
    ----------
    finished : bool
        False while the run writes.
    fingerprint : mapping
    files : dict of str
        Digests by name of what it has written.
    earlier : set of (name, digest)
        What runs before it have written, as long as that may still lie there.
    """

    finished: bool = False
    fingerprint: Any = None
    files: Mapping[str, str] = MappingProxyType({})
    earlier: frozenset[tuple[str, str]] = frozenset()


def _digest(file: Any) -> str:
    """SHA-256 of a whole file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _locked(lock: Path, folder: Path) -> Any:
    """A held lock, which the system releases however this process ends; None where the file system has no locks."""
    from filelock import FileLock, Timeout

    held = FileLock(lock, blocking=False, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        problem = "another run is writing into this folder; wait until it has ended, or choose another folder"
        raise CheckpointError(problem, file=folder) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise CheckpointError(f"cannot be locked ({error.strerror})", file=folder) from None
        return None
    return held
