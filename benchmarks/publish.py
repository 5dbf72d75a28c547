"""Keep a run of the benchmarks, and write its tables into the pages that show them.

    python -m benchmarks.publish out/bench/bench.json

copies it to benchmarks/bench.json and rewrites the tables of README.md, docs/speed.md and docs/floors.md, each known by
its header. A test holds the pages to the file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks import limits, results
from benchmarks.results import Bench, load

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "bench.json"
SHORT = re.compile(
    r"AUROC, 12 heads .*numba|the paper's way|sigma|bigram|llama-2-7b.*: |llama-2-70b.*singular|gpt2.*singular|gpt2: "
    r"|wiring of GPT-2|AUROC of 2,000|100,.* files: audit$|\d+ layers: audit|400 GB|norm-based|weightscope --help"
)  # works that the README's table names


@dataclass(frozen=True)
class Page:
    """A page and what of it comes from the benchmarks.

    Attributes
    ----------
    path : str
    pattern : str
        What is replaced.
    made : function of Bench
        What stands there.
    """

    path: str
    pattern: str
    made: Callable[[Bench], str]

    def rewritten(self, text: str, bench: Bench) -> str:
        """The page with what the benchmarks found."""
        found, count = re.subn(self.pattern, lambda _: self.made(bench), text, flags=re.MULTILINE)
        if count != 1:
            raise click.ClickException(f"{self.path} has {count} places for /{self.pattern}/; one was expected")
        return found


def _table(header: str) -> str:
    """The pattern of a whole table."""
    return re.escape(header) + r"\n(?:\|.*\n)*"


def short(bench: Bench) -> str:
    """The README's table."""
    return bench.table({each.name for each in bench.measured if SHORT.match(each.name)})


PAGES = (
    Page("README.md", _table(results.HEADER), short),
    Page("docs/speed.md", _table(results.HEADER), Bench.table),
    Page("docs/floors.md", _table(limits.HEADER), limits.floors),
    Page("docs/floors.md", r"^\d+ cores of .*when the run began\.$", limits.reached),
)


@click.command()
@click.argument("found", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=KEPT)
def main(found: Path) -> None:
    """Keep FOUND, a bench.json, as benchmarks/bench.json, and rewrite the pages; without one, from what is kept."""
    bench = load(found)
    bench.save(KEPT)
    for page in PAGES:
        path = ROOT / page.path
        path.write_text(page.rewritten(path.read_text(encoding="utf-8"), bench), encoding="utf-8")
        click.echo(page.path)


if __name__ == "__main__":
    main()
