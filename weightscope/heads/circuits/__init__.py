"""Roles of heads and the wiring between them, from the weights alone."""

SIGNS = {"wiring.npz": "circuits"}  # command, by a file
HEADS = {"circuits": "roles.csv"}  # its table of heads
