"""An atlas on a Dask cluster whose workers are killed: the same tables as in one process."""

import threading
import time
from pathlib import Path

import pytest

from tests.support.commands import run

pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `atlas`")
from tests.support.dask_processes import DaskProcesses

pytestmark = pytest.mark.check


def test_killed_workers_change_nothing(population: Path, tmp_path: Path) -> None:
    here = run("atlas", population / "list.txt", "--out", tmp_path / "here")
    assert here.exit_code == 0, here.output
    (tmp_path / "dask").mkdir()
    dask = DaskProcesses(tmp_path / "dask")

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list((tmp_path / "there").glob(".weightscope/pairs/atlas/print-*")):
            time.sleep(0.01)
        dask.kill(dask.workers[0])
        dask.add_worker()

    killer = threading.Thread(target=kill_one)
    try:
        killer.start()
        there = run("atlas", population / "list.txt", "--out", tmp_path / "there", *dask.options)
        killer.join()
    finally:
        dask.close()
    assert there.exit_code == 0, there.output
    for name in ("checkpoints.csv", "families.csv", "tree.csv", "errors.csv"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes(), name
