"""A tokenizer is found by what lies in a folder, and known by what its ids mean."""

import json
import shutil

import pytest

from tests.support.weights import shared
from weightscope.core.errors import CheckpointError
from weightscope.model.text.tokenizer import END_OF_TEXT, Tokenizer, safe_cut

tokenizers = pytest.importorskip("tokenizers", reason="needs the 'bigrams' extra")

PROSE = ["the cats sat on the mats and the cats' mats sat under the cats", "naïve 東京"]


def trained():
    """A byte-level BPE, as small as one can be and still join letters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    return tokenizer


def word_piece():
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "cat": 3, "##s": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """The same tokenizer in both of its spellings: merged/tokenizer.json, and apart/vocab.json with merges.txt."""
    for name in ("merged", "apart"):
        (tmp_path / name).mkdir()
    tokenizer = trained()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "merged" / "tokenizer.json"))
    tokenizer.model.save(str(tmp_path / "apart"))
    return tmp_path


def hash_of(tokenizer):
    return Tokenizer.of_library(tokenizer).hash


def test_both_spellings_are_the_same_tokenizer(folder):
    merged, apart = Tokenizer.load(folder / "merged"), Tokenizer.load(folder / "apart")
    for text in (*PROSE, f"a{END_OF_TEXT}b"):
        assert merged.encode(text) == apart.encode(text)
    assert merged.hash == apart.hash
    assert merged.size == apart.size == 280


def test_documents_are_read_to_their_end(folder):
    """A tokenizer.json may switch truncation and padding on."""
    tokenizer = Tokenizer.load(folder / "merged")
    assert len(tokenizer.encode(" the" * 20)) == 20
    assert len(tokenizer.encode(" the")) == 1


@pytest.mark.parametrize("source", ["apart/vocab.json", "apart/merges.txt", "apart/model.safetensors", "renamed.json"])
def test_any_file_of_the_folder_names_its_tokenizer(folder, source):
    (folder / "apart" / "model.safetensors").touch()
    shutil.copy(folder / "merged" / "tokenizer.json", folder / "renamed.json")
    assert Tokenizer.load(folder / source).hash == hash_of(trained())


def test_any_other_source_is_resolved(folder, monkeypatch):
    asked = []

    def resolve_folder(source, revision=None):
        asked.append((source, revision))
        return folder / "apart"

    monkeypatch.setattr("weightscope.model.text.tokenizer.resolve_folder", resolve_folder)
    assert Tokenizer.load("someone/model", "main").size == 280
    assert asked == [("someone/model", "main")]


def test_hash_depends_on_ids_only():
    changed = trained()
    changed.pre_tokenizer = None
    changed.enable_truncation(5)
    assert hash_of(changed) == hash_of(trained())
    changed.add_tokens(["mats and cats"])
    assert hash_of(changed) != hash_of(trained())


def test_a_hash_stays_the_same_for_good():
    """Counts on people's disks carry it."""
    assert hash_of(word_piece()) == "a5d55ef71a1599bbc8dbc42d140a5491ddfe2d7d29469eb2aef32a49947dd949"


def test_a_token_by_its_text():
    tokenizer = Tokenizer.of_library(trained())
    assert tokenizer.id_of(" the") == tokenizer.id_of("Ġthe") == tokenizer.ids["Ġthe"]
    assert tokenizer.id_of(END_OF_TEXT) == 0
    with pytest.raises(
        CheckpointError, match=r"' thes' is not one token of this tokenizer; it splits into ' the' \+ 's'"
    ):
        tokenizer.id_of(" thes")
    with pytest.raises(CheckpointError, match="splits into nothing"):
        tokenizer.id_of("")
    with pytest.raises(CheckpointError, match="cannot encode"):
        tokenizer.id_of("\ud800")


def test_a_word_piece_by_its_text():
    tokenizer = Tokenizer.of_library(word_piece())
    assert tokenizer.id_of("##ing") == 2
    assert tokenizer.id_of("[UNK]") == 0
    with pytest.raises(CheckpointError, match=r"'playing' is not one token .* 'play' \+ '##ing'"):
        tokenizer.id_of("playing")
    with pytest.raises(CheckpointError, match="'dog' is not one token"):  # unknown is not a token of that text
        tokenizer.id_of("dog")


def test_the_text_of_tokens():
    tokenizer = Tokenizer.of_library(trained())
    for text in PROSE:
        assert tokenizer.text(*tokenizer.encode(text)) == text
    assert tokenizer.text(tokenizer.ids["Ġthe"]) == " the"
    assert tokenizer.text(tokenizer.ids["é"]) == "\\xe9"  # the byte E9, no whole character
    assert tokenizer.text(5000) == "<id 5000>"
    pieces = Tokenizer.of_library(word_piece())
    assert pieces.text(1, 2, 3) == "playing cat" and pieces.text(2) == "##ing"


def test_the_text_of_sentencepiece_tokens():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"▁the": 0, "re": 1}, []))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    assert Tokenizer.of_library(tokenizer).text(0, 1) == " there"


def test_a_token_of_kilobytes_is_shown_cut():
    words = tokenizers.models.WordLevel({"a" * 200: 0, "b" * 20_000: 1}, unk_token="?")
    tokenizer = Tokenizer.of_library(tokenizers.Tokenizer(words))
    assert tokenizer.text(0) == "a" * 200
    assert tokenizer.text(1) == "b" * 200 + "…"
    assert len(tokenizer.text(0, 1)) == 401


def test_a_file_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(3 << 30)  # a hole, which takes no room
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has more than 100000000 bytes; no more are read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        lambda t: setattr(t, "normalizer", tokenizers.normalizers.Strip()),
        lambda t: setattr(t, "normalizer", tokenizers.normalizers.NFKC()),
        lambda t: setattr(t, "pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)),
        lambda t: setattr(t, "pre_tokenizer", None),
        lambda t: t.add_tokens(["New York"]),
        lambda t: t.add_special_tokens([tokenizers.AddedToken("<mask>", rstrip=True)]),
    ],
)
def test_no_text_is_cut_where_a_token_might_reach_over(changed):
    tokenizer = trained()
    assert safe_cut(Tokenizer.of_library(tokenizer)) is not None
    changed(tokenizer)
    assert safe_cut(Tokenizer.of_library(tokenizer)) is None


ATTACKS = {
    "nothing": ({}, "no tokenizer in .*looked for tokenizer.json, vocab.json with merges.txt"),
    "half of two files": ({"vocab.json": "{}"}, "no tokenizer in "),
    "not JSON": ({"tokenizer.json": "{"}, "tokenizer.json: the tokenizers library cannot read it"),
    "not a tokenizer": ({"tokenizer.json": "{}"}, "tokenizer.json: the tokenizers library cannot read it"),
    "bytes": ({"tokenizer.json": "\ud8ff"}, "tokenizer.json: the tokenizers library cannot read it"),
    "not a vocabulary": ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json: with merges.txt, not a BPE tokenizer"),
    "merges of no token": ({"vocab.json": '{"a": 0}', "merges.txt": "x y"}, "vocab.json: with merges.txt, not a BPE"),
    "another BPE": ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "vocab.json: .* not GPT-2's byte-level BPE"),
    "an empty one": (
        {"tokenizer.json": json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})},
        "tokenizer.json: the tokenizer's vocabulary is empty",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_tokenizer_is_one_clear_error(tmp_path, attack):
    files, message = ATTACKS[attack]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.check
def test_gpt2():
    tokenizer = Tokenizer.load(shared("gpt2-tokenizer"))
    assert tokenizer.size == 50257
    assert tokenizer.encode("Hello world") == [15496, 995]  # as OpenAI's own encoder gives them
    assert tokenizer.id_of(END_OF_TEXT) == 50256
    assert tokenizer.text(15496, 995) == "Hello world"
