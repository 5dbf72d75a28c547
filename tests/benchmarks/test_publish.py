"""Tables on pages come from the run of the benchmarks that is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import publish
from benchmarks.publish import BENCH as KEPT_BENCH
from benchmarks.publish import PAGES, README_ROWS, ROOT, kept_runs, readme_table
from benchmarks.results import Bench, Measured, table

LIMITS = {"cached": 2e9, "disk": 0.0, "flops32": 1e11, "flops64": 5e10, "load": 0.5}
BENCH = Bench(
    {"cores": 2, "processor": "a processor", "numpy": "2", "simd": ["X86_V4"], "date": "2026-01-02", "peers": {}},
    [
        Measured(
            "AUROC, 12 heads x 50,257 x 50,257, numba",
            25.0,
            (1.3, 1.4, 1.5),
            "the products",
            341,
            flops32=4e12,
            load=1.0,
        ),
        Measured(
            "AUROC against heads, 1, 2, 4",
            2.0,
            (4.1,),
            "the time at 1",
            90,
            exponent=1.02,
            memory_exponent=0.1,
            load=2.0,
        ),
    ],
    LIMITS,
)


OTHER = replace(
    BENCH,
    machine=BENCH.machine | {"processor": "Intel(R) Xeon(R) Processor"},
    measured=[replace(each, seconds=2 * each.seconds) for each in BENCH.measured],
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_has_one_place_for_each_table_and_nothing_else_changes(page) -> None:
    text = (ROOT / page.path).read_text()
    written_text = page.rewritten(text, [BENCH])
    assert page.made([BENCH]).strip() in written_text and page.rewritten(written_text, [BENCH]) == written_text
    lines, kept = text.splitlines(), set(written_text.splitlines())
    written = ("| ", "Whole models: taken", "Other tools: taken")
    assert all(line in kept for line in lines if not line.startswith(written) and "when the run began" not in line)


def test_the_readme_has_a_row_that_was_measured_and_speed_has_all() -> None:
    (row,) = [line for line in readme_table([BENCH, OTHER]).splitlines() if "AUROC" in line]
    assert row.endswith("| 25.0 s | 50.0 s | 341 MB |")
    assert "time grows as n^1.02; memory grows as n^0.10" in table([BENCH])
    header, _, row, *_ = table([BENCH, OTHER]).splitlines()
    assert header.endswith("| a processor | Intel Xeon | peak memory |")
    assert row.endswith("| the products | 25.0 s (1.40 x) | 50.0 s (1.40 x) | 341 MB |")


def test_a_run_is_kept_by_the_name_of_its_processor() -> None:
    assert (BENCH.file, OTHER.file) == ("bench-a-processor.json", "bench-intel-xeon.json")


def test_the_kept_runs_measured_every_row_of_the_readme() -> None:
    runs = kept_runs(KEPT_BENCH)
    assert len(runs) > 1 and len(README_ROWS) == 3
    assert all(set(README_ROWS) <= {each.name for each in run.measured} for run in runs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_pages_say_what_the_kept_runs_found(page) -> None:
    text = (ROOT / page.path).read_text()
    assert page.rewritten(text, kept_runs(page.kept)) == text


def test_a_file_that_no_page_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PAGES", ())
    BENCH.save(tmp_path / "other.json")
    done = CliRunner().invoke(publish.main, [str(tmp_path / "other.json")])
    assert done.exit_code == 1 and "other.json: no page shows it" in done.output
