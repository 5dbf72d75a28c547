"""A row as a person would write it in the table: what it has otherwise than the nearest there."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from weightscope.families import FAMILIES, Family
from weightscope.families.family import In, When
from weightscope.families.stored import as_data

ALWAYS = ("is", "name", "model_types")


def as_python(row: Family) -> str:
    """A row as Python: the nearest row of the table, but for these cells."""
    own = _cells(row)
    nearest = min(FAMILIES, key=lambda other: sum(_cells(other).get(key) != value for key, value in own.items()))
    whole, near = as_data(row), as_data(nearest)
    differs = [one.name for one in fields(Family) if whole.get(one.name) != near.get(one.name)]
    lines = [f"    {name}={_written(getattr(row, name))}," for name in differs]
    return "\n".join([f"{_constant(row)} = {_constant(nearest)}.but(", *lines, ")"])


def _constant(row: Family) -> str:
    return "_".join(filter(None, (row.name.upper().replace("-", "_").replace(".", "_"), row.tower.upper())))


def _cells(row: Family) -> dict[str, Any]:
    return {key: value for key, value in as_data(row).items() if key not in ALWAYS}


def _written(value: Any) -> str:
    said = as_data(value) if is_dataclass(value) or callable(value) or isinstance(value, When | In) else None
    if isinstance(value, When | In):
        first = [repr(own) for name, own in vars(value).items() if name != "cells"]
        return _call(type(value).__name__, first, value.cells)
    if is_dataclass(value):
        return _call(type(value).__name__, [], {name: getattr(value, name) for name in said or () if name != "is"})
    if isinstance(said, Mapping):  # what a function has made
        return _call(said["is"].rpartition(".")[2], [], {name: own for name, own in said.items() if name != "is"})
    if callable(value):
        return str(value.__name__)
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _call(name: str, first: list[str], more: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*first, *(f'{key}={_written(own)}' for key, own in more.items())])})"
