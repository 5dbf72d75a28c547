"""Count which token follows which: corpus -> sparse counts.

A pair is (current token, previous token) inside one document. No special token is added, and no pair reaches over a
document's border.

On few cores each word is encoded once and looked up from then on; on many, threads encode batches of text while this
one reads the next and adds up the last. Texts are cut where the tokenizer is certain to cut them too; the pair across a
cut is counted like any other. Memory holds a few batches, a buffer of pairs not yet added up, and the distinct pairs;
the length of the corpus does not matter.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import sparse

from weightscope.errors import CheckpointError
from weightscope.parallel import in_threads, usable_cores
from weightscope.progress import bar, progress_shown
from weightscope.text.corpus import Document, corpus_files, documents
from weightscope.text.counts import Counts, Int64s
from weightscope.text.inputs import openwebtext
from weightscope.text.tokenizer import safe_cut, safe_split, tokenizer_hash, vocab_size
from weightscope.text.words import Numbered, Words, encodings

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

PIECE = 4 << 10  # characters: short enough for an encoding to stay in the cache
LONGEST_PIECE = 1 << 25  # characters without a place to cut; encoding one takes fifty to two hundred bytes
BATCH = 256 << 10  # characters
BATCH_PIECES = 2 << 10
REMEMBERED = 64 << 20  # bytes of words, about; then they are forgotten
BUFFER = 4 << 20  # pairs
WORDS_UP_TO = 4  # cores; Python finds the words, one after the other, and more cores encode all of the text sooner
BORDER = -1  # stands before each document in a stream of token ids


class Piece(NamedTuple):
    """A document, or a part of one that is tokenised on its own."""

    text: str
    opens: bool  # it is the first of its document


def count_bigrams(
    corpus_paths: Iterable[str | Path], tokenizer: Tokenizer, *, jobs: int | None = None, progress: bool = False
) -> Counts:
    """Count the bigrams of a corpus.

    Parameters
    ----------
    corpus_paths : iterable of str or path
        Files and folders; see `weightscope.text.corpus`.
    tokenizer : tokenizers.Tokenizer
        As `load_tokenizer` gives it.
    jobs : int, optional
        Cores to encode on; all when not given.
    progress : bool, optional
        Show a bar, if it takes longer than two seconds.

    Returns
    -------
    Counts
        Of shape (vocab, vocab): rows are current tokens, columns previous ones.

    Raises
    ------
    CheckpointError
        A corpus that cannot be read, or in which no token follows another.
    """
    files = corpus_files(corpus_paths)
    sums = PairSums(vocab_size(tokenizer))
    total = sum(file.size for file in files)
    with (
        progress_shown(progress),
        bar(what="bigrams", unit="B", total=total, unit_scale=True) as read,
        _one_core(),
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
        found = f"{sums.documents} documents with text, {sums.tokens} tokens"
        raise CheckpointError(f"no token follows another in {len(files)} corpus files ({found})")
    return Counts(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.int64),
        matrix.data.astype(np.int64, copy=False),
        tokenizer_hash=tokenizer_hash(tokenizer),
        corpus_files=tuple(file.name for file in files),
        documents=sums.documents,
        tokens=sums.tokens,
    )


def openwebtext_counts(tokenizer: Tokenizer, shards: int, folder: str | Path = "counts") -> Path:
    """The file with bigram counts of OpenWebText's first shards by this tokenizer: counted once and kept in a folder.

    Raises
    ------
    CheckpointError
        The Hub cannot be reached, or does not give the shards.
    """
    file = Path(folder, f"openwebtext-{shards}-{tokenizer_hash(tokenizer)[:12]}.npz")
    if not file.exists():
        try:
            files = openwebtext(shards)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; give COUNTS= made by `weightscope bigrams`") from None
        count_bigrams(files, tokenizer).save(file)
    return file


def pieces(document: Document, cut: re.Pattern[str] | None) -> Iterator[str]:
    """A document in pieces of about `PIECE` characters that start where `cut` matches; whole when it is None."""
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
    """A text that is encoded at once, if it is not too long for that."""
    if len(text) > LONGEST_PIECE:
        problem = f"a text of more than {LONGEST_PIECE} characters without a place where this tokenizer is certain to"
        raise CheckpointError(f"{problem} cut it; split it into documents, a line of JSON each")
    return text


def batched(documents: Iterable[Document], cut: re.Pattern[str] | None) -> Iterator[list[Piece]]:
    """The pieces of all documents in batches of about `BATCH` characters. A document without text has no pieces."""
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
    """The token ids of a batch, one after the other, with a `BORDER` before each document; (ids,) int64."""
    ids = array("q")  # takes a list of integers in half the time np.array does
    for piece, encoding in zip(batch, encodings(tokenizer, [piece.text for piece in batch]), strict=True):
        if piece.opens:
            ids.append(BORDER)
        ids.fromlist(encoding.ids)
    return np.frombuffer(ids, dtype=np.int64)


def encoded_by_words(
    tokenizer: Tokenizer, split: Callable[[str], list[str]], batches: Iterable[list[Piece]], jobs: int | None
) -> Iterator[Int64s]:
    """What `encode` gives of each batch: threads encode the words that are new, this one finds and looks up all."""

    def numbered() -> Iterator[tuple[list[Piece], Numbered]]:
        words = Words(split)
        for batch in batches:
            if words.nbytes > REMEMBERED:
                words = Words(split)  # those that are common soon come back
            yield batch, words.number([piece.text for piece in batch])

    def learned(found: tuple[list[Piece], Numbered]) -> tuple[list[Piece], Numbered, list[Encoding]]:
        return *found, encodings(tokenizer, found[1].new)

    for batch, found, new in in_threads(learned, numbered(), jobs):
        found.among.learn(new)
        ids, starts = found.among.ids(found)
        yield np.insert(ids, starts[[piece.opens for piece in batch]], BORDER)


class PairSums:
    """The counts of pairs in a stream of token ids that comes in parts.

    Pairs are packed into one integer each, current * vocab + previous, collected in a buffer, and added up by sorting
    it. Sums of buffers are added like digits: two of about the same size make one. So each pair is moved a number of
    times that grows with the logarithm of the corpus, and all sums together hold at most twice as many entries as there
    are distinct pairs, at 12 bytes each (16 past 2^31 entries). Measured peak, the last addition included: 26 to 32
    bytes a distinct pair, for 8 to 39 million of them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.documents = 0
        self.tokens = 0
        self._key_type = np.min_scalar_type(vocab_size**2 - 1)  # 32 bits hold a pair of 65,536 tokens, and sort faster
        self._last = np.array([BORDER])
        self._buffer: list[Any] = []
        self._buffered = 0
        self._sums: list[Any] = []  # CSR, from large to small

    def add(self, ids: Int64s) -> None:
        """Take in the next part of the stream.

        Parameters
        ----------
        ids : array of shape (n,), int64
            Token ids, and `BORDER` where a document begins.
        """
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
        keys, counts = np.unique(np.concatenate([np.empty(0, self._key_type), *self._buffer]), return_counts=True)
        self._buffer, self._buffered = [], 0
        rows, columns = np.divmod(keys, self._key_type.type(self.vocab_size))
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows.astype(np.int64), minlength=self.vocab_size))])
        shape = (self.vocab_size, self.vocab_size)
        self._sums.append(sparse.csr_array((counts, columns.astype(np.int32), indptr.astype(np.int32)), shape=shape))
        while len(self._sums) > 1 and self._sums[-2].nnz < 2 * self._sums[-1].nnz:
            self._add_last_two()

    def _add_last_two(self) -> None:
        last = self._sums.pop()
        self._sums[-1] = self._sums[-1] + last


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep the tokenizers library from spreading a call over all cores: here every thread has a call of its own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
