"""The work that a piece of code does, counted by function, so that a test of growth needs no clock.

A function's steps are the lines that it runs and the calls that it makes in Python; its elements are the sizes
of arrays that it holds and hands to NumPy or SciPy, times the smaller side for a decomposition. Work inside an operator
or a search in a list is not seen.
"""

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from math import log2
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

import weightscope

OWN = str(Path(weightscope.__file__).parent) + "/"
NUMERIC = tuple(f"/site-packages/{name}/" for name in ("numpy", "scipy", "sklearn"))
DECOMPOSED = ("eigh", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "solve", "lstsq", "inv", "pinv")
LOOKED_UP = ("searchsorted", "_searchsorted_dispatcher")  # an array that is searched, not read


class Count(NamedTuple):
    """What one function did."""

    steps: int
    elements: int


class Work:
    """Counts of what ran while it was counted, by thread, since no two may add to one number at a time."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[CodeType]] = defaultdict(Counter)
        self._elements: dict[int, Counter[CodeType]] = defaultdict(Counter)

    @property
    def counts(self) -> dict[str, Count]:
        """By file and name of the function."""
        steps, elements = Counter[str](), Counter[str]()
        for total, by_thread in ((steps, self._steps), (elements, self._elements)):
            for counts in by_thread.values():
                for code, count in counts.items():
                    total[f"{code.co_filename.removeprefix(OWN)}:{code.co_qualname}"] += count
        return {name: Count(steps[name], elements[name]) for name in steps | elements}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Count a call; a trace function of `sys.settrace`."""
        code = frame.f_code
        if code.co_filename.startswith(OWN):
            me = threading.get_ident()
            steps, elements = self._steps[me], self._elements[me]
            is_resumed = code.co_flags & CO_GENERATOR
            names = code.co_varnames

            def trace(frame: FrameType, event: str, argument: object) -> Any:
                if event == "line":
                    steps[code] += 1
                elif event == "return" and not is_resumed:
                    held = frame.f_locals
                    elements[code] += sum(v.size for n in names if isinstance(v := held.get(n), np.ndarray))
                return trace

            return trace
        back = frame.f_back
        if back is not None and back.f_code.co_filename.startswith(OWN):
            me = threading.get_ident()
            self._steps[me][back.f_code] += 1
            if any(name in code.co_filename for name in NUMERIC) and code.co_name not in LOOKED_UP:
                held = frame.f_locals
                handed = (held.get(name) for name in code.co_varnames[: code.co_argcount])
                arrays = [value for value in handed if isinstance(value, np.ndarray)]
                self._elements[me][back.f_code] += sum(value.size for value in arrays)
                if code.co_name in DECOMPOSED:
                    self._elements[me][back.f_code] += sum(value.size * min(value.shape[-2:]) for value in arrays)
        return None


@contextmanager
def counted_work() -> Iterator[Work]:
    """Count what runs inside, in every thread that begins there."""
    work, before = Work(), sys.gettrace()
    threading.settrace(work.trace)
    sys.settrace(work.trace)
    try:
        yield work
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def exponent(first: int, second: int, third: int) -> float:
    """The power with which counts at n, 2 n and 4 n grow, less what every size costs; 0 if they do not grow."""
    return log2(max(third - second, 1) / max(second - first, 1)) if third > second else 0.0
