"""Tasks in several processes on one machine, through joblib's loky."""

from collections.abc import Callable, Hashable
from typing import Any

from weightscope.engine.engine import Engine, beside_others
from weightscope.errors import CheckpointError
from weightscope.parallel import usable_cores

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Processes(Engine):
    """So many processes, each with its share of the cores.

    Parameters
    ----------
    jobs : int
    """

    def __init__(self, jobs: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self._pool = ProcessPoolExecutor(jobs, env=ONE_THREAD)
        super().__init__(self._pool, ahead=2 * jobs, elsewhere=True)
        self._cores = max(1, usable_cores() // jobs)

    def submit(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        super().submit(key, beside_others, self._cores, function, *arguments)

    def close(self, *, at_once: bool = False) -> None:
        self._pool.shutdown(wait=True, kill_workers=at_once)

    def is_own(self, error: Exception) -> bool:
        from joblib.externals.loky import BrokenProcessPool

        return isinstance(error, BrokenProcessPool)

    def failure(self, error: Exception | None) -> CheckpointError:
        return CheckpointError(
            "a process of --jobs was killed, out of memory perhaps; fewer jobs take less (audit --resume goes on)"
        )


def processes(jobs: int) -> Engine:
    """Several processes on this machine."""
    return Processes(jobs)
