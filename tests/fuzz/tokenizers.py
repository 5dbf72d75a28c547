# ruff: noqa: E501 (many to a line)
"""tokenizer.json: of each kind of model, its steps and their settings replaced by others."""

import json
import random
from pathlib import Path
from typing import Any

from tests.attacks.attacks import TOKENIZERS
from tests.fuzz.mutate import mutated_bytes, mutated_value
from weightscope.core.errors import CheckpointError
from weightscope.model.text.bigrams import Piece, encode
from weightscope.model.text.kinds import text_tokens
from weightscope.model.text.tokenizer import Tokenizer, safe_cut

TEXTS = ("the cats sat", "", "a", "naïve 東京 \N{GRINNING FACE}", "ab" * 40, " \n\t ", "[CLS]", "\0")
WORDS = (
    "a",
    "b",
    "ab",
    "é",
    " the",
    "Ġthe",
    "##ing",
    "▁",
    "▁the",
    "<0x41>",
    "[UNK]",
    "[CLS]",
    "",
    "\ud83d",
    "b" * 20_000,
)
STEPS: dict[str, list[dict[str, Any]]] = {
    "normalizer": [
        {"type": "NFC"}, {"type": "NFKD"}, {"type": "Lowercase"}, {"type": "StripAccents"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "Replace", "pattern": {"Regex": "(a|b)+"}, "content": "bb"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}, {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, {"type": "Nmt"}, {"type": "ByteLevel"},
    ],
    "pre_tokenizer": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, {"type": "Whitespace"},
        {"type": "BertPreTokenizer"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Split", "pattern": {"Regex": "(a|b)+"}, "behavior": "Isolated", "invert": False}, {"type": "WhitespaceSplit"},
        {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Removed"},
        {"type": "CharDelimiterSplit", "delimiter": "a"}, {"type": "FixedLength", "length": 3}, {"type": "UnicodeScripts"},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, {"type": "Digits", "individual_digits": False}]},
    ],
    "decoder": [
        {"type": "ByteLevel"}, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, {"type": "Strip", "content": "a", "start": 1, "stop": 0},
    ],
    "post_processor": [
        {"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 0]}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False},
        {"type": "RobertaProcessing", "sep": ["b", 1], "cls": ["a", 0], "trim_offsets": True, "add_prefix_space": False},
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}},
    ],
}  # fmt: skip
MODELS: list[dict[str, Any]] = [
    {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
     "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
     "vocab": {"[UNK]": 0, "a": 1, "##b": 2}},
    {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["▁b", -2.5]], "byte_fallback": False},
    {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"},
]  # fmt: skip
ADDED = {"id": 3, "content": "[CLS]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}  # fmt: skip


def mutant(rng: random.Random) -> bytes:
    """One of the models with some steps, most often with something in them replaced."""
    if rng.random() < 0.15:
        content = rng.choice([content for content, _ in TOKENIZERS.values() if len(content) < 20_000])
        return mutated_bytes(content, rng, content)
    model = json.loads(json.dumps(rng.choice(MODELS)))
    for _ in range(rng.choice((0, 1, 4))):
        if isinstance(model["vocab"], dict):
            model["vocab"][rng.choice(WORDS)] = rng.choice((*range(9), 2**20, 2**21, 2**32 - 1))
        else:
            model["vocab"].append([rng.choice(WORDS), rng.choice((0.0, -1.0, -1e30, 5))])
    if "merges" in model and rng.random() < 0.3:
        model["merges"].append([rng.choice(WORDS), rng.choice(WORDS)])
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": model,
    }
    if rng.random() < 0.5:
        tokenizer["added_tokens"] = [{**ADDED, "content": rng.choice(WORDS), "special": rng.random() < 0.5}]
    for step, choices in STEPS.items():
        tokenizer[step] = rng.choice(choices) if rng.random() < 0.6 else None
    for _ in range(rng.choice((0, 0, 1, 2))):
        part = rng.choice((*STEPS, "model", "added_tokens"))
        tokenizer[part] = mutated_value(tokenizer[part], rng, ("type", "vocab", "pattern", "content", "a"))
    content = json.dumps(tokenizer).encode()
    return mutated_bytes(content, rng, content) if rng.random() < 0.05 else content


def meet(folder: Path, content: bytes) -> str:
    (folder / "tokenizer.json").write_bytes(content)
    return used(folder)


def used(source: Path) -> str:
    """Load a tokenizer, name all of its tokens, and split texts."""
    try:
        tokenizer = Tokenizer.load(source)
    except CheckpointError as error:
        assert str(error).isprintable() and len(str(error)) < 2500
        return "refused"
    assert len(tokenizer.hash) == 64
    names = [tokenizer.text(token) for token in tokenizer.ids.values()]
    assert max(map(len, names)) <= 201 and tokenizer.size >= len(set(tokenizer.ids.values()))
    safe_cut(tokenizer)
    outcome = "read"
    for split in (
        lambda: text_tokens(tokenizer),
        lambda: tokenizer.id_of("a"),
        lambda: encode(tokenizer, [Piece(text, True) for text in TEXTS]),
        lambda: [tokenizer.encode(text) for text in TEXTS[:3]],
    ):
        try:
            split()
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 2500
            outcome = "a text refused"
    return outcome
