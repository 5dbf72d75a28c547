"""What commands have to say of a checkpoint and of what was made of it: properties of all verdicts, not of one case.

    python -m tests.properties 2000 [SEED]

A case says what is done to which checkpoint, as plain data (cases.py): nothing but another way of writing it
(originals.py), another gauge, a tensor destroyed, moved, exchanged or negated, or another value in its config. Every
command is asked about the pair (pair.py), and every relation between what they say has to hold (relations.py). Cases
that once failed are in saved.py. characters.py changes claims, identities and cards one character at a time.
"""
