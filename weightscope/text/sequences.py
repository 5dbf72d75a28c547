"""Text as the sequences that a model is run on, and the kinds of token in them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.text.corpus import corpus_files, documents

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FEWEST_WORDS = 8  # of a paragraph; shorter ones are headings and captions
FEWEST_IN_SENTENCE = 4  # words; shorter ones are headings and abbreviations
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)]))\s+(?=\W?[^\Wa-z_])""")
PUNCTUATION = ".,"
TEMPLATE = "a"  # any text: what the tokenizer adds around it are the special tokens


@dataclass(frozen=True)
class TokenKinds:
    """Which tokens are special, which are commas and periods, and which are any other.

    Attributes
    ----------
    names : tuple of str
        Those special tokens that the tokenizer itself adds, in their order ("[CLS]", "[SEP]"); then ". or ,"; then
        "other".
    of_token : (vocab,) int8 array
        Each token's kind, an index into `names`.
    """

    names: tuple[str, ...]
    of_token: np.ndarray

    def __call__(self, tokens: np.ndarray | None) -> np.ndarray:
        """Kinds of tokens, in the same shape.

        Raises
        ------
        CheckpointError
            There are none: the inputs are images.
        """
        if tokens is None:
            raise CheckpointError("kinds of token need text; these are images")
        return self.of_token[tokens]


def token_kinds(tokenizer: "Tokenizer", added: Sequence[int] = ()) -> TokenKinds:
    """The kinds of token that the papers tell apart.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    added : sequence of int
        Further special tokens, as one put before every text.
    """
    encoded = tokenizer.encode(TEMPLATE, TEMPLATE)
    special = [token for token, is_special in zip(encoded.ids, encoded.special_tokens_mask, strict=True) if is_special]
    special = list(dict.fromkeys([*added, *special]))
    vocabulary = tokenizer.get_vocab()
    of_token = np.full(1 + max(vocabulary.values()), len(special) + 1, np.int8)
    for token in {vocabulary[mark] for mark in PUNCTUATION if mark in vocabulary}:
        of_token[token] = len(special)
    for kind, token in enumerate(special):
        of_token[token] = kind
    return TokenKinds((*(str(tokenizer.id_to_token(token)) for token in special), ". or ,", "other"), of_token)


def read_documents(paths: Iterable[str | Path], most: int = 10_000) -> list[str]:
    """The first documents of a corpus, each as one string; see `weightscope.text.corpus` for what a document is.

    Raises
    ------
    CheckpointError
        A path is missing or unreadable, or there is no text.
    """
    found = ["".join(document) for document in islice(documents(corpus_files(paths), lambda _: None), most)]
    if not any(text.strip() for text in found):
        raise CheckpointError("there is no text in what was given")
    return found


def paragraphs(document: str) -> list[str]:
    """The paragraphs of plain text or Markdown: what blank lines part, in one line each, headings left out."""
    blocks = (" ".join(block.split()) for block in document.replace("\r\n", "\n").split("\n\n"))
    return [block for block in blocks if block[:1] not in ("#", "-", "=") and block.count(" ") >= FEWEST_WORDS - 1]


def sentences(document: str) -> list[str]:
    """The sentences of a text: what ends with . ! or ? before a capital or a number, and with every blank line."""
    blocks = (" ".join(block.split()) for block in document.replace("\r\n", "\n").split("\n\n"))
    found = (sentence for block in blocks for sentence in SENTENCE_END.split(block))
    return [sentence for sentence in found if sentence.count(" ") >= FEWEST_IN_SENTENCE - 1]


def paragraph_pairs(
    tokenizer: "Tokenizer", texts: Sequence[str], n: int, longest: int = 128, seed: int = 0
) -> list[np.ndarray]:
    """Two consecutive paragraphs as one input, [CLS] paragraph1 [SEP] paragraph2 [SEP] (norm-based-attention, 5.1).

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    texts : sequence of str
        Documents.
    n : int
        Pairs wanted, drawn without replacement; all there are where these are fewer.
    longest : int
        Tokens of an input, special ones included; the longer paragraph is cut until the pair fits.
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
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:n]
    tokenizer.enable_truncation(longest, strategy="longest_first")
    try:
        return [np.array(tokenizer.encode(*pairs[index]).ids) for index in chosen]
    finally:
        tokenizer.no_truncation()


def sentence_sequences(
    tokenizer: "Tokenizer", found: Sequence[str], n: int, longest: int = 128, first: int | None = None, seed: int = 0
) -> list[np.ndarray]:
    """Single sentences as inputs, with the special tokens that the tokenizer adds, in random order.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    found : sequence of str
    n : int
        Sentences wanted, drawn without replacement; all there are where these are fewer.
    longest : int
        Tokens of an input, special ones included; what is longer is cut.
    first : int, optional
        A token to put first, where the tokenizer adds none.
    seed : int

    Returns
    -------
    list of (at most `longest`,) int64 arrays

    Raises
    ------
    CheckpointError
        No sentence has a token.
    """
    head = [] if first is None else [first]
    chosen = np.random.default_rng(seed).permutation(len(found))[:n]
    tokenizer.enable_truncation(longest - len(head))
    try:
        encoded = [tokenizer.encode(found[index]).ids for index in chosen]
    finally:
        tokenizer.no_truncation()
    sequences = [np.array([*head, *ids]) for ids in encoded if ids]
    if not sequences:
        raise CheckpointError("there are no sentences in what was given")
    return sequences


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
    places = [(text, start) for text, found in enumerate(whole) for start in range(len(found))]
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


def token_windows(
    tokenizer: "Tokenizer", texts: Sequence[str], n: int, length: int, first: int | None = None, seed: int = 0
) -> list[np.ndarray]:
    """Passages of exactly so many tokens, as language models are given them.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    texts : sequence of str
        Documents.
    n : int
        Windows wanted; fewer come back where the text is too short for them.
    length : int
        Tokens of each, `first` included.
    first : int, optional
        The token that stands first, a beginning-of-sequence token as a rule.
    seed : int

    Returns
    -------
    list of (length,) int64 arrays
    """
    head = [] if first is None else [first]
    windows: list[np.ndarray] = []
    for passage in excerpts(texts, 2 * n, (2 * length, 12 * length), seed):
        ids = [*head, *tokenizer.encode(passage, add_special_tokens=False).ids][:length]
        if len(ids) == length and len(windows) < n:
            windows.append(np.array(ids))
    return windows
