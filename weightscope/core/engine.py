"""Engines that run tasks: this process, several on this machine, or a Dask cluster.

A task is a pure function and its arguments. For another process both are pickled, the function by
name: it must be importable there, and its arguments should say where to read data rather than carry
it. Submit tasks, and take results as they finish.
"""

import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from weightscope.core.compute.cores import (
    deaf_children,
    end_with_parent,
    environment,
    keep_to,
    one_blas_thread,
    usable_cores,
)
from weightscope.core.errors import CheckpointError, first_line, printable
from weightscope.core.files import regular_file

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# The parent process reports problems. The working directory may be a checkpoint's, so nothing is
# imported from it.
CHILDREN = {"PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}


def array_of(answer: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    """Check that a task's answer has real numbers of this shape; a worker may be hostile or old."""
    given = type(answer).__name__
    if isinstance(answer, np.ndarray):
        if answer.dtype.kind in "biuf" and answer.shape == shape:
            return answer
        given = f"{answer.dtype} {answer.shape}"
    raise unexpected(what, given, f"numbers of the shape {shape}")


def unexpected(what: str, given: str, expected: str) -> CheckpointError:
    """The error for a worker's answer of the wrong kind."""
    problem = f"a worker answers for {what} with {given}; {expected} were expected"
    return CheckpointError(f"{problem}. Does it run the same version of weightscope?")


class Finished(NamedTuple):
    """A task that has ended."""

    key: Any  # as submitted
    value: Any  # None if the task raised
    error: Exception | None  # raised by the task


class Engine:
    """Runs pure tasks on an executor.

    `ahead` tasks should be submitted at a time to keep every worker busy; with `elsewhere` tasks
    run in another process and their arguments are pickled.
    """

    def __init__(self, executor: Executor, ahead: int, *, elsewhere: bool) -> None:
        self.elsewhere = elsewhere
        self._executor, self._ahead = executor, ahead
        self._under_way: dict[Future[Any], Hashable] = {}
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.forget(lambda key: True)
        if isinstance(error, KeyboardInterrupt):
            self.abandon()
        else:
            self.close()

    @property
    def busy(self) -> bool:
        """True if a task is running or queued."""
        return bool(self._under_way)

    @property
    def hungry(self) -> bool:
        """True if workers would be idle without more tasks."""
        return len(self._under_way) < self._ahead

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Submit a task under a key."""
        future = self._executor.submit(function, *arguments)
        self._under_way[future] = key
        future.add_done_callback(self._ended.put)

    def each(
        self, tasks: Iterable[tuple[Hashable, Callable[..., Any], tuple[Any, ...]]]
    ) -> Iterator["Finished"]:
        """Run tasks (key, function, arguments), enough at a time; yield results as they end."""
        waiting = iter(tasks)
        task = next(waiting, None)
        while task is not None or self.busy:
            if task is not None and self.hungry:
                key, function, arguments = task
                self.submit(key, function, *arguments)
                task = next(waiting, None)
            else:
                yield self.next()

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
        """True if an error comes from the engine rather than the task."""
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
    """Runs tasks in processes on this machine, through joblib's loky; each gets some cores."""

    def __init__(self, jobs: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        # loky starts its resource tracker here. When a run is interrupted, the tracker removes the
        # semaphores that are left and warns about each, after the run's own last line.
        with deaf_children(), environment(CHILDREN):
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
            "one of the processes of `jobs` was killed, perhaps out of memory; "
            "fewer processes need less (`resume` continues an audit)"
        )


def _begin(parent: int) -> None:
    """Initialise a worker process."""
    end_with_parent(parent)
    logging.getLogger().addHandler(logging.NullHandler())  # without one, logging prints warnings


def beside_others(cores: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task on some cores with one BLAS thread; the limit stays, as others rely on it."""
    keep_to(cores)
    one_blas_thread()
    return function(*arguments)


# A Dask cluster

CLOSING = 10  # seconds to disconnect
HURRY = 0.3  # seconds to disconnect after an interruption
ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9a-fA-F:.%]+\]|[\w.-]+):\d{1,5}/?")
NOISY = (
    "distributed", "distributed.client", "distributed.core", "distributed.utils", "tornado",
    "tornado.application", "asyncio",
)  # fmt: skip
FEWEST_AHEAD = 256  # tasks submitted at a time, so that new workers find some


class Cluster(Engine):
    """The workers of one scheduler. Each runs one task per thread, with one core per task.

    Workers may die or join at any time; the tasks of a dead worker go to another. `address` names
    the scheduler in messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        threads = sum(client.nthreads().values())
        if not threads:
            notice = f"weightscope: no worker has joined {address} yet; waiting for one"
            print(notice, file=sys.stderr)
        ahead = max(FEWEST_AHEAD, 2 * threads)
        super().__init__(client.get_executor(pure=False), ahead, elsewhere=True)
        self._client, self._address = client, address

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        with warnings.catch_warnings():
            # results that a page needs are large
            warnings.filterwarnings("ignore", "Sending large graph")
            super().submit(key, beside_others, 1, function, *arguments)

    def close(self) -> None:
        self._client.close(timeout=CLOSING)

    def abandon(self) -> None:
        with suppress(Exception):  # such as a timeout
            self._client.close(timeout=HURRY)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(
            f"the Dask scheduler at {self._address} has gone away (`resume` continues an audit)"
        )

    def in_words(self, error: Exception) -> Exception:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            problem = f"{error.allowed_failures + 1} workers died running one task"
            advice = "`dask worker --nthreads 1` holds one layer at a time"
            return CheckpointError(f"{problem}, perhaps out of memory; {advice}")
        if isinstance(error, ImportError) or "deserializ" in str(error):
            return CheckpointError(
                f"the scheduler or a worker at {self._address} cannot load weightscope ({error}); "
                "install the same version there"
            )
        if isinstance(error, (CheckpointError, MemoryError, OSError)):
            return error
        problem = printable(f"{type(error).__name__}: {error}")[:200]
        same = "Does it run the same version of weightscope, and do all workers?"
        return CheckpointError(f"a task failed on a worker at {self._address} ({problem}). {same}")


def connect(scheduler: str | None) -> Engine:
    """Connect to a scheduler, by default the one in Dask's configuration, with its timeout."""
    try:
        import dask
        from dask.utils import parse_timedelta
        from distributed import Client
    except ImportError:
        raise CheckpointError("`engine='dask'` needs Dask: pip install distributed") from None
    address = scheduler or dask.config.get("scheduler-address", None)
    if not address:
        needed = "`scheduler`, the tcp:// address that `dask scheduler` prints"
        raise CheckpointError(f"`engine='dask'` needs {needed}")
    address = _address(address)
    for name in NOISY:  # errors are reported in one line below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    timeout = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    call = partial(Client, address, timeout=timeout, set_as_default=False, name="weightscope")
    try:
        client = _within(timeout + 1, call)
    except Exception as error:  # Dask raises many kinds
        problem = f"no Dask scheduler answers at {address} ({first_line(error)})"
        raise CheckpointError(problem) from None
    return Cluster(client, address)


def _address(scheduler: str) -> str:
    """An address, given directly or in the file that `dask scheduler --scheduler-file` writes."""
    if ADDRESS.fullmatch(scheduler):
        return scheduler
    with (
        suppress(OSError, CheckpointError, ValueError, KeyError, TypeError),
        regular_file(Path(scheduler)) as file,
    ):
        address = json.load(file)["address"]
        if ADDRESS.fullmatch(address):
            return str(address)
    problem = "is neither tcp://HOST:PORT nor a scheduler file"
    raise CheckpointError(f"`scheduler` {printable(scheduler)} {problem}")


def _within(seconds: float, connect: Callable[[], Any]) -> Any:
    """Call `connect` with a timeout: a silent server would block the client forever."""
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            answer.set_result(connect())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=call, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer in {seconds:.0f} s") from None


def open_engine(engine: str, scheduler: str | None = None, jobs: int | None = None) -> Engine:
    """The engine that a user asks for."""
    if engine == "dask":
        return connect(scheduler)
    return ThisProcess() if jobs is None else Processes(jobs)
