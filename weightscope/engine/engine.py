"""Engines that run tasks on this machine, in one process or several: submit tasks, take results as they finish.

cluster.py runs them on a Dask cluster.
"""

import logging
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from weightscope.compute.cores import deaf_children, end_with_parent, keep_to, one_blas_thread, usable_cores
from weightscope.errors import CheckpointError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# The parent process reports problems; the working directory, which may be a checkpoint's, is no place of modules.
CHILDREN = {"PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}


def array_of(answer: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    """A task's answer, if it is real numbers of the expected shape; a worker may run another version, or be hostile."""
    if not (isinstance(answer, np.ndarray) and answer.dtype.kind in "biuf" and answer.shape == shape):
        given = f"{answer.dtype} {answer.shape}" if isinstance(answer, np.ndarray) else type(answer).__name__
        raise unexpected(what, given, f"numbers of the shape {shape}")
    return answer


def unexpected(what: str, given: str, expected: str) -> CheckpointError:
    """The error that a worker answers with something else."""
    problem = f"a worker answers for {what} with {given}; {expected} were expected"
    return CheckpointError(f"{problem}. Does it run the same version of weightscope?")


class Finished(NamedTuple):
    """A task that has ended."""

    key: Any  # as submitted
    value: Any  # None if the task raised
    error: Exception | None  # what the task raised


class Engine:
    """Runs pure tasks on an executor.

    `ahead` tasks should be submitted at a time to keep every worker busy; with `elsewhere` tasks run in another process
    and their arguments are pickled.
    """

    def __init__(self, executor: Executor, ahead: int, *, elsewhere: bool) -> None:
        self.elsewhere = elsewhere
        self._executor, self._ahead = executor, ahead
        self._under_way: dict[Future[Any], Hashable] = {}
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget(lambda key: True)
        if isinstance(error, KeyboardInterrupt):
            self.abandon()
        else:
            self.close()

    @property
    def busy(self) -> bool:
        """Whether a task is running or queued."""
        return bool(self._under_way)

    @property
    def hungry(self) -> bool:
        """Whether workers would be idle without more tasks."""
        return len(self._under_way) < self._ahead

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Submit a task under a key."""
        future = self._executor.submit(function, *arguments)
        self._under_way[future] = key
        future.add_done_callback(self._ended.put)

    def forget(self, unwanted: Callable[[Any], bool]) -> None:
        """Drop tasks by key; the results of those already running are discarded."""
        for future in [future for future, key in self._under_way.items() if unwanted(key)]:
            del self._under_way[future]
            future.cancel()

    def next(self) -> Finished:
        """Wait for the next task to end."""
        while True:
            future = self._ended.get()
            if future not in self._under_way:  # forgotten
                continue
            key = self._under_way.pop(future)
            if future.cancelled():
                raise self.failure(None)
            error = future.exception()
            if error is None:
                return Finished(key, future.result(), None)
            if not isinstance(error, Exception):
                raise error
            if self.is_own(error):
                raise self.failure(error) from None
            return Finished(key, None, self.in_words(error))

    def close(self) -> None:
        """Shut down after the running tasks have ended."""
        self._executor.shutdown(wait=True)

    def abandon(self) -> None:
        """Shut down without waiting for the running tasks."""
        self._executor.shutdown(wait=False)

    def is_own(self, error: Exception) -> bool:
        """Whether an error comes from the engine rather than the task."""
        return False

    def failure(self, error: Exception | None) -> CheckpointError:
        """The error to raise when the engine has failed."""
        return CheckpointError("the work was cancelled")

    def in_words(self, error: Exception) -> Exception:
        """A task's error, as a CheckpointError if the engine knows what to do about it."""
        return error


class ThisProcess(Engine):
    """Runs one task at a time in a thread of this process; each task uses all cores.

    The caller can write finished results while the next task runs.
    """

    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor(1, "task"), ahead=2, elsewhere=False)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        super().submit(key, copy_context().run, function, *arguments)


class Processes(Engine):
    """Runs tasks in several processes on this machine, through joblib's loky; each has its share of the cores."""

    def __init__(self, jobs: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        # loky starts its resource tracker here. When a run is interrupted, the tracker removes the semaphores that are
        # left and warns about each, after the run's own last line.
        with deaf_children(), _environment(CHILDREN):
            self._pool = ProcessPoolExecutor(
                jobs, env=ONE_THREAD | CHILDREN, initializer=_begin, initargs=(os.getpid(),)
            )
        super().__init__(self._pool, ahead=2 * jobs, elsewhere=True)
        self._cores = max(1, usable_cores() // jobs)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        with deaf_children():  # and its workers here
            super().submit(key, beside_others, self._cores, function, *arguments)

    def abandon(self) -> None:
        """Kill the processes; loky's own shutdown hangs after a task was cancelled."""
        for process in list((self._pool._processes or {}).values()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        super().abandon()

    def is_own(self, error: Exception) -> bool:
        from joblib.externals.loky import BrokenProcessPool

        return isinstance(error, BrokenProcessPool)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(
            "one of the processes of `jobs` was killed, perhaps out of memory; fewer processes need less "
            "(`resume` continues an audit)"
        )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started within the block."""
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


def _begin(parent: int) -> None:
    """Initialise a worker process."""
    end_with_parent(parent)
    logging.getLogger().addHandler(logging.NullHandler())  # without a handler, logging prints warnings itself


def beside_others(cores: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task on some of the cores with one BLAS thread; the limit stays, since other threads rely on it."""
    keep_to(cores)
    one_blas_thread()
    return function(*arguments)
