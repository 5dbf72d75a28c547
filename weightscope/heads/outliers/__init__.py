"""Dimensions of the residual stream that decide where attention goes (outlier-dimensions paper)."""

SIGNS = {"outliers.npz": "outliers"}  # command, by a file
