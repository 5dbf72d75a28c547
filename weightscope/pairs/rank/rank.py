"""Rank the matrices of a model's layers within their roles and choose the first of each.

A score says something of a matrix, not that it should be trained: docs/rank.md has what is known.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

import weightscope
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.tables import Column, Table
from weightscope.heads.tensors.matrices import MEASURES, is_matrix, measured_rows
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.model import Model, as_model
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.changes.all_tensors import compare_tensors
from weightscope.pairs.rank import BY, TOOLS

# roles of linear maps
LINEAR = ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "output_gate", "gate", "up", "down")
WEIGHT = ".weight"


class Ranked(NamedTuple):
    """A matrix of the file and its score."""

    name: str
    role: str
    layer: int
    score: float  # NaN where it is unknown; of a tensor that fuses or stacks several, their mean
    is_chosen: bool


@dataclass(frozen=True)
class Ranking:
    """The matrices of a model's layers by score, and those that were chosen of each role."""

    source: str
    base: str  # empty without one
    by: str  # a key of `BY`
    top: float
    rows: Sequence[Ranked]  # the highest of each role first

    @cached_property
    def chosen(self) -> list[str]:
        """Names of the chosen matrices, in the order of the layers."""
        return [row.name for row in sorted(self.rows, key=lambda row: row.layer) if row.is_chosen]

    @property
    def lead(self) -> str:
        """The basis of the choice, in one line."""
        version = f"weightscope {weightscope.__version__}"
        counts = (
            f"{len(self.chosen)} of the {len(self.rows)} matrices in the layers of {self.source}"
        )
        measure = BY[self.by][1]
        if self.by == "change":
            measure = f"{measure}, {self.base}"
        highest = f"the highest {100 * self.top:g} % of each role by {measure}"
        return printable(f"{version}: {counts}, {highest}")

    @property
    def table(self) -> Table:
        """One row per matrix."""
        columns = [Column(name) for name in ("tensor", "role", "layer", BY[self.by][0], "chosen")]
        rows = [(*row[:4], "yes" if row.is_chosen else "") for row in self.rows]
        return Table.of_rows(columns, rows)

    def written_for(self, tool: str) -> str:
        """The file for a tool, one of `TOOLS`.

        Raises
        ------
        CheckpointError
            The tool cannot use this choice; the message says why.
        """
        return WRITERS[tool](self)


def rank(
    model: Model | str | Path,
    by: str = "snr",
    top: float = 0.25,
    base: Model | str | Path | None = None,
    exact: bool = False,
) -> Ranking:
    """Rank the matrices of a model's layers within each role, and choose the first of each.

    Parameters
    ----------
    model : Model, str or Path
    by : {"snr", "stable-rank", "alpha", "change"}
        The highest come first.
    top : float
        Share of the matrices of each role to choose, at least one of each.
    base : Model, str or Path, optional
        What "change" is measured from, and what mergekit takes the others from.
    exact : bool
        Compute spectra of large matrices in full; see `read_matrices`.

    Raises
    ------
    CheckpointError
        There is no base to measure a change from, or no row knows the layers' matrices.

    Examples
    --------
    >>> import weightscope as ws
    >>> ranking = ws.rank("embedded", by="stable-rank")
    >>> ranking.chosen[0], len(ranking.table)
    ('transformer.h.0.attn.c_proj.weight', 16)
    """
    if by not in BY:
        raise CheckpointError(f"by is '{printable(by)}'; it is one of {', '.join(BY)}")
    if not 0 < top <= 1:
        share = "the share of matrices to choose, above 0 and at most 1"
        raise CheckpointError(f"top is {top:g}; it is {share}")
    if by == "change" and base is None:
        raise CheckpointError("`by='change'` needs `base`, the model that it was tuned from")
    model, base = as_model(model), None if base is None else as_model(base)
    unchecked = model.unchecked()
    tensors = unchecked.tensors
    linear = [tensor for tensor in tensors if _is_linear(tensor, tensors.own)]
    if not linear:
        problem = "has no matrix whose role is known; none can be ranked"
        raise CheckpointError(problem, file=model.checkpoint.name)
    for tensor in linear:
        if why := why_unread(tensor.tensor):
            raise CheckpointError(why)
    if by == "change" and base is not None:
        scores = _changes(base, model)
    else:
        place = [column.name for column in MEASURES].index(BY[by][0])
        measured = measured_rows(unchecked.checkpoint, tensors, linear, exact).rows
        scores = {
            name: float(np.mean([row.numbers[place] for row in rows]))
            for name, rows in measured.items()
        }
    by_role: dict[str, list[NamedTensor]] = defaultdict(list)
    for tensor in linear:
        by_role[tensor.role].append(tensor)
    ranked = []
    for role, members in by_role.items():
        known = {tensor.name: scores.get(tensor.name, float("nan")) for tensor in members}
        order = sorted(members, key=lambda tensor: (isnan(known[tensor.name]), -known[tensor.name]))
        count = max(1, int(top * len(members)))
        for place, tensor in enumerate(order):
            score = known[tensor.name]
            is_chosen = place < count and not isnan(score)
            ranked.append(Ranked(tensor.name, role, tensor.layer or 0, score, is_chosen))
    return Ranking(_given_name(model), _given_name(base) if base else "", by, top, ranked)


def _given_name(model: Model) -> str:
    return model.checkpoint.given or str(model.checkpoint.name)


def _is_linear(tensor: NamedTensor, stack: str | None) -> bool:
    """True if a tensor is one or several linear maps of a layer in the stack that is read."""
    role = tensor.role
    for prefix in ("shared_", "expert.", "first."):
        role = role.removeprefix(prefix)
    roles = role.split("+")
    in_layer = tensor.layer is not None and tensor.stack == stack
    return in_layer and is_matrix(tensor) and all(role in LINEAR for role in roles)


def _changes(base: Model, model: Model) -> dict[str, float]:
    """|B - A| / |A| of every tensor by its name in B; parts of one together."""
    moved, squares = defaultdict[str, float](float), defaultdict[str, float](float)
    for change in compare_tensors(base, model).changes:
        moved[change.name_b] += float("nan") if isnan(change.change) else change.moved
        squares[change.name_b] += change.squares
    scores = {}
    for name in filter(None, moved):
        scores[name] = sqrt(moved[name] / squares[name]) if squares[name] else float("inf")
    return scores


def _for_axolotl(ranking: Ranking) -> str:
    """`unfrozen_parameters`, in which axolotl takes periods literally."""
    lines = (f"- {yaml_text(f'^{name}$')}" for name in ranking.chosen)
    return "\n".join([f"# {ranking.lead}", "unfrozen_parameters:", *lines, ""])


def _for_peft(ranking: Ranking) -> str:
    """An adapter_config.json; its regular expression holds the comment that JSON lacks."""
    modules = [
        re.escape(name.removesuffix(WEIGHT)) for name in ranking.chosen if name.endswith(WEIGHT)
    ]
    if not modules:
        lacking = "without a module, which LoRA's target_modules lacks"
        raise CheckpointError(f"every chosen tensor stacks experts {lacking}")
    stacked = len(ranking.chosen) - len(modules)
    left_out = f"; without {stacked} stacks of experts, as no module holds them" if stacked else ""
    comment = (ranking.lead + left_out).translate(str.maketrans("()\\", "[]/"))
    pattern = f"(?#{comment})(.*\\.)?({'|'.join(modules)})"
    config = {"peft_type": "LORA", "target_modules": pattern}
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _for_mergekit(ranking: Ranking) -> str:
    """A linear merge: the chosen matrices of the model, everything else of its base."""
    if not ranking.base:
        rest = "from which everything that is not chosen is taken"
        raise CheckpointError(f"a merge of one model needs `base`, {rest}")
    lines = [f"# {ranking.lead}", "merge_method: linear", "models:"]
    for model, chosen in ((ranking.base, 0), (ranking.source, 1)):
        lines += [f"- model: {yaml_text(model)}", "  parameters:", "    weight:"]
        for name in ranking.chosen:
            lines += [f"    - filter: {yaml_text(name)}", f"      value: {chosen}"]
        lines += [f"    - value: {1 - chosen}"]
    return "\n".join([*lines, ""])


def yaml_text(text: str) -> str:
    """Quote a text for YAML in ASCII; JSON needs two escapes beyond the first 65,536 characters."""

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"

    return re.sub(r"[^ -~]", escaped, json.dumps(text, ensure_ascii=False))


WRITERS: Mapping[str, Callable[[Ranking], str]] = dict(
    zip(TOOLS, (_for_axolotl, _for_peft, _for_mergekit), strict=True)
)
