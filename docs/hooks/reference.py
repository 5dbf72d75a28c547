"""Parts of the reference that are generated from the package, for `{{ ... }}` on a page."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from evidence import MODELS, auroc_of_behaviours, heads_of

import weightscope
from weightscope.core.formulas import prose
from weightscope.core.tables import Table
from weightscope.heads.audit.audit import Audit
from weightscope.heads.audit.measure import Measure, measures_of
from weightscope.heads.circuits.names import ROLES, ROLES_BY_WIRING
from weightscope.model.layers.steps import step_classes
from weightscope.model.rows.stanzas import FUNCTIONS, all_cells
from weightscope.report.findings import finding_kinds

CLEAR, FAINT = 0.8, 0.65  # an AUROC to report, and the least one called high; the same below 0.5
RESULTS = (
    "audit.audit.Audit",
    "compare.compare.Comparison",
    "lineage.lineage.Lineage",
    "circuits.circuits.Circuits",
    "detok.heads.BigramAuroc",
    "attention.layer.Layer",
    "attention.head.Head",
)


def public_names() -> str:
    """Every public name, for mkdocstrings."""
    return "\n".join(f"::: weightscope.{name}\n" for name in weightscope.__all__)


def results() -> str:
    """The classes of results, for mkdocstrings."""
    return "\n".join(f"::: weightscope.{name}\n" for name in RESULTS)


def columns(table: Table) -> str:
    """The columns of a CSV; `_b` columns that repeat an `_a` column are left out."""
    names = [c.name for c in table.columns if f"{c.name[:-2]}_a" not in table]
    rows = (
        (
            f"`{c.name}`",
            {"i": "whole number", "f": "number"}.get(c.values.dtype.kind, "text"),
            prose(c.meaning),
        )
        for c in table.select(*names).columns
    )
    return _table(("column", "holds", "what"), rows)


def arrays(held: Mapping[str, np.ndarray]) -> str:
    """The arrays of an NPZ."""
    return _table(
        ("array", "shape here", "of"),
        ((f"`{n}`", f"{a.shape}", f"{a.dtype}") for n, a in held.items()),
    )


def measures(audit: Audit, prefix: str) -> str:
    """Every measure of one map: equation, source, meaning, and values in real checkpoints."""
    return "\n".join(
        _section(m)
        for m in measures_of(audit.measured.arrays)
        if m.name.startswith(prefix) and "route" not in m.name
    )


def _section(measure: Measure) -> str:
    source = f" Source: {measure.source}." if measure.source else ""
    formula = " = ".join(filter(None, dict.fromkeys((measure.symbol, measure.equation))))
    parts = [f"### `{measure.name}`", f"$${formula}$$", measure.meaning + source]
    rows = []
    for model, title in MODELS.items():
        values = heads_of(model)[measure.name].astype(float)
        if not np.isfinite(values).any():
            rows.append((title, "", "", "", ""))
            continue
        low, middle, high = (f"{value:.3g}" for value in np.nanquantile(values, (0.05, 0.5, 0.95)))
        top = int(np.nanargmax(values))
        where = (
            f"{values[top]:.3g} ({heads_of(model)['layer'][top]}.{heads_of(model)['head'][top]})"
        )
        rows.append(
            (title, low, middle, high, where if np.nanmin(values) < values[top] else "all the same")
        )
    parts += [
        _table(("checkpoint", "5 %", "median", "95 %", "highest (layer.head)"), rows),
        *_evidence(measure.name),
    ]
    return "\n\n".join(parts) + "\n"


def _evidence(name: str) -> Iterator[str]:
    """How the measure went with behaviour when the models were run, if the AUROC is clear in any
    model.
    """
    aurocs = [(model, *rest) for model in MODELS for rest in auroc_of_behaviours(model, name)]
    clear = {behaviour for _, behaviour, _, auroc in aurocs if max(auroc, 1 - auroc) >= CLEAR}
    sentences = [
        f"{_level(auroc)} in {MODELS[model]}'s {n} heads {behaviour} ({auroc:.2f})"
        for model, behaviour, n, auroc in aurocs
        if behaviour in clear
    ]
    if sentences:
        yield "When run: " + "; ".join(sentences) + "."


def _level(auroc: float) -> str:
    return "high" if auroc >= FAINT else "low" if auroc <= 1 - FAINT else "neither high nor low"


def findings() -> str:
    """Every kind of finding."""
    rows = (
        (f"`{name}`", kind.severity, kind.title, kind.look_next)
        for name, kind in finding_kinds().items()
    )
    return _table(("kind", "severity", "what", "what to look at next"), rows)


def roles(by_wiring: bool = False) -> str:
    """Roles with score, threshold, and how often they were right."""
    rows = (
        (
            role.name or f"none ({role.role})",
            f"`{role.score}`",
            f"{role.sign * role.least:g} or {'more' if role.sign > 0 else 'less'}",
            f"{role.tried.right} of {role.tried.named}" if role.tried else "",
        )
        for role in (ROLES_BY_WIRING if by_wiring else ROLES)
    )
    return _table(("name", "score", "threshold", "right in models left out"), rows)


def cells() -> str:
    """Every cell of a row of architectures, with the functions that it may name, and every step."""
    rows = [(f"`{name}`", meaning, _functions(name)) for name, meaning in all_cells().items()]
    rows += [
        (f"`steps.{name}`", " ".join((step.__doc__ or "").split()), "")
        for name, step in step_classes().items()
    ]
    return _table(("cell", "meaning", "functions that it may name"), rows)


def _functions(cell: str) -> str:
    """The functions that a cell may name; biases of modules are no functions."""
    known = {} if cell in ("heads.bias", "mlp.bias") else FUNCTIONS.get(cell.rpartition(".")[2], {})
    return ", ".join(f"`{name}`" for name in known)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [header, ["---"] * len(tuple(header)), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


PARTS = {
    f.__name__: f
    for f in (public_names, results, columns, arrays, measures, findings, roles, cells)
}
