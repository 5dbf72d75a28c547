"""Copies whose codes were found with a scale that was rounded afterwards, as mlx-lm and compressed-tensors write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants.containers import CONTAINERS
from tests.support.plants.families import Planted, random_llama

torch = pytest.importorskip("torch", reason="NumPy has neither bfloat16 nor float8")

Parts = dict[str, Any]
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
NVFP4 = {"quantization_config": {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP4}},
}}  # fmt: skip
MLX = {"quantization": {"group_size": 32, "bits": 8}}


def mlx(name: str, w: np.ndarray, shift: int) -> Parts:
    """Eight bits in groups of 32: the end with the larger size is the offset, in bfloat16 as the scale."""
    groups = w.reshape(len(w), -1, 32)
    low, high = groups.min(-1), groups.max(-1)
    is_low = np.abs(low) > np.abs(high)
    scale = np.where(is_low, 1, -1) * (high - low) / np.float32(255)
    offset = np.where(is_low, low, high)
    codes = np.clip(np.rint((groups - offset[..., None]) / scale[..., None]) + shift, 0, 255)
    words = codes.astype(np.uint8).reshape(len(w), -1).view("<u4")
    stored = {"scales": scale, "biases": offset}
    return {f"{name}.weight": torch.from_numpy(words.copy())} | {
        f"{name}.{part}": torch.from_numpy(each.astype(np.float32)).bfloat16() for part, each in stored.items()
    }


def nvfp4(name: str, w: np.ndarray, shift: int) -> Parts:
    """Four bits in groups of 16, a scale in float8 for each and one for all in float32."""
    groups = w.reshape(len(w), -1, 16)
    whole = np.float32(448 * 6) / np.abs(w).max()
    scale = np.abs(groups).max(-1) / np.float32(6)
    sizes = np.abs(groups / scale[..., None])
    codes = np.abs(sizes[..., None] - LEVELS).argmin(-1)
    codes = (np.minimum(codes + shift, 7) | 8 * (groups < 0)).reshape(len(w), -1).astype(np.uint8)
    return {
        f"{name}.weight_packed": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
        f"{name}.weight_scale": torch.from_numpy(scale * whole).to(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": torch.tensor([whole]),
    }


def write(planted: Planted, pack: Callable[..., Parts], settings: Parts, folder: Path, shift: int = 0) -> Path:
    from safetensors.torch import save_file

    tensors: Parts = {}
    for name, w in planted.tensors.items():
        if name.endswith("_proj.weight"):
            tensors |= pack(name.removesuffix(".weight"), w.astype(np.float32), shift)
        else:
            tensors[name] = torch.from_numpy(w)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(planted.config | settings))
    return folder


@pytest.mark.parametrize(("pack", "settings"), [(mlx, MLX), (nvfp4, NVFP4)], ids=["MLX", "NVFP4"])
def test_a_scale_that_was_rounded_after_its_codes_is_quantisation(pack: Any, settings: Parts, tmp_path: Path) -> None:
    llama = random_llama()
    CONTAINERS["F32"].write(llama, tmp_path / "a")
    copy = ws.same(tmp_path / "a", write(llama, pack, settings, tmp_path / "b"))
    assert copy.verdict == "quantised", copy.lead
    next_codes = ws.same(tmp_path / "a", write(llama, pack, settings, tmp_path / "c", shift=2))
    assert next_codes.verdict in ("different", "undecided"), next_codes.lead
