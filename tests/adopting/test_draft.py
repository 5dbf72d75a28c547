"""A draft says what names and shapes decide, leaves the rest open, and is never called proved."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.adopting.draft import drafted
from weightscope.checkpoint.opening import open_checkpoint

CONFIG = {
    "model_type": "zephyrine", "width": 24, "n_blocks": 2, "n_heads": 4, "n_kv_heads": 2, "eps": 1e-5,
    "rope_theta": 50.0,
}  # fmt: skip
LAYER = {
    "mixer.wq.weight": (24, 24), "mixer.wk.weight": (12, 24), "mixer.wv.weight": (12, 24), "mixer.wo.weight": (24, 24),
    "pre.weight": (24,), "post.weight": (24,), "up.weight": (40, 24), "down.weight": (24, 40),
}  # fmt: skip


def checkpoint(folder: Path, **more: tuple[int, ...]) -> Path:
    shapes = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()} | {
        "words.weight": (50, 24)
    }
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in {**shapes, **more}.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_draft_opens_the_checkpoint_and_says_that_nothing_was_proved(tmp_path: Path) -> None:
    folder, row = checkpoint(tmp_path), tmp_path / "row.toml"
    done = run("draft", folder, "--out", row)
    assert done.exit_code == 0 and "It opens, 2 layers of 4 heads of 6" in row.read_text()
    model = ws.open_model(folder, families=row)
    assert model.config.n_kv_heads == 2 and model.family.called == "zephyrine (unproved, from row.toml)"
    assert "unproved" in ws.audit(model, directions=0).lead
    open_cells = [line for line in row.read_text().splitlines() if line.startswith("# ") and " = ?" in line]
    assert any("interleaved" in line for line in open_cells) and any("offset = 1" in line for line in open_cells)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "starcoder2"])
def test_a_draft_of_a_known_architecture_names_the_modules_of_its_row(name: str) -> None:
    text = drafted(fixture(name).model.checkpoint)
    family = fixture(name).model.family
    for role, module in zip(("q", "k", "v", "out"), family.heads.projections, strict=True):
        assert f'heads.{role} = "{module}"' in text
    assert f':{family.norms.before.module}"' in text and "It opens" in text


def test_a_matrix_of_three_widths_next_to_a_square_one_is_fused_qkv(tmp_path: Path) -> None:
    """The feed-forward network is three times as wide too, and has no square matrix next to it."""
    attention = {"mixer.all": (72, 24), "mixer.wo": (24, 24), "net.up": (72, 24), "net.down": (24, 72)}
    shapes = {f"blocks.{i}.{name}.weight": shape for i in range(2) for name, shape in attention.items()}
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = drafted(open_checkpoint(tmp_path))
    assert 'heads.qkv = "mixer.all"' in text and 'heads.out = "mixer.wo"' in text and "# heads.layout = ?" in text


def test_the_layout_of_a_fused_tensor_is_left_open() -> None:
    text = drafted(open_checkpoint(FIXTURES / "gpt_neox"))
    assert "# heads.layout = ?" in text and "\nheads.layout" not in text and "does not open" in text


def test_tensor_names_cannot_inject_cells(tmp_path: Path) -> None:
    """A tensor's name ends a string, a comment or a line: the draft is still the same stanza."""
    name = 'pos"\nrefused = "x'
    text = drafted(open_checkpoint(checkpoint(tmp_path, **{name: (9, 24)})))
    assert "\nrefused" not in text


def test_a_file_without_layers_is_refused_in_one_line(tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    done = run("draft", tmp_path)
    assert done.exit_code == 2 and "no tensor is of a numbered layer" in done.stderr


def torch_encoder(folder: Path, prefix: str = "") -> dict[str, np.ndarray]:
    """What torch.nn.TransformerEncoder.state_dict() has, of random numbers."""
    d, wide, rng = 24, 40, np.random.default_rng(0)
    shapes = {
        "self_attn.in_proj_weight": (3 * d, d), "self_attn.in_proj_bias": (3 * d,), "self_attn.out_proj.weight": (d, d),
        "self_attn.out_proj.bias": (d,), "linear1.weight": (wide, d), "linear1.bias": (wide,),
        "linear2.weight": (d, wide), "linear2.bias": (d,), "norm1.weight": (d,), "norm1.bias": (d,),
        "norm2.weight": (d,), "norm2.bias": (d,),
    }  # fmt: skip
    weights = {f"{prefix}layers.{i}.{name}": rng.normal(scale=0.2, size=shape).astype(np.float32)
               for i in range(2) for name, shape in shapes.items()}  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return weights


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_a_state_dict_of_torchs_encoder_opens_by_its_draft(prefix: str, tmp_path: Path) -> None:
    """Rows of in_proj_weight are queries, keys and values, as torch.nn.MultiheadAttention splits them."""
    weights, row = torch_encoder(tmp_path, prefix), tmp_path / "row.toml"
    config = {"model_type": "own", "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("draft", tmp_path, "--out", row).exit_code == 0
    assert "It opens, 2 layers of 4 heads of 6" in row.read_text()
    layer = ws.open_model(tmp_path, families=row).layer(1)
    stem = f"{prefix}layers.1.self_attn."
    w, b = weights[f"{stem}in_proj_weight"], weights[f"{stem}in_proj_bias"]
    x = np.random.default_rng(1).standard_normal((5, 24)).astype(np.float32)
    q, k, v = ((x @ part.T + bias).reshape(5, 4, 6).transpose(1, 0, 2)
               for part, bias in zip(np.split(w, 3), np.split(b, 3), strict=True))  # fmt: skip
    differences = layer.scores(x) - q @ k.transpose(0, 2, 1) / np.sqrt(6)
    assert np.ptp(differences, axis=-1).max() < 1e-4  # what is the same for all keys is left out
    out = weights[f"{stem}out_proj.weight"].reshape(24, 4, 6)
    np.testing.assert_allclose(layer.values(x), np.einsum("hnr,dhr->hnd", v, out), atol=1e-4)
    assert "queries and keys" in run("inspect", tmp_path, "--families", row).stdout


def test_without_config_json_the_refusal_names_draft_and_adopt(tmp_path: Path) -> None:
    torch_encoder(tmp_path)
    result = run("inspect", tmp_path)
    assert result.exit_code == 2
    for command in (
        "weightscope adopt SOURCE --with module:Class",
        "weightscope draft SOURCE",
        "inspect SOURCE --check",
    ):
        assert command in result.stderr
    drafted_row = run("draft", tmp_path).stdout
    assert '"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": HEADS' in drafted_row
