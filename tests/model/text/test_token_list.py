"""Tokenizers that are no tokenizer.json: WordPiece's vocab.txt, SentencePiece's model, a GGUF file's own list."""

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.attacks.attacks import key, llama
from tests.support.audit import audit_of
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli import main
from weightscope.model.text import sandbox
from weightscope.model.text.counts import Counts
from weightscope.model.text.tokenizer import PARSED_HERE, Tokenizer, TokenList
from weightscope.report.pages.style import Drawing

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "The",
    "cafe",
    "café",
    "##s",
    "cat",
    "中",
    ",",
    "un",
    "##able",
]
PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "▁the", "▁cat", "s", "▁", "é"]


def vocabulary(folder: Path, **config: object) -> Path:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def varint(number: int) -> bytes:
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def sentencepiece(pieces: list[str]) -> bytes:
    """sentencepiece_model.proto: pieces are field 1; each has its text (1), score (2, float) and type (3)."""
    messages = [
        message(1, p.encode()) + b"\x15" + struct.pack("<f", -float(i)) + b"\x18\x01" for i, p in enumerate(pieces)
    ]
    trainer = message(2, b"\x18\x02" + message(1, b"a corpus") + b"\x08" + varint(1 << 40))
    return trainer + b"".join(message(1, piece) for piece in messages) + message(3, message(1, b"identity"))


LARGE = [f"▁word{i}" for i in range(20_000)]


def test_a_large_list_is_parsed_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its time and memory have limits; what comes back is the same."""
    content = sentencepiece(LARGE)
    assert len(content) > PARSED_HERE
    assert TokenList.of_sentencepiece(content, "tokenizer.model").ids == {name: i for i, name in enumerate(LARGE)}
    monkeypatch.setattr(sandbox, "SECONDS", 0.001)
    with pytest.raises(ws.CheckpointError, match=r"^spiece\.model: it takes .* more than 0 seconds"):
        TokenList.of_sentencepiece(content * 5, "spiece.model")


def test_a_list_of_long_names_is_refused_by_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_CHARACTERS", 1000)
    with pytest.raises(ws.CheckpointError, match=r"^long: its tokens have .* characters; at most 1000 are read"):
        TokenList.of_sentencepiece(sentencepiece(LARGE), "long")
    monkeypatch.setattr(sandbox, "MOST_TOKENS", 100)
    with pytest.raises(ws.CheckpointError, match=r"^many: has 20000 tokens; at most 100 are read"):
        TokenList.of_sentencepiece(sentencepiece(LARGE), "many")


def test_lines_are_counted_before_they_are_listed(tmp_path: Path) -> None:
    """A list of 50 million empty lines takes 400 MB."""
    (tmp_path / "vocab.txt").write_bytes(b"\n" * 50_000_000)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "X"}')
    tracemalloc.start()
    with pytest.raises(ws.CheckpointError, match="lists 50000000 tokens; from 1 to"):
        Tokenizer.load(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 150_000_000
    tracemalloc.stop()


@pytest.mark.check
@pytest.mark.parametrize(
    "config",
    [{}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False}, {"tokenize_chinese_chars": False}],
)
def test_word_piece_splits_as_transformers_does(config: dict[str, object], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(vocabulary(tmp_path, tokenizer_class="BertTokenizer", **config))
    theirs = transformers.BertTokenizer(vocab=dict(zip(WORDS, range(len(WORDS)), strict=True)), **config)
    for text in ("The cats, unable", "CAFÉ café 中the", "a [MASK] cat", ""):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.text(ours.id_of("##s")) == "##s" and ours.text(10, 9) == "cats"


def test_unknown_tokenizer_class_names_tokens_and_splits_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabulary(tmp_path, tokenizer_class="BertJapaneseTokenizer"))
    assert tokenizer.id_of("cat") == 10 and tokenizer.text(13, 14) == "unable"
    with pytest.raises(ws.CheckpointError, match=r"vocab\.txt: cannot split texts: only its list of tokens is read"):
        tokenizer.encode_batch(["a cat"])


def test_sentencepiece_names_its_pieces(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES))
    for source in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = Tokenizer.load(source)
        assert [tokenizer.tokens[i] for i in range(tokenizer.size)] == PIECES
        assert tokenizer.text(4, 5, 6) == " the cats"
        assert tokenizer.id_of(" cat") == tokenizer.id_of("▁cat") == 5
    with pytest.raises(ws.CheckpointError, match=r"tokenizer\.model: has no token ' dog': its unknown token"):
        tokenizer.id_of(" dog")


@pytest.mark.parametrize("length", range(0, 60, 7))
def test_a_sentencepiece_model_cut_anywhere_is_refused_or_shorter(length: int) -> None:
    content = sentencepiece(PIECES)
    try:
        cut = TokenList.of_sentencepiece(content[:length], "tokenizer.model")
    except ws.CheckpointError as error:
        assert str(error).startswith("tokenizer.model: ") and "\n" not in str(error)
    else:
        assert [*cut.tokens.values()] == PIECES[: len(cut.tokens)]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 20,
        b"\x0b",
        b"\x08\x01",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"{}",
        b"\x0a\x02\x0a\x00\x00",
        b"\x0a\x03\x12\x01a",
    ],
)
def test_file_that_is_not_a_sentencepiece_model_is_refused(content: bytes) -> None:
    with pytest.raises(ws.CheckpointError, match=r"tokenizer\.model: (is not a SentencePiece model|lists 0 tokens)"):
        TokenList.of_sentencepiece(content, "tokenizer.model")


@pytest.mark.parametrize(
    ("kind", "tokens", "text"),
    [
        ("llama", PIECES, " the"),
        ("gpt2", ["a", "b", "Ġ", "ĠÃ©"], " é"),
        ("bert", ["[PAD]", "▁cat", "s", "[X]", "▁the"], "the"),
    ],
)
def test_the_list_in_a_gguf_file_names_tokens(kind: str, tokens: list[str], text: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for source in (tmp_path / "model.gguf", tmp_path):
        tokenizer = Tokenizer.load(source)
        assert isinstance(tokenizer, TokenList)
        assert tokenizer.id_of(text) == 4 - (kind == "gpt2")
        assert tokenizer.text(tokenizer.id_of(text)) == text
    if kind == "bert":
        assert tokenizer.text(1, 2) == "cats" and tokenizer.tokens[3] == "[X]"


def test_gguf_token_list_of_numbers_is_refused(tmp_path: Path) -> None:
    numbers = key(b"tokenizer.ggml.tokens", 9, struct.pack("<IQII", 4, 2, 7, 8))
    (tmp_path / "model.gguf").write_bytes(llama(keys=numbers, n_keys=1))
    with pytest.raises(ws.CheckpointError, match=r"model\.gguf: has no list of tokens"):
        Tokenizer.load(tmp_path / "model.gguf")


@pytest.fixture
def without_tokenizer(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", gpt2_weights(vocab=len(WORDS)))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_token_may_be_named_by_its_id(without_tokenizer: Path, tmp_path: Path) -> None:
    assert "'#" in run("neighbours", without_tokenizer, "--token-id", 10, "--head", 1)
    places = {"--tokenizer": vocabulary(tmp_path), "--revision": None}
    by_id = run("neighbours", without_tokenizer, "--token-id", 10, "--tokenizer", places["--tokenizer"])
    assert (
        by_id == run("neighbours", without_tokenizer, "cat", "--tokenizer", places["--tokenizer"]) and "'##s'" in by_id
    )
    outside = CliRunner().invoke(main, ["neighbours", str(without_tokenizer), "--token-id", "15"])
    assert outside.exit_code == 2 and "no token 15: the vocabulary has 15" in outside.stderr
    neither = CliRunner().invoke(main, ["neighbours", str(without_tokenizer)])
    assert neither.exit_code == 2 and "give a TOKEN or --token-id" in neither.stderr


def test_audit_reads_the_named_tokenizer(without_tokenizer: Path, tmp_path: Path) -> None:
    tokens = vocabulary(tmp_path)
    assert audit_of(without_tokenizer, tmp_path / "plain").exit_code == 0
    assert audit_of(without_tokenizer, tmp_path / "named", "--tokenizer", str(tokens)).exit_code == 0
    plain, named = ((tmp_path / name / "directions.json").read_text() for name in ("plain", "named"))
    assert '"#5"' in plain and '"#5"' not in named and '"cafe"' in named
    wrong = audit_of(without_tokenizer, tmp_path / "wrong", "--tokenizer", str(tmp_path / "absent"))
    assert wrong.exit_code == 2 and wrong.stderr.count("\n") == 1
    assert not (tmp_path / "wrong").exists()  # it is said before anything is measured
    again = audit_of(without_tokenizer, tmp_path / "named", "--resume", "--tokenizer", str(tokens))
    assert "is up to date" in again.stdout
    again = audit_of(without_tokenizer, tmp_path / "named", "--resume")
    assert "is up to date" not in again.stdout


def test_commands_about_tokens_take_a_tokenizer() -> None:
    naming = {name for name, command in main.commands.items() if any(p.name == "tokenizer" for p in command.params)}
    assert naming >= {"audit", "detok", "neighbours", "positions", "circuits", "bigrams", "norms", "outliers", "sinks"}
    by_id = {name for name, command in main.commands.items() if any(p.name == "token_ids" for p in command.params)}
    assert by_id == {"detok", "neighbours"}


def test_neighbours_in_another_layer_are_said_to_be_of_bare_embeddings() -> None:
    sentence = "bare token embeddings, which are not what reaches layer 1"
    result = CliRunner().invoke(main, ["neighbours", TWO_LAYERS, "--token-id", "700", "--layer", "1", "--top", "1"])
    assert sentence in result.stderr and "score of bare embeddings" in result.stdout
    first = CliRunner().invoke(main, ["neighbours", TWO_LAYERS, "--token-id", "700", "--top", "1"])
    assert not first.stderr and "bare" not in first.stdout


def test_detok_of_another_layer_says_so_in_its_table_and_on_its_page(
    without_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(WORDS)
    row = np.arange(n)
    Counts(np.arange(n + 1), row[::-1].copy(), np.full(n, 2), "made up", ("made up",), 1, 99).save(tmp_path / "c.npz")
    monkeypatch.setattr("weightscope.heads.detok.page.save", lambda *_: Drawing("<svg/>"))
    options = ["--counts", str(tmp_path / "c.npz"), "--out", str(tmp_path)]
    for layer in (0, 1):
        result = CliRunner().invoke(main, ["detok", str(without_tokenizer), "--layer", str(layer), *options])
        assert result.exit_code == 0, result.output
        places = (result.stderr, result.stdout, (tmp_path / "report.html").read_text())
        assert [("bare" in place, f"not what reaches layer {layer}" in place) for place in places] == [
            (bool(layer), bool(layer)),
            (bool(layer), False),
            (bool(layer), bool(layer)),
        ]
