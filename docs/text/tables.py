"""Tables of the reference that are made from the package, by their names in the pages."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import click
import numpy as np

import weightscope
from analyses.made import read_made
from docs.text.evidence import MODELS, ROOT, RUN, auroc_of_behaviours, heads_of
from weightscope.cli import main
from weightscope.core.tables import Table
from weightscope.heads.audit.measure import Measure, measures_of
from weightscope.heads.circuits.names import ROLES, ROLES_BY_WIRING
from weightscope.model.layers.steps import step_classes
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import FUNCTIONS, cells_of, groups
from weightscope.report.findings import finding_kinds

CLEAR = 0.8  # an AUROC to report; so is one below 0.2
FORMULA = re.compile(r"(?<!\\)\$(.+?)(?<!\\)\$")
FRACTION = re.compile(r"frac\(((?:[^(),]|\([^()]*\))+), ((?:[^()]|\([^()]*\))+)\)")
SIZE = re.compile(r"\|([^|]+)\|")
HYBRID = ROOT / "tests" / "model" / "rows" / "fixtures" / "nemotron_h"
QUANTILES = (0.05, 0.5, 0.95)


@cache
def _embedded() -> dict[str, Any]:
    """Results for the checkpoint that ships with the package."""
    model = weightscope.open_model("embedded")
    return {
        "audit": weightscope.audit(model, all_tensors=True),
        "compare": weightscope.compare(model, model),
        "lineage": weightscope.lineage(model, model),
        "circuits": weightscope.circuits(model),
        "detok": weightscope.bigram_auroc(model, sample=100),
        "hybrid": weightscope.audit(HYBRID, directions=0),
    }


def names() -> str:
    """Every public name and the first sentence about it."""
    public = ((name, getattr(weightscope, name)) for name in weightscope.__all__)
    rows = ((f"`{name}`", (inspect.getdoc(each) or "").split("\n\n")[0]) for name, each in public)
    return _table(("name", "what"), ((name, " ".join(what.split())) for name, what in rows))


def made() -> str:
    """When and by which code each kept folder of tables was made."""
    rows = ((f"`{each.folder}`", each.date, each.commit) for each in read_made().values())
    return _table(("folder under figures/", "made", "after commit"), rows)


def commands() -> str:
    """The help of every command."""
    with click.Context(main, info_name="weightscope") as context:
        known = [(name, main.get_command(context, name)) for name in main.list_commands(context)]
    parts = []
    for name, command in known:
        assert command is not None
        settings = {"max_content_width": 80, **command.context_settings}
        with click.Context(command, context, name, **settings) as within:
            parts.append(f"## {name}\n\n```text\n{command.get_help(within)}\n```")
    return "\n\n".join(parts)


def columns(table: Table) -> str:
    """The columns of a CSV; `_b` columns that repeat an `_a` column are left out."""
    kinds = {"i": "whole number", "f": "number"}
    rows = [
        (f"`{c.name}`", kinds.get(c.values.dtype.kind, "text"), _coded(c.meaning))
        for c in table.columns
        if f"{c.name[:-2]}_a" not in table
    ]
    return _table(("column", "holds", "what"), rows)


def arrays(held: Mapping[str, np.ndarray]) -> str:
    """The arrays of an NPZ."""
    rows = ((f"`{name}`", f"{array.shape}", f"{array.dtype}") for name, array in held.items())
    return _table(("array", "shape here", "of"), rows)


def measures(prefix: str) -> str:
    """Every measure of one map: equation, source, meaning."""
    rows = []
    for measure in _measures(prefix):
        source = f" ({measure.source})" if measure.source else ""
        equation = SIZE.sub(_size, FRACTION.sub(_quotient, measure.equation))
        rows.append((f"`{measure.name}`", f"`{equation}`", _coded(measure.meaning) + source))
    return _table(("measure", "equation", "what"), rows)


def values(prefix: str) -> str:
    """Values of each measure in real checkpoints."""
    rows = []
    for measure in _measures(prefix):
        cells = (_values(heads_of(model)[measure.name].astype(float)) for model in MODELS)
        rows.append((f"`{measure.name}`", *cells))
    return _table(("measure", *MODELS.values()), rows)


def _values(found: np.ndarray) -> str:
    if not np.isfinite(found).any():
        return ""
    low, middle, high = (f"{value:.3g}" for value in np.nanquantile(found, QUANTILES))
    return middle if low == high else f"{middle} ({low} to {high})"


def when_run() -> str:
    """AUROC of each measure for behaviour in runs of the models, if it is clear in any model."""
    rows = []
    for measure in _measures(""):
        found: dict[str, dict[str, float]] = {}
        for model in RUN:
            for behaviour, auroc in auroc_of_behaviours(model, measure.name):
                found.setdefault(behaviour, {})[model] = auroc
        for behaviour, aurocs in found.items():
            if any(max(auroc, 1 - auroc) >= CLEAR for auroc in aurocs.values()):
                cells = (f"{aurocs[model]:.2f}" if model in aurocs else "" for model in RUN)
                rows.append((f"`{measure.name}`", behaviour, *cells))
    return _table(("measure", "heads that", *(MODELS[model] for model in RUN)), rows)


def _measures(prefix: str) -> list[Measure]:
    known = measures_of(_embedded()["audit"].measured.arrays)
    return [m for m in known if m.name.startswith(prefix) and "route" not in m.name]


def findings() -> str:
    """Every kind of finding."""
    kinds = finding_kinds().values()
    rows = ((f"`{kind.name}`", kind.severity, kind.title, kind.look_next) for kind in kinds)
    return _table(("kind", "severity", "what", "what to look at next"), rows)


def roles(by_wiring: bool = False) -> str:
    """Roles with score, threshold, and how often they were right."""
    rows = []
    for role in ROLES_BY_WIRING if by_wiring else ROLES:
        threshold = f"{role.sign * role.least:g} or {'more' if role.sign > 0 else 'less'}"
        right = f"{role.tried.right} of {role.tried.named}" if role.tried else ""
        rows.append((role.name or f"none ({role.role})", f"`{role.score}`", threshold, right))
    return _table(("name", "score", "threshold", "right in models left out"), rows)


def cells() -> str:
    """Every cell of a row of architectures, with the functions that it may name, and every step."""
    rows = [(f"`{name}`", meaning, _functions(name)) for name, meaning in _all_cells().items()]
    for name, step in sorted(step_classes().items()):
        rows.append((f"`steps.{name}`", " ".join((step.__doc__ or "").split()), ""))
    return _table(("cell", "meaning", "functions that it may name"), rows)


def _all_cells() -> dict[str, str]:
    """Every cell of a row -> its meaning."""
    meanings: dict[str, str] = {}
    for name, (part, _) in cells_of(Family).items():
        if name in groups():
            example = "; names that differ in braces, self_attn.{q,k,v,o}_proj, or one name for all"
            for short, parts in getattr(groups()[name], "SHORT", {}).items():
                meanings[f"{name}.{short}"] = ", ".join(parts) + example
            for cell, (inner, _) in cells_of(groups()[name]).items():
                meanings[f"{name}.{cell}"] = inner.metadata["doc"]
        elif "doc" in part.metadata:
            meanings[name] = part.metadata["doc"]
    return meanings


def _functions(cell: str) -> str:
    """The functions that a cell may name; biases of modules are no functions."""
    known = {} if cell in ("heads.bias", "mlp.bias") else FUNCTIONS.get(cell.rpartition(".")[2], {})
    return ", ".join(f"`{name}`" for name in known)


def _coded(text: str) -> str:
    return FORMULA.sub(r"`\1`", text).replace(r"\$", "$")


def _quotient(match: re.Match[str]) -> str:
    """A fraction on one line."""
    above, below = (part if _stands_alone(part) else f"({part})" for part in match.groups())
    return f"{above} / {below}"


def _size(match: re.Match[str]) -> str:
    """A norm or an absolute value without `|`, which ends a cell."""
    return f"abs({match[1]})" if "λ" in match[1] else f"‖{match[1]}‖"


def _stands_alone(part: str) -> bool:
    return " " not in part or part.startswith(("sum", "‖", "("))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = []
    for line in (header, ["---"] * len(tuple(header)), *rows):
        escaped = [str(cell).replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def _made_from(result: str, table: Callable[[Any], str]) -> Callable[[], str]:
    return lambda: table(_embedded()[result])


TABLES: dict[str, Callable[[], str]] = {
    "names": names,
    "commands": commands,
    "measures of qk": lambda: measures("qk"),
    "measures of vo": lambda: measures("vo"),
    "values of qk": lambda: values("qk"),
    "values of vo": lambda: values("vo"),
    "when run": when_run,
    "findings": findings,
    "roles": roles,
    "roles by wiring": lambda: roles(by_wiring=True),
    "cells": cells,
    "audit heads.csv": _made_from("audit", lambda audit: columns(audit.heads)),
    "audit spectra.npz": _made_from("audit", lambda audit: arrays(audit.measured.spectra())),
    "audit mixers.csv": _made_from("hybrid", lambda audit: columns(audit.of_mixers)),
    "audit matrices.csv": _made_from("audit", lambda audit: columns(audit.everything.table)),
    "compare heads.csv": _made_from("compare", lambda compare: columns(compare.heads)),
    "lineage alignment.csv": _made_from("lineage", lambda lineage: columns(lineage.alignment)),
    "circuits roles.csv": _made_from("circuits", lambda circuits: columns(circuits.heads)),
    "circuits edges.csv": _made_from("circuits", lambda circuits: columns(circuits.edges)),
    "made": made,
    "detok heads.csv": _made_from("detok", lambda detok: columns(detok.heads)),
}
