"""Heads of the first layer that put split words together, by tokens and by position."""

# Command, by a file.
SIGNS = {"tokens.npz": "detok", "positions.npz": "positions", "kernel.npz": "positions"}
HEADS = {"detok": "heads.csv", "positions": "trends.csv"}  # tables of heads
