"""Marks for parameters whose tests take long."""

from collections.abc import Collection, Iterable
from itertools import count
from typing import Any

import pytest


def mostly_checked(parameters: Iterable[Any], *, fast: Collection[Any], share: int = 1) -> list[Any]:
    """The parameters: a few that every change is tried on, of the others one in `share` for `check`, then `census`."""
    turn = count()
    return [
        each
        if each in fast
        else pytest.param(each, marks=pytest.mark.census if next(turn) % share else pytest.mark.check)
        for each in parameters
    ]


def one_in(share: int, parameters: Iterable[Any]) -> list[Any]:
    """Leave one parameter in `share` to `check`, and mark the others `census`."""
    return [
        each if i % share == 0 else pytest.param(each, marks=pytest.mark.census) for i, each in enumerate(parameters)
    ]
