"""One request to a server that may be slow, broken or lying: where it may lead, and how long it may take."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any
from urllib.parse import urljoin, urlsplit

from weightscope.errors import CheckpointError

MAX_REDIRECTS = 5
LEAST_RATE = 10_000  # bytes a second that a transfer must bring, ...
PATIENCE = 60.0  # ... after as many seconds for whatever comes before the first
DEADLINE = 3600.0  # seconds that it may take altogether; the largest request, at the least rate, takes them
PIECES_AHEAD = 64  # received, and not taken yet
REDIRECTS = {301, 302, 303, 307, 308}

Look = Callable[[Any, bool], None]


def exchange(
    method: str, url: str, look: Look, name: str, timeout: float, **headers: str
) -> Generator[bytes, None, None]:
    """Ask a server, go where it sends us as far as that is allowed, and receive the body of what it answers.

    A redirect is followed to https, or to the same host without giving https up; the token goes to nobody but `url`'s
    own server. HEAD is answered by that server and no other. Nothing is decoded on the way: a body that a server has
    compressed in spite of what was asked would come as it is.

    Parameters
    ----------
    method : {"GET", "HEAD"}
    url : str
    look : function of (response, elsewhere)
        Called with the headers of each answer, redirects included, before its body is received, and whether another
        server has sent them; raises if they are not right.
    name : str
        Names the file in errors.
    timeout : float
        Seconds to wait for any one byte.
    **headers : str
        Of the request, underscores for hyphens.

    Raises
    ------
    CheckpointError
        The server leads where it may not, or sends too slowly.
    """
    return paced(_received(method, url, look, name, timeout, headers), name)


def _received(
    method: str, url: str, look: Look, name: str, timeout: float, headers: dict[str, str]
) -> Generator[bytes, None, None]:
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    own = origin(url)
    sent = build_hf_headers(library_name="weightscope") | {"accept-encoding": "identity"}
    sent |= {key.replace("_", "-"): value for key, value in headers.items()}
    for _ in range(MAX_REDIRECTS):
        with get_session().stream(method, url, headers=sent, timeout=timeout, follow_redirects=False) as response:
            look(response, origin(url) != own)
            if not redirects(response):
                yield from response.iter_raw()
                return
            target = _allowed(url, response.headers["location"], name)
            if method == "HEAD" and origin(target) != own:
                return
            if origin(target) != own:
                sent.pop("authorization", None)
            url = target
            deque(islice(response.iter_raw(), 2), 0)  # a short page, read so that the connection can be kept
    raise CheckpointError(f"the server redirects more than {MAX_REDIRECTS} times", file=name)


def redirects(response: Any) -> bool:
    """Whether an answer sends us elsewhere."""
    return response.status_code in REDIRECTS and "location" in response.headers


def _allowed(url: str, location: str, name: str) -> str:
    """Where a redirect leads, if it may be followed."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        target = urljoin(url, location)
        scheme, host, _ = origin(target)
        get_session().build_request("GET", target)
    except Exception:  # ValueErrors of the library, the client's own; none of them follows it
        raise CheckpointError(f"the server redirects to what is no address ('{location[:80]}')", file=name) from None
    if scheme == "https" and host:
        return target
    if (scheme, host) != origin(url)[:2]:
        raise CheckpointError(
            f"the server redirects to '{location[:80]}'; only https, or the same host, is followed", file=name
        )
    return target


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: who gets a token that `url` may have."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


class _End:
    """Nothing more comes."""


def paced(pieces: Generator[bytes, None, None], name: str) -> Generator[bytes, None, None]:
    """Pieces as a thread of its own receives them, for as long as they come fast enough.

    A client waits a while for each byte and bounds no whole: headers, sizes of chunks, bodies could trickle for ever.
    Time in which nobody asks for the next piece does not count.

    Raises
    ------
    CheckpointError
        They come too slowly. The thread is left behind, and ends with the server's patience or this process.
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
            hand_over(_End())
        except BaseException as error:
            hand_over(error)

    Thread(target=receive, name="transfer", daemon=True).start()
    waited, size = 0.0, 0
    try:
        while True:
            begun = time.monotonic()
            try:
                item = received.get(timeout=max(0.0, min(PATIENCE + size / LEAST_RATE, DEADLINE) - waited))
            except Empty:
                problem = f"the server sent {size} bytes in {waited + time.monotonic() - begun:.0f} s"
                raise CheckpointError(f"{problem}; {LEAST_RATE} a second are expected", file=name) from None
            waited += time.monotonic() - begun
            if isinstance(item, _End):
                return
            if isinstance(item, BaseException):
                raise item
            size += len(item)
            yield item
    finally:
        given_up.set()
