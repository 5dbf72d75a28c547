"""NVIDIA's ModelOpt: NVFP4 with a scale of scales; FP8 with one scale, or per row or block."""

from collections.abc import Mapping
from typing import Any

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.fp4 import Fp4Tensor
from weightscope.checkpoint.packings.packed import DequantisedTensor, parts_of
from weightscope.checkpoint.packings.scaled import FP8, ScaledTensor
from weightscope.core.errors import CheckpointError

KEY = "quantization_config"  # key of the settings in config.json
SETTINGS_FILE = "hf_quant_config.json"  # the file that has them otherwise
ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4",
    "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8",
)  # fmt: skip
MIXED = "MIXED_PRECISION"
# Settings that an export leaves out, by the dtype and number of axes of a weight's scales.
UNSTATED: dict[tuple[str, int], dict[str, Any]] = {
    ("U8", 2): {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},  # MXFP8
    # FP8_PB_WO (vLLM's reader takes no other size, either)
    ("F32", 4): {"weight_block_size": [128, 128]},
}


def settings_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in hf_quant_config.json, as config.json would have them."""
    quantization = stated.get("quantization")
    return {"quant_method": "modelopt", **quantization} if isinstance(quantization, dict) else {}


def check(settings: Config) -> None:
    """Refuse other algorithms, which scale activations or pack integers in other ways."""
    algorithm, layers = settings.get("quant_algo"), settings.inside("quantized_layers")
    named = [algorithm]
    if algorithm == MIXED:
        named = [layers.inside(name).get("quant_algo") for name in layers]
    for name in named:
        if name is not None and str(name).upper() not in ALGORITHMS:
            problem = f"says quantised by ModelOpt with '{str(name)[:40]}', which is not read"
            known = ", ".join((*ALGORITHMS, MIXED))
            raise CheckpointError(f"{problem}; read are {known}", file=settings.file)


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is FP8, or two FP4 values in a byte."""
    module, _, last = tensor.name.rpartition(".")
    if last != "weight" or tensor.dtype not in ("U8", *FP8):
        return None
    if f"{module}.pre_quant_scale" in stored:
        problem = "has a pre_quant_scale: its inputs are scaled before it; that is not read"
        raise tensor.refuse(problem)
    named = parts_of(tensor.name, stored, "scale", "scale_2", joint="_")
    if tensor.dtype == "U8":
        by_key = {{"scale_2": "factor"}.get(key, key): part for key, part in named.items()}
        return Fp4Tensor(tensor.name, {"weight": tensor, **by_key}, settings)
    if "scale" not in named:
        raise tensor.refuse(f"is {tensor.dtype} and has no weight_scale; ModelOpt's FP8 needs one")
    scale = named["scale"]
    unstated = UNSTATED.get((scale.dtype, len(scale.shape)), {})
    known = Config({**settings, **unstated}, settings.file)
    return ScaledTensor(tensor.name, {"weight": tensor, "scale": scale}, known)
