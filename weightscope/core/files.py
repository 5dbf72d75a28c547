"""Safe files: read without waiting for a pipe, write whole or not at all; a run's folder.

Commands import this module before they know what to do, so it imports nothing that takes time.
"""

import errno
import io
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

from weightscope.core.errors import CheckpointError

REPORT = ("report.html", "report.json")  # a page, and the numbers on it
HIDDEN = ".weightscope"  # folder within OUT for the lock, the manifest and what a resumed run needs
LARGEST_MANIFEST = 16_000_000  # bytes; what is cut there is not JSON
PIECES = 1000  # pieces of JSON text (numbers, brackets) joined into one write
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # network file systems without locks
BROKEN = (
    OSError, CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
)  # fmt: skip

_unfinished: set[Path] = set()  # partial files of this process


# Reading


def open_regular(path: Path) -> int:
    """Open a regular file, as a descriptor; refuse devices and /proc, wait for no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None
    except ValueError as error:  # a null byte or a lone surrogate in the name
        raise CheckpointError(f"cannot be a file's name ({error})", file=path) from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (status.st_size or not os.pread(descriptor, 1, 0)):
            return descriptor
        problem = "is not a regular file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    os.close(descriptor)
    raise CheckpointError(problem, file=path)


class _Readable(io.FileIO):
    """A regular file, open for reading; a failed read is a CheckpointError."""

    path: Path  # named in errors

    def readinto(self, buffer: Any) -> int:
        return self._checked(super().readinto, buffer)

    def readall(self) -> bytes:
        return self._checked(super().readall)

    def _checked(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            if (done := read(*arguments)) is not None:
                return done
            problem = os.strerror(errno.EAGAIN)  # as of /proc/kmsg, which counts as a regular file
        except OSError as error:
            problem = str(error.strerror)
        raise CheckpointError(f"cannot be read ({problem})", file=self.path)


def regular_file(path: Path) -> BufferedReader:
    """A regular file, open for reading; errors as for `open_regular`, also of reading it."""
    file = _Readable(open_regular(path))
    file.path = path
    return BufferedReader(file)


# Writing


@contextmanager
def new_file(path: Path, staging: Path | None = None, synced: bool = True) -> Iterator[BinaryIO]:
    """A file to write; it gets its name when the block ends well, on the disk if `synced`.

    A file whose content is checked when it is read need not be: after a power failure it is made
    again.

    Until then it is a partial file in `staging` (the file's own folder by default), with an
    unguessable name that is opened only if nothing has it, not even a link.
    """

    def open_no_link(path: str, flags: int) -> int:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    partial = (staging or path.parent) / f".{os.urandom(8).hex()}.partial"
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError("is not a regular file", file=path)  # renaming would replace it
    _unfinished.add(partial)
    try:
        with writing(path):
            for folder in (path.parent, partial.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with open(partial, "x+b", opener=open_no_link) as file:
                yield file
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):  # the folder could not be made, or the file has its name by now
            partial.unlink()
        _unfinished.discard(partial)


def remove_unfinished() -> None:
    """Remove the partial files of this process, which is about to be ended."""
    for partial in list(_unfinished):
        with suppress(OSError):
            partial.unlink()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can read; removed with its contents when the block ends."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def writing(path: Path, done: str = "written") -> Iterator[None]:
    """Turn an OSError of the block into "`path` cannot be written"."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be {done} ({error.strerror})", file=path) from None


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before results are computed; make none."""
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # the name is too long, or a folder above may not be searched
        problem = error.strerror
    else:
        if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
            return
        problem = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
    raise CheckpointError(f"nothing can be written to {folder} ({problem})")


def without_objects(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays for an .npz; one of objects, which would be pickled, is an error.

    `savez(allow_pickle=False)` says the same, but NumPy 2.1 writes an array of that name.
    """
    import numpy as np

    if objects := [name for name, array in arrays.items() if np.asarray(array).dtype.hasobject]:
        raise ValueError(f"arrays of objects are not written: {', '.join(objects)}")
    return dict(arrays)


def arrays_in(file: BinaryIO) -> dict[str, Any]:
    """The arrays of an .npz that `savez` wrote.

    Raises
    ------
    ValueError
        Its arrays have more bytes than the file: they are compressed, or share bytes, and may fill
        the memory.
    """
    import numpy as np

    packed = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > packed:
        raise ValueError(f"{packed} bytes that unpack to {unpacked}")
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        return dict(stored)


# Results by name

Bytes = bytes  # within `Files`, `bytes` is the method


class HasCsv(Protocol):
    """A table."""

    def csv(self) -> str: ...


class Files:
    """Result files in memory, by name: what a worker makes and sends back."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}  # by name or "subfolder/name"; empty for a folder

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write; it counts as written when the block ends without an error."""
        file = io.BytesIO()
        yield file
        self.contents[name] = file.getvalue()

    def bytes(self, name: str, content: Bytes) -> None:
        """Write bytes."""
        with self.open(name) as file:
            file.write(content)

    def text(self, name: str, text: str) -> None:
        """Write text as UTF-8."""
        self.bytes(name, text.encode())

    def json(self, name: str, value: Any, indent: int | None = 1) -> None:
        """Write indented JSON, or a line of it, without the whole text in memory."""
        pieces = json.JSONEncoder(indent=indent).iterencode(value)
        with self.open(name) as file:
            while text := "".join(islice(pieces, PIECES)):
                file.write(text.encode())
            file.write(b"\n")

    def table(self, name: str, table: HasCsv) -> None:
        """Write a table as CSV."""
        self.text(name, table.csv())

    def npz(self, name: str, **arrays: Any) -> None:
        """Write arrays as a compressed .npz."""
        import numpy as np

        with self.open(name) as file:
            np.savez_compressed(file, **without_objects(arrays))

    def add(self, contents: Mapping[str, Bytes]) -> None:
        """Write the contents of other `Files`."""
        for name, content in contents.items():
            self.bytes(name, content)

    def within(self, subfolder: str) -> "Files":
        """A view of these files, with `subfolder/` before each name."""
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
    """Result files in a folder, each written whole or not at all. Other files there stay."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path  # made with the first file

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with new_file(self.path / name) as file:
            yield file


class _Manifest(NamedTuple):
    """A run's files, as manifest.json records them."""

    finished: bool = False
    fingerprint: Any = None
    files: Mapping[str, str] = MappingProxyType({})  # SHA-256 of what the run has written, by name
    earlier: frozenset[tuple[str, str]] = (
        frozenset()
    )  # (name, SHA-256), perhaps left by earlier runs


class OutputFolder(Folder):
    """The folder of one run's results, for a `with` statement; locked until the run ends.

    When the run ends well, files of earlier runs that it did not write again are removed, since
    they do not belong to its results: only files listed in the manifest and unchanged since. A
    killed run leaves its manifest, so that the next run can remove its files. A file that no run
    has listed belongs to somebody else and is never overwritten. The manifest, the lock and what a
    resumed run needs are in `.weightscope` within the folder.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: Mapping[str, Any] | None = None,
        names: Sequence[str] = REPORT,
    ) -> None:
        super().__init__(path)
        self.hidden = path / HIDDEN
        self._staging = self.hidden / "unfinished"
        self._fingerprint = dict(fingerprint or {})  # all the results depend on, as JSON values
        self._names = names  # known in advance; the run does not begin over another's file
        self._written: dict[str, str] = {}  # as in `_Manifest.files` and `.earlier`
        self._earlier: frozenset[tuple[str, str]] = frozenset()
        self._lock: Any = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.release()

    def begin(self) -> None:
        """Lock the folder and record that a run has begun."""
        self.refuse_foreign()
        with writing(self.path):
            self.hidden.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.hidden / "lock", self.path)
        try:
            with writing(self.hidden):
                if self._staging.is_dir():  # left by a killed run
                    shutil.rmtree(self._staging)
            manifest = self._manifest()
            self._written = {}
            self._earlier = manifest.earlier | set(manifest.files.items())
            self._record(finished=False)
        except BaseException:
            self.release()
            raise

    def finish(self) -> None:
        """Remove what earlier runs left, and record that the results are complete."""
        for name, digest in sorted(self._earlier):
            if name in self._written or not self._holds(name, digest):
                continue
            path = self.path / name
            with writing(path, "removed"):
                path.unlink()
            if path.parent != self.path:
                with suppress(OSError):  # the subfolder is not empty
                    path.parent.rmdir()
        self._earlier = frozenset()
        self._record(finished=True)

    def release(self) -> None:
        """Unlock the folder; unfinished results stay."""
        # nothing was written, or another run uses it where the file system has no locks
        with suppress(OSError):
            self._staging.rmdir()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def refuse_foreign(self) -> None:
        """Refuse to begin where a result would overwrite a file that no run has written."""
        manifest = self._manifest()
        listed = {*manifest.files, *(name for name, _ in manifest.earlier)}
        for name in self._names:
            self._refuse_foreign(name, listed)

    def _refuse_foreign(self, name: str, listed: Collection[str]) -> None:
        path = self.path / name
        if name not in listed and HIDDEN not in path.parts and os.path.lexists(path):
            problem = "is there already, and no run of weightscope wrote it"
            advice = "move it away, or choose another folder"
            raise CheckpointError(f"{problem}: {advice}", file=path)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self._refuse_foreign(name, {*self._written, *(earlier for earlier, _ in self._earlier)})
        with self._inside(name) as file:
            yield file
            self._written[name] = _sha256(file)
            self._record(finished=False)  # before the file gets its name: a killed run lists all

    def _inside(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file within the folder."""
        if not (self.path / name).parent.resolve().is_relative_to(self.path.resolve()):
            problem = "leads out of the folder of results by a symbolic link"
            raise CheckpointError(problem, file=self.path / name)
        return new_file(self.path / name, self._staging)

    def add(self, contents: Mapping[str, Bytes]) -> None:
        """Write the contents of other `Files`; the manifest is recorded once for all."""
        import hashlib

        listed = {*self._written, *(earlier for earlier, _ in self._earlier)}
        for name in contents:
            self._refuse_foreign(name, listed)
        for name, content in contents.items():
            self._written[name] = hashlib.sha256(content).hexdigest()
        self._record(finished=False)
        for name, content in contents.items():
            with self._inside(name) as file:
                file.write(content)

    def is_finished(self, *names: str) -> bool:
        """True if a run with this fingerprint ended well with `names`, unchanged since."""
        manifest = self._manifest()
        return (
            manifest.finished
            and manifest.fingerprint == json.loads(json.dumps(self._fingerprint))
            and manifest.files.keys() >= {*names}
            and all(self._holds(name, digest) for name, digest in manifest.files.items())
        )

    @property
    def listed(self) -> tuple[str, ...]:
        """The files of the last run, if it has ended."""
        manifest = self._manifest()
        return tuple(manifest.files) if manifest.finished else ()

    def recorded(self, name: str) -> bool:
        """True if the last run has written a file, and it is unchanged."""
        digest = self._manifest().files.get(name)
        return digest is not None and self._holds(name, digest)

    def kept(self, name: str) -> bytes | None:
        """A file as the last run has recorded it; None if it is another or not a regular file."""
        import hashlib

        try:
            with regular_file(self.path / name) as file:
                content = file.read()
        except CheckpointError:
            return None
        digest = hashlib.sha256(content).hexdigest()
        return content if digest == self._manifest().files.get(name) else None

    def _holds(self, name: str, digest: str) -> bool:
        """True if a file is in this folder and unchanged; the manifest may lie about either."""
        try:
            path = self.path / name
            inside = path.parent.resolve().is_relative_to(self.path.resolve())
            with regular_file(path) as file:
                return inside and _sha256(file) == digest
        except (OSError, ValueError, CheckpointError):  # missing, or not a possible file name
            return False

    def _refuse_links(self) -> None:
        """Refuse links in place of the hidden folder or within: they lead to another's files."""
        link = None
        with suppress(OSError):  # not there, or not a folder: the first write reports it
            inside = () if self.hidden.is_symlink() else self.hidden.iterdir()
            link = next(filter(Path.is_symlink, (self.hidden, *inside)), None)
        if link is not None:
            problem = "is a symbolic link, which no run has made"
            advice = "remove it, or choose another folder"
            raise CheckpointError(f"{problem}: {advice}", file=link)

    def _manifest(self) -> _Manifest:
        """The last run's manifest; an empty one if there is none or it is broken."""
        self._refuse_links()
        try:
            with regular_file(self.hidden / "manifest.json") as file:
                record = json.loads(file.read(LARGEST_MANIFEST))
            files = {str(name): str(digest) for name, digest in record["files"].items()}
            earlier = frozenset((str(name), str(digest)) for name, digest in record["earlier"])
            return _Manifest(record["finished"] is True, record["fingerprint"], files, earlier)
        except BROKEN:
            return _Manifest()

    def _record(self, *, finished: bool) -> None:
        manifest = _Manifest(finished, self._fingerprint, self._written)._asdict()
        manifest["earlier"] = sorted(self._earlier)
        with new_file(self.hidden / "manifest.json", self._staging) as file:
            file.write((json.dumps(manifest, indent=1) + "\n").encode())


def _sha256(file: Any) -> str:
    import hashlib

    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _locked(lock: Path, folder: Path) -> Any:
    """Hold a lock that the system releases however this process ends; None without locks."""
    from filelock import FileLock, Timeout

    held = FileLock(lock, blocking=False, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        problem = "another run is writing into this folder"
        advice = "wait until it has ended, or choose another folder"
        raise CheckpointError(f"{problem}; {advice}", file=folder) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise CheckpointError(f"cannot be locked ({error.strerror})", file=folder) from None
        return None
    return held
