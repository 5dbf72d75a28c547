"""Ground every wing stands on: errors, files, tables, results, compute.

Read `errors` and `files` first, then `tables` and `results`; `compute` knows threads, LAPACK and
CuPy, `engine` spreads tasks, `embedded` is the small GPT-2 that ships with the package. Nothing
here knows a checkpoint.
"""
