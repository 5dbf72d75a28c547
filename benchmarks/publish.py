"""Keep a run of the benchmarks, and write its tables into the pages that show them.

    python -m benchmarks.publish out/bench/bench.json
    python -m benchmarks.publish out/bench/whole.json

keeps the run as benchmarks/bench-PROCESSOR.json, or as benchmarks/whole.json, and rewrites the tables in README.md,
docs/speed.md and benchmarks/README.md, which are found by their headers. Pages show the latest run, and nothing else.
A test compares the pages with the files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import click

from benchmarks import engines, limits, whole
from benchmarks.results import COLUMNS, Bench, load, table, taken

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks"
BENCH, WHOLE = "bench-*.json", "whole.json"
TAKEN = r"Taken on .* at the start\."
ALL = "benchmark"  # the title of the table of `make bench`
README_ROWS = {  # rows that a user cares about, in the words of the README
    "`audit` of GPT-2's attention, with figures and page": "audit of GPT-2's attention, with all figures",
    "`audit` of a 7B's attention, 32,000 tokens": "audit of a 7B's attention",
    "AUROC, 12 heads x 50,257 x 50,257, numba": "bigram AUROC of 12 heads, 50,257 x 50,257 tokens (timed on 2)",
}


@dataclass(frozen=True)
class Page:
    """A page, and the part of it that the benchmarks write."""

    path: str
    pattern: str  # what is replaced
    made: Callable[[Bench], str]  # by what
    kept: str = WHOLE  # pattern of the run's file name

    def rewritten(self, text: str, bench: Bench) -> str:
        """The page's text with the results of this run."""
        rewritten, count = re.subn(self.pattern, lambda _: self.made(bench), text, flags=re.MULTILINE)
        if count != 1:
            raise click.ClickException(f"{self.path}: expected one match of /{self.pattern}/, found {count}")
        return rewritten


def _table(header: str) -> str:
    """The pattern of a whole table."""
    return rf"^{re.escape(header)}.*\n(?:\|.*\n)*"


def _group(path: str, group: str) -> Page:
    """A page that shows all rows of a group."""

    def made(bench: Bench) -> str:
        return table(group, [each for each in bench.measured if each.group == group])

    return Page(path, _table(f"| {group} {COLUMNS}"), made)


def _readme(bench: Bench) -> str:
    return table("task", bench.measured, README_ROWS)


def kept_run(kept: str) -> Bench:
    """The latest run that is kept."""
    return max((load(path) for path in sorted(KEPT.glob(kept))), key=lambda bench: str(bench.machine.get("date", "")))


PAGES = (
    Page("README.md", _table(f"| task {COLUMNS}"), _readme),
    Page("README.md", r"^Taken on .*\.$", lambda bench: f"{taken(bench).partition(': ')[0]}."),
    *(_group("docs/speed.md", group) for group in (whole.PEOPLE, whole.SAME, whole.COLDLY, whole.TOOLS)),
    Page("docs/speed.md", f"^{TAKEN}$", taken),
    _group("docs/scale.md", whole.ENGINES),
    Page("docs/scale.md", _table(engines.HEADER), engines.plan),
    _group("benchmarks/README.md", whole.PARTS),
    Page("benchmarks/README.md", _table(f"| {ALL} {COLUMNS}"), lambda bench: bench.table(ALL), BENCH),
    Page("benchmarks/README.md", _table(limits.HEADER), limits.floors, BENCH),
    Page("benchmarks/README.md", r"^\d+ cores: .* with this BLAS\.$", limits.reached, BENCH),
    Page("benchmarks/README.md", f"^`make bench`: {TAKEN}$", lambda bench: f"`make bench`: {taken(bench)}", BENCH),
)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Keep FILE, a bench.json or whole.json, in benchmarks/ and rewrite the pages."""
    bench = load(file)
    name = bench.file if file.name.startswith("bench") else file.name
    pages = [page for page in PAGES if fnmatch(name, page.kept)]
    if not pages:
        raise click.ClickException(f"{file.name}: no page shows it")
    bench.save(KEPT / name)
    for page in pages:
        path = ROOT / page.path
        path.write_text(page.rewritten(path.read_text(encoding="utf-8"), kept_run(page.kept)), encoding="utf-8")
        click.echo(page.path)


if __name__ == "__main__":
    main()
