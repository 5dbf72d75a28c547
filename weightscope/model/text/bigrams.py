"""Count which token follows which: corpus -> sparse counts.

A pair is (current token, previous token) within one document; no special token is added.

On few cores each word is encoded once and looked up afterwards. On many, threads encode batches of
text while the main thread reads the next and adds up the last. Texts are cut only where the
tokenizer always cuts; a pair across such a cut is counted like any other. Memory holds a few
batches, a buffer of pairs and the distinct pairs, whatever the length of the corpus.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from weightscope.core.compute.cores import environment, in_threads, usable_cores
from weightscope.core.errors import CheckpointError
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import ShowsShapes
from weightscope.model.text.corpus import Document, corpus_files, documents
from weightscope.model.text.counts import Counts, Int64s
from weightscope.model.text.sequences import openwebtext
from weightscope.model.text.tokenizer import Tokenizer, safe_cut, safe_split

A_WORD = 200  # bytes for a word, roughly: two objects, its number, its token ids
A_CHARACTER = 4  # bytes more for each of its characters


def encodings(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, no special token added."""
    try:
        return tokenizer.encode_batch(texts)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer cannot encode this corpus: {error}") from error


class _Numbers(dict[str, int]):
    """Numbers words in the order of first use."""

    def __init__(self) -> None:
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self.new.append(word)
        self[word] = number = len(self)
        return number


@dataclass(frozen=True, eq=False, repr=False)
class Numbered(ShowsShapes):
    """Texts as the numbers of their words."""

    among: MetWords  # the numbering
    numbers: Int64s  # (words,)
    counts: Int64s  # (texts,): words of each text
    new: list[str]  # words not met before, in the order of their numbers


class MetWords:
    """The words met so far and their token ids."""

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split  # as `safe_split`: the words of a text, with unchanged tokens
        self._numbers = _Numbers()
        self._ids = array("q")  # token ids of all words, one after the other
        self._ends = array("q", [0])  # each word's end in them
        self.nbytes = 0  # memory used, roughly

    def number(self, texts: list[str]) -> Numbered:
        """Number the words of texts; new words must be learned before `ids` is called."""
        words = [self._split(text) for text in texts]
        counts = np.fromiter(map(len, words), np.int64, len(words))
        number, self._numbers.new = self._numbers.__getitem__, []
        numbers = np.fromiter(map(number, chain.from_iterable(words)), np.int64, counts.sum())
        self.nbytes += sum(A_WORD + A_CHARACTER * len(word) for word in self._numbers.new)
        return Numbered(self, numbers, counts, self._numbers.new)

    def learn(self, new: list[list[int]]) -> None:
        """Add the tokens of the new words, in the order of their numbers."""
        for ids in new:
            self._ids.fromlist(ids)
            self._ends.append(len(self._ids))

    def ids(self, numbered: Numbered) -> tuple[Int64s, Int64s]:
        """The token ids of all texts, (ids,), and each text's first place in them, (texts,)."""
        ids, ends = np.frombuffer(self._ids, np.int64), np.frombuffer(self._ends, np.int64)
        starts = ends[numbered.numbers]  # (words,)
        lengths = ends[numbered.numbers + 1] - starts
        stops = np.append(0, np.cumsum(lengths))
        places = np.repeat(starts - stops[:-1], lengths) + np.arange(stops[-1])  # (ids,)
        return ids[places], stops[np.cumsum(numbered.counts) - numbered.counts]


PIECE = 4 << 10  # characters: short enough for an encoding to stay in the cache
LONGEST_PIECE = 1 << 25  # characters without a place to cut; each takes 50 to 200 bytes to encode
BATCH = 256 << 10  # characters
BATCH_PIECES = 2 << 10
REMEMBERED = 64 << 20  # bytes of words, about; then they are forgotten
BUFFER = 4 << 20  # pairs
WORDS_UP_TO = 4  # cores; more encode the whole text sooner than Python finds its words
ONE_CORE = {"TOKENIZERS_PARALLELISM": "false"}  # for a call of the library, made in each thread
BORDER = -1  # marks the start of each document in a stream of token ids


class Piece(NamedTuple):
    """A document, or a part of one that is tokenised on its own."""

    text: str
    opens: bool  # it is the first of its document


def count_bigrams(
    corpus_paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    *,
    jobs: int | None = None,
    progress: bool | None = None,
) -> Counts:
    """Count the bigrams of a corpus."""
    files = corpus_files(corpus_paths)
    sums = PairSums(tokenizer.size)
    total = sum(file.size for file in files)
    with (
        progress_shown(progress),
        bar(what="bigrams", unit="B", total=total, unit_scale=True) as read,
        environment(ONE_CORE),
    ):
        split = safe_split(tokenizer)
        batches = batched(documents(files, read.update), safe_cut(tokenizer))
        if split is None or (jobs or usable_cores()) > WORDS_UP_TO:
            streams = in_threads(partial(encode, tokenizer), batches, jobs)
        else:
            streams = encoded_by_words(tokenizer, split, batches, jobs)
        for ids in streams:
            sums.add(ids)
    matrix = sums.matrix()
    if not matrix.nnz:
        summary = f"{sums.documents} documents with text, {sums.tokens} tokens"
        raise CheckpointError(f"no token follows another in {len(files)} corpus files ({summary})")
    if tokenizer.unknown is not None:
        tokenizer.check_known(int(matrix[tokenizer.unknown].sum()), int(matrix.sum()))
    return Counts(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int64),
        matrix.data.astype(np.int64, copy=False),
        tokenizer_hash=tokenizer.hash,
        corpus_files=tuple(file.name for file in files),
        documents=sums.documents,
        tokens=sums.tokens,
    )


def openwebtext_counts(tokenizer: Tokenizer, shards: int, *dataset: str) -> Path:
    """The file of a tokenizer's bigram counts in OpenWebText's first shards, counted only once.

    `dataset` is as for `openwebtext`.
    """
    name = "-".join(dataset).replace("/", "-") or "openwebtext"
    file = Path("counts", f"{name}-{shards}-{tokenizer.hash[:12]}.npz")
    if not file.exists():
        try:
            files = openwebtext(shards, *dataset)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; give COUNTS= made by `weightscope bigrams`") from None
        count_bigrams(files, tokenizer).save(file)
    return file


def pieces(document: Document, cut: re.Pattern[str] | None) -> Iterator[str]:
    """A document in pieces of about `PIECE` characters that start where `cut` matches."""
    text = ""
    for part in document:
        searched = len(text)  # no cut before it but one that is too close to the piece's start
        text += part
        start = 0
        while cut and (match := cut.search(text, max(start + PIECE, searched))):
            yield _checked(text[start : match.start()])
            start = match.start()
        text = _checked(text[start:])
    if text:
        yield text


def _checked(text: str) -> str:
    """Refuse a text that is too long to be encoded at once."""
    if len(text) > LONGEST_PIECE:
        raise CheckpointError(
            f"a text of more than {LONGEST_PIECE} characters without a place where this tokenizer "
            "is certain to cut it; split it into documents, a line of JSON each"
        )
    return text


def batched(documents: Iterable[Document], cut: re.Pattern[str] | None) -> Iterator[list[Piece]]:
    """The pieces of all documents in batches of about `BATCH` characters."""
    batch: list[Piece] = []
    size = 0
    for document in documents:
        for number, text in enumerate(pieces(document, cut)):
            batch.append(Piece(text, opens=number == 0))
            size += len(text)
            if size >= BATCH or len(batch) >= BATCH_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode(tokenizer: Tokenizer, batch: list[Piece]) -> Int64s:
    """The token ids of a batch, (ids,) int64, with a `BORDER` before each document."""
    ids = array("q")  # takes a list of integers in half the time np.array does
    encoded = encodings(tokenizer, [piece.text for piece in batch])
    for piece, tokens in zip(batch, encoded, strict=True):
        if piece.opens:
            ids.append(BORDER)
        ids.fromlist(tokens)
    return np.frombuffer(ids, dtype=np.int64)


def encoded_by_words(
    tokenizer: Tokenizer,
    split: Callable[[str], list[str]],
    batches: Iterable[list[Piece]],
    jobs: int | None,
) -> Iterator[Int64s]:
    """`encode` each batch by its words: threads encode new ones, this one looks all up."""

    def numbered() -> Iterator[tuple[list[Piece], Numbered]]:
        words = MetWords(split)
        for batch in batches:
            if words.nbytes > REMEMBERED:
                words = MetWords(split)  # common words soon come back
            yield batch, words.number([piece.text for piece in batch])

    def learned(
        batch: tuple[list[Piece], Numbered],
    ) -> tuple[list[Piece], Numbered, list[list[int]]]:
        return *batch, encodings(tokenizer, batch[1].new)

    for batch, numbering, new in in_threads(learned, numbered(), jobs):
        numbering.among.learn(new)
        ids, starts = numbering.among.ids(numbering)
        yield np.insert(ids, starts[[piece.opens for piece in batch]], BORDER)


class PairSums:
    """The counts of pairs in a stream of token ids that comes in parts.

    Pairs are packed into one integer each, current * vocab + previous, collected in a buffer, and
    added up by sorting it. Sums of buffers are added like digits: two of about the same size make
    one. So each pair is moved a number of times that grows with the logarithm of the corpus, and
    all sums together hold at most twice as many entries as there are distinct pairs, at 12 bytes
    each (16 past 2^31 entries). Measured peak, the last addition included: 26 to 32 bytes a
    distinct pair, for 8 to 39 million pairs.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.documents = 0
        self.tokens = 0
        # 32 bits hold a pair of 65,536 tokens, and sort faster
        self._key_type = np.min_scalar_type(vocab_size**2 - 1)
        self._last = np.array([BORDER])
        self._buffer: list[Any] = []
        self._buffered = 0
        self._sums: list[Any] = []  # CSR, from large to small

    def add(self, ids: Int64s) -> None:
        """Take in the next part of the stream: ids (n,)."""
        stream = np.concatenate([self._last, ids])  # (n + 1,)
        self._last = stream[-1:]
        current, previous = stream[1:], stream[:-1]  # (n,)
        inside = (current != BORDER) & (previous != BORDER)
        keys = current[inside] * self.vocab_size + previous[inside]
        borders = int(np.count_nonzero(ids == BORDER))
        self.documents += borders
        self.tokens += len(ids) - borders
        self._buffer.append(keys.astype(self._key_type))
        self._buffered += len(keys)
        if self._buffered >= BUFFER:
            self._empty_buffer()

    def matrix(self) -> Any:
        """All counts so far; scipy CSR array of shape (vocab, vocab), int64, in canonical form."""
        self._empty_buffer()
        while len(self._sums) > 1:
            self._add_last_two()
        return self._sums[0]

    def _empty_buffer(self) -> None:
        buffered = np.concatenate([np.empty(0, self._key_type), *self._buffer])
        self._buffer, self._buffered = [], 0
        keys, counts = np.unique(buffered, return_counts=True)
        rows, columns = np.divmod(keys, self._key_type.type(self.vocab_size))
        pairs_in_row = np.bincount(rows.astype(np.int64), minlength=self.vocab_size)
        indptr = np.append(0, np.cumsum(pairs_in_row))
        csr = counts, columns.astype(np.int32), indptr.astype(np.int32)
        self._sums.append(sparse.csr_array(csr, shape=(self.vocab_size, self.vocab_size)))
        while len(self._sums) > 1 and self._sums[-2].nnz < 2 * self._sums[-1].nnz:
            self._add_last_two()

    def _add_last_two(self) -> None:
        last = self._sums.pop()
        self._sums[-1] = self._sums[-1] + last
