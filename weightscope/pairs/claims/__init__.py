"""Claims that others recompute: a lineage as an in-toto statement, its signature and SBOMs."""
