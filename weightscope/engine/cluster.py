"""Tasks on a Dask cluster. Only this module imports Dask."""

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
from weightscope.files import regular_file

CLOSING = 10  # seconds to disconnect
HURRY = 0.3  # seconds to disconnect after an interruption
ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9a-fA-F:.%]+\]|[\w.-]+):\d{1,5}/?")
NOISY = (
    "distributed", "distributed.client", "distributed.core", "distributed.utils",
    "tornado", "tornado.application", "asyncio",
)  # fmt: skip
FEWEST_AHEAD = 256  # tasks submitted at a time, so that new workers find some


class Cluster(Engine):
    """The workers of one scheduler. Each runs one task per thread, with one core per task.

    Workers may die or join at any time; the tasks of a dead worker go to another. `address` names the scheduler in
    messages.
    """

    def __init__(self, client: Any, address: str) -> None:
        threads = sum(client.nthreads().values())
        if not threads:
            print(f"weightscope: no worker has joined {address} yet; waiting for one", file=sys.stderr)
        super().__init__(client.get_executor(pure=False), max(FEWEST_AHEAD, 2 * threads), elsewhere=True)
        self._client, self._address = client, address

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sending large graph")  # results that a page needs are large
            super().submit(key, beside_others, 1, function, *arguments)

    def close(self) -> None:
        self._client.close(timeout=CLOSING)

    def abandon(self) -> None:
        with suppress(Exception):  # such as a timeout
            self._client.close(timeout=HURRY)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(f"the Dask scheduler at {self._address} has gone away (`resume` continues an audit)")

    def in_words(self, error: Exception) -> Exception:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return CheckpointError(
                f"{error.allowed_failures + 1} workers died running one task, perhaps out of memory; "
                "`dask worker --nthreads 1` holds one layer at a time"
            )
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
    """Connect to a scheduler, by default the one in Dask's configuration, with the timeout configured there."""
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
    for name in NOISY:  # errors are reported in one line below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    timeout = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    call = partial(Client, address, timeout=timeout, set_as_default=False, name="weightscope")
    try:
        client = _within(timeout + 1, call)
    except Exception as error:  # Dask raises many kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"no Dask scheduler answers at {address} ({reason})") from None
    return Cluster(client, address)


def _address(scheduler: str) -> str:
    """An address, given directly or in the file that `dask scheduler --scheduler-file` writes."""
    if ADDRESS.fullmatch(scheduler):
        return scheduler
    with suppress(OSError, CheckpointError, ValueError, KeyError, TypeError), regular_file(Path(scheduler)) as file:
        address = json.load(file)["address"]
        if ADDRESS.fullmatch(address):
            return str(address)
    problem = "is neither tcp://HOST:PORT nor a scheduler file"
    raise CheckpointError(f"`scheduler` {printable(scheduler)} {problem}")


def _within(seconds: float, connect: Callable[[], Any]) -> Any:
    """Call `connect` with a timeout: a server that accepts and stays silent would block the client forever."""
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
