"""What a message says, and what a name or token may not do where it is shown."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightscope
from weightscope.cli.command import in_options
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.tables import csv_safe


@given(st.text())
def test_nothing_shown_can_steer_a_terminal(text: str) -> None:
    assert printable(text).isprintable() and csv_safe(text).isprintable()
    assert str(CheckpointError(text, file=text, tensor=text)).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"], include_characters=" ")))
def test_harmless_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1"])
def test_no_cell_is_a_formula(cell: str) -> None:
    assert csv_safe(cell)[0] not in "=+-@\t\r\n＝"


def test_plain_word_in_a_cell_is_unchanged() -> None:
    assert csv_safe(" the = + - @") == " the = + - @"


def test_half_a_character_is_spelled_out() -> None:
    assert printable("\ud800") == "\\ud800"


def test_a_name_of_a_megabyte_does_not_bury_the_message() -> None:
    message = str(CheckpointError("is broken", file="f" * 10**6, tensor="n" * 10**6))
    assert len(message) < 600 and message.endswith("' is broken")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("say `tower='text'` or `tower='vision'`", "say --tower text or --tower vision"),
        ("leave `tower` out", "leave --tower out"),
        ("`num_shots` is too large", "--num-shots is too large"),
        ("`dask worker --nthreads 1` helps", "`dask worker --nthreads 1` helps"),
    ],
)
def test_messages_of_commands_name_options(message: str, said: str) -> None:
    assert in_options(message) == said


SHELL = re.compile(
    r"pip install|weightscope [a-z]+|dask [a-z]+|^ --revision "
)  # options of whole commands, to be typed


def test_messages_of_the_library_name_no_option() -> None:
    """No string outside cli/ names an option: a caller from Python has none."""
    root = Path(weightscope.__file__).parent
    naming = [
        f"{path.relative_to(root)}: {node.value}"
        for path in root.rglob("*.py")
        if path.parent.name != "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"(?<![\w-])--[a-z]", node.value) and not SHELL.search(node.value) and "\n" not in node.value
    ]
    assert naming == []


def test_numbers_of_things() -> None:
    assert [counted(n, "head") for n in (0, 1, 12, 1024)] == ["0 heads", "1 head", "12 heads", "1,024 heads"]
