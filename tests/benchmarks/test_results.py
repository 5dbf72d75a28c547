"""Two runs of the benchmarks compared: noise is not a change, and a change is not noise."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import results
from benchmarks.compare import main
from benchmarks.results import Bench, Measured, before_row, comparison, load, taken, this_machine
from weightscope.core.errors import CheckpointError


def bench(*ratios: float, name: str = "AUROC") -> Bench:
    return Bench({"cores": 2}, [Measured(name, 1.0, ratios, "the products", 300.0)])


def test_what_was_saved_is_what_is_read(tmp_path: Path) -> None:
    bench(1.4, 1.5, 1.6).save(tmp_path / "bench.json")
    assert load(tmp_path / "bench.json") == bench(1.4, 1.5, 1.6)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((1.50, 1.51, 1.52), (1.50, 1.53, 1.54), "unchanged"),
        ((1.50, 1.51, 1.52), (3.00, 3.02, 3.04), "SLOWER"),
        ((3.00, 3.02, 3.04), (1.50, 1.51, 1.52), "faster"),
        ((1.0, 1.5, 2.0), (1.3, 1.9, 2.4), "unchanged"),  # within what rounds differ by themselves
        ((1.5,), (1.8, 1.8), "unchanged"),  # how much a single round differs is not known
        ((1.5,), (2.0, 2.0), "SLOWER"),
    ],
)
def test_verdicts(old: tuple[float, ...], new: tuple[float, ...], verdict: str) -> None:
    (line,) = comparison(bench(*old), bench(*new))
    assert line.startswith(verdict)


def test_works_that_only_one_run_has_are_named() -> None:
    lines = comparison(bench(1.0, name="old"), bench(1.0, name="other"))
    assert [line.split()[0] for line in lines] == ["new", "gone"]


def test_the_command_tells_by_its_status(tmp_path: Path) -> None:
    bench(1.0, 1.0).save(tmp_path / "a.json")
    bench(2.0, 2.0).save(tmp_path / "b.json")
    arguments = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert CliRunner().invoke(main, arguments).exit_code == 1
    assert CliRunner().invoke(main, arguments[::-1]).exit_code == 0


def test_another_file_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"x\.json: not the result of a benchmark"):
        load(tmp_path / "x.json")


@pytest.mark.parametrize(("busy", "idle"), [((50, 50, 50, 50), False), ((50, 3), True), ((20,), True)])
def test_other_work_is_what_keeps_cores_busy_while_the_benchmark_sleeps(
    monkeypatch: pytest.MonkeyPatch, busy: tuple[int, ...], idle: bool
) -> None:
    """Of 100 ticks on two cores, `busy` are not idle: user, system, or stolen; a burst is let pass."""
    monkeypatch.setattr(results.os, "getloadavg", lambda: (7.0, 0, 0), raising=False)
    counts, left = [0] * 8, iter(busy)

    def stat() -> str:
        return f"cpu {' '.join(map(str, counts))} 0 0\ncpu0 1\ncpu1 1\nintr 5\n"

    def sleep(seconds: float) -> None:
        if seconds:
            ticks = next(left)
            for place, more in ((0, ticks - 2), (2, 1), (7, 1), (3, 60 - ticks), (4, 40)):  # idle, waiting for a disk
                counts[place] += more

    row = Measured("a", 1.0, **before_row(stat, sleep))
    assert (row.load, row.other) == (7, pytest.approx(2 * busy[-1] / 100))
    assert row.idle == idle and next(left, None) is None


def test_a_run_says_on_what_and_from_which_commit_it_was_taken() -> None:
    machine = this_machine()
    sentence = taken(Bench(machine, limits={"load": 0.25}))
    assert all(str(machine[name]) in sentence for name in ("processor", "blas", "commit", "python", "numpy", "date"))
    assert sentence.endswith("; load 0.2 at the start.")
