"""The one error that bad input raises."""

from weightscope.escape import printable

__all__ = ["CheckpointError", "printable"]

LONGEST_NAME = 200  # characters of a name that a message shows
LONGEST_PROBLEM = 2000


class CheckpointError(Exception):
    """Bad input: a checkpoint, counts, corpus or token that cannot be what it is said to be.

    The message is one line that says which file and tensor, what was found and what was expected.

    Parameters
    ----------
    problem : str
        What was found, and what was expected instead.
    file : path-like, optional
        The file it was found in; only its name is shown.
    tensor : str, optional
        The tensor's name.
    """

    def __init__(self, problem: str, *, file: object = None, tensor: str | None = None) -> None:
        where = "" if file is None else f"{_short(str(file).rsplit('/', 1)[-1], LONGEST_NAME)}: "
        what = "" if tensor is None else f"tensor '{_short(tensor, LONGEST_NAME)}' "
        super().__init__(f"{where}{what}{_short(problem, LONGEST_PROBLEM)}")


def _short(text: str, longest: int) -> str:
    """Printable, and cut in the middle where a hostile name would bury the message."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    return printable(text)
