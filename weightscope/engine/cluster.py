"""Tasks on a Dask cluster. Dask is imported here alone."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from weightscope.engine.engine import Engine, beside_others
from weightscope.errors import CheckpointError, printable
from weightscope.regular import regular_file

CLOSING = 10  # seconds to take leave
HURRY = 0.3  # the same, when asked to end
ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9a-fA-F:.%]+\]|[\w.-]+):\d{1,5}/?")
NOISY = (
    "distributed", "distributed.client", "distributed.core", "distributed.utils",
    "tornado", "tornado.application", "asyncio",
)  # fmt: skip
FEWEST_AHEAD = 256  # tasks under way, so that workers that join find some


class Cluster(Engine):
    """The workers of one scheduler. Each runs as many tasks at a time as it has threads, a core a task.

    A worker may die or join at any time: what it was at is handed to another.

    Parameters
    ----------
    client : distributed.Client
    address : str
        How to call the scheduler in messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        threads = sum(client.nthreads().values())
        if not threads:
            print(f"weightscope: no worker has joined {address} yet; waiting for one", file=sys.stderr)
        super().__init__(client.get_executor(pure=False), max(FEWEST_AHEAD, 2 * threads), elsewhere=True)
        self._client, self._address = client, address

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # the numbers that a page is drawn from
            super().submit(key, beside_others, 1, function, *arguments)

    def close(self) -> None:
        self._client.close(timeout=CLOSING)

    def abandon(self) -> None:
        with suppress(Exception):  # that a leave so short could not be taken, among others
            self._client.close(timeout=HURRY)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(f"the Dask scheduler at {self._address} has gone away (`resume` goes on with an audit)")

    def in_words(self, error: Exception) -> Exception:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return CheckpointError(
                f"{error.allowed_failures + 1} workers died at one of its tasks, out of memory perhaps; "
                "`dask worker --nthreads 1` holds one layer at a time"
            )
        if isinstance(error, ImportError) or "deserializ" in str(error):
            return CheckpointError(
                f"the scheduler or a worker at {self._address} cannot load weightscope ({error}); "
                "install the same version there"
            )
        return error


def connect(scheduler: str | None) -> Engine:
    """The cluster of a scheduler; without one given, that of Dask's own configuration, which has the patience too.

    Raises
    ------
    CheckpointError
        Dask is not installed, no scheduler is named, or none answers.
    """
    try:
        import dask
        from dask.utils import parse_timedelta
        from distributed import Client
    except ImportError:
        raise CheckpointError("`engine='dask'` needs Dask: pip install distributed") from None
    address = scheduler or dask.config.get("scheduler-address", None)
    if not address:
        raise CheckpointError("`engine='dask'` needs `scheduler`, the tcp:// address that `dask scheduler` prints")
    address = _address(address)
    for name in NOISY:  # what goes wrong is said in a line, here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    call = partial(Client, address, timeout=patience, set_as_default=False, name="weightscope")
    try:
        client = _within(patience + 1, call)
    except Exception as error:  # Dask's own, of many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"no Dask scheduler answers at {address} ({reason})") from None
    return Cluster(client, address)


def _address(scheduler: str) -> str:
    """An address, or the one in the file that `dask scheduler --scheduler-file` wrote."""
    if ADDRESS.fullmatch(scheduler):
        return scheduler
    with suppress(OSError, CheckpointError, ValueError, KeyError, TypeError), regular_file(Path(scheduler)) as file:
        found = json.load(file)["address"]
        if ADDRESS.fullmatch(found):
            return str(found)
    problem = "is neither tcp://HOST:PORT nor a file that a scheduler wrote its address to"
    raise CheckpointError(f"`scheduler` {printable(scheduler)} {problem}")


def _within(seconds: float, connect: Callable[[], Any]) -> Any:
    """What `connect` returns; a server that takes the call and says nothing would hold the client for ever."""
    found: Future[Any] = Future()

    def call() -> None:
        try:
            found.set_result(connect())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=call, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer in {seconds:.0f} s") from None
