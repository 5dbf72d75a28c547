"""A search for the row that reads a stack, judged by the eager model: a group of cells at a time, the nearest kept.

Values come first, which need norm and layout alone; then scores of a token with itself, which need scale and q/k-norms;
then those at a distance, which need the rotation. What is tried are the cells that the rows of the table have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from weightscope.adoption.derived import Derived
from weightscope.adoption.trial import NOWHERE, Nearness, Tiny, nearness
from weightscope.families import within
from weightscope.families.cells import QkNorm
from weightscope.families.config import KEYS
from weightscope.families.family import Family
from weightscope.families.layouts import grouped, grouped_with_loose_biases, stacked
from weightscope.families.odd_layouts import in_four_blocks
from weightscope.families.rope import Rope
from weightscope.families.stored import as_data
from weightscope.progress import bar

FUSED = (stacked, grouped, in_four_blocks, grouped_with_loose_biases)  # layouts of one tensor
# What is an architecture's mathematics, whatever its modules are called.
MATHEMATICS = (
    "rope", "additive", "relative", "scale", "temperature", "softcap", "clip", "multipliers", "listed", "sizes",
    "layer_types", "attention_types", "stored_layer", "attentions", "keys_of", "values_normed", "heads_normed",
)  # fmt: skip
KEY_CELLS = {"theta_key": ("theta", "base"), "fraction_key": ("partial", "pct", "fraction", "percent"),
             "dims_key": ("rotary_dim", "rotary_emb_dim", "rope_dim")}  # fmt: skip
SHARES = (0.25, 0.5, 0.75, 0.9)  # of a head that turns, where the config does not say it
LESS_USUAL = ("thetas", "dims_key", "start_key", "interleaved_key", "scaled_in")
SOME_LAYERS = (within.sliding, within.windowed, within.windowed_if_any, within.listed, within.with_parameters)
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A row and how near it comes, in both tiny models."""

    row: Family
    first: Nearness
    second: Nearness = NOWHERE

    @property
    def rank(self) -> Any:
        """What is the more the nearer."""
        return self.first.rank, self.second.rank

    @property
    def said(self) -> str:
        """What is wrong; nothing where nothing is."""
        return self.first.said or self.second.said


class Search:
    """The search for the row of one stack.

    Parameters
    ----------
    tinies : sequence of Tiny
    stack : str
    rows : iterable of Family
        Whose cells are tried.
    """

    def __init__(self, tinies: Sequence[Tiny], stack: str, rows: Iterable[Family]) -> None:
        self.tinies, self.stack, self.rows = tinies, stack, tuple(rows)
        self.derived = Derived(tinies, stack)
        self.progress = bar(what=f"rows for {stack}", unit=" tried")

    def tried(self, row: Family) -> Found:
        """A row and how near it comes; in the second model only where it is exact in the first."""
        self.progress.update(1)
        first = nearness(row, self.tinies[0], self.stack)
        return Found(row, first, NOWHERE if first.said else nearness(row, self.tinies[1], self.stack))

    def nearest(self, rows: Iterable[Family], best: Found | None = None) -> Found | None:
        """The nearest of these, an earlier one where several are as near; the first that is exact at once."""
        for row in rows:
            if best is not None and not best.said:
                break
            found = self.tried(row)
            if best is None or found.rank > best.rank:
                best = found
        return best

    def run(self, proposals: Iterable[Family]) -> Found | None:
        """The nearest row: of those that the model makes, of the proposals, or else with any of the table's cells.

        Parameters
        ----------
        proposals : iterable of Family
        """
        with self.progress:
            best = self.nearest(
                row.but(**norm, **stored) for row in self.derived.rows(FUSED)
                for stored in self.stored_parts(row) or [{}] for norm in self.norms()
            )  # fmt: skip
            plain = [self.stored_parts, self.contents, self.positions]
            best = best and self.refined(best, plain)
            best = self.nearest(proposals, best)
            return best and self.refined(best, [self.norms, *plain, self.single, self.mathematics])

    def refined(self, best: Found, groups: Sequence[Callable[[Family], Iterable[Changes]]]) -> Found:
        """The nearest that changes of cells lead to, a group after the other, until nothing comes nearer."""
        before = None
        while best.said and best.rank != before:
            before = best.rank
            for group in groups:
                row = best.row
                best = self.nearest((row.but(**change) for change in group(row)), best) or best
        return best

    def norms(self, row: Family | None = None) -> list[Changes]:
        """Kinds of the norm before attention."""
        return [{"norm": norm} for norm in self.derived.norm(self.derived.before)]

    def flagged(self, row: Family) -> Iterator[Family]:
        """The row with the config's flags for the biases of its modules."""
        if self.derived.flags:
            yield from (
                row.but(biases=base.biases) for base in self.derived.rows([row.layout]) if base.query == row.query
            )

    def stored_parts(self, row: Family) -> list[Changes]:
        """What attention stores beside matrices and norms: sinks, a number a head; a table of biases by distance."""
        first = self.derived.first
        found: list[Changes] = [{cell: name} for name in first.head_parameters() for cell in ("sinks", "outer_sinks")]
        terms = {type(one.additive): one.additive for one in self.rows if hasattr(one.additive, "layer")}
        for table, term in product(first.tables, terms.values()):
            for own, causal in product((False, True), (False, True)):
                where = {"others": (table,)} if own else {"shared": (f"{row.layer.format(i=0)}{table}.weight",)}
                placed: Any = replace(term, layer=row.layer, causal=causal, own=own)  # type: ignore[type-var]
                found.append({"additive": placed, **where})
        return found

    @cached_property
    def scales(self) -> dict[Any, dict[str, Any]]:
        """Scales of scores, the more usual first, and what the architecture takes for the keys they read."""
        counted = Counter(one.scale for one in self.rows)
        of = {one.scale: one for one in reversed(self.rows)}
        return {scale: self.defaults(of[scale]) for scale, _ in counted.most_common()}

    def mathematics(self, row: Family) -> Iterator[Changes]:
        """All that the rows of the table compute otherwise than they store, a row at a time."""
        seen = set()
        for other in self.rows:
            if (row.memory is None and other.memory is not None) or not self.may_turn(other.rope):
                continue
            changes: dict[str, Any] = {name: getattr(other, name) for name in MATHEMATICS} | _placed(other, row)
            known = str({name: as_data(value) for name, value in changes.items()})
            if known not in seen:
                seen.add(known)
                yield changes | {"defaults": self.defaults(other)}

    def contents(self, row: Family) -> Iterator[Changes]:
        """Norms of queries and keys, scales, caps and temperatures, each with each."""
        norms = (
            [row.qk_norm, *self.derived.qk_norms()] if self.derived.first.inner_norms else [row.qk_norm, QkNorm("", "")]
        )
        caps = [key for key, value in self.derived.first.config.items() if "cap" in key and isinstance(value, float)]
        # What cross-attention makes of its memory does not tell the norm of the stream: scores do.
        before = self.derived.norm(self.derived.before) if row.memory else [row.norm]
        for norm, stream in product(dict.fromkeys(norms), before):
            for (scale, defaults), cap in product(self.scales.items(), ("", *caps)):
                yield {"norm": stream, "qk_norm": norm, "scale": scale, "softcap": cap, "defaults": defaults}
        for norm in dict.fromkeys(norms):
            for temperature, defaults in {one.temperature: self.defaults(one) for one in self.rows}.items():
                yield {"qk_norm": norm, "temperature": temperature, "defaults": defaults}

    def positions(self, row: Family) -> Iterator[Changes]:
        """Rotations, those of the table and those that the config's keys say, with norms before and after."""
        norms: list[Any] = [row.qk_norm]
        if row.qk_norm is not None:
            norms.append(replace(row.qk_norm, rotated=not row.qk_norm.rotated))
        usual: list[Any] = [(rope, {}) for rope in (None, *self.own_rotations())]
        table = [(one.rope, self.defaults(one)) for one in self.rows if self.may_turn(one.rope)]
        for norm, (rope, defaults) in product(norms, [*usual, *table]):
            yield {"rope": rope, "qk_norm": norm, "defaults": defaults}

    def own_rotations(self, *more: Mapping[str, Any]) -> Iterator[Rope]:
        """Rotations by the keys that the config, or another, has for base, share and width; of all layers or some."""
        named = [key for config in (self.derived.first.config, *more) for key in config]

        def keys(words: Sequence[str]) -> list[str]:
            return [key for key in named if any(word in key for word in words)]

        bases = dict.fromkeys(("rope_theta", *keys(KEY_CELLS["theta_key"])))
        shares: list[dict[str, Any]] = [{}, {"fraction": 1.0}]
        shares += [{"fraction_key": key, "fraction": 1.0} for key in keys(KEY_CELLS["fraction_key"])]
        shares += [{"dims_key": key} for key in keys(KEY_CELLS["dims_key"])]
        shares += [{"fraction": share} for share in SHARES]
        for base, share, interleaved in product(bases, shares, (False, True)):
            yield Rope(interleaved, theta_key=base, **share)
        for rotates, share, interleaved in product(SOME_LAYERS, shares, (False, True)):
            yield Rope(interleaved, rotates=rotates, **share)

    def older(self, row: Family, config: Mapping[str, Any]) -> Iterator[Family]:
        """The row with other keys of rotations and of layers' types, as the checkpoint's own config may have."""
        turning = dict.fromkeys((*self.own_rotations(config), *(one.rope for one in self.rows)))
        listing = {str(as_data(one.layer_types)): one for one in self.rows}.values()
        for layer_types, defaults in [
            (row.layer_types, {}),
            *((one.layer_types, self.defaults(one)) for one in listing),
        ]:
            for rope in (row.rope, *turning) if row.rope is not None else (None,):
                yield row.but(rope=rope, layer_types=layer_types, defaults=defaults)

    def may_turn(self, rope: Any) -> bool:
        """Whether a rotation of the table asks for no key that the config has not."""
        asked = {getattr(rope, cell, "") for cell in ("theta_key", "fraction_key", *LESS_USUAL)}
        return asked <= {"", "rope_theta", "partial_rotary_factor", *self.derived.first.config}

    def single(self, row: Family) -> Iterator[Changes]:
        """Every other value that a cell has in the table, a cell at a time."""
        for name in (*MATHEMATICS, "in_layers"):
            for other in {str(as_data(getattr(one, name))): one for one in reversed(self.rows)}.values():
                more = _placed(other, row) if name in ("additive", "relative") else {}
                yield {name: getattr(other, name), "defaults": self.defaults(other), **more}

    def defaults(self, other: Family) -> dict[str, Any]:
        """What the architecture takes where the config lacks the keys that another row's cells may read."""
        sizes = {key for keys in KEYS.values() for key in keys}
        found = {key: self.derived.left_out(key) for key in other.defaults if key not in sizes}
        return {key: value for key, value in found.items() if value is not None}


def _placed(other: Family, row: Family) -> dict[str, Any]:
    """Cells of position terms that name tensors, with the other row's layer for this one's."""
    found: dict[str, Any] = {}
    if other.additive is not None or other.relative is not None:
        before = other.layer.format(i=0)
        found["others"], found["loose"] = other.others, other.loose
        found["shared"] = tuple(
            row.layer.format(i=0) + name.removeprefix(before) if name.startswith(before) else name
            for name in other.shared
        )
        if hasattr(other.additive, "layer"):
            found["additive"] = replace(other.additive, layer=row.layer)  # type: ignore[type-var]
    return found
