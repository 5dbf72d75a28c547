"""A tokenizer in a child process is the library's own, and what ends the child ends nothing else."""

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.attacks.attacks import grown, tokenizer
from weightscope.core.embedded import FOLDER
from weightscope.core.errors import CheckpointError
from weightscope.model.text import sandbox
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.sandbox import Sandbox, from_json
from weightscope.model.text.tokenizer import Tokenizer, safe_cut

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

TEXT = "It was the best of times, it was naïve 東京 \N{GRINNING FACE}."
GOOD = tokenizer(truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0})


def sandboxed(content: bytes) -> Tokenizer:
    sandbox = Sandbox("x", from_json, content)
    return Tokenizer("x", sandbox.facts, sandbox.ask)


@pytest.fixture(scope="module")
def library() -> "tokenizers.Tokenizer":
    """The library's own, of the checkpoint that ships with the package."""
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def in_child() -> Tokenizer:
    return sandboxed((FOLDER / "tokenizer.json").read_bytes())


def test_a_tokenizer_in_a_child_is_the_librarys_own(library, in_child: Tokenizer) -> None:
    here = Tokenizer.of_library(library)
    assert in_child.ids == library.get_vocab() and in_child.hash == here.hash
    assert safe_cut(in_child) == safe_cut(here) is not None
    ids = library.encode(TEXT).ids
    assert in_child.encode(TEXT) == here.encode(TEXT) == ids
    assert in_child.encode_batch([TEXT, "", "a"]) == [ids, [], library.encode("a").ids]
    assert in_child.text(*ids) == here.text(*ids) == library.decode(ids) == TEXT
    assert in_child.id_of(" the") == here.id_of(" the") == library.token_to_id("Ġthe")
    assert in_child.text(10**6) == "<id 1000000>" and "no such token" not in in_child.ids
    assert in_child.encode(TEXT, longest=3) == ids[:3]
    assert in_child.encode(TEXT) == ids


def test_special_tokens_are_known(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[CLS]": 0, "[SEP]": 1, "a": 2}, unk_token="a"))
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    made.add_special_tokens(["[SEP]"])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded, here = Tokenizer.load(tmp_path), Tokenizer.of_library(made)
    assert loaded.around == here.around == (0, 1)
    assert loaded.added[1].special
    assert loaded.text(2, 2) == here.text(2, 2) == "a a"


def test_counts_are_the_same_on_any_number_of_children(library, in_child: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 8_000)
    expected = count_bigrams([tmp_path / "text.txt"], Tokenizer.of_library(library))
    for jobs in (1, 3):
        assert (count_bigrams([tmp_path / "text.txt"], in_child, jobs=jobs).data == expected.data).all()


def test_after_a_text_that_ends_the_child_others_are_split() -> None:
    hostile = sandboxed(tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="x: cannot encode this text: chunk size"):
            hostile.encode("a")
    sandbox = Sandbox("x", from_json, GOOD)
    good = Tokenizer("x", sandbox.facts, sandbox.ask)
    os.kill(sandbox._idle[0]._process.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="SIGKILL"):
        good.encode("ab")
    assert good.encode("abab") == [2, 2]  # and the file's own truncation is off


def test_time_and_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = tokenizer(normalizer={"type": "Sequence", "normalizers": [grown(4096)] * 4})
    monkeypatch.setattr(sandbox, "MEMORY", 150 << 20)
    with pytest.raises(CheckpointError, match=r"needs more than 0\.146 GB"):
        sandboxed(growing).encode("a")
    monkeypatch.undo()
    slow = sandboxed(growing)
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="more than 0 seconds"):
        slow.encode("a")


def test_a_vocabulary_is_no_larger_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_TOKENS", 2)
    with pytest.raises(CheckpointError, match="x: has 3 tokens; at most 2 are read"):
        Sandbox("x", from_json, GOOD)


def test_a_file_is_loaded_and_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(sandbox, "_Child", lambda own=sandbox._Child: begun.append(1) or own())
    (tmp_path / "tokenizer.json").write_bytes(GOOD + b" ")
    assert Tokenizer.load(tmp_path) is Tokenizer.load(tmp_path) and len(begun) == 1
    (tmp_path / "tokenizer.json").write_bytes(b"{ ")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot read it"):
            Tokenizer.load(tmp_path)
    assert len(begun) == 2


def test_the_child_ends_with_the_tokenizer() -> None:
    sandbox = Sandbox("x", from_json, GOOD)
    process = sandbox._idle[0]._process
    assert process.poll() is None
    del sandbox
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_the_embedded_tokenizer_needs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_Child", lambda: pytest.fail("a child was started"))
    assert Tokenizer.load("embedded").encode("a")
