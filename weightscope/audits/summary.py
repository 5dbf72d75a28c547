"""A row a checkpoint: what came of the audits of a list, kept as they end so that a run can go on where it was."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from weightscope.audits.many import Ended, Headline
from weightscope.errors import CheckpointError, printable
from weightscope.folder import Files
from weightscope.tables import Table

FILE = "summary.csv"
NUMBERS = tuple(field.name for field in fields(Headline))
HEADER = ("name", "source", "status", *NUMBERS, "error", "plan")


@dataclass(frozen=True)
class Row:
    """One checkpoint of a list.

    Attributes
    ----------
    name : str
        Its folder within the results.
    source : str
        Its line in the list.
    headline : Headline or None
        None where its audit failed.
    error : str
        Empty where it did not.
    plan : str
        Digest of what the results depend on.
    """

    name: str
    source: str
    headline: Headline | None
    error: str
    plan: str

    @property
    def status(self) -> str:
        """`ok` or `failed`."""
        return "ok" if self.headline is not None else "failed"

    def cells(self) -> list[str | int | float]:
        """In the order of the file's columns."""
        numbers = [""] * len(NUMBERS) if self.headline is None else list(asdict(self.headline).values())
        return [self.name, self.source, self.status, *numbers, self.error, self.plan]


def row_of(name: str, source: str, ended: Ended) -> Row:
    """The row of an audit that has just ended."""
    if ended.delivery is not None:
        return Row(name, source, ended.delivery.headline, "", ended.plan)
    return Row(name, source, None, in_a_line(ended.error), ended.plan)


def in_a_line(error: Exception | None) -> str:
    """An error for a person; one that is not about the input is a defect, and is named by its type too."""
    text = printable(" ".join(str(error).split()))
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def write_summary(rows: Sequence[Row], files: Files) -> None:
    """Write summary.csv."""
    files.table(FILE, Table.of_rows(HEADER, [row.cells() for row in rows]))


def read_summary(out: Path) -> dict[str, Row]:
    """By folder, the audits that an earlier run has ended well; none where there is no summary, or a broken one."""
    try:
        with (out / FILE).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return {row["name"]: _row(row) for row in rows if row["status"] == "ok"}
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}


def _row(cells: dict[str, str]) -> Row:
    kinds = {"family": str, "layers": int, "heads": int, "d_model": int, "findings": int}
    numbers = {name: kinds.get(name, lambda text: float(text or "nan"))(cells[name]) for name in NUMBERS}
    return Row(cells["name"], cells["source"], Headline(**numbers), "", cells["plan"])  # type: ignore[arg-type]
