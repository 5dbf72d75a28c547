"""The page of circuits: an interactive diagram, names, edges, and the names' accuracy."""

from dataclasses import replace
from typing import Any

import numpy as np

from weightscope.core.errors import counted
from weightscope.core.files import Files
from weightscope.core.progress import phase
from weightscope.core.tables import Link, Table, as_json
from weightscope.heads.circuits.circuits import READS, Circuits
from weightscope.heads.circuits.figures import KIND_COLOURS, ROLE_COLOURS, UNNAMED, diagram
from weightscope.heads.circuits.names import COLUMNS, GIVEN
from weightscope.heads.circuits.wiring import PROJECTIONS, Wiring, strongest
from weightscope.report.pages.page import Terms, write_template
from weightscope.report.pages.style import save

ON_PAGE = 300  # the most edges of each kind shown at once
ROWS = 150  # heads listed; a page with thousands takes seconds to open
OF_A_HEAD = 2  # edges of each kind and direction that a chosen head always shows

MEANINGS = {
    "previous token": "attends to the token before",
    "feeds keys": "writes what keys of later heads read, "
    "as previous-token heads do for induction heads",
    "induction": "finds where its own token stood before and looks at what came after it",
    "duplicate token": "attends to earlier places of its own token",
    "detokenization": "puts the tokens of a split word together: "
    "it looks for what comes before its token in text",
    "identity": "passes its input on, multiplied by one number",
    "keys read a head": "its keys read much of what one earlier head writes, "
    "as the keys of induction heads do",
    "anti-copying": "lowers the logit of the token it attends to",
}


@phase("drawing figures")
def write_report(files: Files, circuits: Circuits) -> None:
    """Write report.html, circuits.png and circuits.svg."""
    named = circuits.named_heads
    listed = named.take(range(min(len(named), ROWS)))
    drawn = save(diagram(circuits), files, "circuits", "edges.csv")
    shown, edges, accuracy = facts(circuits), circuits.strongest_edges, circuits.accuracy
    roles = []
    roles_as_json = []
    for role, colour in ROLE_COLOURS.items():
        if role in circuits.named:
            meaning = "; ".join(filter(None, (MEANINGS[role], GIVEN[role].often)))
            heads = list(zip(circuits.named[role], circuits.scores_of(role), strict=True))
            roles.append((role, colour, meaning, heads))
            roles_as_json.append({"role": role, "meaning": meaning, "heads": dict(heads)})
    measured = None
    if accuracy is not None:
        measured = {"text": accuracy.text, "interval": 0.95, **accuracy.table.as_json()}
    numbers = {
        "roles": roles_as_json,
        "wiring": shown,
        "accuracy": measured,
        "edges": edges.as_json(),
        "named": named.as_json(),
        "columns": COLUMNS,
    }
    write_template(
        files,
        "report.html",
        "circuits.html",
        numbers=numbers,
        title=f"{circuits.n_named or 'None'} of the {counted(len(circuits.heads), 'head')} of "
        f"{circuits.name} {'is' if circuits.n_named < 2 else 'are'} named",
        lead=circuits.lead,
        provenance=circuits.provenance,
        caveats=circuits.caveats,
        facts=shown,
        roles=roles,
        kinds=READS,
        columns=COLUMNS,
        kind_colours=KIND_COLOURS,
        accuracy=accuracy,
        drawn=drawn,
        glance=_glance(circuits),
        edges=_linked(edges),
        named=_linked_heads(listed),
        found_named=len(named),
        at_once=ROWS,
    )


def _glance(circuits: Circuits) -> Terms:
    """The numbers below the heading: heads, names, and the strongest edge of all kinds."""
    layers = counted(len(circuits.wiring.layers), "layer")
    rows: list[tuple[object, str]] = [(f"{len(circuits.heads):,}", f"heads in {layers}")]
    rows += [(len(heads), role) for role, heads in circuits.named.items()]
    edges = circuits.strongest_edges
    if len(edges):
        writer, reader = (edges[side][0].partition(",")[0] for side in ("from", "to"))
        what = f"dimensions that {writer} writes and {reader} read, the strongest edge"
        random = f"random spaces: {edges['pk_random'][0]:.1f}"
        rows.append((f"{edges['pk'][0]:.1f} of {edges['of'][0]}", f"{what} ({random})"))
    return Terms(rows, large=True)


def _linked(edges: Table) -> Table:
    """The edges with links from each head to its panel; a cell is `keys of 1.4, induction`."""

    def link(cell: str) -> Link:
        layer, _, head = cell.partition(",")[0].rpartition(" ")[2].partition(".")
        return Link("", cell, f"L{layer}H{head}")

    return _replaced(edges, {name: [*map(link, edges[name])] for name in ("from", "to")})


def _linked_heads(named: Table) -> Table:
    """Named heads with links to their panels."""
    places = zip(named["layer"], named["head"], strict=True)
    return _replaced(named, {"head": [Link("", str(h), f"L{i}H{h}") for i, h in places]})


def _replaced(table: Table, cells: dict[str, list[Link]]) -> Table:
    columns = [
        replace(each, values=cells[each.name]) if each.name in cells else each
        for each in table.columns
    ]
    return Table(columns)


def facts(circuits: Circuits) -> dict[str, Any]:
    """The data that the page's script draws, as JSON."""
    roles = list(ROLE_COLOURS)
    scores = {}
    for name, (symbol, _) in COLUMNS.items():
        values = circuits.roles.scores[name]
        if np.isfinite(values).any():
            scores[symbol] = as_json([[round(float(cell), 3) for cell in row] for row in values])
    return {
        "layers": circuits.wiring.layers.tolist(),
        "heads": circuits.wiring.n_heads,
        "roles": roles,
        "colours": [*ROLE_COLOURS.values(), UNNAMED],
        "kinds": [{"name": name, "colour": KIND_COLOURS[kind]} for kind, name in READS.items()],
        "role": [
            [roles.index(name) if name else -1 for name in row] for row in circuits.roles.names
        ],
        "often": [GIVEN[role].often for role in roles],
        "scores": scores,
        "edges": page_edges(circuits.wiring),
        "top": int(circuits.edges["rank"].max(initial=0)),
    }


def page_edges(wired: Wiring) -> list[list[Any]]:
    """Edges of the page, strongest first within a kind.

    An edge is kind, i, a, j, b, PK, z of PK, CS, and 1 if it is among the ON_PAGE strongest.
    """
    rows = []
    n, h = wired.rank["o"].shape
    for number, kind in enumerate(PROJECTIONS):
        z = wired.z("pk", kind)
        among = {edge.pair for edge in strongest(wired, kind, "pk", ON_PAGE)}
        square = np.nan_to_num(z, copy=False, nan=-np.inf).reshape(n * h, n * h)
        of_heads = set()
        for writers, by_head in ((True, square), (False, square.T)):
            for head, distances in enumerate(by_head):
                for neighbour in np.argpartition(-distances, min(OF_A_HEAD, n * h - 1))[:OF_A_HEAD]:
                    if np.isfinite(distances[neighbour]):
                        ends = divmod(head, h), divmod(int(neighbour), h)
                        writer, reader = ends if writers else reversed(ends)
                        of_heads.add((*writer, *reader))
        for pair in sorted(among | of_heads, key=lambda pair: -z[pair]):
            pk, cs = wired.pk[kind][pair], wired.cs[kind][pair]
            numbers = (round(float(pk), 2), round(float(z[pair]), 1), round(float(cs), 4))
            rows.append([number, *map(int, pair), *numbers, int(pair in among)])
    return rows
