"""Heads of the first layer that put split words together, by tokens and by position."""
