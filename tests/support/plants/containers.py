"""Containers that a planted checkpoint is written in, each with the values that a reader should get.

Layers' matrices are packed; embeddings, heads, norms, biases and routers stay floats. A slip is made with the packed
numbers themselves: codes, scales and zero points of one tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.plants.families import Planted
from weightscope.core.files import Folder

BLOCK, GROUP = 16, 32  # rows and columns that share a scale of FP8; inputs that share one of GPTQ and MLX
Packed = dict[str, np.ndarray]  # codes (out, in), scales, perhaps zeros: arrays before they are written
Slip = Callable[[Packed], Packed]
NO_SLIPS: Mapping[str, Slip] = {}


def swapped_nibbles(packed: Packed) -> Packed:
    """The nibbles of every byte exchanged: neighbours along the inputs, or halves of ggml's blocks."""
    codes, block = packed["codes"], int(packed.get("halves", 2))
    return packed | {"codes": codes.reshape(len(codes), -1, 2, block // 2)[:, :, ::-1].reshape(codes.shape)}


def no_scales(packed: Packed) -> Packed:
    """Every scale is one."""
    return packed | {"scales": np.ones_like(packed["scales"])}


def inverted_scales(packed: Packed) -> Packed:
    """Divided by where they multiply."""
    return packed | {"scales": 1 / packed["scales"]}


def other_axis(packed: Packed) -> Packed:
    """Scales laid out along the other axis."""
    scales = packed["scales"]
    return packed | {"scales": scales.T.reshape(scales.shape)}


def nan_scale(packed: Packed, value: float = np.nan) -> Packed:
    """One scale is not a number."""
    scales = packed["scales"].copy()
    scales[1, 0] = value
    return packed | {"scales": scales}


def infinite_scale(packed: Packed) -> Packed:
    """One scale is infinite."""
    return nan_scale(packed, np.inf)


@dataclass(frozen=True, eq=False)
class Container:
    """A way to store a checkpoint: how one matrix is packed, its values again, and the tensors of the file."""

    name: str
    pack: Callable[[np.ndarray], Packed] | None = None
    value: Callable[[Packed], np.ndarray] | None = None
    tensors: Callable[[str, Packed], dict[str, Any]] | None = None
    settings: Mapping[str, Any] | None = None
    key: str = "quantization_config"  # of config.json, which has the settings
    half: bool = False  # floats are bfloat16
    shards: int = 1

    def takes(self, planted: Planted, keys: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with these keys of config.json changed can be written here: any can."""
        return True

    def packs(self, name: str, w: np.ndarray) -> bool:
        """Whether a tensor is packed here."""
        layers = any(part in name for part in (".layers.", ".h.", ".layer."))
        return self.pack is not None and layers and w.ndim == 2 and min(w.shape) >= GROUP

    def write(self, planted: Planted, folder: Path, slips: Mapping[str, Slip] = NO_SLIPS) -> dict[str, np.ndarray]:
        """Write the checkpoint, and give the values that its file holds, by name."""
        import torch
        from safetensors.torch import save_file

        values: dict[str, np.ndarray] = {}
        files: list[dict[str, Any]] = [{} for _ in range(self.shards)]
        for number, (name, w) in enumerate(planted.tensors.items()):
            shard = files[number * self.shards // len(planted.tensors)]
            if self.packs(name, w):
                assert self.pack and self.value and self.tensors
                packed = slips.get(name, dict)(self.pack(w))
                values[name] = self.value(packed)
                shard |= self.tensors(name, packed)
                continue
            stored = torch.from_numpy(w.copy()).to(torch.bfloat16 if self.half else torch.float32)
            values[name], shard[name] = stored.float().numpy(), stored
        folder.mkdir(parents=True, exist_ok=True)
        config = planted.config | ({self.key: dict(self.settings)} if self.settings else {})
        Folder(folder).json("config.json", config)
        names = [f"model-{i + 1:05}-of-{self.shards:05}.safetensors" for i in range(self.shards)]
        for file, shard in zip(names if self.shards > 1 else ["model.safetensors"], files, strict=True):
            whole = {name: tensor.contiguous() for name, tensor in shard.items()}
            save_file(whole, folder / file, metadata={"format": "pt"})
        if self.shards > 1:
            index = {name: file for file, shard in zip(names, files, strict=True) for name in shard}
            Folder(folder).json("model.safetensors.index.json", {"weight_map": index})
        return values


# Floating-point numbers of eight bits, with a scale for each block


def _pack_fp8(w: np.ndarray) -> Packed:
    import torch

    blocks = w.reshape(len(w) // BLOCK, BLOCK, -1, BLOCK)
    scales = np.abs(blocks).max(axis=(1, 3)) / np.float32(448) + np.float32(1e-12)  # (out / 16, in / 16)
    codes = (blocks / scales[:, None, :, None]).reshape(w.shape)
    return {"codes": torch.from_numpy(codes).to(torch.float8_e4m3fn).float().numpy(), "scales": scales}


def _fp8_values(packed: Packed) -> np.ndarray:
    return packed["codes"] * np.repeat(np.repeat(packed["scales"], BLOCK, 0), BLOCK, 1)


def _fp8_tensors(name: str, packed: Packed) -> dict[str, Any]:
    import torch

    codes = torch.from_numpy(packed["codes"].copy()).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": torch.from_numpy(packed["scales"].astype(np.float32).copy())}


# Integers of four bits, as GPTQ packs them: words along the inputs, a scale and a zero for each group


def _pack_gptq(w: np.ndarray) -> Packed:
    groups = w.reshape(len(w), -1, GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / 15 + 1e-6).astype(np.float16).astype(np.float32)  # (out, groups)
    zeros = np.clip(np.rint(-low / scales), 1, 15)
    codes = np.clip(np.rint(groups / scales[..., None] + zeros[..., None]), 0, 15)
    return {"codes": codes.reshape(w.shape), "scales": scales, "zeros": zeros}


def _gptq_values(packed: Packed) -> np.ndarray:
    codes = packed["codes"].reshape(*packed["scales"].shape, GROUP)
    scales = packed["scales"].astype(np.float16).astype(np.float32)
    return ((codes - packed["zeros"][..., None]) * scales[..., None]).reshape(len(codes), -1).astype(np.float32)


def _words(codes: np.ndarray) -> Any:
    """Integers of four bits to words of 32, the first in the lowest bits: (n, 8 m) -> (n, m)."""
    import torch

    shifted = codes.astype(np.uint32).reshape(len(codes), -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, axis=-1).view(np.int32).copy())


def _gptq_tensors(name: str, packed: Packed) -> dict[str, Any]:
    import torch

    module = name.removesuffix(".weight")
    scales = torch.from_numpy(packed["scales"].T.astype(np.float16).copy())
    inputs = packed["codes"].shape[1]
    return {
        f"{module}.qweight": _words(packed["codes"]).T, f"{module}.qzeros": _words(packed["zeros"].T - 1),
        f"{module}.scales": scales, f"{module}.g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }  # fmt: skip


# Integers of four bits, as MLX packs them: words along the inputs, a scale and the least value for each group


def _pack_mlx(w: np.ndarray) -> Packed:
    groups = w.reshape(len(w), -1, GROUP)
    low = groups.min(-1)
    scales = np.maximum((groups.max(-1) - low) / np.float32(15), np.float32(1e-7))  # (out, groups)
    codes = np.clip(np.rint((groups - low[..., None]) / scales[..., None]), 0, 15)
    return {"codes": codes.reshape(w.shape), "scales": scales, "zeros": low}


def _mlx_values(packed: Packed) -> np.ndarray:
    codes = packed["codes"].reshape(*packed["scales"].shape, GROUP).astype(np.float32)
    return (codes * packed["scales"][..., None] + packed["zeros"][..., None]).reshape(len(codes), -1)


def _mlx_tensors(name: str, packed: Packed) -> dict[str, Any]:
    import torch

    module = name.removesuffix(".weight")
    words = _words(packed["codes"]).numpy().view(np.uint32)
    of_groups = {"scales": packed["scales"], "biases": packed["zeros"]}
    return {f"{module}.weight": torch.from_numpy(words)} | {
        f"{module}.{part}": torch.from_numpy(w.astype(np.float32)) for part, w in of_groups.items()
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
MLX = {"group_size": GROUP, "bits": 4}
CONTAINERS = {
    each.name: each
    for each in (
        Container("F32"),
        Container("BF16, two shards", half=True, shards=2),
        Container("FP8 in blocks", _pack_fp8, _fp8_values, _fp8_tensors, FP8),
        Container("GPTQ, 4 bits", _pack_gptq, _gptq_values, _gptq_tensors, GPTQ),
        Container("MLX, 4 bits", _pack_mlx, _mlx_values, _mlx_tensors, MLX, "quantization"),
    )
}
