"""Attention sinks: is what they write a constant, and are they NOPs or broadcasts?"""

SIGNS = {"sinks.npz": "sinks", "mu_sink.npz": "sinks"}  # command, by a file
HEADS = {"sinks": "heads.csv"}  # its table of heads
