"""Marks for parameters whose tests take long."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_checked(parameters: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """The parameters, all marked `check` but a few that every change is tried on."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.check) for each in parameters]


def one_in(share: int, parameters: Iterable[Any]) -> list[Any]:
    """Leave one parameter in `share` to `check`, and mark the others `census`."""
    return [
        each if i % share == 0 else pytest.param(each, marks=pytest.mark.census) for i, each in enumerate(parameters)
    ]
