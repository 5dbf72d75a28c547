"""Formulas as mathematics on a page: from the plain notation that people type to MathML, which every browser draws.

Text has formulas between dollar signs, set apart on a line of their own between two; a dollar sign that is none is
written `\\$`. The notation is that of docstrings and comments: `W_QK`, `x_i W_Q`, `|f(x)|`, `sum_j alpha_(i j) f(x_j)`.
A letter is a variable, a longer word a name, a Greek letter its name or itself. `_` and `^` take the word, the number
or the parenthesis that follows; two letters below are two variables so, `alpha_(i j)`. `sqrt(x)`, `frac(a, b)`
and `bar(x)` are what they say.
"""

import re
from collections.abc import Callable, Iterator

from markupsafe import Markup, escape

from weightscope.errors import printable

GREEK = dict(zip(
    ["alpha", "beta", "gamma", "delta", "epsilon", "kappa", "lambda", "mu", "rho", "sigma", "tau", "Delta"],
    "αβγδεκλμρστΔ",
    strict=True,
))  # fmt: skip
LARGE = {"sum": "∑", "Σ": "∑", "max": "max", "min": "min"}  # with what they range over below
SIGNS = {"-": "−", "'": "′", "*": "·", "<=": "≤", ">=": "≥", "!=": "≠"}
SMALL = {**dict(zip("₀₁₂₃", "0123", strict=True)), **dict(zip("⁰¹²³⁴", "01234", strict=True)), "⁺": "+", "ᵢ": "i"}
BELOW, ABOVE = "₀₁₂₃ᵢ", "⁰¹²³⁴⁺'"
FENCES = {"(": ")", "[": "]", "{": "}"}
FORMULA = re.compile(r"(?<!\\)(\$\$?)(.{1,200}?)(?<!\\)\1")
COMMAND = re.compile(r"`([^`]+)`")
TOKEN = re.compile(r"\s*(\w\u0303|[0-9]+(?:\.[0-9]+)?|[A-Za-z]+|[<>!]=|\S)")


def prose(text: str) -> Markup:
    """Text as HTML: everything escaped, formulas as MathML.

    Examples
    --------
    >>> prose("b_QK < $W_Q$")
    Markup('b_QK &lt; <math><msub><mi>W</mi><mi>Q</mi></msub></math>')
    """
    html, end = Markup(), 0
    for found in FORMULA.finditer(text):
        html += escape(_bare(text[end : found.start()])) + mathml(found[2], block=found[1] == "$$")
        end = found.end()
    return html + escape(_bare(text[end:]))


def spoken(text: str) -> str:
    """Text for where only letters go, a terminal or a tooltip: formulas as they are typed."""
    return _bare(FORMULA.sub(r"\2", text))


def coded(text: str) -> Markup:
    """Plain text as HTML: everything escaped, commands between backticks as code.

    Examples
    --------
    >>> coded("`compare --all` reads A & B")
    Markup('<code>compare --all</code> reads A &amp; B')
    """
    return Markup(COMMAND.sub(r"<code>\1</code>", str(escape(printable(text)))))


def plain(text: object) -> str:
    """Text that comes out of a file, for prose: a dollar sign in it begins no formula."""
    return printable(text).replace("$", r"\$")


def _bare(text: str) -> str:
    return printable(text.replace(r"\$", "$"))


def mathml(formula: str, block: bool = False) -> Markup:
    """A formula as a `math` element.

    Parameters
    ----------
    formula : str
    block : bool
        On a line of its own.
    """
    tokens = _Tokens(printable(formula))
    inner = _row(tokens, "")
    return Markup(f'<math display="block">{inner}</math>' if block else f"<math>{inner}</math>")


class _Tokens:
    """What a formula is made of, one after the other."""

    def __init__(self, formula: str) -> None:
        self._tokens = TOKEN.findall(formula)
        self._at = 0

    @property
    def next(self) -> str:
        """The next one, which stays; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._at == len(self._tokens):
            raise StopIteration
        self._at += 1
        return self._tokens[self._at - 1]


def _row(tokens: _Tokens, end: str) -> str:
    """Everything up to one of the signs of `end`, which is taken, or to the last."""
    parts = []
    for token in tokens:
        if end and token in end:
            break
        parts.append(_scripted(token, tokens))
        named = re.fullmatch("[A-Za-z]{2,}", token) and token not in {*GREEK, *LARGE}
        if named and tokens.next.isalnum():
            parts.append('<mspace width=".17em"></mspace>')  # between a name and what it is of
    return "".join(parts)


def _scripted(token: str, tokens: _Tokens) -> str:
    """An atom with what stands below and above it."""
    base, large = _atom(token, tokens), token in LARGE
    below = above = ""
    while tokens.next and tokens.next in "_^" + BELOW + ABOVE:
        sign = next(tokens)
        if sign == "_":
            below += _script(tokens)
        elif sign == "^":
            above += _script(tokens)
        elif sign in BELOW:
            below += _word(SMALL[sign])
        else:
            above += _word(SMALL.get(sign, sign))
    below, above = (f"<mrow>{part}</mrow>" if part.count("</m") > 1 else part for part in (below, above))
    if below and above:
        name = "munderover" if large else "msubsup"
    else:
        name = ("munder" if below else "mover") if large else ("msub" if below else "msup")
    return f"<{name}>{base}{below}{above}</{name}>" if below or above else base


def _script(tokens: _Tokens) -> str:
    """A word, a number, or a parenthesis without its brackets."""
    token = next(tokens, "")
    return _row(tokens, ")") if token == "(" else _word(token)


def _atom(token: str, tokens: _Tokens) -> str:
    """A word, a number, a sign, a parenthesis with all that it holds, or what is built of one."""
    if token in BUILT and tokens.next == "(":
        next(tokens)
        return BUILT[token](tokens)
    if token in FENCES:
        return f"<mrow>{_word(token)}{_row(tokens, FENCES[token])}{_word(FENCES[token])}</mrow>"
    return _word(token)


def _word(token: str) -> str:
    """One token as an element."""
    shown = escape(GREEK.get(token, LARGE.get(token, SIGNS.get(token, token))))
    if token in LARGE:
        return f"<mo>{shown}</mo>"
    if token[:1].isdigit():
        return f"<mn>{shown}</mn>"
    if token[:1].isalpha() or token == "∞":
        return f"<mi>{shown}</mi>"
    space = ' stretchy="false" lspace="0" rspace="0"' if token and token in "|‖()[]{}/" else ""
    return f"<mo{space}>{shown}</mo>"


def _wrapped(element: str, after: str = "") -> Callable[[_Tokens], str]:
    return lambda tokens: f"<{element}><mrow>{_row(tokens, ')')}</mrow>{after}</{element}>"


def _fraction(tokens: _Tokens) -> str:
    return f"<mfrac><mrow>{_row(tokens, ',')}</mrow><mrow>{_row(tokens, ')')}</mrow></mfrac>"


BUILT = {
    "sqrt": _wrapped("msqrt"),
    "√": _wrapped("msqrt"),
    "frac": _fraction,
    "bar": _wrapped("mover", "<mo>¯</mo>"),
    "tilde": _wrapped("mover", "<mo>~</mo>"),
}
