"""Known findings, from an earlier audit or reviewed by somebody: they stay, and fail no gate.

A list of them has the columns of findings.csv, or is findings.json. A row applies to what agrees in
all cells that say where and what was measured; an empty cell agrees with everything. Where a row
has the number, a finding that is worse is not known.
"""

import csv
import io
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, log, nan
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import read_small
from weightscope.core.errors import LONGEST_NAME, CheckpointError, nearest, shortened
from weightscope.core.tables import csv_safe
from weightscope.report.findings import Findings, MemberRow, finding_kinds, listed

NAMES = MemberRow._fields
WHERE = ("layer", "head", "map", "item", "index", "name")  # cells of a place; index before name
READ = ("kind", *WHERE, "measure", "number", "usual", "reason")
WORSE = 1.1  # times as far from what is usual as it was
LARGEST = 64 << 20  # bytes of a list
MOST_ROWS = 200_000  # rows or members; more tokens than that have no finding of their own
MOST_CELLS = 5_000_000  # commas
MOST_ALIKE = 200  # entries about one place: each is compared with each finding there
NAMED = 3  # entries that a sentence names
UNREADABLE = (csv.Error, ValueError, RecursionError)


Place = tuple[str, ...]  # columns that say where
Key = tuple[str, ...]  # kind, and what these columns have


@dataclass(frozen=True)
class Entry:
    """A known finding, or one member of it."""

    cells: Mapping[str, str]
    why: str  # why it fails no gate

    @property
    def place(self) -> Place:
        """The columns that say where it is."""
        given = [name for name in WHERE if self.cells.get(name)]
        return tuple(name for name in given if name != "name" or "index" not in given)

    def applies(self, row: Mapping[str, str]) -> bool:
        """True if it is about what the row, of its kind and place, measures."""
        return self.cells.get("measure") in {None, "", row["measure"]}

    def covers(self, row: Mapping[str, str]) -> bool:
        """True if the row, to which it applies, is no worse than it was."""
        if not self.cells.get("number"):
            return True
        if _number(self.cells["number"]) == inf:
            return _number(row["number"]) == inf
        before = dict(self.cells)
        if not isfinite(_number(before.get("usual", ""))):
            before["usual"] = row["usual"]
        return not _distance(row) > _distance(before) + log(WORSE)

    def __str__(self) -> str:
        given = [name for name in ("layer", "head", "map", "name") if self.cells.get(name)]
        where = [f"{name} {self.cells[name]}" for name in given]
        return shortened(" ".join([self.cells["kind"], *where]))


def _key(cells: Mapping[str, str], place: Place) -> Key:
    return cells["kind"], *(csv_safe(cells[name]) for name in place)


def _distance(row: Mapping[str, str]) -> float:
    """Distance of a number from the usual one: the log of their ratio; of the number if none is."""
    number, usual = (_number(row.get(name, "")) for name in ("number", "usual"))
    if not 0 < usual < inf:
        return log(number) if 0 < number < inf else number
    return abs(log(number / usual)) if 0 < number < inf else inf


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return nan


def read_entries(path: Path, why: str) -> list[Entry]:
    """Read the entries of a findings.csv or .json, or of a file with some of their rows."""
    content = read_small(path, LARGEST)
    try:
        rows: list[dict[str, str]] = []
        for row in _rows(content):
            if len(rows) == MOST_ROWS:
                problem = f"has more than {MOST_ROWS} findings; no more are read"
                raise CheckpointError(problem, file=path)
            rows.append({name: cell for name in READ if (cell := row.get(name))})
    except UNREADABLE as error:
        problem = "cannot be read as a list of findings, as in findings.csv or findings.json"
        raise CheckpointError(f"{problem} ({error})", file=path) from None
    kinds = list(finding_kinds())
    for row in rows:
        if (kind := row.get("kind", "")) not in kinds:
            problem = f"has an entry of kind '{shortened(kind)}'; it is one of {', '.join(kinds)}"
            raise CheckpointError(f"{problem}{nearest(kind[:LONGEST_NAME], kinds)}", file=path)
        for name in ("number", "usual"):
            if name in row and isnan(_number(row[name])):
                cell = f"the {name} '{shortened(row[name])}'"
                problem = f"has an entry of kind '{kind}' with {cell}; a number was expected"
                raise CheckpointError(problem, file=path)
    entries = [Entry(row, f"{why}: {row['reason']}" if row.get("reason") else why) for row in rows]
    alike = Counter((entry.place, _key(entry.cells, entry.place)) for entry in entries)
    if alike and (most := max(alike.values())) > MOST_ALIKE:
        problem = f"has {most} entries about the same thing; at most {MOST_ALIKE} are read"
        raise CheckpointError(problem, file=path)
    return entries


def _rows(content: bytes) -> Iterator[dict[str, str]]:
    """The rows of a list; what would take much memory is refused before it is parsed."""
    for what, most in ((b",", MOST_CELLS), (b"{", 2 * MOST_ROWS), (b"[", 2 * MOST_ROWS)):
        if content.count(what) > most:
            raise ValueError(f"more than {most} '{what.decode()}'; no more are read")
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    if content.removeprefix(BOM_UTF8).lstrip()[:1] in (b"[", b"{"):
        yield from _of_json(json.load(text))
        return
    reader = csv.DictReader(text, strict=True)
    columns = set(reader.fieldnames or ["no kind"])
    if wrong := columns - {*NAMES, "reason"} or {"kind"} - columns:
        expected = f"kind and any of {', '.join(NAMES)}, reason are expected"
        raise ValueError(f"column {shortened(min(wrong))}; {expected}")
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than columns")
        yield {name: (cell or "").strip() for name, cell in row.items()}


def _of_json(value: Any) -> Iterator[dict[str, str]]:
    """Rows of findings.json, or of the JSON of a whole audit: one per member."""
    findings = value.get("findings") if isinstance(value, dict) else value
    if not isinstance(findings, list) or not all(isinstance(finding, dict) for finding in findings):
        raise ValueError("a list of findings is expected")
    for finding in findings:
        members = finding.get("members") or [{}]
        if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
            raise ValueError("members are expected as a list of objects")
        for member in members:
            row = {name: finding.get(name) for name in (*NAMES, "reason")}
            row["item"] = member.get("what")
            for name in ("index", "name", "layer", "number"):
                if member.get(name) is not None:
                    row[name] = member[name]
            if member.get("what") == "head":
                row["head"] = member.get("index")
            yield {name: "" if cell is None else str(cell) for name, cell in row.items()}


def with_known(findings: Findings, entries: Sequence[Entry]) -> tuple[Findings, list[Entry]]:
    """Mark findings that entries cover wholly; also return the entries that apply to nothing."""
    left, marked = dict(enumerate(entries)), []
    by_key: dict[tuple[Place, Key], list[int]] = {}
    for i, entry in enumerate(entries):
        by_key.setdefault((entry.place, _key(entry.cells, entry.place)), []).append(i)
    places = dict.fromkeys(place for place, _ in by_key)
    for finding in findings:
        covering: list[Entry | None] = []  # by row
        worse: list[Entry] = []
        for cells in Findings([finding]).table.records():
            row = {name: str(cell) for name, cell in cells.items()}
            alike = (i for place in places for i in by_key.get((place, _key(row, place)), ()))
            applying = {i: entries[i] for i in sorted(alike) if entries[i].applies(row)}
            for i in applying:
                left.pop(i, None)
            cover = next((entry for entry in applying.values() if entry.covers(row)), None)
            covering.append(cover)
            if cover is None:
                worse += applying.values()
        if all(covering):
            finding = replace(finding, known=next(entry.why for entry in covering if entry))
        elif worse:
            before = f"{shortened(worse[0].cells['number'])} ({worse[0].why})"
            finding = replace(finding, text=f"{finding.text} Worse than it was: {before}.")
        marked.append(finding)
    return Findings(marked), list(left.values())


def unmatched(what: str, entries: Iterable[Entry]) -> str:
    """Entries that apply to nothing, in a sentence; empty where there is none."""
    names = list(dict.fromkeys(map(str, entries)))
    match = "1 entry matches" if len(names) == 1 else f"{len(names):,} entries match"
    return f"{what}: {match} no finding ({listed(names, NAMED)})." if names else ""
