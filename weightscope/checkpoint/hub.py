"""The Hugging Face Hub: what a repository has, and its files in the Hub's cache.

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME and HF_HUB_ETAG_TIMEOUT mean what they mean to the Hub's client. Answers
are not trusted: whatever becomes part of a path or an address is checked first.
"""

import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weightscope.checkpoint.config import MAX_BYTES, parse_json
from weightscope.checkpoint.http import (
    LARGEST_REQUEST,
    RETRIED,
    RangedFile,
    bare_etag,
    coalesce,
    exchange,
    redirects,
)
from weightscope.errors import CheckpointError, first_line, nearest
from weightscope.files import new_file

ATTEMPTS = 3
FIRST_WAIT = 0.5  # seconds; doubles from one attempt to the next
SPAN = 1 << 20  # bytes written at a time, and fetched again after a failure
FORMS = {
    "commit": re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?"),
    "etag": re.compile(r"[0-9A-Za-z_=+-]{1,128}"),
    "size": re.compile(r"[0-9]{1,15}"),
}
FILE_NAME = re.compile(r"(?!.*\.\.)(\w[\w.+=-]*/)*\w[\w.+=-]*")
REFUSED = {
    "GatedRepo": "is gated: accept its terms on the Hub and set HF_TOKEN to a token of yours",
    "RepoNotFound": "is neither a local path nor a repository on the Hub (a private one needs HF_TOKEN)",
    "RevisionNotFound": "the repository has no revision '{revision}'",
}
NO_SUCH_FILE = "EntryNotFound"
SLIP = 0.85  # likeness of "embedded" to itself less a letter, or with one more or two exchanged; 0.71 to "embedding"


@dataclass(frozen=True)
class RemoteStat:
    """What the Hub's headers say of a file."""

    url: str
    commit: str
    etag: str
    size: int


def file_identity(repository: str, commit: str, name: str, etag: str, size: int) -> dict[str, Any]:
    """What tells one file on the Hub from another, the same wherever it is read."""
    return {
        "endpoint": _constants().ENDPOINT, "repository": repository, "commit": commit,
        "name": name, "etag": etag, "size": size,
    }  # fmt: skip


def cached_identity(path: Path, size: int) -> dict[str, Any] | None:
    """The `file_identity` of a file in the Hub's cache, from its folders' names; None for any other file.

    In the cache a file is a link to a blob named by its etag. A regular file there, or a folder of such a name in
    another place, says nothing of its content.
    """
    match path.parts[-4:]:
        case (folder, "snapshots", commit, name) if folder.startswith("models--") and path.is_symlink():
            blob, root = path.resolve(), Path(_constants().HF_HUB_CACHE).resolve() / folder
            is_cached = path.parents[2].resolve() == root.resolve() and blob.parent == (root / "blobs").resolve()
            if is_cached and FORMS["commit"].fullmatch(commit) and FORMS["etag"].fullmatch(blob.name):
                repository = folder.removeprefix("models--").replace("--", "/")
                return file_identity(repository, commit, name, blob.name, size)
    return None


@dataclass(frozen=True)
class Repository:
    """A repository at a revision."""

    id: str  # `owner/name` or `name`
    revision: str = "main"  # branch, tag or commit
    kind: str = "model"

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"

    def cached(self, name: str) -> Path | None:
        """The file in the Hub's local cache, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        try:
            path = try_to_load_from_cache(self.id, name, revision=self.revision, repo_type=self.kind)
        except (OSError, ValueError):
            return None
        if not isinstance(path, str) or (self._pinned and self._pinned not in Path(path).parts):
            return None  # a reference that is named as a commit may lead to another
        return Path(path)

    def stat(self, name: str) -> RemoteStat | None:
        """What the Hub's headers say of a file; None if the repository has no such file."""
        answer, _ = self._ask("HEAD", self._url(name, self.revision))
        headers = answer.headers
        if headers.get("x-error-code") == NO_SUCH_FILE:
            return None
        facts = {
            "commit": headers.get("x-repo-commit", ""),
            "etag": bare_etag(headers.get("x-linked-etag") or headers.get("etag", "")),
            "size": headers.get("x-linked-size") or ("" if redirects(answer) else headers.get("content-length", "")),
        }
        for what, value in facts.items():
            if not FORMS[what].fullmatch(value):
                problem = f"the server does not answer as the Hub does for {name}: its {what} is '{value[:80]}'"
                raise CheckpointError(problem, file=str(self))
        self._check_commit(facts["commit"], name)
        return RemoteStat(self._url(name, facts["commit"]), facts["commit"], facts["etag"], int(facts["size"]))

    def file(self, name: str, limit: int) -> Path | None:
        """A file of at most `limit` bytes, downloaded into the Hub's cache; None if there is no such file."""
        if not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"the server lists a file that is called '{name[:80]}'", file=str(self))
        stat = self.stat(name)
        if stat is None:
            return None
        if stat.size > limit:
            raise CheckpointError(f"{name} has {stat.size} bytes; at most {limit} are read", file=str(self))
        # The same layout as the Hub's own client writes.
        cache = Path(_constants().HF_HUB_CACHE) / "--".join([f"{self.kind}s", *self.id.split("/")])
        path = cache / "snapshots" / stat.commit / name
        if not path.is_file():
            source = RangedFile(stat.url, stat.etag, stat.size, name)
            spans = list(pairwise([*range(0, stat.size, SPAN), stat.size]))
            with new_file(path) as file:
                for group in coalesce(spans, LARGEST_REQUEST):
                    source.fetch(group, lambda _, content: file.write(content))
        if self.revision != stat.commit:
            with new_file(cache / "refs" / self.revision) as ref:
                ref.write(stat.commit.encode())
        return path

    def file_names(self) -> list[str]:
        """All files of the repository."""
        url = f"{_constants().ENDPOINT}/api/{self.kind}s/{self.id}/revision/{quote(self.revision, safe='')}"
        listing = parse_json(self._ask("GET", url)[1], file=str(self), what="the Hub's list of its files ")
        self._check_commit(listing.get("sha"), "the list of its files")
        files = listing.get("siblings")
        names = [file.get("rfilename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
        return sorted(name for name in names if isinstance(name, str))

    @property
    def _pinned(self) -> str:
        """The commit that the revision is; empty for a branch or tag."""
        return commit if FORMS["commit"].fullmatch(commit := self.revision.lower()) else ""

    @property
    def _meant(self) -> str:
        """A "did you mean" for a slip in writing "embedded", the one name that is no path and on no Hub."""
        return nearest(self.id.lower(), ["embedded"], SLIP)

    def _check_commit(self, commit: object, what: str) -> None:
        """Refuse an answer of another commit than the one that is asked for."""
        if self._pinned and commit != self._pinned:
            raise self._refusal(f"this commit was asked for; for {what} the server answers '{str(commit)[:80]}'")

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
        raise self._refusal(f"the Hub answered {status}, {ATTEMPTS} times in a row; try again later")

    def _ask_once(self, method: str, url: str) -> tuple[Any, bytes]:
        """One answer, of whatever status; every error of the client becomes a CheckpointError."""
        from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

        answers: list[Any] = []
        body, timeout = bytearray(), _constants().HF_HUB_ETAG_TIMEOUT
        try:
            for piece in exchange(method, url, lambda *answer: answers.append(answer[0]), str(self), timeout):
                body += piece
                if len(body) > MAX_BYTES:
                    raise self._refusal(f"the Hub answered more than {MAX_BYTES} bytes")
        except CheckpointError:
            raise
        except OfflineModeIsEnabled:
            raise self._refusal(f"is not in the Hub's cache, and HF_HUB_OFFLINE is set{self._meant}") from None
        except (HTTPError, OSError) as error:
            problem = "is not a local path, not in the Hub's cache, and the Hub cannot be reached"
            raise self._refusal(f"{problem} ({first_line(error)}){self._meant}") from None
        except Exception as error:  # the client is of another version, or cannot handle the answer
            raise self._refusal(f"the Hub's client failed with {type(error).__name__} {first_line(error)}") from None
        return answers[-1], bytes(body)

    def _refusal(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self}: {problem}")


def _constants() -> Any:
    from huggingface_hub import constants

    return constants
