"""Tasks that a worker of the tests can import."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import usable_cores
from weightscope.core.engine import open_engine
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Files
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions, conclude
from weightscope.heads.audit.batch import Job, Report
from weightscope.heads.audit.measure import Arrays
from weightscope.model.model import Model
from weightscope.model.sources import Source


def doubled(number: int) -> int:
    return 2 * number


def warned() -> None:
    """As libraries do."""
    np.log(np.zeros(1))
    warnings.warn("a library's", stacklevel=1)
    logging.getLogger("matplotlib").warning("a library's")


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
    return usable_cores(), {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def tables_alone(
    get_model: Callable[[], Model],
    layers: Mapping[int, Arrays],
    options: AuditOptions,
    provenance: Provenance,
    has_page: bool = True,
) -> Report:
    """An audit's end without figures and page, which take seconds."""
    results, files = replace(conclude(get_model(), layers, options), provenance=provenance), Files()
    results.write_tables(files)
    files.text("report.html", "")
    return Report(files.contents, str(results), results.summary(), results.as_json())


def audit_undrawn(scheduler: str, checkpoint: str, out: str) -> None:
    """What `weightscope audit --engine dask --resume` does, with tables alone."""
    batch.report_task = tables_alone
    with open_engine("dask", scheduler) as engine:
        (outcome,) = batch.audit_all([Job(Source.named(checkpoint), Path(out))], AuditOptions(), engine, resume=True)
    if outcome.error is not None:
        raise outcome.error
