"""The page of a list of audits: how they ended, a sortable row a checkpoint with a link to its own page."""

from collections.abc import Sequence

from weightscope.audits.summary import NUMBERS, Row
from weightscope.folder import Files
from weightscope.pages.page import Section, write_page
from weightscope.tables import Link, Table

COLUMNS = (
    "checkpoint", "family", "layers", "heads", "width", "findings",
    "σ₁(W_QK)", "erank(W_QK)", "σ₁(W_VO)", "copying score",
)  # fmt: skip


def write_summary_page(rows: Sequence[Row], files: Files) -> None:
    """Write summary.html.

    Raises
    ------
    CheckpointError
        It cannot be written.
    """
    ended = [row for row in rows if row.headline is not None]
    failed = [row for row in rows if row.headline is None]
    heads = sum(row.headline.layers * row.headline.heads for row in ended if row.headline)
    lead = f"{len(ended)} of {len(rows)} checkpoints audited, {heads:,} heads." + (
        f" {len(failed)} failed." if failed else ""
    )
    table = Table.of_rows(
        COLUMNS,
        [(Link(f"{row.name}/report.html", row.name), *row.cells()[3 : 3 + len(NUMBERS)]) for row in ended],
        "The last four are medians over all heads. A click on a column's name sorts; a name leads to its page.",
    )
    sections = [Section("Checkpoints", parts=[table])] if ended else []
    if failed:
        causes = Table.of_rows(
            ("checkpoint", "source", "what was wrong"), [(r.name, r.source, r.error) for r in failed]
        )
        sections.insert(0, Section("Failed", "Mend these and run again with --resume: the others stay.", [causes]))
    write_page(files, "summary.html", "Audits", lead, sections)
