"""The pages of an audit and of a list of audits, with their figures. One file each, no network."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.files import Files
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table, as_json, crossed
from weightscope.heads.audit import figures
from weightscope.heads.audit.audit import FIGURES, Audit
from weightscope.heads.audit.factor_findings import factor_relation
from weightscope.heads.audit.measure import forms_of, stacked
from weightscope.heads.circuits.figures import ROLE_COLOURS, UNNAMED
from weightscope.heads.tensors.matrices import MEASURES, Matrices
from weightscope.model.metrics.outliers import layer_medians, log_measure
from weightscope.model.metrics.sinks import BROADCAST, NEITHER, NOP
from weightscope.report.findings import Finding, listed
from weightscope.report.pages.page import Figure, Section, write_page, write_template
from weightscope.report.pages.style import save

UNNAMED_ROLE = "no role given"
TIME_SCALES = (
    "A state keeps 1/e of what was written so many tokens ago, if the bias alone sets its step; "
    "tokens lengthen or shorten it. Hatched: no head."
)
NAMED = 3  # findings that a map's caption names
SINGULAR_VALUES = 250_000  # on a page, 2 MB of it; spectra.npz and spectra.csv have all
FEWEST_POINTS = 24  # points of a curve


def write_audit_page(files: Files, audit: Audit) -> None:
    """Write the figures as PNG and SVG, and report.html: findings, heat maps, spectra of any head.

    Names and tokens of the checkpoint are escaped.
    """
    heads = audit.measured
    mapped = [measure for measure in heads.measures if measure.scale]
    zero = [measure.name for measure in mapped if not np.any(heads.table[measure.name])]
    mapped = [measure for measure in mapped if measure.name not in zero]
    maps, shown = {measure.name for measure in mapped}, dict[str, list[str]]()
    for finding in audit.findings:
        name = _map_of(finding, maps)
        if finding.layer is not None and name:
            shown.setdefault(name, []).append(f"{finding.title} ({finding.where})")
    names = ("qk", "vo", "vo_affine")
    spectra = stacked([heads.arrays[f"{name}_singular_values"] for name in names])
    columns = spectra.reshape(-1, spectra.shape[-1]).T
    rows = crossed(of=names, layer=heads.layers, head=range(heads.n_heads))  # one per map and head
    values = [Column(f"sigma{i}", column) for i, column in enumerate(columns, 1)]
    files.table("spectra.csv", Table([*rows, *values]))
    drawn = [
        (description, save(getattr(figures, function)(heads), files, name, numbers_in))
        for name, (function, numbers_in, description) in bar(FIGURES.items(), "figures", "figure")
    ]
    facts, deeds = _facts(audit, maps), deeds_of(audit)
    reference, matrices = audit.standing.reference, audit.everything
    of_matrices, ranks = None, None if matrices is None else ranks_by_role(matrices)
    if matrices is not None and any(
        row.spectrum and row.layer is not None for row in matrices.rows
    ):
        caption = (
            "Matrices by layer and role, of a mixture's experts the median; hatched where a layer "
            "has none."
        )
        drawing = save(figures.matrix_maps(matrices), files, "matrices", "matrices.csv")
        of_matrices = Figure(drawing, caption, audit.name)
    mixers, of_mixers = audit.mixers, None
    if mixers is not None and len(mixers.table):
        drawing = save(figures.time_scales(heads, mixers), files, "mixers", "mixers.csv")
        of_mixers = Figure(drawing, f"Time scales of the heads without a softmax. {TIME_SCALES}")
    findings = []
    for finding in audit.findings:
        findings.append({**finding.as_json(), "percentile": audit.standing.of(finding)})
    measures = [{"name": m.name, "symbol": m.symbol, "meaning": m.meaning} for m in mapped]
    numbers = {
        "verdict": audit.findings.verdict,
        "numbers": [number._asdict() for number in audit.numbers],
        "findings": findings,
        "maps": facts | {"deeds": deeds},
        "measures": measures,
        "everything": matrices and matrices.roles.as_json(),
        "matrices": of_matrices and of_matrices.as_json(),
        **({"mixers": of_mixers.as_json()} if of_mixers else {}),
        "ranks": None if ranks is None else ranks.as_json(),
        "reference": {"described": audit.standing.described, **reference.table.as_json()},
    }
    write_template(
        files,
        "report.html",
        "audit.html",
        numbers=numbers,
        title=f"The heads of {audit.name}",
        lead=audit.lead,
        provenance=audit.provenance,
        caveats=audit.caveats,
        verdict=audit.findings.verdict,
        first_numbers=audit.numbers,
        remarks=audit.remarks,
        deeds=deeds,
        zero=zero,
        findings=audit.findings.html(buttons=True, percentile=audit.standing.of),
        measures=mapped,
        maps=sorted(mapped, key=lambda measure: measure.name not in shown),  # with findings first
        shown={name: listed(findings, NAMED) for name, findings in shown.items()},
        everything=matrices,
        of_matrices=of_matrices,
        mixers=mixers,
        of_mixers=of_mixers,
        ranks=ranks,
        standing=audit.standing,
        facts=facts | {"deeds": deeds},
        drawn=drawn,
    )


def _map_of(finding: Finding, maps: Collection[str]) -> str:
    """The map that shows a finding: of its measure, else of sigma_1; empty where neither is."""
    names = (finding.measure, f"{finding.map}_sigma1")
    return next((name for name in names if name in maps), "")


SIGNS = {NOP: "●", BROADCAST: "▲", NEITHER: "○"}  # of sinks, by kind


def deeds_of(audit: Audit) -> list[dict[str, Any]]:
    """The legend of what the heads do: roles, sinks and findings; empty where nothing is known."""
    layers = set(audit.measured.layers.tolist())
    roles = Counter(role for (layer, _), role in audit.roles.items() if role and layer in layers)
    kinds = Counter(audit.heads["sink_kind"].tolist())
    concerned = {(each.layer, head) for each in audit.findings for head in each.heads}
    marks: list[dict[str, Any]] = []
    for role, colour in ROLE_COLOURS.items():
        marks.append({"name": role, "heads": roles.pop(role, 0), "colour": colour})
    unnamed = len(audit.heads) - sum(mark["heads"] for mark in marks)
    for kind, sign in SIGNS.items():
        name = f"sink, {kind}"
        marks.append({"name": name, "heads": kinds[kind], "kind": kind, "sign": sign})
    marks.append({"name": "has a finding", "heads": len(concerned), "framed": True})
    marks = [mark for mark in marks if mark["heads"]]
    without = {"name": UNNAMED_ROLE, "heads": unnamed, "colour": UNNAMED}
    return [*marks, without] if marks and unnamed else marks


def ranks_by_role(matrices: Matrices) -> Table | None:
    """One row per role: the median percentile of its matrices in each measure; None if unknown."""
    table = matrices.table
    if "compared_with" not in table.names:
        return None
    ranked = table.where(table["compared_with"] > 0)
    if not ranked:
        return None
    known = [column for column in MEASURES if f"{column.name}_percentile" in table.names]
    rows = []
    for role in dict.fromkeys(ranked["role"]):
        same = ranked.where(ranked["role"] == role)
        medians = (np.median(same[f"{column.name}_percentile"]) for column in known)
        rows.append((role, len(same), same["compared_with"].max(), *medians))
    columns = [replace(column, format=".0f") for column in known]
    checkpoints = Column("checkpoints", meaning="At most.")
    header: list[str | Column] = ["role", "matrices", checkpoints, *columns]
    caption = (
        "Percentile of each measure among the matrices of the role in other checkpoints, the "
        "median over layers."
    )
    return Table.of_rows(header, rows, caption)


LABELS = ("layer", "head", "kv_head")  # columns of heads.csv that are no measures


def _facts(audit: Audit, maps: Collection[str]) -> dict[str, Any]:
    """The data that the page's script draws."""
    heads = audit.measured
    spectra = {name: array for name, array in heads.arrays.items() if "singular_values" in name}
    n_curves = heads.n_heads * len(heads.layers) * len(spectra)
    points = max(FEWEST_POINTS, SINGULAR_VALUES // n_curves)
    places = {name: _places(array.shape[2], points) for name, array in spectra.items()}
    percentiles = {name: np.round(grid) for name, grid in audit.standing.grids.items()}
    columns = [name for name in heads.table.names if name not in LABELS]
    findings = []
    for finding in audit.findings:
        shown = ("kind", "layer", "heads", "title", "text", "measure", "usual", "whole_layers")
        about = {name: getattr(finding, name) for name in shown}
        findings.append(as_json(about | {"map": _map_of(finding, maps)}))
    lines = {f"{head.layer}.{head.head}": head.as_json()["lines"] for head in audit.directions}
    return {
        "layers": heads.layers.tolist(),
        "heads": heads.n_heads,
        "kv_heads": heads.grid("kv_head")[0].tolist(),
        "roles": {f"{layer}.{head}": role for (layer, head), role in audit.roles.items()},
        "measures": [
            {"name": m.name, "log": m.scale == "log"} for m in heads.measures if m.name in maps
        ],
        "unnamed": UNNAMED_ROLE,
        "percentiles": {name: _plain(grid, 3) for name, grid in percentiles.items()},
        "compared_with": {name: count.tolist() for name, count in audit.standing.counts.items()},
        "columns": {name: _plain(heads.grid(name), 6) for name in columns},
        "spectra": {name: _plain(array[..., places[name]], 4) for name, array in spectra.items()},
        "places": {name: indices.tolist() for name, indices in places.items()},
        "forms": forms_of(heads.arrays),
        "findings": findings,
        "profiles": {name: _plain(values, 4) for name, values in _profiles(audit).items()},
        "read_through": list(audit.notes) if audit.directions else [],
        "directions": lines,
    }


def _profiles(audit: Audit) -> dict[str, np.ndarray]:
    """Measures (L,) of all layers, where a finding is about whole layers: of heads the median."""
    heads, profiles = audit.measured, dict[str, np.ndarray]()
    for measure in {finding.measure for finding in audit.findings if finding.whole_layers}:
        if measure in heads.table.names:
            profiles[measure] = np.exp(layer_medians(log_measure(heads.grid(measure))))
        elif measure == "qk_column_share":
            profiles[measure] = heads.arrays[measure].max(axis=1)
        elif measure == "factor_relation":
            profiles[measure] = np.exp(factor_relation(heads))
    return profiles


def _places(r: int, points: int) -> np.ndarray:
    """Indices of the singular values in a curve: all r, or some, denser where they fall faster."""
    if r <= points:
        return np.arange(r)
    return np.unique(np.geomspace(1, r, points).round().astype(int) - 1)


def _plain(array: Any, digits: int) -> Any:
    """An array as nested lists: floats to `digits` significant ones, None if not finite."""
    array = np.asarray(array)  # a cell of a column of objects is none
    if array.ndim == 1 and array.dtype.kind == "f":  # as below, in a tenth of the time
        return [float(f"{x:.{digits}g}") if isfinite(x) else None for x in array.tolist()]
    if array.ndim:
        return [_plain(part, digits) for part in array]
    if array.dtype.kind == "f":
        return float(f"{array:.{digits}g}") if np.isfinite(array) else None
    return array.item()


def write_summary_page(files: Files, summary: Table, provenance: Provenance) -> None:
    """Write summary.html: how each audit of a list ended, one row per checkpoint."""
    ended, failed = (summary.where(summary["status"] == status) for status in ("ok", "failed"))
    n_heads = sum(a * b for a, b in zip(ended["layers"], ended["heads"], strict=True))
    lead = f"{len(ended)} of {len(summary)} checkpoints audited, {n_heads:,} heads."
    sections = []
    if len(failed):
        lead += f" {len(failed)} failed."
        name = Column("name", list(map(str, failed["name"])), "checkpoint")
        causes = Table([name, *failed.select("source", "error").columns])
        advice = "Fix these and run weightscope audit again with --resume: the others are kept."
        sections.append(Section("Failed", advice, [causes]))
    if len(ended):
        names = [name for name in ended.names if name not in {"source", "status", "error", "plan"}]
        caption = (
            "The last four columns are medians over all heads. Click a column to sort, a name to "
            "open its page."
        )
        table = Table(ended.select(*names).columns, caption)
        sections.append(Section("Checkpoints", parts=[table]))
    write_page(files, "summary.html", "Audits", lead, sections, provenance=provenance)
