"""What a name or token may not do where it is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightscope.errors import CheckpointError
from weightscope.escape import csv_safe, printable


@given(st.text())
def test_nothing_shown_can_steer_a_terminal(text: str) -> None:
    assert printable(text).isprintable() and csv_safe(text).isprintable()
    assert str(CheckpointError(text, file=text, tensor=text)).isprintable()


@given(st.text(st.characters(categories=["L", "N", "P", "S"], include_characters=" ")))
def test_what_is_harmless_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1"])
def test_no_cell_is_a_formula(cell: str) -> None:
    assert csv_safe(cell)[0] not in "=+-@\t\r\n＝"


def test_a_word_in_a_cell_stays_as_it_is() -> None:
    assert csv_safe(" the = + - @") == " the = + - @"


def test_half_a_character_is_spelled_out() -> None:
    assert printable("\ud800") == "\\ud800"


def test_a_name_of_a_megabyte_does_not_bury_the_message() -> None:
    message = str(CheckpointError("is broken", file="f" * 10**6, tensor="n" * 10**6))
    assert len(message) < 600 and message.endswith("' is broken")
