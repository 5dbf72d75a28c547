"""A tokenizer in a child process is the library's own, and what ends the child ends nothing else."""

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.attacks.attacks import grown, tokenizer
from weightscope.embedded import FOLDER
from weightscope.errors import CheckpointError
from weightscope.text import sandbox
from weightscope.text.bigrams import count_bigrams
from weightscope.text.sandbox import ServedTokenizer
from weightscope.text.sandbox_child import from_json
from weightscope.text.sequences import added_tokens
from weightscope.text.tokenizer import load_tokenizer, safe_cut, token_id, token_text, tokenizer_hash

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

TEXT = "It was the best of times, it was naïve 東京 \N{GRINNING FACE}."
GOOD = tokenizer(truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0})


@pytest.fixture(scope="module")
def own() -> "tokenizers.Tokenizer":
    """The library's own, of the checkpoint that comes along."""
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def served() -> ServedTokenizer:
    return ServedTokenizer("tokenizer.json", from_json, (FOLDER / "tokenizer.json").read_bytes())


def test_a_served_tokenizer_is_the_librarys_own(own, served: ServedTokenizer) -> None:
    assert served.get_vocab() == own.get_vocab() and tokenizer_hash(served) == tokenizer_hash(own)
    assert safe_cut(served) == safe_cut(own) is not None
    ids = own.encode(TEXT).ids
    assert served.encode(TEXT).ids == ids and served.decode(ids) == own.decode(ids) == TEXT
    assert [each.ids for each in served.encode_batch_fast([TEXT, "", "a"])] == [ids, [], own.encode("a").ids]
    assert token_text(served, *ids) == token_text(own, *ids) == TEXT
    assert token_id(served, " the") == token_id(own, " the")
    assert served.id_to_token(10**6) is served.token_to_id("no such token") is None
    served.enable_truncation(3, strategy="longest_first")
    assert served.encode(TEXT).ids == ids[:3]
    served.no_truncation()
    assert served.encode(TEXT).ids == ids


def test_special_tokens_are_told(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[CLS]": 0, "[SEP]": 1, "a": 2}, unk_token="a"))
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    made.add_special_tokens(["[SEP]"])
    made.save(str(tmp_path / "tokenizer.json"))
    served = load_tokenizer(tmp_path)
    assert added_tokens(served) == added_tokens(made) == (0, 1)
    assert served.get_added_tokens_decoder()[1].special
    assert token_text(served, 2, 2) == token_text(made, 2, 2) == "a a"


def test_counts_are_the_same_on_any_number_of_children(own, served: ServedTokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 8_000)
    expected = count_bigrams([tmp_path / "text.txt"], own)
    for jobs in (1, 3):
        assert (count_bigrams([tmp_path / "text.txt"], served, jobs=jobs).data == expected.data).all()


def test_after_a_text_that_ends_the_child_others_are_split() -> None:
    hostile = ServedTokenizer("x", from_json, tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="x: cannot encode this text: chunk size"):
            hostile.encode("a")
    good = ServedTokenizer("x", from_json, GOOD)
    os.kill(good._idle[0]._process.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="SIGKILL"):
        good.encode("ab")
    assert good.encode("abab").ids == [2, 2]  # and the file's own truncation is off


def test_time_and_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = tokenizer(normalizer={"type": "Sequence", "normalizers": [grown(4096)] * 4})
    monkeypatch.setattr(sandbox, "MEMORY", 150 << 20)
    with pytest.raises(CheckpointError, match=r"needs more than 0\.146 GB"):
        ServedTokenizer("x", from_json, growing).encode("a")
    monkeypatch.undo()
    slow = ServedTokenizer("x", from_json, growing)
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="more than 0 seconds"):
        slow.encode("a")


def test_a_vocabulary_is_no_larger_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_TOKENS", 2)
    with pytest.raises(CheckpointError, match="x: has 3 tokens; at most 2 are read"):
        ServedTokenizer("x", from_json, GOOD)


def test_a_file_is_loaded_and_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(sandbox, "_Child", lambda own=sandbox._Child: begun.append(1) or own())
    (tmp_path / "tokenizer.json").write_bytes(GOOD + b" ")
    assert load_tokenizer(tmp_path) is load_tokenizer(tmp_path) and len(begun) == 1
    (tmp_path / "tokenizer.json").write_bytes(b"{ ")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot read it"):
            load_tokenizer(tmp_path)
    assert len(begun) == 2


def test_the_child_ends_with_the_tokenizer() -> None:
    served = ServedTokenizer("x", from_json, GOOD)
    process = served._idle[0]._process
    assert process.poll() is None
    del served
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_the_embedded_tokenizer_needs_no_child() -> None:
    assert isinstance(load_tokenizer("embedded"), tokenizers.Tokenizer)
