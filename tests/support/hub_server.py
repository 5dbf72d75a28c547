"""A Hub of one's own on the loopback: what the real client asks of the real one, and every fault on demand.

Weights redirect to a second server on another port, as the real Hub redirects to its storage: another origin, which
must never see the token.
"""

import gzip
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 1 << 20  # bytes sent at a time by a server with a rate
BOMB = gzip.compress(bytes(10**7)) * 20  # 200 MB of zeros in 200 kB


@dataclass
class Request:
    """One request that a server got."""

    method: str
    path: str
    range: str | None
    token: str | None


class Hole:
    """A file of any size that is nothing but zeros after its start; only what is asked of it is ever made."""

    def __init__(self, start: bytes, size: int) -> None:
        self.start, self.size = start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> bytes:
        begin, end, _ = span.indices(self.size)
        head = self.start[begin:end]
        return head + bytes(max(0, end - begin) - len(head))

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.start + str(self.size).encode()).hexdigest()


@dataclass
class Hub:
    """The server's state, to be changed by a test while it runs.

    Attributes
    ----------
    repositories : dict
        Files' contents by repository and name.
    commits : dict
        Where a repository's branch is, if not at COMMIT; see `push`.
    earlier : dict
        Files' contents by repository and commit, of commits before that.
    slow : dict
        Seconds before each answer about a repository.
    gated, private : set of str
        Repositories whose files are refused, or refused without the token "secret".
    redirect : bool
        Whether weights lie on the other server.
    faults : list
        What the next requests for weights meet, one each; None is an honest answer. The last one stays when `forever`.
    small_faults : list
        The same for all other files, the first one staying.
    headers : dict of str
        What HEAD and GET say of every file, in place of the truth.
    location : str
        Where weights are redirected to, in place of the other server.
    page_headers : dict of str
        Of the page that redirects.
    trickles : bool
        Headers come a byte at a time, without end.
    answers : dict
        Status, headers and body of what is answered to paths that begin so, in place of the truth.
    latency : float
        Seconds before each answer.
    rate : float
        Bytes a second of each connection; 0 for as fast as it goes.
    """

    repositories: dict[str, dict[str, bytes | Hole]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    earlier: dict[tuple[str, str], dict[str, bytes | Hole]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    redirect: bool = True
    faults: list[str | None] = field(default_factory=list)
    small_faults: list[str | None] = field(default_factory=list)
    forever: bool = False
    head_faults: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    location: str = ""
    page_headers: dict[str, str] = field(default_factory=dict)
    trickles: bool = False
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    latency: float = 0.0
    rate: float = 0.0
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    hub: str = ""
    storage: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, repository: str, folder: Path) -> None:
        """Serve the files of a folder as a repository."""
        self.repositories[repository] = {path.name: path.read_bytes() for path in folder.iterdir()}

    def push(self, repository: str, files: dict[str, bytes | Hole]) -> None:
        """Move a repository's branch to a new commit with these files; the commit before stays."""
        before = self.commits.get(repository, COMMIT)
        self.earlier[repository, before] = self.repositories[repository]
        self.repositories[repository] = files
        self.commits[repository] = hashlib.sha1(f"{repository} {before}".encode()).hexdigest()

    def commit(self, repository: str, revision: str) -> str | None:
        """The commit that a revision is; None if there is no such revision."""
        now = self.commits.get(repository, COMMIT)
        if (repository, revision) in self.earlier:
            return revision
        return now if revision in {"main", now, "v1"} else None

    def files(self, repository: str, revision: str) -> dict[str, bytes | Hole]:
        """The files at a revision."""
        return self.earlier.get((repository, revision), self.repositories[repository])

    def next_fault(self, path: str) -> str | None:
        with self.lock:
            if not path.endswith(".safetensors"):
                return self.small_faults[0] if self.small_faults else None
            if not self.faults:
                return None
            return self.faults[0] if self.forever and len(self.faults) == 1 else self.faults.pop(0)

    def data_requests(self) -> list[Request]:
        """The requests for bytes of weights, each counted once."""
        return [
            r for r in self.requests if r.method == "GET" and r.range and ("/storage/" in r.path or not self.redirect)
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        state, path = self.state, unquote(self.path.split("?")[0])
        time.sleep(state.latency)
        with state.lock:
            state.requests.append(
                Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
            )
        for start, answer in state.answers.items():
            if path.startswith(start):
                return self.reply(*answer)
        if path.startswith("/api/"):
            repository, _, revision = path.removeprefix("/api/").removeprefix("models/").partition("/revision/")
            return self.listing(repository, revision)
        if path.startswith("/storage/"):
            place, _, name = path.removeprefix("/storage/").partition("//")
            repository, _, revision = place.partition("@")
            time.sleep(state.slow.get(repository, 0.0))
            return self.content(state.files(repository, revision)[name], {"ETag": '"of-the-storage"'})
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        self.file(repository, revision, name)

    def refuse(self, status: int, code: str = "") -> None:
        self.reply(status, {"X-Error-Code": code, "X-Repo-Commit": COMMIT, "X-Error-Message": code}, b"")

    def refused(self, repository: str, revision: str) -> bool:
        state = self.state
        hidden = repository in state.private and self.headers.get("Authorization") != "Bearer secret"
        if repository not in state.repositories or hidden:
            self.refuse(401 if hidden else 404, "RepoNotFound")
        elif state.commit(repository, revision) is None:
            self.refuse(404, "RevisionNotFound")
        else:
            return False
        return True

    def listing(self, repository: str, revision: str) -> None:
        if not self.refused(repository, revision):
            siblings = [{"rfilename": name} for name in self.state.files(repository, revision)]
            commit = self.state.headers.get("X-Repo-Commit", self.state.commit(repository, revision))
            body = json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
            self.reply(200, {"Content-Type": "application/json"}, body)

    def file(self, repository: str, revision: str, name: str) -> None:
        state = self.state
        if state.head_faults and self.command == "HEAD":
            return self.refuse(state.head_faults.pop(0))
        if self.refused(repository, revision):
            return None
        if repository in state.gated:
            return self.refuse(403, "GatedRepo")
        time.sleep(state.slow.get(repository, 0.0))
        commit = state.commit(repository, revision)
        content = state.files(repository, revision).get(name)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        etag = content.etag if isinstance(content, Hole) else hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": str(commit), "ETag": f'"{etag}"'} | state.headers
        if self.command == "HEAD" and state.trickles:
            return self.trickle(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000)
        if name.endswith(".safetensors") and state.redirect:
            headers = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))} | headers
            headers |= {"Location": state.location or f"{state.storage}/storage/{repository}@{commit}//{name}"}
            return self.reply(302, headers | state.page_headers, b"a page" if state.page_headers else b"")
        return self.content(content, headers)

    def content(self, content: bytes | Hole, headers: dict[str, str]) -> None:
        span = self.headers.get("Range")
        fault = self.state.next_fault(self.path) if span and self.command == "GET" else None
        headers = {"Accept-Ranges": "bytes", **headers}
        if fault in {"500", "503", "429", "403", "404", "416"}:
            return self.reply(int(fault), {"Retry-After": "0"}, b"an error's own text")
        if fault == "silent":
            time.sleep(2)
            self.close_connection = True
            return None
        if fault == "drop":
            self.close_connection = True
            return None
        if fault == "page instead":
            return self.reply(200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
        if span is None or fault == "ignores range":
            return self.reply(200, headers, content[:] if self.command == "GET" else b"", length=len(content))
        start, stop = (int(n) for n in span.removeprefix("bytes=").split("-"))
        stop = min(stop + 1, len(content))
        body, shown = content[start:stop], f"bytes {start}-{stop - 1}/{len(content)}"
        if fault == "other range":
            shown = f"bytes {start + 1}-{stop}/{len(content)}"
        if fault == "other size":
            shown = f"bytes {start}-{stop - 1}/{len(content) + 1}"
        if fault == "no range":
            return self.reply(206, headers, body)
        if fault == "other etag":
            headers |= {"ETag": '"changed"'}
        if fault == "encoded":
            headers |= {"Content-Encoding": "gzip"}
        if fault == "short length":
            body = body[: len(body) // 2]
        headers |= {"Content-Range": shown}
        if fault in {"longer", "shorter"}:
            body = body + b"x" if fault == "longer" else body[:-1]
            return self.reply(
                206, headers | {"Transfer-Encoding": "chunked"}, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            )
        if fault == "other etag each time":
            headers |= {"ETag": f'"{len(self.state.requests)}"'}
        if fault == "bomb":
            return self.reply(206, headers | {"Content-Encoding": "gzip"}, BOMB)
        if fault == "slow":
            time.sleep(2)
        if fault == "trickles":
            self.reply(206, headers, b"", length=len(body))
            return self.trickle(body)
        if fault == "breaks off":
            self.reply(206, headers, body[: len(body) * 2 // 3], length=len(body))
            self.close_connection = True
            return None
        return self.reply(206, headers, body)

    def trickle(self, content: bytes) -> None:
        for byte in content:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)

    def reply(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Transfer-Encoding" not in headers:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            with self.state.lock:
                self.state.sent += len(body)
            self.send(body)

    def send(self, body: bytes) -> None:
        rate, begun = self.state.rate, time.monotonic()
        if not rate:
            self.wfile.write(body)
            return
        for start in range(0, len(body), PIECE):
            self.wfile.write(body[start : start + PIECE])
            time.sleep(max(0.0, begun + min(start + PIECE, len(body)) / rate - time.monotonic()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the tests."""


@contextmanager
def serve() -> Iterator[Hub]:
    """Both servers, on ports of their own, until the block ends."""
    state = Hub()
    handler: Callable[..., BaseHTTPRequestHandler] = type("Handler", (_Handler,), {"state": state})
    servers = [_Server(("127.0.0.1", 0), handler) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    state.hub, state.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield state
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def without_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The Hub does not answer, and what is kept of it is in an empty folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
