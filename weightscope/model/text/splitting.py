"""Splitting rules of GGUF files and SentencePiece models, written as a tokenizer.json.

The functions that make a tokenizer run in `sandbox`'s child.
"""

import base64
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.checkpoint.gguf import header_of
from weightscope.core.errors import CheckpointError
from weightscope.model.text.sandbox import Loaded, from_json

BEGINS_A_WORD = "▁"
Step = dict[str, Any]  # a step in a tokenizer.json

# Patterns of words
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class PreTokenizer(NamedTuple):
    """Steps before BPE, which a file names in `tokenizer.ggml.pre`."""

    steps: tuple[Step, ...]
    normalizer: Step | None = None
    ignore_merges: bool = False  # a word that is a token stays whole
    adds_first: bool = False  # where the file does not say whether a text gets a first token


SPACE_AS_IT_IS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTES = SPACE_AS_IT_IS | {"use_regex": False}
GPT2_STEP = SPACE_AS_IT_IS | {"use_regex": True}
SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}


def _words(pattern: str) -> Step:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


SMOLLM = PreTokenizer((SINGLE_DIGITS, GPT2_STEP))
LLAMA_3 = PreTokenizer((_words(LLAMA3), BYTES), ignore_merges=True, adds_first=True)
# By the names of llama.cpp, whose rules these are; NFC, which it leaves out, is Qwen2's own.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2_STEP,)),
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "llama-bpe": LLAMA_3,
    "qwen2": PreTokenizer((_words(QWEN2), BYTES), {"type": "NFC"}),
}

# GGUF files

PREFIX = "tokenizer.ggml."
LISTS = tuple(PREFIX + name for name in ("tokens", "merges", "token_type", "scores"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece's types too


def gguf_problem(keys: Mapping[str, Any]) -> str:
    """Why texts cannot be split by the rules that a GGUF file names; empty if they can."""
    kind, pre = (str(keys.get(PREFIX + name, ""))[:40] for name in ("model", "pre"))
    if kind == "llama":
        return ""
    if kind != "gpt2":
        return f"rules of the kind '{kind}' are not read"
    if not pre:
        return "its pre-tokenizer is not named (tokenizer.ggml.pre)"
    known = ", ".join(PRE_TOKENIZERS)
    return "" if pre in PRE_TOKENIZERS else f"its pre-tokenizer is '{pre}'; known are {known}"


def gguf_tokenizer(file: str, _written: tuple[int, int]) -> Loaded:
    """The tokenizer of a GGUF file that has no `gguf_problem`."""
    header = header_of(Path(file), LISTS)
    keys = {key.removeprefix(PREFIX): value for key, value in header.items()}
    tokens, of_scores = keys["tokens"], keys["model"] == "llama"
    types = _numbers(keys, "token_type", len(tokens)) if "token_type" in keys else []
    rules, made = PRE_TOKENIZERS.get(str(keys.get("pre")), PreTokenizer(())), Step()
    if of_scores:
        scores = _numbers(keys, "scores", len(tokens))
        vocabulary = Vocabulary(tokens, scores, types, keys.get("unknown_token_id", 0))
        steps = _steps_of_spaces(keys.get("add_space_prefix", True) is True)
        made = {"model": vocabulary.bpe(), "normalizer": _sequence("normalizers", steps)}
    else:
        vocabulary = Vocabulary(tokens, [], types)
        merges = _pairs(keys.get("merges"), vocabulary.ids)
        model = {"type": "BPE", "vocab": vocabulary.ids, "merges": merges}
        made = {
            "model": model | {"ignore_merges": rules.ignore_merges},
            "normalizer": rules.normalizer,
            "pre_tokenizer": _sequence("pretokenizers", rules.steps),
            "decoder": BYTES,
        }
    adds_first = keys.get("add_bos_token", of_scores or rules.adds_first) is True
    before = keys.get("bos_token_id") if adds_first else None
    after = keys.get("eos_token_id") if keys.get("add_eos_token") is True else None
    return vocabulary.loaded(made, before, after)


def _numbers(keys: Mapping[str, Any], name: str, length: int) -> Sequence[float]:
    numbers = keys.get(name)
    if isinstance(numbers, list) and len(numbers) == length and not isinstance(numbers[0], str):
        return numbers
    raise CheckpointError(f"its {name} is not a list of {length} numbers, one for each token")


def _pairs(merges: Any, ids: Mapping[str, int]) -> list[list[str]]:
    """The pairs of a list of merges, each of two tokens that make one."""
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError("has no list of merges")
    if len({*merges}) < len(merges):
        raise CheckpointError("lists a merge twice")
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            problem = f"has the merge {' '.join(pair)[:80]!r}"
            raise CheckpointError(f"{problem}, which is not of two tokens that make a third")
    return pairs


def _sequence(steps_of: str, steps: Sequence[Step]) -> Step:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", steps_of: list(steps)}


def _steps_of_spaces(prefix: bool) -> list[Step]:
    """Spaces become ▁, and one more is put before a text."""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": BEGINS_A_WORD}
    return [{"type": "Prepend", "prepend": BEGINS_A_WORD}] * prefix + [replaced]


@dataclass
class Vocabulary:
    """Tokens by id, with what a SentencePiece model or a GGUF file says of each."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[float]
    unknown: Any = None  # an id
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            listed = enumerate(self.tokens)
            twice = next(token for index, token in listed if self.ids[token] != index)
            raise CheckpointError(f"lists the token {twice[:40]!r} twice")

        if self.scores and not self._has(self.unknown):
            problem = f"its unknown token ({str(self.unknown)[:20]}) is not in its list"
            raise CheckpointError(problem)

    def _has(self, index: Any) -> bool:
        return type(index) is int and 0 <= index < len(self.tokens)

    def bpe(self) -> Step:
        """Llama's kind: of two neighbours, those that make the token of the highest score."""
        merges: list[tuple[float, int, str, str]] = []
        for token, score in zip(self.tokens, self.scores, strict=True):
            for cut in range(1, len(token)):
                if token[:cut] in self.ids and token[cut:] in self.ids:
                    merges.append((-score, -cut, token[:cut], token[cut:]))
        return {
            "type": "BPE",
            "vocab": self.ids,
            "merges": [pair for _, _, *pair in sorted(merges)],
            "unk_token": self.tokens[self.unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in self.types,
        }

    def unigram(self) -> Step:
        """T5's kind: the tokens with the highest sum of scores."""
        pieces = list(zip(self.tokens, self.scores, strict=True))
        fallback = BYTE in self.types
        return {
            "type": "Unigram", "vocab": pieces, "unk_id": self.unknown, "byte_fallback": fallback,
        }  # fmt: skip

    def loaded(self, made: Step, before: Any, after: Any) -> Loaded:
        """The library's tokenizer, with special tokens put before and after a text."""
        added = [
            {
                "id": index, "content": token, "special": kind != USER_DEFINED,
                "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=False))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]  # fmt: skip
        first, last = ([self.tokens[i]] if self._has(i) else [] for i in (before, after))
        special = {
            name: {"id": name, "ids": [self.ids[name]], "tokens": [name]} for name in first + last
        }

        def framed(*texts: str) -> list[Step]:
            parts: list[Step] = []
            for kind, text in enumerate(texts):
                parts += [{"SpecialToken": {"id": name, "type_id": kind}} for name in first]
                parts += [{"Sequence": {"id": text, "type_id": kind}}]
                parts += [{"SpecialToken": {"id": name, "type_id": kind}} for name in last]
            return parts

        frame: Step = {"type": "TemplateProcessing", "special_tokens": special}
        frame |= {"single": framed("A"), "pair": framed("A", "B")}
        tokenizer = {"version": "1.0", "added_tokens": added, "post_processor": frame} | made
        return from_json(json.dumps(tokenizer).encode())


# SentencePiece models: protocol buffers

KINDS = {1: Vocabulary.unigram, 2: Vocabulary.bpe}
MODEL_TYPE, SPACES_END_WORDS = 3, 24  # fields of the trainer
CHARSMAP, ADDS_SPACE, STRIPS_SPACES, ESCAPES_SPACES = 2, 3, 4, 5  # fields of the normaliser


def pieces_of(content: bytes) -> list[str]:
    """The pieces of a SentencePiece model: field 1 of its protocol buffer, one message each."""
    try:
        return [_text(value).decode() for field, value in _fields(content) if field == 1]
    except (ValueError, IndexError, StopIteration):  # the last: a piece without a text
        raise CheckpointError("is not a SentencePiece model") from None


def sentencepiece_tokenizer(content: bytes, lowercase: bool, before: str, after: str) -> Loaded:
    """The tokenizer of a SentencePiece model, with pieces that go before and after a text.

    The library normalises grapheme by grapheme: it may lose a combining mark, or not join it.
    """
    try:
        parts = [(number, dict(_fields(part))) for number, part in _fields(content) if number < 4]
        pieces = [piece for number, piece in parts if number == 1]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
        texts = pieces_of(content)
    except (ValueError, struct.error, TypeError, IndexError):
        raise CheckpointError("is not a SentencePiece model") from None
    trainer, normalizer = (
        {k: v for n, part in parts if n == number for k, v in part.items()} for number in (2, 3)
    )
    types = [piece.get(3, NORMAL) for piece in pieces]
    unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    vocabulary = Vocabulary(texts, scores, types, unknown)
    kind = KINDS.get(trainer.get(MODEL_TYPE, 1))
    if kind is None or trainer.get(SPACES_END_WORDS) or not normalizer.get(ESCAPES_SPACES, 1):
        raise CheckpointError(
            "has rules that are not read: it is no unigram or BPE model of words that begin with ▁"
        )
    steps: list[Step] = [{"type": "Lowercase"}] * lowercase
    if charsmap := normalizer.get(CHARSMAP):
        encoded = base64.b64encode(charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if normalizer.get(STRIPS_SPACES, 1):
        for spaces, by in ((r"\A +| +\z", ""), (" {2,}", " ")):
            steps.append({"type": "Replace", "pattern": {"Regex": spaces}, "content": by})
    steps += _steps_of_spaces(bool(normalizer.get(ADDS_SPACE, 1)))
    made = {"model": kind(vocabulary), "normalizer": _sequence("normalizers", steps)}
    return vocabulary.loaded(made, *map(vocabulary.ids.get, (before, after)))


def _text(message: Any) -> bytes:
    return next(text for field, text in _fields(message) if field == 1 and isinstance(text, bytes))


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a protocol buffer's fields."""
    if not isinstance(message, bytes):
        raise ValueError("a message was expected")
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield field, value
            continue
        if wire not in (1, 2, 5) or not field:
            raise ValueError("no such wire type")
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, place = _varint(message, place)
        if length > len(message) - place:
            raise ValueError("cut short")
        yield field, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (message[place] & 0x7F) << shift
        place += 1
        if message[place - 1] < 0x80:
            return value, place
    raise ValueError("a number that does not end")
