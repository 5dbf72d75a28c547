"""Formulas become mathematics, and nothing else does."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightscope.core.formulas import mathml, plain, prose, spoken
from weightscope.core.tables import Column
from weightscope.heads.audit.measure import _QK, _SPECTRUM, _VO

HOW_MANY = {"msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3, "mfrac": 2}


def shape(formula: str) -> str:
    """A formula's elements and letters, without attributes."""
    return re.sub(r"<(/?)(\w+)[^>]*>", r"<\1\2>", str(mathml(formula))).removeprefix("<math>").removesuffix("</math>")


@pytest.mark.parametrize(
    "formula, expected",
    [
        ("W_QK", "<msub><mi>W</mi><mi>QK</mi></msub>"),
        ("alpha_(i j)^h", "<msubsup><mi>α</mi><mrow><mi>i</mi><mi>j</mi></mrow><mi>h</mi></msubsup>"),
        ("d'", "<msup><mi>d</mi><mo>′</mo></msup>"),
        ("sum_(j=1)^n", "<munderover><mo>∑</mo><mrow><mi>j</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>"),
        ("σ₁/σ₂", "<msub><mi>σ</mi><mn>1</mn></msub><mo>/</mo><msub><mi>σ</mi><mn>2</mn></msub>"),
        ("(a b)²", "<msup><mrow><mo>(</mo><mi>a</mi><mi>b</mi><mo>)</mo></mrow><mn>2</mn></msup>"),
        ("1/sqrt(d)", "<mn>1</mn><mo>/</mo><msqrt><mrow><mi>d</mi></mrow></msqrt>"),
        ("frac(f(x), 2)", "<mfrac><mrow><mi>f</mi><mrow><mo>(</mo><mi>x</mi><mo>)</mo></mrow></mrow>"
                          "<mrow><mn>2</mn></mrow></mfrac>"),
        ("a -3 <= 2.5", "<mi>a</mi><mo>−</mo><mn>3</mn><mo>≤</mo><mn>2.5</mn>"),
    ],
)  # fmt: skip
def test_notation(formula: str, expected: str) -> None:
    assert shape(formula) == expected


@given(st.text(alphabet="xW_^()'12,/ |αΣ²<&\"$\\\x1b") | st.text())
def test_any_formula_becomes_well_formed_inert_markup(text: str) -> None:
    for element in ElementTree.fromstring(mathml(text)).iter():
        assert len(element) == HOW_MANY.get(element.tag, len(element))
    assert set(re.findall(r"</?(\w+)", prose(text))) <= {
        "math", "mi", "mn", "mo", "mrow", "mspace", "msqrt", *HOW_MANY
    }  # fmt: skip
    assert prose(plain(text)).unescape() == spoken(plain(text))


def test_dollar_signs_of_tokens_begin_no_formula() -> None:
    assert prose(f"tokens {plain('$5')} and {plain('$x$')} of $x$") == "tokens $5 and $x$ of <math><mi>x</mi></math>"
    assert spoken(f"{plain('$x$')}: $W_QK$") == "$x$: W_QK"
    assert Column("$a$").html() == Column("$a$").heading == "$a$"


def test_symbols_of_measures_are_translated_completely() -> None:
    for measure in (*_SPECTRUM, *_QK, *_VO):
        assert not set("_^") & set(mathml(measure.symbol))
