"""Deeds: what was done to one tensor of B, how it is measured and in which order it is sought."""
