"""Under a limit that NumPy's and SciPy's BLAS cannot be loaded within, a command ends at once and says so."""

import os
import resource
import subprocess
import sys

import pytest

from weightscope.__main__ import A_THREAD, LEAST, THREADS_CHOSEN, too_little_memory

ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def command(kind: int, limit: int) -> subprocess.CompletedProcess[str]:
    """`inspect` with one thread under a limit."""
    return subprocess.run(
        [sys.executable, "-m", "weightscope", "inspect", "embedded"],
        capture_output=True, text=True, env=ONE_THREAD, timeout=60,
        preexec_fn=lambda: resource.setrlimit(kind, (limit, resource.RLIM_INFINITY)),
    )  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize(("kind", "option"), [(resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")])
def test_too_little_memory_is_refused_before_loading(kind: int, option: str) -> None:
    for limit in (200_000 << 10, 300_000 << 10, LEAST - 1024):
        done = command(kind, limit)
        says = (
            f"weightscope: the limit `ulimit {option} {limit // 1024}` is too low; {LEAST // 1024} at least is needed\n"
        )
        assert (done.returncode, done.stdout, done.stderr) == (2, "", says)
    assert command(kind, LEAST).returncode == 0


@pytest.mark.parametrize(
    ("chosen", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "9"}, 2),
        ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "999"}, 64),
    ],
)
def test_needed_memory_grows_with_threads(
    chosen: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THREADS_CHOSEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    needed = LEAST + A_THREAD * (threads - 1)
    for limit in (needed, needed - 1, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert bool(too_little_memory()) == (limit == needed - 1)
