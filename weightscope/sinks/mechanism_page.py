"""What attention sinks do as a page, and as lines for the terminal."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Drawing

from weightscope.pages.page import Figure, Section, write_page
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.sinks.mechanism_figures import (
    MECHANISM_NAMES,
    head_map_figure,
    plane_figure,
    similarity_figure,
    sink_token_figure,
    spectrum_figure,
)
from weightscope.sinks.mechanisms import MECHANISMS, SINK_HEAD, SinkMechanisms
from weightscope.sinks.tables import HeadRow, LayerRow
from weightscope.tables import Table
from weightscope.wording import counted

SHOWN = 24  # heads in the page's table


def headline(found: SinkMechanisms) -> list[str]:
    """What was found, in a few sentences."""
    n_inputs, n_layers, n_heads = found.event.shape
    events = int(found.event.sum())
    did = ", ".join(f"{(found.mechanism == name).sum():,} {MECHANISM_NAMES[name]}" for name in MECHANISMS)
    lines = [
        f"{counted(n_inputs, 'input')}, {counted(n_layers, 'layer')} of {counted(n_heads, 'head')}: "
        f"{counted(events, 'sink event')} in {found.event.size:,} "
        f"({found.event.mean():.2%}){f'; {did}' if events else ''}.",
        f"{found.sink_heads.sum()} of {n_layers * n_heads} heads are sink heads "
        f"(an event on {SINK_HEAD:.0%} of the inputs or more).",
    ]
    return [*lines, _transition(found)]


def _transition(found: SinkMechanisms) -> str:
    """Which kind of token is the strongest sink most often in the first third of the layers and in the last."""
    third = max(1, len(found.layers) // 3)
    early, late = (
        np.bincount(part.ravel(), minlength=len(found.kinds)) / part.size
        for part in (found.kind[:, :third], found.kind[:, -third:])
    )
    told = [
        f"{share[share.argmax()]:.0%} {found.kinds[share.argmax()]} in the {name} third of the layers"
        for name, share in (("first", early), ("last", late))
    ]
    return f"The strongest key of a head is most often: {', '.join(told)}."


@phase("drawing figures")
def write_sink_report(
    found: SinkMechanisms, heads: Sequence[HeadRow], layers: Sequence[LayerRow], name: str, note: str, out: Path
) -> None:
    """Write the figures as PNG and SVG, and report.html.

    Parameters
    ----------
    found : SinkMechanisms
    heads : sequence of HeadRow
    layers : sequence of LayerRow
    name : str
        The model's.
    note : str
        What it was run on, and how.
    out : Path

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """

    def drawn(name: str, figure: Drawing, caption: str) -> Figure:
        return Figure(save(figure, out, name), caption)

    strongest = sorted(heads, key=lambda row: (-row.events, -row.strength))[:SHOWN]
    by_head = Table.of_rows(
        ("layer", "head", "strength", "events", "sink", "ratio", "stable rank", "mechanism", "σ1/σ2 of W_QK"),
        [
            (r.layer, r.head, r.strength, r.events, r.kind, r.ratio_out, r.stable_rank, r.mechanism, r.qk_gap)
            for r in strongest
        ],
        f"The {len(strongest)} heads with the most sink events, then the strongest sinks; heads.csv has all.",
    )
    by_layer = Table.of_rows(
        ("layer", "sink", "its share", "token", "the token's share", "events"),
        [(r.layer, r.kind, r.kind_share, r.token, r.token_share, r.events) for r in layers],
        "Which kind of token, and which token, is the strongest sink most often, over inputs and heads.",
    )
    sections = [
        Section(
            "Which tokens are sinks",
            "The strongest sink of a head on an input is the key that gets most of its attention (eq. 2). It makes a "
            "sink event when at least 90 % of the queries give it half of their attention or more.",
            [
                drawn(
                    "sink-tokens", sink_token_figure(found),
                    "Fig. 4. By layer, mean over inputs and heads: share of the attention that each kind of token "
                    "gets; share of the heads whose strongest key is of that kind; share that has a sink event there.",
                ),
                drawn(
                    "head-map", head_map_figure(found),
                    "Fig. 5. Strength of each head's strongest sink; share of inputs on which it makes an event; "
                    "what the sinks of heads with an event on half of the inputs mostly do.",
                ),
                by_head,
                by_layer,
            ],
        ),
        Section(
            "No-op or broadcast",
            "A sink event is a NOP where the sink's value norm is at most 0.2 of the other tokens' mean, a broadcast "
            "where it is at least 0.5 of it and the head's update has stable rank 1.5 or less.",
            [
                drawn(
                    "plane", plane_figure(found),
                    "Figs 6 and 8. Every head's strongest sink on every input. Left: by mechanism; dotted: the "
                    "rule's bounds. Right: events by layer and by the kind of token that is the sink.",
                ),
                drawn(
                    "similarity", similarity_figure(found),
                    "Mean cosine between different tokens of an input before and after attention adds to them, and "
                    "of each token with itself across that; median over inputs and the middle half of them.",
                ),
            ],
        ),
        Section(
            "How sinks are chosen",
            "A gate needs one large singular value of W_QK, or a sink of large norm (Lemma 2). Under rotation W_QK is "
            "that of distance 0.",
            [
                drawn(
                    "spectra", spectrum_figure(found),
                    "Fig. 2B. Singular values of W_QK over the largest, median over heads and the middle half of "
                    "them. Then, against the strength of each head's sink: the ratio of the two largest; and the "
                    "sink's norm in the residual stream over the other tokens', median over inputs.",
                ),
            ],
        ),
    ]  # fmt: skip
    write_page(out, "report.html", f"Attention sinks of {name}", " ".join([*headline(found), note]), sections)
