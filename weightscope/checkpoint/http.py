"""HTTP requests to slow, broken or lying servers: redirects, deadlines, a file's ranges.

An answer that does not agree with the request (status, range, length, encoding, etag) is not used:
the request is repeated, and reported if it keeps failing. Ranges that arrived complete before a
failure are kept.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice, pairwise
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any
from urllib.parse import urljoin, urlsplit

from weightscope.core.errors import CheckpointError

MAX_REDIRECTS = 5
REDIRECTS = {301, 302, 303, 307, 308}
RETRIED = {408, 425, 429, 500, 502, 503, 504}
LEAST_RATE = 10_000  # bytes per second that a transfer must bring after PATIENCE
PATIENCE = 60.0  # seconds for everything before the first byte
DEADLINE = 3600.0  # seconds for a whole transfer: the largest request at the least rate
USUAL_WAIT = 1.0  # seconds; more than a request takes before its first byte
PIECES_AHEAD = 64  # received but not consumed yet
TOGETHER = 0.005  # seconds; pieces that arrive meanwhile need one switch between threads
ATTEMPTS = 5  # in a row without progress
FIRST_WAIT = 0.5  # seconds; doubles from one attempt to the next
LONGEST_WAIT = 30.0
LARGEST_REQUEST = 32 << 20
CHANGED = "has changed on the server since it was opened"

Range = tuple[int, int]  # [start, stop)
Deliver = Callable[[Range, memoryview], object]
Place = Callable[[Range], memoryview]
Look = Callable[[Any, bool], None]  # (response, True if not the first server sent it)


# One request


def exchange(
    method: str,
    url: str,
    look: Look,
    name: str,
    timeout: float,
    delays: "Delays",
    led_to: str = "",
    **headers: str,
) -> Generator[bytes, None, None]:
    """The body of a server's answer in pieces, not decoded; `look` may refuse any response.

    Redirects are followed to https, or to the same host without leaving https; the token is sent to
    `url`'s server only. A HEAD request is not redirected to another server. `led_to` is where `url`
    has led to before, asked at once. `delays` counts the waits of all requests together.
    """
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    def received(url: str) -> Generator[bytes, None, None]:
        sent = build_hf_headers(library_name="weightscope")
        sent |= {"accept-encoding": "identity"} | headers
        for _ in range(MAX_REDIRECTS):
            if origin(url) != first:
                sent.pop("authorization", None)
            with get_session().stream(
                method, url, headers=sent, timeout=timeout, follow_redirects=False
            ) as response:
                look(response, origin(url) != first)
                if not redirects(response):
                    yield from response.iter_raw()
                    return
                target = _allowed(url, response.headers["location"], name)
                if method == "HEAD" and origin(target) != first:
                    return
                url = target
                deque(islice(response.iter_raw(), 2), 0)  # so that the connection can be reused
        raise CheckpointError(f"the server redirects more than {MAX_REDIRECTS} times", file=name)

    first = origin(url)
    return paced(received(led_to or url), name, delays)


def redirects(response: Any) -> bool:
    """True if a response is a redirect."""
    return response.status_code in REDIRECTS and "location" in response.headers


def _allowed(url: str, location: str, name: str) -> str:
    """The address that a redirect leads to, if it may be followed."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        target = urljoin(url, location)
        scheme, host, _ = origin(target)
        get_session().build_request("GET", target)
    except Exception:  # ValueErrors of urllib, or the client's own errors
        problem = f"the server redirects to an invalid address ('{location[:80]}')"
        raise CheckpointError(problem, file=name) from None
    if scheme == "https" and host:
        return target
    if (scheme, host) != origin(url)[:2]:
        problem = f"the server redirects to '{location[:80]}'"
        raise CheckpointError(f"{problem}; only https, or the same host, is followed", file=name)
    return target


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port, which decide who gets the token."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, parts.hostname or "", port


class Delays:
    """The time that a server had us wait beyond what the bytes of its answers may take.

    Each request alone may wait for PATIENCE; thousands of them would hold a run for days.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def add(self, waited: float, size: int, name: str) -> None:
        """Count one request, which may take a second besides its bytes; refuse too many slow ones.

        Raises
        ------
        CheckpointError
            The sum is above DEADLINE.
        """
        with self._lock:
            self.seconds += max(0.0, waited - USUAL_WAIT - size / LEAST_RATE)
        if self.seconds > DEADLINE:
            problem = f"the server's answers came {self.seconds:.0f} s too late, all together"
            wanted = f"{LEAST_RATE} bytes a second are expected"
            raise CheckpointError(f"{problem}; {wanted}", file=name)


def paced(
    pieces: Generator[bytes, None, None], name: str, delays: Delays
) -> Generator[bytes, None, None]:
    """Receive pieces in a thread; refuse slow ones. Time between our requests does not count.

    An HTTP client limits the wait for each byte but not the total: headers, chunk sizes and bodies
    could trickle for ever.
    """
    received: Queue[Any] = Queue(PIECES_AHEAD)
    given_up = Event()

    def hand_over(item: Any) -> None:
        while not given_up.is_set():
            try:
                return received.put(item, timeout=1)
            except Full:
                continue

    def receive() -> None:
        try:
            with closing(pieces):
                for piece in pieces:
                    hand_over(piece)
                    if given_up.is_set():
                        return
            hand_over(None)
        except BaseException as error:
            hand_over(error)

    Thread(target=receive, name="transfer", daemon=True).start()
    waited, size = 0.0, 0
    try:
        while True:
            begun = time.monotonic()
            if received.empty():
                time.sleep(TOGETHER)
            allowed = min(PATIENCE + size / LEAST_RATE, DEADLINE)
            try:
                item = received.get(timeout=max(0.0, allowed - waited))
            except Empty:
                spent = waited + time.monotonic() - begun
                problem = f"the server sent {size} bytes in {spent:.0f} s"
                wanted = f"{LEAST_RATE} a second are expected"
                raise CheckpointError(f"{problem}; {wanted}", file=name) from None
            waited += time.monotonic() - begun
            if item is None or isinstance(item, BaseException):
                delays.add(waited, size, name)
                if item is None:
                    return
                raise item
            size += len(item)
            yield item
    finally:
        given_up.set()


# Byte ranges of one file


class _BadAnswerError(Exception):
    """An answer that may be better next time, after `wait` seconds if the server says so."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


def new_memory(span: Range) -> memoryview:
    """Allocate memory for a range."""
    return memoryview(bytearray(span[1] - span[0]))


class RangedFile:
    """A file read by HTTP ranges: `url`'s server gets the token, `etag` tells the content."""

    def __init__(
        self, url: str, etag: str, size: int, name: str, commit: str, delays: Delays
    ) -> None:
        self.url, self.etag, self.size, self.name, self.commit = url, etag, size, name, commit
        self.bytes_fetched = 0  # by all answers so far
        self._lock = threading.Lock()
        self._delays = delays
        self._etag_elsewhere: str | None = None
        self._led_to = ""  # the storage's address, signed for a time; empty once it fails

    def fetch(self, wanted: Sequence[Range], deliver: Deliver, place: Place = new_memory) -> None:
        """One request from the first range's start to the last one's stop, resumed where it fails.

        Each range is received in the memory that `place` has for it, and delivered when it is
        complete.
        """
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            HTTPError,
            OfflineModeIsEnabled,
        )

        delivered, failures = 0, 0
        while delivered < len(wanted):
            before = delivered
            try:
                for span, content in self._complete(wanted[delivered:], place):
                    deliver(span, content)
                    delivered += 1
            except (_BadAnswerError, HTTPError) as error:
                self._led_to = ""
                failures = 1 if delivered > before else failures + 1
                if failures >= ATTEMPTS:
                    problem = str(error)
                    if not isinstance(error, _BadAnswerError):
                        why = ": ".join([type(error).__name__, *problem.splitlines()[:1]])
                        problem = f"the server cannot be reached ({why})"
                    advice = f"{ATTEMPTS} times in a row; try again later"
                    raise CheckpointError(f"{problem}, {advice}", file=self.name) from None
                backoff = FIRST_WAIT * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
                asked = getattr(error, "wait", 0.0)
                wait = min(max(backoff, asked), LONGEST_WAIT)
                self._delays.add(wait, 0, self.name)
                time.sleep(wait)
            except OfflineModeIsEnabled:
                problem = "is not in the cache, and HF_HUB_OFFLINE is set"
                raise CheckpointError(problem, file=self.name) from None

    def fetch_all(self, piece: int, take: Callable[[memoryview], object]) -> None:
        """The whole file in order, in pieces of so many bytes, fetched again after a failure."""
        pieces = list(pairwise([*range(0, self.size, piece), self.size]))
        for group in coalesce(pieces, LARGEST_REQUEST):
            self.fetch(group, lambda _, content: take(content))

    def _complete(
        self, wanted: Sequence[Range], place: Place
    ) -> Iterator[tuple[Range, memoryview]]:
        """The ranges that one answer's body completes."""
        position, stop = wanted[0][0], wanted[-1][1]
        todo = iter(wanted)
        span, size = next(todo), 0
        held = place(span)  # has the span's first `size` bytes
        with closing(self._answer(position, stop)) as pieces:
            for piece in pieces:
                with self._lock:
                    self.bytes_fetched += len(piece)
                if position + len(piece) > stop:
                    raise _BadAnswerError("the server sent more bytes than were asked for")
                view = memoryview(piece)
                while len(view):
                    dropped = min(max(span[0] - position, 0), len(view))
                    taken = min(span[1] - max(position, span[0]), len(view) - dropped)
                    held[size : size + taken] = view[dropped : dropped + taken]
                    size += taken
                    view, position = view[dropped + taken :], position + dropped + taken
                    if position == span[1]:
                        yield span, held
                        span, size = next(todo, (stop, stop)), 0
                        held = place(span)
        if position < stop:
            raise _BadAnswerError(f"the server sent {stop - position} bytes too few")

    def _answer(self, start: int, stop: int) -> Generator[bytes, None, None]:
        """The body of a checked answer with bytes [start, stop) of the file."""
        from huggingface_hub import constants

        def look(response: Any, elsewhere: bool) -> None:
            self._check_headers(response, start, stop, elsewhere)

        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        sent = f"bytes={start}-{stop - 1}"
        return exchange(
            "GET", self.url, look, self.name, timeout, self._delays, self._led_to, range=sent
        )

    def _check_headers(self, response: Any, start: int, stop: int, elsewhere: bool) -> None:
        """Refuse an answer whose status or headers do not match bytes [start, stop)."""
        status, headers = response.status_code, response.headers
        if redirects(response):
            return self._check_etag(headers.get("x-linked-etag"))
        if status in RETRIED:
            retry_after = headers.get("retry-after", "")
            wait = float(retry_after) if retry_after.isdecimal() else 0.0
            raise _BadAnswerError(f"the server answered {status}", wait)
        if elsewhere and status in {401, 403}:  # an expired address; the next attempt gets another
            raise _BadAnswerError(f"the server's storage answered {status}")
        expected = f"bytes {start}-{stop - 1}/{self.size}"
        full_file = status == 200 and (start, stop) == (0, self.size)  # as good as 206
        if status == 200 and not full_file:
            problem = "the server ignores Range and would send the whole file"
            advice = "download it (hf download) and open the folder"
            raise CheckpointError(f"{problem}; {advice}", file=self.name)
        if status != 206 and not full_file:
            raise CheckpointError(f"the server answered {status}", file=self.name)
        if status == 206 and headers.get("content-range") != expected:
            sent = str(headers.get("content-range"))[:80]
            problem = f"the server sent range '{sent}' where '{expected}' was asked for"
            raise _BadAnswerError(problem)
        if headers.get("content-encoding", "identity") != "identity":
            raise _BadAnswerError("the server sent an encoded body")
        if headers.get("content-length", str(stop - start)) != str(stop - start):
            length = headers["content-length"][:30]
            problem = f"the server sent {length} bytes where {stop - start} were asked for"
            raise _BadAnswerError(problem)
        if not elsewhere:
            self._check_etag(headers.get("x-linked-etag") or headers.get("etag"))
        elif "etag" in headers:  # storage has other etags, which must at least not change
            if self._etag_elsewhere not in {None, headers["etag"]}:
                raise CheckpointError(CHANGED, file=self.name)
            self._etag_elsewhere = headers["etag"]
            self._led_to = str(response.url)

    def _check_etag(self, etag: str | None) -> None:
        if etag is not None and bare_etag(etag) != self.etag:
            raise CheckpointError(CHANGED, file=self.name)


def bare_etag(etag: str) -> str:
    """An etag without its weakness mark and quotes."""
    return etag.removeprefix("W/").strip('"')


def coalesce(wanted: Sequence[Range], largest: int) -> list[list[Range]]:
    """Group ranges, one request for each group.

    Neighbours share a request if it spans at most `largest` bytes and its gaps are at most 1% of
    the wanted bytes.
    """
    groups: list[list[Range]] = []
    useful = 0
    for span in sorted(wanted):
        if groups:
            group = groups[-1]
            gaps = span[0] - group[0][0] - useful
            if gaps * 100 <= useful and span[1] - group[0][0] <= largest:
                group.append(span)
                useful += span[1] - span[0]
                continue
        groups.append([span])
        useful = span[1] - span[0]
    return groups
