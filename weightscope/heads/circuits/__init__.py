"""Roles of heads and the wiring between them, from the weights alone."""
