"""Token ids of texts word by word: a word that has been met before is looked up, not encoded again."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.shapes import ShowsShapes
from weightscope.text.counts import Int64s

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

A_WORD, A_CHARACTER = 200, 4  # bytes that a word takes, about: two objects, its place among the numbers, its token ids


def encodings(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """The tokens of each text, no special token added.

    Raises
    ------
    CheckpointError
        The tokenizer does not take them.
    """
    try:
        return list(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    except Exception as error:  # the library has no error class of its own
        raise CheckpointError(f"the tokenizer cannot encode this corpus: {error}") from error


class _Numbers(dict[str, int]):
    """Numbers words in the order they are first asked for."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self.new.append(word)
        self[word] = number = len(self)
        return number


@dataclass(frozen=True, eq=False, repr=False)
class Numbered(ShowsShapes):
    """Texts as the numbers of their words.

    Attributes
    ----------
    among : Words
        That numbered them.
    numbers : (words,) int64
    counts : (texts,) int64
        How many words each text has.
    new : list of str
        Those not met before, in the order of their numbers.
    """

    among: Words
    numbers: Int64s
    counts: Int64s
    new: list[str]


class Words:
    """The words met so far and their token ids.

    Parameters
    ----------
    split : function of a text
        Gives its words, each with the tokens that it has in the text, as `safe_split` does.

    Attributes
    ----------
    nbytes : int
        Of memory that they take, about.
    """

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        self._numbers = _Numbers()
        self._ids, self._ends = array("q"), array("q", [0])  # of all words, one after the other
        self.nbytes = 0

    def number(self, texts: list[str]) -> Numbered:
        """The words of texts; those that are new have to be learned before `ids` is asked for."""
        words = [self._split(text) for text in texts]
        counts = np.fromiter(map(len, words), np.int64, len(words))
        number, self._numbers.new = self._numbers.__getitem__, []
        numbers = np.fromiter(map(number, chain.from_iterable(words)), np.int64, counts.sum())
        self.nbytes += sum(A_WORD + A_CHARACTER * len(word) for word in self._numbers.new)
        return Numbered(self, numbers, counts, self._numbers.new)

    def learn(self, new: list[Encoding]) -> None:
        """Take in the tokens of the words that are new, in the order of their numbers."""
        for encoding in new:
            self._ids.fromlist(encoding.ids)
            self._ends.append(len(self._ids))

    def ids(self, numbered: Numbered) -> tuple[Int64s, Int64s]:
        """The token ids of all texts, one after the other, (ids,), and where each text's begin, (texts,)."""
        ids, ends = np.frombuffer(self._ids, np.int64), np.frombuffer(self._ends, np.int64)
        starts = ends[numbered.numbers]  # (words,)
        lengths = ends[numbered.numbers + 1] - starts
        stops = np.append(0, np.cumsum(lengths))
        places = np.repeat(starts - stops[:-1], lengths) + np.arange(stops[-1])  # (ids,)
        return ids[places], stops[np.cumsum(numbered.counts) - numbered.counts]
