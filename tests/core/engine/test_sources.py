"""Sources as workers open them, and lists of sources."""

import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.embedded import FOLDER
from weightscope.core.errors import CheckpointError
from weightscope.model.model import open_model
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import Source, folder_names, is_list, read_list
from weightscope.model.text.tokenizer import Tokenizer


@pytest.fixture()
def copy(tiny_gpt2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_gpt2, tmp_path / "model"))


def test_worker_opens_a_source_once(copy: Path, monkeypatch) -> None:
    monkeypatch.chdir(copy.parent)
    source = Source.named("model")
    sent = pickle.loads(pickle.dumps(source.as_seen(source.open())))
    monkeypatch.chdir("/")
    model = sent.elsewhere()
    assert model.config.n_layers == 2 and sent.elsewhere() is model


def test_a_worker_refuses_a_file_that_is_not_the_same(copy: Path) -> None:
    source = Source.named(str(copy))
    seen = source.as_seen(source.open())
    seen.elsewhere()
    weights = copy / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    again = source.as_seen(source.open())
    again.elsewhere()  # a checkpoint written anew is opened anew
    os.utime(weights, ns=(2, 2))
    identity = rf"model.safetensors of {weights.stat().st_size} bytes, 1970-01-01 00:00:00, SHA-256 [0-9a-f]{{8}}\.\.\."
    with pytest.raises(
        CheckpointError, match=rf"is not the same on a worker \({identity}\) as .*{identity}.*shared file system"
    ):
        replace(again, source=f"{copy}/.").elsewhere()
    os.utime(weights, ns=(1, 1))
    config = copy / "config.json"
    config.write_text(config.read_text().replace("}", ', "note": 1}'))
    with pytest.raises(CheckpointError, match="is not the same on a worker"):
        replace(again, source=f"{copy}/./").elsewhere()
    shutil.move(copy, copy.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match=r"is not there on a worker; workers read a shared file system"):
        replace(again, revision="not kept").elsewhere()


def test_a_worker_of_another_version_says_so(copy: Path) -> None:
    source = Source.named(str(copy))
    facts = source.as_seen(source.open()).seen.facts
    for library in ("weightscope", "numpy", "scipy"):
        seen = RunIdentity.of(**facts | {"versions": facts["versions"] | {library: "99"}})
        with pytest.raises(CheckpointError, match=rf"a worker has {library} .*, the machine it works for has 99"):
            Source(source.source, seen=seen).elsewhere()


def test_the_embedded_checkpoint_may_lie_elsewhere_on_a_worker() -> None:
    source = Source.named("embedded")
    seen = repr(source.as_seen(source.open()))
    assert str(FOLDER) not in seen and "modified" not in seen


@pytest.mark.parametrize("named", ["model", "./model/model.safetensors", Path("model")])
def test_another_working_directory_has_no_other_tokenizer(named: str | Path, tmp_path: Path, monkeypatch) -> None:
    """A model keeps its tokenizer, whatever the same relative path names in the new directory."""
    for place, token in (("here", "a"), ("there", "b")):
        folder = tmp_path / place / "model"
        write_checkpoint(folder, gpt2_weights())
        tokenizers.Tokenizer(tokenizers.models.WordLevel({token: 0}, token)).save(str(folder / "tokenizer.json"))
    monkeypatch.chdir(tmp_path / "here")
    model = open_model(named)
    monkeypatch.chdir(tmp_path / "there")
    for source in (model.source, model.checkpoint.folder):
        assert Tokenizer.load(source).ids == {"a": 0}
    assert model.name == Path(named).name


def test_path_that_cannot_be_examined_is_one_error() -> None:
    for named in ("~no-such-user/model", "a" * 300 + "/model", "~\0"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            Source.named(named).open()
    assert is_list("a" * 300 + ".txt")
    with pytest.raises(CheckpointError, match="there is no such list"):
        read_list(Path("a" * 300 + ".txt"))


def test_a_list_has_a_source_a_line(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    for encoding in ("utf-8", "utf-8-sig"):  # the second begins with the mark that some editors write
        path.write_text("# steps\n\n  a/b@step1  \nC:#1/x # the last\r\n#c\n", encoding=encoding)
        assert read_list(path) == ["a/b@step1", "C:#1/x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# none\n", "names no source"),
        (b"a\nb\na\n", "names a 2 times"),
        (b"\xff\xfe\x00", "cannot be read as a list"),
    ],
)
def test_invalid_list_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_list(tmp_path / "list.txt")


def test_folder_names_are_the_shortest_that_differ() -> None:
    assert folder_names(["EleutherAI/pythia-70m@step1", "/data/run/"]) == ["pythia-70m@step1", "run"]
    assert folder_names(["r/s1/model", "r/s2/model", "x"]) == ["s1--model", "s2--model", "x"]
    assert folder_names(["summary.csv"]) == ["summary.csv_"]


part = st.text(st.sampled_from("aB.-= ~\n:é"), min_size=1, max_size=4)


@given(st.lists(st.lists(part, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6, unique=True))
def test_folder_names_are_distinct_and_safe(sources: list[str]) -> None:
    try:
        names = folder_names(sources)
    except CheckpointError as error:
        assume("would share a folder" not in str(error))
        raise
    assert len({name.casefold() for name in names}) == len(sources)
    assert all(re.fullmatch(r"[\w@+=,][\w.@+=,-]*", name) for name in names)
