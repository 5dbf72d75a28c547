"""Tasks on a Dask cluster. Dask is imported here alone."""

import logging
import sys
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from weightscope.engine.engine import Engine, beside_others
from weightscope.errors import CheckpointError, printable

PATIENCE = 10  # seconds for the scheduler to answer
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
        self._client.close(timeout=PATIENCE)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(f"the Dask scheduler at {self._address} has gone away (audit --resume goes on)")

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


def cluster(scheduler: str | None) -> Engine:
    """The cluster of a scheduler; without one given, that of Dask's own configuration.

    Raises
    ------
    CheckpointError
        Dask is not installed, no scheduler is named, or none answers.
    """
    try:
        import dask
        from distributed import Client
    except ImportError:
        raise CheckpointError("--engine dask needs Dask: pip install 'weightscope[cluster]'") from None
    address = scheduler or dask.config.get("scheduler-address", None)
    if not address:
        raise CheckpointError("--engine dask needs --scheduler, the tcp:// address that `dask scheduler` prints")
    shown = printable(address)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what goes wrong is said in a line, here
    where = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
    try:
        client = Client(**where, timeout=PATIENCE, set_as_default=False, name="weightscope")
    except (OSError, ValueError, ImportError, RuntimeError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"no Dask scheduler answers at {shown} ({reason})") from None
    return Cluster(client, shown)
