"""The page of a lineage: the verdict, numbers, the picture, what differs, and the reference."""

import numpy as np

from weightscope.core.errors import printable
from weightscope.core.files import Files
from weightscope.core.tables import Column, Table
from weightscope.pairs.lineage.figures import lineage_figure
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.report.findings import spans
from weightscope.report.pages.page import Figure, Filed, Section, Terms, write_page
from weightscope.report.pages.style import save

CAPTION = (
    "Top: each layer of the suspect and its counterpart. Bottom: how alike these and all other "
    "pairs are."
)
REFERENCE = (
    "Likeness is the mean cosine of the maps $W_QK$ and $W_VO$ of matched heads, estimated from "
    "random sketches. One half of a sketch chooses heads and layers and the other half measures "
    "how alike they are, so the choice does not bias the likeness. By singular values, a "
    "counterpart counts only if it is much nearer than any other layer."
)
NO_EVIDENCE = "Unrelated checkpoints of one recipe share these too."


def write_lineage_page(files: Files, lineage: Lineage) -> None:
    """Write the picture as PNG and SVG, and report.html."""
    picture = save(lineage_figure(lineage), files, "lineage")
    sections = [
        Section("", parts=[_numbers(lineage)]),
        Section("Layers", parts=[Figure(picture, CAPTION)]),
        Section("By part", parts=[lineage.part_table]),
    ]
    if lineage.kinds:
        sections.append(Section("What differs", parts=[kinds_table(lineage)]))
    if lineage.origin is not None:
        sections.append(
            Section("Layer by layer", parts=[Filed(lineage.alignment, "alignment.csv")])
        )
    sections.append(Section("What it was judged against", REFERENCE, [lineage.background]))
    sections.append(Section("What proves nothing", NO_EVIDENCE, [lineage.no_evidence]))
    write_page(
        files,
        "report.html",
        heading(lineage),
        lineage.lead,
        sections,
        model=lineage.suspect.name,
        provenance=lineage.provenance,
    )


def heading(lineage: Lineage) -> str:
    """The verdict as the heading of the page; `lead` often begins with the same words."""
    name = printable(lineage.suspect.name)
    if lineage.verdict == "undecided":
        return f"Where {name} comes from is undecided"
    if lineage.base is None:
        names = [printable(each.base.name) for each in lineage.compared]
        bases = names[0] if len(names) == 1 else "any base"
        return f"Nothing that {name} shares with {bases} was found"
    base = printable(lineage.base)
    if lineage.verdict == "derived":
        parents = [
            f"{printable(parent)} ({share:.2f})" for parent, share in lineage.weights.items()
        ]
        return f"{name} was derived from {' and '.join(parents) or base}"
    return f"{name} and {base} share an origin"


def _numbers(lineage: Lineage) -> Terms:
    """Layers with a counterpart, their likeness, parts in common, and bases."""
    rows: list[tuple[object, str]] = []
    if lineage.origin is not None:
        match = lineage.origin.match
        paired = sum(j is not None for j in match.layers)
        rows.append((f"{paired} of {len(match.layers)}", "layers have a counterpart"))
        rows.append((f"{match.mean:.2f}", "their mean likeness: 1 for a copy"))
    if lineage.parts:
        shared = sum(part.is_shared for part in lineage.parts.values())
        rows.append((f"{shared} of {len(lineage.parts)}", "parts share an origin"))
    if lineage.drift:
        largest = "largest change of a layer's heads relative to the base: $‖ΔW‖/‖W‖$"
        rows.append((f"{np.nanmax([*lineage.drift.values()]):.2g}", largest))
    if len(lineage.compared) > 1:
        rows.append((f"{len(lineage.compared):,}", "bases compared"))
    return Terms(rows, large=True)


def kinds_table(lineage: Lineage) -> Table:
    """Changes, one row per kind."""
    rows = [(kind.kind, spans(kind.layers), kind.evidence, kind.strength) for kind in lineage.kinds]
    meaning = "Share of the compared layers, heads or tensors that show it."
    strength = Column("strength", meaning=meaning, format=".2f")
    return Table.of_rows(["kind", "layers", "evidence", strength], rows)
