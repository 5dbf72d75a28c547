"""Vocabularies without rules: vocab.txt with what its config says of it, and SentencePiece's tokenizer.model."""

import json
import random
import struct
from pathlib import Path

from tests.fuzz.mutate import VALUES, mutated_bytes
from tests.fuzz.tokenizers import WORDS, used

LINES = (*WORDS[:-2], "[PAD]", "[SEP]", "[MASK]", "the", "##s", "##", " ", "\t", "\u2028", "\x1b[2J", "x" * 3000)
SETTINGS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "tokenizer_class", "unk_token", "never_split")
CLASSES = ("BertTokenizer", "BertTokenizerFast", "ElectraTokenizer", "BertJapaneseTokenizer", "MPNetTokenizer")
BETWEEN = b"\n\0\n"  # the files of one folder


def vocab(rng: random.Random) -> bytes:
    """A vocab.txt and a tokenizer_config.json."""
    words = rng.choices(LINES, k=rng.choice((0, 1, 3, 8, 40)))
    words = list(dict.fromkeys(words)) if rng.random() < 0.7 else words
    content = rng.choice(("\n", "\n", "\r\n")).join([*words, ""]).encode()
    if rng.random() < 0.3:
        content = mutated_bytes(content, rng, content)
    settings = {name: rng.choice((*CLASSES, *VALUES)) for name in rng.sample(SETTINGS, rng.randrange(4))}
    return content.replace(BETWEEN, b"") + BETWEEN + json.dumps(settings).encode()


def meet_vocab(folder: Path, content: bytes) -> str:
    vocabulary, settings = content.split(BETWEEN)
    (folder / "vocab.txt").write_bytes(vocabulary)
    (folder / "tokenizer_config.json").write_bytes(settings)
    return used(folder)


def sentencepiece(rng: random.Random) -> bytes:
    """A protocol buffer of pieces, and of what else such a file has; some fields of other kinds."""
    content = b""
    for _ in range(rng.choice((0, 1, 3, 8, 40))):
        piece = _field(1, rng.choice(WORDS[:-2]).encode(errors="replace")) + b"\x15" + struct.pack("<f", rng.random())
        if rng.random() < 0.3:
            piece += _varint(3 << 3) + _varint(rng.choice((1, 2, 3, 6, 2**31, 2**63)))
        if rng.random() < 0.05:
            piece = rng.choice((b"", piece[:-1], _field(2, b"a"), _varint(1 << 3) + _varint(7)))
        content += _field(1, piece) if rng.random() < 0.97 else _varint(1 << 3) + _varint(len(piece))
    content += _field(2, _varint(4 << 3) + _varint(8000)) + _field(3, _field(1, b"nmt_nfkc"))
    return mutated_bytes(content, rng, content) if rng.random() < 0.3 else content


def meet_sentencepiece(folder: Path, content: bytes) -> str:
    (folder / "tokenizer.model").write_bytes(content)
    return used(folder)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
