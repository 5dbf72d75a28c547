"""Broken scales: a gate called "no change" looks at every tensor that an answer depends on, an audit at embeddings."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run, run_undrawn
from tests.support.figures import undrawn
from tests.support.slow import mostly_checked

SMALL = Path(ws.__file__).parent / "core" / "embedded"
KEYS, OUTPUTS = "h.1.attn.c_attn.bias", "h.0.attn.c_proj.bias"
# What is read by `compare` without --all, and by no head's matrix; and what feed-forward networks read, with --all.
READ = (OUTPUTS, "wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "h.1.ln_2.weight", "h.0.mlp.c_fc.bias")
WITH_ALL = ("h.0.mlp.c_fc.weight", "h.1.mlp.c_proj.weight")


def broken(folder: Path, name: str, factor: float, part: slice = slice(None)) -> Path:
    """The checkpoint that comes with weightscope, one tensor or a part of it times a factor, in float32."""
    weights = {key: values.astype(np.float32) for key, values in load_file(SMALL / "model.safetensors").items()}
    weights[f"transformer.{name}"][part] *= np.float32(factor)
    shutil.copytree(SMALL, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder


def status(*arguments: object) -> int:
    return run_undrawn(*arguments).exit_code


@pytest.mark.parametrize("name", mostly_checked([KEYS, *READ, *WITH_ALL], fast=[KEYS, "wte.weight", WITH_ALL[0]]))
@pytest.mark.parametrize("factor", mostly_checked([0, 1e30], fast=[1e30]))
def test_a_gate_stops_a_tensor_of_zero_or_another_scale(name: str, factor: float, tmp_path: Path) -> None:
    part = slice(256, 512) if name == KEYS else slice(None)
    options = ("--all",) if name in WITH_ALL else ()
    scaled = broken(tmp_path / "b", name, factor, part)
    same = broken(tmp_path / "a", name, 1)
    for limit in (("--max-change", 0.01), ("--fail-on", "warning")):
        if (name, factor, limit[0]) == (KEYS, 0, "--fail-on"):  # keys' biases change no score of this model
            continue
        assert status("compare", same, scaled, "--out", tmp_path / "out", *limit, *options) == 3, limit


def test_tensors_not_compared_are_in_headline_and_json(tmp_path: Path) -> None:
    same, scaled = broken(tmp_path / "a", WITH_ALL[0], 1), broken(tmp_path / "b", WITH_ALL[0], 1e30)
    with undrawn():
        completed = run("compare", same, scaled, "--out", tmp_path / "out", "--json")
    result = json.loads(completed.stdout)
    assert result["largest_change"] == 0 and f"transformer.{WITH_ALL[0]}" in result["not_compared"]
    assert "Not compared: 8 of 52 tensors" in result["coverage"]
    assert {row["tensor"] for row in result["other_tensors"]}.isdisjoint(result["not_compared"])
    comparison = ws.compare(ws.open_model(same), ws.open_model(scaled), all_tensors=True)
    assert comparison.not_compared == [] and comparison.farthest[0] == f"transformer.{WITH_ALL[0]}"


def test_tiny_bias_may_double(tmp_path: Path) -> None:
    """It is compared with its weight, in whose place nothing changed; the headline names it all the same."""
    before, after = (broken(tmp_path / str(factor), OUTPUTS, factor) for factor in (1e-6, 2e-6))
    comparison = ws.compare(ws.open_model(before), ws.open_model(after))
    assert 0 < comparison.largest_change() < 1e-5 and f"transformer.{OUTPUTS} by 1." in comparison.headline
    assert not comparison.findings


@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight", "ln_f.weight"])
@pytest.mark.parametrize("factor", mostly_checked([0, 1e30, 1e-30, 1e8], fast=[1e-30]))
@pytest.mark.parametrize("options", mostly_checked([(), ("--all",)], fast=[()]))
def test_an_audit_warns_of_embeddings_and_gains_of_no_trained_scale(name, factor, options, tmp_path: Path) -> None:
    seen = ws.audit(ws.open_model(broken(tmp_path, name, factor)), all_tensors=bool(options)).findings
    warnings = [finding for finding in seen if finding.severity != "note"]
    assert len(warnings) == 1, warnings
    assert warnings[0].kind == "zero_tensor" if factor == 0 else warnings[0].kind in ("out_of_scale", "overflow")


@pytest.mark.parametrize("options", [(), ("--all",)])
def test_a_stock_checkpoint_has_no_warning(options) -> None:
    model = ws.open_model("embedded")
    assert {finding.severity for finding in ws.audit(model, all_tensors=bool(options)).findings} <= {"note"}
    same = ws.compare(model, model, all_tensors=bool(options))
    assert same.largest_change() == 0 and not same.findings
