"""A config.json that readers take otherwise is found by audit, same and inspect."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from weightscope.core.errors import CheckpointError
from weightscope.heads.tensors.config_readers import readers_disagree, taken_by_readers
from weightscope.model.config.readers import What

FIXTURES = Path(__file__).parents[2] / "model" / "rows" / "fixtures"


def copied(folder: Path, fixture: str = "llama", **change: object) -> Path:
    shutil.copytree(FIXTURES / fixture, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    return folder


def newer(folder: Path) -> Path:
    """As transformers 5 writes another base than the class's own."""
    return copied(folder, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})


def test_audit_warns_of_a_base_that_4_does_not_read(tmp_path: Path) -> None:
    (found,) = [each for each in ws.audit(newer(tmp_path / "model")).findings if each.kind == "readers_disagree"]
    assert found.severity == "warning" and found.number == 1
    assert "rotary base 10000 (transformers 4.57), 500000 (transformers 5, vLLM, llama.cpp)" in found.text
    assert "transformers 4.57 looks for rope_theta: write 500000 there." in found.text
    mended = copied(tmp_path / "mended", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=5e5)
    assert not readers_disagree(ws.open_model(mended))


@pytest.mark.parametrize("fixture", ["llama", "gpt2", "bert", "mixtral"])
def test_a_file_of_transformers_5_with_the_usual_base_has_no_warning(fixture: str) -> None:
    assert not readers_disagree(ws.open_model(FIXTURES / fixture))


def test_same_has_a_line_where_one_file_is_taken_otherwise(tmp_path: Path) -> None:
    older = copied(tmp_path / "older", rope_parameters=None, rope_theta=500_000.0)
    result = ws.same(older, newer(tmp_path / "newer"))
    assert result.verdict == "same values"
    lines = [line for line in result.unread_files if "Readers" in line]
    assert len(lines) == 1 and lines[0].startswith("B: Readers of config.json disagree: rotary base 10000")
    assert not any("Readers" in line for line in ws.same(tmp_path / "newer", tmp_path / "newer").unread_files)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tie_counts_where_it_changes_the_head(is_equal: bool, tmp_path: Path) -> None:
    """Where no reader ties, the head in the file is not compared with the embedding."""
    folder = copied(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + np.float32(not is_equal)
    save_file(weights, folder / "model.safetensors")
    readings = taken_by_readers(ws.open_model(folder))
    assert not any(place.what is What.TIED for reading in readings for place in reading.values)


def test_inspect_shows_a_table_and_says_what_to_do(tmp_path: Path) -> None:
    shown = run("inspect", newer(tmp_path / "model"), "--readers")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Readers of config.json disagree: rotary base 10000 (transformers 4.57)")
    assert ["rotary", "base", "10000", "500000", "500000", "500000"] in [
        line.split() for line in shown.stdout.split("\n")
    ]
    printed = json.loads(run("inspect", tmp_path / "model", "--readers", "--json").stdout)
    assert {"what": "rotary base", "reader": "transformers 4.57", "value": 10000.0} in printed["readers"]
    assert [each["what"] for each in printed["disagreements"]] == ["rotary base"] and not printed["unread"]
    assert run("inspect", tmp_path / "model", "--readers", "--check").exit_code == 2


def test_a_reader_without_code_for_it_says_so(tmp_path: Path) -> None:
    shown = run("inspect", copied(tmp_path / "model", architectures=["Unknown"]), "--readers").stdout
    assert "vLLM: does not read this type" in shown and "llama.cpp: does not read this type" in shown


def test_a_file_without_config_json_is_refused(tmp_path: Path) -> None:
    model = ws.open_model(copied(tmp_path / "model"))
    object.__setattr__(model.checkpoint.config, "stored", ())
    assert not readers_disagree(model)
    with pytest.raises(CheckpointError, match=r"was read without a config\.json"):
        taken_by_readers(model)
