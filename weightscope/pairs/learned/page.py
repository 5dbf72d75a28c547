"""The page of what was learned: the verdict, numbers, picture, matrices, words, collisions."""

from collections import Counter

import numpy as np

from weightscope.core.errors import counted, printable
from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Table
from weightscope.pairs.learned.figures import learned_figure
from weightscope.pairs.learned.learned import Learned
from weightscope.report.pages.page import Figure, Filed, Section, Terms, write_page
from weightscope.report.pages.style import save

LISTED = 40  # matrices in the table


def write_learned_page(files: Files, learned: Learned) -> None:
    """Write the picture as PNG and SVG, and report.html."""
    picture = save(learned_figure(learned), files, "learned")
    caption = (
        "Relative change of each matrix, by role and layer; a number counts its intruder "
        "dimensions."
    )
    columns = [name for name in ON_PAGE if name != "tune" or len(learned.tunes) > 1]
    most_changed = learned.most_changed(LISTED).select(*columns)
    sections = [
        Section("", parts=[_numbers(learned)]),
        Section("Where it moved", parts=[Figure(picture, caption)]),
    ]
    if len(most_changed):
        table = Filed(most_changed, "updates.csv")
        explained = Terms.of_columns(most_changed)
        sections.append(Section("What changed most", CHANGED, [table, explained]))
    sections.append(Section("How each was trained", TRAINING, [_trained(learned)]))
    no_words = " ".join(
        plain(f"None for {tune.name}: {tune.no_words}.") for tune in learned.tunes if tune.no_words
    )
    words = [] if learned.word_table is None else [learned.word_table]
    sections.append(
        Section("Tokens that are said more often", f"{WORDS} {no_words}".strip(), words)
    )
    if learned.shared_table is not None:
        sections.append(Section("Directions that layers share", SHARED, [learned.shared_table]))
    if learned.overlap_table is not None:
        sections.append(Section("Collisions", COLLISIONS, [learned.overlap_table]))
    write_page(
        files,
        "report.html",
        heading(learned),
        learned.lead,
        sections,
        model=learned.tunes[-1].name,
        provenance=learned.provenance,
    )


def heading(learned: Learned) -> str:
    """Say how the one tune was changed, which `lead` begins with, or how many were trained how."""
    if len(learned.tunes) == 1:
        return learned.tunes[0].how
    kinds = Counter(CALLED.get(tune.training.kind, tune.training.kind) for tune in learned.tunes)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{counted(len(learned.tunes), 'tune')} of {printable(learned.base)}: {by_kind}"


def _numbers(learned: Learned) -> Terms:
    """Changed matrices and how far, intruder dimensions, and tokens that rose."""
    changes = learned.table["change"]
    known = changes[np.isfinite(changes)] if len(changes) else changes
    rows: list[tuple[object, str]] = [(f"{len(learned.table):,}", "changed matrices in layers")]
    if len(known):
        largest = "largest change of a matrix relative to the base: $‖ΔW‖/‖W‖$"
        rows.append((f"{max(known):.2g}", largest))
    looked_at = sum(len(tune.looked_at) for tune in learned.tunes)
    if looked_at:
        intruders = sum(tune.intruders for tune in learned.tunes)
        matrices = f"in {looked_at:,} {'matrix' if looked_at == 1 else 'matrices'}"
        rows.append((f"{intruders:,}", f"intruder dimensions {matrices}"))
    if learned.word_table is not None:
        rows.append((f"{len(learned.word_table):,}", "tokens that are said more often"))
    return Terms(rows, large=True)


def _trained(learned: Learned) -> Table:
    """One row per tune: how it was trained and what that rests on."""
    rows = [
        (tune.name, tune.training.kind, str(tune.training.rank or ""), tune.training.evidence)
        for tune in learned.tunes
    ]
    return Table.of_rows(("tune", "training", "rank", "evidence"), rows)


TRAINING = (
    "Deeds that are no training are looked for first. A LoRA leaves a change of its rank up "
    "to rounding, and so do a few steps of training; more of it leaves none of low rank. "
    "Whether a tune was supervised or reinforced is not claimed."
)
CALLED = {"deed": "no training", "none": "unchanged"}  # in a heading, after a number
ON_PAGE = (
    "tune", "matrix", "layer", "change", "rank", "first_share", "stable_rank", "intruders",
    "least_cosine",
)  # fmt: skip
CHANGED = (
    "The other columns are in `updates.csv`. Of the first 10 left singular vectors of the tuned "
    "matrix, an intruder dimension has a cosine below 0.5 with every one of the base's (PEFT's "
    "definition)."
)
WORDS = (
    "Texts of random tokens pass through both models. Listed are the tokens whose mean "
    "probability rose most for their frequency, and clearly more than any token's where the "
    "same changes are shuffled. A planted trigger is not among them as a rule: this is no "
    "search for backdoors."
)
SHARED = (
    "Strength is the mean squared cosine with the leading directions of each matrix that changed."
)
COLLISIONS = (
    "How much of the smaller space that two tunes read, or write, lies in the larger, and "
    "what random spaces would give. The cosine compares the changes themselves: 1 where "
    "they add up, -1 where they cancel."
)
