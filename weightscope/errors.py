"""The one error that bad input raises."""


def printable(text: object) -> str:
    """`text` with everything a terminal might obey (escapes, control and bidirectional characters) spelled out.

    Names come out of files nobody vouches for; whatever shows one goes through here.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


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
        where = "" if file is None else f"{printable(file).rsplit('/', 1)[-1]}: "
        what = "" if tensor is None else f"tensor '{printable(tensor)}' "
        super().__init__(f"{where}{what}{printable(problem)}")
