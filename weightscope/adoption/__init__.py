"""What transformers' own models say of the table of architectures: tiny ones are built, watched and compared.

`shrinking` makes their configs and `tiny` builds them, `observed` records what their eager attention does, `judge`
compares it with what weightscope reads from the same checkpoint, `census` does so for every architecture that
transformers has.
"""
