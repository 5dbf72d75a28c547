"""The one error that bad input raises, and how names and numbers appear in messages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

LONGEST_NAME = 200  # characters of a name that a message shows
LONGEST_PROBLEM = 2000


class CheckpointError(Exception):
    """Missing, broken, hostile or unsupported input: a checkpoint, counts, corpus or token.

    The message is one line: which file and tensor, what was found and what was expected. Arguments
    appear by name in backquotes, `tower` or `tower='text'`; a command shows its option instead.

    Parameters
    ----------
    problem : str
        What was found, and what was expected instead.
    file : path-like, optional
        The file with the problem; only its name is shown.
    tensor : str, optional
        The tensor's name.

    Examples
    --------
    >>> import weightscope as ws
    >>> try:
    ...     ws.open_model("embedded").layer(9)
    ... except ws.CheckpointError as error:
    ...     print(error)
    model.safetensors: no layer 9: the model has 4
    """

    def __init__(self, problem: str, *, file: object = None, tensor: str | None = None) -> None:
        where = "" if file is None else f"{shortened(str(file).rsplit('/', 1)[-1], LONGEST_NAME)}: "
        what = "" if tensor is None else f"tensor '{shortened(tensor, LONGEST_NAME)}' "
        super().__init__(f"{where}{what}{shortened(problem, LONGEST_PROBLEM)}")


class TooLargeError(CheckpointError):
    """A result too large for its floating-point type; who knows the weights names the largest."""


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Begin errors with the source that they are about, where a command opens several."""
    try:
        yield
    except CheckpointError as error:
        given, text = printable(str(source)), str(error)
        if given in text:
            raise
        text = text.removeprefix(f"{given.rsplit('/', 1)[-1]}: ")
        raise CheckpointError(f"{given}: {text}") from None


def whole(value: Any, what: str) -> int:
    """An index as an int; anything but a whole number is a TypeError."""
    if not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:
            pass
    raise expected(value, what, "a whole number")


def wholes(values: Any, what: str) -> tuple[int, ...]:
    """A sequence of whole numbers as a tuple; a single number or text is a TypeError."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise expected(values, what, "a sequence of whole numbers, such as range(4)")
    return tuple(whole(value, f"one of {what}") for value in values)


def expected(value: object, what: str, instead: str) -> TypeError:
    """The error about an argument of the wrong type."""
    given = f"{shortened(repr(value), 40)}, of type {type(value).__name__}"
    return TypeError(f"{what} is {given}; expected {instead}")


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """End a message with "did you mean"; empty if no known name has difflib's ratio `least`."""
    from difflib import get_close_matches  # imported only once something is wrong

    near = get_close_matches(name, list(known), 1, least)
    return f"; did you mean '{near[0]}'?" if near else ""


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Printable, and cut in the middle: a hostile name must not bury the message."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return printable(text)


def printable(text: object) -> str:
    """Spell out what a terminal might obey: escapes, control and bidirectional characters.

    Use it for names and tokens, which come from untrusted files.
    """
    characters = (
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )
    return "".join(characters)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """An error's message in one `printable` line."""
    return printable(" ".join(str(error).split()))


def printable_lines(text: str) -> str:
    """Make each line `printable`: no character but a newline ends one."""
    return "\n".join(map(printable, text.split("\n")))


def sized(n_bytes: int) -> str:
    """Bytes in decimal units, as disks and networks count: "4.19 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.3g} {unit}"
    return f"{n_bytes} bytes"


def counted(count: int, noun: str) -> str:
    """A number of things: "1 head", "12 heads", "1,024 heads"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
