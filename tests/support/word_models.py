"""Tiny random models with a tokenizer of a few words, as a user has them in a folder."""

from pathlib import Path

import tokenizers

from tests.support.cases import case_of
from tests.support.random_models import random_model

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def written_model(name: str, folder: Path, *, framed: bool, cls: str = "[CLS]") -> Path:
    """A tiny random model of a family with a tokenizer of words, in BERT's frame or in none."""
    random_model(case_of(name)).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["[UNK]", cls, "[SEP]", ",", ".", "a", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if framed:
        made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), (cls, 1))
    made.save(str(folder / "tokenizer.json"))
    return folder
