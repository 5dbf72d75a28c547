"""Tensors to heads: which row reads a checkpoint, what its config means, and its layers as arrays.

Read `layers` (arrays alone), then `config` (what a config.json means), `rows` (one stanza per
architecture), `embeddings` (what lies before and after the layers), `opened` (a source, opened) and
`model`, which brings them together. Several questions compute with `metrics` (functions of arrays)
and `text` (corpora, tokenizers and counts). `sources` and `run_identity` say what a command was
given and what a resumed run depends on.
"""
