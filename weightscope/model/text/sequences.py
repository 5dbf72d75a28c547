"""Texts, and the sequences made of them that a model is run on."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from weightscope.checkpoint.config import read_small
from weightscope.checkpoint.hub import Repository
from weightscope.core.errors import CheckpointError
from weightscope.model.text.corpus import read_documents
from weightscope.model.text.tokenizer import Tokenizer

CHARACTERS_A_TOKEN = 5  # in English
FEWEST_WORDS = 8  # words in a paragraph; shorter ones are headings and captions
FEWEST_IN_SENTENCE = 4  # words; shorter ones are headings and abbreviations
SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)]))\s+(?=\W?[^\Wa-z_])""")


@dataclass(frozen=True)
class Framing:
    """A tokenizer, and the special tokens around every text."""

    tokenizer: Tokenizer
    added: tuple[int, ...] = ()  # the tokenizer's own, each once: [CLS] and [SEP], <s>, or none
    before: tuple[int, ...] = ()  # the model's first token, where the tokenizer adds none
    n_positions: int | None = None  # most tokens that the model takes; None without a limit

    @property
    def special(self) -> tuple[int, ...]:
        """All special tokens; the first is what a text begins with."""
        return self.before + self.added

    @property
    def takes_pairs(self) -> bool:
        """True if two texts can be one input: special tokens before them and after each."""
        return len(self.added) > 1

    def begun(self, text: str) -> list[int]:
        """The first special token, then a text's tokens: the input of language models."""
        return [*self.special[:1], *self.tokenizer.encode(text, special=False)]


def paragraphs(document: str) -> list[str]:
    """The paragraphs of plain text or Markdown, each in one line, without headings."""
    texts = (block for block in _blocks(document) if block[:1] not in ("#", "-", "="))
    return [text for text in texts if text.count(" ") >= FEWEST_WORDS - 1]


def sentences(document: str) -> list[str]:
    """The sentences of a text, ended by . ! or ? before a capital or number, or by a blank line."""
    parts = (part for block in _blocks(document) for part in SENTENCE_END.split(block))
    return [part for part in parts if part.count(" ") >= FEWEST_IN_SENTENCE - 1]


def _blocks(document: str) -> Iterator[str]:
    """The blocks between blank lines, in one line each."""
    return (" ".join(block.split()) for block in document.replace("\r\n", "\n").split("\n\n"))


def paragraph_pairs(
    framing: Framing, texts: Sequence[str], n: int, longest: int = 128, seed: int = 0
) -> list[np.ndarray]:
    """Pairs of consecutive paragraphs: [CLS] 1 [SEP] 2 [SEP] (norm-based-attention, 5.1)."""
    pairs = [pair for text in texts for pair in pairwise(paragraphs(text))]
    if not pairs:
        raise CheckpointError(
            f"no two paragraphs of {FEWEST_WORDS} words or more, parted by a blank line, in this "
            "text"
        )
    return _encoded(framing, pairs, n, longest, seed)


def sentence_sequences(
    framing: Framing, texts: Sequence[str], n: int, longest: int = 128, seed: int = 0
) -> list[np.ndarray]:
    """Single sentences as inputs, in random order."""
    sequences = _encoded(framing, [(sentence,) for sentence in texts], n, longest, seed)
    if not sequences:
        raise CheckpointError("the given files contain no sentences")
    return sequences


def _encoded(
    framing: Framing, inputs: Sequence[tuple[str, ...]], n: int, longest: int, seed: int
) -> list[np.ndarray]:
    """n of the inputs, of one text or two, drawn without replacement; empty ones are left out."""
    chosen = np.random.default_rng(seed).permutation(len(inputs))[:n]
    room = min(longest, framing.n_positions or longest) - len(framing.before)
    encoded = [framing.tokenizer.encode(*inputs[index], longest=room) for index in chosen]
    return _known(framing, [np.array([*framing.before, *ids]) for ids in encoded if ids])


def _known(framing: Framing, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Refuse sequences that are mostly unknown tokens, special ones aside."""
    ids = np.concatenate([np.empty(0, int), *sequences])
    ids = ids[~np.isin(ids, framing.special)]
    framing.tokenizer.check_known(int((ids == framing.tokenizer.unknown).sum()), len(ids))
    return sequences


def excerpts(texts: Sequence[str], n: int, characters: tuple[int, int], seed: int = 0) -> list[str]:
    """Passages of characters (min, max) from random places, from a paragraph to a word's end."""
    fewest, most = characters
    documents = [paragraphs(text) for text in texts]
    places = [(blocks, start) for blocks in documents for start in range(len(blocks))]
    passages = []
    for place in np.random.default_rng(seed).permutation(len(places)):
        blocks, start = places[place]
        passage, following = blocks[start], start + 1
        while len(passage) < most and following < len(blocks):
            passage, following = f"{passage}\n\n{blocks[following]}", following + 1
        if len(passage) > most:
            passage = passage[:most].rpartition(" ")[0]
        if len(passage) >= fewest:
            passages.append(passage)
        if len(passages) == n:
            break
    return passages


def token_windows(
    framing: Framing, texts: Sequence[str], n: int, length: int, seed: int = 0
) -> list[np.ndarray]:
    """Passages of exactly `length` tokens, framed as for language models: -> (length,)."""
    windows: list[np.ndarray] = []
    for passage in excerpts(texts, 2 * n, (2 * length, 12 * length), seed):
        ids = framing.begun(passage)[:length]
        if len(ids) == length and len(windows) < n:
            windows.append(np.array(ids))
    return _known(framing, windows)


# Texts: those given, else the public-domain works in this package, else OpenWebText.

WORKS = Path(__file__).parent / "public_domain"
LARGEST_TABLE = 16_000_000  # bytes of an STS-B table; the largest has 1 MB
OPENWEBTEXT = "Skylion007/openwebtext"
LARGEST_SHARD = 2_000_000_000  # bytes; OpenWebText's shards have a sixth


def works() -> list[Path]:
    """The files of the works in the public domain that come with weightscope."""
    return sorted(WORKS.glob("*.txt.bz2"))


@dataclass(frozen=True)
class Texts:
    """Texts and where they come from."""

    texts: list[str]  # documents, or single sentences
    source: str  # their origin, in words for a page or the terminal


def read_texts(paths: Sequence[str | Path] = (), *, characters: int = 0, most: int = 2000) -> Texts:
    """The documents that an analysis reads.

    Examples
    --------
    >>> read = read_texts()
    >>> len(read.texts), read.source
    (8, '8 works in the public domain that come with weightscope')
    """
    if paths:
        texts = read_documents(paths, most)
        names = ", ".join(dict.fromkeys(Path(path).name or str(path) for path in paths))
        documents = "document" if len(texts) == 1 else "documents"
        return Texts(texts, f"{len(texts)} {documents} of {names}")
    included = read_documents(works())
    source = f"{len(included)} works in the public domain that come with weightscope"
    if sum(map(len, included)) >= characters:
        return Texts(included, source)
    try:
        texts = read_documents(openwebtext(1), most)
    except CheckpointError as error:
        return Texts(included, f"{source}, fewer than wanted ({error})")
    return Texts(texts, f"the first {len(texts):,} documents of {OPENWEBTEXT} on the Hub")


def read_sentences(paths: Sequence[str | Path] = (), *, characters: int = 0) -> Texts:
    """STS-B's sentences if its sts-*.csv are given, else those in the texts of `read_texts`."""
    tables = [Path(path) for path in paths]
    if tables and all(table.name.startswith("sts-") and table.suffix == ".csv" for table in tables):
        firsts = [sentence for table in tables for sentence in _sts_sentences(table)]
        names = ", ".join(table.name for table in tables)
        return Texts(firsts, f"the first sentence of each pair in {names}")
    read = read_texts(paths, characters=characters)
    split = [sentence for text in read.texts for sentence in sentences(text)]
    return Texts(split, f"the sentences of {read.source}")


def _sts_sentences(table: Path) -> list[str]:
    """The first sentence of every pair: column 6 of STS-B's tab-separated tables."""
    try:
        rows = [line.split("\t") for line in read_small(table, LARGEST_TABLE).decode().splitlines()]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read: {error}", file=table) from None
    short = [number for number, row in enumerate(rows, 1) if len(row) < 7]
    if short:
        problem = f"line {short[0]} has no two sentences in columns 6 and 7"
        raise CheckpointError(problem, file=table)
    return [row[5] for row in rows]


def openwebtext(shards: int, dataset: str = OPENWEBTEXT, folder: str = "") -> list[Path]:
    """The first Parquet files of OpenWebText or another data set, from the Hub or its cache."""
    repository = Repository(dataset, kind="dataset")
    listed = [name for name in repository.file_names() if name.endswith(".parquet")]
    names = [name for name in listed if name.startswith(folder)][:shards]
    files = [path for name in names if (path := repository.file(name, LARGEST_SHARD)) is not None]
    if not files:
        raise CheckpointError(f"{dataset} holds no Parquet files")
    return files
