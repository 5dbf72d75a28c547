"""The command `same`: sentences, exit codes, files, and bad input."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import Weights, is_one_line, run, with_tokenizer
from tests.support.figures import undrawn
from tests.support.tiny_models import FIXTURES
from tests.support.two_layers import TWO_LAYERS
from weightscope.pairs.same.page import heading


def rounded(weights: Weights) -> None:
    for name, w in weights.items():
        weights[name] = w.astype(np.float16)


def norm_is_one_too_high(weights: Weights) -> None:
    weights["model.norm.weight"] += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    for name, change in {"a": None, "copy": None, "half": rounded, "wrong": norm_is_one_too_high}.items():
        with_tokenizer("llama", folder / name, change)
    return folder


@pytest.mark.parametrize(("b", "up_to", "status"), [
    ("copy", "values", 0), ("half", "function", 0), ("half", "rounding", 0), ("half", "values", 3),
    ("wrong", "function", 3), ("wrong", "values", 3),
])  # fmt: skip
def test_exit_status_tells_whether_the_verdict_is_strong_enough(folder: Path, b: str, up_to: str, status: int) -> None:
    result = run("same", folder / "a", folder / b, "--up-to", up_to)
    assert result.exit_code == status, result.output


def test_the_first_line_is_the_sentence_of_the_json(folder: Path) -> None:
    shown, printed = (run("same", folder / "a", folder / "wrong", *more) for more in ((), ("--json",)))
    value = json.loads(printed.stdout)
    assert shown.stdout.splitlines()[0] == value["lead"]
    assert value["verdict"] == "different"
    (difference,) = value["differences"]
    assert (difference["tensor"], difference["role"], difference["deed"]) == (
        "model.norm.weight",
        "norm.outputs",
        "norm: 1 added",
    )
    assert value["tokenizer"]["verdict"] == "same"


def test_config_that_computes_something_else_is_a_difference(folder: Path, tmp_path: Path) -> None:
    copy = with_tokenizer("llama", tmp_path / "other")
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 12345.0}
    (copy / "config.json").write_text(json.dumps(config))
    value = json.loads(run("same", folder / "a", copy, "--json").stdout)
    assert value["verdict"] == "different"
    assert {"config": "rope_parameters.rope_theta", "b": 12345.0}.items() <= value["differences"][-1].items()


def test_idle_config_keys_are_no_difference(folder: Path, tmp_path: Path) -> None:
    copy = with_tokenizer("llama", tmp_path / "other")
    config = json.loads((copy / "config.json").read_text()) | {"transformers_version": "0.0.1", "_name_or_path": "x"}
    (copy / "config.json").write_text(json.dumps(config))
    same = ws.same(folder / "a", copy)
    assert same.verdict == "same values"
    assert {each.key for each in same.settings.idle} >= {"transformers_version"}


def test_it_writes_a_page_a_map_and_tables(folder: Path, tmp_path: Path) -> None:
    result = run("same", folder / "a", folder / "wrong", "--out", tmp_path / "out")
    assert result.exit_code == 3
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {"report.html", "same.json", "tensors.csv", "same.png", "same.svg"} <= names
    assert "norm: 1 added" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(("a", "b", "verdict"), [
    ("a", "copy", "copy is a: same bytes"), ("a", "half", "half is a, rounded"), ("half", "a", "half is a, rounded"),
    ("a", "wrong", "wrong is not a"),
])  # fmt: skip
def test_the_heading_of_its_page_is_the_verdict(a: str, b: str, verdict: str, folder: Path) -> None:
    same = ws.same(folder / a, folder / b)
    assert heading(same) == verdict
    if same.verdict != "same bytes":
        assert same.lead.startswith((f"{verdict}. ", f"{verdict}: "))


def test_a_look_at_a_sample_says_so(folder: Path) -> None:
    result = run("same", folder / "a", folder / "copy", "--sample", "0.5")
    assert "first look" in result.stdout


def test_what_is_no_checkpoint_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with undrawn():
        assert is_one_line(run("same", folder / "a", tmp_path / "nothing"))
        assert run("same", folder / "a").exit_code == 2
        assert run("same", folder / "a", folder / "copy", "--up-to", "nonsense").exit_code == 2
        assert run("same", folder / "a", folder / "copy", "--sample", "0").exit_code == 2


def test_broken_one_of_two_is_named(folder: Path, tmp_path: Path) -> None:
    """Files of both have one name."""
    broken = shutil.copytree(folder / "a", tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    pairs = [(folder / "a", broken), (broken, folder / "a")]
    for pair in pairs:
        with pytest.raises(ws.CheckpointError) as caught:
            ws.same(*pair)
        assert str(caught.value).startswith(f"{broken}: model.safetensors: tensors end at")
    commands = [["same", *pair] for pair in pairs] + [["compare", *pair] for pair in pairs]
    commands += [["learned", *pair] for pair in pairs]
    for command in commands:
        result = run(*command)
        assert is_one_line(result) and f"weightscope: {broken}: model.safetensors: tensors end" in result.stderr, (
            command
        )
    alone = run("same", folder / "a", weights)
    assert f"weightscope: {weights}: tensors end at" in alone.stderr
    missing = run("same", folder / "a", tmp_path / "nothing")
    assert missing.stderr.count("nothing") == 1


def test_other_architectures_are_different_and_not_an_error(folder: Path) -> None:
    assert ws.same(folder / "a", TWO_LAYERS).verdict == "different"


def test_a_checkpoint_of_no_known_architecture_is_compared_by_names(folder: Path, tmp_path: Path) -> None:
    for name in ("x", "y"):
        copy = with_tokenizer("llama", tmp_path / name)
        (copy / "config.json").write_text(json.dumps({"model_type": "nothing_known", "architectures": ["Nothing"]}))
    result = run("same", tmp_path / "x", tmp_path / "y")
    assert result.exit_code == 0, result.output
    assert "only the tensors of" in result.stderr
    config = {"model_type": "nothing_known", "some_depth": 3}
    (tmp_path / "y" / "config.json").write_text(json.dumps(config))
    assert ws.same(tmp_path / "x", tmp_path / "y").verdict == "undecided"
    with undrawn():
        assert run("same", tmp_path / "x", tmp_path / "y").exit_code == 4
        assert run("same", tmp_path / "x", tmp_path / "y", "--up-to", "values").exit_code == 4
        assert run("same", tmp_path / "x", tmp_path / "y", "--fail-on", "different").exit_code == 0
        assert run("same", tmp_path / "x", TWO_LAYERS, "--fail-on", "different").exit_code == 3


@pytest.mark.parametrize(("fixture", "head", "tokens"), [
    ("roberta", "lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("distilbert", "vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
])  # fmt: skip
def test_tied_head_of_an_encoder_written_out_is_the_same(fixture: str, head: str, tokens: str, tmp_path: Path) -> None:
    """The names are those that transformers ties."""
    weights = load_file(FIXTURES / fixture / "model.safetensors")
    tokens = tokens if tokens in weights else tokens.partition(".")[2]
    for name, factor in (("same", 1), ("other", 2)):
        shutil.copytree(FIXTURES / fixture, tmp_path / name)
        save_file(weights | {head: factor * weights[tokens]}, tmp_path / name / "model.safetensors")
    assert ws.same(FIXTURES / fixture, tmp_path / "same").verdict == "same values"
    doubled = ws.same(FIXTURES / fixture, tmp_path / "other")
    assert [each.deed for each in doubled.differing] == ["head tied in config and not in file"]
