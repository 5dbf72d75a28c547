"""Checks of what workers send back, before it is kept: a worker may run another version, or be hostile.

Messages are pickles, and unpickling one may run code: this does not make an untrusted network safe (docs/scale.md). It
keeps malformed results out, and files inside their folder.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from weightscope.errors import CheckpointError, printable
from weightscope.findings import KINDS

PLAIN = "biufcU"  # kinds of NumPy array: numbers and text, no objects
DEEPEST = 6  # levels of a result in JSON


@dataclass(frozen=True)
class Report:
    """What the last task of an audit sends back."""

    files: dict[str, bytes]  # the results by name, in the order in which they are written
    text: str  # the audit on a terminal
    summary: dict[str, Any]  # the checkpoint as one row of numbers
    result: dict[str, Any] = field(default_factory=dict)  # the audit as JSON


def arrays_of(answer: Any, layer: int) -> dict[str, np.ndarray]:
    """A worker's answer for a layer, if it is a dictionary of plain arrays."""
    if not (isinstance(answer, dict) and answer and all(map(_is_array, answer.items()))):
        raise _refused(f"layer {layer}", answer, "arrays by name")
    return answer


def report_of(answer: Any) -> Report:
    """A worker's last answer, if it is a report whose parts have the expected types and safe names."""
    if type(answer) is not Report:
        raise _refused("its report", answer, "a report")
    files, text, summary, result = (getattr(answer, name, None) for name in ("files", "text", "summary", "result"))
    if not (isinstance(files, dict) and all(isinstance(content, bytes) for content in files.values())):
        raise _refused("its report", files, "files by name")
    for name in files:
        if not isinstance(name, str) or not _is_result(name):
            raise CheckpointError(f"a worker names a file '{printable(name)[:100]}', which is not a result's name")
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


def _is_result(name: str) -> bool:
    """A plain name, or one within folders of plain names: nothing absolute, nothing hidden."""
    return "\\" not in name and all(part and part.isprintable() and part[0] != "." for part in name.split("/"))


def _is_json(value: Any, depth: int = 0) -> bool:
    """Types that JSON has, nested no deeper than a result is, with finite numbers."""
    if depth > DEEPEST:
        return False
    if type(value) is dict:
        return all(type(key) is str and _is_json(entry, depth + 1) for key, entry in value.items())
    if type(value) is list:
        return all(_is_json(entry, depth + 1) for entry in value)
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and isfinite(value))


def _are_findings(value: Any) -> bool:
    return type(value) is list and all(map(_is_finding, value))


def _is_finding(value: Any) -> bool:
    texts = [value.get(name) for name in ("kind", "title", "text")] if type(value) is dict else [None]
    return all(type(text) is str for text in texts) and texts[0] in KINDS


def _refused(what: str, answer: Any, expected: str) -> CheckpointError:
    problem = f"a worker answers for {what} with {type(answer).__name__}; {expected} were expected"
    return CheckpointError(f"{problem}. Does it run the same version of weightscope?")
