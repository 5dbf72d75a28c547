"""Results read back from the folders that commands wrote, of this version and of 0.1.0."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.opening import locate, open_at
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.files import HIDDEN, OutputFolder, regular_file
from weightscope.core.results import notebook, questions
from weightscope.core.tables import FORMULA_STARTS, Column, Table
from weightscope.report.findings import Finding, Findings, Member, finding_kinds

LARGEST = 1 << 30  # bytes of a table or a JSON
LARGEST_ARRAYS = 16 << 30  # bytes of arrays, unpacked
SPELT = {"inf": np.inf, "-inf": -np.inf, None: np.nan}  # numbers that JSON has no numerals for
WHOLE = re.compile(r"-?\d{1,18}")
NUMBER = re.compile(r"-?(\d+(\.\d+)?(e[-+]\d+)?|inf)")
UNREADABLE = (
    OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError, MemoryError,
    zipfile.BadZipFile, csv.Error,
)  # fmt: skip


@cache
def declared(*kinds: str) -> dict[str, str]:
    """Declarations of all questions: the first kind's, then the others'."""
    every: dict[str, str] = {}
    for kind in kinds:
        for question in questions():
            every |= getattr(question, kind, {})
    return every


def load(folder: str | Path) -> "Written":
    """Open the folder of results that a command wrote, of this version or of 0.1.0.

    Files are read when they are used, and only if they are as the command left them.

    Parameters
    ----------
    folder : str or Path
        The folder that was given as --out, with its hidden files.

    Returns
    -------
    Written

    Raises
    ------
    CheckpointError
        No command has written the folder, or it has not ended.

    Examples
    --------
    >>> import weightscope as ws
    >>> from weightscope.core.files import scratch_folder
    >>> with scratch_folder() as out:
    ...     ws.audit("embedded", layers=[0]).write(out)
    ...     audit = ws.load(out)
    ...     spectra = audit.arrays("spectra.npz")["qk_singular_values"]
    ...     audit.kind, audit.heads["qk_sigma1"].shape, spectra.shape
    ('audit', (6,), (1, 6, 32))
    """
    files = tuple(name for name in OutputFolder(Path(folder)).listed if not name.startswith(HIDDEN))
    signs = declared("SIGNS", "SHARED_SIGNS")  # the first that is there decides
    kind = next((kind for name, kind in signs.items() if name in files), None)
    if kind is None:
        problem = f"holds no results: {HIDDEN}/manifest.json lists none of a command that has ended"
        advice = "copy the whole folder, hidden files included, or run the command again"
        with suppress(CheckpointError):
            if isinstance(place := locate(folder), Path) and open_at(place):
                problem, advice = "is a checkpoint, not results", "`open_model` opens it"
        raise CheckpointError(f"{problem}; {advice}", file=folder)
    return Written(Path(folder), kind, files)


@dataclass(frozen=True, eq=False)
class Written:
    """A result in its folder: tables with six significant digits, arrays as computed."""

    folder: Path
    kind: str  # the command: "audit", "compare" ...; "audits" for a list
    files: tuple[str, ...] = field(repr=False)  # names of those that the command wrote

    @property
    def tables(self) -> Mapping[str, Table]:
        """Every table by the name of its file."""
        return _Tables(self)

    @property
    def heads(self) -> Table:
        """The table with one row per head."""
        name = declared("HEADS").get(self.kind)
        if name not in self.files:
            problem = f"`{self.kind}` wrote no table of heads; it wrote {', '.join(self.tables)}"
            raise CheckpointError(problem, file=self.folder)
        return self.tables[name]

    @cached_property
    def findings(self) -> Findings:
        """Findings for a person to look at, from an audit or a comparison."""
        name, entries, kinds = "findings.json", self.json("findings.json"), finding_kinds()
        try:
            findings = [_finding(entry) for entry in entries]
        except UNREADABLE as error:
            raise self._damaged(name, error) from None
        for finding in findings:
            if finding.kind not in kinds:
                problem = f"has a finding of kind '{printable(finding.kind)[:60]}'"
                why = "which this version does not know"
                raise CheckpointError(f"{problem}, {why}", file=self.folder / name)
        return Findings(findings)

    @cached_property
    def page(self) -> Mapping[str, Any]:
        """Every number of the page, as in report.json; empty of 0.1.0, which wrote none."""
        pages = ("report.json", "summary.json", "index.json")
        name = next((name for name in pages if name in self.files), None)
        page = {} if name is None else self.json(name)
        if not isinstance(page, dict):
            raise self._damaged(str(name), TypeError("not an object"))
        return page

    @property
    def lead(self) -> str:
        """The result in a few sentences; empty of 0.1.0."""
        return str(self.page.get("lead", ""))

    @property
    def provenance(self) -> Provenance | None:
        """Origin of the result; None for results of 0.1.0."""
        if not self.page:
            return None
        try:
            made = {name: self.page[name] for name in ("command", "date", "version")}
            return Provenance(tuple(self.page["sources"]), **made)
        except UNREADABLE as error:
            raise self._damaged("report.json", error) from None

    def json(self, name: str) -> Any:
        """The content of a JSON file."""
        try:
            return json.loads(self._content(name))
        except UNREADABLE as error:
            raise self._damaged(name, error) from None

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of an .npz file by name."""
        path = self._checked(name)
        try:
            with regular_file(path) as file, zipfile.ZipFile(file) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > LARGEST_ARRAYS:
                problem = f"has {unpacked} bytes of arrays; at most {LARGEST_ARRAYS} are read"
                raise CheckpointError(problem, file=path)
            with regular_file(path) as file, np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except UNREADABLE as error:
            raise self._damaged(name, error) from None

    def table(self, name: str) -> Table:
        """The table in a CSV file."""
        try:
            header, *rows = csv.reader(io.StringIO(self._content(name).decode()))
            columns = zip(*rows, strict=True) if rows else [()] * len(header)
            return Table([_column(*column) for column in zip(header, columns, strict=True)])
        except UNREADABLE as error:
            raise self._damaged(name, error) from None

    def _checked(self, name: str) -> Path:
        """The path of a file that is as the command left it."""
        if name not in self.files:
            written = ", ".join(map(printable, self.files))
            problem = f"no such file was written by `{self.kind}`; it wrote {written}"
            raise CheckpointError(problem, file=self.folder / name)
        if not OutputFolder(self.folder).recorded(name):
            problem = "is missing, or was changed since the command wrote it"
            raise CheckpointError(problem, file=self.folder / name)
        return self.folder / name

    def _content(self, name: str) -> bytes:
        path = self._checked(name)
        with regular_file(path) as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise CheckpointError(f"has more than {LARGEST} bytes; no more are read", file=path)
        return content

    def _damaged(self, name: str, error: BaseException) -> CheckpointError:
        why = f"{type(error).__name__}: {printable(error)[:100]}"
        problem = f"is not as weightscope writes it ({why})"
        return CheckpointError(problem, file=self.folder / name)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.lead, repr(self)]))

    def _repr_html_(self) -> str:
        shown = [self.heads] if declared("HEADS").get(self.kind) in self.files else []
        return notebook(self.lead or repr(self), *shown)


class _Tables(Mapping[str, Table]):
    """The tables of a folder, each read when it is asked for."""

    def __init__(self, written: Written) -> None:
        self._written = written

    def __getitem__(self, name: str) -> Table:
        return self._written.table(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._written.files if name.endswith(".csv"))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{counted(len(self), 'table')}: {', '.join(self)}"


def _column(name: str, cells: Sequence[str]) -> Column:
    """A column of a CSV: whole numbers, numbers with NaN for empty cells, truths, or text."""
    filled = [cell for cell in cells if cell]
    if filled and all(map(WHOLE.fullmatch, filled)) and len(filled) == len(cells):
        return Column(name, np.array(cells, dtype=np.int64))
    if all(map(NUMBER.fullmatch, filled)):  # also where all are empty
        return Column(name, np.array([float(cell or "nan") for cell in cells]))
    if filled and set(cells) <= {"True", "False"}:
        return Column(name, [cell == "True" for cell in cells])
    made_safe = tuple("'" + start for start in FORMULA_STARTS)  # by `csv_safe`
    return Column(name, [cell[1:] if cell.startswith(made_safe) else cell for cell in cells])


def _number(value: Any) -> float:
    return float(SPELT[value] if value is None or isinstance(value, str) else value)


def _index(value: Any) -> int | None:
    return None if value is None else int(value)


def _finding(entry: Any) -> Finding:
    """A finding of findings.json; 0.1.0 had `items` (indices) in place of members."""
    if "members" in entry:
        members = tuple(
            Member(
                str(each["what"]),
                _index(each["index"]),
                _index(each.get("layer")),
                str(each.get("name", "")),
                None if each.get("number") is None else _number(each["number"]),
            )
            for each in entry["members"]
        )
    else:
        members = tuple(Member("", _index(index)) for index in entry["items"])
    return Finding(
        **{name: str(entry[name]) for name in ("kind", "measure", "text")},
        layer=_index(entry["layer"]),
        head=_index(entry["head"]),
        map=None if entry["map"] is None else str(entry["map"]),
        number=_number(entry["number"]),
        usual=None if entry["usual"] is None else _number(entry["usual"]),
        known=str(entry.get("known", "")),
        members=members,
    )
