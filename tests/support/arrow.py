"""A table with every kind of cell that tables of results hold, and what readers of Arrow get of it."""

import numpy as np

from weightscope.core.tables import Column, Link, Table

MIXED = Table(  # what tables of results hold: empty cells among numbers, links, names that are no UTF-8
    [
        Column("head", [0, 1, 2], symbol="$h$", meaning="Its index."),
        Column("sigma1", [0.1 + 0.2, np.nan, np.inf], unit="m"),
        Column("layer", [3, "", None]),
        Column("usual", ["", np.float32(0.5), 2]),
        Column("large", [2**70, 1, ""]),
        Column("name", ["=1+1", Link("page.html", "page"), "\ud800\n"]),
        Column("known", ["", "", ""]),
        Column("tied", [True, False, True]),
    ],
    "heads",
)
AS_ARROW = {
    "head": ("int64", [0, 1, 2]),
    "sigma1": ("double", [0.1 + 0.2, None, np.inf]),
    "layer": ("int64", [3, None, None]),
    "usual": ("double", [None, 0.5, 2.0]),
    "large": ("double", [2.0**70, 1.0, None]),
    "name": ("string", ["=1+1", "page", "\\ud800\\n"]),
    "known": ("string", ["", "", ""]),
    "tied": ("bool", [True, False, True]),
}
