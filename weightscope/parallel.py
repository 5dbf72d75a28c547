"""How many cores this process may use: one answer for everything that spreads work over threads."""

import os

_share: int | None = None


def usable_cores() -> int:
    """Cores this process may run on, or the share of them that `keep_to` has left it."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return there if _share is None else min(_share, there)


def keep_to(share: int) -> None:
    """From now on this process spreads its work over `share` cores, because others work beside it."""
    global _share
    _share = max(1, share)
