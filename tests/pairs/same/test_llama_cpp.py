"""Files that llama.cpp's own converter writes are the models that they were made from."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.converter import VERSION, unpacked
from tests.support.rewritten_gguf import rewritten

ROOT = Path(__file__).parents[3]
# Types whose GGUF names or keys no row knew, and what the float32 file is.
SAME = (
    "afmoe", "apertus", "bamba", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_bigcode", "gpt_oss", "jamba", "lfm2",
    "llama4_text", "olmo3",
)  # fmt: skip

# Types whose converter leaves out heads, or takes a number for granted: with that number they are the same.
WITH_ITS_NUMBERS = ("distilbert", "ernie4_5_moe", "falcon", "mt5")


@pytest.mark.check
def test_converted_models_are_the_same(tmp_path: Path) -> None:
    """Each with four types of numbers: the same values, rounded two ways, and quantised where rows are whole blocks."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
    command = [sys.executable, "-m", "analyses.experiments.faithful_conversions", "--out", str(tmp_path / "out")]
    named = [word for kind in SAME for word in ("--source", kind)]
    about = {"LLAMA_CPP": str(unpacked(tmp_path)), "LLAMA_CPP_VERSION": VERSION, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--writer", "gguf", *named], check=True, cwd=ROOT, env={**os.environ, **about})
    rows = list(csv.DictReader((tmp_path / "out" / "faithful.csv").open()))
    assert [row for row in rows if row["as_expected"] != row["conversions"]] == []
    assert {row["source"] for row in rows} == {*SAME} and sum(int(row["conversions"]) for row in rows) == 4 * len(SAME)


@pytest.mark.check
def test_models_with_the_numbers_that_the_converter_takes_are_the_same(tmp_path: Path) -> None:
    """Other numbers than a file's own are a difference, as the farthest distance that T5 has a bias for."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
    converter, made = unpacked(tmp_path), tmp_path / "made"
    command = [sys.executable, "-m", "tests.model.rows.llama_cpp", str(converter), str(made), *WITH_ITS_NUMBERS]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    verdicts = {kind: ws.same(made / kind, made / kind / "model.gguf").verdict for kind in WITH_ITS_NUMBERS}
    assert verdicts == dict.fromkeys(WITH_ITS_NUMBERS, "same values")
    config = json.loads((made / "mt5" / "config.json").read_text()) | {"relative_attention_max_distance": 64}
    (made / "mt5" / "config.json").write_text(json.dumps(config))
    changed = ws.same(made / "mt5", made / "mt5" / "model.gguf")
    assert changed.verdict == "different" and [key.config for key in changed.config] == [
        "relative_attention_max_distance"
    ]


def in_halves(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Rows of queries as transformers has them, where the converter makes neighbours of the halves."""
    return lambda w: w.reshape(heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


@dataclass(frozen=True)
class Fault:
    """What a converter may do wrong with a type: tensors by the ends of their names, keys that it leaves out."""

    kind: str
    tensors: dict[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    without: tuple[str, ...] = ()


FAULTS = {
    "queries in halves": Fault("ministral3", {"attn_q.weight": in_halves(6)}),
    "no temperature": Fault("ministral3", without=("attention.temperature_scale",)),
    "no weight of YaRN": Fault("ministral3", without=("rope.scaling.yarn_log_multiplier",)),
    "queries of InternLM 2 in halves": Fault("internlm2", {"attn_q.weight": in_halves(6)}),
    "keys of MiniCPM in halves": Fault("minicpm", {"attn_k.weight": in_halves(6)}),
    "no correction of a router": Fault("bailing_moe_v2", {"exp_probs_b.bias": np.zeros_like}),
    "whole heads turn": Fault("bailing_moe_v2", without=("rope.dimension_count",)),
    "norms counted from 0": Fault("step3p7", {"norm.weight": lambda w: w - 1}),
    "one base for all layers": Fault("step3p7", without=("rope.freq_base_swa",)),
    "all pairs turn": Fault("gemma4_text", {"rope_freqs.weight": np.ones_like}),
    "norms counted from 1": Fault("gemma4_text", {"norm.weight": lambda w: w + 1}),
    "experts in another order": Fault("gemma4_text", {"down_exps.weight": lambda w: w[::-1]}),
    "heads of a latent in another order": Fault("deepseek_v32", {"attn_k_b.weight": lambda w: w[::-1]}),
    "a multiplier of keys left out": Fault("falcon_h1", {"attn_k.weight": lambda w: w / np.float32(0.3)}),
    "a multiplier of steps left out": Fault("falcon_h1", {"ssm_in.weight": lambda w: w * np.float32(0.5)}),
    "no bias of an indexer": Fault("deepseek_v32", {"indexer.k_norm.bias": np.zeros_like}),
}

KINDS = sorted({fault.kind for fault in FAULTS.values()})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of these types with their files; a type with an image's tower without it."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
    folder = tmp_path_factory.mktemp("made")
    converter = unpacked(tmp_path_factory.mktemp("converter"))
    command = [sys.executable, "-m", "tests.model.rows.llama_cpp", str(converter), str(folder), *KINDS]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for kind in KINDS:
        config = json.loads((folder / kind / "config.json").read_text())
        if "text_config" in config:
            (folder / kind / "config.json").write_text(json.dumps(config["text_config"]))
            arrays = load_file(folder / kind / "model.safetensors")
            text = {name: array for name, array in arrays.items() if name.startswith(("model.layers", "model.norm"))}
            text |= {name: arrays[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
            save_file(text, folder / kind / "model.safetensors")
    return folder


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_newer_types_are_the_same(kind: str, made: Path) -> None:
    """With head counts by layer, temperatures, rotations that stop, indexers."""
    verdict = ws.same(made / kind, made / kind / "model.gguf").verdict
    assert verdict == ("rounded" if kind == "falcon_h1" else "same values")  # which stores -exp(A_log)


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_newer_types_are_the_same(kind: str, made: Path) -> None:
    """W_QK of a file's heads is the checkpoint's, whatever its converter multiplied into the weights."""
    original, file = (ws.open_model(made / kind / name) for name in ("", "model.gguf"))
    for layer in original.attention_layers:
        for head in (0, original.layer(layer).n_heads - 1):
            a, b = (model.layer(layer).head(head).qk.dense() for model in (original, file))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())


@pytest.mark.check
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_newer_types_are_named(name: str, made: Path, tmp_path: Path) -> None:
    """One thing is wrong in each file."""
    fault = FAULTS[name]
    file = made / fault.kind / "model.gguf"
    wrong = rewritten(file, tmp_path / "wrong.gguf", tensors=fault.tensors, without=fault.without)
    assert ws.same(made / fault.kind, wrong).verdict == "different"
