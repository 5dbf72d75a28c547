"""The static site of an atlas: a page of all checkpoints, and one for each; no server needed."""

from dataclasses import replace
from typing import NamedTuple

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import counted
from weightscope.core.files import Files
from weightscope.core.formulas import plain
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Link, Table, column, columns_of
from weightscope.pairs.atlas.atlas import PAGES, Atlas, Likeness
from weightscope.report.pages.page import Section, write_template

TEMPLATE = "atlas.html"
AT_ONCE = 256  # files written together
SHOWN_ROWS = 2_000  # heads on a page; heads.parquet has all
BACK = Link("../index.html", "all checkpoints")
NOT_SHOWN = ("checkpoint", "commit", "family")  # columns of heads that are the same in all rows
OF_TREES = (
    "Of each family the nearest pairs that join all. A pair has an order only where the weights "
    "prove which came first. Values join pairs whose stream was rotated, permuted or cut."
)
OF_HEADS = (
    "relative: the most similar head of another checkpoint; stranger: of another family. Empty "
    "where none is more similar than chance allows."
)


def write_site(files: Files, atlas: Atlas) -> None:
    """Write index.html and a page per checkpoint."""
    pages = Files()
    for place in bar(range(len(atlas.members)), "pages", "page"):
        _write_page(pages, atlas, place)
        if len(pages.contents) >= AT_ONCE or place == len(atlas.members) - 1:
            files.add(pages.contents)
            pages = Files()
    checkpoints = Table(atlas.checkpoints.columns, "A name leads to its page.")
    sections = [Section("Checkpoints", parts=[checkpoints])]
    if len(atlas.family_table):
        shown = atlas.family_table.select("family", "checkpoints", "architectures", "first")
        families = [atlas.families[number - 1] for number in shown["family"]]
        members = [atlas.link(family.members[0], f"{PAGES}/") for family in families]
        columns = [
            *shown.columns,
            Column("member", meaning="First member of the family.", values=members),
        ]
        sections.append(Section("Families", parts=[Table(columns)]))
        sections.append(Section("Trees", OF_TREES, [atlas.tree]))
    if len(atlas.errors):
        sections.append(Section("Not read", parts=[atlas.errors]))
    provenance = replace(atlas.provenance, sources=())  # each page has its checkpoint's
    write_template(
        files,
        "index.html",
        TEMPLATE,
        title="Atlas",
        lead=plain(atlas.lead),
        provenance=provenance,
        sections=sections,
    )


class RelativeRow(NamedTuple):
    """A neighbour in a checkpoint's tree, as a row on its page."""

    name: Link = column(symbol="checkpoint")
    alike: Likeness = columns_of(Likeness)  # type: ignore[assignment]
    order: str = column("Whether it came earlier or later, where the weights prove it.")
    how: str = column("How the later one can be recomputed from the earlier one.")
    differs: str = column()


def _write_page(files: Files, atlas: Atlas, place: int) -> None:
    """Write the page of one checkpoint."""
    member, each = atlas.members[place], atlas.outlines[place]
    row = atlas.checkpoints.take([place])
    facts = [(column.heading, column.shown(column.values[0])) for column in row.columns[1:]]
    family = atlas.families[atlas.family_of[place] - 1]
    rows = []
    for edge in family.edges:
        if place in (edge.first, edge.second):
            relative = edge.second if edge.first == place else edge.first
            order = {None: "", place: "earlier"}.get(atlas.later(edge), "later")
            direction = atlas.direction(edge)
            alike = Likeness(edge.by, edge.bits, edge.likeness, edge.p)
            rows.append(RelativeRow(atlas.link(relative), alike, order, *direction[1:]))
    n = len(each.layer)
    of_all = "" if each.is_whole else f" of {each.about['heads'] * each.about['layers']:,}"
    lead = f"{counted(n, 'head')} read{of_all}; {counted(len(family.members) - 1, 'relative')}."
    sections = [Section("Checkpoint", parts=[Table.of_rows(("what", "value"), facts)])]
    if rows:
        of_relatives = "The neighbours in its family's tree."
        table = Table.of(RelativeRow, rows)
        sections.append(Section("Nearest relatives", of_relatives, [table]))
    columns = atlas.heads_of(place)
    names = {
        name: values
        for name, values in columns.items()
        if name not in NOT_SHOWN and not name.endswith(("_layer", "_head"))
    }
    for kind in ("relative", "stranger"):
        where = zip(columns[kind], columns[f"{kind}_layer"], columns[f"{kind}_head"], strict=True)
        names[kind] = [f"{name} {layer}.{head}" if name else "" for name, layer, head in where]
    heads = Table(
        [
            replace(HEAD_COLUMNS.get(name, Column(name)), values=values)
            for name, values in names.items()
        ]
    )
    text = OF_HEADS
    if n > SHOWN_ROWS:
        heads = heads.take(range(SHOWN_ROWS))
        text = f"{text} The first {SHOWN_ROWS:,} of {n:,} heads."
    sections.append(Section("Heads", text, [heads]))
    made = atlas.provenance
    provenance = Provenance((each.read,), made.command, made.date, made.version)
    write_template(
        files,
        f"{PAGES}/{member.page}.html",
        TEMPLATE,
        title=plain(member.name),
        lead=plain(lead),
        provenance=provenance,
        sections=sections,
        back=BACK,
    )


HEAD_COLUMNS = {
    "qk_frobenius": Column("qk_frobenius", symbol="‖W_QK‖"),
    "qk_sigma1": Column("qk_sigma1", symbol="σ₁(W_QK)"),
    "qk_stable_rank": Column("qk_stable_rank", symbol="stable rank of W_QK"),
    "vo_frobenius": Column("vo_frobenius", symbol="‖W_VO‖"),
    "vo_sigma1": Column("vo_sigma1", symbol="σ₁(W_VO)"),
    "vo_stable_rank": Column("vo_stable_rank", symbol="stable rank of W_VO"),
    "relative_likeness": Column("relative_likeness", symbol="likeness", format=".3f"),
    "stranger_likeness": Column("stranger_likeness", symbol="likeness", format=".3f"),
}
