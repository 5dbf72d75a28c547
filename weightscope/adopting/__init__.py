"""Read an architecture that the table lacks, and verify the row against transformers' eager
attention.

`adopt` is the entrance. `tiny_models`, `inputs` and `hooks` build tiny random models and record
their attention, `comparison` and `trial` compare it with what weightscope reads, and `shapes` and
`search` make rows to try. The census, which compares every architecture of transformers, is in
tests/census.
"""
