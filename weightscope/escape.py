"""Names and tokens made harmless for whatever shows them; they come out of files nobody vouches for."""

FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # spreadsheets obey the full-width forms too


def printable(text: object) -> str:
    """`text` with everything a terminal might obey (escapes, control and bidirectional characters) spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def csv_safe(text: object) -> str:
    """`text` for one CSV cell that no spreadsheet takes for a formula: a leading ' marks it as text.

    Control characters (a leading tab or carriage return starts a formula too) are spelled out as in `printable`. For
    names and tokens; numbers go into a CSV as they are.
    """
    shown = printable(text)
    return "'" + shown if shown.startswith(FORMULA_STARTS) else shown
