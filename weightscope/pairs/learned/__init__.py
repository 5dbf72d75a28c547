"""Training that a checkpoint shows: directions, intruder dimensions, words and method."""

SIGNS = {"learned.json": "learned"}  # command, by a file
