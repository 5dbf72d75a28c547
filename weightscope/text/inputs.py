"""Which texts an analysis reads: those given, else the public-domain works in this package, else OpenWebText."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.jsontext import read_small
from weightscope.errors import CheckpointError
from weightscope.text.corpus import read_documents
from weightscope.text.sequences import sentences

WORKS = Path(__file__).parent / "public_domain"
LARGEST_TABLE = 16_000_000  # bytes of a table of STS-B, of which the largest has one
OPENWEBTEXT = "Skylion007/openwebtext"
LARGEST_SHARD = 2_000_000_000  # bytes; its shards have a sixth of them


@dataclass(frozen=True)
class Texts:
    """Texts and where they come from.

    Attributes
    ----------
    texts : list of str
        Documents, or single sentences.
    source : str
        Where they come from, in words that a page or the terminal can show.
    """

    texts: list[str]
    source: str


def read_texts(paths: Sequence[str | Path] = (), *, characters: int = 0, most: int = 2000) -> Texts:
    """The documents that an analysis reads.

    Parameters
    ----------
    paths : sequence of str or path
        Files and folders; see `weightscope.text.corpus`. Where there are none, the works that come with weightscope are
        read. Where more characters are wanted than those have, OpenWebText's first documents are read from the Hub,
        and if it cannot be reached the works again.
    characters : int
        How much text is wanted where no paths are given.
    most : int
        Documents read at most.

    Raises
    ------
    CheckpointError
        A path is missing or unreadable, or there is no text.

    Examples
    --------
    >>> read = read_texts()
    >>> len(read.texts), read.source
    (8, '8 works in the public domain that come with weightscope')
    """
    if paths:
        texts = read_documents(paths, most)
        names = ", ".join(dict.fromkeys(Path(path).name or str(path) for path in paths))
        return Texts(texts, f"{len(texts)} {'document' if len(texts) == 1 else 'documents'} of {names}")
    works = read_documents(sorted(WORKS.glob("*.txt.gz")))
    source = f"{len(works)} works in the public domain that come with weightscope"
    if sum(map(len, works)) >= characters:
        return Texts(works, source)
    try:
        texts = read_documents(openwebtext(1), most)
    except CheckpointError as error:
        return Texts(works, f"{source}, fewer than wanted ({error})")
    return Texts(texts, f"the first {len(texts):,} documents of {OPENWEBTEXT} on the Hub")


def read_sentences(paths: Sequence[str | Path] = (), *, characters: int = 0) -> Texts:
    """Sentences: of STS-B where its sts-*.csv are given, otherwise those of `read_texts`.

    Raises
    ------
    CheckpointError
        As for `read_texts`, or a table is not one of STS-B's.
    """
    tables = [Path(path) for path in paths]
    if tables and all(table.name.startswith("sts-") and table.suffix == ".csv" for table in tables):
        firsts = [sentence for table in tables for sentence in _sts_sentences(table)]
        return Texts(firsts, f"the first sentence of each pair in {', '.join(table.name for table in tables)}")
    read = read_texts(paths, characters=characters)
    return Texts([sentence for text in read.texts for sentence in sentences(text)], f"the sentences of {read.source}")


def _sts_sentences(table: Path) -> list[str]:
    """The first sentence of every pair: column 6 of STS-B's tab-separated tables."""
    try:
        rows = [line.split("\t") for line in read_small(table, LARGEST_TABLE).decode().splitlines()]
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read: {error}", file=table) from None
    short = [number for number, row in enumerate(rows, 1) if len(row) < 7]
    if short:
        raise CheckpointError(f"line {short[0]} has no two sentences in columns 6 and 7", file=table)
    return [row[5] for row in rows]


def openwebtext(shards: int) -> list[Path]:
    """The first Parquet files of OpenWebText, from the Hub or its cache.

    Raises
    ------
    CheckpointError
        The Hub cannot be reached, or does not give them.
    """
    repository = Repository(OPENWEBTEXT, kind="dataset")
    names = [name for name in repository.file_names() if name.endswith(".parquet")][:shards]
    files = [path for name in names if (path := repository.file(name, LARGEST_SHARD)) is not None]
    if not files:
        raise CheckpointError(f"{OPENWEBTEXT} holds no Parquet files")
    return files
