"""The page of a comparison for sameness: the verdict, the map, the tensors and keys that differ, the worst first."""

from weightscope.files import Files
from weightscope.formulas import plain
from weightscope.pages.page import Figure, Filed, Section, write_page
from weightscope.pages.style import save
from weightscope.same.figures import same_figure
from weightscope.same.same import Same
from weightscope.tables import Column, Table

LISTED = 60  # tensors in the table of the page


def write_same_page(files: Files, same: Same) -> None:
    """Write the map as PNG and SVG, and report.html."""
    picture = save(same_figure(same), files, "same")
    caption = "Each tensor by its role and layer, in the colour of its verdict; the worst of several experts counts."
    sections = []
    if same.differing:
        text = f"{len(same.differing)} of {len(same.tensors)}, the worst first; all are in tensors.csv."
        sections.append(Section("Tensors that differ", text, [same.worst(LISTED)]))
    if same.config:
        keys = Table.of_rows(
            (Column("key"), Column("in A"), Column("in B")), [(k, str(a), str(b)) for k, a, b in same.config]
        )
        sections.append(Section("Config keys that decide what is computed", "", [keys]))
    sections.append(Section("Every tensor", "", [Figure(picture, caption), Filed(same.table, "tensors.csv")]))
    rows = [(word, basis) for word, basis in MEANINGS.items()]
    sections.append(Section("Tokenizer", plain(same.tokens.lead)))
    sections.append(
        Section("What the verdicts rest on", "", [Table.of_rows((Column("verdict"), Column("rests on")), rows)])
    )
    title = f"Is {same.name_b} still {same.name_a}?"
    write_page(
        files,
        "report.html",
        plain(title),
        plain(same.lead),
        sections,
        model=plain(same.name_b),
        provenance=same.provenance,
    )


MEANINGS = {
    "same bytes": "The files hold the same bytes.",
    "same values": "Every tensor is equal by role, whatever the container, order, fusing or dtype.",
    "rounded": "Every value is the other's correctly rounded to the coarser dtype.",
    "quantised": "Every value lies in the cell of its original under the stored scales; where a format searches its "
    "codes, the error of each row is close to that of rounding to the nearest, and the deed says so.",
    "same function": "Layers whose tensors differ give the same on random inputs, up to float32's rounding.",
    "undecided": "It could not be compared, or its effect is not known.",
    "different": "None of the above.",
}
