"""Keep a run of the benchmarks, and write its tables into the pages that show them.

    python -m benchmarks.publish out/bench/bench.json

copies the file, or whole.json or other_tools.json, to benchmarks/ and rewrites its tables in README.md and
docs/speed.md, which are found by their headers. A test compares the pages with the files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks import limits, other_tools, results, whole
from benchmarks.results import Bench, duration, load, peak_of

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "bench.json"
WHOLE, OTHER_TOOLS = KEPT.with_name("whole.json"), KEPT.with_name("other_tools.json")
README_HEADER = "| task | time | peak memory |"
README_ROWS = {  # benchmarks that a user cares about, in the words of the README
    "gpt2, 12 layers: the whole audit, figures and page included": "audit at GPT-2's size, with all figures",
    "llama-2-7b, 4 layers: the whole audit, figures and page included": "audit of 4 layers at Llama 2 7B's size",
    "AUROC, 12 heads x 50,257 x 50,257, numba": "bigram AUROC of 12 heads, 50,257 x 50,257 tokens (timed on 2)",
}


@dataclass(frozen=True)
class Page:
    """A page, and the part of it that the benchmarks write."""

    path: str
    pattern: str  # what is replaced
    made: Callable[[Bench], str]  # by what
    kept: Path = KEPT  # of which run

    def rewritten(self, text: str, bench: Bench) -> str:
        """The page's text with the results of this run."""
        rewritten, count = re.subn(self.pattern, lambda _: self.made(bench), text, flags=re.MULTILINE)
        if count != 1:
            raise click.ClickException(f"{self.path}: expected one match of /{self.pattern}/, found {count}")
        return rewritten


def _table(header: str) -> str:
    """The pattern of a whole table."""
    return re.escape(header) + r"\n(?:\|.*\n)*"


def readme_table(bench: Bench) -> str:
    """The README's table: the rows that a user cares about."""
    measured = {each.name: each for each in bench.measured}
    rows = [(label, measured[name]) for name, label in README_ROWS.items() if name in measured]
    lines = [f"| {label} | {duration(each.seconds)} | {peak_of(each)} |" for label, each in rows]
    return "\n".join([README_HEADER, "| --- | --- | --- |", *lines, ""])


PAGES = (
    Page("README.md", _table(README_HEADER), readme_table),
    Page("docs/speed.md", _table(results.HEADER), Bench.table),
    Page("docs/speed.md", _table(limits.HEADER), limits.floors),
    Page("docs/speed.md", r"^\d+ cores of .*when the run began\.$", limits.reached),
    Page("docs/speed.md", _table(whole.HEADER), whole.table, WHOLE),
    Page("docs/speed.md", r"^Whole models: taken on .*$", whole.taken, WHOLE),
    Page("docs/speed.md", _table(other_tools.HEADER), other_tools.table, OTHER_TOOLS),
    Page("docs/speed.md", r"^Other tools: taken on .*$", other_tools.taken, OTHER_TOOLS),
)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=KEPT)
def main(file: Path) -> None:
    """Keep FILE, a bench.json, whole.json or other_tools.json, in benchmarks/ and rewrite the pages."""
    bench, kept = load(file), KEPT.with_name(file.name)
    pages = [page for page in PAGES if page.kept == kept]
    if not pages:
        raise click.ClickException(f"{file.name}: no page shows it")
    bench.save(kept)
    for page in pages:
        path = ROOT / page.path
        path.write_text(page.rewritten(path.read_text(encoding="utf-8"), bench), encoding="utf-8")
        click.echo(page.path)


if __name__ == "__main__":
    main()
