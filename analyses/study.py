"""What all studies share: the command, plants and how they are judged, and the tables that are written.

A study is `@study("name")` above a function that gets the folder of its results first. What is planted is a `Plant`;
`judge_each` makes each in a folder of its own, judges it, and gives one row; `write` writes rows as CSV.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.inputs import out_option
from tests.support.plants.plant import Made, Plant
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, regular_file, scratch_folder
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table
from weightscope.model.metrics.auroc import weighted_auroc
from weightscope.model.sources import folder_names

Row = dict[str, Any]
sources_argument = click.argument("sources", nargs=-1, required=True)


Judge = Callable[[Plant, Made], Mapping[str, Any]]


def study(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command with the option --out, whose errors are one line; its function gets the folder first."""

    def command(work: Callable[..., None]) -> click.Command:
        @wraps(work)
        def run(out: Path, **options: Any) -> None:
            work(Folder(out), **options)
            click.echo(str(out))

        return click.command(name, cls=EndsInOneLine)(out_option(f"out/{name}")(run))

    return command


def titled(sources: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each source with its name in tables and file names."""
    return zip(sources, folder_names(list(sources)), strict=True)


def judge_each(
    plants: Iterable[Plant], judge: Judge, label: str = "plants", only: str = "", kept: Path | None = None
) -> list[Row]:
    """A row for each plant whose name `only` matches: its cells and the judge's; `kept` has earlier runs' rows."""
    rows = []
    for plant in bar([plant for plant in plants if re.search(only, plant.name)], label, "plant"):
        file = f"{label}--{folder_names([plant.name])[0]}.json"
        row = _row_in(kept / file) if kept else None
        if row is None:
            with scratch_folder() as folder:
                row = {**plant.cells, **judge(plant, plant.make(folder))}
            if kept:
                Folder(kept).json(file, row)
        rows.append(row)
    return rows


def _row_in(path: Path) -> Row | None:
    try:
        with regular_file(path) as file:
            return dict(json.load(file))
    except ws.CheckpointError:
        return None


def table_of(columns: Sequence[str | Column], rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> Table:
    """A table of rows; of a mapping the cells by name, empty where they are None or not there."""
    names = [column if isinstance(column, str) else column.name for column in columns]
    cells = [[_cell(row.get(name, "")) for name in names] if isinstance(row, Mapping) else row for row in rows]
    return Table.of_rows(columns, cells)


def _cell(value: Any) -> Any:
    return np.nan if value is None else value


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """AUROC of scores (n,), higher for those that are positive (n,) bool."""
    chosen = np.flatnonzero(positive)
    return float(weighted_auroc(scores, chosen, np.ones(len(chosen), np.int64)))


def rows_in(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(files: Folder, name: str, columns: Sequence[str | Column], rows: Iterable[Any], echo: bool = False) -> None:
    """Write NAME.csv, and print it as text."""
    table = table_of(columns, rows)
    files.table(f"{name}.csv", table)
    if echo:
        click.echo(table.text())
