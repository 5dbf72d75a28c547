"""Which texts an analysis reads, in order: those given, the works in the package, OpenWebText on the Hub."""

import bz2
from pathlib import Path

import pytest

from tests.support.hub_server import Hub
from tests.support.parquet import shard
from weightscope.core.errors import CheckpointError
from weightscope.model.text import sequences
from weightscope.model.text.sequences import OPENWEBTEXT, WORKS, read_sentences, read_texts, works


def test_given_texts_are_read_and_named(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    read = read_texts([tmp_path / "books", tmp_path / "b.jsonl"], characters=10**9)
    assert read.texts == ["one", "two", "three"]
    assert read.source == "3 documents of books, b.jsonl"
    with pytest.raises(CheckpointError, match="no such file"):
        read_texts([tmp_path / "nowhere"])


def test_default_texts_are_the_included_works() -> None:
    """No other folder, and no network: a user has neither the checkout's neighbours nor always a Hub."""
    read = read_texts()
    assert len(read.texts) == 8 and all(text.startswith("# Title: ") for text in read.texts)
    assert "come with weightscope" in read.source
    assert sum(map(len, read.texts)) > 700_000


def test_the_works_are_small_and_each_has_its_source() -> None:
    assert sum(path.stat().st_size for path in WORKS.iterdir()) < 230_000
    sources = (WORKS / "SOURCES.md").read_text()
    for path in works():
        title, author = (
            line.partition(": ")[2] for line in bz2.decompress(path.read_bytes()).decode().split("\n\n")[:2]
        )
        assert f"| {title} | {author} (" in sources


def test_more_text_than_the_works_hold_comes_from_the_hub(hub: Hub) -> None:
    documents = ["of the web", "and of it too"]
    hub.repositories[f"datasets/{OPENWEBTEXT}"] = {"plain_text/train-00000-of-00080.parquet": shard(documents)}
    read = read_texts(characters=10**9)
    assert read.texts == documents
    assert read.source == f"the first 2 documents of {OPENWEBTEXT} on the Hub"


def test_included_works_are_used_if_the_hub_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shards: int) -> list[Path]:
        raise CheckpointError("the Hub is away")

    monkeypatch.setattr(sequences, "openwebtext", fails)
    read = read_texts(characters=10**9)
    assert len(read.texts) == 8
    assert read.source.endswith("come with weightscope, fewer than wanted (the Hub is away)")


def test_sentences_are_those_of_the_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("It was a dark night. The rain fell in torrents.")
    read = read_sentences([path])
    assert read.texts == ["It was a dark night.", "The rain fell in torrents."]
    assert read.source == "the sentences of 1 document of a.txt"
    assert len(read_sentences().texts) > 5000


def test_sts_table_gives_its_sixth_column(tmp_path: Path) -> None:
    table = tmp_path / "sts-dev.csv"
    table.write_text("a\tb\tc\t1\t2.5\tA man plays.\tten\nd\te\tf\t2\t1.0\tA dog runs.\tnine\n")
    read = read_sentences([table])
    assert read.texts == ["A man plays.", "A dog runs."]
    assert read.source == "the first sentence of each pair in sts-dev.csv"
    table.write_text("a\tb\tc\t1\t2.5\tone two\tten\nonly one column\n")
    with pytest.raises(CheckpointError, match="line 2 has no two sentences"):
        read_sentences([table])
