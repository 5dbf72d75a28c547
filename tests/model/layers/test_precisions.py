"""The same model in two precisions: what quantisation did to each head is what the dequantised matrices say."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.files import write
from weightscope.checkpoint.packings.scaled import decode_fp8

LLAMA = Path(__file__).parents[2] / "model" / "rows" / "fixtures" / "llama"


def nearest_fp8(values: np.ndarray) -> np.ndarray:
    """The E4M3 bytes nearest to some values, by trying all 256."""
    table = decode_fp8(np.arange(256, dtype=np.uint8), "F8_E4M3")
    table[~np.isfinite(table)] = 1e9
    return np.abs(values[..., None] - table).argmin(axis=-1).astype(np.uint8)


@pytest.fixture
def in_fp8(tmp_path: Path) -> Path:
    """The llama fixture with its queries in FP8, one scale a tensor, as compressed-tensors writes them."""
    tensors = dict(load_file(LLAMA / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        scale = np.abs(tensors[name]).max() / 448  # E4M3's largest
        raw = nearest_fp8(tensors[name] / scale)
        tensors[name] = ("F8_E4M3", raw.shape, raw.tobytes())
        tensors[name + "_scale"] = np.array([scale], np.float32)
    config = json.loads((LLAMA / "config.json").read_text())
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    write(tmp_path / "model.safetensors", tensors)
    return tmp_path


def test_compare_shows_what_fp8_did_to_each_head(in_fp8: Path) -> None:
    exact, rounded = ws.open_model(LLAMA), ws.open_model(in_fp8)
    measured = ws.compare(exact, rounded).from_first
    for i in range(exact.config.n_layers):
        for head, rounded_head in zip(exact.layer(i).heads, rounded.layer(i).heads, strict=True):
            before, after = (each.qk.dense().astype(np.float64) for each in (head, rounded_head))
            change = np.linalg.norm(after - before) / np.linalg.norm(before)
            assert measured["qk_change"][0, i, head.index] == pytest.approx(change, rel=1e-4)
            assert 0.005 < change < 0.1  # E4M3 keeps three bits of a fraction
    assert measured["vo_change"].max() == 0
