"""One attention layer as arrays: maps, norms, rotation, low-rank matrices. Knows no file and no
family.
"""
