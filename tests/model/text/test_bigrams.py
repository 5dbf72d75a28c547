"""Counting in batches, pieces and threads is counting pair by pair."""

import gzip
import json
import os
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.weights import shared
from weightscope.core.errors import CheckpointError
from weightscope.model.text import bigrams
from weightscope.model.text.bigrams import BORDER, PairSums, count_bigrams, pieces
from weightscope.model.text.counts import Counts, load_counts
from weightscope.model.text.splitting import GPT2, LLAMA3, QWEN2
from weightscope.model.text.tokenizer import END_OF_TEXT, SMOLLM_WORDS, Tokenizer, safe_cut, safe_split

pyarrow = pytest.importorskip("pyarrow", reason="needs the 'bigrams' extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'bigrams' extra")
tokenizers = pytest.importorskip("tokenizers", reason="needs the 'bigrams' extra")
zstandard = pytest.importorskip("zstandard", reason="needs the 'bigrams' extra")

PROSE = "The cats sat, didn't they?  They'd sat on the mats\n\nuntil 1845; then the cats' mats were sat on no more.\n"
RUNS = "cats.\n\n\n  they,\n   sat   on\r\n\r\nmats 1845\n\n.\n" * 20  # teaches tokens of several spaces, and of ".\n"
# every kind of character a pattern tells apart, the marks and spaces that are easy to take for another, a special token
SPACES = ["  ", " \n", ".\n", "\n\n", "\u3000", "\x85", "\x1c"]
ALPHABET = [*"aeThs19'.-\n\r\t ", *SPACES, "'ll", " the", "é", "e\u0301", "東", "🐈", END_OF_TEXT]
texts = st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join)


def byte_level(pattern: str = GPT2):
    """A byte-level BPE of 400 tokens with one of the patterns whose texts may be cut."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == GPT2)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    steps = tokenizers.pre_tokenizers.Sequence([split, level])
    tokenizer.pre_tokenizer = level if pattern == GPT2 else steps
    if pattern == SMOLLM_WORDS:
        digits, words = tokenizers.pre_tokenizers.Digits(individual_digits=True), byte_level(GPT2).pre_tokenizer
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, words])
    if pattern == QWEN2:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE, RUNS], trainer)
    return tokenizer


PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2, "smollm": SMOLLM_WORDS}
LIBRARY = {name: byte_level(pattern) for name, pattern in PATTERNS.items()}
TOKENIZERS = {name: Tokenizer.of_library(tokenizer) for name, tokenizer in LIBRARY.items()}
SMALL = TOKENIZERS["gpt2"]


def naive(documents, tokenizer) -> Counter:
    """(current, previous) -> count, one pair after the other."""
    pairs: Counter = Counter()
    for document in documents:
        ids = tokenizer.encode(document, special=False)
        pairs.update(zip(ids[1:], ids[:-1], strict=True))
    return pairs


def as_dict(counts: Counts) -> dict:
    rows = np.repeat(np.arange(counts.vocab_size), np.diff(counts.indptr))
    return dict(zip(zip(rows.tolist(), counts.indices.tolist(), strict=True), counts.data.tolist(), strict=True))


def write_json_lines(path: Path, documents) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.mark.parametrize("words_up_to", [0, 4])
@settings(deadline=None, max_examples=60)
@given(documents=st.lists(texts, min_size=1, max_size=12))
def test_counts_are_those_of_a_plain_loop(tmp_path_factory, words_up_to, documents):
    """However small pieces, batches, buffers and memories of words are, however they fall, by words or by pieces."""
    expected = naive(documents, SMALL)
    file = write_json_lines(tmp_path_factory.mktemp("corpus") / "documents.jsonl", documents)
    with mock.patch.multiple(bigrams, PIECE=3, BATCH=11, BUFFER=5, REMEMBERED=500, WORDS_UP_TO=words_up_to):
        if not expected:
            with pytest.raises(CheckpointError, match="no token follows another"):
                count_bigrams([file], SMALL, progress=False)
            return
        counts = count_bigrams([file], SMALL, jobs=3, progress=False)
    assert as_dict(counts) == expected
    assert counts.tokens == sum(len(SMALL.encode(text, special=False)) for text in documents)
    assert counts.documents == sum(map(bool, documents))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=300)
@given(text=texts, parts=st.lists(st.integers(0, 60), max_size=4))
def test_pieces_have_the_tokens_of_the_whole(name, text, parts):
    """Wherever the text is cut, and in whatever parts it is read."""
    tokenizer = TOKENIZERS[name]
    ends = [*sorted(parts), len(text)]
    document = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    with mock.patch.object(bigrams, "PIECE", 1):
        cut = list(pieces(document, safe_cut(tokenizer)))
    assert "".join(cut) == text
    assert [i for piece in cut for i in tokenizer.encode(piece)] == tokenizer.encode(text)


ASCII = [chr(code) for code in range(128)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(text=texts | st.lists(st.sampled_from([*ASCII, "'LL", "  ", END_OF_TEXT, "é"]), max_size=30).map("".join))
def test_the_parts_of_a_text_have_the_tokens_of_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    parts = safe_split(tokenizer)(text)
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ascii_is_split_where_the_tokenizer_splits_it(name):
    """After any character and before any other."""
    split, pre_tokenizer = safe_split(TOKENIZERS[name]), LIBRARY[name].pre_tokenizer
    for text in map("".join, product(ASCII, ASCII)):
        words = pre_tokenizer.pre_tokenize_str(text)
        assert split(text) == [text[start:end] for _, (start, end) in words]


@pytest.mark.parametrize("content", ["sat", " s", "'t", "\u212a"])  # the last is K where text is normalised
def test_a_token_that_was_added_is_not_split(content):
    library = byte_level(QWEN2)
    library.add_tokens([tokenizers.AddedToken(content, normalized=True)])
    tokenizer = Tokenizer.of_library(library)
    text = "the cats' Kets sat, didn't they sats"
    parts = safe_split(tokenizer)(text)
    assert len(parts) > 5
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)
    assert tokenizer.ids[content] in tokenizer.encode(text)


def test_a_long_file_is_cut_and_the_pairs_across_the_cuts_are_counted(tmp_path):
    text = PROSE * 300
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    assert len(list(pieces([text], safe_cut(SMALL)))) > 5
    counts = count_bigrams([tmp_path], SMALL, progress=False)
    assert as_dict(counts) == naive([text], SMALL)
    assert counts.documents == 1
    assert counts.data.sum() == counts.tokens - 1


def test_unknown_pre_tokenizer_gets_whole_documents(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cats": 1, "[UNK]": 7}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = Tokenizer.of_library(library)
    assert safe_cut(tokenizer) is None is safe_split(tokenizer)
    text = "the cats the cats the mats " * 500
    assert list(pieces([text[:5000], text[5000:]], None)) == [text]
    (tmp_path / "cats.txt").write_text(text, encoding="utf-8")
    counts = count_bigrams([tmp_path], tokenizer, progress=False)
    assert counts.vocab_size == 8  # ids have a gap
    assert as_dict(counts) == naive([text], tokenizer)


def test_every_format_gives_the_same_counts(tmp_path):
    documents = [PROSE, "cats", "東京 the é🐈 cats\r\nsat", PROSE[::-1]]
    for name in ("text", "compressed"):
        (tmp_path / name).mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "text" / f"{number}.txt").write_bytes(text.encode())
        (tmp_path / "compressed" / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    lines = write_json_lines(tmp_path / "lines.jsonl", documents).read_bytes()
    (tmp_path / "lines.json.gz").write_bytes(gzip.compress(lines))
    halves = [zstandard.compress(lines[:50]), zstandard.compress(lines[50:])]  # two frames
    (tmp_path / "lines.ndjson.zst").write_bytes(b"".join(halves))
    table = pyarrow.table({"id": range(5), "text": [*documents, None]})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)

    expected = naive(documents, SMALL)
    for source in ("text", "compressed", "lines.jsonl", "lines.json.gz", "lines.ndjson.zst", "rows.parquet"):
        counts = count_bigrams([tmp_path / source], SMALL, progress=False)
        assert as_dict(counts) == expected, source
        assert counts.documents == 4, source


def test_no_pair_crosses_documents(tmp_path):
    """Documents of one token each have no pair, in one file or in many."""
    write_json_lines(tmp_path / "a.jsonl", ["a", "e", "", "a"])
    (tmp_path / "b.txt").write_text("a", encoding="utf-8")
    with pytest.raises(CheckpointError, match="4 documents with text, 4 tokens"):
        count_bigrams([tmp_path], SMALL, progress=False)


def test_jobs_do_not_change_the_counts_and_leave_the_environment_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    write_json_lines(tmp_path / "a.jsonl", [PROSE * 40] * 20)
    single, eight = (count_bigrams([tmp_path], SMALL, jobs=jobs, progress=False) for jobs in (1, 8))
    assert as_dict(single) == as_dict(eight)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_quick_count_shows_no_bar(tmp_path, capfd):
    (tmp_path / "a.txt").write_text(PROSE, encoding="utf-8")
    count_bigrams([tmp_path], SMALL)
    assert capfd.readouterr() == ("", "")


def test_corpus_that_cannot_be_encoded_is_refused(tmp_path):
    words = tokenizers.models.WordPiece({"cat": 0}, unk_token="[UNK]")
    tokenizer = Tokenizer.of_library(tokenizers.Tokenizer(words))
    (tmp_path / "a.txt").write_text("dogs", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot encode"):
        count_bigrams([tmp_path], tokenizer, progress=False)


def test_counts_survive_their_file(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "cats.txt").write_text(PROSE, encoding="utf-8")
    counts = count_bigrams([tmp_path / "books"], SMALL, progress=False)
    counts.save(tmp_path / "counts.npz")
    loaded = load_counts(tmp_path / "counts.npz")
    assert as_dict(loaded) == as_dict(counts)
    assert loaded.corpus_files == ("books/cats.txt",)


@pytest.mark.parametrize("vocab_size", [2, 16, 300, 70_000])  # keys of 8, 16, 32 and 64 bits
@settings(deadline=None, max_examples=40)
@given(chooser=st.data())
def test_sums_of_a_stream_do_not_depend_on_its_parts(vocab_size, chooser):
    ids = st.integers(max(0, vocab_size - 9), vocab_size - 1) | st.just(BORDER)
    parts = chooser.draw(st.lists(st.lists(ids, max_size=8), max_size=12))
    with mock.patch.object(bigrams, "BUFFER", 4):
        sums = PairSums(vocab_size)
        for part in parts:
            sums.add(np.array(part, dtype=np.int64))
            held = [matrix.nnz for matrix in sums._sums]
            assert all(small <= large / 2 for large, small in pairwise(held))
        matrix = sums.matrix()
    stream = [i for part in parts for i in part]
    expected = Counter(p for p in zip(stream[1:], stream[:-1], strict=True) if BORDER not in p) if stream else {}
    rows, columns = matrix.nonzero()
    assert matrix.has_canonical_format
    assert dict(zip(zip(rows.tolist(), columns.tolist(), strict=True), matrix.data.tolist(), strict=True)) == expected


@pytest.fixture(scope="module")
def gpt2():
    return Tokenizer.load(shared("gpt2-tokenizer"))


@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_gpt2_gives_a_text_in_pieces_the_tokens_of_the_whole(gpt2, text):
    with mock.patch.object(bigrams, "PIECE", 1):
        cut = list(pieces([text], safe_cut(gpt2)))
    assert [i for piece in cut for i in gpt2.encode(piece)] == gpt2.encode(text)
