"""A table of results: named columns with symbol, unit and meaning, in many formats."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import isfinite, isnan
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from weightscope.core.errors import CheckpointError, expected, nearest, printable
from weightscope.core.files import new_file
from weightscope.core.formulas import coded, plain, prose, spoken

SHOWN = 12  # rows that a notebook shows of each end of a long table
FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # full-width forms count too
NUMBERS = (int, float, np.integer, np.floating)


@dataclass(frozen=True)
class Link:
    """A cell that links to another page by its relative path; a CSV has its text."""

    path: str
    text: str
    anchor: str = ""  # within that page, or within this one where `path` is empty

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table."""

    name: str  # key of the column, and its header in a CSV
    values: Any = field(default=(), repr=False)  # (n,) numbers as computed; text as objects
    symbol: str = ""  # heading for readers, formulas between dollar signs; by default the name
    unit: str = ""
    meaning: str = ""  # for the reader
    format: str = ".4g"  # for floats on a page or terminal; a CSV has six significant digits

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _array(self.values))

    @property
    def heading(self) -> str:
        """Symbol and unit as text."""
        return self._with_unit(spoken(self.symbol) or self.name)

    def html(self) -> str:
        """Symbol and unit as HTML, formulas as MathML; a name may break at its underscores."""
        breakable_name = prose(plain(self.name)).replace("_", Markup("_<wbr>"))
        return self._with_unit(prose(self.symbol) or breakable_name)

    def _with_unit(self, heading: str) -> str:
        return heading + f" ({self.unit})" if self.unit else heading

    @property
    def is_numeric(self) -> bool:
        """True if its cells are aligned to the right."""
        return self.values.dtype.kind in "iuf"

    def shown(self, value: Any) -> str:
        """A cell as text for a reader; NaN is empty."""
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else format(float(value), self.format)
        return printable(value)


def column(meaning: str = "", *, symbol: str = "", unit: str = "", format: str = ".4g") -> Any:
    """Describe the column of a field, as its default in a NamedTuple of cells; see `Table.of`."""
    return Column("", symbol=symbol, unit=unit, meaning=meaning, format=format)


def columns_of(row: Any) -> tuple[Column, ...]:
    """The columns of a NamedTuple of cells, without values; see `Table.of`.

    As the default of a field that is such a NamedTuple itself, they are columns of the outer one.
    """
    columns: list[Column] = []
    for name in row._fields:
        described = row._field_defaults.get(name, Column(name))
        columns += described if type(described) is tuple else [replace(described, name=name)]
    return tuple(columns)


class Table:
    """Named columns of one length.

    Parameters
    ----------
    columns : sequence of Column
    caption : str

    Raises
    ------
    ValueError
        The columns differ in length, or two have the same name.

    Examples
    --------
    >>> auroc = Column("auroc", [0.61, 0.805, float("nan")], symbol="AUROC")
    >>> table = Table([Column("head", [0, 1, 2]), auroc])
    >>> table["auroc"][1], len(table)
    (np.float64(0.805), 3)
    >>> print(table.csv(), end="")
    head,auroc
    0,0.61
    1,0.805
    2,
    >>> print(table.where(table["head"] < 2).text())
    head  AUROC
       0   0.61
       1  0.805
    """

    def __init__(self, columns: Sequence[Column], caption: str = "") -> None:
        lengths = {len(column.values) for column in columns}
        names = [column.name for column in columns]
        if len(lengths) > 1 or len(set(names)) < len(names):
            problem = f"columns of lengths {sorted(lengths)} named {', '.join(names)} make no table"
            raise ValueError(problem)
        self.columns, self.caption = tuple(columns), caption

    @classmethod
    def of_rows(
        cls, header: Sequence[str | Column], rows: Iterable[Sequence[Any]], caption: str = ""
    ) -> "Table":
        """A table from its rows; a Column in the header gives everything but its values."""
        heads = [Column(head) if isinstance(head, str) else head for head in header]
        cells = list(zip(*rows, strict=True)) or [()] * len(heads)
        columns = [replace(head, values=values) for head, values in zip(heads, cells, strict=True)]
        return cls(columns, caption)

    @classmethod
    def of(cls, row: Any, rows: Iterable[tuple[Any, ...]], caption: str = "") -> "Table":
        """A table from its rows, whose NamedTuple says what each cell is.

        Raises
        ------
        ValueError
            A row lacks a cell.

        Examples
        --------
        >>> from typing import NamedTuple
        >>> class HeadRow(NamedTuple):
        ...     head: int = column("Index in the layer.")
        ...     share: float = column("Share of the norm.", symbol="$s$", format=".0%")
        >>> print(Table.of(HeadRow, [HeadRow(0, 0.25), HeadRow(1, share=0.75)]).text())
        head    s
           0  25%
           1  75%
        """
        flat = [list(cells) for cells in rows]
        for place, name in reversed([*enumerate(row._fields)]):
            if type(row._field_defaults.get(name)) is tuple:  # a row within the row
                for cells in flat:
                    cells[place : place + 1] = cells[place]
        if any(isinstance(cell, Column) for cells in flat for cell in cells):
            raise ValueError(f"a {row.__name__} lacks a cell of {', '.join(row._fields)}")
        return cls.of_rows(columns_of(row), flat, caption)

    @property
    def names(self) -> list[str]:
        """Names of the columns, in order."""
        return [column.name for column in self.columns]

    def column(self, name: str) -> Column:
        """A column by its name.

        Raises
        ------
        KeyError
            No such column; the message lists the columns.
        TypeError
            The name is not text.
        """
        if not isinstance(name, str):
            instead = "a name, as in table['layer']; `take` gives rows, `select` several columns"
            raise expected(name, "column", instead)
        for column in self.columns:
            if column.name == name:
                return column
        known = ", ".join(self.names)
        raise KeyError(f"no column {name!r}; there are {known}{nearest(name, self.names)}")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.column(name).values

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows in order, as tuples."""
        return zip(*(column.values for column in self.columns), strict=True)

    def take(self, order: Any) -> "Table":
        """The rows at these indices, in this order."""
        indices = np.asarray(order, dtype=int)
        columns = [replace(column, values=column.values[indices]) for column in self.columns]
        return Table(columns, self.caption)

    def where(self, mask: Any) -> "Table":
        """The rows for which the mask is true."""
        return self.take(np.flatnonzero(mask))

    def head(self, n: int = 5) -> "Table":
        """The first n rows."""
        return self.take(np.arange(len(self))[:n])

    def sort(self, name: str, descending: bool = False) -> "Table":
        """Rows sorted by a column, numbers with NaN last, text by its letters; ties keep order."""
        cells, kind = _arrow_cells(self[name])
        values = np.asarray(cells, None if kind in (None, "string") else float)  # None is NaN
        if values.dtype.kind != "f":
            values = np.unique(values, return_inverse=True)[1]  # ranks, which have negatives
        return self.take(np.argsort(-values if descending else values, kind="stable"))

    def select(self, *names: str) -> "Table":
        """These columns, in this order."""
        return Table([self.column(name) for name in names], self.caption)

    def csv(self) -> str:
        """Comma-separated values: floats with six significant digits, NaN empty, no cell a
        spreadsheet formula.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.names)
        writer.writerows([_csv_cell(value) for value in row] for row in self.rows())
        return text.getvalue()

    def to_csv(self, path: str | Path) -> None:
        """Write `csv()` into a file, completely or not at all.

        Raises
        ------
        CheckpointError
            The file cannot be written.
        """
        with new_file(Path(path)) as file:
            file.write(self.csv().encode())

    def html(self, on_page: bool = True, file: str = "", changed: int | None = None) -> str:
        """The table as HTML, every cell escaped.

        Parameters
        ----------
        on_page : bool
            For a page, which styles it, sorts it on a click and offers it as a CSV; otherwise for
            a notebook.
        file : str
            The CSV in the page's folder to link to; by default the link contains the CSV.
        changed : int, optional
            From this row on nothing changed: a switch, on at first, hides these rows.
        """
        few = len(self) if changed is None else changed
        template = templates().get_template("table.html")
        html: str = template.render(table=self, on_page=on_page, file=file, changed=few)
        return html

    def text(self) -> str:
        """The table for a terminal: numbers aligned right, text left."""
        cells = [[column.heading, *map(column.shown, column.values)] for column in self.columns]
        widths = [max(map(len, column)) for column in cells]
        right = [column.is_numeric for column in self.columns]
        aligned = [
            [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
            for column, width, is_number in zip(cells, widths, right, strict=True)
        ]
        return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))

    def records(self) -> list[dict[str, Any]]:
        """The rows as JSON objects, keyed by column name."""
        return [dict(zip(self.names, as_json(row), strict=True)) for row in self.rows()]

    def as_json(self) -> dict[str, Any]:
        """Caption, columns and rows, for the JSON of a page."""
        keys = ("name", "symbol", "unit", "meaning")
        columns = [{key: getattr(column, key) for key in keys} for column in self.columns]
        return {"caption": self.caption, "columns": columns, "rows": self.records()}

    def to_pandas(self) -> Any:
        """A pandas DataFrame.

        Raises
        ------
        CheckpointError
            pandas is not installed.
        """
        return _library("pandas").DataFrame({column.name: column.values for column in self.columns})

    def to_polars(self) -> Any:
        """A polars DataFrame, by way of `to_arrow`.

        Raises
        ------
        CheckpointError
            polars or pyarrow is not installed.
        """
        return _library("polars").DataFrame(self)

    def to_arrow(self) -> Any:
        """A pyarrow Table.

        A number is null where it was not measured. Fields have symbol, unit and meaning as
        metadata.

        Raises
        ------
        CheckpointError
            pyarrow is not installed.
        """
        pa = _library("pyarrow")
        arrays, fields = [], []
        for column in self.columns:
            array = pa.array(*_arrow_cells(column.values), from_pandas=True)
            about = {"symbol": column.symbol, "unit": column.unit, "meaning": column.meaning}
            filled = {key: text for key, text in about.items() if text}
            arrays.append(array)
            fields.append(pa.field(column.name, array.type, metadata=filled))
        schema = pa.schema(fields, {"caption": self.caption} if self.caption else None)
        return pa.Table.from_arrays(arrays, schema=schema)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Stream for readers of Arrow's PyCapsule interface: polars.DataFrame, pyarrow.table."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        names = ", ".join(self.names[:6]) + (", ..." if len(self.columns) > 6 else "")
        return f"Table({len(self)} rows: {names})"

    def _repr_html_(self) -> str:
        if len(self) <= 2 * SHOWN:
            return self.html(on_page=False)
        ends = self.take([*range(SHOWN), *range(len(self) - SHOWN, len(self))])
        note = f"<p>the first and the last {SHOWN} of {len(self):,} rows</p>"
        return ends.html(on_page=False) + note


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise CheckpointError(f"this form of a table needs {name}: pip install {name}") from None


def crossed(**labels: Any) -> list[Column]:
    """Label columns: one row per combination of labels, the last label changing fastest.

    Examples
    --------
    >>> sigma = Column("sigma", [0.5, 1.0, 2.0, 1.5])
    >>> print(Table([*crossed(layer=[0, 3], head=[0, 1]), sigma]).csv(), end="")
    layer,head,sigma
    0,0,0.5
    0,1,1
    3,0,2
    3,1,1.5
    """
    columns = [Column(name, values) for name, values in labels.items()]
    grids = np.indices([len(column.values) for column in columns])
    pairs = zip(columns, grids, strict=True)
    return [replace(column, values=column.values[grid.ravel()]) for column, grid in pairs]


def _array(values: Any) -> np.ndarray:
    """Numbers of one kind as an array of that kind; others as objects, so no cell changes type."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufO":
        return values
    cells = list(values)
    has_bools = any(isinstance(cell, bool) for cell in cells)  # a bool is an int to Python
    for kinds in ((bool, np.bool_), (int, np.integer), (float, np.floating)):
        of_kind = all(isinstance(cell, kinds) for cell in cells)
        if cells and of_kind and not (kinds[0] is int and has_bools):
            return np.asarray(cells)
    array = np.empty(len(cells), object)
    array[:] = cells
    return array


def csv_safe(text: object) -> str:
    """Untrusted text for a CSV cell: a leading ' keeps spreadsheets from taking it for a formula.

    Control characters are spelled out as in `printable`: a leading tab or carriage return starts a
    formula too.
    """
    shown = printable(text)
    return "'" + shown if shown.startswith(FORMULA_STARTS) else shown


def as_json(value: Any) -> Any:
    """A value for JSON: NaN as null, infinity as text, arrays as lists, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [as_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return None if isnan(value) else str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _arrow_cells(values: np.ndarray) -> tuple[Any, str | None]:
    """Cells and type of an Arrow array: numbers, with None for empty cells, or else text."""
    if values.dtype != object:
        return values, None
    cells = [None if isinstance(cell, str) and not cell else cell for cell in values]
    filled = [cell for cell in cells if cell is not None]
    if filled and all(isinstance(cell, NUMBERS) and not isinstance(cell, bool) for cell in filled):
        if all(isinstance(cell, int | np.integer) and abs(int(cell)) < 2**63 for cell in filled):
            return cells, "int64"
        return [None if cell is None else float(cell) for cell in cells], "float64"
    return ["" if cell is None else printable(cell) for cell in cells], "string"


def _csv_cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.6g}"
    return csv_safe(value) if isinstance(value, str | Link) else str(value)


@cache
def templates() -> Any:
    """The HTML templates of pages/; every value is escaped and printable."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("weightscope", "report/pages"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    as_tojson = {"separators": (",", ":"), "allow_nan": False}
    environment.policies["json.dumps_kwargs"] = as_tojson
    environment.tests |= {
        "link": lambda x: isinstance(x, Link),
        "numeric": lambda x: isinstance(x, NUMBERS),
    }
    environment.filters |= {"quoted": quote, "exact": lambda x: f"{float(x):.17g}"}
    environment.filters |= {"prose": prose, "coded": coded, "spoken": spoken}
    return environment
