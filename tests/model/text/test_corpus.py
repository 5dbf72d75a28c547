"""Documents come out of files whole and in order, and a bad file says where it is bad."""

import builtins
import bz2
import gzip
import json
import os
import re
from collections import deque
from pathlib import Path

import pytest

from weightscope.core.errors import CheckpointError
from weightscope.model.text import corpus
from weightscope.model.text.bigrams import pieces
from weightscope.model.text.corpus import corpus_files, documents, read_documents
from weightscope.model.text.tokenizer import GPT2, SAFE_CUTS, Tokenizer

pyarrow = pytest.importorskip("pyarrow", reason="needs the 'bigrams' extra")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the 'bigrams' extra")
zstandard = pytest.importorskip("zstandard", reason="needs the 'bigrams' extra")
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard.compress}


def read(*paths: Path) -> list[str]:
    return ["".join(document) for document in documents(corpus_files(paths), lambda read: None)]


def test_a_folder_is_walked_in_order_and_named_from_itself_on(tmp_path):
    books = tmp_path / "books"
    for name in ("b.md", "a/z.txt", "a/y.jsonl", ".hidden.txt", "cover.png", "a/notes"):
        (books / name).parent.mkdir(parents=True, exist_ok=True)
        (books / name).write_text('{"text": "line"}', encoding="utf-8")
    assert [file.name for file in corpus_files([books])] == ["books/a/y.jsonl", "books/a/z.txt", "books/b.md"]


def test_named_file_is_read_as_text_whatever_its_suffix(tmp_path):
    (tmp_path / "notes").write_text("one\r\ntwo", encoding="utf-8", newline="")
    assert read(tmp_path / "notes") == ["one\r\ntwo"]


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("once", encoding="utf-8")
    assert read(tmp_path, tmp_path / "a.txt", tmp_path) == ["once"]


@pytest.mark.parametrize("ending", ["", *COMPRESS])
def test_a_long_text_is_read_in_parts(tmp_path, monkeypatch, ending):
    """Characters of one to four bytes, cut anywhere."""
    monkeypatch.setattr(corpus, "BLOCK", 5)
    monkeypatch.setattr(corpus, "ZSTD_BLOCK", 3)
    text = "aé東🐈" * 50
    (tmp_path / f"a.txt{ending}").write_bytes(COMPRESS.get(ending, bytes)(text.encode()))
    assert read(tmp_path) == [text]


def test_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    assert read(tmp_path) == ["one", "two"]


def test_lines_may_be_empty_or_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 7)
    lines = ['{"text": "one\\ntwo"}', "", "  ", '{"text": "\\ud83d\\udc08"}', '{"text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read(tmp_path) == ["one\ntwo", "🐈", ""]


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_strings_of_every_kind(tmp_path, kind):
    type_ = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) if kind == "dictionary" else getattr(pyarrow, kind)()
    table = pyarrow.table({"text": pyarrow.array(["one", None, "two"], type_)})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet"])
def test_progress_adds_up_to_the_size_on_disk(tmp_path, monkeypatch, name):
    monkeypatch.setattr(corpus, "BLOCK", 1000)
    monkeypatch.setattr(corpus, "ROWS", 7)
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(300)).encode()
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"text": lines.decode().split("\n")}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(COMPRESS.get(Path(name).suffix, bytes)(lines))
    read_bytes: list[int] = []
    for document in documents(corpus_files([tmp_path]), read_bytes.append):
        list(document)
    assert sum(read_bytes) == (tmp_path / name).stat().st_size


def table(options=None, **columns) -> bytes:
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), stream, **(options or {}))
    return stream.getvalue().to_pybytes()


BROKEN_STRINGS = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
)
WHOLE = b"all is well. " * 9000
ATTACKS = {
    "invalid UTF-8": ("a.txt", b"caf\xc3\xa9 \xff", "a.txt: invalid UTF-8 at byte 6"),
    "UTF-8 cut short": ("a.txt", b"caf\xc3", "a.txt: invalid UTF-8 at byte 3"),
    "invalid UTF-8 inside": ("a.txt.gz", gzip.compress(WHOLE + b"\xff"), f"invalid UTF-8 at byte {len(WHOLE)}"),
    "gzip cut short": ("a.txt.gz", gzip.compress(WHOLE)[:-9], "a.txt.gz: cannot be read"),
    "gzip damaged": ("a.txt.gz", gzip.compress(WHOLE)[:20] + bytes(99), "a.txt.gz: cannot be read"),
    "not gzip": ("a.txt.gz", WHOLE, "Not a gzipped file"),
    "bzip2 cut short": ("a.txt.bz2", bz2.compress(WHOLE)[:-9], "a.txt.bz2: cannot be read"),
    "bzip2 damaged": ("a.txt.bz2", bz2.compress(WHOLE)[:20] + bytes(99), "a.txt.bz2: cannot be read"),
    "not bzip2": ("a.txt.bz2", WHOLE, "a.txt.bz2: cannot be read: Invalid data stream"),
    "zstd cut short": ("a.txt.zst", zstandard.compress(WHOLE)[:-1], "the last zstd frame is cut short"),
    "not zstd": ("a.txt.zst", WHOLE, "a.txt.zst: cannot be read"),
    "not JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON"),
    "a JSON array": ("a.json", b'[\n{"text": "a"}\n]\n', "a.json:1: not JSON"),
    "JSON without the field": ("a.jsonl", b'{"body": "a", "id": 1}', "a.jsonl:1: an object with body, id; expected"),
    "JSON that is no object": ("a.jsonl", b'\n"text"', "a.jsonl:2: no object; expected"),
    "JSON text that is none": ("a.jsonl", b'{"text": null}', "expected an object whose 'text' is a string"),
    "JSON in another encoding": ("a.jsonl", b'{"text": "a\xe9"}', "a.jsonl:1: invalid UTF-8 at byte 11 of the line"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud83d"}', "half a surrogate pair"),
    "JSON nested too deeply": ("a.jsonl", b"[" * 200_000, "a.jsonl:1: not JSON"),
    "a JSON integer too long": ("a.jsonl", b'{"text": ' + b"9" * 9999 + b"}", "a.jsonl:1: not JSON"),
    "not Parquet": ("a.parquet", WHOLE, "a.parquet: unreadable Parquet"),
    "Parquet cut short": ("a.parquet", table(text=["a"] * 99)[:-40], "a.parquet: unreadable Parquet"),
    "Parquet without the column": ("a.parquet", table(body=["a"], id=[1]), "no column 'text' (has body, id)"),
    "Parquet numbers": ("a.parquet", table(text=[1, 2]), "column 'text' holds int64; expected strings"),
    "Parquet with invalid UTF-8": ("a.parquet", table(text=BROKEN_STRINGS), "a.parquet: unreadable Parquet"),
    "a name that drives a terminal": ("\x1b[2J.txt", b"\xff", "\\x1b[2J.txt: invalid UTF-8"),
}


# Small files that unpack to hundreds of megabytes, some of them to one line or one word; made where they are used.
LONG = 34_000_000
ZSTD = {"compression": "zstd"}
PLAIN = ZSTD | {"use_dictionary": False}
LETTERS = 450_000  # pairs of a letter and a space in a stream of bzip2, which compresses no more at once


def dictionary() -> bytes:
    """A row 150 times."""
    indices = pyarrow.array([0] * 150, pyarrow.int32())
    return table(ZSTD, text=pyarrow.DictionaryArray.from_arrays(indices, ["a" * 200_000]))


BOMBS = {
    "a long word": ("a.txt", lambda: b"a" * LONG, "more than 33554432 characters without a place"),
    "a long run of spaces": (
        "a.txt.gz", lambda: gzip.compress(b" " * LONG, 1), "33554432 characters without a place"
    ),
    "bzip2 of one letter": (
        "a.txt.bz2", lambda: bz2.compress(b"a " * LETTERS) * 20, "a.txt.bz2: unpacks to more than 200 times"
    ),
    "a long line": (
        "a.jsonl.gz", lambda: gzip.compress(b"\n" + b"a" * LONG, 1), "a.jsonl.gz:2: has more than 33554432 bytes"
    ),
    "short words": (
        "a.txt.zst", lambda: zstandard.compress(b"a " * 2_000_000), "a.txt.zst: unpacks to more than 200 times"
    ),
    "a long row": (
        "a.parquet", lambda: table(ZSTD, text=["a" * LONG]), "a.parquet:1: has more than 33554432 bytes in a row"
    ),
    "one row 150 times": ("a.parquet", dictionary, "a.parquet: unpacks to more than 200 times"),
    "rows alike": (
        "a.parquet", lambda: table(PLAIN, text=["a" * 200_000] * 50), "a.parquet: unpacks to more than 200"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_decompression_is_bounded(tmp_path, monkeypatch, bomb):
    name, make, message = BOMBS[bomb]
    if "unpacks" in message:  # the others are refused before that
        monkeypatch.setattr(corpus, "ALWAYS_UNPACKED", 1 << 20)
    (tmp_path / name).write_bytes(make())
    with pytest.raises(CheckpointError, match=re.escape(message)):
        for document in documents(corpus_files([tmp_path]), lambda read: None):
            deque(pieces(document, SAFE_CUTS[GPT2]), maxlen=0)


def test_text_for_running_a_model_is_bounded(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("some more")
    assert read_documents([tmp_path]) == ["some text", "some more"]
    monkeypatch.setattr(corpus, "MOST_CHARACTERS", 17)
    with pytest.raises(CheckpointError, match="more than 17 characters of text; give fewer"):
        read_documents([tmp_path])


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_file_is_one_clear_error(tmp_path, attack):
    name, content, message = ATTACKS[attack]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        read(tmp_path)
    assert str(error.value).isprintable()
    assert str(tmp_path) not in str(error.value)


def test_paths_without_text_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no text in this folder"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe: not a file or folder"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "library"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard"), ("tokenizer.json", "tokenizers")]
)
def test_a_missing_library_is_named_with_its_remedy(tmp_path, monkeypatch, name, library):
    def without(module, *arguments, importing=builtins.__import__):
        if module.split(".")[0] == library:
            raise ImportError(module)
        return importing(module, *arguments)

    (tmp_path / name).write_bytes(b"any")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match=rf"{library} library: pip install {library}$"):
        Tokenizer.load(tmp_path) if library == "tokenizers" else read(tmp_path)
