"""Tasks that a worker of the tests can import."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from threadpoolctl import threadpool_info

from weightscope.audits.audit import AuditOptions, Measured, conclude, write_audit
from weightscope.audits.many import Commission, Delivery, audit_all, headline
from weightscope.engine import open_engine
from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.parallel import usable_cores
from weightscope.sources import Source


def doubled(number: int) -> int:
    return 2 * number


def touched_late(path: Path, seconds: float) -> None:
    time.sleep(seconds)
    path.touch()


def refused(number: int) -> int:
    raise CheckpointError(f"no {number}", file="model.safetensors")


def killed_once(marker: Path, number: int) -> int:
    """The first worker to come here is killed in the middle of its work."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return 2 * number
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived")


def cores_and_blas_threads() -> tuple[int, set[int]]:
    """What a task is left: cores for its threads, and threads of every BLAS that is loaded."""
    return usable_cores(), {found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"}


def tables_alone(opened: Callable[[], Model], heads: Measured, options: AuditOptions, out: Path) -> Delivery:
    """An audit's end without figures and page, which take seconds."""
    results = conclude(opened(), heads, options)
    with TemporaryDirectory() as folder:
        write_audit(results, Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return Delivery(files | {"report.html": b""}, [], headline(opened(), results))


def audit_undrawn(scheduler: str, checkpoint: str, out: str) -> None:
    """What `weightscope audit --engine dask --resume` does, with tables alone."""
    with open_engine("dask", scheduler) as engine:
        commission = Commission(Source.named(checkpoint), Path(out))
        (ended,) = audit_all([commission], AuditOptions(), engine, tables_alone, resume=True)
    if ended.error is not None:
        raise ended.error
