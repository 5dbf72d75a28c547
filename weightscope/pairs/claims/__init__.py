"""A lineage as a claim that others can recompute: an in-toto statement, its signature, its check,
and SBOMs.
"""
