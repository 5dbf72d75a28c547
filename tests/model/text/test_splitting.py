"""Splitting rules of GGUF files and SentencePiece models, against llama.cpp and sentencepiece."""

import base64
import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.model.text.gguf_vocabularies import RECORDED, SPECIAL, TEXTS, VOCABULARIES, byte_level, of_scores, write_gguf
from weightscope.cli import main
from weightscope.model.text import sandbox
from weightscope.model.text.counts import load_counts
from weightscope.model.text.splitting import PRE_TOKENIZERS
from weightscope.model.text.tokenizer import END_OF_TEXT, Tokenizer, TokenList, safe_cut, safe_split

pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
pytest.importorskip("gguf", reason="a GGUF file is written with the extra `gguf`")

# Two small models of Japanese and English with what sentencepiece 0.2.3 makes of some texts: a unigram model whose
# charsmap has full-width letters, spaces and two sequences, and a BPE model with bytes that keeps its spaces.
SENTENCEPIECE = json.loads(Path(__file__).with_name("sentencepiece_tokens.json").read_text())
OF_LLAMA_CPP: dict[str, list[list[int]]] = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_gguf_file_splits_texts_as_llama_cpp_does(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", VOCABULARIES[name]))
    assert not isinstance(tokenizer, TokenList)
    assert [tokenizer.encode(text) for text in TEXTS] == OF_LLAMA_CPP[name]


def test_every_pre_tokenizer_is_compared_with_llama_cpp() -> None:
    assert PRE_TOKENIZERS.keys() <= OF_LLAMA_CPP.keys() == VOCABULARIES.keys()


def test_the_embedded_tokenizer_in_a_gguf_file_is_the_same(tmp_path: Path) -> None:
    tokens = byte_level("gpt-2")["tokens"][: -len(SPECIAL)]
    types = [3 if token == END_OF_TEXT else 1 for token in tokens]
    keys = byte_level("gpt-2", tokens=tokens, token_type=types, bos_token_id=None, eos_token_id=None)
    ours, original = Tokenizer.load(write_gguf(tmp_path / "model.gguf", keys)), Tokenizer.load("embedded")
    assert ours.hash == original.hash and ours.facts["added"] == original.facts["added"]
    assert ours.encode_batch(TEXTS) == original.encode_batch(TEXTS)
    assert ours.text(*ours.encode(TEXTS[0])) == TEXTS[0]


def test_qwen2_normalises_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", byte_level("qwen2")))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_for_a_gguf_file_may_be_cut(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", byte_level(name)))
    split = safe_split(tokenizer)
    assert split is not None and safe_cut(tokenizer) is not None
    for text in TEXTS:
        parts = chain(*tokenizer.encode_batch(split(text)))
        assert [*parts] == tokenizer.encode(text, special=False)


def test_bigrams_are_counted_by_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXTS[0], encoding="utf-8")
    file = write_gguf(tmp_path / "model.gguf", byte_level("smollm"))
    arguments = ["bigrams", str(tmp_path / "text.txt"), "--tokenizer", str(file), "--out", str(tmp_path / "c.npz")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    ids, counts = Tokenizer.load(file).encode(TEXTS[0]), load_counts(tmp_path / "c.npz")
    pairs = Counter(pairwise(ids))
    matrix = counts.matrix(counts.vocab_size)
    assert counts.tokens == len(ids) and matrix.nnz == len(pairs)
    assert all(matrix[current, previous] == n for (previous, current), n in pairs.items())


def changed(name: str, place: int, value: Any) -> dict[str, Any]:
    keys = byte_level("smollm")
    keys[name] = [*keys[name]]
    keys[name][place] = value
    return keys


NO_RULES = {
    "no pre-tokenizer": (byte_level(None), r"its pre-tokenizer is not named \(tokenizer\.ggml\.pre\)"),
    "an unknown one": (byte_level("tekken"), r"its pre-tokenizer is 'tekken'; known are gpt-2, smollm, .*"),
    "a long name": (byte_level("x" * 9000), r"its pre-tokenizer is 'x{40}'; known are .*"),
    "no merges": (byte_level("smollm", merges=None), "has no list of merges"),
    "merges of numbers": (byte_level("smollm", merges=[1, 2]), "has no list of merges"),
    "a merge of no token": (changed("merges", 5, "q qq"), "has the merge 'q qq', which is not of two tokens .*"),
    "a merge into no token": (changed("merges", 5, "zz zz"), "has the merge 'zz zz', which is not of two tokens .*"),
    "a merge of three": (changed("merges", 5, "a b c"), "has the merge 'a b c', which is not of two tokens .*"),
    "a merge of one": (changed("merges", 5, ""), "has the merge '', which is not of two tokens .*"),
    "a merge twice": (changed("merges", 5, "h e"), "lists a merge twice"),
    "a token twice": (changed("tokens", 300, "the"), "lists the token 'the' twice"),
    "too few types": (byte_level("smollm", token_type=[1, 1]), "its token_type is not a list of 8002 numbers, .*"),
    "types of text": (byte_level("smollm", token_type=["1"] * 8002), "its token_type is not a list of .* numbers, .*"),
    "one type": (byte_level("smollm", token_type=1), "its token_type is not a list of 8002 numbers, .*"),
    "no scores": (of_scores(scores=None), "its scores is not a list of .* numbers, one for each token"),
    "another kind": ({"model": "t5", "tokens": ["a", "b"]}, "rules of the kind 't5' are not read"),
    "no such unknown token": (of_scores(unknown_token_id=10**6), r"its unknown token \(1000000\) is not in its list"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "why"), NO_RULES.values(), ids=NO_RULES)
def test_without_rules_tokens_have_names_and_texts_are_refused(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", keys))
    assert isinstance(tokenizer, TokenList) and tokenizer.tokens == dict(enumerate(keys["tokens"]))
    with pytest.raises(
        ws.CheckpointError, match=rf"^model\.gguf: cannot split texts: {why}; a tokenizer\.json has .*$"
    ):
        tokenizer.encode_batch(["a cat"])


@pytest.mark.parametrize("ends", [{"bos_token_id": 10**6}, {"eos_token_id": "x"}, {"bos_token_id": None}])
def test_a_first_token_that_is_none_is_left_out(ends: dict[str, Any], tmp_path: Path) -> None:
    keys = byte_level("smollm", add_bos_token=True, add_eos_token=True, **ends)
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", keys))
    assert len(tokenizer.encode("")) == len(tokenizer.around) == 1


def test_merges_that_take_too_long_leave_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    keys = of_scores()
    keys = {name: [*value, *value[-1:]] if isinstance(value, list) else value for name, value in keys.items()}
    keys["tokens"][-1] = "a" * 200_000
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "model.gguf", keys))
    with pytest.raises(ws.CheckpointError, match=r"cannot split texts: it takes the tokenizers library more than"):
        tokenizer.encode_batch(["a"])


def test_more_merges_than_are_read_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", byte_level("smollm", merges=["a b"] * 1_000_000))
    with pytest.raises(
        ws.CheckpointError, match=r"^model\.gguf: GGUF header has 1008002 strings; at most 1000000 are read"
    ):
        Tokenizer.load(file)


def sentencepiece(folder: Path, kind: str, name: str = "spiece.model", **config: object) -> Path:
    """A folder with one of the two models and its config."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(base64.b64decode(SENTENCEPIECE[kind]["model"]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("cls", ["T5Tokenizer", "LlamaTokenizerFast"])
def test_a_sentencepiece_model_splits_texts_as_sentencepiece_does(kind: str, cls: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece(tmp_path, kind, tokenizer_class=cls))
    texts = SENTENCEPIECE[kind]["texts"]
    assert tokenizer.encode_batch([*texts]) == [*texts.values()]
    for text, ids in texts.items():
        assert tokenizer.encode(text) == ([*ids, 2] if cls == "T5Tokenizer" else [1, *ids])
    assert Tokenizer.load(tmp_path / "spiece.model").encode_batch([*texts]) == [*texts.values()]


def test_a_sentencepiece_model_may_want_small_letters(tmp_path: Path) -> None:
    lower = Tokenizer.load(sentencepiece(tmp_path / "a", "unigram", tokenizer_class="T5Tokenizer", do_lower_case=True))
    plain = Tokenizer.load(sentencepiece(tmp_path / "b", "unigram", tokenizer_class="T5Tokenizer", do_lower_case=False))
    assert lower.encode("The CATS") == plain.encode("the cats") != plain.encode("The CATS")


def test_a_class_with_other_rules_is_refused_or_names_tokens(tmp_path: Path) -> None:
    with pytest.raises(
        ws.CheckpointError, match=r"^spiece\.model: a PegasusTokenizer has rules of its own, which are not"
    ):
        Tokenizer.load(sentencepiece(tmp_path / "a", "unigram", tokenizer_class="PegasusTokenizer"))
    listed = Tokenizer.load(sentencepiece(tmp_path / "b", "bpe", "tokenizer.model", tokenizer_class="XGLMTokenizer"))
    assert isinstance(listed, TokenList) and listed.tokens[1] == "<s>"
    with pytest.raises(ws.CheckpointError, match=r"cannot split texts: a XGLMTokenizer has rules of its own"):
        listed.encode_batch(["a cat"])
