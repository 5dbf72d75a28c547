"""Bars that are late to come out: what takes little says nothing, what will take minutes says so."""

from typing import Any

from tqdm import tqdm

LONG = 60  # seconds that are left after the first part: what takes more says so in a line that stays


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
