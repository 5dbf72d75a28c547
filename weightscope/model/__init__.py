"""Tensors to heads: which row reads a checkpoint, what its config means, and its layers as arrays.

Read `layers` (arrays alone), then `config` (what a config.json means), `rows` (an architecture a
stanza) and `model`, which brings them together. `metrics` and `text` are what several questions
compute with: functions of arrays; corpora, tokenizers and counts. `sources` and `run_identity` say
what a command was given and what a resumed run depends on.
"""
