"""Tables on pages come from the runs of the benchmarks that are kept."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import publish, whole
from benchmarks.publish import PAGES, ROOT, kept_run
from benchmarks.results import Bench, Measured, table

LIMITS = {"cached": 2e9, "disk": 0.0, "flops32": 1e11, "flops64": 5e10, "load": 0.5}
PRODUCTS = Measured(
    "AUROC, 12 heads x 50,257 x 50,257, numba", 25.0, (1.3, 1.4, 1.5), "the products", 341, cpu=48.0,
    cpu_ratios=(1.2,), flops32=4e12, load=1.0, other=0.1, group=whole.PEOPLE,
)  # fmt: skip
BENCH = Bench({"cores": 2, "processor": "a processor", "numpy": "2", "date": "2026-01-02"}, [PRODUCTS], LIMITS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_has_one_place_for_each_table_and_nothing_else_changes(page) -> None:
    text = (ROOT / page.path).read_text()
    written = page.rewritten(text, BENCH)
    assert page.made(BENCH).strip() in written and page.rewritten(written, BENCH) == written
    rendered = ("| ", "Taken on", "`make bench`: Taken on", "2 cores: ")
    assert [line for line in text.splitlines() if not line.startswith(rendered)] == [
        line for line in written.splitlines() if not line.startswith(rendered)
    ]


def test_a_row_shows_its_ratio_first_and_on_a_busy_machine_no_seconds() -> None:
    *_, row = table("task", [PRODUCTS]).splitlines()
    assert row.endswith("numba | 1.4 x | the products | 25.0 s | 48.0 s | 341 MB | 0.1 (1.0) |")
    *_, row = table("task", [replace(PRODUCTS, other=0.6)]).splitlines()
    assert row.endswith("numba | 1.2 x, CPU | the products |  |  | 341 MB | 0.6 (1.0) |")
    *_, row = table("task", [Measured("alone", 3.0, load=0.2)]).splitlines()
    assert row == "| alone | no floor |  | 3.0 s |  |  | (0.2) |"


def test_a_run_is_kept_by_the_name_of_its_processor() -> None:
    xeon = replace(BENCH, machine=BENCH.machine | {"processor": "Intel(R) Xeon(R) Processor"})
    assert (BENCH.file, xeon.file) == ("bench-a-processor.json", "bench-intel-xeon.json")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_pages_say_what_the_kept_runs_found(page) -> None:
    text = (ROOT / page.path).read_text()
    assert page.rewritten(text, kept_run(page.kept)) == text


@pytest.mark.parametrize("name", ["README.md", "docs/speed.md", "docs/scale.md", "benchmarks/README.md"])
def test_every_table_of_times_is_rendered(name: str) -> None:
    headers = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("|") and " ratio |" in line]
    patterns = [page.pattern for page in PAGES if page.path == name]
    assert headers and all(any(re.match(pattern, f"{header}\n") for pattern in patterns) for header in headers)


def test_a_file_that_no_page_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PAGES", ())
    BENCH.save(tmp_path / "other.json")
    done = CliRunner().invoke(publish.main, [str(tmp_path / "other.json")])
    assert done.exit_code == 1 and "other.json: no page shows it" in done.output
