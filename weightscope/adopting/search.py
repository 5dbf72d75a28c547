"""A search for the row of a stack, judged by the eager model: a group of cells at a time, nearest
kept.

Values come first, which need norm and layout alone; then scores of a token with itself, which need
scale and q/k-norms; then those at a distance, which need the rotation. What is tried are the cells
that the rows of the table have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import Any

from weightscope.adopting.shapes import Derived
from weightscope.adopting.trial import Nearness, Tiny, nearness, slopes_seen
from weightscope.core.progress import bar
from weightscope.model.config import rules
from weightscope.model.config.config import KEYS
from weightscope.model.config.rope import Rope
from weightscope.model.layers.distances import GeometricSlopes, StoredSlopes
from weightscope.model.layers.layouts import (
    ORDERS,
    StackedAs,
    grouped,
    grouped_with_loose_biases,
    in_four_blocks,
    stacked,
)
from weightscope.model.layers.steps import Step
from weightscope.model.layers.steps.multipliers import FACTORS, HeadFactors
from weightscope.model.layers.steps.scores import OuterSinks, Sinks, Softcap
from weightscope.model.layers.steps.temperature import OfPosition
from weightscope.model.rows.cells import QkNorm
from weightscope.model.rows.family import Family, turning
from weightscope.model.rows.stanzas import as_toml

# Layouts of queries, keys and values in one tensor.
FUSED = (stacked, grouped, in_four_blocks, grouped_with_loose_biases, *map(StackedAs, ORDERS))
# Cells of an architecture's mathematics, whatever its modules are called.
MATHEMATICS = (
    "positions__rope", "positions__bias", "scores__scale", "config__listed", "config__sizes",
    "config__layer_types", "config__attention_types", "config__stored_layer", "config__attentions",
)  # fmt: skip
KEY_CELLS = {
    "theta_key": ("theta", "base"),
    "fraction_key": ("partial", "pct", "fraction", "percent"),
    "dims_key": ("rotary_dim", "rotary_emb_dim", "rope_dim"),
}
SMALLEST_BASE = 50  # least number under an unclear key that is tried as a base
SHARES = (0.25, 0.5, 0.75, 0.9)  # shares of a head that may turn, where the config has none
LESS_USUAL = ("thetas", "dims_key", "start_key", "interleaved_key", "scaled_in")
SOME_LAYERS = (
    rules.sliding,
    rules.windowed,
    rules.windowed_if_any,
    rules.listed,
    rules.with_parameters,
)
NO_POSITIONS = {
    "positions__rope": None,
    "positions__bias": None,
    "heads__shared": (),
    "heads__others": (),
}
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A row and how close it is to both tiny models."""

    row: Family
    first: Nearness
    second: Nearness

    @property
    def rank(self) -> Any:
        """Compares candidates: larger is closer."""
        return self.first, self.second

    @property
    def problem(self) -> str:
        """The problem of the first model, or else of the second; empty if there is none."""
        return self.first.problem or self.second.problem


class Search:
    """The search for the row of one stack, among the cells of `rows`."""

    def __init__(self, tinies: Sequence[Tiny], stack: str, rows: Iterable[Family]) -> None:
        self.tinies, self.stack, self.rows = tinies, stack, tuple(rows)
        self.derived = Derived(tinies, stack)
        self.progress = bar(what=f"rows for {stack}", unit=" tried")

    def tried(self, row: Family) -> Found:
        """A row and how near it comes; in the second model only where it is exact in the first."""
        self.progress.update(1)
        first = nearness(row, self.tinies[0], self.stack)
        second = Nearness() if first.problem else nearness(row, self.tinies[1], self.stack)
        return Found(row, first, second)

    def nearest(self, rows: Iterable[Family], best: Found | None = None) -> Found | None:
        """The nearest row, the earlier of equals; an exact one at once."""
        for row in rows:
            if best is not None and not best.problem:
                break
            candidate = self.tried(row)
            if best is None or candidate.rank > best.rank:
                best = candidate
        return best

    def run(self, proposals: Iterable[Family]) -> Found | None:
        """The nearest row by the model's modules, the proposals, or any of the table's cells."""
        with self.progress:
            best = self.nearest(
                row.but(**norm, **stored)
                for row in self.derived.rows(FUSED)
                for stored in self.stored_parts(row) or [{}]
                for norm in self.norms()
            )
            plain = [self.stored_parts, self.contents, self.slopes, self.positions]
            best = best and self.refined(best, plain)
            best = self.nearest(proposals, best)
            return best and self.refined(best, [self.norms, *plain, self.single, self.mathematics])

    def refined(
        self, best: Found, groups: Sequence[Callable[[Family], Iterable[Changes]]]
    ) -> Found:
        """The nearest row by changes of cells, group after group, until nothing comes nearer."""
        before = None
        while best.problem and best.rank != before:
            before = best.rank
            for group in groups:
                row = best.row
                best = self.nearest((row.but(**change) for change in group(row)), best) or best
        return best

    def norms(self, row: Family | None = None) -> list[Changes]:
        """Kinds of the norm before attention."""
        return [{"norms__before": norm} for norm in self.derived.norm(self.derived.before)]

    def flagged(self, row: Family) -> Iterator[Family]:
        """The row with the config's flags for the biases of its modules."""
        if self.derived.flags:
            yield from (
                row.but(heads__bias=base.heads.bias)
                for base in self.derived.rows([row.heads.layout])
                if base.heads.q == row.heads.q
            )

    @property
    def guessed(self) -> list[str]:
        """Tensors of attention that are no projection's and no norm's: what they do is guessed."""
        return [*self.derived.first.head_parameters(), *self.derived.first.tables]

    def stored_parts(self, row: Family) -> list[Changes]:
        """Other tensors of attention: sinks (one number per head), or a table of biases."""
        first, choices = self.derived.first, list[Changes]()
        for name in first.head_parameters():
            factors = [HeadFactors(name, factor) for factor in FACTORS]
            for step in (Sinks(name), OuterSinks(name), *factors):
                choices.append({f"steps__{step.name}": step})
        for name, rope in product(first.head_parameters(), dict.fromkeys((None, row.rope))):
            slopes, loose = StoredSlopes(row.layer, name), (*row.heads.loose, name)
            change = {"positions__bias": slopes, "heads__loose": loose}
            choices.append({**change, **turning(rope)})
        biases = [row.positions.bias for row in self.rows]
        terms = {type(bias): bias for bias in biases if hasattr(bias, "layer")}
        for table, term in product(first.tables, terms.values()):
            for per_layer, causal in product((False, True), (False, True)):
                shared = {"heads__shared": (f"{row.layer.format(i=0)}{table}.weight",)}
                where = {"heads__others": (table,)} if per_layer else shared
                cells = {"layer": row.layer, "causal": causal, "own": per_layer}
                placed: Any = replace(term, **cells)  # type: ignore[type-var]
                choices.append({"positions__bias": placed, **where})
        return choices

    @cached_property
    def scales(self) -> dict[Any, dict[str, Any]]:
        """Scales of scores, the more usual first, with the architecture's defaults of keys."""
        counted = Counter(row.scores.scale for row in self.rows)
        row_of_scale = {row.scores.scale: row for row in reversed(self.rows)}
        return {scale: self.defaults(row_of_scale[scale]) for scale, _ in counted.most_common()}

    def mathematics(self, row: Family) -> Iterator[Changes]:
        """All that the table's rows compute (rather than store), a row at a time."""
        seen = set()
        for table_row in self.rows:
            if row.memory is None and table_row.memory is not None:
                continue
            if not self.may_turn(table_row.rope):
                continue
            changes: dict[str, Any] = {}
            for name in MATHEMATICS:
                changes |= _cell(table_row, name)
            changes |= _placed(table_row, row)
            kept = [step for step in row.steps if not step.portable]
            changes["steps"] = (*kept, *_portable(table_row))
            known = str({name: as_toml(value) for name, value in changes.items()})
            if known not in seen:
                seen.add(known)
                yield changes | {"config__defaults": self.defaults(table_row)}

    def contents(self, row: Family) -> Iterator[Changes]:
        """Norms of queries and keys, scales, caps and temperatures, each with each."""
        if self.derived.first.inner_norms:
            inner = self.derived.qk_norms()
        else:
            kinds = product((False, True), (None, 1e-5, 1e-6))
            inner = [QkNorm("", "", centred=centred, eps=eps) for centred, eps in kinds]
        norms = [row.scores.qk_norm, *inner]
        numbers = self.derived.first.config.items()
        caps = [key for key, value in numbers if "cap" in key and isinstance(value, float)]
        # Values that cross-attention makes of its memory do not tell the stream's norm: scores do.
        before = self.derived.norm(self.derived.before) if row.memory else [row.norms.before]
        for norm, stream in product(dict.fromkeys(norms), before):
            for (scale, defaults), cap in product(self.scales.items(), ("", *caps)):
                capped = {"steps__softcap": Softcap(cap) if cap else None}
                change = {"norms__before": stream, "scores__qk_norm": norm, "scores__scale": scale}
                yield {**change, "config__defaults": defaults, **capped}
        temperatures = {
            step: self.defaults(table_row)
            for table_row in self.rows
            for step in table_row.steps
            if isinstance(step, OfPosition)
        }
        plain = _without(row, OfPosition)
        for norm in dict.fromkeys(norms):
            yield {"scores__qk_norm": norm, "steps": plain}
            for temperature, defaults in temperatures.items():
                change = {"scores__qk_norm": norm, "steps": (*plain, temperature)}
                yield change | {"config__defaults": defaults}

    def slopes(self, row: Family) -> Iterator[Changes]:
        """A bias by distance with slopes 2^-(a h + b), fitted to the scores of both models."""
        plain = row.but(**NO_POSITIONS)
        fits = [slopes_seen(plain, tiny, self.stack) for tiny in self.tinies]
        if None not in fits:
            (heads, rise, start), (other_heads, other_rise, _) = fits  # type: ignore[misc]
            steps = 0.0
            if heads != other_heads:
                steps = (rise - other_rise) / (1 / heads - 1 / other_heads)
            slopes = (round(number, 3) + 0.0 for number in (steps, rise - steps / heads, start))
            yield NO_POSITIONS | {"positions__bias": GeometricSlopes(*slopes)}

    def positions(self, row: Family) -> Iterator[Changes]:
        """Rotations of the table and of the config's keys, with norms before and after."""
        norms: list[Any] = [row.scores.qk_norm]
        if row.scores.qk_norm is not None:
            norms.append(replace(row.scores.qk_norm, rotated=not row.scores.qk_norm.rotated))
        ropes = None, *self.listed_bases(), *self.own_rotations()
        rotations: list[Any] = [(rope, {}) for rope in ropes]
        rows = [table_row for table_row in self.rows if self.may_turn(table_row.rope)]
        rotations += [(table_row.rope, self.defaults(table_row)) for table_row in rows]
        for norm, (rope, defaults) in product(norms, rotations):
            yield {**turning(rope), "scores__qk_norm": norm, "config__defaults": defaults}

    def listed_bases(self) -> Iterator[Rope]:
        """Rotations with a base for each layer, which the config lists."""
        layers = len(self.derived.first.indices())
        for key, bases in self.derived.first.config.items():
            if not isinstance(bases, list) or len(bases) != layers:
                continue
            if all(type(base) in (int, float) for base in bases):
                yield Rope(False, thetas=key)
                yield Rope(True, thetas=key)

    def own_rotations(self, *more: Mapping[str, Any]) -> Iterator[Rope]:
        """Rotations by the config's keys for base, share and width, of all layers or some."""
        named = [key for config in (self.derived.first.config, *more) for key in config]

        def keys(words: Sequence[str]) -> list[str]:
            return [key for key in named if any(word in key for word in words)]

        bases = dict.fromkeys(("rope_theta", *keys(KEY_CELLS["theta_key"])))
        shares: list[dict[str, Any]] = [{}, {"fraction": 1.0}]
        shares += [
            {"fraction_key": key, "fraction": 1.0} for key in keys(KEY_CELLS["fraction_key"])
        ]
        shares += [{"dims_key": key} for key in keys(KEY_CELLS["dims_key"])]
        shares += [{"fraction": share} for share in SHARES]
        for base, share, interleaved in product(bases, shares, (False, True)):
            yield Rope(interleaved, theta_key=base, **share)
        for key in self.derived.unknown_numbers:
            if self.derived.first.config[key] >= SMALLEST_BASE:
                yield Rope(False, theta_key=key)
                yield Rope(True, theta_key=key)
        for rotates, share, interleaved in product(SOME_LAYERS, shares, (False, True)):
            yield Rope(interleaved, rotates=rotates, **share)

    def older(self, row: Family, config: Mapping[str, Any]) -> Iterator[Family]:
        """The row with other keys of rotations and layer types, as older configs have them."""
        rotations: dict[Any, None] = {None: None}
        if row.rope is not None:
            of_table = [table_row.rope for table_row in self.rows]
            rotations = dict.fromkeys((row.rope, *self.own_rotations(config), *of_table))
        listing = {str(as_toml(each.config.layer_types)): each for each in self.rows}.values()
        listed = [(each.config.layer_types, self.defaults(each)) for each in listing]
        for layer_types, defaults in [(row.config.layer_types, {}), *listed]:
            change = {"config__layer_types": layer_types, "config__defaults": defaults}
            for rope in rotations:
                yield row.but(**turning(rope), **change)

    def may_turn(self, rope: Any) -> bool:
        """True if a rotation of the table needs no key that the config lacks."""
        asked = {getattr(rope, cell, "") for cell in ("theta_key", "fraction_key", *LESS_USUAL)}
        return asked <= {"", "rope_theta", "partial_rotary_factor", *self.derived.first.config}

    def single(self, row: Family) -> Iterator[Changes]:
        """Every other value that a cell has in the table, a cell at a time."""
        for name in (*MATHEMATICS, "in_"):
            by_cell = {
                str(as_toml([*_cell(each, name).values()])): each for each in reversed(self.rows)
            }
            for table_row in by_cell.values():
                change = _cell(table_row, name) | {"config__defaults": self.defaults(table_row)}
                if name == "positions__bias":
                    change |= _placed(table_row, row)
                yield change
        yield from ({f"steps__{step.name}": None} for step in _portable(row))
        steps = {
            step: table_row for table_row in reversed(self.rows) for step in _portable(table_row)
        }
        for step, table_row in steps.items():
            changed = *_without(row, _kind(step)), step
            yield {"steps": changed, "config__defaults": self.defaults(table_row)}

    def defaults(self, other: Family) -> dict[str, Any]:
        """The architecture's defaults for keys that another row's cells may read."""
        sizes = {key for keys in KEYS.values() for key in keys}
        keys = [key for key in other.config.defaults if key not in sizes]
        usual = {key: self.derived.left_out(key) for key in keys}
        return {key: value for key, value in usual.items() if value is not None}


def _cell(row: Family, path: str) -> dict[str, Any]:
    """A cell of a row, as a change; a rotation is in `rope` or `grid`."""
    if path == "positions__rope":
        return turning(row.rope)
    return {path: reduce(getattr, path.split("__"), row)}


def _portable(row: Family) -> tuple[Step, ...]:
    """Its steps that may be another architecture's."""
    return tuple(step for step in row.steps if step.portable)


def _kind(step: Step) -> type[Step]:
    """The kind of a step (a temperature, or this mechanism alone); a layer has one of each kind."""
    base = type(step).__bases__[0]
    return type(step) if base is Step else base


def _without(row: Family, kind: type[Step]) -> tuple[Step, ...]:
    """Its steps of other kinds."""
    return tuple(step for step in row.steps if not isinstance(step, kind))


def _placed(source: Family, row: Family) -> dict[str, Any]:
    """Cells of position terms that name tensors, with the other row's layer for this one's."""
    changes: dict[str, Any] = {}
    if source.positions.bias is not None:
        before, after = source.layer.format(i=0), row.layer.format(i=0)
        changes["heads__others"], changes["heads__loose"] = source.heads.others, source.heads.loose
        changes["heads__shared"] = tuple(
            after + name.removeprefix(before) if name.startswith(before) else name
            for name in source.heads.shared
        )
        bias: Any = source.positions.bias
        if hasattr(bias, "layer"):
            changes["positions__bias"] = replace(bias, layer=row.layer)
    return changes
