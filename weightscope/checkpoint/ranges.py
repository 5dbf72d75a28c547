"""Byte ranges of one file on a server that may be slow, broken or lying.

Whatever does not agree with what was asked (status, range, length, encoding, etag) is not believed: it is asked again,
and reported when it keeps coming. What arrived whole before a failure is kept.
"""

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from weightscope.checkpoint.exchange import exchange, redirects
from weightscope.errors import CheckpointError

Range = tuple[int, int]  # [start, stop)

ATTEMPTS = 5  # in a row that bring nothing
FIRST_WAIT = 0.5  # seconds; doubles from one attempt to the next
LONGEST_WAIT = 30.0
LARGEST_REQUEST = 32 << 20
RETRIED = {408, 425, 429, 500, 502, 503, 504}


class _BadAnswerError(Exception):
    """An answer that may be a better one next time; `wait` is what the server asks for, in seconds."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


class RangedFile:
    """A file that is read by HTTP ranges.

    Parameters
    ----------
    url : str
        Where the token may go. The server may redirect to another host, which gets no token.
    etag : str
        What the file's content is known by; an answer with another is not believed.
    size : int
        Of the whole file, in bytes.
    name : str
        Names the file in errors.

    Attributes
    ----------
    bytes_fetched : int
        All bytes of answers so far.
    """

    def __init__(self, url: str, etag: str, size: int, name: str) -> None:
        self.url, self.etag, self.size, self.name = url, etag, size, name
        self.bytes_fetched = 0
        self._lock = threading.Lock()
        self._etag_elsewhere: str | None = None

    def fetch(self, wanted: Sequence[Range], deliver: Callable[[Range, bytes], object]) -> None:
        """One request from the first range's start to the last one's stop, asked again from where it broke.

        Parameters
        ----------
        wanted : sequence of Range
            In order, disjoint; bytes between them are read and dropped.
        deliver : function of (Range, bytes)
            Called once with each range, when it is complete.

        Raises
        ------
        CheckpointError
            The server cannot be reached, refuses, or keeps answering something else.
        """
        from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]

        delivered, failures = 0, 0
        while delivered < len(wanted):
            before = delivered
            try:
                for span, content in self._complete(wanted[delivered:]):
                    deliver(span, content)
                    delivered += 1
            except (_BadAnswerError, HTTPError) as error:
                failures = 1 if delivered > before else failures + 1
                if failures >= ATTEMPTS:
                    raise CheckpointError(
                        f"{_reason(error)}, {ATTEMPTS} times in a row; try again later", file=self.name
                    ) from None
                wait = min(FIRST_WAIT * 2 ** (failures - 1) * random.uniform(0.75, 1.25), LONGEST_WAIT)
                time.sleep(max(wait, min(getattr(error, "wait", 0.0), LONGEST_WAIT)))
            except OfflineModeIsEnabled:
                raise CheckpointError("is not in the cache, and HF_HUB_OFFLINE is set", file=self.name) from None

    def _complete(self, wanted: Sequence[Range]) -> Iterator[tuple[Range, bytes]]:
        """Ranges as they are completed by one answer's body."""
        position, stop = wanted[0][0], wanted[-1][1]
        todo = iter(wanted)
        span = next(todo)
        held = bytearray()
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
                    held += view[dropped : dropped + taken]
                    view, position = view[dropped + taken :], position + dropped + taken
                    if position == span[1]:
                        yield span, bytes(held)
                        held.clear()
                        span = next(todo, (stop, stop + 1))
        if position < stop:
            raise _BadAnswerError(f"the server sent {stop - position} bytes too few")

    def _answer(self, start: int, stop: int) -> Generator[bytes, None, None]:
        """The body of an answer that says it is bytes [start, stop) of the file."""
        from huggingface_hub import constants

        def look(response: Any, elsewhere: bool) -> None:
            self._check(response, start, stop, elsewhere)

        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        return exchange("GET", self.url, look, self.name, timeout, range=f"bytes={start}-{stop - 1}")

    def _check(self, response: Any, start: int, stop: int, elsewhere: bool) -> None:
        """Refuse an answer whose status or headers are not those of bytes [start, stop)."""
        status, headers = response.status_code, response.headers
        if redirects(response):
            return self._check_etag(headers.get("x-linked-etag"))
        if status in RETRIED:
            retry_after = headers.get("retry-after", "")
            raise _BadAnswerError(
                f"the server answered {status}", float(retry_after) if retry_after.isdecimal() else 0.0
            )
        if elsewhere and status in {401, 403}:  # a signed address that has expired; the next attempt gets a new one
            raise _BadAnswerError(f"the server's storage answered {status}")
        expected = f"bytes {start}-{stop - 1}/{self.size}"
        whole = status == 200 and (start, stop) == (0, self.size)  # the whole file was asked for, in other words
        if status == 200 and not whole:
            raise CheckpointError(
                "the server ignores Range and would send the whole file; download it (hf download) and open the folder",
                file=self.name,
            )
        if status != 206 and not whole:
            raise CheckpointError(f"the server answered {status}", file=self.name)
        if status == 206 and headers.get("content-range") != expected:
            found = str(headers.get("content-range"))[:80]
            raise _BadAnswerError(f"the server sent range '{found}' where '{expected}' was asked for")
        if headers.get("content-encoding", "identity") != "identity":
            raise _BadAnswerError("the server sent an encoded body")
        if headers.get("content-length", str(stop - start)) != str(stop - start):
            length = headers["content-length"][:30]
            raise _BadAnswerError(f"the server sent {length} bytes where {stop - start} were asked for")
        if not elsewhere:
            self._check_etag(headers.get("x-linked-etag") or headers.get("etag"))
        elif "etag" in headers:  # storage has etags of its own; they must at least stay the same
            if self._etag_elsewhere not in {None, headers["etag"]}:
                raise CheckpointError("has changed on the server since it was opened", file=self.name)
            self._etag_elsewhere = headers["etag"]

    def _check_etag(self, etag: str | None) -> None:
        if etag is not None and bare_etag(etag) != self.etag:
            raise CheckpointError("has changed on the server since it was opened", file=self.name)


def bare_etag(etag: str) -> str:
    """An etag without its weakness mark and quotes."""
    return etag.removeprefix("W/").strip('"')


def _reason(error: Exception) -> str:
    """What went wrong, for a person."""
    if isinstance(error, _BadAnswerError):
        return str(error)
    first = first_line(error)
    return f"the server cannot be reached ({type(error).__name__}{': ' if first else ''}{first})"


def first_line(error: Exception) -> str:
    """The first line of what an error says; empty where it says nothing."""
    return (str(error).splitlines() or [""])[0]


def coalesce(wanted: Sequence[Range], largest: int) -> list[list[Range]]:
    """Ranges in groups, each of which is worth one request.

    Neighbours share a request when what lies between them is at most a hundredth of what is wanted, so that no more
    than that is fetched in vain, and while it spans no more than `largest` bytes.
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
