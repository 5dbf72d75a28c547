"""Everything in the file: a survey of all tensors, what stands out in them, and how they differ
between checkpoints.
"""
