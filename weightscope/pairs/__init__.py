"""Questions about two or more checkpoints, a folder each.

`deeds` says what was done to one tensor, and `changes` to all tensors, heads and layers; `compare`,
`same`, `learned` and `lineage` ask them; `claims` makes a lineage that others recompute, `rank`
chooses matrices, `atlas` maps many checkpoints.
"""
