"""The highest matrices of each role are chosen, and the other tools' own parsers read the file."""

import ast
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.other_packages import installed_beside, printed_beside
from tests.support.stacked_experts import stacked_and_separate
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope.core.errors import CheckpointError
from weightscope.model.metrics.matrix_spectra import signal_to_noise
from weightscope.pairs.rank import BY, TOOLS
from weightscope.pairs.rank.rank import WRITERS, rank, yaml_text


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of two layers with one matrix moved far and all others a little."""
    folder = tmp_path_factory.mktemp("tuned")
    weights, rng = load_file(FOLDER / "model.safetensors"), np.random.default_rng(0)
    for name, w in weights.items():
        if w.ndim == 2:
            far = 0.3 if name == "transformer.h.1.mlp.c_fc.weight" else 0.01
            weights[name] = w + (far * np.std(w) * rng.standard_normal(w.shape)).astype(w.dtype)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    return folder


def test_scores_are_the_measures_of_the_matrices() -> None:
    model = ws.open_model(TWO_LAYERS)
    ranking = rank(model, by="snr", top=0.5)
    assert sorted({row.role for row in ranking.rows}) == ["down", "o", "q+k+v", "up"] and len(ranking.chosen) == 4
    for row in ranking.rows:
        parts = [f"layer {row.layer} {role}" for role in row.role.split("+")]
        spectra = [np.linalg.svd(model.tensors[part].array().astype(np.float64), compute_uv=False) for part in parts]
        expected = [signal_to_noise(s, model.tensors[part].shape) for s, part in zip(spectra, parts, strict=True)]
        assert row.score == pytest.approx(np.mean(expected), rel=1e-5)
    for role in {row.role for row in ranking.rows}:
        first, second = (row for row in ranking.rows if row.role == role)
        assert first.score >= second.score and first.is_chosen and not second.is_chosen


@pytest.mark.parametrize("by", BY)
def test_every_measure_ranks(by: str, tuned: Path) -> None:
    ranking = rank(ws.open_model(tuned), by=by, top=1, base=ws.open_model(TWO_LAYERS))
    assert len(ranking.chosen) == 8 and all(np.isfinite(row.score) for row in ranking.rows)


def test_what_changed_most_comes_first(tuned: Path) -> None:
    ranking = rank(ws.open_model(tuned), by="change", base=ws.open_model(TWO_LAYERS))
    moved = max(ranking.rows, key=lambda row: row.score)
    assert moved.name == "transformer.h.1.mlp.c_fc.weight" and moved.is_chosen
    assert moved.score == pytest.approx(0.3, rel=0.02)


def test_a_broken_matrix_is_never_chosen(tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.weight"][0, 0] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    assert "transformer.h.0.mlp.c_fc.weight" not in rank(ws.open_model(tmp_path), top=1).chosen


@pytest.mark.parametrize("top", [0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(top: float) -> None:
    with pytest.raises(CheckpointError, match="top is"):
        rank(ws.open_model(TWO_LAYERS), top=top)


@pytest.mark.parametrize("more", [["--for", "mergekit"], ["--for", "peft", "--by", "change"]], ids=str)
def test_a_missing_base_is_asked_for(more: list[str]) -> None:
    result = run("rank", TWO_LAYERS, *more)
    assert result.exit_code == 2 and "needs --base" in result.output
    with pytest.raises(CheckpointError, match="needs `base`"):
        ranking = rank(ws.open_model(TWO_LAYERS), **({"by": "change"} if "change" in more else {}))
        ranking.written_for("mergekit")


def test_stacked_experts_are_no_modules_of_lora(tmp_path: Path) -> None:
    stacked, separate = stacked_and_separate(tmp_path, count=2, inner=8)
    patterns = [json.loads(rank(model, top=1).written_for("peft"))["target_modules"] for model in (stacked, separate)]
    without, with_experts = (pattern.count("mlp\\.experts") for pattern in patterns)
    assert without == 0 and "experts, as no module holds them" in patterns[0] and with_experts > 6
    assert "experts.gate_up_proj" in rank(stacked, top=1).written_for("axolotl")


def test_the_command_writes_the_file_and_every_score(tuned: Path, tmp_path: Path) -> None:
    file, table = tmp_path / "merge.yaml", tmp_path / "scores.csv"
    options = ["--base", TWO_LAYERS, "--for", "mergekit", "--out", str(file), "--csv", str(table)]
    result = run("rank", tuned, *options)
    assert result.exit_code == 0, result.output
    first, *_ = file.read_text().splitlines()
    assert first.startswith("# weightscope") and first.removeprefix("# ") in result.stdout
    rows = [*csv.DictReader(table.open())]
    assert len(rows) == 8 and sum(row["chosen"] == "yes" for row in rows) == 4
    printed = run("rank", tuned, *options[:4]).stdout
    assert printed == file.read_text()


@pytest.mark.parametrize("text", ["a😀b", "plain", 'quo"te\\', "\x07\x7f\x85\u2028\ufeff", "é中", "\n- x: 1"])
def test_yaml_reads_any_text_back(text: str) -> None:
    assert yaml.safe_load(f"- {yaml_text(text)}\n") == [text] and yaml_text(text).isascii()


def test_every_tool_has_its_writer() -> None:
    assert tuple(WRITERS) == TOOLS


# The other tools' own code


def test_axolotls_rule_matches_the_chosen_parameters_only() -> None:
    """Periods are literal there (axolotl/utils/freeze.py)."""
    ranking = rank(ws.open_model(TWO_LAYERS))
    patterns = yaml.safe_load(ranking.written_for("axolotl"))["unfrozen_parameters"]
    names = [*ws.open_model(TWO_LAYERS).checkpoint]
    matched = {name for name in names for pattern in patterns if re.match(pattern.replace(".", r"\."), name)}
    assert matched == {*ranking.chosen}


@pytest.mark.check
def test_axolotl_unfreezes_the_chosen_parameters(tmp_path: Path) -> None:
    """axolotl itself pins what this environment cannot have: the class that matches names and the type of the key in
    its schema are taken from the source of 0.19.0.
    """
    folder = installed_beside(tmp_path / "axolotl", "axolotl==0.19.0")
    schema = (folder / "axolotl" / "utils" / "schemas" / "config.py").read_text()
    assert "unfrozen_parameters: list[str] | None = Field(" in schema
    tree = ast.parse((folder / "axolotl" / "utils" / "freeze.py").read_text())
    (matcher,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LayerNamePattern")
    names: dict[str, object] = {}
    exec("import re\nfrom typing import *\n" + ast.unparse(matcher), names)
    ranking = rank(ws.open_model(TWO_LAYERS))
    patterns = [
        names["LayerNamePattern"](p) for p in yaml.safe_load(ranking.written_for("axolotl"))["unfrozen_parameters"]
    ]
    parameters = [*ws.open_model(TWO_LAYERS).checkpoint]
    assert {name for name in parameters if any(p.match(name) for p in patterns)} == {*ranking.chosen}


PEFT = """
import sys, json
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
config = LoraConfig.from_pretrained(sys.argv[1])
model = get_peft_model(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)), config)
print(json.dumps(sorted({name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name})))
"""


@pytest.mark.check
def test_peft_puts_adapters_on_the_chosen_matrices(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranking = rank(ws.open_model(TWO_LAYERS))
    (tmp_path / "adapter_config.json").write_text(ranking.written_for("peft"))
    folder = installed_beside(tmp_path / "peft", "peft==0.21.2")
    adapted = json.loads(printed_beside(folder, PEFT, str(tmp_path)).splitlines()[-1])
    assert adapted == sorted(f"base_model.model.{name.removesuffix('.weight')}" for name in ranking.chosen)


MERGEKIT = """
import sys, yaml, json
from mergekit.config import MergeConfiguration, evaluate_setting
config = MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1])))
names = json.loads(sys.argv[2])
weight = lambda model, name: evaluate_setting(name, model.parameters["weight"], validate=float)
print(json.dumps({str(model.model): [weight(model, name) for name in names] for model in config.models}))
"""


@pytest.mark.check
def test_mergekit_takes_the_chosen_matrices_from_the_model(tuned: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranking = rank(ws.open_model(tuned), base=ws.open_model(TWO_LAYERS))
    (tmp_path / "merge.yaml").write_text(ranking.written_for("mergekit"))
    folder = installed_beside(tmp_path / "mergekit", "mergekit==0.1.5", "immutables", "peft==0.21.2", "sentencepiece")
    names = [*ws.open_model(tuned).checkpoint]
    printed = printed_beside(folder, MERGEKIT, str(tmp_path / "merge.yaml"), json.dumps(names)).splitlines()[-1]
    weights = json.loads(printed)
    assert weights[str(tuned)] == [float(name in ranking.chosen) for name in names]
    assert weights[TWO_LAYERS] == [float(name not in ranking.chosen) for name in names]
