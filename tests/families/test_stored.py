"""Rows as files: what is written is read again, what is no row is refused, and whoever reads results is told of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.cli import main
from weightscope.families import FAMILIES, Family
from weightscope.families.own_rows import own_folder
from weightscope.families.stored import as_data, file_of, read_rows
from weightscope.fingerprint import Fingerprint

PROOF = "transformers 5.23.0"
LLAMA, BERT = (next(row for row in FAMILIES if row.name == name) for name in ("llama", "bert"))
NEW = LLAMA.but(name="novel", model_types=("newcomer",))


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return own_folder()


def saved(path: Path, *rows: Family, **changes: Any) -> Path:
    """A file of rows, with cells of the first put in the place of its own."""
    given = json.loads(file_of(rows, PROOF))
    given["families"][0] |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(given))
    return path


def renamed(folder: Path, name: str = "llama") -> Path:
    """A fixture that says to be of a model_type that no row of the table lists."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "newcomer"}))
    return folder


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: f"{row.name}-{row.tower}")
def test_every_row_comes_back_from_a_file(row: Family, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_bytes(file_of([row], PROOF))
    (again,) = read_rows(tmp_path / "row.json")
    assert as_data(again) == json.loads(json.dumps(as_data(row)))
    assert again.origin == f"adopted, proved against {PROOF}"
    if row is LLAMA:
        assert replace(again, origin="") == replace(row, gguf=None)


@pytest.mark.parametrize("cell, value, problem", [
    ("colour", "red", "'families[0].colour' is red; no such cell; one of name, model_types"),
    ("name", 7, "'families[0].name' is 7; str was expected"),
    ("name", "", "'families[0].name' is ; one at least was expected"),
    ("name", "x" * 300, "a plain name of 200 characters at most was expected"),
    ("name", "\x1b[2J", "a plain name of 200 characters at most was expected"),
    ("model_types", "newcomer", "'families[0].model_types' is newcomer; tuple was expected"),
    ("model_types", ["a"] * 201, "'families[0].model_types' is 201 items; 200 at most was expected"),
    ("layer", "layers.{i.__class__}.", "a plain name of 200 characters at most was expected"),
    ("layer", "layers.0.", "a name with {i} for the layer's index was expected"),
    ("layout", "os.system", "'families[0].layout' is os.system; one of layouts."),
    ("scale", "layouts.separate", "'families[0].scale' is layouts.separate; one of "),
    ("norm", {"is": "Rope"}, "'families[0].norm' is Rope; one of StoredNorm was expected"),
    ("norm", {"is": "StoredNorm"}, "'families[0].norm.module' is missing; a cell that every one has was expected"),
    ("norm", {"is": "StoredNorm", "module": "n", "centred": False, "eps": 2}, "a number from 0 to 1 was expected"),
    ("norm", {"is": "StoredNorm", "module": "n", "centred": "no"}, "'families[0].norm.centred' is no; bool was"),
    ("rope", {"is": "Rope", "theta": 0}, "'families[0].rope.theta' is 0; a number from 1.001 to 1e+12 was expected"),
    ("qk_norm", {"is": "QkNorm", "scope": "each"}, "'families[0].qk_norm.scope' is each; one of shared, own, listed"),
    ("kv_heads", 0, "'families[0].kv_heads' is 0; a number from 1 to 1e+07 was expected"),
    ("keys", {"width": ["d"]}, "'families[0].keys' is width; one of n_layers, d_model"),
    ("defaults", {"deep": {"a": [1e99]}}, "'families[0].defaults.deep.a[0]' is 1e+99; a number from"),
    ("variants", [{"is": "When", "key": "k", "value": 1, "cells": {"gguf": None}}], "the name of a cell was expected"),
    ("in_transformers", {"colour": "red"}, "'families[0].in_transformers' is colour; the name of a cell was"),
])  # fmt: skip
def test_what_is_no_cell_is_refused_with_its_place(cell: str, value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError) as error:
        ws.open_model(FIXTURES / "llama", families=saved(tmp_path / "row.json", NEW, **{cell: value}))
    assert str(error.value).startswith("row.json: ") and problem in str(error.value)


@pytest.mark.parametrize("text, problem", [
    ("[]", "is a JSON list; an object was expected"),
    ("{}", "'families' is None; a list of 1 to 200 rows was expected"),
    ('{"families": [1], "proved_against": 3}', "'proved_against' is 3; transformers and its version was expected"),
    ('{"families": [1]}', "'families[0]' is 1; an object: the cells of a Family was expected"),
    ('{"families": [{}], "colour": 1}', "'colour' is 1; families or proved_against was expected"),
    (" " * 200_001, "has more than 200000 bytes; no more are read"),
])  # fmt: skip
def test_what_is_no_file_of_rows_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text(text)
    with pytest.raises(ws.CheckpointError) as error:
        read_rows(tmp_path / "row.json")
    assert str(error.value) == f"row.json: {problem}"


def test_a_row_that_its_cells_contradict_ends_in_one_line(tmp_path: Path) -> None:
    """Cells of other rows, put at random into a row that reads: it reads, or says what is wrong."""
    rng, cells = np.random.default_rng(0), [as_data(row) for row in FAMILIES]
    folder, refused = renamed(tmp_path / "model"), 0
    for trial in range(150):
        given = dict(as_data(NEW))
        for key in rng.choice(["layout", "norm", "qk_norm", "rope", "scale", "biases", "additive", "stored_layer",
                               "layer_types", "clip", "head_dim", "kv_heads", "inputs", "closing"], 2):  # fmt: skip
            given[key] = cells[rng.integers(len(cells))].get(key, given.get(key))
        changes = {key: value for key, value in given.items() if key != "is" and value is not None}
        try:
            model = ws.open_model(folder, families=saved(tmp_path / f"{trial}.json", NEW, **changes))
            for index in model.attention_layers:
                model.layer(index).scores(np.ones((3, model.config.d_model), np.float32))
        except ws.CheckpointError:
            refused += 1
    assert 10 < refused < 150


def test_a_saved_row_opens_what_the_table_does_not_know(tmp_path: Path, config_home: Path) -> None:
    folder, file = renamed(tmp_path / "model"), saved(tmp_path / "row.json", NEW)
    with pytest.raises(ws.CheckpointError, match=r"unknown model_type 'newcomer'.*`weightscope adopt`"):
        ws.open_model(folder)
    model, x = ws.open_model(folder, families=file), fixture("llama").arrays["x1"]
    assert repr(model).startswith(f"Model(novel (adopted, proved against {PROOF}): ")
    np.testing.assert_array_equal(model.layer(1).scores(x), fixture("llama").model.layer(1).scores(x))
    saved(config_home / "novel.json", NEW)
    assert ws.open_model(folder).family == model.family


def test_a_file_asked_for_stands_before_the_table_and_a_users_own_behind(tmp_path: Path, config_home: Path) -> None:
    other = LLAMA.but(name="other")
    saved(config_home / "other.json", other)
    assert ws.open_model(FIXTURES / "llama").family.name == "llama"
    assert ws.open_model(FIXTURES / "llama", families=saved(tmp_path / "row.json", other)).family.name == "other"


def test_a_broken_file_among_a_users_own_is_named(config_home: Path) -> None:
    saved(config_home / "novel.json", NEW, layout="gone")
    with pytest.raises(ws.CheckpointError, match=r"novel\.json: 'families\[0\]\.layout' is gone"):
        ws.open_model(FIXTURES / "llama")


def test_two_files_of_rows_give_two_fingerprints(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "model")

    def of(row: Family) -> Fingerprint:
        return Fingerprint.of_model(ws.open_model(folder, families=saved(tmp_path / "row.json", row)))

    assert of(NEW) == of(NEW) != of(NEW.but(rope__theta=2e4))
    assert of(NEW) != Fingerprint.of_model(ws.open_model(folder, family="llama"))


@pytest.mark.parametrize("option", ["family", "families"])
def test_every_place_says_that_a_row_is_not_the_tables(option: str, tmp_path: Path) -> None:
    folder = renamed(tmp_path / "model")
    given = {"family": "llama", "families": str(saved(tmp_path / "row.json", NEW))}[option]
    said = {"family": "unproved: nobody has shown that model_type 'newcomer' is read so", "families": "adopted, proved"}
    arguments = [str(folder), f"--{option}", given]
    assert said[option] in CliRunner().invoke(main, ["inspect", *arguments]).stdout
    for command, page in (("audit", "report.html"), ("circuits", "report.html")):
        out = tmp_path / command
        result = CliRunner().invoke(main, [command, *arguments, "--out", str(out)])
        assert result.exit_code == 0 and said[option] in (result.stdout if command == "audit" else result.stderr)
        assert said[option].replace("'", "&#39;") in (out / page).read_text()
    result = CliRunner().invoke(main, ["compare", str(folder), *arguments, "--out", str(tmp_path / "compare")])
    assert said[option] in result.stderr
    assert said[option].replace("'", "&#39;") in (tmp_path / "compare" / "report.html").read_text()
    (tmp_path / "list.txt").write_text(str(folder))
    CliRunner().invoke(main, ["audit", str(tmp_path / "list.txt"), *arguments[1:], "--out", str(tmp_path / "many")])
    assert said[option] in (tmp_path / "many" / "summary.csv").read_text()


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: np.ones(shape, np.float32)}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize("name, tensor, listed", [
    ("llama_linear", "model.layers.1.self_attn.attn_sub_norm.weight", True),
    ("llama_linear", "model.layers.1.self_attn.q_norm.weight", True),
    ("bert", "bert.encoder.layer.0.attention.self_attn_layer_norm.weight", True),
    ("llama_linear", "model.layers.0.self_attn.q_proj.bias", False),
    ("llama_linear", "model.layers.0.input_layernorm.bias", False),
])  # fmt: skip
def test_attention_tensors_that_no_cell_reads_are_refused(name: str, tensor: str, listed: bool, tmp_path: Path) -> None:
    """Always where they are of no module that is read; of one that is, where nobody has listed the model_type."""
    folder = renamed(tmp_path / "model", name)
    with_tensor(tensor, 16)(folder)
    family = name.partition("_")[0]
    with pytest.raises(ws.CheckpointError, match=f"tensor '{tensor}' is part of attention, and {family}.* does not"):
        ws.open_model(folder, family=family).layer(int(tensor.split(".")[2 if name != "bert" else 3]))
    shutil.copy(FIXTURES / name / "config.json", folder / "config.json")
    known = ws.open_model(folder)
    if not listed:
        assert len(known.layers) == known.config.n_layers and known.layer(0).head(0)
        return
    with pytest.raises(ws.CheckpointError, match="does not read it"):
        [known.attention_tensors(index) for index in known.attention_layers]
