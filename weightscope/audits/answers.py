"""What workers send back, looked at before it is kept: a worker may have another weightscope, or be nobody's friend.

Messages are pickles, and opening one may run code: this does not make a network of strangers safe (docs/cluster.md). It
keeps what is wrong out of the results, and files inside their folder.
"""

from math import isfinite
from typing import Any, TypeVar

import numpy as np

from weightscope.audits.kinds import KINDS
from weightscope.errors import CheckpointError, printable

PLAIN = "biufcU"  # kinds of NumPy array: numbers and text, no objects
DEEPEST = 6  # levels of a result in JSON
Answer = TypeVar("Answer")


def arrays_of(answer: Any, layer: int) -> dict[str, np.ndarray]:
    """What was measured of a layer.

    Raises
    ------
    CheckpointError
        It is anything but arrays by name.
    """
    if not (isinstance(answer, dict) and answer and all(map(_is_array, answer.items()))):
        raise _refused(f"layer {layer}", answer, "arrays by name")
    return answer


def report_of(answer: Any, kind: type[Answer]) -> Answer:
    """The report that ends an audit.

    Raises
    ------
    CheckpointError
        It is no report, or a file of it would lie outside the folder of results, or hidden in it.
    """
    if type(answer) is not kind:
        raise _refused("its report", answer, "a report")
    files, text, summary, result = (getattr(answer, name, None) for name in ("files", "text", "summary", "result"))
    if not (isinstance(files, dict) and all(isinstance(content, bytes) for content in files.values())):
        raise _refused("its report", files, "files by name")
    for name in files:
        if not isinstance(name, str) or not _is_result(name):
            raise CheckpointError(f"a worker names a file '{printable(name)[:100]}', which is no result's name")
    if not (isinstance(text, str) and all(line.isprintable() for line in text.split("\n"))):
        raise _refused("its report", text, "lines that a terminal can show")
    if not (isinstance(summary, dict) and all(type(value) in (str, int, float) for value in summary.values())):
        raise _refused("its report", summary, "a row of plain values")
    if not (isinstance(result, dict) and _is_json(result) and _are_findings(result.get("findings", []))):
        raise _refused("its report", result, "JSON with findings of known kinds")
    return answer


def _is_array(item: tuple[Any, Any]) -> bool:
    name, value = item
    return isinstance(name, str) and name.isidentifier() and isinstance(value, np.ndarray) and value.dtype.kind in PLAIN


def _is_json(value: Any, depth: int = 0) -> bool:
    """What JSON has, nested no deeper than a result is, numbers finite."""
    if depth > DEEPEST:
        return False
    if type(value) is dict:
        return all(type(key) is str and _is_json(own, depth + 1) for key, own in value.items())
    if type(value) is list:
        return all(_is_json(own, depth + 1) for own in value)
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and isfinite(value))


def _are_findings(value: Any) -> bool:
    return type(value) is list and all(map(_is_finding, value))


def _is_finding(value: Any) -> bool:
    texts = [value.get(name) for name in ("kind", "title", "text")] if type(value) is dict else [None]
    return all(type(text) is str for text in texts) and texts[0] in KINDS


def _is_result(name: str) -> bool:
    """A plain name, or one within folders of plain names: nothing absolute, nothing hidden."""
    return "\\" not in name and all(part and part.isprintable() and part[0] != "." for part in name.split("/"))


def _refused(what: str, answer: Any, expected: str) -> CheckpointError:
    found = type(answer).__name__
    return CheckpointError(
        f"a worker answers for {what} with {found}; {expected} were expected. Is its weightscope this one?"
    )
