"""How progress is shown, and when: commands show it, a call from Python only when it is asked to."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer
from typing import Any

from tqdm import tqdm

DELAY = 2  # seconds: what takes less says nothing
LONG = 60  # seconds that are left after the first part: what takes more says so in a line that stays

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
    own = {"desc": what, "unit": unit, "total": total, "disable": not _is_shown.get()}
    return Bar(items, delay=DELAY, leave=False, dynamic_ncols=True, **own, **options)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say on a terminal what is being done, once it has taken two seconds; for work of which no part can be counted."""
    if not _is_shown.get() or sys.stderr is None or not sys.stderr.isatty():  # None where the shell has closed it
        yield
        return

    def say() -> None:
        with tqdm.external_write_mode(sys.stderr):
            print(f"{what} ...", file=sys.stderr, flush=True)

    timer = Timer(DELAY, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Bar(tqdm):  # type: ignore[misc]
    """A bar that comes out when its delay is over and no sooner, and is always cleared away.

    A line that is written meanwhile moves bars aside, and tqdm then draws those that are not due yet as well; what it
    has drawn of its own accord only, it clears away at the end.

    Before work that will take minutes it says about how many, once its first part has been timed: in a line that stays.
    """

    _timed = False

    def update(self, n: float = 1) -> bool | None:
        drawn: bool | None = super().update(n)
        if not self.disable and not self._timed and self.n and self._time() >= self._due:
            self._timed = True
            left = (self._time() - self.start_t) * ((self.total or 0) - self.n) / self.n
            if left > LONG:
                with tqdm.external_write_mode(self.fp):
                    print(f"{self.desc.removesuffix(': ')}: about {_minutes(left)} to go", file=self.fp, flush=True)
        return drawn

    def clear(self, *arguments: Any, **options: Any) -> None:
        if not self.disable and self.last_print_t >= self._due:
            super().clear(*arguments, **options)

    def refresh(self, *arguments: Any, **options: Any) -> bool | None:
        if not self.disable and hasattr(self, "start_t"):  # else within __init__, of a bar without a delay
            if self._time() < self._due:
                return None
            self.last_print_t: float = max(self.last_print_t, self._due)  # by which tqdm knows that it has been drawn
        drawn: bool | None = super().refresh(*arguments, **options)
        return drawn

    @property
    def _due(self) -> float:
        return float(self.start_t + self.delay)


def _minutes(seconds: float) -> str:
    """A time as a person says it, in minutes or in hours."""
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
