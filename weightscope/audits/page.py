"""The pages of an audit, of a comparison and of a list of audits, with their figures. One file each, no network."""

from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope.audits import figures
from weightscope.audits.measures import MeasuredHeads, forms_of
from weightscope.folder import Files
from weightscope.mathml import plain
from weightscope.pages.page import Figure, Section, write_page, write_template
from weightscope.pages.style import Drawing, save
from weightscope.progress import bar
from weightscope.tables import Column, Table, crossed

if TYPE_CHECKING:
    from weightscope.audits.audit import Audit
    from weightscope.audits.compare import Comparison

LISTED = 40  # heads in the table of a comparison
SINGULAR_VALUES = 250_000  # that a page holds, 2 MB of it; spectra.npz and spectra.csv have all
FEWEST_POINTS = 24  # of a curve
WHAT = {"heads": "six measures of every head", "spectra": "singular values of every head", "depth": "measures by depth"}


def write_audit_page(files: Files, audit: "Audit") -> None:
    """Write heads, spectra and depth as PNG and SVG, and report.html: findings, heat maps, spectra of any head.

    Whatever a checkpoint calls itself or its tokens is shown as text.
    """
    heads = audit.measured
    drawings = {"heads": figures.head_maps, "spectra": figures.spectra, "depth": figures.depth}
    tables = {"heads": "heads.csv", "spectra": "spectra.csv", "depth": "heads.csv"}
    files.table("spectra.csv", _spectra_table(heads))
    drawn = [
        (WHAT[name], save(draw(heads), files, name, tables[name]))
        for name, draw in bar(drawings.items(), "figures", "figure")
    ]
    write_template(
        files,
        "report.html",
        "audit.html",
        title=f"The heads of {audit.name}",
        lead=audit.lead,
        caveats=audit.caveats,
        findings=audit.findings.html(buttons=True, stands=audit.standing.of),
        measures=[measure for measure in heads.measures if measure.scale],
        everything=audit.everything,
        standing=audit.standing,
        facts=_facts(audit),
        drawn=drawn,
    )


def _spectra_table(heads: MeasuredHeads) -> Table:
    """The singular values that are drawn, a row a head and map."""
    arrays = {of: heads.arrays[f"{of}_singular_values"] for of in ("qk", "vo", "vo_affine")}
    longest = max(array.shape[2] for array in arrays.values())
    padded = {
        of: np.pad(array, ((0, 0), (0, 0), (0, longest - array.shape[2])), constant_values=np.nan)
        for of, array in arrays.items()
    }
    rows = np.concatenate([array.reshape(-1, longest) for array in padded.values()])
    labels = crossed(of=[*arrays], layer=heads.layers, head=range(heads.n_heads))
    return Table([*labels, *(Column(f"sigma{i}", own) for i, own in enumerate(rows.T, 1))])


def _facts(audit: "Audit") -> dict[str, Any]:
    """What the page's script draws from."""
    heads = audit.measured
    spectra = {name: array for name, array in heads.arrays.items() if "singular_values" in name}
    points = max(FEWEST_POINTS, SINGULAR_VALUES // (heads.n_heads * len(heads.layers) * len(spectra)))
    at = {name: _places(array.shape[2], points) for name, array in spectra.items()}
    return {
        "layers": heads.layers.tolist(),
        "heads": heads.n_heads,
        "kv_heads": heads.grid("kv_head")[0].tolist(),
        "roles": {f"{layer}.{head}": role for (layer, head), role in audit.roles.items()},
        "measures": [{"name": m.name, "log": m.scale == "log"} for m in heads.measures if m.scale],
        "percentiles": {name: _plain(np.round(grid), 3) for name, grid in audit.standing.grids.items()},
        "compared_with": {name: count.tolist() for name, count in audit.standing.counts.items()},
        "columns": {m.name: _plain(heads.grid(m.name), 6) for m in heads.measures},
        "spectra": {name: _plain(array[..., at[name]], 4) for name, array in spectra.items()},
        "places": {name: places.tolist() for name, places in at.items()},
        "forms": forms_of(heads.arrays),
        "findings": [
            {"layer": one.layer, "heads": one.heads, "title": one.title, "text": one.text} for one in audit.findings
        ],
        "read_through": list(audit.notes) if audit.directions else [],
        "directions": {f"{one.layer}.{one.head}": one.as_json()["lines"] for one in audit.directions},
    }


def _places(r: int, points: int) -> np.ndarray:
    """Which of r singular values a curve is drawn through: all, or some that lie closer where they fall faster."""
    return np.unique(np.geomspace(1, r, points).round().astype(int) - 1) if r > points else np.arange(r)


def _plain(array: np.ndarray, digits: int) -> Any:
    """An array as nested lists, floats to `digits` significant ones, None where they are not finite."""
    if array.ndim:
        return [_plain(part, digits) for part in array]
    if array.dtype.kind == "f":
        return float(f"{array:.{digits}g}") if np.isfinite(array) else None
    return array.item()


def write_comparison_page(files: Files, comparison: "Comparison") -> None:
    """Write the figures changes, spectra and, for more than two checkpoints, trajectories, and report.html."""
    first, last = comparison.labels[0], comparison.labels[-1]
    drawings = {"changes": figures.changes, "spectra": figures.spectra_before_and_after}
    if len(comparison.labels) > 2:
        drawings["trajectories"] = figures.trajectories
    drawn = {name: save(draw(comparison), files, name) for name, draw in bar(drawings.items(), "figures", "figure")}
    of = first if first == last else f"{first}, and what became of it in {last}"
    sections = [Section("Findings", parts=[comparison.findings]), *_how_far(comparison, drawn)]
    circuits = comparison.circuits
    if circuits is not None and (len(circuits.roles) or len(circuits.edges)):
        parts = [table for table in (circuits.roles, circuits.edges) if len(table)]
        sections.append(Section("Roles and edges that moved", circuits.lead, parts))
    if comparison.everything is not None:
        parts = [comparison.everything.moved_most(LISTED)] if len(comparison.everything.moved_most(1)) else []
        sections.append(Section("Everything in the files", comparison.everything.lead, parts))
    if len(comparison.labels) > 2:
        along = Figure(drawn["trajectories"], "Median of each layer, early layers dark.")
        sections.append(Section("Along the run", ", ".join(map(plain, comparison.labels)), [along]))
    write_page(files, "report.html", f"From {first} to {last}", comparison.lead, sections, comparison.caveats, of=of)


def _how_far(comparison: "Comparison", drawn: dict[str, Drawing]) -> list[Section]:
    """The map of every head's change, and the heads that moved most where any did."""
    first, last = map(plain, (comparison.labels[0], comparison.labels[-1]))
    sections = [
        Section(
            "How far each head moved",
            "$$frac(‖B − A‖_F, ‖A‖_F)$$ of the products $W_QK$ and $W_VO$ themselves: a change of basis within a "
            "head, which changes nothing it does, does not count.",
            [
                Figure(
                    drawn["changes"], f"Relative change from {first} to {last}; white: it did not move, grey: unknown."
                )
            ],
        ),
        Section(
            "The heads that moved most",
            "Angles are the largest principal ones, in degrees, between the spaces that queries (left) "
            "and keys (right) read, or that values read (left) and outputs write (right).",
            [Figure(drawn["spectra"], "Singular values before and after."), comparison.moved_most(LISTED)],
        ),
    ]
    return sections[:1] if comparison.unmoved.all() else sections


def write_summary_page(files: Files, summary: Table) -> None:
    """Write summary.html: how the audits of a list ended, a row a checkpoint with a link to its own page."""
    ended, failed = (summary.where(summary["status"] == status) for status in ("ok", "failed"))
    n_heads = sum(row_layers * row_heads for row_layers, row_heads in zip(ended["layers"], ended["heads"], strict=True))
    lead = f"{len(ended)} of {len(summary)} checkpoints audited, {n_heads:,} heads."
    sections = []
    if len(failed):
        lead += f" {len(failed)} failed."
        causes = Table(
            [Column("name", list(map(str, failed["name"])), "checkpoint"), *failed.select("source", "error").columns]
        )
        sections.append(
            Section("Failed", "Mend these and run weightscope audit again with --resume: the others stay.", [causes])
        )
    if len(ended):
        names = [name for name in ended.names if name not in {"source", "status", "error", "plan"}]
        caption = (
            "The last four are medians over all heads. A click on a column's name sorts; a name leads to its page."
        )
        sections.append(Section("Checkpoints", parts=[Table(ended.select(*names).columns, caption)]))
    write_page(files, "summary.html", "Audits", lead, sections)
