"""Quantised checkpoints: the stored tensors of one weight, presented as that weight in float32.

Tensors belong together by their names; config.json says what names do not. Unknown methods are
refused: integers read as weights would give plausible numbers. Every weight is (out, in), as a
Linear stores it before quantisation, though GPTQ and AWQ store it transposed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.packings import (
    auto_round,
    bitnet,
    bitsandbytes,
    compressed,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    quark,
    scaled,
    torchao,
)
from weightscope.checkpoint.packings.packed import Find
from weightscope.core.errors import CheckpointError

# Keys of config.json, or of its text_config.
SETTINGS = (mlx.KEY, "quantization_config", "compression_config")
# Ends of names that only quantised weights have.
PARTS = (".qweight", "_scale_inv", "_scale", ".absmax", ".SCB", ".weight_packed", ".scales", ".W_q")
MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mixed")
# Formats whose tensors say it; config.json need not.
SELF_EVIDENT: tuple[Find, ...] = (scaled.find, bitsandbytes.find, hqq.find)
# Finders of each quant_method of config.json, besides these.
METHODS: dict[str, tuple[Find, ...]] = {
    "fp8": (),
    "fbgemm_fp8": (),
    "gptq": (gptq.find_gptq,),
    "awq": (gptq.find_awq,),
    "bitsandbytes": (),
    "mxfp4": (mxfp4.find,),
    "compressed-tensors": (compressed.find,),
    **dict.fromkeys(MODELOPT, (modelopt.find,)),
    "mlx": (mlx.find,),
    "auto-round": (auto_round.find,),
    "hqq": (),
    "bitnet": (bitnet.find,),
    "torchao": (torchao.find,),
    "quark": (quark.find,),
}
CHECKS: dict[str, Callable[[Config], None]] = {  # settings that a method refuses
    "compressed-tensors": compressed.check,
    **dict.fromkeys(MODELOPT, modelopt.check),
    "mlx": mlx.check,
    "auto-round": auto_round.check,
    "bitnet": bitnet.check,
    "quark": quark.check,
}


def dequantised(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, Tensor]:
    """All tensors: quantised weights under the names they had before, the rest as stored."""
    method, settings = _settings(config)
    if method == "mlx":
        mlx.check_modules(stored, settings)
    finders = (*METHODS.get(method, ()), *SELF_EVIDENT, _refuse_packed)
    tensors: dict[str, Tensor] = dict(stored)
    for tensor in stored.values():
        weights = (find(tensor, stored, settings) for find in finders)
        weight = next((weight for weight in weights if weight is not None), None)
        if weight is not None:
            for part in weight.parts:
                tensors.pop(part.name, None)
            tensors[weight.name] = weight
    return tensors


def _settings(config: Config) -> tuple[str, Config]:
    """The method and its settings, wherever config.json has them; an unknown method is refused."""
    text = config.get("text_config")
    levels: tuple[Mapping[str, Any], ...] = (config, text if isinstance(text, dict) else {})
    described = [(key, level.get(key)) for key in SETTINGS for level in levels]
    stated: list[tuple[str, dict[str, Any]]]
    stated = [(key, level) for key, level in described if isinstance(level, dict) and level]
    if not stated:
        return "", Config({}, config.file)
    key, settings = stated[0]
    method = "mlx" if key == mlx.KEY else settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        problem = f"says quantised with '{str(method)[:40]}', which is not read"
        raise CheckpointError(f"{problem}; read are {', '.join(METHODS)}", file=config.file)
    checked = Config(settings, config.file)
    if method in CHECKS:
        CHECKS[method](checked)
    return method, checked


def _refuse_packed(tensor: StoredTensor, stored: Mapping[str, StoredTensor], _: Config) -> None:
    """Refuse packed integers that nothing else reads."""
    unsaid = "and config.json does not say"
    if tensor.name.endswith(".qweight"):
        raise tensor.refuse(f"is packed, {unsaid} whether by gptq or awq")
    if tensor.name.endswith(".weight_packed"):
        raise tensor.refuse(f"is packed, {unsaid} that compressed-tensors packed it")
    if tensor.dtype == "U32" and f"{tensor.name.removesuffix('.weight')}.scales" in stored:
        raise tensor.refuse(f"is packed as MLX does, {unsaid} how: it has no 'quantization'")
