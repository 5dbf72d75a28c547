r"""Formulas on pages: plain notation such as `sum_j alpha_(i j) f(x_j)` becomes MathML.

Formulas are between dollar signs, or between `$$` for a line of their own; `\$` is a dollar sign. A
letter is a variable, a longer word a name, a Greek letter can be spelled out. `_` and `^` take the
word, number or parenthesis that follows: `W_QK` has one subscript, `alpha_(i j)` has two variables
as subscripts. `sqrt(x)`, `frac(a, b)`, `bar(x)` and `tilde(x)` are functions.
"""

import re
from collections.abc import Callable, Iterator

from markupsafe import Markup, escape

from weightscope.core.errors import printable

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "kappa": "κ",
    "lambda": "λ", "mu": "μ", "rho": "ρ", "sigma": "σ", "tau": "τ", "Delta": "Δ",
}  # fmt: skip
LARGE = {"sum": "∑", "Σ": "∑", "max": "max", "min": "min"}  # their subscript goes below
SIGNS = {"-": "−", "'": "′", "*": "·", "<=": "≤", ">=": "≥", "!=": "≠"}
SMALL = {
    "₀": "0", "₁": "1", "₂": "2", "₃": "3", "ᵢ": "i",
    "⁰": "0", "¹": "1", "²": "2", "³": "3", "⁴": "4", "⁺": "+",
}  # fmt: skip
BELOW, ABOVE = "₀₁₂₃ᵢ", "⁰¹²³⁴⁺'"
FENCES = {"(": ")", "[": "]", "{": "}"}
FORMULA = re.compile(r"(?<!\\)(\$\$?)(.{1,200}?)(?<!\\)\1")
COMMAND = re.compile(r"(?<![^\s(])`([^`\s][^`]*)`(?![\w'\"])")  # not a token in quotes, '`'
TOKEN = re.compile(r"\s*(\w\u0303|[0-9]+(?:\.[0-9]+)?|[A-Za-z]+|[<>!]=|\S)")


def prose(text: str) -> Markup:
    """Text as HTML: everything escaped, formulas as MathML, commands between backticks as code.

    Examples
    --------
    >>> prose("b_QK < $W_Q$")
    Markup('b_QK &lt; <math><msub><mi>W</mi><mi>Q</mi></msub></math>')
    """
    html, end = Markup(), 0
    for match in FORMULA.finditer(text):
        html += coded(_bare(text[end : match.start()])) + mathml(match[2], block=match[1] == "$$")
        end = match.end()
    return html + coded(_bare(text[end:]))


def spoken(text: str) -> str:
    """Text for a terminal or a tooltip: formulas stay in plain notation."""
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
    """Text from a file made safe for `prose`: its dollar signs begin no formula."""
    return printable(text).replace("$", r"\$")


def _bare(text: str) -> str:
    return printable(text.replace(r"\$", "$"))


def mathml(formula: str, block: bool = False) -> Markup:
    """A formula as a `math` element."""
    tokens = _Tokens(printable(formula))
    inner = _row(tokens, "")
    return Markup(f'<math display="block">{inner}</math>' if block else f"<math>{inner}</math>")


class _Tokens:
    """The tokens of a formula, in order."""

    def __init__(self, formula: str) -> None:
        self._tokens = TOKEN.findall(formula)
        self._at = 0

    @property
    def next(self) -> str:
        """The next token, not consumed; empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._at == len(self._tokens):
            raise StopIteration
        self._at += 1
        return self._tokens[self._at - 1]


def _row(tokens: _Tokens, end: str) -> str:
    """Everything up to a sign in `end`, which is consumed, or up to the last token."""
    parts = []
    for token in tokens:
        if end and token in end:
            break
        parts.append(_scripted(token, tokens))
        named = re.fullmatch("[A-Za-z]{2,}", token) and token not in {*GREEK, *LARGE}
        if named and tokens.next.isalnum():
            parts.append('<mspace width=".17em"></mspace>')  # between a name and its argument
    return "".join(parts)


def _scripted(token: str, tokens: _Tokens) -> str:
    """An atom with its subscript and superscript."""
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
    if not (below or above):
        return base
    below, above = (
        f"<mrow>{part}</mrow>" if part.count("</m") > 1 else part for part in (below, above)
    )
    if below and above:
        name = "munderover" if large else "msubsup"
    elif below:
        name = "munder" if large else "msub"
    else:
        name = "mover" if large else "msup"
    return f"<{name}>{base}{below}{above}</{name}>"


def _script(tokens: _Tokens) -> str:
    """A word, a number, or a parenthesis without its brackets."""
    token = next(tokens, "")
    return _row(tokens, ")") if token == "(" else _word(token)


def _atom(token: str, tokens: _Tokens) -> str:
    """A word, number or sign, a parenthesis with its contents, or a function such as sqrt."""
    if token in BUILT and tokens.next == "(":
        next(tokens)
        return BUILT[token](tokens)
    if token in FENCES:
        return f"<mrow>{_word(token)}{_row(tokens, FENCES[token])}{_word(FENCES[token])}</mrow>"
    return _word(token)


def _word(token: str) -> str:
    """One token as a MathML element."""
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
