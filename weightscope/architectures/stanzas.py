"""Rows of TOML files: a stanza becomes a `Family`, and a `Family` a stanza.

A file may come from anybody. Nothing in it is run: a function is a name that `registry` lists for its cell, and
whatever does not fit its cell is refused with the file, line, stanza and cell.
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from weightscope.architectures.cells import Biases, Inputs, Outputs, StoredNorm
from weightscope.architectures.config import KEYS, values_of
from weightscope.architectures.family import Family, In, Unless, When
from weightscope.architectures.layouts import ORDERS
from weightscope.architectures.registry import FUNCTIONS, name_of
from weightscope.architectures.rope import AXES, SMALLEST_BASE, GridRope, Rope, WindowRope
from weightscope.architectures.schema import CELLS, CONDITIONS, GROUPS, NULL, OWN, STATED, STEPS
from weightscope.architectures.step import Step
from weightscope.architectures.steps import step_classes
from weightscope.architectures.steps.head_factors import FACTORS
from weightscope.attention.gathered import GATES
from weightscope.checkpoint.config import LARGEST, read_small
from weightscope.errors import CheckpointError, nearest

MAX_FILE_BYTES = 200_000
LONGEST_LINE = 1000  # tomllib's time grows with the square of the dots in a key
LONGEST_STRING = 200
MOST_ITEMS = 200  # of a list or a table
MOST_DEEP = 20  # rows that start from one another
LARGEST_NUMBER = 1e12
RANGES = {
    "eps": (0.0, 1.0),
    "theta": (SMALLEST_BASE, LARGEST_NUMBER),
    "fraction": (1e-6, 1.0),
    "kv_heads": (1, LARGEST),
}
CHOICES = {
    "scope": ("shared", "own", "listed", "joint"),
    "axes": tuple(AXES),
    "kind": tuple(GATES),
    "to": ("queries", "keys"),
    "order": ORDERS,
    "times": tuple(FACTORS),
}
# What rows are proved against: transformers, or a class of the user's own; and how far they were.
PROOF = re.compile(
    r"(transformers \d+(\.\w{1,20}){0,4}|[\w.]{1,100}:[\w.]{1,100} \(PyTorch [\w.+]{1,40}\))"
    r"(; unproved beyond [a-z0-9, ]{1,120})?",
    re.ASCII,
)
DIGEST = re.compile(r"([0-9a-f]{16})?", re.ASCII)
NORMS = {"rms": False, "layer": True}  # by name: whether it centres
NORM_PARTS = ("bias", "offset", "eps", "without", "gain", "shift")
BIASES = {"qkv": ("query", "key", "value"), "q": ("query",), "k": ("key",), "v": ("value",), "out": ("output",)}
KINDS = {"positions.rope": Rope, "positions.grid": GridRope, "positions.grid_in_windows": WindowRope}
PROJECTIONS = ("query", "key", "value", "output")
BRACES = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
BARE = re.compile(r"[A-Za-z0-9_-]+")


class MisfitError(ValueError):
    """What a file has where a cell takes something else."""

    def __init__(self, where: str, value: object, wanted: str) -> None:
        super().__init__(f"{where} is {str(value)[:60]}; {wanted} was expected" if wanted else where)
        self.where = where


# ---- From TOML to a row.


class File:
    """The stanzas of one file, each a row once it is asked for.

    `elsewhere` gives the row of a stanza that this text has not. `trusted` files come with the package, and `text` may
    be a part of a `whole` file.
    """

    def __init__(
        self, text: str, file: object, elsewhere: Callable[[str], Family | None], trusted: bool = False, whole: str = ""
    ) -> None:
        self.text, self.file, self.elsewhere, self.trusted = whole or text, file, elsewhere, trusted
        self.origin = self.proved_for = ""
        self.rows: dict[str, Family] = {}
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"is not valid TOML ({error})", file=file) from None
        self.stanzas: dict[str, Mapping[str, Any]] = {}
        try:
            proof = content.pop("proved_against", None)
            if proof is not None and not (isinstance(proof, str) and PROOF.fullmatch(proof)):
                raise MisfitError(
                    "proved_against", proof, "transformers and its version, or module:Class (PyTorch version)"
                )
            tried = content.pop("tried_against", None)
            if tried is not None and (proof or not (isinstance(tried, str) and PROOF.fullmatch(tried))):
                raise MisfitError("tried_against", tried, "transformers and its version, in place of proved_against")
            self.proved_for = content.pop("proved_for", "")
            if not (isinstance(self.proved_for, str) and DIGEST.fullmatch(self.proved_for)):
                raise MisfitError("proved_for", self.proved_for, "16 hexadecimal digits")
            if not trusted and tried:
                self.origin = f"adopted, unproved at its own size (tiny models of {tried})"
            elif not trusted:
                self.origin = f"adopted, proved against {proof}" if proof else f"unproved, from {Path(str(file)).name}"
            for name, stanza in content.items():
                self.stanzas |= _stanzas(name, stanza)
            if not 1 <= len(self.stanzas) <= (MOST_ITEMS if not trusted else LARGEST):
                raise MisfitError("the file", f"{len(self.stanzas)} stanzas", f"1 to {MOST_ITEMS} stanzas")
        except MisfitError as problem:
            raise self.error(str(problem), problem.where) from None

    def error(self, problem: str, where: str) -> CheckpointError:
        """An error that names the line of a stanza, or of a cell in it: `where` is "[llama] heads.layout"."""
        line = line_of(self.text, where)
        return CheckpointError(f"line {line}: {problem}" if line else problem, file=self.file)

    def all(self) -> tuple[Family, ...]:
        """Every row, in order, those of other names after the stanza that has them."""
        return tuple(row for name in self.stanzas for row in self.named(name))

    def named(self, stanza: str) -> Iterator[Family]:
        """The row of a stanza, as readers have it, and its aliases."""
        row, cells = self.row(stanza), self.stanzas[stanza]
        row = row.but(**{group: None for group in STATED if group not in cells})
        yield row
        for alias in _strings(cells.get("alias", ()), f"[{stanza}] alias"):
            yield replace(row, gguf=None, mlp=None).but(name=alias, model_types=(alias,), defaults=values_of((alias,)))

    def row(self, stanza: str, above: tuple[str, ...] = ()) -> Family:
        """The row of a stanza with all that it inherits."""
        if stanza in self.rows:
            return self.rows[stanza]
        cells = self.stanzas[stanza]
        where = f"[{stanza}]"
        try:
            like = cells.get("like")
            base = None
            if like is not None:
                like = _string((str,), like, f"{where} like")
                if like in above or like == stanza or len(above) > MOST_DEEP:
                    raise MisfitError(f"{where} like", like, "a row that does not start from this one")
                base = self.row(like, (*above, stanza)) if like in self.stanzas else self.elsewhere(like)
                if base is None:
                    known = nearest(like, self.stanzas)
                    raise MisfitError(f"{where} like", like, f"a stanza of this file, or a row of the table{known}")
            self.rows[stanza] = row = replace(
                _row(stanza, cells, base, self.trusted), origin=self.origin, proved_for=self.proved_for
            )
        except MisfitError as problem:
            raise self.error(str(problem), problem.where) from None
        return row


def read_rows(path: Path, elsewhere: Callable[[str], Family | None]) -> tuple[Family, ...]:
    """The rows of a file that `adopt` saved, or a person wrote."""
    if path.suffix == ".json":
        raise CheckpointError("rows are TOML files now; `weightscope adopt SOURCE --save` writes one", file=path)
    data = read_small(path, MAX_FILE_BYTES)
    if max(map(len, data.split(b"\n"))) > LONGEST_LINE:
        raise CheckpointError(f"has a line of more than {LONGEST_LINE} bytes; no more are read", file=path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not valid TOML ({error})", file=path) from None
    return File(text, path, elsewhere).all()


def line_of(text: str, where: str) -> int:
    """The line of "[stanza] group.cell", or of the stanza if the cell has none; 0 where there is no such line."""
    lines = list(enumerate(text.splitlines(), 1))
    stanza, _, cell = where.rpartition("] ") if "] " in where else ("", "", where)
    name = stanza.removeprefix("[") or where.strip("[]")
    header = re.compile(rf'\s*\[+\s*"?{re.escape(name)}"?\s*[\].]')
    start = next((number for number, line in lines if header.match(line)), 0)
    if stanza:
        after = [number for number, line in lines[start:] if line.startswith("[") and not header.match(line)]
        lines = lines[start : after[0] - 1 if after else None]
    keys = [re.escape(key) for key in re.split(r"[.\[\] ]+", cell) if key]
    for count in range(len(keys), 0, -1):
        dotted = re.compile(r'\s*"?' + r'"?\s*\.\s*"?'.join(keys[:count]) + r'"?\s*[=.]')
        if number := next((number for number, line in lines if dotted.match(line)), 0):
            return number
    return start


def _stanzas(name: str, given: Any) -> dict[str, Mapping[str, Any]]:
    """A row, and the rows of its towers: tables whose name is of no cell."""
    if not isinstance(given, Mapping):
        raise MisfitError(name, given, "a stanza, [name] and its cells")
    if "." in name:
        raise MisfitError("the name of a stanza", name, "one without dots; `name` and `types` may have them")
    known = {*OWN, *GROUPS, *CELLS}
    towers = {key: part for key, part in given.items() if key not in known and isinstance(part, Mapping)}
    cells = {key: value for key, value in given.items() if key not in towers}
    return ({name: cells} if cells or not towers else {}) | {f"{name}.{key}": part for key, part in towers.items()}


def _row(stanza: str, given: Mapping[str, Any], base: Family | None, trusted: bool) -> Family:
    """The row that a stanza makes of the one it is like."""
    where = f"[{stanza}]"
    name, _, tower = stanza.partition(".")
    name = _string((str,), given.get("name", name), f"{where} name")
    own = {
        "name": name,
        "model_types": _strings(given.get("types", usual_types(name, base)), f"{where} types"),
        "tower": _string((str,), tower, f"{where} tower"),
    }
    for cell in ("name", "model_types"):
        if not own[cell]:
            raise MisfitError(f"{where} {cell}", own[cell], "one at least")
    if "gguf" in given and not trusted:
        raise MisfitError(f"{where} gguf", "there", "no such cell: rows of the package alone read GGUF files")
    cells = {key: value for key, value in given.items() if key not in OWN}
    changes = read_cells(cells, where)
    if base is None:
        if missing := [cell for cell in ("layer", "heads.layout", "heads.out") if CELLS[cell].field not in changes]:
            raise MisfitError(f"{where} {missing[0]}", "missing", "a cell that every row has, or inherits with `like`")
        base = BLANK
    changes = _on(base, changes)
    row = base.but(defaults=values_of(own["model_types"])).but(**own, **changes)
    row = replace(row, defaults={key: value for key, value in row.defaults.items() if value is not None})
    if row.layer.count("{i}") != 1:
        raise MisfitError(f"{where} layer", row.layer, "a name with {i} for the layer's index")
    if not row.prefixes:
        raise MisfitError(f"{where} prefixes", "empty", "one at least")
    if not all((row.query, row.key, row.value, row.output)):
        raise MisfitError(f"{where} heads", "without a module", "a module each for q, k, v and out")
    if unknown := row.keys.keys() - KEYS.keys():
        raise MisfitError(f"{where} config.keys", min(unknown), "one of " + ", ".join(KEYS))
    return row


def usual_types(name: str, base: Family | None) -> tuple[str, ...]:
    """The model_types of a row that does not say them: its name, or those of the stack of the same name it is like."""
    return base.model_types if base is not None and base.name == name else (name,)


def _no_layout(*_: Any) -> Any:
    raise NotImplementedError


BLANK = Family(
    name="", model_types=(), prefixes=("",), layer="", layout=_no_layout, query="", key="", value="", output="",
    inputs=Inputs(), norm=None,
)  # fmt: skip


def _on(base: Family, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of parts of a cell that the row has not, made changes of the cell."""
    if any(name.startswith("outputs__") for name in changes) and base.outputs is None and "outputs" not in changes:
        changes = {"outputs": Outputs(None)} | changes
    for group in STATED:
        if parts := {
            name.removeprefix(f"{group}__"): changes.pop(name) for name in [*changes] if name.startswith(f"{group}__")
        }:
            current = getattr(base, group)
            if group == "gguf" and current is not None:
                modules = {**current.modules, **parts.pop("modules", {})}
                parts |= {"modules": {key: module for key, module in modules.items() if module}}
                parts = {"experts": False} | parts
            changes[group] = _hint_class(group)(**parts) if current is None else replace(current, **parts)
    return changes


def read_cells(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Changes of a row, as `Family.but` takes them, of the cells in a stanza or in a condition."""
    changes: dict[str, Any] = {}
    for key, value in given.items():
        place = f"{where} {key}".strip()
        if key in CELLS:
            changes |= _cell(key, value, place)
        elif key not in GROUPS:
            known = [name for name in (*CELLS, *GROUPS, *OWN) if "." not in name]
            raise MisfitError(place, value, "no such cell" + (nearest(key, known) or "; one of " + ", ".join(known)))
        elif value is False and key != STEPS:
            changes[key] = None
        elif value is True and key in STATED:
            continue
        elif isinstance(value, Mapping) and key == STEPS:
            for name, content in value.items():
                changes[f"{STEPS}__{name}"] = _step(name, content, f"{place}.{name}")
        elif isinstance(value, Mapping):
            for part, content in value.items():
                if f"{key}.{part}" not in CELLS:
                    known = [name for name in CELLS if name.startswith(f"{key}.")]
                    raise MisfitError(f"{place}.{part}", content, "no such cell; one of " + ", ".join(known))
                changes |= _cell(f"{key}.{part}", content, f"{place}.{part}")
        else:
            raise MisfitError(place, value, "a table of cells")
    return changes


def _cell(name: str, given: Any, where: str) -> dict[str, Any]:
    field = CELLS[name].field
    if name == "heads.modules":
        return dict(zip(PROJECTIONS, _expanded(given, where), strict=True))
    if name == "heads.qkv":
        module = _value(str, given, where)
        return {"query": module, "key": module, "value": module}
    if name == "heads.bias":
        return {field: _biases(given, where)}
    if name in ("when", "in"):
        if not isinstance(given, list) or len(given) > MOST_ITEMS:
            raise MisfitError(where, given, f"a list of {MOST_ITEMS} tables at most")
        return {field: tuple(_condition(name, each, f"{where}[{i}]") for i, each in enumerate(given))}
    if name == "in_transformers":
        if not isinstance(given, Mapping):
            raise MisfitError(where, given, "a table of cells")
        return {field: read_cells(given, where)}
    wanted = KINDS[name] | None if name in KINDS else _hint(field)
    return {field: _value(wanted, given, where, field.rpartition("__")[2])}


def _step(name: str, given: Any, where: str) -> Step | None:
    """A rare mechanism by its name; false takes it away."""
    known = step_classes()
    if name not in known:
        raise MisfitError(where, given, "no such step; one of " + ", ".join(sorted(known)) + nearest(name, known))
    step: Step | None = None if given is False else _made(known[name], given, where)
    return step


def _expanded(given: Any, where: str) -> list[str]:
    """Four names of one with the parts in which they differ in braces."""
    match = BRACES.fullmatch(given) if isinstance(given, str) else None
    if match is None or match[2].count(",") != 3:
        raise MisfitError(where, given, "four modules, as self_attn.{q,k,v,o}_proj")
    return [_string((str,), match[1] + part + match[3], where) for part in match[2].split(",")]


def _biases(given: Any, where: str) -> Biases:
    if not isinstance(given, Mapping):
        flag = _value(bool | str, given, where)
        return Biases(flag, flag, flag, flag)
    if unknown := given.keys() - BIASES.keys():
        raise MisfitError(f"{where}.{min(unknown)}", given[min(unknown)], "one of " + ", ".join(BIASES))
    flags = {name: _value(bool | str, flag, f"{where}.{name}") for name, flag in given.items()}
    return Biases(**{part: flag for name, flag in flags.items() for part in BIASES[name]})


def _condition(kind: str, given: Any, where: str) -> When | In:
    starts = [start for start in CONDITIONS[kind] if isinstance(given, Mapping) and given.keys() >= {*start}]
    if len(starts) != 1:
        wanted = " or ".join(" and ".join(start) for start in CONDITIONS[kind])
        raise MisfitError(where, given, f"a table with {wanted}")
    start = starts[0]
    key = _string((str,), given[start[0]], f"{where}.{start[0]}")
    cells = read_cells({name: value for name, value in given.items() if name not in start}, where)
    if "gguf" in given:
        raise MisfitError(f"{where}.gguf", "there", "no such cell in a condition")
    if kind == "in":
        return In(key, **cells)
    return (When if start[1] == "is" else Unless)(key, _value(Any, given[start[1]], f"{where}.{start[1]}"), **cells)


@cache
def _hint(field: str) -> Any:
    """The type of a field, or of a part of one."""
    cell_name, _, part = field.partition("__")
    return _parts_of(_hint_class(cell_name))[0][part] if part else _parts_of(Family)[0][cell_name]


def _hint_class(field: str) -> type:
    return next(kind for kind in _alternatives(_parts_of(Family)[0][field]) if is_dataclass(kind))  # type: ignore


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)


def _is_callable(wanted: Any) -> bool:
    return get_origin(wanted) is Callable or (get_origin(wanted) is not None and "Callable" in str(get_origin(wanted)))


def _value(wanted: Any, given: Any, where: str, name: str = "") -> Any:
    """What a cell takes, made of what TOML gives for it."""
    kinds = _alternatives(wanted)
    free = Any in kinds or object in kinds
    name = name or re.split(r"[ .]", where)[-1]
    if free and given == NULL:
        return None
    if given is False and NoneType in kinds and bool not in kinds:
        return None
    if any(_is_callable(kind) for kind in kinds):
        return _function(FUNCTIONS.get(name, {}), given, where)
    if StoredNorm in kinds:
        return _norm(given, where)
    if made := next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None):
        return _made(made, given, where)
    if isinstance(given, bool) and (free or bool in kinds):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return _number(kinds, given, where, RANGES.get(name))
    if isinstance(given, str):
        if free or str in kinds:
            return _string(kinds, given, where, name)
        given = [given]
    if isinstance(given, list | Mapping) and len(given) > MOST_ITEMS:
        raise MisfitError(where, f"{len(given)} items", f"{MOST_ITEMS} at most")
    if isinstance(given, list):
        return _several(kinds, given, where, name)
    if isinstance(given, Mapping):
        inner = next(
            (get_args(kind)[1] for kind in kinds if get_origin(kind) in (dict, Mapping)), Any if free else None
        )
        if inner is not None:
            keys = [_string((str,), key, where) for key in given]
            return {key: _value(inner, given[key], f"{where}.{key}", name) for key in keys}
    raise MisfitError(where, given, _in_words(kinds))


def _function(known: Mapping[str, Callable[..., Any]], given: Any, where: str) -> Any:
    """A function by its name, "separate"; one that is made for the row by its name and parameters, { stage = 0 }."""
    arguments: Any = True
    if isinstance(given, Mapping) and len(given) == 1:
        ((given, arguments),) = given.items()
    if not isinstance(given, str) or given not in known:
        near = nearest(given, known) if isinstance(given, str) else ""
        raise MisfitError(where, given, "one of " + ", ".join(sorted(known)) + near)
    function = known[given]
    if isinstance(function, type):
        return _made(function, arguments, f"{where}.{given}")
    if arguments is not True:
        raise MisfitError(f"{where}.{given}", arguments, "no parameters")
    return function


@cache
def _parts_of(kind: type) -> tuple[dict[str, Any], dict[str, Field[Any]]]:
    """The types of a cell's parts, and the parts."""
    return get_type_hints(kind), {part.name: part for part in fields(kind)}


def _made(kind: type, given: Any, where: str) -> Any:
    """A cell of several parts: a table; its first part alone where that says all; or true for the usual parts."""
    hints, parts = _parts_of(kind)
    if given is True:
        given = {}
    elif not isinstance(given, Mapping):
        given = {next(iter(parts)): given}
    values = {}
    for name, value in given.items():
        if name not in parts:
            raise MisfitError(f"{where}.{name}", value, "no such part; one of " + ", ".join(parts))
        values[name] = _value(hints[name], value, f"{where}.{name}")
    for name, part in parts.items():
        if name not in values and part.default is MISSING and part.default_factory is MISSING:
            raise MisfitError(f"{where}.{name}", "missing", f"a part that every {name_of(kind)} has")
    return kind(**values)


def _norm(given: Any, where: str) -> StoredNorm:
    """ "rms:input_layernorm", or { norm = "rms:input_layernorm", offset = 1 }."""
    parts = {"norm": given} if isinstance(given, str) else given
    if not isinstance(parts, Mapping) or not isinstance(parts.get("norm"), str):
        raise MisfitError(where, given, 'a norm, "rms:module" or "layer:module", or a table with it')
    kind, colon, module = parts["norm"].partition(":")
    if kind not in NORMS or not colon:
        raise MisfitError(where, parts["norm"], '"rms:module" or "layer:module"')
    hints, _ = _parts_of(StoredNorm)
    more = {}
    for name, value in parts.items():
        if name == "norm":
            continue
        if name not in NORM_PARTS:
            raise MisfitError(f"{where}.{name}", value, "one of norm, " + ", ".join(NORM_PARTS))
        more[name] = _value(hints[name], value, f"{where}.{name}")
    centred = NORMS[kind]
    return StoredNorm(_string((str,), module, where), centred, **({"bias": centred} | more))


def _number(kinds: tuple[Any, ...], given: float, where: str, within: tuple[float, float] | None) -> float:
    """A number that is neither absurd nor of another kind."""
    free = Any in kinds or object in kinds
    if not free and float not in kinds and not (int in kinds and isinstance(given, int)):
        raise MisfitError(where, given, _in_words(kinds))
    is_whole = int in kinds and isinstance(given, int)
    smallest, largest = within or ((-LARGEST, LARGEST) if is_whole else (-LARGEST_NUMBER, LARGEST_NUMBER))
    if not smallest <= given <= largest:  # NaN fails
        raise MisfitError(where, given, f"a number from {smallest:g} to {largest:g}")
    return given if is_whole or free else float(given)


def _string(kinds: tuple[Any, ...], given: Any, where: str, name: str = "") -> str:
    """A name that may be shown, and formatted with a layer's index."""
    if not isinstance(given, str) or not {str, Any, object} & {*kinds}:
        raise MisfitError(where, given, _in_words(kinds))
    bare = given.replace("{i}", "")
    if len(given) > LONGEST_STRING or not given.isprintable() or "{" in bare or "}" in bare:
        raise MisfitError(where, given, f"a plain name of {LONGEST_STRING} characters at most")
    if given not in (choices := CHOICES.get(name, (given,))):
        raise MisfitError(where, given, "one of " + ", ".join(choices))
    return given


def _strings(given: Any, where: str) -> tuple[str, ...]:
    return _value(tuple[str, ...], list(given) if isinstance(given, tuple) else given, where)


def _several(kinds: tuple[Any, ...], given: list[Any], where: str, name: str) -> Any:
    """A list, as the tuple that a cell holds or, among values of a config, as it is."""
    places = [f"{where}[{i}]" for i in range(len(given))]
    for kind in kinds:
        if get_origin(kind) is tuple:
            inner = get_args(kind)
            inner = (inner[0],) * len(given) if inner[1:] == (...,) else inner
            if len(inner) == len(given):
                return tuple(_value(*each, name) for each in zip(inner, given, places, strict=True))
    if Any in kinds or object in kinds:
        return [_value(Any, *each) for each in zip(given, places, strict=True)]
    raise MisfitError(where, given, _in_words(kinds))


def _in_words(kinds: tuple[Any, ...]) -> str:
    names = (str(getattr(kind, "__name__", kind)).replace("NoneType", "false") for kind in kinds)
    return " or ".join(dict.fromkeys(names))


# ---- From a row to TOML.

WIDTH = 130
NOT_WRITTEN = ("name", "model_types", "tower", "origin", "proved_for")


def stanza_of(row: Family, like: tuple[str, Family] | None = None, title: str = "", gguf: bool = False) -> str:
    """The stanza of a row: all its cells, or what differs from the row of another stanza."""
    title = title or titles([row])[0]
    named = title.partition(".")[0]
    base = (BLANK if like is None else like[1]).but(defaults=values_of(row.model_types))
    lines = [] if like is None else [f"like = {_text(like[0])}"]
    if row.name != named:
        lines.append(f"name = {_text(row.name)}")
    if row.model_types != usual_types(row.name, base):
        lines.append(f"types = {_text(row.model_types)}")
    cells = cells_of(row, base, gguf)
    tables = {key: cells.pop(key) for key in ("when", "in") if key in cells}
    lines += _lines(cells)
    for key, conditions in tables.items():
        written = [
            "{ " + ", ".join(f"{name} = {_text(value)}" for name, value in _flat(each).items()) + " }"
            for each in conditions
        ]
        if not written:
            lines.append(f"{key} = []")
        elif len(written) == 1 and len(key) + 7 + len(written[0]) <= WIDTH:
            lines.append(f"{key} = [{written[0]}]")
        elif all(len(line) + 5 <= WIDTH for line in written):
            lines += [f"{key} = [", *(f"    {line}," for line in written), "]"]
        else:
            for each in conditions:
                lines += ["", f"[[{_title(title)}.{key}]]", *_lines(each)]
    return "\n".join([f"[{_title(title)}]", *lines]) + "\n"


def _title(title: str) -> str:
    return ".".join(part if BARE.fullmatch(part) else _text(part) for part in title.split(".", 1))


def cells_of(row: Family, base: Family = BLANK, gguf: bool = False) -> dict[str, Any]:
    """The cells in which a row differs from another, by group, as TOML has them."""
    changes: dict[str, Any] = {}
    for field in fields(Family):
        new, old = getattr(row, field.name), getattr(base, field.name)
        if field.name in STATED:
            if new is not None and (gguf or field.name != "gguf"):
                changes |= _parts(field.name, new, old) or {field.name: True}
        elif field.name not in NOT_WRITTEN and not _same(new, old):
            changes |= _parts(field.name, new, old)
    return written_cells(changes, row)


def _parts(name: str, new: Any, old: Any) -> dict[str, Any]:
    """A change of a field as one of its parts, where the parts are cells."""
    if name == "defaults":
        return {name: {key: new.get(key) for key in {**old, **new} if new.get(key) != old.get(key) or key not in old}}
    if name == STEPS:
        gone = {step.name for step in old} - {step.name for step in new}
        return {f"{STEPS}__{step.name}": step for step in new if step not in old} | {
            f"{STEPS}__{name}": None for name in gone
        }
    if name not in ("inputs", "outputs", *STATED) or new is None:
        return {name: new}
    changes = {}
    for part in fields(new):
        value, usual = getattr(new, part.name), _default(part) if old is None else getattr(old, part.name)
        if part.name == "modules":  # added to those that are there
            known = {} if old is None else old.modules
            value = {key: value.get(key, "") for key in {**known, **value} if value.get(key) != known.get(key)}
            usual = {}
        elif part.name == "experts":  # not inherited
            usual = False
        if value != usual:
            changes[f"{name}__{part.name}"] = value
    return changes if changes or name in STATED else {f"{name}__norm": None}


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, tuple) and any(isinstance(each, When | In) for each in new):
        return [(type(each), vars(each)) for each in new] == [(type(each), vars(each)) for each in old]
    return bool(new == old)


def written_cells(changes: Mapping[str, Any], row: Family) -> dict[str, Any]:
    """Cells by group of changes of a row, as `Family.but` takes them."""
    left: dict[str, Any] = {}
    for name, value in changes.items():
        left |= _parts(name, value, getattr(row, name)) if name in ("inputs", "outputs") else {name: value}
    grouped: dict[str, Any] = {}
    for name, cell in CELLS.items():
        if name in ("heads.modules", "heads.qkv"):
            projections = PROJECTIONS if name == "heads.modules" else PROJECTIONS[:3]
            modules = [left.get(projection, "") for projection in projections]
            if all(modules) and len({*modules}) == {4: 4, 3: 1}[len(modules)]:
                _put(grouped, name, _braced(modules) if len(modules) == 4 else modules[0])
                left = {key: value for key, value in left.items() if key not in projections}
            continue
        if (cell.field in left and name not in KINDS) or (
            name in KINDS and cell.field in left and _fits(name, left["rope"])
        ):
            _put(grouped, name, _written(name, left.pop(cell.field), row))
    for name in [*left]:
        group, _, part = name.partition("__")
        if group == STEPS and part:
            _put(grouped, f"{STEPS}.{part}", _written(name, left.pop(name), row))
        elif name in ("outputs", *STATED) and left[name] in (None, True):
            grouped[name] = left.pop(name) or False
    if left:
        raise ValueError(f"no cell for {', '.join(left)}")
    return grouped


def _common(names: Sequence[str]) -> str:
    """The characters that all names begin with."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False)))


def _braced(names: Sequence[str]) -> str:
    """Names as one, the parts in which they differ in braces."""
    start = _common(names)
    end = _common([name[len(start) :][::-1] for name in names])[::-1]
    parts = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{start}{{{','.join(parts)}}}{end}"


def _fits(name: str, rope: Any) -> bool:
    return type(rope) is KINDS[name] or (rope is None and name == "positions.rope")


def _put(grouped: dict[str, Any], name: str, value: Any) -> None:
    group, _, part = name.partition(".")
    if part:
        grouped.setdefault(group, {})[part] = value
    else:
        grouped[name] = value


def _written(name: str, value: Any, row: Family) -> Any:
    """A cell's value as TOML holds it."""
    if name in ("when", "in"):
        return [_written_condition(each, row) for each in value]
    if name == "in_transformers":
        return written_cells(value, row)
    if name == "heads.bias":
        flags = {part: getattr(value, part) for part in ("query", "key", "value", "output")}
        if len({*map(repr, flags.values())}) == 1:
            return value.query
        short = (
            {"qkv": value.query}
            if repr(value.query) == repr(value.key) == repr(value.value)
            else {"q": value.query, "k": value.key, "v": value.value}
        )
        return {name: flag for name, flag in {**short, "out": value.output}.items() if flag is not False}
    return as_toml(value, config=name.startswith("config.defaults"))


def _written_condition(each: When | In, row: Family) -> dict[str, Any]:
    if isinstance(each, In):
        return {"layers": each.layer_type} | written_cells(each.cells, row)
    start = {"key": each.key, "is_not" if isinstance(each, Unless) else "is": as_toml(each.value, True)}
    return start | written_cells(each.cells, row)


def as_toml(value: Any, config: bool = False) -> Any:
    """Part of a row as TOML holds it: tables, lists, strings, numbers."""
    if value is None:
        return NULL if config else False
    if isinstance(value, StoredNorm):
        kind = next(name for name, centred in NORMS.items() if centred == value.centred)
        usual = StoredNorm(value.module, value.centred, value.centred)
        more = {name: getattr(value, name) for name in NORM_PARTS}
        more = {name: as_toml(part) for name, part in more.items() if part != getattr(usual, name)}
        return {"norm": f"{kind}:{value.module}", **more} if more else f"{kind}:{value.module}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value) if not _usual(part, value)}
        first = next(iter(fields(value)), None)
        table: Any = {name: as_toml(part) for name, part in parts.items()} or True
        if first is not None and first.default is MISSING and parts.keys() == {first.name}:
            short = table[first.name]
            table = short if isinstance(short, str | int | list) and not isinstance(short, bool) else table
        if not callable(value):
            return table
        return name_of(type(value)) if table is True else {name_of(type(value)): table}
    if callable(value):
        return name_of(value)
    if isinstance(value, Mapping):
        return {key: as_toml(part, config) for key, part in value.items()}
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str) and not config:
        return value[0]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1000 and not config:
        return int(value)
    return [as_toml(part, config) for part in value] if isinstance(value, tuple | list) else value


def _usual(part: Field[Any], value: Any) -> bool:
    return bool(getattr(value, part.name) == _default(part))


def _default(part: Field[Any]) -> Any:
    return part.default_factory() if part.default_factory is not MISSING else part.default


def _flat(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of a single cell under a dotted key."""
    return {
        (f"{key}.{next(iter(value))}" if key in GROUPS and isinstance(value, Mapping) and len(value) == 1 else key): (
            next(iter(value.values())) if key in GROUPS and isinstance(value, Mapping) and len(value) == 1 else value
        )
        for key, value in cells.items()
    }


def _lines(cells: Mapping[str, Any], before: str = "") -> list[str]:
    """Lines of cells: a group on one line if it fits, else a line for each of its cells."""
    lines: list[str] = []
    for key, value in (cells if before else _flat(cells)).items():
        name = before + _key(key)
        line = f"{name} = {_text(value)}"
        if len(line) > WIDTH and isinstance(value, Mapping):
            lines += _lines(value, f"{name}.")
        elif len(line) > WIDTH and isinstance(value, Sequence) and not isinstance(value, str):
            lines += [f"{name} = [", *_wrapped([_text(part) for part in value]), "]"]
        else:
            lines.append(line)
    return lines


def _wrapped(items: list[str]) -> list[str]:
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) + 6 > WIDTH:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return [f"    {line}" for line in lines]


def _key(key: str) -> str:
    """A key in TOML's notation; that of a cell keeps its dot."""
    return key if key in CELLS or BARE.fullmatch(key.removeprefix(f"{STEPS}.")) else _text(key)


def _text(value: Any) -> str:
    """A value in TOML's notation, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, float):
        return _number_text(value)
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(key)} = {_text(part)}" for key, part in _flat(value).items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def _number_text(value: float) -> str:
    """The shortest notation of a float: 1e6, 5e-5, 0.25."""
    plain = repr(value)
    digits, _, power = f"{value:e}".partition("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    exact = math.isfinite(value) and float(short) == value
    usual = short if exact and value and not 1e-3 <= abs(value) < 1e4 else plain
    return usual if "." in usual or "e" in usual else f"{usual}.0"


def file_of(rows: Sequence[Family], proof: str, *, proved: bool = True, digest: str = "") -> bytes:
    """What a file of rows holds.

    proof: What they were proved against, "transformers 5.23.0", or tried where they are not `proved`.
    digest: Of the config that they were proved with.
    """
    head = {"proved_against" if proved else "tried_against": proof, **({"proved_for": digest} if digest else {})}
    stanzas = [stanza_of(row, title=title) for row, title in zip(rows, titles(rows), strict=True)]
    lines = [f"{key} = {_text(value)}\n" for key, value in head.items()]
    return "\n".join(["".join(lines), *stanzas]).encode()


def titles(rows: Sequence[Family]) -> list[str]:
    """A stanza's name for each row, no two alike."""
    lines: list[str] = []
    for row in rows:
        name, number = row.name.replace(".", "-"), 2
        title = ".".join(filter(None, (name, row.tower)))
        while title in lines:
            title, number = ".".join(filter(None, (f"{name}-{number}", row.tower))), number + 1
        lines.append(title)
    return lines
