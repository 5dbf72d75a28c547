"""Commands that real signals end: the exit status says so, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.files import HIDDEN

pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc to look for survivors in"),
]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
PATIENCE = 60  # seconds; a hang, on however starved a machine


def alive(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = status.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(of_group) == group and state not in "ZX":
            children.append(int(status.parent.name))
    return children


def default_signals() -> None:
    """Undo what the caller ignores: a child inherits it, and tests run under `nohup` too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(*command: str, **environment: str) -> subprocess.Popen[str]:
    """A process in a group of its own, as a shell starts one; any holder of its pipes keeps `communicate` waiting."""
    return subprocess.Popen(
        [sys.executable, *command], env=ENVIRONMENT | environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals,
    )  # fmt: skip


AT_EXIT = """
import atexit, os, sys, time
from weightscope.__main__ import main
number = int(sys.argv.pop())
atexit.register(lambda: (os.kill(os.getpid(), number), time.sleep(0.05)))
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_exits_changes_nothing(number: int) -> None:
    process = started("-c", AT_EXIT, "--version", str(int(number)))
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, "") and stdout.startswith("weightscope")


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The status and last stderr line of a process that was asked to end, once no process of its group is alive."""
    try:
        stderr = process.communicate(timeout=PATIENCE)[1]
        print(stderr)  # whole, where a test fails
        until = time.monotonic() + PATIENCE
        while alive(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(process.pid)
        return process.returncode, (stderr.splitlines() or [""])[-1].strip()
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def forty_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than are handed out at a time."""
    weights = gpt2_weights(n_layers=40, d=48, vocab=60)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "forty", weights)


GO_ON = "weightscope: interrupted{}; run the same command with --resume to continue"
ENDS = [  # signal, whether the whole group gets it, options, whether the source is a list; status and line
    ("SIGINT", True, ["--jobs", "2"], False, 130, GO_ON.format("")),
    ("SIGTERM", False, ["--jobs", "2"], True, 143, GO_ON.format(" by SIGTERM")),
    ("SIGHUP", True, [], True, 129, GO_ON.format(" by SIGHUP")),
    ("SIGKILL", False, ["--jobs", "2"], False, -9, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group", "options", "of_list", "status", "line"), ENDS, ids=[end[0] for end in ENDS])
def test_an_audit_that_is_asked_to_end_does_and_goes_on_later(
    name: str, group: bool, options: list[str], of_list: bool, status: int, line: str | None,
    forty_layers: Path, tmp_path: Path,
) -> None:  # fmt: skip
    source, out, temporary = forty_layers, tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    if of_list:
        source = tmp_path / "list.txt"
        source.write_text(f"{forty_layers}\n")
    process = started("-m", "weightscope", "audit", str(source), "--out", str(out), *options, TMPDIR=str(temporary))
    while process.poll() is None and not any(out.rglob("layer-*.npz")):
        time.sleep(0.005)
    (os.killpg if group else os.kill)(process.pid, getattr(signal, name))
    code, stderr = ended(process)
    assert code == status and (line is None or stderr == line)
    assert not list(out.rglob("heads.csv")), "it ended by itself"
    assert not list(temporary.iterdir())
    if name != "SIGKILL":
        assert not list(out.rglob("*.partial"))
    if name == "SIGINT":
        kept = len(list(out.rglob("layer-*.npz")))
        assert audit_of(source, out, "--resume").exit_code == 0 and kept
        assert not list((out / HIDDEN).glob("layers-*"))


WAITING = """
import sys, threading, time
from weightscope.cli.command import ended_by_signals
with ended_by_signals(lambda: ""):
    threading.Thread(target=time.sleep, args=(600,)).start()
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_uninterruptible_work_ends_after_the_grace_period(name: str, status: int) -> None:
    process = started("-c", WAITING)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(getattr(signal, name))
    code, stderr = ended(process)
    assert code == status and stderr.startswith("weightscope: interrupted")


IN_LAPACK = """
import numpy as np
from weightscope.cli.command import ended_by_signals
from weightscope.core.compute import lapack
x = np.random.default_rng(0).standard_normal((3000, 3000))
with ended_by_signals(lambda: ""):
    print("begun", flush=True)
    {}
"""


@pytest.mark.parametrize("call", ["lapack.eigh(x @ x.T)", "lapack.svd(x)", "np.linalg.eigvals(x)"])
def test_a_long_call_of_lapack_is_ended(call: str) -> None:
    """By the thread that waits for signals: such calls release the interpreter's lock."""
    process = started("-c", IN_LAPACK.format(f"{call}\n    print('done')"), OPENBLAS_NUM_THREADS="1")
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


def test_ignored_signal_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WAITING
    process = started("-c", code)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


SERVED = """
import threading, time
from weightscope.model.text.sandbox import _Child
child = _Child()
threading.Thread(target=child.call, args=(time.sleep, (600,), 600.0, 9), daemon=True).start()
print("begun", flush=True)
time.sleep(600)
"""


def test_tokenizer_process_ends_with_its_parent() -> None:
    """In the middle of a request too, where it does not see that its input has ended."""
    process = started("-c", SERVED)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
