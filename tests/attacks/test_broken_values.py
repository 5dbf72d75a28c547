"""One broken value in a tensor of any role: each command ends with a result or one line, and says no two things."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.commands import run_undrawn
from tests.support.slow import one_in
from tests.support.small_llama import write_small_llama

LAYER = "model.layers.1."
ROLES = [
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
    *(f"{LAYER}{name}.weight" for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "input_layernorm", "post_attention_layernorm")),
]  # fmt: skip
VALUES = [np.nan, np.inf, 3e38, 1e-45, 0.0]  # zero throughout
COMMANDS = {
    "audit": lambda base, broken, out: ["audit", broken, "--all", "--out", out],
    "circuits": lambda base, broken, out: ["circuits", broken, "--out", out],
    "compare": lambda base, broken, out: ["compare", base, broken, "--all", "--out", out],
    "inspect": lambda base, broken, out: ["inspect", broken, "--check"],
    "learned": lambda base, broken, out: ["learned", base, broken, "--out", out],
    "lineage": lambda base, broken, out: ["lineage", broken, base, "--out", out],
    "rank": lambda base, broken, out: ["rank", broken, "--for", "peft"],
}
CONTRADICTIONS = [
    r"(W_QK|W_VO) is not finite.*\b\1 did not move",
    r"Identical: all.*not finite",
    r"fine-tuned.*The same up to|The same up to.*fine-tuned",
    r"absent: not in both",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("broken") / "base", layers=2)


@pytest.mark.check
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("value", one_in(3, VALUES))
@pytest.mark.parametrize("role", ROLES)
def test_broken_value_ends_in_a_result_or_one_line(
    role: str, value: float, name: str, base: Path, tmp_path: Path
) -> None:
    weights, folder = load_file(base / "model.safetensors"), tmp_path / "broken"
    broken = weights[role].copy()
    broken.flat[slice(None) if value == 0 else broken.size // 3] = value
    folder.mkdir()
    save_file(weights | {role: broken}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text())))
    result = run_undrawn(*COMMANDS[name](base, folder, tmp_path / "out"))  # an unexpected exception is raised
    assert result.exit_code in (0, 2, 3, 4)
    assert result.exit_code != 2 or result.stderr.count("\n") == 1
    printed = " ".join(result.output.split())
    assert not [pattern for pattern in CONTRADICTIONS if re.search(pattern, printed)]


def test_a_broken_bias_is_no_unmoved_head(base: Path, tmp_path: Path) -> None:
    """Zero biases as Qwen 2 has them, and NaN in one."""
    config = json.loads((base / "config.json").read_text()) | {"model_type": "qwen2"}
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if re.search(r"[qkv]_proj\.weight", name)]:
        weights[name.replace("weight", "bias")] = np.zeros(len(weights[name]), np.float32)
    for name in ("sound", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(weights, tmp_path / name / "model.safetensors")
        weights["model.layers.1.self_attn.k_proj.bias"][0] = np.nan
    result = run_undrawn("compare", tmp_path / "sound", tmp_path / "broken")
    assert "W_QK did not move, but its bias is not finite in " in result.stdout
