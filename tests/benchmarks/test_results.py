"""Two runs of the benchmarks compared: noise is not a change, and a change is not noise."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.compare import main
from benchmarks.results import Bench, Measured, comparison, load
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
