"""Lengths of alpha f(x), which attention adds up, against alpha (norm-based-attention paper)."""

SIGNS = {"norms.npz": "norms"}  # command, by a file
HEADS = {"norms": "heads.csv"}  # its table of heads
