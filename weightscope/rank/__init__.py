"""Which matrices to train or to merge, by their weights, in a file for the tool that does it."""
