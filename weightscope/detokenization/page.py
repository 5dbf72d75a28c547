"""The detokenization analysis as sections of a page."""

from collections.abc import Sequence
from pathlib import Path

from weightscope.detokenization.figures import auroc_figure, roc_figure
from weightscope.detokenization.heads import Detokenization, TokenRoc
from weightscope.detokenization.neighbours import COLUMNS, Neighbour
from weightscope.folder import remove_earlier
from weightscope.pages.page import Figure, Section
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Table
from weightscope.text.counts import Counts


@phase("drawing figures")
def detok_sections(
    found: Detokenization, curves: Sequence[TokenRoc], counts: Counts, out: Path
) -> tuple[str, list[Section]]:
    """Draw the figures into `out` and say what they say.

    Returns
    -------
    lead : str
        The result in a sentence.
    sections : list of Section
    """
    remove_earlier(out, r"roc\.(png|svg)")
    best, worst = found.table[0], found.table[-1]
    lead = (
        f"Head {best.head} ranks previous tokens that occur in text above those that do not with AUROC "
        f"{best.auroc:.2f}; head {worst.head}, the lowest, with {worst.auroc:.2f}; 0.5 is chance."
    )
    counted = (
        f"{counts.tokens:,} tokens in {counts.documents:,} documents, {counts.pairs:,} distinct "
        f"bigrams. {best.tokens_scored:,} of {found.auroc.shape[1]:,} tokens follow some token."
    )
    table = Table.of_rows(
        ("head", "AUROC", "AUROC, paper's mean", "tokens scored"),
        [(row.head, row.auroc, row.auroc_paper, row.tokens_scored) for row in found.table],
        "Table 2. The paper's mean counts a token that follows no token as 0.",
    )
    caption = (
        "Bigram AUROC of T^ee by head, best first. "
        "Dot: mean over tokens; bars: the middle half and the middle 90 % of them."
    )
    parts: list[Figure | Table] = [Figure(save(auroc_figure(found), out, "auroc"), caption), table]
    sections = [Section("Which heads put words together", counted, parts)]
    if curves:
        figure = Figure(
            save(roc_figure(curves, found), out, "roc"),
            "ROC curves for single current tokens (Fig. 2): the best and the worst head in colour, the others in grey.",
        )
        sections.append(Section("ROC curves of single tokens", parts=[figure]))
    return lead, sections


def neighbour_section(found: Sequence[Neighbour], tokens: Sequence[str]) -> Section:
    """Tables 1 and 3: what heads would put before each of these tokens."""
    rows = [[getattr(n, column) for column in COLUMNS] for n in found]
    listed = ", ".join(repr(token) for token in tokens)
    text = f"The previous tokens that heads score highest (T^ee) for the current tokens {listed}."
    return Section("What heads look for", text, [Table.of_rows(COLUMNS, rows, "Tables 1 and 3.")])
