"""The position terms as sections of a page."""

from collections.abc import Sequence
from pathlib import Path

from weightscope.detokenization.position_figures import all_heads_figure, position_figure
from weightscope.detokenization.positions import HeadTrend, PositionTerms
from weightscope.folder import remove_earlier
from weightscope.pages.page import Figure, Section
from weightscope.pages.style import save
from weightscope.progress import phase
from weightscope.tables import Table


@phase("drawing figures")
def position_sections(
    terms: PositionTerms, found: Sequence[HeadTrend], out: Path, heads: Sequence[int] = ()
) -> list[Section]:
    """Draw Fig. 3 for the heads asked for (the one that looks nearest, if none is) into `out`, and say what it says."""
    remove_earlier(out, r"positions-head-\d+\.(png|svg)")
    nearest = max(found, key=lambda row: row.recency if terms.sigma is None else row.near_mass)
    figures = []
    for head in heads or (nearest.head,):
        row = found[head]
        caption = (
            f"Fig. 3 for head {head} at query position {terms.query}. A line of slope {row.t_p.slope:.3g} a "
            f"position is {row.t_p.linear_share:.0%} of the variance of T^p; a sinusoid of period "
            f"{row.t_pp.period:.0f} is {row.t_pp.sinusoid_share:.0%} of that of T^pp."
        )
        figures.append(Figure(save(position_figure(terms, head), out, f"positions-head-{head}"), caption))
    every = Figure(
        save(all_heads_figure(terms), out, "positions-all-heads"),
        f"T^p + T^pp of every head at query position {terms.query}, each with its mean taken out.",
    )
    table = Table.of_rows(
        ("head", "slope of T^p", "linear share", "period of T^pp", "sinusoid share", "recency", "near mass"),
        [
            (r.head, r.t_p.slope, r.t_p.linear_share, r.t_pp.period, r.t_pp.sinusoid_share, r.recency, r.near_mass)
            for r in found
        ],
        "Slope per position of T^p and the share of its variance that is linear; period of T^pp and its share; "
        "Spearman correlation of the sum with j; attention that position gives to the nearest tenth of positions.",
    )
    near = sum(row.recency > 0 for row in found)
    text = f"Position alone makes {near} of {len(found)} heads favour near tokens."
    if len(terms.undertrained):
        listed = ", ".join(map(str, terms.undertrained))
        text += f" Positions {listed} were hardly ever trained and are left out of the trends."
    return [Section("What heads owe to position", text, [*figures, every, table])]
