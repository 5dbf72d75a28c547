"""How many cores this process may use, and the one way to spread work over them."""

import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
WATCH = 0.5  # seconds from one look at the parent to the next, where the system does not tell

_share: int | None = None


def usable_cores() -> int:
    """Cores this process may run on, or the share of them that `keep_to` has left it."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return there if _share is None else min(_share, there)


def keep_to(share: int) -> None:
    """From now on this process spreads its work over `share` cores, because others work beside it."""
    global _share
    _share = max(1, share)


def end_with_parent(parent: int) -> None:
    """Let this process end when its parent does, in whatever way: nobody else would end it or close the pipes it holds.

    Parameters
    ----------
    parent : int
        The parent's process id, as the parent knows it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _end_without(parent)  # it has ended before the system was asked to tell
    else:
        watch_parent(parent)


def watch_parent(parent: int) -> None:
    """The same by looking now and then: for a child that outlives the thread it was started from, which is its parent
    to the system. It does not look while a library keeps the interpreter to itself.
    """

    def look() -> None:
        while True:
            _end_without(parent)
            time.sleep(WATCH)

    Thread(target=look, name="parent", daemon=True).start()


def _end_without(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that are started within the block do not hear what a terminal tells the group; their parent does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def one_blas_thread() -> threadpool_limits:
    """A context in which BLAS uses one thread: sums then come out the same on any number of cores."""
    import scipy.linalg  # noqa: F401 - its BLAS is a second one, and can be limited only once it is there

    return threadpool_limits(1, "blas")


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None
) -> Iterator[Result]:
    """What `function` makes of each item, in order, computed in threads with one BLAS thread each.

    The threads are what runs side by side, so that BLAS has no need to; results are the same bits on any number of
    cores. Each call sees the caller's context, such as `numpy.errstate`. Items are taken a few ahead, so that they may
    be blocks of something large. After an error, or when the caller asks for no more, no further item is begun.

    Parameters
    ----------
    function : function of an item
    items : iterable
    threads : int, optional
        As many as there are usable cores unless another number is given.
    """
    threads = threads or usable_cores()
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(copy_context().run, function, item))
                if len(under_way) > 2 * threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
