"""Keep a run of the benchmarks, and write its tables into the pages that show them.

    python -m benchmarks.publish out/bench/bench.json

keeps the run as benchmarks/bench-PROCESSOR.json, and whole.json and other_tools.json under their names, and rewrites
the tables in README.md, docs/speed.md and benchmarks/README.md, which are found by their headers. A test compares the
pages with the files.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import click

from benchmarks import limits, other_tools, results, whole
from benchmarks.results import Bench, duration, load, peak_of

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks"
BENCH, WHOLE, OTHER_TOOLS = "bench-*.json", "whole.json", "other_tools.json"
README_HEADER = "| task |"
REACHED = r"\d+ cores of .*when the run began\."  # a machine's limits
README_ROWS = {  # benchmarks that a user cares about, in the words of the README
    "gpt2, 12 layers: the whole audit, figures and page included": "audit at GPT-2's size, with all figures",
    "llama-2-7b, 4 layers: the whole audit, figures and page included": "audit of 4 layers at Llama 2 7B's size",
    "AUROC, 12 heads x 50,257 x 50,257, numba": "bigram AUROC of 12 heads, 50,257 x 50,257 tokens (timed on 2)",
}

SPEED_ROWS = {  # benchmarks that docs/speed.md shows, in its words
    "gpt2, 12 layers: the whole audit, figures and page included": "audit of GPT-2, with figures and page",
    "llama-2-7b, 4 layers: singular values": "singular values of 4 layers at Llama 2 7B's size",
    "llama-2-7b, 4 layers: the whole audit, figures and page included": "audit of these layers, with figures and page",
    "llama-2-70b, 1 layer: the whole audit, figures and page included": "audit of a layer at Llama 2 70B's size",
    "AUROC, 12 heads x 50,257 x 50,257, numba": "bigram AUROC, 12 heads x 50,257 x 50,257, with numba",
    "AUROC, 12 heads x 50,257 x 50,257, numpy": "the same without numba",
    "the paper's way: scikit-learn, a row at a time, 12 heads": "the same with scikit-learn, one row at a time",
    "import weightscope": "import weightscope",
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page, and the part of it that the benchmarks write."""

    path: str
    pattern: str  # what is replaced
    made: Callable[[Sequence[Bench]], str]  # by what
    kept: str = BENCH  # pattern of the runs' file names

    def rewritten(self, text: str, benches: Sequence[Bench]) -> str:
        """The page's text with the results of these runs."""
        rewritten, count = re.subn(self.pattern, lambda _: self.made(benches), text, flags=re.MULTILINE)
        if count != 1:
            raise click.ClickException(f"{self.path}: expected one match of /{self.pattern}/, found {count}")
        return rewritten


def _table(header: str) -> str:
    """The pattern of a whole table."""
    return rf"^{re.escape(header)}.*\n(?:\|.*\n)*"


def readme_table(benches: Sequence[Bench]) -> str:
    """The README's table: the rows that a user cares about, a column for each processor."""
    runs = [{each.name: each for each in bench.measured} for bench in benches]
    lines = [f"{README_HEADER} {' | '.join(bench.processor for bench in benches)} | peak memory |"]
    lines.append("| --- " * (2 + len(benches)) + "|")
    for name, label in README_ROWS.items():
        if name in runs[-1]:
            times = [duration(run[name].seconds) if name in run else "" for run in runs]
            lines.append(f"| {label} | {' | '.join(times)} | {peak_of(runs[-1][name])} |")
    return "\n".join([*lines, ""])


def kept_runs(kept: str) -> list[Bench]:
    """The runs that are kept, in the order of their names reversed: the latest kind of processor last."""
    return [load(path) for path in sorted(KEPT.glob(kept), reverse=True)]


def _one(made: Callable[[Bench], str]) -> Callable[[Sequence[Bench]], str]:
    """What makes something of the only run."""
    return lambda benches: made(benches[0])


PAGES = (
    Page("README.md", _table(README_HEADER), readme_table),
    Page("docs/speed.md", _table(results.HEADER), partial(results.table, labels=SPEED_ROWS)),
    Page("benchmarks/README.md", _table(results.HEADER), results.table),
    Page("benchmarks/README.md", _table(limits.HEADER), limits.floors),
    Page("benchmarks/README.md", rf"^{REACHED}(?:\n\n{REACHED})*$", limits.reached),
    Page("docs/speed.md", _table(whole.HEADER), _one(whole.table), WHOLE),
    Page("docs/speed.md", r"^Whole models: taken on .*$", _one(whole.taken), WHOLE),
    Page("docs/speed.md", _table(other_tools.HEADER), _one(other_tools.table), OTHER_TOOLS),
    Page("docs/speed.md", r"^Other tools: taken on .*$", _one(other_tools.taken), OTHER_TOOLS),
)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Keep FILE, a bench.json, whole.json or other_tools.json, in benchmarks/ and rewrite the pages."""
    bench = load(file)
    name = bench.file if file.name.startswith("bench") else file.name
    pages = [page for page in PAGES if fnmatch(name, page.kept)]
    if not pages:
        raise click.ClickException(f"{file.name}: no page shows it")
    bench.save(KEPT / name)
    for page in pages:
        path = ROOT / page.path
        path.write_text(page.rewritten(path.read_text(encoding="utf-8"), kept_runs(page.kept)), encoding="utf-8")
        click.echo(page.path)


if __name__ == "__main__":
    main()
