"""Find where a checkpoint comes from, and what was done to it.

`sketches` fingerprints heads, `matching` finds counterparts, `verdict` judges each base, `parts`
compares the rest of a file, `direction` tells which came first, and `lineage` puts it together.
"""

SIGNS = {"lineage.json": "lineage"}  # command, by a file
