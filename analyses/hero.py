"""Draw the README's first picture from the tables of GPT-2's circuits: what the keys of its heads read.

    python -m analyses.hero --out figures/hero

It is drawn for a phone's width, and changes its colours with the reader's (`prefers-color-scheme`).
"""

import csv
import io
import re
from pathlib import Path

import click
import numpy as np

from weightscope.core.files import Folder
from weightscope.heads.circuits.figures import KIND_COLOURS, ROLE_COLOURS, UNNAMED, curve
from weightscope.report.pages.style import in_our_style, subplots

TABLES = Path(__file__).parents[1] / "figures" / "circuits" / "gpt2"
SIZE = (4.0, 2.9)  # inches: 384 pixels of a browser, so that nothing is much smaller than it is here on a phone
SHOWN = 'width="640" height="464"'  # where there is room
TEXT = {"font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5}
DARK = """
@media (prefers-color-scheme: dark) {
  [style*="fill: #ffffff"] { fill: #0d1117 !important }
  [style*="stroke: #000000"] { stroke: #9aa4b0 !important }
  [style*="fill: #c4c9cf"] { fill: #4b545e !important }
  g[id^="text"] { fill: #e6e9ed }
  [style*="stroke: #9c5a1a"] { stroke: #d08f4f !important }
}
"""


def rows(name: str) -> list[dict[str, str]]:
    """A table of GPT-2's circuits."""
    with (TABLES / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def picture() -> str:
    """The picture as SVG."""
    heads, edges = rows("roles.csv"), [e for e in rows("edges.csv") if e["kind"] == "k" and e["ranked_by"] == "pk"]
    roles = {(int(head["layer"]), int(head["head"])): head["role"] for head in heads}
    strongest = max(float(edge["pk_z"]) for edge in edges)
    named: set[tuple[int, int]] = set()
    with in_our_style(**TEXT):
        figure, axis = subplots(figsize=SIZE)
        for edge in edges:
            a, b = ((int(edge[f"{end}_layer"]), int(edge[f"{end}_head"])) for end in ("from", "to"))
            axis.add_patch(curve(a, b, KIND_COLOURS["k"], 0.6 + 2.4 * float(edge["pk_z"]) / strongest))
            named |= {a, b}
        points = np.array(list(roles))
        sizes = [26 if place in named else 6 for place in roles]
        axis.scatter(*points.T, s=sizes, c=[ROLE_COLOURS.get(role, UNNAMED) for role in roles.values()], zorder=3, lw=0)
        for layer, head in sorted(named):
            if roles[layer, head]:
                where = {"xytext": (-5, 0), "ha": "right"} if layer < 5 else {"xytext": (5, 0), "ha": "left"}
                text = f"{layer}.{head}"
                axis.annotate(text, (layer, head), textcoords="offset points", va="center", fontsize=8, **where)
        axis.set(xlabel="layer", ylabel="head", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
        axis.set_title("what the keys of GPT-2's heads read")
        axis.invert_yaxis()
        for role in (role for role in ROLE_COLOURS if role in roles.values()):
            axis.scatter([], [], s=26, c=ROLE_COLOURS[role], label=role)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, handletextpad=0.2, columnspacing=1.2)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue().decode().replace("</style>", f"{DARK}</style>", 1)
    return re.sub(r'width="288pt" height="[\d.]+pt"', SHOWN, svg, count=1)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(out: Path) -> None:
    """Write OUT/hero.svg."""
    out.mkdir(parents=True, exist_ok=True)
    with Folder(out).open("hero.svg") as file:
        file.write(picture().encode())
    click.echo(out / "hero.svg")


if __name__ == "__main__":
    main()
