"""The page of a comparison: heads that moved, numbers, their map, findings and tables."""

from collections.abc import Callable

import numpy as np

from weightscope.core.errors import counted, printable
from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.progress import bar
from weightscope.core.tables import Table
from weightscope.heads.audit.measure import MAPS
from weightscope.model.metrics.outliers import known_median
from weightscope.pairs.compare import figures
from weightscope.pairs.compare.compare import FIGURES, Comparison
from weightscope.pairs.deeds.deed import What
from weightscope.report.pages.page import Figure, Filed, Section, Terms, write_page
from weightscope.report.pages.style import Drawing, save

LISTED = 40  # heads or tensors in a table: the most that moved, and the most that did not


def write_comparison_page(files: Files, comparison: Comparison) -> None:
    """Write the figures (trajectories only of more than two checkpoints) and report.html."""
    first, last = comparison.labels[0], comparison.labels[-1]
    shown = {
        name: draw
        for name, draw in FIGURES.items()
        if name != "trajectories" or len(comparison.labels) > 2
    }
    drawn = {
        name: save(getattr(figures, function)(comparison), files, name)
        for name, function in bar(shown.items(), "figures", "figure")
    }
    subject = first if first == last else f"{first}, compared with {last}"
    findings = Section("Findings", parts=[comparison.findings])
    if not comparison.findings:
        findings = Section("Findings", "None besides what the first sentence says.")
    the_map, *most_moved = _how_far(comparison, drawn)
    numbers = Section("", parts=[_numbers(comparison)])
    sections = [numbers, the_map, findings, *most_moved]
    circuits = comparison.circuits
    if circuits is not None and (len(circuits.roles) or len(circuits.edges)):
        parts = [table for table in (circuits.roles, circuits.edges) if len(table)]
        sections.append(Section("Roles and edges that moved", circuits.lead, parts))
    everything = comparison.everything
    if everything is None and (tensors := comparison.others[-1]).moved:
        sections.append(
            Section("Other tensors", tensors.headline, [_changed_first(tensors.moved_most)])
        )
    if everything is not None:
        tables = []
        if len(everything.moved_most(1)):
            tables = [_changed_first(everything.moved_most, "tensors.csv")]
        sections.append(Section("Everything in the files", everything.lead, tables))
    if len(comparison.labels) > 2:
        along = Figure(drawn["trajectories"], "Median of each layer at each checkpoint.")
        sections.append(Section("Along the run", ", ".join(map(plain, comparison.labels)), [along]))
    write_page(
        files,
        "report.html",
        heading(comparison),
        comparison.lead,
        sections,
        comparison.caveats,
        model=subject,
        provenance=comparison.provenance,
    )


def heading(comparison: Comparison) -> str:
    """The number of heads that moved; where none did, what else changed."""
    moved = int((~comparison.unmoved).sum())
    places = printable(f"from {comparison.labels[0]} to {comparison.labels[-1]}")
    if moved:
        heads = counted(comparison.unmoved.size, "head")
        return f"{moved:,} of {heads} moved {places}"
    everything = comparison.everything
    kinds = set() if everything is None else {*everything.kinds} - {What.IDENTICAL}
    if kinds or comparison.others[-1].moved:
        return f"No head moved {places}, but other tensors did"
    decided = any(change.deciding for change in comparison.settings)
    return f"No head moved {places}{', but the config changed' if decided else ''}"


def _numbers(comparison: Comparison) -> Terms:
    """Heads, those that moved and how far, and findings."""
    n_layers, n_heads = comparison.unmoved.shape
    moved = int((~comparison.unmoved).sum())
    rows: list[tuple[object, str]] = [
        (f"{n_layers * n_heads:,}", f"heads in {counted(n_layers, 'layer')}"),
        (f"{moved:,}", "moved"),
    ]
    for name, w in MAPS.items():
        change = comparison.from_first[f"{name}_change"][-1]
        if moved and np.isfinite(change).any():
            what = f"largest relative change of ${w}$ (median {known_median(change):.2g})"
            rows.append((f"{np.nanmax(change):.3g}", what))
    rows.append((f"{len(comparison.findings):,}", "findings"))
    return Terms(rows, large=True)


def _changed_first(moved_most: Callable[[int, int], Table], file: str = "") -> Filed:
    """A table of what moved most; a switch shows rows that did not move."""
    return Filed(moved_most(LISTED, LISTED), file, changed=len(moved_most(LISTED, 0)))


def _how_far(comparison: Comparison, drawn: dict[str, Drawing]) -> list[Section]:
    """The map of every head's change, and the heads that moved most where any did."""
    first, last = map(plain, (comparison.labels[0], comparison.labels[-1]))
    sections = [
        Section(
            "How far each head moved",
            "$$frac(‖B − A‖_F, ‖A‖_F)$$ of the products $W_QK$ and $W_VO$ themselves: a "
            "change of basis within a head, which does not change what it computes, does "
            "not count.",
            [
                Figure(
                    drawn["changes"],
                    f"Relative change from {first} to {last}; blank: did not move, hatched: "
                    "unknown.",
                )
            ],
        ),
        Section(
            "The heads that moved most",
            "The curves show by how much each singular value grew or shrank, the largest "
            "first. The table has the largest principal angle, in degrees, between the "
            "spaces that queries (left) and keys (right) read, or that values read (left) "
            "and outputs write (right), before and after: at 0° the head still uses the "
            "same space, at 90° one direction of it is new, strong or weak. A large angle "
            "with a small change means that a weak direction turned.",
            [
                Figure(
                    drawn["spectra"],
                    "Change of each singular value, in percent of what it was; all on one scale.",
                ),
                _changed_first(comparison.moved_most, "heads.csv"),
            ],
        ),
    ]
    return sections[:1] if comparison.unmoved.all() else sections
