"""A row as a person would write it: complete, or what differs from one of the roots, whichever is shorter."""

from weightscope.architectures import FAMILIES, Family
from weightscope.architectures.stanzas import ROOTS, stanza_of


def as_stanza(row: Family) -> str:
    """The shortest stanza of a row."""
    roots = [(root, base) for root in ROOTS if (base := FAMILIES.row(root)) is not None]
    return min((stanza_of(row, like) for like in (None, *roots)), key=len)
