"""The page of what was learned: sentences, picture, words, shared directions, collisions."""

from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.tables import Table
from weightscope.pairs.learned.figures import learned_figure
from weightscope.pairs.learned.learned import Learned
from weightscope.report.pages.page import Figure, Section, write_page
from weightscope.report.pages.style import save

LISTED = 40  # matrices in the table


def write_learned_page(files: Files, learned: Learned) -> None:
    """Write the picture as PNG and SVG, and report.html."""
    picture = save(learned_figure(learned), files, "learned")
    caption = (
        "Relative change of each matrix, by role and layer; a number counts its intruder "
        "dimensions."
    )
    sections = [Section("How each was trained", TRAINING, [_trained(learned)])]
    figure, most_changed = Figure(picture, caption), learned.most_changed(LISTED)
    sections.append(Section("Where it moved", INTRUDERS, [figure, most_changed]))
    no_words = " ".join(
        plain(f"None for {tune.name}: {tune.no_words}.") for tune in learned.tunes if tune.no_words
    )
    parts = [] if learned.word_table is None else [learned.word_table]
    sections.append(
        Section("Tokens that are said more often", f"{WORDS} {no_words}".strip(), parts)
    )
    if learned.shared_table is not None:
        sections.append(Section("Directions that layers share", SHARED, [learned.shared_table]))
    if learned.overlap_table is not None:
        sections.append(Section("Collisions", COLLISIONS, [learned.overlap_table]))
    title = plain(f"What was trained into {learned.tunes[0].name}")
    model = plain(learned.tunes[-1].name)
    write_page(
        files,
        "report.html",
        title,
        plain(learned.lead),
        sections,
        model=model,
        provenance=learned.provenance,
    )


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
INTRUDERS = (
    "Of the first 10 left singular vectors of the tuned matrix, an intruder dimension has a "
    "cosine below 0.5 with every one of the base's (PEFT's definition)."
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
