"""Findings that are known: those of an earlier audit, and those that somebody has judged. They stay, and fail no gate.

A list of them has the columns of findings.csv, or is findings.json. A row applies to what agrees in all cells that say
where; an empty cell agrees with everything. Where a row has the number, a finding that is worse is not known.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, nan
from pathlib import Path
from typing import Any

from weightscope.errors import CheckpointError, nearest, printable
from weightscope.files import regular_file
from weightscope.findings import COLUMNS, KINDS, Findings, listed
from weightscope.tables import csv_safe

NAMES = tuple(column.name for column in COLUMNS)
WHERE = ("layer", "head", "map", "item")  # cells that say where; also the index, or the name of what has none
WORSE = 1.1  # times as far from what is usual as it was
LARGEST = 64 << 20  # bytes of a list
NAMED = 3  # entries that a sentence names
UNREADABLE = (OSError, UnicodeDecodeError, csv.Error, ValueError, RecursionError)


Key = tuple[str, str, str]  # kind, index and name


@dataclass(frozen=True)
class Entry:
    """A known finding, or one member of it."""

    cells: Mapping[str, str]
    why: str  # why it fails no gate

    @property
    def key(self) -> Key:
        """What a row must have for the entry to apply to it, as far as rows are looked up by it."""
        index = self.cells.get("index", "")
        return self.cells["kind"], index, "" if index else csv_safe(self.cells.get("name", ""))

    def applies(self, row: Mapping[str, str]) -> bool:
        """Whether it is about the same thing as a row of findings.csv that has its key."""
        return all(self.cells.get(name) in {None, "", row[name]} for name in WHERE)

    def covers(self, row: Mapping[str, str]) -> bool:
        """Whether the row, to which it applies, is no worse than it was."""
        if not self.cells.get("number") or self.cells.get("measure") not in {None, "", row["measure"]}:
            return True
        return not _distance(row) > _distance({"usual": row["usual"], **self.cells}) + log(WORSE)

    def __str__(self) -> str:
        kind = self.cells["kind"]
        where = [f"{name} {self.cells[name]}" for name in ("layer", "head", "map", "name") if self.cells.get(name)]
        return " ".join([kind, *where])


def _distance(row: Mapping[str, str]) -> float:
    """How far a number is from what is usual: the log of their ratio, or of the number where nothing is usual."""
    number, usual = (_number(row.get(name, "")) for name in ("number", "usual"))
    if not usual > 0:
        return log(number) if 0 < number < inf else number
    return abs(log(number / usual)) if 0 < number < inf else inf


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return nan


def read_entries(path: Path, why: str) -> list[Entry]:
    """The entries of a findings.csv or .json, or of a file that some of their rows were copied to."""
    try:
        with regular_file(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CheckpointError(f"has more than {LARGEST >> 20} MB; a list of findings is far smaller", file=path)
        text = content.decode("utf-8-sig")
        rows = list(_of_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _of_csv(text))
    except UNREADABLE as error:
        problem = "cannot be read as a list of findings"
        raise CheckpointError(f"{problem}, as in findings.csv or findings.json ({error})", file=path) from None
    for row in rows:
        if (kind := row.get("kind", "")) not in KINDS:
            problem = f"has an entry of kind '{printable(kind)[:60]}'; it is one of {', '.join(KINDS)}"
            raise CheckpointError(f"{problem}{nearest(kind, list(KINDS))}", file=path)
    return [Entry(row, f"{why}: {row['reason']}" if row.get("reason") else why) for row in rows]


def _of_csv(text: str) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if unknown := set(reader.fieldnames or ["no kind"]) - {*NAMES, "reason"} or {"kind"} - set(reader.fieldnames or ()):
        raise ValueError(
            f"column {printable(min(unknown))[:60]}; kind and any of {', '.join(NAMES)}, reason are expected"
        )
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than columns")
        yield {name: (cell or "").strip() for name, cell in row.items()}


def _of_json(value: Any) -> Iterator[dict[str, str]]:
    """Rows of findings as they are in findings.json, or in the JSON of a whole audit: one per member."""
    findings = value.get("findings") if isinstance(value, dict) else value
    if not isinstance(findings, list) or not all(isinstance(finding, dict) for finding in findings):
        raise ValueError("a list of findings is expected")
    for finding in findings:
        members = finding.get("members") or [{}]
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise ValueError("members are expected as a list of objects")
        for member in members:
            row = {name: finding.get(name) for name in (*NAMES, "reason")} | {"item": member.get("what")}
            row |= {name: member[name] for name in ("index", "name", "layer", "number") if member.get(name) is not None}
            if member.get("what") == "head":
                row["head"] = member.get("index")
            yield {name: "" if cell is None else str(cell) for name, cell in row.items()}


def with_known(findings: Findings, entries: Sequence[Entry]) -> tuple[Findings, list[Entry]]:
    """The findings, marked where entries cover all that they are about, and the entries that apply to nothing."""
    left, marked = dict(enumerate(entries)), []
    by_key: dict[Key, list[int]] = {}
    for i, entry in enumerate(entries):
        by_key.setdefault(entry.key, []).append(i)
    for finding in findings:
        covering, worse = [], []
        for cells in Findings([finding]).table.records():
            row = {name: str(cell) for name, cell in cells.items()}
            keys = ((row["index"], ""), ("", csv_safe(row["name"])), ("", ""))
            near = [i for key in dict.fromkeys(keys) for i in by_key.get((finding.kind, *key), ())]
            applying = [i for i in near if entries[i].applies(row)]
            for i in applying:
                left.pop(i, None)
            covering.append(next((entries[i] for i in applying if entries[i].covers(row)), None))
            worse += [entries[i] for i in applying if covering[-1] is None]
        if all(covering):
            finding = replace(finding, known=next(entry.why for entry in covering if entry))
        elif worse:
            finding = replace(
                finding, text=f"{finding.text} Worse than it was: {worse[0].cells['number']} ({worse[0].why})."
            )
        marked.append(finding)
    return Findings(marked), list(left.values())


def unmatched(what: str, entries: Iterable[Entry]) -> str:
    """Entries that apply to nothing, in a sentence; empty where there is none."""
    names = list(dict.fromkeys(map(str, entries)))
    match = "1 entry matches" if len(names) == 1 else f"{len(names):,} entries match"
    return f"{what}: {match} no finding ({listed(names, NAMED)})." if names else ""
