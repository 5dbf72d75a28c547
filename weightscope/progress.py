"""When progress is shown: commands show it, a call from Python only when it is asked to.

tqdm is imported when there is something to show, which --help and completion in a shell do not wait for.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.bars import Bar

DELAY = 2  # seconds: what takes less says nothing

_is_shown: ContextVar[bool] = ContextVar("progress is shown", default=False)


@contextmanager
def progress_shown(wanted: bool = True) -> Iterator[None]:
    """Show progress while the block runs, if that is wanted here or by whoever called."""
    before = _is_shown.set(wanted or _is_shown.get())
    try:
        yield
    finally:
        _is_shown.reset(before)


@contextmanager
def progress_hidden() -> Iterator[None]:
    """Show no progress while the block runs, whoever called."""
    before = _is_shown.set(False)
    try:
        yield
    finally:
        _is_shown.reset(before)


def bar(
    items: Iterable[Any] | None = None, what: str = "", unit: str = "it", *, total: int | None = None, **options: Any
) -> "Bar":
    """A bar over items, or to be moved by its `update`; a dumb one where progress is not shown.

    Parameters
    ----------
    items : iterable, optional
    what : str
        What stands before the bar.
    unit : str
        What is counted.
    total : int, optional
        How many there are, if `items` cannot say.
    **options
        Of tqdm.
    """
    from weightscope.bars import Bar

    own = {"desc": what, "unit": unit, "total": total, "disable": not _is_shown.get()}
    return Bar(items, delay=DELAY, leave=False, dynamic_ncols=True, **own, **options)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say on a terminal what is being done, once it has taken two seconds; for work of which no part can be counted."""
    if not _is_shown.get() or sys.stderr is None or not sys.stderr.isatty():  # None where the shell has closed it
        yield
        return

    def say() -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(sys.stderr):
            print(f"{what} ...", file=sys.stderr, flush=True)

    timer = Timer(DELAY, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
