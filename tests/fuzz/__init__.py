"""Mutated files of every kind that is read: each is read or refused in a CheckpointError; nothing else may happen.

    python -m tests.fuzz 200000 [SEED]

A mutation starts from a good file and from the attacks, and cuts, repeats, flips and splices bytes, or replaces values
and repairs what stands around them, so that some pass every check and are read.
"""
