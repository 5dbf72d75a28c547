"""Packings of quantised weights: one module for each format or family of formats."""
