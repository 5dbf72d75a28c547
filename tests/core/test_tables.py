"""A table says the same thing in every form, and nothing in a cell is obeyed."""

import csv
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.arrow import AS_ARROW, MIXED
from tests.support.environments import environment, run_in
from weightscope.core.errors import CheckpointError
from weightscope.core.tables import Column, Link, Table, as_json, column, columns_of

HOSTILE = '<script>alert("x")</script>\x1b[2J'


@pytest.fixture
def table() -> Table:
    return Table(
        [
            Column("head", [0, 1, 2]),
            Column("auroc", np.array([0.123456789, np.nan, 1e-9]), symbol="AUROC", unit="share", meaning="rank"),
            Column("token", ["=1+1", HOSTILE, "a\0"]),
        ]
    )


def test_columns_keep_their_kind(table: Table) -> None:
    assert table["head"].dtype.kind == "i" and table["auroc"].dtype == np.float64
    assert table["token"].tolist() == ["=1+1", HOSTILE, "a\0"]  # a NumPy string would lose the trailing NUL
    assert Column("mixed", [1, 0.5, ""]).values.tolist() == [1, 0.5, ""]
    assert Column("flags", [True, False]).values.dtype == bool


def test_csv_has_six_digits_no_nan_and_no_formula(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["auroc"] for row in rows] == ["0.123457", "", "1e-09"]
    assert rows[0]["token"] == "'=1+1" and "\x1b" not in rows[1]["token"]


@given(st.lists(st.tuples(st.integers(-(10**9), 10**9), st.floats(allow_nan=True), st.text()), max_size=8))
def test_a_table_of_rows_has_these_rows(rows: list[tuple[int, float, str]]) -> None:
    table = Table.of_rows(("n", Column("x", symbol="X"), "text"), rows)
    assert len(table) == len(rows)
    for row, expected in zip(table.rows(), rows, strict=True):
        assert row[0] == expected[0] and (row[1] == expected[1] or np.isnan(expected[1])) and row[2] == expected[2]
    assert len(list(csv.reader(io.StringIO(table.csv(), newline="")))) == len(rows) + 1


def test_html_escapes_names(table: Table) -> None:
    html = Table([*table.columns, Column("page", [Link('a"b/c d.html', HOSTILE)] * 3)], HOSTILE).html()
    assert "<script>" not in html and "\x1b" not in html
    assert html.count("&lt;script&gt;") == 2 + 1 + 3  # caption and its label, a cell, three links
    assert 'href="a%22b/c%20d.html"' in html
    assert '<td class="number" data-value="0.123456789">0.1235</td>' in html
    assert '<td class="number" data-value="nan"></td>' in html
    assert "AUROC (share)" in html and 'title="rank"' in html


def test_a_sentence_in_a_cell_is_folded() -> None:
    sentence = "no such file: " + "x" * 100
    assert f'<td class="long">{sentence}</td>' in Table([Column("what was wrong", [sentence])]).html()


def test_rows_are_taken_sorted_and_chosen(table: Table) -> None:
    assert table.sort("auroc", descending=True)["head"].tolist() == [0, 2, 1]  # NaN last either way
    assert table.sort("auroc")["head"].tolist() == [2, 0, 1]
    assert table.where(table["head"] > 0).select("token", "head").names == ["token", "head"]
    assert "token" in table and "x" not in table


def test_columns_that_make_no_table_are_refused(table: Table) -> None:
    with pytest.raises(KeyError, match="no column 'aurok'; there are head, auroc, token"):
        table["aurok"]
    with pytest.raises(ValueError, match="lengths"):
        Table([Column("a", [1]), Column("b", [1, 2])])
    with pytest.raises(ValueError, match="a, a"):
        Table([Column("a", [1]), Column("a", [1])])


def test_a_notebook_sees_both_ends_of_a_long_table() -> None:
    long = Table([Column("n", np.arange(1000))])
    html = long._repr_html_()
    assert html.count("<tr>") == 25 and "1,000 rows" in html and ">999<" in html
    assert "<button" not in html  # no script sorts there
    assert repr(long) == "Table(1000 rows: n)"


def test_pandas_is_named_where_it_is_missing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    assert table.to_pandas().equals(pd.DataFrame({name: table[name] for name in table.names}))
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(CheckpointError, match="needs pandas: pip install pandas"):
        table.to_pandas()


def test_records_are_valid_json() -> None:
    odd = Table(
        [Column("n", [1, 2, 3]), Column("x", [np.nan, -np.inf, 0.5]), Column("t", ["a", Link("b.html", "b"), ""])]
    )
    assert json.loads(json.dumps(odd.records(), allow_nan=False)) == [
        {"n": 1, "x": None, "t": "a"}, {"n": 2, "x": "-inf", "t": "b"}, {"n": 3, "x": 0.5, "t": ""},
    ]  # fmt: skip
    assert as_json({"shape": (np.int64(2), np.float32(0.5)), "path": Path("a"), "yes": True, "none": None}) == {
        "shape": [2, 0.5], "path": "a", "yes": True, "none": None,
    }  # fmt: skip


def test_arrow_has_every_number_exactly_and_what_columns_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow", reason="Arrow comes with the extra `arrow`")
    arrow = pa.table(MIXED)
    assert arrow.equals(MIXED.to_arrow(), check_metadata=True)
    assert {field.name: (str(field.type), arrow[field.name].to_pylist()) for field in arrow.schema} == AS_ARROW
    assert arrow.schema.field("head").metadata == {b"symbol": b"$h$", b"meaning": b"Its index."}
    assert arrow.schema.metadata == {b"caption": b"heads"}
    empty = pa.table(MIXED.take([]))
    assert len(empty) == 0 and empty.column_names == MIXED.names
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for to_arrow in (MIXED.__arrow_c_stream__, MIXED.to_arrow):
        with pytest.raises(CheckpointError, match="needs pyarrow: pip install pyarrow"):
            to_arrow()


def test_polars_takes_the_table_itself_and_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(DataFrame=lambda table: ("frame of", table)))
    assert MIXED.to_polars() == ("frame of", MIXED)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(CheckpointError, match="needs polars: pip install polars"):
        MIXED.to_polars()


def test_a_csv_goes_into_a_file_whole_or_not_at_all(table: Table, tmp_path: Path) -> None:
    table.to_csv(tmp_path / "heads.csv")
    table.to_csv(str(tmp_path / "again.csv"))
    assert (tmp_path / "heads.csv").read_bytes() == (tmp_path / "again.csv").read_bytes() == table.csv().encode()
    with pytest.raises(CheckpointError, match="cannot be written"):
        table.to_csv(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"heads.csv", "again.csv"}


def test_the_first_rows_and_rows_by_text(table: Table) -> None:
    assert table.head(2)["head"].tolist() == [0, 1] and len(table.head()) == len(table.head(99)) == 3
    assert not len(table.head(0))
    words = Table([Column("word", ["b", "", "a", "b"]), Column("n", [0, 1, 2, 3]), Column("is", [True, False] * 2)])
    assert words.sort("word")["n"].tolist() == [1, 2, 0, 3]
    assert words.sort("word", descending=True)["n"].tolist() == [0, 3, 2, 1]
    assert words.sort("is", descending=True)["n"].tolist() == [0, 2, 1, 3]
    odd = Table([Column("some", [10, None, 9]), Column("byte", np.array([0, 255, 7], np.uint8)), Column("n", range(3))])
    assert odd.sort("some")["n"].tolist() == [2, 0, 1] and odd.sort("some", descending=True)["n"].tolist() == [0, 2, 1]
    assert odd.sort("byte", descending=True)["n"].tolist() == [1, 2, 0]
    with pytest.raises(KeyError, match=r"no column 'wrd'.*did you mean 'word'"):
        words.sort("wrd")


READERS = """
import json
import duckdb, polars
from tests.support.arrow import MIXED
frame = polars.DataFrame(MIXED)
assert frame.equals(MIXED.to_polars())
heads = duckdb.from_arrow(MIXED)
queried = duckdb.sql("select sum(head), count(sigma1), max(layer) from heads").fetchall()
print(json.dumps([frame.to_dict(as_series=False), {name: list(cells) for name, cells in
      zip(heads.columns, zip(*heads.fetchall()))}, queried]))
"""


@pytest.mark.check
def test_polars_and_duckdb_read_a_table_without_pandas(tmp_path: Path) -> None:
    readers = ("pyarrow", "polars>=1.20,<2", "duckdb>=1.2,<2", "markupsafe", "numpy")  # and no pandas
    python = environment(tmp_path, *readers, alone=True)
    by_polars, by_duckdb, queried = json.loads(run_in(python, "-c", READERS, folder=tmp_path))
    expected = {name: cells for name, (_, cells) in AS_ARROW.items()}
    assert by_polars == expected and by_duckdb == expected
    assert queried == [[3, 2, 3]]


class Sized(NamedTuple):
    """Cells of a row, each with its column."""

    head: int = column("Its index.")
    size: float = column(symbol="$s$", unit="nats", format=".1f")


def test_rows_say_what_their_cells_are() -> None:
    table = Table.of(Sized, [Sized(0, 0.25), Sized(1, size=2.0)], "sizes")
    assert table.csv() == "head,size\n0,0.25\n1,2\n" and table.caption == "sizes"
    size = table.column("size")
    assert (size.symbol, size.unit, size.meaning, size.format) == ("$s$", "nats", "", ".1f")
    assert table.column("head").meaning == "Its index." and size.is_numeric
    assert Table.of(Sized, []).csv() == "head,size\n"


def test_row_within_a_row_gives_its_columns() -> None:
    class Ends(NamedTuple):
        low: float = column("Least.")
        high: float = column("Most.", format=".0f")

    class Ranged(NamedTuple):
        name: str = column()
        ends: Ends = columns_of(Ends)  # type: ignore[assignment]
        count: int = column()

    table = Table.of(Ranged, [Ranged("a", Ends(1.0, 2.0), 3)])
    assert table.names == ["name", "low", "high", "count"] and [*table.rows()] == [("a", 1.0, 2.0, 3)]
    assert table.column("high").format == ".0f" and Table.of(Ranged, []).names == table.names
    with pytest.raises(ValueError, match="lacks a cell"):
        Table.of(Ranged, [Ranged("a", count=3)])


def test_row_that_lacks_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="a Sized lacks a cell of head, size"):
        Table.of(Sized, [Sized(head=1)])
