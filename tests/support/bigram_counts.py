"""Bigrams of the works that come with weightscope, by the tokenizer of both small models."""

from functools import cache

from tests.support.two_layers import FOLDER
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.counts import Counts
from weightscope.model.text.sequences import works
from weightscope.model.text.tokenizer import Tokenizer


@cache
def embedded_counts() -> Counts:
    """Counted once in a run of the tests."""
    return count_bigrams(works(), Tokenizer.load(FOLDER))
