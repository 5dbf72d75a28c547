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
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import FUNCTIONS, cells_of, groups
from weightscope.report.findings import finding_kinds

CLEAR, FAINT = 0.8, 0.65  # an AUROC to report, and the least one called high; the same below 0.5


def public_names() -> str:
    """Every public name, for mkdocstrings."""
    return "\n".join(f"::: weightscope.{name}\n" for name in weightscope.__all__)


def columns(table: Table) -> str:
    """The columns of a CSV; `_b` columns that repeat an `_a` column are left out."""
    kinds = {"i": "whole number", "f": "number"}
    rows = [
        (f"`{c.name}`", kinds.get(c.values.dtype.kind, "text"), prose(c.meaning))
        for c in table.columns
        if f"{c.name[:-2]}_a" not in table
    ]
    return _table(("column", "holds", "what"), rows)


def arrays(held: Mapping[str, np.ndarray]) -> str:
    """The arrays of an NPZ."""
    rows = ((f"`{name}`", f"{array.shape}", f"{array.dtype}") for name, array in held.items())
    return _table(("array", "shape here", "of"), rows)


def measures(audit: Audit, prefix: str) -> str:
    """Every measure of one map: equation, source, meaning, and values in real checkpoints."""
    known = [m for m in measures_of(audit.measured.arrays) if m.name.startswith(prefix)]
    return "\n".join(_section(measure) for measure in known if "route" not in measure.name)


def _section(measure: Measure) -> str:
    source = f" Source: {measure.source}." if measure.source else ""
    formula = " = ".join(filter(None, dict.fromkeys((measure.symbol, measure.equation))))
    parts = [f"### `{measure.name}`", f"$${formula}$$", measure.meaning + source]
    rows = []
    for model, title in MODELS.items():
        heads = heads_of(model)
        values = heads[measure.name].astype(float)
        if not np.isfinite(values).any():
            rows.append((title, "", "", "", ""))
            continue
        low, middle, high = (f"{value:.3g}" for value in np.nanquantile(values, (0.05, 0.5, 0.95)))
        top = int(np.nanargmax(values))
        highest = f"{values[top]:.3g} ({heads['layer'][top]}.{heads['head'][top]})"
        if not np.nanmin(values) < values[top]:
            highest = "all the same"
        rows.append((title, low, middle, high, highest))
    header = ("checkpoint", "5 %", "median", "95 %", "highest (layer.head)")
    parts += [_table(header, rows), *_evidence(measure.name)]
    return "\n\n".join(parts) + "\n"


def _evidence(name: str) -> Iterator[str]:
    """The measure's AUROC for behaviour in runs of the models, if it is clear in any model."""
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
    if auroc >= FAINT:
        return "high"
    return "low" if auroc <= 1 - FAINT else "neither high nor low"


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
    for name, step in step_classes().items():
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


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = []
    for line in (header, ["---"] * len(tuple(header)), *rows):
        escaped = [str(cell).replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


GENERATED = (public_names, columns, arrays, measures, findings, roles, cells)
PARTS = {part.__name__: part for part in GENERATED}
