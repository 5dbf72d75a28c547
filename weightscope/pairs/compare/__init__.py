"""Distances that heads moved between checkpoints, and what was done: `weightscope compare`."""
