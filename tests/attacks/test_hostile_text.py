"""`positions --on-text` with a stranger's text and tokenizer: a result or one line, soon, and never half a result."""

import bz2
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn

pytest.importorskip("torch", reason="the model is run on text by PyTorch, which is not installed")
pytestmark = pytest.mark.check
SMALL = Path(ws.__file__).parent / "core" / "embedded"
SECONDS = 30.0
WORDS = "the cat sat on the mat and looked at the sea. "
# A text file's name and bytes, and a part of the line that it ends in; empty where it is read.
TEXTS: dict[str, tuple[str, bytes, str]] = {
    "nothing": ("a.txt", b"", "contain no text"),
    "white space": ("a.txt", b" \n" * 100_000, "contain no text"),
    "one word": ("a.txt", b"word", "as many as the model has positions"),
    "null characters": ("a.txt", b"\0" * 100_000, "as many as the model has positions"),
    "no UTF-8": ("a.txt", b"caf\xe9 " * 1000, "invalid UTF-8"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair"),
    "a line of 34 MB": ("a.jsonl", b'{"text": "' + b"a" * 34_000_000, "bytes in a line"),
    "one word of 1 MB": ("a.txt", b"a" * 10**6, "as many as the model has positions"),
    "marks on one letter": ("a.txt", b"e" + "\u0301".encode() * 100_000, "as many as the model has positions"),
    "escapes": ("a.txt", b"\x1b[2J\x1b]0;owned\x07" * 5000, "as many as the model has positions"),
    "a bomb in bz2": ("a.txt.bz2", bz2.compress(b" " * 10**7) * 8, "unpacks to more than"),
    "a bomb of text in bz2": ("a.txt.bz2", bz2.compress(WORDS.encode() * 20_000) * 90, "unpacks to more than"),
    "half of a bz2": ("a.txt.bz2", bz2.compress(WORDS.encode() * 9999)[:-20], "cannot be read"),
    "an xz that is not read": ("a.txt.xz", b"\xfd7zXZ\0\0\4", "invalid UTF-8"),
    "special tokens as text": ("a.txt", b"<|endoftext|>" * 5000, "as many as the model has positions"),
}


def told(result: Any, out: Path, expected: str) -> None:
    """One line with these words and nothing written, or a whole result."""
    if expected:
        assert is_one_line(result) and expected in result.stderr, f"{result.output} {result.exception!r}"
        assert not [path for path in out.rglob("*") if path.is_file() and ".weightscope" not in path.parts]
    else:
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
        assert (out / "report.html").is_file() and (out / "contributions.csv").is_file()
    assert "\x1b" not in result.output


@pytest.mark.parametrize("attack", TEXTS)
def test_text(attack: str, tmp_path: Path) -> None:
    name, content, expected = TEXTS[attack]
    (tmp_path / name).write_bytes(content)
    start = time.process_time()
    with undrawn():
        result = run("positions", "embedded", "--text", tmp_path / name, "--out", tmp_path / "out")
    told(result, tmp_path / "out", expected)
    assert time.process_time() - start < SECONDS


Change = Callable[[dict[str, Any]], object]


def ids_moved(value: dict[str, Any]) -> None:
    """All ids beyond the embedding."""
    vocabulary = value["model"]["vocab"]
    vocabulary |= {token: index + 8000 for token, index in vocabulary.items()}
    value["added_tokens"] = []


def framed(count: int) -> Change:
    """So many special tokens before every text."""
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}] * count + [
        {"Sequence": {"id": "A", "type_id": 0}}
    ]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    made = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    return lambda value: value.update(post_processor=made)


def replaced(pattern: dict[str, str], content: str) -> Change:
    return lambda value: value.update(normalizer={"type": "Replace", "pattern": pattern, "content": content})


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "ids beyond the embedding": (ids_moved, "8000"),
    "nothing is left of a text": (replaced({"Regex": "[\\s\\S]+"}, ""), "as many as the model has positions"),
    "one token is all": (replaced({"Regex": "[^ ]+"}, "the"), ""),
    "a text that grows": (replaced({"String": "a"}, "a" * 5000), "its answer has"),
    "a pattern that backtracks": (replaced({"Regex": "(a|a)*(a|aa)+$b"}, ""), "tokenizer.json"),
    "5,000 special tokens": (framed(5000), ""),
    "padding and truncation": (lambda v: v.update(
        truncation={"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}), ""),
}  # fmt: skip


@pytest.mark.parametrize("attack", TOKENIZERS)
def test_tokenizer(attack: str, tmp_path: Path) -> None:
    change, expected = TOKENIZERS[attack]
    model = Path(shutil.copytree(SMALL, tmp_path / "model"))
    value = json.loads((model / "tokenizer.json").read_text())
    change(value)
    (model / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "a.txt").write_text("a" * 60 + WORDS * 400)
    start = time.process_time()
    with undrawn():
        result = run("positions", model, "--text", tmp_path / "a.txt", "--out", tmp_path / "out")
    told(result, tmp_path / "out", expected)
    assert time.process_time() - start < SECONDS
