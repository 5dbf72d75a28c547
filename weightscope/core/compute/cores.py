"""Cores that this process may use, work spread over threads, and the end of child processes."""

import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = 32 << 20  # bytes; the most that M_MMAP_THRESHOLD takes
WATCH = 0.5  # seconds between looks at the parent, where the system does not report its end

_share: int | None = None


def usable_cores() -> int:
    """Cores this process may run on, at most the share that `keep_to` has set."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores if _share is None else min(_share, cores)


def keep_to(share: int) -> None:
    """Use only `share` cores from now on, because other processes use the rest."""
    global _share
    _share = max(1, share)


def end_with_parent(parent: int) -> None:
    """End this process with its parent, however that ends; it would hold its pipes open."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _end_without(parent)  # the parent may have ended before the call
    else:
        watch_parent(parent)


def watch_parent(parent: int) -> None:
    """Poll as `end_with_parent`: a child may outlive the thread that is its parent to Linux.

    It does not poll while a library holds the interpreter lock.
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
    """Start processes that ignore a terminal's Ctrl-C and hang-up; their parent handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block, for libraries and for processes begun there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_blas_thread() -> Any:
    """A context in which BLAS uses one thread, so that sums are the same on any number of cores."""
    return _loaded_blas("torch" in sys.modules).limit(limits=1, user_api="blas")


@cache
def _loaded_blas(with_torch: bool) -> ThreadpoolController:
    """Find the BLAS libraries of this process, which takes milliseconds; PyTorch adds another."""
    import numpy  # noqa: F401 - it and SciPy have a BLAS each, limited only once loaded

    package = find_spec("scipy")
    folder = Path(package.origin or "").parent if package else Path()
    try:  # the library alone: importing scipy.linalg takes 0.15 s
        ctypes.CDLL(str(next(folder.glob("linalg/_fblas.*"))))
    except (OSError, StopIteration):
        import scipy.linalg  # noqa: F401
    return ThreadpoolController()


def in_threads(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int | None = None,
    ahead: int | None = None,
) -> Iterator[Result]:
    """Compute `function` of each item in threads with one BLAS thread each; results in order.

    Results are the same bits on any number of cores. Each call has the caller's context, such as
    `numpy.errstate`. Only a few items are taken `ahead` (two for each thread), as they may be
    large. After an error, or when the caller stops, no item is begun.
    """
    threads = threads or usable_cores()
    ahead = 2 * threads if ahead is None else ahead
    with one_blas_thread(), ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(copy_context().run, function, item))
                if len(under_way) > ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def keep_freed() -> None:
    """Let the C library keep freed blocks for later instead of returning each to the system.

    By default it keeps small ones only: a process that works in blocks of megabytes spends most of
    its time on new pages.
    """
    with suppress(OSError, AttributeError, TypeError):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, KEPT)


def hand_back() -> None:
    """Return the memory that each thread has freed to the system, where the C library can."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
