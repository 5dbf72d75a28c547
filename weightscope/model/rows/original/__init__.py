"""Checkpoints under their trainers' names, as transformers would have them."""
