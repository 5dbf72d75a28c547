"""Many checkpoints at once: fingerprints from few bytes of each, families and their trees, one
table of all heads.
"""
