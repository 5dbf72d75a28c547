"""How progress is shown."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

DELAY = 2  # seconds: what takes less says nothing
PROGRESS = {"delay": DELAY, "leave": False, "dynamic_ncols": True}  # of tqdm


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say on a terminal what is being done, once it has taken two seconds; for work of which no part can be counted."""
    if not sys.stderr.isatty():
        yield
        return
    timer = Timer(DELAY, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
