"""What was trained into a checkpoint: directions of each change, intruder dimensions, words, how it
was trained.
"""

SIGNS = {"learned.json": "learned"}  # command, by a file
