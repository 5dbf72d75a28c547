"""AMD's Quark: OCP's MXFP4 and MXFP6 in blocks of 32; FP8 with one scale, or one per row."""

from collections.abc import Iterator, Mapping
from typing import Any

from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings.fp4 import MX_BLOCK, Fp4Tensor, Fp6E3m2Tensor
from weightscope.checkpoint.packings.packed import DequantisedTensor, parts_of
from weightscope.core.errors import CheckpointError

SECTIONS = ("layer_quant_config", "layer_type_quant_config")  # settings by layer
FLOAT8, FLOAT6 = ("fp8_e4m3",), ("fp6_e2m3", "fp6_e3m2")
IN_BLOCKS = ("fp4", *FLOAT6)


def check(settings: Config) -> None:
    """Refuse other numbers and scales, and both kinds of FP6 at once."""
    stated = [*_stated(settings)]
    for weight in stated:
        if not _is_read(weight):
            named = weight.get("dtype") if isinstance(weight, dict) else "several steps"
            problem = f"says quantised by Quark as '{str(named)[:40]}' with {_scales(weight)}"
            known = f"{', '.join(IN_BLOCKS)} in blocks of {MX_BLOCK} with e8m0 scales"
            raise CheckpointError(
                f"{problem}, which is not read; read are {known}, and fp8_e4m3 by tensor or row",
                file=settings.file,
            )
    if {*FLOAT6} <= {weight["dtype"] for weight in stated}:
        problem = f"says quantised by Quark as {' and '.join(FLOAT6)}"
        raise CheckpointError(f"{problem}; one of them in a model is read", file=settings.file)


def _stated(settings: Config) -> Iterator[Any]:
    """Settings of weights, of the model and of layers."""
    levels = [settings.get("global_quant_config")]
    for section in SECTIONS:
        levels += settings.inside(section).values()
    for level in levels:
        if isinstance(level, dict) and level.get("weight") is not None:
            yield level["weight"]


def _scales(weight: Any) -> str:
    """Scales in words."""
    if not isinstance(weight, dict):
        return "scales of their own"
    kind, size = str(weight.get("scale_format"))[:20], str(weight.get("group_size"))[:20]
    return f"{str(weight.get('qscheme'))[:20]} scales (format {kind}, group size {size})"


def _is_read(weight: Any) -> bool:
    if not isinstance(weight, dict):
        return False
    dtype, scheme, axis = (weight.get(key) for key in ("dtype", "qscheme", "ch_axis"))
    if dtype in IN_BLOCKS:
        scales = weight.get("scale_format"), weight.get("group_size")
        return scheme == "per_group" and axis in (-1, 1) and scales == ("e8m0", MX_BLOCK)
    return dtype in FLOAT8 and (scheme == "per_tensor" or (scheme == "per_channel" and axis == 0))


def find(
    tensor: StoredTensor, stored: Mapping[str, StoredTensor], settings: Config
) -> DequantisedTensor | None:
    """The weight of this tensor, if it is FP4 or FP6 in bytes; FP8 with a scale says it itself."""
    if not tensor.name.endswith(".weight") or tensor.dtype != "U8":
        return None
    by_key = {"weight": tensor, **parts_of(tensor.name, stored, "scale", joint="_")}
    stated = {weight["dtype"] for weight in _stated(settings)}
    weight = Fp4Tensor(tensor.name, by_key, settings)
    if not any(dtype.startswith(f"fp{weight.bits}") for dtype in stated):
        named = " and ".join(sorted(stated)) or "nothing"
        raise tensor.refuse(f"has {weight.bits} bits a value; config.json says {named}")
    is_e3m2 = weight.bits == 6 and "fp6_e3m2" in stated
    return Fp6E3m2Tensor(tensor.name, by_key, settings) if is_e3m2 else weight
