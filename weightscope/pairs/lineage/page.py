"""The page of a lineage: the verdict, the picture, what differs, and the reference."""

from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Column, Table
from weightscope.pairs.lineage.figures import lineage_figure
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.report.findings import spans
from weightscope.report.pages.page import Figure, Section, write_page
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
        Section("By part", parts=[lineage.part_table]),
        Section("Layers", parts=[Figure(picture, CAPTION)]),
    ]
    if lineage.kinds:
        sections.append(Section("What differs", parts=[kinds_table(lineage)]))
    if lineage.origin is not None:
        sections.append(Section("Layer by layer", parts=[lineage.alignment]))
    sections.append(Section("What it was judged against", REFERENCE, [lineage.background]))
    sections.append(Section("What proves nothing", NO_EVIDENCE, [lineage.no_evidence]))
    name = plain(lineage.suspect.name)
    write_page(
        files,
        "report.html",
        f"Where {name} comes from",
        plain(lineage.lead),
        sections,
        model=name,
        provenance=lineage.provenance,
    )


def kinds_table(lineage: Lineage) -> Table:
    """Changes, one row per kind."""
    rows = [(kind.kind, spans(kind.layers), kind.evidence, kind.strength) for kind in lineage.kinds]
    meaning = "Share of the compared layers, heads or tensors that show it."
    strength = Column("strength", meaning=meaning, format=".2f")
    return Table.of_rows(["kind", "layers", "evidence", strength], rows)
