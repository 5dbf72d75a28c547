"""Bigrams of the works that come with weightscope, by the embedded tokenizer."""

from functools import cache

from weightscope.embedded import FOLDER
from weightscope.text.bigrams import count_bigrams
from weightscope.text.counts import Counts
from weightscope.text.sequences import works
from weightscope.text.tokenizer import Tokenizer


@cache
def embedded_counts() -> Counts:
    """Counted once in a run of the tests."""
    return count_bigrams(works(), Tokenizer.load(FOLDER))
