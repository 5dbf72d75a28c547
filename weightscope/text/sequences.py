"""Text as the sequences that a model is run on."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from weightscope.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FEWEST_WORDS = 8  # of a paragraph; shorter ones are headings and captions
FEWEST_IN_SENTENCE = 4  # words; shorter ones are headings and abbreviations
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)]))\s+(?=\W?[^\Wa-z_])""")


@dataclass(frozen=True)
class Framing:
    """A tokenizer, and the special tokens that stand around every text.

    Attributes
    ----------
    tokenizer : tokenizers.Tokenizer
    added : tuple of int
        Tokens that the tokenizer itself adds, each once, in their order: [CLS] and [SEP], <s> alone, or none.
    before : tuple of int
        The token to put before a text, where the tokenizer adds none and the model expects one.
    n_positions : int or None
        Tokens that the model takes at most; None where nothing sets a limit.
    """

    tokenizer: "Tokenizer"
    added: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    n_positions: int | None = None

    @property
    def special(self) -> tuple[int, ...]:
        """All of them; the first is what a text begins with."""
        return self.before + self.added

    @property
    def takes_pairs(self) -> bool:
        """Two texts can be one input: the tokenizer puts a token before them and another one after each."""
        return len(self.added) > 1

    def begun(self, text: str) -> list[int]:
        """The tokens of a text after the first special token, without any other: what language models are given."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self.special[:1], *ids]


def added_tokens(tokenizer: "Tokenizer") -> tuple[int, ...]:
    """The special tokens that a tokenizer adds to a pair of texts, each once, in their order."""
    encoded = tokenizer.encode("a", "a")
    marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return tuple(dict.fromkeys(token for token, special in marked if special))


def paragraphs(document: str) -> list[str]:
    """The paragraphs of plain text or Markdown: what blank lines part, in one line each, headings left out."""
    texts = (block for block in _blocks(document) if block[:1] not in ("#", "-", "="))
    return [text for text in texts if text.count(" ") >= FEWEST_WORDS - 1]


def sentences(document: str) -> list[str]:
    """The sentences of a text: what ends with . ! or ? before a capital or a number, and with every blank line."""
    parts = (part for block in _blocks(document) for part in SENTENCE_END.split(block))
    return [part for part in parts if part.count(" ") >= FEWEST_IN_SENTENCE - 1]


def _blocks(document: str) -> Iterator[str]:
    """What blank lines part, in one line each."""
    return (" ".join(block.split()) for block in document.replace("\r\n", "\n").split("\n\n"))


def paragraph_pairs(
    framing: Framing, texts: Sequence[str], n: int, longest: int = 128, seed: int = 0
) -> list[np.ndarray]:
    """Two consecutive paragraphs as one input, [CLS] paragraph1 [SEP] paragraph2 [SEP] (norm-based-attention, 5.1).

    Parameters
    ----------
    framing : Framing
    texts : sequence of str
        Documents.
    n : int
        Pairs wanted, drawn without replacement; all there are where these are fewer.
    longest : int
        Tokens of an input, special ones included, or as many as the model takes; the longer paragraph is cut until
        the pair fits.
    seed : int

    Returns
    -------
    list of (at most `longest`,) int64 arrays

    Raises
    ------
    CheckpointError
        No document has two paragraphs.
    """
    pairs = [pair for text in texts for pair in pairwise(paragraphs(text))]
    if not pairs:
        raise CheckpointError(
            f"no two paragraphs of {FEWEST_WORDS} words or more, parted by a blank line, in this text"
        )
    return _encoded(framing, pairs, n, longest, seed)


def sentence_sequences(
    framing: Framing, texts: Sequence[str], n: int, longest: int = 128, seed: int = 0
) -> list[np.ndarray]:
    """Single sentences as inputs, in random order.

    Parameters
    ----------
    framing : Framing
    texts : sequence of str
        Sentences.
    n : int
        Sentences wanted, drawn without replacement; all there are where these are fewer.
    longest : int
        Tokens of an input, special ones included, or as many as the model takes; what is longer is cut.
    seed : int

    Returns
    -------
    list of (at most `longest`,) int64 arrays

    Raises
    ------
    CheckpointError
        No sentence has a token.
    """
    sequences = _encoded(framing, [(sentence,) for sentence in texts], n, longest, seed)
    if not sequences:
        raise CheckpointError("there are no sentences in what was given")
    return sequences


def _encoded(framing: Framing, inputs: Sequence[tuple[str, ...]], n: int, longest: int, seed: int) -> list[np.ndarray]:
    """n of the inputs, each of one text or two, drawn without replacement; those without a token are left out."""
    chosen = np.random.default_rng(seed).permutation(len(inputs))[:n]
    tokenizer, longest = framing.tokenizer, min(longest, framing.n_positions or longest)
    tokenizer.enable_truncation(longest - len(framing.before), strategy="longest_first")
    try:
        encoded = [tokenizer.encode(*inputs[index]).ids for index in chosen]
    finally:
        tokenizer.no_truncation()
    return [np.array([*framing.before, *ids]) for ids in encoded if ids]


def excerpts(texts: Sequence[str], n: int, characters: tuple[int, int], seed: int = 0) -> list[str]:
    """Passages that begin with a paragraph and end with a word, from places drawn without replacement.

    Parameters
    ----------
    texts : sequence of str
        Documents; paragraphs of one are joined by blank lines.
    n : int
        Passages wanted; fewer come back where the text is too short for them.
    characters : (int, int)
        Fewest and most characters of a passage.
    seed : int
    """
    fewest, most = characters
    whole = [paragraphs(text) for text in texts]
    places = [(text, start) for text, own in enumerate(whole) for start in range(len(own))]
    passages = []
    for place in np.random.default_rng(seed).permutation(len(places)):
        text, start = places[place]
        passage, at = whole[text][start], start + 1
        while len(passage) < most and at < len(whole[text]):
            passage, at = f"{passage}\n\n{whole[text][at]}", at + 1
        passage = passage if len(passage) <= most else passage[:most].rpartition(" ")[0]
        if len(passage) >= fewest:
            passages.append(passage)
        if len(passages) == n:
            break
    return passages


def token_windows(framing: Framing, texts: Sequence[str], n: int, length: int, seed: int = 0) -> list[np.ndarray]:
    """Passages of exactly so many tokens, as language models are given them.

    Parameters
    ----------
    framing : Framing
    texts : sequence of str
        Documents.
    n : int
        Windows wanted; fewer come back where the text is too short for them.
    length : int
        Tokens of each, the first special token included.
    seed : int

    Returns
    -------
    list of (length,) int64 arrays
    """
    windows: list[np.ndarray] = []
    for passage in excerpts(texts, 2 * n, (2 * length, 12 * length), seed):
        ids = framing.begun(passage)[:length]
        if len(ids) == length and len(windows) < n:
            windows.append(np.array(ids))
    return windows
