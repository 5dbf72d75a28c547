"""Atlas of many checkpoints: fingerprints, families and their trees, one table of all heads."""

SIGNS = {"atlas.json": "atlas"}  # command, by a file
