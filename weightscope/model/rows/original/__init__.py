"""Checkpoints under the names that those who train models give, as transformers would have them."""
