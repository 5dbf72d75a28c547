"""Run a module and record the code that made its tables, so that a later change of that code is seen.

    python -m analyses.made FOLDER MODULE [ARGUMENT ...]

writes made.json into FOLDER: date, commit, the modules of this repository that were imported, and a digest of what they
say. Comments, docstrings and line breaks do not count; rows, tables of facts and weights next to a module do.
"""

import ast
import csv
import json
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from weightscope.core.files import Folder
from weightscope.core.tables import Table, column

ROOT = Path(__file__).parents[1]
CODE = ("weightscope", "analyses", "benchmarks", "tests")
FACTS = {".json", ".npz", ".safetensors", ".toml"}  # what a module may read next to it
RECORD = "made.json"
KEPT = ROOT / "figures" / "MADE.csv"
Row = TypeVar("Row", bound=tuple[Any, ...])
TEXT = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Made(NamedTuple):
    """What made a folder of tables."""

    folder: str = column("Folder under figures/.")
    date: str = column("The day on which its command ran, or on which the tables were kept.")
    commit: str = column("The last commit before.")
    modules: str = column("Modules that it imported, by folder; empty where that is not known.")
    code: str = column("Digest of these modules.")

    @classmethod
    def now(cls, folder: str, modules: Iterable[Path]) -> Self:
        """A record of the code as it is."""
        run = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        named = by_folder(modules)
        return cls(folder, f"{datetime.now(UTC):%Y-%m-%d}", run.stdout.strip(), named, digest_of(named))

    @property
    def is_stale(self) -> bool:
        """True if the code has changed since, or if it is not known what made it."""
        return not self.modules or digest_of(self.modules) != self.code


def by_folder(modules: Iterable[Path]) -> str:
    """Modules in one line: "weightscope/core:errors,files weightscope/model:model"."""
    names = defaultdict[str, list[str]](list)
    for path in sorted(modules):
        names[path.parent.relative_to(ROOT).as_posix()].append(path.stem)
    return " ".join(f"{folder}:{','.join(stems)}" for folder, stems in names.items())


def files_of(modules: str) -> Iterator[Path]:
    """The files of modules in one line, and the facts next to them."""
    for each in modules.split():
        folder, _, stems = each.partition(":")
        yield from (ROOT / folder / f"{stem}.py" for stem in stems.split(","))
        yield from sorted(path for path in (ROOT / folder).glob("*") if path.suffix in FACTS)


@cache
def digest_of(modules: str) -> str:
    """A digest of what modules say; one that is gone says nothing."""
    total = sha256()
    for path in files_of(modules):
        total.update(path.relative_to(ROOT).as_posix().encode())
        total.update(said_by(path) if path.exists() else b"")
    return total.hexdigest()[:16]


@cache
def said_by(path: Path) -> bytes:
    """A module without comments, docstrings and line breaks."""
    text = path.read_bytes()
    if path.suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, TEXT) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree).encode()


def imported() -> set[Path]:
    """Modules of this repository that are imported, but this one."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py")} - {Path(__file__).resolve()}
    return {path for path in paths if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in CODE}


def read_rows(kind: Callable[..., Row], path: Path) -> dict[str, Row]:
    """The rows of a CSV by their first cells; none without the file."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row[0]: row for row in (kind(**cells) for cells in csv.DictReader(file))}


def read_made() -> dict[str, Made]:
    """The kept records by folder."""
    return read_rows(Made, KEPT)


def record_in(drawn: Path) -> Made:
    """The record of a folder that was drawn; of one drawn by hand, the modules are not known."""
    path = drawn / RECORD
    return Made(**json.loads(path.read_text())) if path.exists() else Made.now(drawn.name, ())


def keep_made(folder: str, drawn: Path) -> None:
    """Keep the record of a folder that was drawn."""
    rows = read_made() | {folder: record_in(drawn)._replace(folder=folder)}
    Table.of(Made, [rows[name] for name in sorted(rows)]).to_csv(KEPT)


def main() -> None:
    """Run a module as if it were the program, then record what it imported."""
    out, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    Folder(out).json(RECORD, Made.now(out.name, imported())._asdict())


if __name__ == "__main__":
    main()
