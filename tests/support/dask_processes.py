"""A Dask scheduler and workers as processes of their own, on the loopback, to be killed and added to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import weightscope as ws

PATHS = [str(Path(ws.__file__).parents[1]), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
PATIENCE = 120  # seconds, on a machine that does much else


class DaskProcesses:
    """One scheduler on a port of the system's choice, and workers with one thread each.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._file, self._log = folder / "scheduler.json", folder / "log"
        self._workers: list[subprocess.Popen] = []
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-show")
        self.add_worker()
        self.add_worker()
        self.address = str(self._wait_for_address())

    def add_worker(self) -> subprocess.Popen:
        worker = self._start("worker", "--nthreads", "1", "--no-nanny", "--host", "127.0.0.1", "--death-timeout", "60")
        self._workers.append(worker)
        return worker

    @property
    def options(self) -> list[str]:
        """Of a command that is to run here."""
        return ["--engine", "dask", "--scheduler", self.address]

    @property
    def workers(self) -> list[subprocess.Popen]:
        """Those alive."""
        return [worker for worker in self._workers if worker.poll() is None]

    def kill(self, *processes: subprocess.Popen) -> None:
        """With signal 9."""
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self.kill(*self.workers, self.scheduler)

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dask", *arguments, "--scheduler-file", str(self._file), "--no-dashboard"]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, cwd=self._file.parent)

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.scheduler.poll() is None:
            try:
                return json.loads(self._file.read_text())["address"]
            except (OSError, ValueError):
                time.sleep(0.05)
        raise AssertionError(f"no scheduler:\n{self._log.read_text()}")
