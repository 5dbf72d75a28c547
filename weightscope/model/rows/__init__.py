"""Architectures as data: a stanza of a TOML file for each, its cells, and the role of every
tensor.
"""
