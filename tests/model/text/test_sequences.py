"""Sequences out of text: nothing lost, nothing made up, and the same for the same seed."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.kinds import token_kinds
from weightscope.model.text.sequences import (
    Framing,
    excerpts,
    paragraph_pairs,
    paragraphs,
    sentence_sequences,
    sentences,
    token_windows,
)
from weightscope.model.text.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

WORDS = "one two three four five six seven eight nine ten ."
TEXT = "# Heading\n\n" + "\n\n".join(f"{name} {WORDS}" for name in ("red", "green", "blue", "black"))


@pytest.fixture
def library() -> "tokenizers.Tokenizer":
    """Words as tokens, and BERT's template around them."""
    words = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", ",", ".", "red", "green", "blue", "black", "a", *WORDS.split()])
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


@pytest.fixture
def tokenizer(library) -> Tokenizer:
    return Tokenizer.of_library(library)


@pytest.fixture
def framing(tokenizer) -> Framing:
    return Framing(tokenizer, tokenizer.around)


def test_framing_is_what_the_tokenizer_adds_or_what_is_put_before(library, tokenizer, framing) -> None:
    assert (framing.special, framing.takes_pairs) == ((1, 2), True)
    assert framing.begun("red") == [1, tokenizer.ids["red"]]
    library.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", "[CLS] $A $B", [("[CLS]", 1)])
    assert Tokenizer.of_library(library).around == (1,)
    assert not Framing(tokenizer, (1,)).takes_pairs
    library.post_processor = tokenizers.processors.TemplateProcessing("$A", "$A $B", [])
    assert Tokenizer.of_library(library).around == ()
    assert Framing(tokenizer).begun("red") == [tokenizer.ids["red"]]
    (pair,) = paragraph_pairs(Framing(tokenizer, before=(9,)), [TEXT], 1, longest=6)
    assert (pair[0], len(pair)) == (9, 6)


def test_text_of_unknown_tokens_is_refused(framing, tmp_path) -> None:
    """A model of proteins says nothing about English: all of it would be one token."""
    foreign = TEXT.translate({ord(letter): f"x{letter}" for letter in "aeiou"})
    (tmp_path / "corpus.txt").write_text(foreign)
    for run in (
        lambda: paragraph_pairs(framing, [foreign], 4),
        lambda: token_windows(framing, [foreign], 1, 8),
        lambda: count_bigrams([tmp_path / "corpus.txt"], framing.tokenizer),
    ):
        with pytest.raises(ws.CheckpointError, match=r"tokens of this text are '\[UNK\]'; give one in the language"):
            run()


def test_paragraphs_are_what_blank_lines_part() -> None:
    assert paragraphs(TEXT) == [f"{name} {WORDS}" for name in ("red", "green", "blue", "black")]


def test_pairs_are_consecutive_and_in_berts_form(tokenizer, framing) -> None:
    order = ["red", "green", "blue", "black"]
    made = paragraph_pairs(framing, [TEXT], 10)
    assert len(made) == 3
    for ids in made:
        words = [tokenizer.tokens[token] for token in ids]
        first, second, empty = " ".join(words[1:]).split("[SEP]")
        assert words[0] == "[CLS]"
        assert not empty
        assert order.index(second.split()[0]) == order.index(first.split()[0]) + 1
        assert (first.strip(), second.strip()) == (f"{first.split()[0]} {WORDS}", f"{second.split()[0]} {WORDS}")


def test_pairs_are_cut_to_length_and_the_tokenizer_left_as_it_was(library, framing) -> None:
    assert {len(ids) for ids in paragraph_pairs(framing, [TEXT], 10, longest=12)} == {12}
    assert library.truncation is None


def test_kinds_of_token(framing) -> None:
    kinds = token_kinds(framing)
    assert kinds.names == ("[CLS]", "[SEP]", ". or ,", "other")
    assert kinds(np.array([[1, 2], [3, 4], [5, 0]])).tolist() == [[0, 1], [2, 2], [3, 3]]


def test_a_seed_draws_the_same_again(framing) -> None:
    drawn = [[ids.tolist() for ids in paragraph_pairs(framing, [TEXT], 2, seed=seed)] for seed in (1, 1)]
    assert drawn[0] == drawn[1]


def test_excerpts_keep_to_their_bounds_and_come_from_the_text() -> None:
    passages = excerpts([TEXT], 4, (60, 100))
    assert passages
    joined = "\n\n".join(paragraphs(TEXT))
    for passage in passages:
        assert 60 <= len(passage) <= 100
        assert passage in joined


def test_windows_have_the_length_and_the_first_token_asked_for(framing) -> None:
    windows = token_windows(framing, [TEXT], 3, 9)
    assert windows
    for ids in windows:
        assert (len(ids), ids[0]) == (9, 1)


def test_text_without_two_paragraphs_is_refused(framing) -> None:
    with pytest.raises(ws.CheckpointError, match="no two paragraphs"):
        paragraph_pairs(framing, ["short"], 3)


def test_sentences_end_with_their_marks_and_with_blank_lines() -> None:
    text = (
        'He said: "Now we go!" They went on\nto 3.5 miles. 12 men were there (all of them). No one.\n\n'
        "A new block begins"
    )
    assert sentences(text) == [
        'He said: "Now we go!"',
        "They went on to 3.5 miles.",
        "12 men were there (all of them).",
        "A new block begins",
    ]


def test_sentence_sequences_are_whole_drawn_once_and_cut_to_length(library, tokenizer, framing) -> None:
    given = ["red one two", "green one two three", "blue one", ""]
    made = [tuple(ids.tolist()) for ids in sentence_sequences(framing, given, 10)]
    assert sorted(made) == sorted(tuple(tokenizer.encode(sentence)) for sentence in given)
    assert {len(ids) for ids in sentence_sequences(framing, given[:2], 2, longest=4)} == {4}
    assert all(ids[0] == 9 for ids in sentence_sequences(Framing(tokenizer, before=(9,)), given, 4))
    assert library.truncation is None
    with pytest.raises(ws.CheckpointError, match="no sentences"):
        sentence_sequences(framing, [], 3)
