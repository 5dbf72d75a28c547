"""Rows of the table as files: every cell that is data as JSON, functions by the names that the table knows them by.

A file is as little to be trusted as a checkpoint. Nothing in it is run; a name that no row of the table uses means
nothing; and whatever is not what a cell takes is refused with the cell's place in the file.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from weightscope.checkpoint.config import LARGEST
from weightscope.checkpoint.jsontext import parse_json, read_small
from weightscope.errors import CheckpointError
from weightscope.families.config import KEYS
from weightscope.families.family import Family, In, When
from weightscope.families.rope import SMALLEST_BASE
from weightscope.families.rows import FAMILIES

MAX_FILE_BYTES = 200_000
LONGEST_STRING = 200
MOST_ITEMS = 200  # of a list or an object
LARGEST_NUMBER = 1e12
NOT_STORED = ("gguf", "origin")  # GGUF files are read by the table's rows alone; where a row is from, its file says
RANGES = {
    "eps": (0.0, 1.0),
    "theta": (SMALLEST_BASE, LARGEST_NUMBER),
    "fraction": (1e-6, 1.0),
    "kv_heads": (1, LARGEST),
}
CHOICES = {"scope": ("shared", "own", "listed", "joint")}
PROOF = re.compile(r"transformers \d+(\.\w{1,20}){0,4}", re.ASCII)
KIND = "is"  # key of the name of a cell's class
MAPPINGS = (dict, Mapping)
CONDITIONS: dict[type, tuple[str, ...]] = {When: ("key", "value"), In: ("layer_type",)}


class _MisfitError(ValueError):
    """What stands in a file where a cell takes something else."""

    def __init__(self, where: str, found: object, wanted: str) -> None:
        super().__init__(f"'{where}' is {str(found)[:60]}; {wanted} was expected")


def as_data(value: Any) -> Any:
    """A row or a cell as JSON holds it; cells that equal their default are left out.

    Raises
    ------
    ValueError
        It holds a function that no module of `families` has under a name.
    """
    if type(value) in CONDITIONS:
        return {KIND: type(value).__name__} | {name: as_data(own) for name, own in vars(value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: getattr(value, one.name) for one in fields(value) if not _usual(one, value)}
        return {KIND: type(value).__name__} | {name: as_data(cell) for name, cell in own.items()}
    if callable(value):
        factory = _factory(value)
        return name_of(value) if factory is None else {KIND: name_of(factory)} | as_data(_closed_over(value))
    if isinstance(value, Mapping):
        return {key: as_data(own) for key, own in value.items()}
    return [as_data(own) for own in value] if isinstance(value, tuple | list) else value


def _usual(one: Any, of: Any) -> bool:
    """A field that a file need not hold."""
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return one.name in NOT_STORED or getattr(of, one.name) == default


def name_of(function: Callable[..., Any]) -> str:
    """A function's module and name: "layouts.separate"."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _factory(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that has made another; None of one that stands in a module by itself."""
    outer, _, inner = function.__qualname__.partition(".<locals>.")
    return vars(sys.modules[function.__module__])[outer] if inner else None


def _closed_over(function: Any) -> dict[str, Any]:
    """What its maker was called with, by the parameters' names."""
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


def _cells(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What a row computes with, functions and callable classes, each with the name of the cell it stands in."""
    if type(value) in CONDITIONS:
        for key, own in value.cells.items():
            yield from _cells(own, key.rpartition("__")[2])
    elif is_dataclass(value):
        if callable(value):
            yield name, type(value)
        for one in fields(value):
            if one.name not in NOT_STORED:
                yield from _cells(getattr(value, one.name), one.name)
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from _cells(own, name)
    elif isinstance(value, tuple | list):
        for own in value:
            yield from _cells(own, name)
    elif callable(value):
        yield name, value


@cache
def _known() -> dict[str, dict[str, Callable[..., Any]]]:
    """The functions that the table has in a cell, and what makes such: by the cell's name and theirs."""
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for cell, own in (each for row in FAMILIES for each in _cells(row)):
        maker = own if isinstance(own, type) else _factory(own)
        name = maker.__name__ if isinstance(maker, type) else name_of(maker or own)
        found.setdefault(cell, {})[name] = own if maker is None else partial(maker)
    return found


def read_rows(path: Path) -> tuple[Family, ...]:
    """The rows in a file that `write_rows` wrote, or a person.

    Raises
    ------
    CheckpointError
        The file cannot be read, or something in it is not what a cell takes.
    """
    given = parse_json(read_small(path, MAX_FILE_BYTES), file=path)
    try:
        listed, proof = given.get("families"), given.get("proved_against")
        if unknown := given.keys() - {"families", "proved_against"}:
            raise _MisfitError(min(unknown), given[min(unknown)], "families or proved_against")
        if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_ITEMS:
            raise _MisfitError("families", listed, f"a list of 1 to {MOST_ITEMS} rows")
        if proof is not None and not (isinstance(proof, str) and PROOF.fullmatch(proof)):
            raise _MisfitError("proved_against", proof, "transformers and its version")
        origin = f"adopted, proved against {proof}" if proof else f"unproved, from {path.name}"
        return tuple(_row(one, f"families[{i}]", origin) for i, one in enumerate(listed))
    except _MisfitError as problem:
        raise CheckpointError(str(problem), file=path) from None


def file_of(rows: Sequence[Family], proof: str) -> bytes:
    """What a file of rows holds; `proof` is what they were proved against, "transformers 5.23.0"."""
    stored = [{key: value for key, value in as_data(row).items() if key != KIND} for row in rows]
    return (json.dumps({"proved_against": proof, "families": stored}, indent=1) + "\n").encode()


def _row(given: Any, where: str, origin: str) -> Family:
    row: Family = _made(Family, given, where)
    for cell, value in (("name", row.name), ("model_types", row.model_types), ("prefixes", row.prefixes)):
        if not value:
            raise _MisfitError(f"{where}.{cell}", value, "one at least")
    if row.layer.count("{i}") != 1:
        raise _MisfitError(f"{where}.layer", row.layer, "a name with {i} for the layer's index")
    for modules in (row.query, row.key, row.value, row.output):
        if not modules:
            raise _MisfitError(where, "without a module", "a module each for query, key, value and output")
    if unknown := row.in_transformers.keys() - {one.name for one in fields(Family)}:
        raise _MisfitError(f"{where}.in_transformers", min(unknown), "the name of a cell")
    if unknown := row.keys.keys() - KEYS.keys():
        raise _MisfitError(f"{where}.keys", min(unknown), "one of " + ", ".join(KEYS))
    return replace(row, origin=origin)


def _made(kind: type, given: Any, where: str) -> Any:
    """A row or a cell of a class."""
    if not isinstance(given, Mapping):
        raise _MisfitError(where, given, f"an object: the cells of a {kind.__name__}")
    hints, own = get_type_hints(kind), {one.name: one for one in fields(kind) if one.name not in NOT_STORED}
    cells = {}
    for key, value in given.items():
        if key not in own and key != KIND:
            raise _MisfitError(f"{where}.{key}", value, "no such cell; one of " + ", ".join(own))
        if key != KIND:
            cells[key] = _value(hints[key], value, f"{where}.{key}")
    for name, one in own.items():
        if name not in cells and one.default is MISSING and one.default_factory is MISSING:
            raise _MisfitError(f"{where}.{name}", "missing", "a cell that every one has")
    return kind(**cells)


def _called(maker: Callable[..., Any], given: Mapping[str, Any], where: str) -> Any:
    """What a function makes of what the file gives for its parameters, which have its names."""
    hints, parameters = get_type_hints(maker), signature(maker).parameters
    if given.keys() - {KIND} != parameters.keys():
        raise _MisfitError(where, ", ".join(given), f"an object with is, {', '.join(parameters)}")
    several = {name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL}
    kinds = {name: tuple[hints[name], ...] if name in several else hints[name] for name in parameters}  # type: ignore
    values = {name: _value(kind, given[name], f"{where}.{name}") for name, kind in kinds.items()}
    spread = [one for name in several for one in values.pop(name)]
    return maker(*spread, **values)


def _conditional(condition: type, given: Mapping[str, Any], where: str) -> When | In:
    """Cells that change with a value of the config, or with a layer's type."""
    keys = CONDITIONS[condition]
    if given.keys() != {KIND, *keys, "cells"}:
        raise _MisfitError(where, given, f"an object with is, {', '.join(keys)} and cells")
    cells = _value(dict[str, Any], given["cells"], f"{where}.cells")
    own = {}
    for name, value in cells.items():
        whole, _, part = name.partition("__")
        hints, place = get_type_hints(Family), f"{where}.cells.{name}"
        if whole not in hints or whole in NOT_STORED:
            raise _MisfitError(place, value, "the name of a cell")
        wanted = hints[whole]
        if part:
            parts = [get_type_hints(one) for one in _alternatives(wanted) if is_dataclass(one)]
            wanted = next((hint[part] for hint in parts if part in hint), None)
            if wanted is None:
                raise _MisfitError(place, value, "the name of a cell, and of a part of it")
        own[name] = _value(wanted, value, place)
    first, *others = (_value(Any if key == "value" else str, given[key], f"{where}.{key}") for key in keys)
    made: When | In = condition(first, *others, **own)
    return made


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def _value(wanted: Any, given: Any, where: str, name: str = "") -> Any:
    """What a cell takes, made of what JSON gives for it."""
    alternatives = _alternatives(wanted)
    free = Any in alternatives or object in alternatives
    name = name or where.rpartition(".")[2].rpartition("__")[2]
    known = _known().get(name, {}) if any(get_origin(one) is Callable for one in alternatives) else {}
    if given is None and (free or NoneType in alternatives):
        return None
    if isinstance(given, bool) and (free or bool in alternatives):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return _number(alternatives, given, where, RANGES.get(name))
    if isinstance(given, str):
        functions = {key: own for key, own in known.items() if not isinstance(own, partial)}
        return functions[_one_of(functions, given, where)] if known else _string(alternatives, given, where, name)
    if isinstance(given, list | Mapping) and len(given) > MOST_ITEMS:
        raise _MisfitError(where, f"{len(given)} items", f"{MOST_ITEMS} at most")
    if isinstance(given, list):
        return _several(alternatives, given, where)
    if isinstance(given, Mapping):
        if condition := next((one for one in CONDITIONS if one in alternatives), None):
            return _conditional(condition, given, where)
        listed = [one for one in alternatives if isinstance(one, type) and is_dataclass(one)]
        kinds = {one.__name__: one for base in listed for one in (base, *base.__subclasses__())}
        makers = {key: own.func for key, own in known.items() if isinstance(own, partial)}
        if kinds or makers:
            maker = (kinds | makers)[_one_of(kinds | makers, given.get(KIND), where)]
            return _made(maker, given, where) if isinstance(maker, type) else _called(maker, given, where)
        inner = next((get_args(one)[1] for one in alternatives if get_origin(one) in MAPPINGS), Any if free else None)
        if inner is not None:
            keys = [_string((str,), key, where) for key in given]
            return {key: _value(inner, given[key], f"{where}.{key}", name) for key in keys}
    raise _MisfitError(where, given, _in_words(alternatives))


def _one_of(known: Mapping[str, Any], given: Any, where: str) -> str:
    if not isinstance(given, str) or given not in known:
        raise _MisfitError(where, given, "one of " + ", ".join(sorted(known)))
    return given


def _number(alternatives: tuple[Any, ...], given: float, where: str, within: tuple[float, float] | None) -> float:
    """A number that is neither absurd nor of another kind."""
    free = Any in alternatives or object in alternatives
    if not free and float not in alternatives and not (int in alternatives and isinstance(given, int)):
        raise _MisfitError(where, given, _in_words(alternatives))
    whole = int in alternatives and isinstance(given, int)
    smallest, largest = within or ((-LARGEST, LARGEST) if whole else (-LARGEST_NUMBER, LARGEST_NUMBER))
    if not smallest <= given <= largest:  # NaN fails
        raise _MisfitError(where, given, f"a number from {smallest:g} to {largest:g}")
    return given if whole or free else float(given)


def _string(alternatives: tuple[Any, ...], given: str, where: str, name: str = "") -> str:
    """A name that may be shown, and formatted with a layer's index."""
    if not {str, Any, object} & {*alternatives}:
        raise _MisfitError(where, given, _in_words(alternatives))
    bare = given.replace("{i}", "")
    if len(given) > LONGEST_STRING or not given.isprintable() or "{" in bare or "}" in bare:
        raise _MisfitError(where, given, f"a plain name of {LONGEST_STRING} characters at most")
    choices = CHOICES.get(name, (given,))
    if given not in choices:
        raise _MisfitError(where, given, "one of " + ", ".join(choices))
    return given


def _several(alternatives: tuple[Any, ...], given: list[Any], where: str) -> Any:
    """A list, as the tuple that a cell holds or, among values of a config, as it stands."""
    places = [f"{where}[{i}]" for i in range(len(given))]
    for one in alternatives:
        if get_origin(one) is tuple:
            kinds = get_args(one)
            kinds = (kinds[0],) * len(given) if kinds[1:] == (...,) else kinds
            if len(kinds) == len(given):
                return tuple(_value(*each) for each in zip(kinds, given, places, strict=True))
    if Any in alternatives or object in alternatives:
        return [_value(Any, *each) for each in zip(given, places, strict=True)]
    raise _MisfitError(where, given, _in_words(alternatives))


def _in_words(alternatives: tuple[Any, ...]) -> str:
    names = (str(getattr(one, "__name__", one)).replace("NoneType", "null") for one in alternatives)
    return " or ".join(dict.fromkeys(names))
