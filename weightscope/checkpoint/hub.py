"""The Hugging Face Hub: a repository's files, small ones in its cache, weights in pieces.

Only the header and the needed tensors of a safetensors file are fetched, in cached blocks.

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME and HF_HUB_ETAG_TIMEOUT mean what they mean to the
Hub's client. Answers are not trusted: text is checked before it becomes part of a path or address.
"""

import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import numpy as np

from weightscope.checkpoint.config import MAX_BYTES, parse_json
from weightscope.checkpoint.http import (
    LARGEST_REQUEST,
    RETRIED,
    Delays,
    Deliver,
    Range,
    RangedFile,
    bare_etag,
    coalesce,
    exchange,
    new_memory,
    redirects,
)
from weightscope.checkpoint.storage import (
    COMMIT,
    ETAG,
    HeaderDigest,
    TensorEntry,
    etag_digest,
    file_identity,
    header_length,
    parse_header,
)
from weightscope.core.errors import CheckpointError, first_line, nearest
from weightscope.core.files import new_file, regular_file

ATTEMPTS = 3
FIRST_WAIT = 0.5  # seconds; doubles from one attempt to the next
SPAN = 1 << 20  # bytes written at a time, and fetched again after a failure
FORMS = {"commit": COMMIT, "etag": ETAG, "size": re.compile(r"[0-9]{1,15}")}
FILE_NAME = re.compile(r"(?!.*\.\.)(\w[\w.+=-]*/)*\w[\w.+=-]*")
REFUSED = {
    "GatedRepo": "is gated: accept its terms on the Hub and set HF_TOKEN to a token of yours",
    "RepoNotFound": (
        "is neither a local path nor a repository on the Hub (a private one needs HF_TOKEN)"
    ),
    "RevisionNotFound": "the repository has no revision '{revision}'",
}
NO_SUCH_FILE = "EntryNotFound"
WITHOUT_NETWORK = "; 'embedded' opens without a network"
SLIP = 0.85  # likeness of "embedded" to a misspelling of one letter; 0.71 to "embedding"
BLOCK = 8 << 20  # bytes cached together, and fetched again after a failure
CONNECTIONS = 8
AHEAD = 400 << 20  # bytes of tensors that wait in memory, a layer of a 70B; others wait on disk
ENTRY_BYTES = 110  # bytes of a header per tensor, besides its name
UNKNOWN_HEADER = 16_384  # enough for the header of a small model in one file
DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Repository:
    """A repository at a revision."""

    id: str  # `owner/name` or `name`
    revision: str = "main"  # branch, tag or commit
    kind: str = "model"
    delays: Delays = field(default_factory=Delays, repr=False, compare=False)  # of all its files

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"

    def cached(self, name: str) -> Path | None:
        """The file in the Hub's local cache, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = {"revision": self.revision, "repo_type": self.kind}
            path = try_to_load_from_cache(self.id, name, **cached)
        except (OSError, ValueError):
            return None
        if not isinstance(path, str) or (self._pinned and self._pinned not in Path(path).parts):
            return None  # a reference that is named as a commit may lead to another
        return Path(path)

    def on_server(self, name: str) -> RangedFile | None:
        """A file as the Hub's headers describe it; None if the repository has no such file."""
        answer, _ = self._ask("HEAD", self._url(name, self.revision))
        headers = answer.headers
        if headers.get("x-error-code") == NO_SUCH_FILE:
            return None
        commit = headers.get("x-repo-commit", "")
        etag = bare_etag(headers.get("x-linked-etag") or headers.get("etag", ""))
        length = "" if redirects(answer) else headers.get("content-length", "")
        size = headers.get("x-linked-size") or length
        for what, value in {"commit": commit, "etag": etag, "size": size}.items():
            if not FORMS[what].fullmatch(value):
                problem = f"the server does not answer as the Hub does for {name}"
                fault = f"its {what} is '{value[:80]}'"
                raise CheckpointError(f"{problem}: {fault}", file=str(self))
        self._check_commit(commit, name)
        url = self._url(name, commit)
        return RangedFile(url, etag, int(size), name, commit, self.delays)

    def file(self, name: str, limit: int) -> Path | None:
        """Download a file of at most `limit` bytes into the Hub's cache; None if there is none."""
        if not FILE_NAME.fullmatch(name):
            problem = f"the server lists a file that is called '{name[:80]}'"
            raise CheckpointError(problem, file=str(self))
        source = self.on_server(name)
        if source is None:
            return None
        if source.size > limit:
            problem = f"{name} has {source.size} bytes; at most {limit} are read"
            raise CheckpointError(problem, file=str(self))
        # The same layout as the Hub's own client writes.
        cache = Path(_constants().HF_HUB_CACHE) / "--".join([f"{self.kind}s", *self.id.split("/")])
        path = cache / "snapshots" / source.commit / name
        if not path.is_file():
            with new_file(path) as file:
                source.fetch_all(SPAN, file.write)
        if self.revision != source.commit:
            with new_file(cache / "refs" / self.revision) as ref:
                ref.write(source.commit.encode())
        return path

    def commit(self) -> str:
        """The commit that the revision is at the moment."""
        if self._pinned:
            return self._pinned
        source = self.on_server("config.json")
        commit = self._listing().get("sha") if source is None else source.commit
        if not COMMIT.fullmatch(str(commit)):
            raise self._refusal(f"the Hub names no commit of {self.revision}")
        return str(commit)

    def file_names(self) -> list[str]:
        """All files of the repository."""
        listing = self._listing()
        self._check_commit(listing.get("sha"), "the list of its files")
        siblings = listing.get("siblings")
        files = siblings if isinstance(siblings, list) else []
        names = [file.get("rfilename") for file in files if isinstance(file, dict)]
        return sorted(name for name in names if isinstance(name, str))

    def _listing(self) -> dict[str, Any]:
        """The Hub's description of the repository at this revision."""
        revision = quote(self.revision, safe="")
        url = f"{_constants().ENDPOINT}/api/{self.kind}s/{self.id}/revision/{revision}"
        _, body = self._ask("GET", url)
        return parse_json(body, file=str(self), what="the Hub's list of its files ")

    @property
    def _pinned(self) -> str:
        """The commit that the revision is; empty for a branch or tag."""
        return commit if COMMIT.fullmatch(commit := self.revision.lower()) else ""

    @property
    def _meant(self) -> str:
        """ "Did you mean" for a slip in "embedded", the one name that is no path and on no Hub."""
        return nearest(self.id.lower(), ["embedded"], SLIP)

    def _check_commit(self, commit: object, what: str) -> None:
        """Refuse an answer of another commit than the one that is asked for."""
        if self._pinned and commit != self._pinned:
            answer = f"for {what} the server answers '{str(commit)[:80]}'"
            raise self._refusal(f"this commit was asked for; {answer}")

    def _url(self, name: str, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.id, name, revision=revision, repo_type=self.kind)

    def _ask(self, method: str, url: str) -> tuple[Any, bytes]:
        """The Hub's answer and its body of at most MAX_BYTES; temporary errors are retried."""
        for attempt in range(ATTEMPTS):
            answer, body = self._ask_once(method, url)
            status, headers = answer.status_code, answer.headers
            code = headers.get("x-error-code") or ("RepoNotFound" if status == 401 else "")
            if body and headers.get("content-encoding", "identity") != "identity":
                raise self._refusal("the Hub sent an encoded answer")
            if status < 400 or code == NO_SUCH_FILE:
                return answer, body
            if code in REFUSED:
                problem = REFUSED[code].format(revision=self.revision)
                raise self._refusal(problem + (self._meant if code == "RepoNotFound" else ""))
            if status not in RETRIED:
                raise self._refusal(f"the Hub answered {status}")
            time.sleep(FIRST_WAIT * 2**attempt)
        problem = f"the Hub answered {status}, {ATTEMPTS} times in a row; try again later"
        raise self._refusal(problem)

    def _ask_once(self, method: str, url: str) -> tuple[Any, bytes]:
        """One answer, of whatever status; every error of the client becomes a CheckpointError."""
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            HTTPError,
            OfflineModeIsEnabled,
        )

        answers: list[Any] = []
        body, timeout = bytearray(), _constants().HF_HUB_ETAG_TIMEOUT

        def look(answer: Any, elsewhere: bool) -> None:
            answers.append(answer)

        try:
            for piece in exchange(method, url, look, str(self), timeout, self.delays):
                body += piece
                if len(body) > MAX_BYTES:
                    raise self._refusal(f"the Hub answered more than {MAX_BYTES} bytes")
        except CheckpointError:
            raise
        except OfflineModeIsEnabled:
            problem = "is not in the Hub's cache, and HF_HUB_OFFLINE is set"
            raise self._refusal(problem + (self._meant or WITHOUT_NETWORK)) from None
        except (HTTPError, OSError) as error:
            problem = "is not a local path, not in the Hub's cache, and the Hub cannot be reached"
            advice = self._meant or WITHOUT_NETWORK
            raise self._refusal(f"{problem} ({first_line(error)}){advice}") from None
        except Exception as error:  # the client is of another version, or cannot handle the answer
            failure = f"{type(error).__name__} {first_line(error)}"
            raise self._refusal(f"the Hub's client failed with {failure}") from None
        return answers[-1], bytes(body)

    def _refusal(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self}: {problem}")


def _constants() -> Any:
    from huggingface_hub import constants

    return constants


# Weights of a repository


class BlockCache:
    """Blocks of one file on disk, each with its SHA-256, which is checked at every use.

    They are among the Hub's cached assets (HF_ASSETS_CACHE/weightscope/blocks, which may be deleted
    at any time), in a folder named for `identity` (endpoint, repository, file, etag), so that a
    changed file does not find old blocks. On a disk that is full or read-only nothing is cached.
    """

    def __init__(self, *identity: str) -> None:
        from huggingface_hub import constants

        folder = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()
        self._folder = Path(constants.HF_ASSETS_CACHE) / "weightscope" / "blocks" / folder

    def has(self, key: str, size: int) -> bool:
        """True if a block of this size is cached; its content is not checked."""
        try:
            return (self._folder / key).stat().st_size == size + DIGEST_BYTES
        except OSError:
            return False

    def get(self, key: str) -> memoryview | None:
        """A block; None if it is missing or damaged."""
        try:
            with regular_file(self._folder / key) as file:
                stored = file.read()
        except (OSError, CheckpointError):
            return None
        content, digest = memoryview(stored)[:-DIGEST_BYTES], stored[-DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def put(self, key: str, content: bytes | memoryview) -> None:
        """Cache a block, whole or not at all."""
        with suppress(CheckpointError), new_file(self._folder / key, synced=False) as file:
            file.write(content)
            file.write(hashlib.sha256(content).digest())


class Ahead:
    """Tensors of a checkpoint that were fetched and are not read yet."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, np.ndarray] = {}
        self._lock = threading.Lock()

    @property
    def room(self) -> int:
        """Bytes that may still be kept."""
        with self._lock:
            return AHEAD - sum(content.nbytes for content in self._kept.values())

    def put(self, contents: Mapping[Hashable, np.ndarray]) -> None:
        """Keep tensors' bytes."""
        with self._lock:
            self._kept |= contents

    def take(self, key: Hashable, start: int, stop: int) -> np.ndarray | None:
        """Bytes [start, stop) of a tensor, dropped after its last one; None if it is not here."""
        with self._lock:
            content = self._kept.get(key)
            if content is None or stop < len(content):
                return None if content is None else content[start:stop].copy()
            del self._kept[key]
        return content[start:]


class RemoteFile:
    """One .safetensors file of a repository.

    All files of the checkpoint share `ahead`. `names` are the tensors that an index lists for this
    one: they tell the length of the header roughly, so that one request brings it.
    """

    samples = ""  # an etag tells the file
    keeps = True  # False: exactly the bytes that are asked for are fetched, and none is cached

    def __init__(
        self, repository: str, source: RangedFile, ahead: Ahead, names: Iterable[str] = ()
    ) -> None:
        self.path, self.size = PurePosixPath(source.name), source.size
        name, etag, size = source.name, source.etag, source.size
        self.identity = file_identity(repository, source.commit, name, etag, size)
        self.published, self.sha256 = self.identity, etag_digest(self.identity)
        self._source, self._ahead = source, ahead
        self._cache = BlockCache(_constants().ENDPOINT, repository, name, etag, str(size))
        # The last block, since its rows may be asked for one by one.
        self._last: tuple[Range | None, memoryview | None] = None, None
        known = sum(len(name) + ENTRY_BYTES for name in names)
        header = self._header(8 + (known or min(UNKNOWN_HEADER, size // 1000)))
        self.tensors, self.metadata = parse_header(header, size, file=self.path)

    @property
    def bytes_fetched(self) -> int:
        """All bytes fetched for this file."""
        return self._source.bytes_fetched

    def _header(self, guess: int) -> bytes:
        size = self._source.size
        cached = self._cache.get("header")
        start = self._fetch_start(0, min(guess, size)) if cached is None else bytes(cached)
        stop = 8 + header_length(start, size, file=self.path)
        if len(start) < stop:
            start += self._fetch_start(len(start), stop)
        self._cache.put("header", start[:stop])
        self.header = HeaderDigest.of(start[:stop])
        return start[8:stop]

    def read_digest(self, step: Callable[[int], object] = lambda count: None) -> None:
        """Fetch the whole file for its SHA-256, if its etag is not that."""
        if self.sha256:
            step(self.size)
            return
        digest = hashlib.sha256()

        def add(content: memoryview) -> None:
            digest.update(content)
            step(len(content))

        self._source.fetch_all(BLOCK, add)
        self.sha256 = digest.hexdigest()

    def _fetch_start(self, start: int, stop: int) -> bytes:
        content = [b""]
        if start < stop:
            self._source.fetch([(start, stop)], lambda _, fetched: content.append(bytes(fetched)))
        return b"".join(content)

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor, from memory, the cache or the server."""
        kept = self._ahead.take((self.path, entry), start, stop)
        if kept is not None:
            return kept
        try:
            wanted = np.empty(stop - start, np.uint8)
        except MemoryError:
            problem = f"no memory for {stop - start} bytes of it"
            raise CheckpointError(problem, file=self.path) from None
        first, last = entry.start + start, entry.start + stop
        missing = [] if self.keeps or start == stop else [(first, last)]
        for block in _blocks(entry) if self.keeps else ():
            if block[0] < last and first < block[1]:
                last_read, content = self._last
                if block != last_read:
                    content = self._cache.get(_key(block))
                if content is None or len(content) != block[1] - block[0]:
                    missing.append(block)
                else:
                    self._last = block, content
                    _copy(block, content, first, wanted)
        self._fetch(missing, lambda block, content: _copy(block, content, first, wanted))
        return wanted

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """Bytes of these tensors that are not cached."""
        return sum(stop - start for start, stop in self._missing(entries))

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Fetch uncached blocks of these tensors; whole tensors stay in memory until read."""
        entries = list(entries)
        missing = self._missing(entries)
        kept: dict[TensorEntry, np.ndarray] = {}
        room, absent = self._ahead.room, set(missing)
        for entry in entries:
            size = entry.stop - entry.start
            if size <= room and absent.issuperset(_blocks(entry)):
                with suppress(MemoryError):
                    kept[entry], room = np.empty(size, np.uint8), room - size
        places = {}
        for entry, content in kept.items():
            for start, stop in _blocks(entry):
                inside = slice(start - entry.start, stop - entry.start)
                places[start, stop] = memoryview(content)[inside]
        self._fetch(missing, lambda block, content: None, places)
        self._ahead.put({(self.path, entry): content for entry, content in kept.items()})

    def _missing(self, entries: Iterable[TensorEntry]) -> list[Range]:
        blocks = {block for entry in entries for block in _blocks(entry)}
        return sorted(b for b in blocks if not self._cache.has(_key(b), b[1] - b[0]))

    def _fetch(
        self,
        missing: Sequence[Range],
        deliver: Deliver,
        places: Mapping[Range, memoryview] = MappingProxyType({}),
    ) -> None:
        def keep(block: Range, content: memoryview) -> None:
            if self.keeps:
                self._cache.put(_key(block), content)
            deliver(block, content)

        def place(block: Range) -> memoryview:
            return places[block] if block in places else new_memory(block)

        groups = coalesce(missing, LARGEST_REQUEST)
        if len(groups) == 1:  # no thread for the usual case
            self._source.fetch(groups[0], keep, place)
        elif groups:
            with ThreadPoolExecutor(min(CONNECTIONS, len(groups))) as pool:
                deque(pool.map(lambda group: self._source.fetch(group, keep, place), groups), 0)


def _blocks(entry: TensorEntry) -> list[Range]:
    """A tensor's blocks, which always begin at the same places."""
    return list(pairwise([*range(entry.start, entry.stop, BLOCK), entry.stop]))


def _copy(block: Range, content: bytes | memoryview, first: int, wanted: np.ndarray) -> None:
    """Copy a block's part of the bytes that begin at `first` to its place among them."""
    a, b = max(block[0], first), min(block[1], first + len(wanted))
    wanted[a - first : b - first] = np.frombuffer(content, np.uint8)[a - block[0] : b - block[0]]


def _key(block: Range) -> str:
    return f"{block[0]}-{block[1]}"
