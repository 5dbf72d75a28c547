"""The page of a comparison: the verdict, its numbers, the map, and the worst differences first."""

from collections import Counter

import numpy as np

from weightscope.core.errors import printable
from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Table
from weightscope.pairs.same import (
    DIFFERENT,
    QUANTISED,
    ROUNDED,
    SAME_BYTES,
    SAME_FUNCTION,
    SAME_VALUES,
    UNDECIDED,
    VERDICTS,
)
from weightscope.pairs.same.figures import same_figure
from weightscope.pairs.same.same import Same
from weightscope.pairs.same.sentences import coarser, is_one
from weightscope.report.pages.page import Figure, Filed, Section, Terms, write_page
from weightscope.report.pages.style import save

LISTED = 60  # tensors in the table of the page


def write_same_page(files: Files, same: Same) -> None:
    """Write the map as PNG and SVG, and report.html."""
    picture = save(same_figure(same), files, "same")
    caption = (
        "Each tensor by its role and layer, in the colour of its verdict; the worst of several "
        "experts counts."
    )
    sections = [
        Section("", parts=[_numbers(same)]),
        Section("Every tensor", parts=[Figure(picture, caption)]),
    ]
    if same.differing:
        text = (
            f"{len(same.differing)} of {len(same.tensors)}, the worst first; all are in "
            "`tensors.csv`."
        )
        worst = Filed(same.worst(LISTED), "tensors.csv")
        sections.append(Section("Tensors that differ", text, [worst]))
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
    sections.append(Section("Verdicts by role", "", [by_role(same)]))
    sections.append(Section("Tokenizer", plain(same.tokens.lead)))
    sections.append(Section("What the verdicts rest on", "", [Terms([*MEANINGS.items()])]))
    write_page(
        files,
        "report.html",
        heading(same),
        same.lead,
        sections,
        model=same.name_b,
        provenance=same.provenance,
    )


def heading(same: Same) -> str:
    """The verdict as the heading of the page; `lead` often begins with the same words."""
    a, b = printable(same.name_a), printable(same.name_b)
    if same.verdict == DIFFERENT:
        return f"{b} is not {a}"
    if same.verdict == UNDECIDED:
        return f"Whether {b} is {a} is undecided"
    if same.verdict in (ROUNDED, QUANTISED):
        return coarser(same.name_a, same.name_b, same.verdict, same.tensors)
    if same.verdict == SAME_FUNCTION:
        return f"{b} computes what {a} does" if a != b else "B computes what A does"
    return f"{is_one(same.name_a, same.name_b)}: {same.verdict}"


def _numbers(same: Same) -> Terms:
    """Tensors by verdict, the largest change, and what else differs."""
    rows: list[tuple[object, str]] = [(f"{len(same.tensors):,}", "tensors compared")]
    if same.verdict != SAME_BYTES:
        by_verdict = sorted(same.counts.items(), key=lambda each: VERDICTS.index(each[0]))
        rows += [(f"{count:,}", COUNTED.get(verdict, verdict)) for verdict, count in by_verdict]
    sizes = [each.size for each in same.differing if np.isfinite(each.size)]
    if sizes:
        rows.append((f"{max(sizes):.3g}", "largest $‖ΔW‖/‖W‖$: change of a tensor relative to A"))
    for many, what in (
        (same.config, "config keys that decide, or may, differ"),
        (same.companions.deciding, "other files that may decide differ"),
        (same.not_compared, "tensors not compared"),
    ):
        if many:
            rows.append((f"{len(many):,}", what))
    return Terms(rows, large=True)


def by_role(same: Same) -> Table:
    """The number of tensors of each role with each verdict."""
    roles = dict.fromkeys(each.role for each in same.tensors)
    rows = []
    for role in roles:
        verdicts = Counter(each.verdict for each in same.tensors if each.role == role)
        words = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        rows.append((role, sum(verdicts.values()), words))
    return Table.of_rows(("role", "tensors", "verdicts"), rows)


COUNTED = {SAME_VALUES: "have the same values", SAME_FUNCTION: "differ without effect"}
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
