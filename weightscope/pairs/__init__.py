"""Questions about two or more checkpoints, a folder each.

`changes` says what was done to tensors and heads; `compare`, `same`, `learned` and `lineage` ask
it; `claims` makes a lineage that others recompute, `rank` chooses matrices, `atlas` maps many
checkpoints.
"""
