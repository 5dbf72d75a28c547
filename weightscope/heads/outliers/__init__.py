"""Dimensions of the residual stream that decide where attention goes (outlier-dimensions paper)."""
