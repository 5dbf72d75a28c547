"""The one seam between what is to be computed and where: hand tasks out, take results as they finish.

Here are tasks on this machine, in this process or in several; cluster.py has those on a Dask cluster.
"""

import logging
import os
import signal
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from weightscope.errors import CheckpointError
from weightscope.parallel import deaf_children, end_with_parent, keep_to, one_blas_thread, usable_cores

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SILENT = {"PYTHONWARNINGS": "ignore"}  # whoever started the processes says what there is to say


class Finished(NamedTuple):
    """A task that has ended.

    Attributes
    ----------
    key : hashable
        As it was handed out.
    value : object
        What the function returned; None where it raised.
    error : Exception or None
        What it raised.
    """

    key: Any
    value: Any
    error: Exception | None


class Engine:
    """Pure tasks on an executor.

    Parameters
    ----------
    executor : concurrent.futures.Executor
    ahead : int
        Tasks that should be under way for nobody to stand idle.
    elsewhere : bool
        Tasks run outside this process, so that what they take is pickled.

    Attributes
    ----------
    elsewhere : bool
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
        """Some task is under way."""
        return bool(self._under_way)

    @property
    def hungry(self) -> bool:
        """More tasks could run than are under way."""
        return len(self._under_way) < self._ahead

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Hand out a task."""
        future = self._executor.submit(function, *arguments)
        self._under_way[future] = key
        future.add_done_callback(self._ended.put)

    def forget(self, unwanted: Callable[[Any], bool]) -> None:
        """Drop the tasks whose keys are unwanted; those that already run end unheard."""
        for future in [future for future, key in self._under_way.items() if unwanted(key)]:
            del self._under_way[future]
            future.cancel()

    def next(self) -> Finished:
        """Wait for a task to end.

        Raises
        ------
        CheckpointError
            The engine itself has failed: nothing that is under way will end.
        """
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
        """Let go of the executor once the tasks that run have ended."""
        self._executor.shutdown(wait=True)

    def abandon(self) -> None:
        """Let go of the executor without waiting for the tasks that run."""
        self._executor.shutdown(wait=False)

    def is_own(self, error: Exception) -> bool:
        """An error is the engine's, not the task's."""
        return False

    def failure(self, error: Exception | None) -> CheckpointError:
        """What to say when the engine has failed."""
        return CheckpointError("the work was cancelled")

    def in_words(self, error: Exception) -> Exception:
        """A task's error, as a CheckpointError where the engine knows what a person should do about it."""
        return error


class ThisProcess(Engine):
    """Tasks one after another in this process; each spreads itself over the cores.

    They run in a thread, so that the caller is free to write what has finished while the next one runs.
    """

    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor(1, "task"), ahead=2, elsewhere=False)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        super().submit(key, copy_context().run, function, *arguments)


class Processes(Engine):
    """Tasks in so many processes on this machine, through joblib's loky. Each process has its share of the cores.

    Parameters
    ----------
    jobs : int
    """

    def __init__(self, jobs: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        with deaf_children():  # loky starts one here that keeps account of semaphores
            self._pool = ProcessPoolExecutor(jobs, env=ONE_THREAD | SILENT, initializer=_begin, initargs=(os.getpid(),))
        super().__init__(self._pool, ahead=2 * jobs, elsewhere=True)
        self._cores = max(1, usable_cores() // jobs)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        with deaf_children():  # and here those that work
            super().submit(key, beside_others, self._cores, function, *arguments)

    def abandon(self) -> None:
        """End the processes. (Told to do so itself, loky loses its way where a task has been cancelled.)"""
        for process in list((self._pool._processes or {}).values()):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        super().abandon()

    def is_own(self, error: Exception) -> bool:
        from joblib.externals.loky import BrokenProcessPool

        return isinstance(error, BrokenProcessPool)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(
            "one of the processes of `jobs` was killed, out of memory perhaps; fewer take less "
            "(`resume` goes on with an audit)"
        )


def _begin(parent: int) -> None:
    """What a process does before its first task."""
    end_with_parent(parent)
    logging.getLogger().addHandler(logging.NullHandler())  # where nobody listens, logging prints warnings itself


def beside_others(cores: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task in a process that shares its machine: on so many cores, and with one BLAS thread from now on.

    The limit is not lifted afterwards, since tasks in other threads of the process count on it.
    """
    keep_to(cores)
    one_blas_thread()
    return function(*arguments)
