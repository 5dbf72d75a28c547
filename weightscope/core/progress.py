"""Progress bars after two seconds: commands and notebooks show them, other calls on request.

They are drawn on a terminal or in a notebook only: a log gets neither bars nor control characters.

tqdm is imported when there is something to show; `--help` and shell completion do not wait for it.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import RLock, Timer
from typing import Any

DELAY = 2  # seconds before a bar appears
LONG = 60  # seconds left after the first part; longer work is announced in a line that stays

# None: in a notebook only
_is_shown: ContextVar[bool | None] = ContextVar("progress is shown", default=None)


@contextmanager
def progress_shown(wanted: bool | None = True) -> Iterator[None]:
    """Show progress while the block runs, if `wanted` or if the caller shows it already.

    None leaves it to the caller, who shows it in a notebook.
    """
    callers = _is_shown.get()
    before = _is_shown.set(callers if wanted is None else wanted or bool(callers))
    try:
        yield
    finally:
        _is_shown.reset(before)


@contextmanager
def progress_hidden() -> Iterator[None]:
    """Show no progress while the block runs, even if the caller shows it."""
    before = _is_shown.set(False)
    try:
        yield
    finally:
        _is_shown.reset(before)


def _is_drawn() -> bool:
    """True if progress is shown on a terminal or in a notebook; stderr may be closed (None)."""
    shown, in_notebook = _is_shown.get(), "ipykernel" in sys.modules
    if sys.stderr is None or not (in_notebook or sys.stderr.isatty()):
        return False
    return in_notebook if shown is None else shown


def bar(
    items: Iterable[Any] | None = None,
    what: str = "",
    unit: str = "it",
    *,
    total: int | None = None,
    **options: Any,
) -> Any:
    """A progress bar over items, or moved by its `update`; drawn on a terminal or notebook only."""
    options |= {"desc": what, "unit": unit, "total": total, "disable": not _is_drawn()}
    return bar_class()(items, delay=DELAY, leave=False, dynamic_ncols=True, **options)


@cache
def bar_class() -> Any:
    """tqdm's bar, but it waits for its delay, is always cleared, and announces long work."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        _lock = RLock()  # tqdm's own would import multiprocessing
        _timed = False

        def update(self, n: float = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if not self.disable and not self._timed and self.n and self._time() >= self._due:
                self._timed = True
                left = (self._time() - self.start_t) * ((self.total or 0) - self.n) / self.n
                if left > LONG:
                    line = f"{self.desc.removesuffix(': ')}: about {_minutes(left)} to go"
                    with self.external_write_mode(self.fp):
                        print(line, file=self.fp, flush=True)
            return drawn

        # To print a line, tqdm clears all bars and refreshes them, those before their delay too;
        # and at the end it clears only bars that its own `update` has drawn. `clear` and `refresh`
        # therefore look at the time.
        def clear(self, *arguments: Any, **options: Any) -> None:
            if not self.disable and self.last_print_t >= self._due:
                super().clear(*arguments, **options)

        def refresh(self, *arguments: Any, **options: Any) -> bool | None:
            # without it, tqdm's __init__ draws a bar without delay
            if not self.disable and hasattr(self, "start_t"):
                if self._time() < self._due:
                    return None
                self.last_print_t: float = max(self.last_print_t, self._due)  # "was drawn" to tqdm
            drawn: bool | None = super().refresh(*arguments, **options)
            return drawn

        @property
        def _due(self) -> float:
            return float(self.start_t + self.delay)

    return Bar


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Name work without countable parts on a terminal, once it has taken two seconds."""
    if not _is_drawn():
        yield
        return

    def say() -> None:
        with bar_class().external_write_mode(sys.stderr):
            print(f"{what} ...", file=sys.stderr, flush=True)

    timer = Timer(DELAY, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
