"""Rows of TOML files: a stanza becomes a `Family`, and a `Family` a stanza.

A file holds the rows of a lineage, a stanza each. The stanza's name is the row's name, and its
model_type unless `types` says more; `[whisper.encoder]` is the row of a tower. A stanza says what
differs from the row that it is `like`: a cell that it names is replaced, all others are inherited.
`false` takes a cell away, and `"null"` is null where a value of the config is meant.

The annotations of `Family` and of the classes in `cells` define the cells and their values. A file
may come from anybody. Nothing in it is run: a function is a name that FUNCTIONS lists for its cell,
and whatever does not fit its cell is refused with the file, line, stanza and cell.
"""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from weightscope.checkpoint.config import LARGEST, read_small
from weightscope.core.errors import CheckpointError, nearest
from weightscope.model.config import rope, rules
from weightscope.model.config.config import (
    KEYS,
    LARGEST_NUMBER,
    Every,
    OneOf,
    Within,
    all_full,
    listed_sizes,
    same_layer,
    stated,
    values_of,
)
from weightscope.model.layers import distances, layouts
from weightscope.model.layers.steps import Step, fault_of, step_classes
from weightscope.model.rows import cells, gguf
from weightscope.model.rows.cells import Biases, Names, StoredNorm
from weightscope.model.rows.family import Family, In, Unless, When

MAX_FILE_BYTES = 200_000
LONGEST_LINE = 1000  # tomllib's time grows with the square of the dots in a key
LONGEST_STRING = 200
MOST_ITEMS = 200  # items of a list or a table
MOST_DEEP = 20  # rows that start from one another
# Reference of a proof: transformers, or a class of the user's own; and the extent of the proof.
PROOF = re.compile(
    r"(transformers \d+(\.\w{1,20}){0,4}|[\w.]{1,100}:[\w.]{1,100} \(PyTorch [\w.+]{1,40}\))"
    r"(; unproved beyond [a-z0-9, ]{1,120})?",
    re.ASCII,
)
DIGEST = re.compile(r"([0-9a-f]{16})?", re.ASCII)
NORMS = {"rms": False, "layer": True}  # name of a norm -> it centres
EXPERT = "{e}"  # in the cell `also`: an expert's index
BRACES = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
LISTED = re.compile(r"\{([^{}]*,[^{}]*)\}")  # and not {i}
BARE = re.compile(r"[A-Za-z0-9_-]+")
NULL = "null"
ABOUT = ("like", "name", "types", "alias", "stages")  # a stanza's own words, never inherited
STAGE = "{s}"  # in cells of a stanza with `stages`: the index of the stage
STATED = ("gguf", "mlp")  # groups that are not inherited unless a stanza says `true`
# Keys that a condition begins with.
CONDITIONS = {"when": (("key", "is"), ("key", "is_not")), "in": (("layers",),)}
# Rows that stanzas of other files may start from.
ROOTS = (
    "gpt2",
    "llama",
    "bert",
    "vit",
    "clip.vision",
    "t5.encoder",
    "t5.decoder",
    "t5.cross",
    "bart.encoder",
    "bart.decoder",
    "bart.cross",
)

# Functions that a row may name, by cell; everything else in a row is data.
SOME_LAYERS = (
    rules.always,
    rules.listed,
    rules.windowed,
    rules.windowed_or_leading,
    rules.with_parameters,
    rules.windowed_if_any,
    rules.sliding,
    rules.with_base,
    rules.with_a_base,
)
NAMED: dict[str, tuple[Callable[..., Any], ...]] = {
    "layout": (
        layouts.separate,
        layouts.stacked,
        layouts.StackedAs,
        layouts.packed,
        layouts.grouped,
        layouts.grouped_with_loose_biases,
        layouts.gated,
        layouts.latent,
        layouts.latent_with_eps,
        layouts.latent_scaled,
        layouts.conv1d_fused,
        layouts.conv1d_crossing,
        layouts.by_dimension_and_head,
        layouts.grouped_convolutions,
        layouts.in_four_blocks,
        layouts.keys_with_values,
        layouts.keys_beside_values,
        layouts.scaled_by_dimension,
        layouts.loose_biases,
        layouts.content_and_positions,
        layouts.content_beside_positions,
        layouts.content_with_and_beside_positions,
    ),
    "scale": (
        rules.default_scale,
        rules.gpt2_scale,
        rules.unscaled,
        rules.mpt_scale,
        rules.multiplier,
        rules.query_scalar,
        rules.deepseek_scale,
        rules.multiplier_if_any,
        rules.factored,
        rules.deberta_scale,
        rules.deberta_v2_scale,
        rules.of_cosines,
        rules.of_doubled_heads,
    ),
    "rotates": SOME_LAYERS,
    "within": SOME_LAYERS,
    "arranged": (rope.interleaved, rope.contiguous, rope.height_and_width_first),
    "spelled": (rope.OneAfterAnother, rope.InTurn, rope.odd_and_even),
    "bias": (
        distances.alibi,
        distances.alibi_falcon,
        distances.relative_buckets,
        distances.Distances,
        distances.WindowTable,
        distances.WindowNetwork,
        distances.GeometricSlopes,
        distances.StoredSlopes,
    ),
    "formula": (distances.of_the_paper, distances.of_tensor2tensor),
    "layer_types": (
        all_full,
        stated,
        Every,
        rules.first_and_second,
        rules.mllama_layers,
        rules.AttentionIn,
        rules.ByPeriod,
        rules.by_blocks,
        rules.kimi_layers,
        rules.in_alternation,
        rules.blocks_with_attention,
        rules.in_turn,
        rules.positions_first,
        rules.one_level,
        rules.from_max_window_layers,
        rules.fourth_from_last,
        rules.behind_dense,
        rules.before_max_window_layers,
        rules.windows_if_used,
        rules.windows_if_any,
        rules.windows_without_rotation,
        rules.chunks_with_rotation,
    ),
    "sizes": (
        listed_sizes,
        rules.own_heads,
        rules.twice_where_sliding,
        rules.global_sizes,
        rules.groups_by_layer,
    ),
    "derived": (
        rules.OfHalf,
        rules.heads_of_64,
        rules.Stage,
        rules.grouping_stages,
        rules.half_the_heads,
        rules.of_fusion,
        rules.heads_of_attn_config,
        rules.heads_of_blocks,
        rules.part_that_turns,
        rules.sizes_of_parts,
        rules.loops_of_losses,
        rules.adjusted_width,
    ),
    "stored_layer": (same_layer, rules.half, rules.shared_groups),
    "config": (
        cells.nothing_more,
        gguf.gemma_scalar,
        gguf.stablelm_config,
        gguf.granite_config,
        gguf.minicpm_config,
        gguf.ministral_config,
        gguf.step_config,
        gguf.gemma4_config,
        gguf.falcon_config,
        gguf.mpt_config,
        gguf.neox_config,
        gguf.bert_config,
        gguf.latent_config,
        gguf.indexed_config,
        gguf.glm4_config,
        gguf.delta_config,
        gguf.mamba2_config,
        gguf.nemotron_config,
        gguf.lfm2_config,
        gguf.without_multipliers,
        gguf.t5_config,
    ),
}


def name_of(function: Callable[..., Any]) -> str:
    """A function's name in a row: its own, or a class's in lower case ("every" for `Every`)."""
    name = function.__name__
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() if isinstance(function, type) else name


FUNCTIONS = {
    cell: {name_of(function): function for function in functions}
    for cell, functions in NAMED.items()
}


class StanzaError(ValueError):
    """A fault in a stanza, and its place: "[llama] heads.layout"."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


class MisfitError(StanzaError):
    """A value that does not fit its cell; `near` ends the message with a "did you mean"."""

    def __init__(self, where: str, value: object, wanted: str, near: str = "") -> None:
        super().__init__(where, f"{where} is {str(value)[:60]}; {wanted} was expected{near}")


# ---- Cells.


@cache
def cells_of(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """Cells of a class by name, each with the type of its value."""
    hints = get_type_hints(kind, include_extras=True)
    return {part.name.rstrip("_"): (part, hints[part.name]) for part in fields(kind)}


@cache
def groups() -> dict[str, type]:
    """Groups of cells by name, each with its class."""
    classes: dict[str, type] = {}
    for name, (part, hint) in cells_of(Family).items():
        if part.metadata.get("group"):
            kinds = (kind for kind in _alternatives(hint) if isinstance(kind, type))
            classes[name] = next(kind for kind in kinds if is_dataclass(kind))
    return classes


def _unknown(what: str, name: str, where: str, known: Collection[str]) -> StanzaError:
    """The error for a name that no cell, size or step has."""
    advice = nearest(name, known) or f"; there are {', '.join(known)}"
    return StanzaError(where, f"{where}: no such {what}{advice}")


# ---- From TOML to a row.


class File:
    """The stanzas of one file, each a row once it is asked for.

    `elsewhere` gives rows of stanzas in other files. `trusted` files come with the package.
    """

    def __init__(
        self,
        text: str,
        file: object,
        elsewhere: Callable[[str], Family | None],
        trusted: bool = False,
    ) -> None:
        self.text, self.file, self.elsewhere, self.trusted = text, file, elsewhere, trusted
        self.origin = self.proved_for = ""
        self.rows: dict[str, Family] = {}
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"is not valid TOML ({error})", file=file) from None
        self.stanzas: dict[str, Mapping[str, Any]] = {}
        try:
            self._read_head(content)
            for name, stanza in content.items():
                self.stanzas |= _stanzas(name, stanza)
            count, most = len(self.stanzas), LARGEST if trusted else MOST_ITEMS
            if not 1 <= count <= most:
                raise MisfitError("the file", f"{count} stanzas", f"1 to {MOST_ITEMS} stanzas")
        except StanzaError as problem:
            raise self.error(str(problem), problem.where) from None

    def _read_head(self, content: dict[str, Any]) -> None:
        """Take the file's words about itself, before its stanzas."""
        proof, tried = content.pop("proved_against", None), content.pop("tried_against", None)
        if proof is not None and not (isinstance(proof, str) and PROOF.fullmatch(proof)):
            wanted = "transformers and its version, or module:Class (PyTorch version)"
            raise MisfitError("proved_against", proof, wanted)
        if tried is not None and (proof or not (isinstance(tried, str) and PROOF.fullmatch(tried))):
            wanted = "transformers and its version, in place of proved_against"
            raise MisfitError("tried_against", tried, wanted)
        self.proved_for = content.pop("proved_for", "")
        if not (isinstance(self.proved_for, str) and DIGEST.fullmatch(self.proved_for)):
            raise MisfitError("proved_for", self.proved_for, "16 hexadecimal digits")
        if not self.trusted and tried:
            self.origin = f"adopted, unproved at its own size (tiny models of {tried})"
        elif proof and not self.trusted:
            self.origin = f"adopted, proved against {proof}"
        elif not self.trusted:
            self.origin = f"unproved, from {Path(str(self.file)).name}"

    def error(self, problem: str, where: str) -> CheckpointError:
        """An error with the line of a stanza or of a cell; `where`: "[llama] heads.layout"."""
        line = line_of(self.text, where)
        return CheckpointError(f"line {line}: {problem}" if line else problem, file=self.file)

    def all(self) -> tuple[Family, ...]:
        """Every row, in order, aliases after their stanza."""
        return tuple(row for name in self.stanzas for row in self.named(name))

    def named(self, stanza: str) -> Iterator[Family]:
        """The row of a stanza, as readers have it, and its aliases."""
        row, given = self.row(stanza), self.stanzas[stanza]
        row = row.but(**{group: None for group in STATED if group not in given})
        row = row if "also" in given else row.but(also={})
        yield row
        for alias in _value(Names, given.get("alias", ()), f"[{stanza}] alias"):
            same = replace(row, gguf=None, mlp=None, also={})
            yield same.but(name=alias, types=(alias,), config__defaults=values_of((alias,)))

    def row(self, stanza: str, above: tuple[str, ...] = ()) -> Family:
        """The row of a stanza with all that it inherits."""
        if stanza in self.rows:
            return self.rows[stanza]
        given, where = self.stanzas[stanza], f"[{stanza}]"
        try:
            like, base = given.get("like"), None
            if like is not None:
                like = _value(str, like, f"{where} like")
                if like in above or like == stanza or len(above) > MOST_DEEP:
                    wanted = "a row that does not start from this one"
                    raise MisfitError(f"{where} like", like, wanted)
                if like in self.stanzas:
                    base = self.row(like, (*above, stanza))
                else:
                    base = self.elsewhere(like)
                if base is None:
                    wanted, near = "a stanza of this file, or a row of the table", self.stanzas
                    raise MisfitError(f"{where} like", like, wanted, nearest(like, near))
            row = _row(stanza, given, base, self.trusted)
        except StanzaError as problem:
            raise self.error(str(problem), problem.where) from None
        self.rows[stanza] = row = replace(row, origin=self.origin, proved_for=self.proved_for)
        return row


def read_rows(path: Path, elsewhere: Callable[[str], Family | None]) -> tuple[Family, ...]:
    """Rows of a file that `adopt` saved, or a person wrote."""
    if path.suffix == ".json":
        problem = "rows are TOML files now; `weightscope adopt SOURCE --save` writes one"
        raise CheckpointError(problem, file=path)
    data = read_small(path, MAX_FILE_BYTES)
    if max(map(len, data.split(b"\n"))) > LONGEST_LINE:
        problem = f"has a line of more than {LONGEST_LINE} bytes; no more are read"
        raise CheckpointError(problem, file=path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is not valid TOML ({error})", file=path) from None
    return File(text, path, elsewhere).all()


def line_of(text: str, where: str) -> int:
    """The line of "[stanza] group.cell", or of the stanza without the cell; 0 if there is none."""
    lines = list(enumerate(text.splitlines(), 1))
    stanza, _, cell = where.rpartition("] ") if "] " in where else ("", "", where)
    name = stanza.removeprefix("[") or where.strip("[]")
    header = re.compile(rf'\s*\[+\s*"?{re.escape(name)}"?\s*[\].]')
    start = next((number for number, line in lines if header.match(line)), 0)
    if stanza:
        later = [(number, line) for number, line in lines[start:] if line.startswith("[")]
        after = [number for number, line in later if not header.match(line)]
        lines = lines[start : after[0] - 1 if after else None]
    keys = [re.escape(key) for key in re.split(r"[.\[\] ]+", cell) if key]
    for count in range(len(keys), 0, -1):
        dotted = re.compile(r'\s*"?' + r'"?\s*\.\s*"?'.join(keys[:count]) + r'"?\s*[=.]')
        if number := next((number for number, line in lines if dotted.match(line)), 0):
            return number
    return start


def _stanzas(name: str, given: Any) -> dict[str, Mapping[str, Any]]:
    """A row, and the rows of its towers: tables whose name is no cell's."""
    if not isinstance(given, Mapping):
        raise MisfitError(name, given, "a stanza, [name] and its cells")
    if "." in name:
        raise MisfitError(
            "the name of a stanza", name, "one without dots; `name` and `types` may have them"
        )
    known = {*ABOUT, *cells_of(Family)}
    towers = {
        key: part for key, part in given.items() if key not in known and isinstance(part, Mapping)
    }
    rest = {key: value for key, value in given.items() if key not in towers}
    rows: dict[str, Mapping[str, Any]] = {name: rest} if rest or not towers else {}
    for title, part in (rows | {f"{name}.{key}": part for key, part in towers.items()}).items():
        rows[title] = part
        if "stages" in part:
            rows |= _stages(title, part)
    return rows


def _stages(title: str, given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rows of a model's stages: the first, and others like it except for cells with `STAGE`."""
    count = given["stages"]
    if type(count) is not int or not 1 <= count <= MOST_ITEMS or not title.endswith(".stage1"):
        wanted = f"a number up to {MOST_ITEMS}, in a stanza [name.stage1]"
        raise MisfitError(f"[{title}] stages", count, wanted)
    rows: dict[str, Mapping[str, Any]] = {title: _at_stage(given, 0)}
    changing = _changing(given)
    return rows | {
        f"{title[:-1]}{i + 1}": {"like": title} | _at_stage(changing, i) for i in range(1, count)
    }


def _changing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Cells that differ from stage to stage."""
    parts = {
        key: _changing(value) if key in groups() and isinstance(value, Mapping) else value
        for key, value in given.items()
    }
    return {key: value for key, value in parts.items() if STAGE in str(value)}


def _at_stage(given: Any, index: int) -> Any:
    """A value with the index of its stage."""
    if isinstance(given, Mapping):
        return {
            key.replace(STAGE, str(index)): _at_stage(value, index) for key, value in given.items()
        }
    if isinstance(given, list):
        return [_at_stage(value, index) for value in given]
    if isinstance(given, str):
        return index if given == STAGE else given.replace(STAGE, str(index))
    return given


def _row(stanza: str, given: Mapping[str, Any], base: Family | None, trusted: bool) -> Family:
    """The row that a stanza makes of the one it is like."""
    where = f"[{stanza}]"
    name, _, tower = stanza.partition(".")
    name = _value(str, given.get("name", name), f"{where} name")
    types = _value(Names, given.get("types", usual_types(name, base)), f"{where} types")
    for cell, value in (("name", name), ("types", types)):
        if not value:
            raise MisfitError(f"{where} {cell}", value, "one at least")
    if "gguf" in given and not trusted:
        problem = "only rows of the package read GGUF files"
        raise StanzaError(f"{where} gguf", f"{where} gguf: {problem}")
    changes = read_changes({key: value for key, value in given.items() if key not in ABOUT}, where)
    if base is None:
        for path in ("layer", "heads.layout", "heads.out"):
            if path.replace(".", "__") not in changes:
                wanted = "a cell that every row has, or inherits with `like`"
                raise MisfitError(f"{where} {path}", "missing", wanted)
        base = Family()
    grouped = {path.partition("__")[0] for path in changes if "__" in path} & {"outputs", *STATED}
    absent = [group for group in grouped if getattr(base, group) is None]
    row = base.but(**{group: groups()[group]() for group in absent})
    if row.gguf is not None:  # each architecture states mixtures and reordered rows itself
        row = row.but(gguf__halves=False, gguf__experts=False)
    row = row.but(config__defaults=values_of(types))
    row = row.but(name=name, types=types, tower=_value(str, tower, f"{where} tower"), **changes)
    defaults = {key: value for key, value in row.config.defaults.items() if value is not None}
    row = replace(row, config=replace(row.config, defaults=defaults))
    if row.layer.count("{i}") != 1:
        raise MisfitError(f"{where} layer", row.layer, "a name with {i} for the layer's index")
    if not row.prefixes:
        raise MisfitError(f"{where} prefixes", "empty", "one at least")
    if not all((row.heads.q, row.heads.k, row.heads.v, row.heads.out)):
        raise MisfitError(f"{where} heads", "without a module", "a module each for q, k, v and out")
    if unknown := row.config.keys.keys() - KEYS.keys():
        raise _unknown("size", min(unknown), f"{where} config.keys.{min(unknown)}", KEYS)
    return row


def usual_types(name: str, base: Family | None) -> tuple[str, ...]:
    """A row's model_types where it states none: its name, or the types of a `like` row so named."""
    return base.types if base is not None and base.name == name else (name,)


def read_changes(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Changes of a row, as `Family.but` takes them, from cells in a stanza or a condition."""
    known = {
        name: hint
        for name, (part, hint) in cells_of(Family).items()
        if part.metadata or name == "steps"
    }
    changes: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where} {name}".strip()
        if name not in known:
            raise _unknown("cell", name, place, (*known, *ABOUT))
        if name in ("when", "in"):
            if not isinstance(value, list) or len(value) > MOST_ITEMS:
                raise MisfitError(place, value, f"a list of {MOST_ITEMS} tables at most")
            conditions = (_condition(name, each, f"{place}[{i}]") for i, each in enumerate(value))
            changes[cells_of(Family)[name][0].name] = tuple(conditions)
        elif name in groups() and value is False and NoneType in _alternatives(known[name]):
            changes[name] = None
        elif name in (*STATED, "also") and value is True:
            continue
        elif name == "also":
            changes[name] = _also(value, place)
        elif name not in (*groups(), "steps", "in_transformers"):
            changes[name] = _value(known[name], value, place)
        elif not isinstance(value, Mapping):
            raise MisfitError(place, value, "a table of cells")
        elif name == "steps":
            for step, content in value.items():
                changes[f"steps__{step}"] = _step(step, content, f"{place}.{step}")
        elif name == "in_transformers":
            changes[name] = read_changes(value, place)
        else:
            if name == "gguf" and isinstance(value.get("whole"), Mapping):
                value = {**value, "whole": dict(_one_by_one(value["whole"], f"{place}.whole"))}
            for cell, part in _parts(groups()[name], value, place).items():
                changes[f"{name}__{cell}"] = part
    return changes


def _one_by_one(given: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """Pairs of names, one for each in braces: "{enc,dec}.norm" = "{encoder,decoder}.norm"."""
    for pair in given.items():
        (ours, theirs) = (LISTED.split(str(side)) for side in pair)
        choices = [side[1].split(",") if len(side) == 3 else [""] for side in (ours, theirs)]
        if len(choices[0]) != len(choices[1]):
            raise MisfitError(where, " = ".join(map(str, pair)), "as many names on both sides")
        for a, b in zip(*choices, strict=True):
            yield a.join(ours[::2]), b.join(theirs[::2])


def _also(given: Any, where: str) -> dict[str, tuple[str, ...]]:
    """Modules of each role, one for each name in braces: "{gate,up}" = "mlp.{w1,w3}"."""
    if not isinstance(given, Mapping) or len(given) > MOST_ITEMS:
        raise MisfitError(where, given, f"a table of {MOST_ITEMS} roles at most")
    modules: dict[str, tuple[str, ...]] = {}
    for roles, value in given.items():
        for module in value if isinstance(value, list) else [value]:
            if not isinstance(module, str):
                raise MisfitError(f"{where}.{roles}", module, "the name of a module")
            names = module.replace(EXPERT, "<e>")
            pairs = [(roles, names)]
            if (braces := BRACES.fullmatch(roles)) is not None:
                parts = [braces[1] + part + braces[3] for part in braces[2].split(",")]
                pairs = [*zip(parts, _spread(names, parts, f"{where}.{roles}"), strict=True)]
            for role, name in pairs:
                _string((), role, where)
                full = _string((), name, where).replace("<e>", EXPERT)
                modules[role] = (*modules.get(role, ()), full)
    return modules


def _step(name: str, given: Any, where: str) -> Step | None:
    """A rare mechanism by its name; false takes it away."""
    known = step_classes()
    if name not in known:
        raise _unknown("step", name, where, sorted(known))
    if given is False:
        return None
    step: Step = build(known[name], given, where)
    if fault := fault_of(step):
        raise StanzaError(where, f"{where}: {fault}")
    return step


def _condition(kind: str, given: Any, where: str) -> When | In:
    keys = given.keys() if isinstance(given, Mapping) else set()
    starts = [start for start in CONDITIONS[kind] if keys >= {*start}]
    if len(starts) != 1:
        wanted = " or ".join(" and ".join(start) for start in CONDITIONS[kind])
        raise MisfitError(where, given, f"a table with {wanted}")
    start = starts[0]
    key = _value(str, given[start[0]], f"{where}.{start[0]}")
    cells = {name: value for name, value in given.items() if name not in start}
    changes = read_changes(cells, where)
    if "gguf" in given:
        raise StanzaError(f"{where}.gguf", f"{where}.gguf: no such cell in a condition")
    if kind == "in":
        return In(key, **changes)
    value = _value(Any, given[start[1]], f"{where}.{start[1]}")
    return (When if start[1] == "is" else Unless)(key, value, **changes)


# ---- A value by the annotation of its cell.


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    """Types that an annotation allows, and its limits."""
    if get_origin(wanted) is Annotated:
        return get_args(wanted)
    if get_origin(wanted) in (Union, UnionType):
        return tuple(kind for each in get_args(wanted) for kind in _alternatives(each))
    return (wanted,)


def _value(wanted: Any, given: Any, where: str) -> Any:
    """A cell's value from its value in TOML."""
    kinds = _alternatives(wanted)
    free = Any in kinds
    if free and given == NULL:
        return None
    if given is False and NoneType in kinds and bool not in kinds:
        return None
    if any(get_origin(kind) is Callable for kind in kinds):
        return _function(FUNCTIONS[re.split(r"[ .]", where)[-1]], given, where)
    classes = (kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind))
    if made := next(classes, None):
        return _norm(given, where) if made is StoredNorm else build(made, given, where)
    if isinstance(given, bool) and (free or bool in kinds):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return _number(kinds, given, where)
    if isinstance(given, str):
        if free or str in kinds:
            return _string(kinds, given, where)
        given = [given]
    if isinstance(given, list | tuple | Mapping) and len(given) > MOST_ITEMS:
        raise MisfitError(where, f"{len(given)} items", f"{MOST_ITEMS} at most")
    if isinstance(given, list | tuple):
        return _several(kinds, given, where)
    mapped = [get_args(kind)[1] for kind in kinds if get_origin(kind) is Mapping] or [Any] * free
    if isinstance(given, Mapping) and mapped:
        inner, parts = mapped[0], given.items()
        return {_value(str, k, where): _value(inner, part, f"{where}.{k}") for k, part in parts}
    raise MisfitError(where, given, _in_words(kinds))


def build(kind: type, given: Any, where: str) -> Any:
    """A cell of several parts: a table, its first part alone, or true for the usual parts."""
    known, shorts = cells_of(kind), getattr(kind, "SHORT", {})
    if given is True and "" not in shorts:
        given = {}
    elif not isinstance(given, Mapping):
        given = {"" if "" in shorts else next(iter(known)): given}
    values = _parts(kind, given, where)
    for name, (part, _) in known.items():
        if name not in values and part.default is MISSING and part.default_factory is MISSING:
            wanted = f"a part that every {name_of(kind)} has"
            raise MisfitError(f"{where}.{name}", "missing", wanted)
    return kind(**values)


def _parts(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Cells of a class in a table."""
    known, shorts = cells_of(kind), getattr(kind, "SHORT", {})
    values: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where}.{name}" if name else where
        if name in shorts:
            pairs = zip(shorts[name], _spread(value, shorts[name], place), strict=True)
            values |= {part: _value(known[part][1], each, place) for part, each in pairs}
        elif name in known:
            values[name] = _value(known[name][1], value, place)
        else:
            raise _unknown("cell", name, place, [name for name in (*shorts, *known) if name])
    return values


def _spread(given: Any, parts: Sequence[str], where: str) -> list[Any]:
    """A value for each part: names in braces, self_attn.{q,k,v,o}_proj, or the same for all."""
    match = BRACES.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        return [given] * len(parts)
    names = [match[1] + part + match[3] for part in match[2].split(",")]
    if len(names) != len(parts):
        raise MisfitError(where, given, "four modules, as self_attn.{q,k,v,o}_proj")
    return names


def _function(known: Mapping[str, Callable[..., Any]], given: Any, where: str) -> Any:
    """A function by its name, or one made by its name and parameters, { stage = 0 }."""
    arguments: Any = True
    if isinstance(given, Mapping) and len(given) == 1:
        ((given, arguments),) = given.items()
    if not isinstance(given, str) or given not in known:
        near = nearest(given, known) if isinstance(given, str) else ""
        raise MisfitError(where, given, "one of " + ", ".join(sorted(known)), near)
    function = known[given]
    if isinstance(function, type):
        return build(function, arguments, f"{where}.{given}")
    if arguments is not True:
        raise MisfitError(f"{where}.{given}", arguments, "no parameters")
    return function


def _norm(given: Any, where: str) -> StoredNorm:
    """A norm from "rms:input_layernorm" or { norm = "rms:input_layernorm", offset = 1 }."""
    parts = dict(given) if isinstance(given, Mapping) else {"norm": given}
    named = parts.pop("norm", None)
    if not isinstance(named, str):
        wanted = 'a norm, "rms:module" or "layer:module", or a table with it'
        raise MisfitError(where, given, wanted)
    kind, colon, module = named.partition(":")
    if kind not in NORMS or not colon:
        raise MisfitError(where, named, '"rms:module" or "layer:module"')
    if unknown := parts.keys() & {"module", "centred"}:
        place = f"{where}.{min(unknown)}"
        raise StanzaError(place, f"{place}: no such cell; `norm` says it")
    values = {"bias": NORMS[kind]} | _parts(StoredNorm, parts, where)
    return StoredNorm(_value(str, module, where), NORMS[kind], **values)


def _number(kinds: tuple[Any, ...], given: float, where: str) -> float:
    """A number that is neither absurd nor of another kind."""
    if not {Any, float} & {*kinds} and not (int in kinds and isinstance(given, int)):
        raise MisfitError(where, given, _in_words(kinds))
    is_whole = int in kinds and isinstance(given, int)
    usual = Within(-LARGEST, LARGEST) if is_whole else Within(-LARGEST_NUMBER, LARGEST_NUMBER)
    within = next((kind for kind in kinds if isinstance(kind, Within)), usual)
    if not within.smallest <= given <= within.largest:  # NaN fails
        raise MisfitError(where, given, f"a number from {within.smallest:g} to {within.largest:g}")
    return given if is_whole or Any in kinds else float(given)


def _string(kinds: tuple[Any, ...], given: str, where: str) -> str:
    """A name that may be shown, and formatted with a layer's index."""
    bare = given.replace("{i}", "")
    if len(given) > LONGEST_STRING or not given.isprintable() or "{" in bare or "}" in bare:
        raise MisfitError(where, given, f"a plain name of {LONGEST_STRING} characters at most")
    choices = next((kind for kind in kinds if isinstance(kind, OneOf)), None)
    if choices is not None and given not in choices:
        raise MisfitError(where, given, "one of " + ", ".join(choices))
    return given


def _several(kinds: tuple[Any, ...], given: Sequence[Any], where: str) -> Any:
    """A list, as the tuple that a cell holds or, among values of a config, as it is."""
    places = [f"{where}[{i}]" for i in range(len(given))]
    for kind in kinds:
        if get_origin(kind) is tuple:
            inner = get_args(kind)
            inner = (inner[0],) * len(given) if inner[1:] == (...,) else inner
            if len(inner) == len(given):
                return tuple(_value(*each) for each in zip(inner, given, places, strict=True))
    if Any in kinds:
        return [_value(Any, *each) for each in zip(given, places, strict=True)]
    raise MisfitError(where, given, _in_words(kinds))


def _in_words(kinds: tuple[Any, ...]) -> str:
    types = [kind for kind in kinds if not isinstance(kind, Within | OneOf)]
    names = (str(getattr(kind, "__name__", kind)) for kind in types)
    return " or ".join(dict.fromkeys(name.replace("NoneType", "false") for name in names))


# ---- From a row to TOML, a line for each cell.

WIDTH = 130
NOT_WRITTEN = ("name", "types", "tower", "gguf", "origin", "proved_for")


def stanza_of(row: Family, like: tuple[str, Family] | None = None, title: str = "") -> str:
    """The stanza of a row, without GGUF cells: complete, or only cells that differ from `like`."""
    title = title or titles([row])[0]
    base = (Family() if like is None else like[1]).but(config__defaults=values_of(row.types))
    cells: dict[str, Any] = {} if like is None else {"like": like[0]}
    if row.name != title.partition(".")[0]:
        cells["name"] = row.name
    if row.types != usual_types(row.name, base):
        cells["types"] = [*row.types]
    cells |= written(row_changes(row, base))
    header = ".".join(map(_key, title.split(".", 1)))
    return "\n".join([f"[{header}]", *_lines(_cells(cells))]) + "\n"


def row_changes(row: Family, base: Family | None = None) -> dict[str, Any]:
    """Cells in which a row differs from another or an empty one, as `Family.but` takes them."""
    base = base or Family()
    changes: dict[str, Any] = {}
    for name, (part, _) in cells_of(Family).items():
        new, old = getattr(row, part.name), getattr(base, part.name)
        if name in NOT_WRITTEN or (name == "mlp" and new is None):
            continue
        if name in groups() and new is not None:
            usual = groups()[name]() if old is None else old
            differs = {cell: getattr(new, cell) for cell in cells_of(groups()[name])}
            differs = {
                cell: value for cell, value in differs.items() if value != getattr(usual, cell)
            }
            if name == "config" and "defaults" in differs:
                keys, before = {**old.defaults, **new.defaults}, old.defaults
                differs["defaults"] = {
                    k: v for k in keys if (v := new.defaults.get(k)) != before.get(k)
                }
            if differs.get("grid"):  # it replaces `rope`
                differs.pop("rope", None)
            changes |= {f"{name}__{cell}": value for cell, value in differs.items()}
            if not differs and (name == "mlp" or old is None):
                changes |= {name: True} if name == "mlp" else {f"{name}__norm": None}
        elif name == "steps":
            gone = {step.name for step in old} - {step.name for step in new}
            changes |= {f"steps__{step.name}": step for step in new if step not in old}
            changes |= {f"steps__{name}": None for name in gone}
        elif new != old:
            changes[part.name] = new
    return changes


def written(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a row as TOML has them: groups of cells, in the order of the classes."""
    names = [path.partition("__")[0].rstrip("_") for path in changes]
    tables: dict[str, Any] = {name: {} for name in cells_of(Family) if name in names}
    for path, value in changes.items():
        name, _, cell = path.partition("__")
        name = name.rstrip("_")
        if cell:
            tables[name][cell] = as_toml(value, config=cell == "defaults")
        elif name in CONDITIONS:
            tables[name] = [_written_condition(each) for each in value]
        else:
            tables[name] = written(value) if name == "in_transformers" else as_toml(value)
    # true and false come last
    flags = {n: table for n, table in tables.items() if n in groups() and isinstance(table, bool)}
    cells = {name: table for name, table in tables.items() if name not in flags}
    for name in groups().keys() & cells:
        cells[name] = _shortened(groups()[name], cells[name])
    return cells | flags


def _shortened(kind: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """Cells in the order of their class, with short cells for several where possible."""
    table = {name: table[name] for name in cells_of(kind) if name in table}
    for short, parts in getattr(kind, "SHORT", {}).items():
        values = [table.get(part, False) for part in parts]
        same = len({*map(repr, values)}) == 1
        differ = short == "modules" and len({*values}) == len(values)
        if not table.keys() >= {*parts} or not (same or differ):
            continue
        start = {"layout": table["layout"]} if "layout" in table else {}
        rest = {name: value for name, value in table.items() if name not in (*parts, "layout")}
        table = start | {short: values[0] if same else _braced(values)} | rest
    return table


def common_start(names: Sequence[str]) -> str:
    """The longest common beginning of names."""
    letters = zip(*names, strict=False)
    return "".join(alike[0] for alike in takewhile(lambda each: len({*each}) == 1, letters))


def _braced(names: Sequence[str]) -> str:
    """Names as one name, with the parts in which they differ in braces."""
    start = common_start(names)
    end = common_start([name[len(start) :][::-1] for name in names])[::-1]
    return f"{start}{{{','.join(name[len(start) : len(name) - len(end)] for name in names)}}}{end}"


def _written_condition(each: When | In) -> dict[str, Any]:
    if isinstance(each, In):
        return {"layers": each.layer_type} | written(each.cells)
    holds = "is_not" if isinstance(each, Unless) else "is"
    return {"key": each.key, holds: as_toml(each.value, config=True)} | written(each.cells)


def as_toml(value: Any, config: bool = False) -> Any:
    """A part of a row as TOML holds it: tables, lists, strings, numbers."""
    if value is None:
        return NULL if config else False
    if isinstance(value, StoredNorm):
        kind = next(name for name, centred in NORMS.items() if centred == value.centred)
        usual = StoredNorm(value.module, value.centred, value.centred)
        more = {
            name: as_toml(part)
            for name, part in vars(value).items()
            if part != getattr(usual, name)
        }
        return {"norm": f"{kind}:{value.module}", **more} if more else f"{kind}:{value.module}"
    if isinstance(value, Biases):
        table = _shortened(Biases, vars(value))
        if "" in table:
            return table[""]
        return {name: flag for name, flag in table.items() if flag is not False}
    if is_dataclass(value) and not isinstance(value, type):
        given = {part.name: (getattr(value, part.name), part.default) for part in fields(value)}
        parts = {
            name: as_toml(now) for name, (now, usual) in given.items() if now not in (usual, {})
        }
        made: Any = parts or True
        first = next(iter(fields(value)), None)
        if first is not None and first.default is MISSING and parts.keys() == {first.name}:
            short = parts[first.name]
            if isinstance(short, str | int | list) and not isinstance(short, bool):
                made = short
        if not callable(value):
            return made
        return name_of(type(value)) if made is True else {name_of(type(value)): made}
    if callable(value):
        return name_of(value)
    if isinstance(value, Mapping):
        return {key: as_toml(part, config) for key, part in value.items()}
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str) and not config:
        return value[0]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1000 and not config:
        return int(value)
    return [as_toml(part, config) for part in value] if isinstance(value, tuple | list) else value


def _cells(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every cell by its dotted name."""
    for name, value in tables.items():
        if isinstance(value, Mapping) and value and name in (*groups(), "steps"):
            yield from ((f"{name}.{_key(cell)}", part) for cell, part in value.items())
        else:
            yield _key(name), value


def _lines(cells: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """A line for each cell, or for each part of one that is longer than a line."""
    for name, value in cells:
        line = f"{name} = {_text(value)}"
        if len(line) <= WIDTH or not isinstance(value, list | Mapping):
            yield line
        elif isinstance(value, Mapping):
            yield from _lines((f"{name}.{_key(key)}", part) for key, part in value.items())
        else:
            yield from (f"{name} = [", *(f"    {_text(item)}," for item in value), "]")


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _text(key)


def _text(value: Any) -> str:
    """A value in TOML's notation, on one line."""
    if isinstance(value, Mapping):
        cells = ", ".join(f"{key} = {_text(part)}" for key, part in _cells(value))
        return f"{{ {cells} }}" if value else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(value, ensure_ascii=False)


def file_of(rows: Sequence[Family], proof: str, *, proved: bool = True, digest: str = "") -> bytes:
    """The bytes of a file of rows.

    proof: The reference that they were proved against, "transformers 5.23.0", or only tried where
    they are not `proved`. digest: The digest of the config that they were proved with.
    """
    head = f"{'proved_against' if proved else 'tried_against'} = {_text(proof)}\n"
    if digest:
        head += f"proved_for = {_text(digest)}\n"
    stanzas = [stanza_of(row, title=title) for row, title in zip(rows, titles(rows), strict=True)]
    return "\n".join([head, *stanzas]).encode()


def titles(rows: Sequence[Family]) -> list[str]:
    """A stanza's name for each row, no two alike."""
    names: list[str] = []
    for row in rows:
        endings = ("", *(f"-{number}" for number in range(2, len(rows) + 1)))
        stem, tower = row.name.replace(".", "-"), f".{row.tower}" if row.tower else ""
        tried = (stem + ending + tower for ending in endings)
        names.append(next(title for title in tried if title not in names))
    return names
