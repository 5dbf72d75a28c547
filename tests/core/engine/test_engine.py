"""The seam itself: every engine runs the same tasks, hands errors over, and says in a line when it cannot."""

import socket
import sys
import threading

import pytest

from tests.support import tasks
from tests.support.commands import run
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.compute.cores import usable_cores
from weightscope.core.engine import Cluster, Engine, Processes, ThisProcess
from weightscope.core.errors import CheckpointError


def collect(engine: Engine) -> dict:
    outcomes = {}
    while engine.busy:
        key, value, error = engine.next()
        outcomes[key] = value if error is None else error
    return outcomes


@pytest.mark.parametrize("start", [
    pytest.param(ThisProcess, id="here"),
    pytest.param(lambda: Processes(2), id="processes", marks=pytest.mark.smoke),
])  # fmt: skip
def test_tasks_come_back_under_their_keys_and_errors_as_values(start) -> None:
    with start() as engine:
        assert engine.hungry and not engine.busy
        for number in range(6):
            engine.submit(("double", number), tasks.doubled, number)
        engine.submit("refused", tasks.refused, 7)
        outcomes = collect(engine)
    error = outcomes.pop("refused")
    assert isinstance(error, CheckpointError) and str(error) == "model.safetensors: no 7"
    assert outcomes == {("double", number): 2 * number for number in range(6)}


def test_forgotten_task_is_not_returned() -> None:
    release = threading.Event()
    with ThisProcess() as engine:
        engine.submit("slow", release.wait)
        engine.submit("unwanted", tasks.doubled, 1)
        engine.submit("wanted", tasks.doubled, 2)
        engine.forget(lambda key: key == "unwanted")
        release.set()
        assert collect(engine) == {"slow": True, "wanted": 4}


@pytest.mark.check
@pytest.mark.parametrize("jobs", [1, 2])
def test_processes_share_the_cores_out_among_them(jobs: int) -> None:
    with Processes(jobs) as engine:
        engine.submit("threads", tasks.cores_and_blas_threads)
        (cores, blas), error = engine.next()[1:]
    assert error is None
    assert cores == max(1, usable_cores() // jobs)
    assert blas <= {1}


@pytest.mark.check
def test_ctrl_c_does_not_wait_for_tasks_that_run(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt), Processes(2) as engine:
        engine.submit("slow", tasks.touched_late, tmp_path / "late", 8.0)
        for number in range(40):  # more than are handed out at a time
            engine.submit(number, tasks.doubled, number)
        engine.next()
        engine.forget(lambda key: key == 39)
        raise KeyboardInterrupt
    assert not (tmp_path / "late").exists()


@pytest.mark.check
def test_worker_processes_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Processes(1) as engine:
        engine.submit("loud", tasks.warned)
        assert engine.next().error is None
    assert capfd.readouterr().err == ""


@pytest.mark.check
def test_a_process_that_is_killed_ends_the_run_with_a_line(tmp_path) -> None:
    with Processes(2) as engine:
        engine.submit(0, tasks.killed_once, tmp_path / "marker", 0)
        with pytest.raises(CheckpointError, match=r"one of the processes of `jobs` was killed.*`resume`"):
            engine.next()


def refused(*arguments: object) -> str:
    """The one line of a command that must end with status 2."""
    result = run("audit", TWO_LAYERS, "--out", "nowhere", *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def test_contradicting_options_are_refused() -> None:
    assert "--scheduler needs --engine dask" in refused("--scheduler", "tcp://127.0.0.1:8786")
    assert "--jobs applies to the local engine" in refused("--engine", "dask", "--jobs", 2)


def test_missing_dask_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setitem(sys.modules, "dask", None)
    line = refused("--engine", "dask", "--scheduler", "tcp://127.0.0.1:8786")
    assert line == "weightscope: --engine dask needs Dask: pip install distributed\n"


@pytest.mark.parametrize("address", ["here", "tcp://", "http://host:1", "tcp://host", "a:b:c", "\x1b[31m"])
def test_invalid_scheduler_address_is_refused(address: str) -> None:
    pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
    line = refused("--engine", "dask", "--scheduler", address)
    assert line.count("\n") == 1 and "is neither tcp://HOST:PORT nor a scheduler file" in line and "\x1b" not in line


@pytest.mark.parametrize("listening", [False, True], ids=["no listener", "a silent listener"])
def test_a_scheduler_that_does_not_answer_is_not_waited_for(listening: bool) -> None:
    dask = pytest.importorskip("dask", reason="Dask comes with the extra `cluster`")
    with dask.config.set({"distributed.comm.timeouts.connect": "500ms"}), socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        line = refused("--engine", "dask", "--scheduler", address)
    assert line.count("\n") == 1 and line.startswith(f"weightscope: no Dask scheduler answers at {address}")


def test_a_task_that_kills_its_workers_is_the_fault_of_that_task_alone() -> None:
    distributed = pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
    engine = object.__new__(Cluster)
    sentence = engine.in_words(distributed.KilledWorker("task", None, 3))
    assert isinstance(sentence, CheckpointError) and "4 workers died running one task" in str(sentence)


def test_cluster_that_does_not_close_in_time_is_abandoned() -> None:
    class Client:
        def close(self, timeout: float) -> None:
            raise TimeoutError(f"timed out after {timeout} s.")

    engine = object.__new__(Cluster)
    engine._client, engine._under_way = Client(), {}
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
