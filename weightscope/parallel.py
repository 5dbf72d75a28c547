"""How many cores this process may use, and the one way to spread work over them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
Result = TypeVar("Result")

_share: int | None = None


def usable_cores() -> int:
    """Cores this process may run on, or the share of them that `keep_to` has left it."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return there if _share is None else min(_share, there)


def keep_to(share: int) -> None:
    """From now on this process spreads its work over `share` cores, because others work beside it."""
    global _share
    _share = max(1, share)


def one_blas_thread() -> threadpool_limits:
    """A context in which BLAS uses one thread: sums then come out the same on any number of cores."""
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
