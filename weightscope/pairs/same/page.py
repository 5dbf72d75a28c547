"""The page of a comparison: the verdict, the map, and what differs, the worst first."""

from collections import Counter

from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Table
from weightscope.pairs.same.figures import same_figure
from weightscope.pairs.same.same import Same
from weightscope.report.pages.page import Figure, Section, write_page
from weightscope.report.pages.style import save

LISTED = 60  # tensors in the table of the page


def write_same_page(files: Files, same: Same) -> None:
    """Write the map as PNG and SVG, and report.html."""
    picture = save(same_figure(same), files, "same")
    caption = (
        "Each tensor by its role and layer, in the colour of its verdict; the worst of several "
        "experts counts."
    )
    sections = []
    if same.differing:
        text = (
            f"{len(same.differing)} of {len(same.tensors)}, the worst first; all are in "
            "tensors.csv."
        )
        sections.append(Section("Tensors that differ", text, [same.worst(LISTED)]))
    if same.config:
        keys = Table.of_rows(
            ("key", "in A", "in B"),
            [(k, str(a), str(b)) for k, a, b in same.config],
        )
        sections.append(Section("Config keys that decide what is computed", "", [keys]))
    differing = [
        (each.file, each.detail) for each in (*same.companions.deciding, *same.companions.named)
    ]
    if differing:
        table = Table.of_rows(("file", "how"), differing)
        sections.append(Section("Other files that differ", "", [table]))
    sections.append(Section("Every tensor", "", [Figure(picture, caption), by_role(same)]))
    sections.append(Section("Tokenizer", plain(same.tokens.lead)))
    meanings = Table.of_rows(("verdict", "rests on"), list(MEANINGS.items()))
    sections.append(Section("What the verdicts rest on", "", [meanings]))
    title, model = plain(f"Is {same.name_b} still {same.name_a}?"), plain(same.name_b)
    write_page(
        files,
        "report.html",
        title,
        plain(same.lead),
        sections,
        model=model,
        provenance=same.provenance,
    )


def by_role(same: Same) -> Table:
    """The number of tensors of each role with each verdict."""
    roles = dict.fromkeys(each.role for each in same.tensors)
    rows = []
    for role in roles:
        verdicts = Counter(each.verdict for each in same.tensors if each.role == role)
        words = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        rows.append((role, sum(verdicts.values()), words))
    return Table.of_rows(("role", "tensors", "verdicts"), rows)


MEANINGS = {
    "same bytes": "The weights and config.json hold the same bytes.",
    "same values": "Every tensor is equal by role, whatever the container, order, fusing or dtype.",
    "rounded": "Every value is the other's correctly rounded to the coarser dtype.",
    "quantised": "Every value lies in the cell of its original under the stored scales; where a "
    "format searches its codes or GPTQ makes up for errors, the error stays within a bound, and "
    "the deed says so.",
    "same function": "Layers whose tensors differ give the same on random inputs, up to float32's "
    "rounding.",
    "undecided": "It could not be compared, or its effect is not known.",
    "different": "None of the above.",
}
