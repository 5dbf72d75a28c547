"""Writes golden/packings: tiny Llamas as AutoRound 0.16.1, HQQ 0.2.8, torchao 0.18 and transformers 5.23 pack them.

Run it where auto-round, hqq and torchao are installed: python -m tests.checkpoint.golden.make_packings FOLDER

In expected.json is the SHA-256 of the float32 values of each packed tensor, as the writer's own code dequantises it with
its scales as float32: AutoRound's layers applied to the identity, HQQ's Quantizer.dequantize, torchao's dequantize, and
transformers' unpack_weights with BitNet's scale.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
from hqq.models.hf.base import AutoHQQHFModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerTensor,
)
from transformers import BitNetQuantConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TorchAoConfig
from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear, unpack_weights

Digests = dict[str, str]
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
          "mlp.down_proj")  # fmt: skip


def digest(w: torch.Tensor) -> str:
    """Of float32 values; products with the identity have no -0, so that no zero has a sign here."""
    return hashlib.sha256((w.detach().to(torch.float32).contiguous() + 0).numpy().tobytes()).hexdigest()


def llama(dtype: torch.dtype = torch.float32, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


# AutoRound


def auto_round(packing: str, bits: tuple[int, ...], **options: Any) -> Callable[[Path], Digests]:
    """Each linear layer has its own number of bits."""

    def write(folder: Path) -> Digests:
        words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), eos_token="</s>"
        )
        layers = {f"model.layers.0.{name}": {"bits": n} for name, n in zip(LINEAR, bits, strict=True)}
        layers = {name: layer for name, layer in layers.items() if layer["bits"] != 4}
        rounder = AutoRound(
            llama(), tokenizer, bits=4, iters=0, disable_opt_rtn=True, device_map="cpu", layer_config=layers, **options
        )
        rounder.quantize_and_save(str(folder), format=packing)
        written = next(folder.rglob("model.safetensors")).parent
        for name in ("model.safetensors", "config.json"):
            if written != folder:
                shutil.move(written / name, folder / name)
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        stored, digests = load_file(folder / "model.safetensors"), {}
        for name in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
            parts = {key: stored[f"{name}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx") if f"{name}.{key}" in stored}
            digests[f"{name}.weight"] = digest(_of_auto_round(parts, settings, options["group_size"]))
        return digests

    return write


def _of_auto_round(parts: dict[str, torch.Tensor], settings: dict[str, Any], size: int) -> torch.Tensor:
    """The weight of one of AutoRound's own layers."""
    packing = settings.get("packing_format") or {"gptq": "auto_round:auto_gptq", "awq": "auto_round:auto_awq"}[settings["quant_method"]]
    n_groups, outputs = parts["scales"].shape
    bits = parts["qzeros"].shape[1] * 32 // outputs
    is_awq = "awq" in packing
    inputs = parts["qweight"].shape[0] if is_awq else parts["qweight"].shape[0] * 32 // bits
    if is_awq:
        from auto_round.export.export_to_awq.utils import dequantize_gemm

        size = inputs if size == -1 else size
        return dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), bits, size).T
    packing = packing.removesuffix(":gptqmodel")  # the same with g_idx
    layer = dynamic_import_quant_linear_for_packing(packing, bits, size, settings["sym"])(
        bits, size, inputs, outputs, bias=False, weight_dtype=torch.float32
    )
    for key in ("qweight", "qzeros", "scales"):  # g_idx is in order; its branch wants as many outputs as inputs
        part = parts[key]
        setattr(layer, key, part.float() if key == "scales" else part)
    return layer(torch.eye(inputs)).T


# HQQ


def hqq(dtype: torch.dtype, **configs: dict[str, Any]) -> Callable[[Path], Digests]:
    """Each linear layer has its own settings."""

    def write(folder: Path) -> Digests:
        model = llama(dtype, tie_word_embeddings=False)  # its writer saves no shared tensors
        settings = {name.replace("__", "."): BaseQuantizeConfig(**options) for name, options in configs.items()}
        AutoHQQHFModel.quantize_model(model, settings, compute_dtype=dtype, device="cpu")
        AutoHQQHFModel.save_to_safetensors(model, str(folder))
        return {
            f"{name}.weight": digest(Quantizer.dequantize(layer.W_q, _in_float32(layer.meta)))
            for name, layer in model.named_modules()
            if isinstance(layer, HQQLinear)
        }

    return write


def _in_float32(meta: dict[str, Any]) -> dict[str, Any]:
    floats = {key: meta[key].float() for key in ("scale", "zero")}
    return {**meta, **floats, "compute_dtype": torch.float32}


# BitNet


def bitnet(kind: str, scale: float) -> Callable[[Path], Digests]:
    def write(folder: Path) -> Digests:
        model = llama(torch.bfloat16)
        settings = BitNetQuantConfig(modules_to_not_convert=["lm_head"], linear_class=kind, quantization_mode="offline")
        packed = BitNetQuantConfig(modules_to_not_convert=["lm_head"])  # whose layers hold packed weights
        replace_with_bitnet_linear(model, ["lm_head"], packed)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        digests = {}
        for name, layer in model.named_modules():
            if isinstance(layer, BitLinear):
                ternary = torch.randint(-1, 2, (layer.out_features, layer.in_features))
                layer.weight.copy_(pack_weights(ternary.clone()))
                layer.weight_scale.fill_(scale)
                unpacked, by = unpack_weights(layer.weight, torch.float32), layer.weight_scale.float()
                digests[f"{name}.weight"] = digest(unpacked * by if kind == "autobitlinear" else unpacked / by)
        model.config.quantization_config = settings
        model.save_pretrained(folder)
        return digests

    return write


# torchao


def torchao(folder: Path) -> Digests:
    int4, int2 = torch.int4, torch.int2
    configs = (
        Int8WeightOnlyConfig(), Int8WeightOnlyConfig(granularity=PerGroup(32)), Int8WeightOnlyConfig(granularity=PerTensor()),
        Float8WeightOnlyConfig(), Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
        IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC),
        IntxWeightOnlyConfig(weight_dtype=int2, granularity=PerAxis(0)),
    )  # fmt: skip
    by_name = {f"model.layers.0.{name}": config for name, config in zip(LINEAR, configs, strict=True)}
    with tempfile.TemporaryDirectory() as original:
        llama(torch.bfloat16).save_pretrained(original)
        config = TorchAoConfig(FqnToConfig(by_name))
        model = LlamaForCausalLM.from_pretrained(original, quantization_config=config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        restored, _ = unflatten_tensor_state_dict(load_file(folder / "model.safetensors"), file.metadata())
    digests = {}
    for name, tensor in restored.items():
        if hasattr(tensor, "dequantize") and type(tensor) is not torch.Tensor:
            if hasattr(tensor, "target_dtype"):  # its dequantize has no argument for the type
                tensor.scale, dtype = tensor.scale.float(), torch.float32
                digests[name] = digest(_intx(tensor, dtype))
            else:
                digests[name] = digest(tensor.dequantize(torch.float32))
    return digests


def _intx(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    from torchao.quantization.quant_primitives import dequantize_affine

    return dequantize_affine(
        tensor.qdata, tensor.block_size, tensor.scale, tensor.zero_point, torch.int8, output_dtype=dtype
    )


TAGS = ("self_attn__q_proj", "self_attn__k_proj", "self_attn__v_proj", "self_attn__o_proj", "mlp__gate_proj",
        "mlp__up_proj", "mlp__down_proj")  # fmt: skip
ALL = (2, 3, 4, 5, 6, 7, 8)
MODELS: dict[str, Callable[[Path], Digests]] = {
    "auto_round_symmetric": auto_round("auto_round", ALL, group_size=32, sym=True),
    "auto_round_asymmetric": auto_round("auto_round", ALL, group_size=32, sym=False),
    "auto_round_gptq_zeros": auto_round("auto_round:auto_gptq", ALL, group_size=-1, sym=False),
    "auto_round_gptqmodel": auto_round("auto_round:gptqmodel", (4, 4, 8, 4, 2, 4, 4), group_size=32, sym=False),
    "auto_round_awq": auto_round("auto_round:auto_awq", (4, 5, 6, 7, 4, 4, 4), group_size=32, sym=False),
    "auto_round_as_gptq": auto_round("auto_gptq", (4,) * 7, group_size=32, sym=True),
    "auto_round_as_awq": auto_round("auto_awq", (4,) * 7, group_size=32, sym=False),
    "hqq_rows": hqq(torch.float16, **{
        tag: {"nbits": bits, "group_size": 64, "axis": 1} for tag, bits in zip(TAGS, (8, 6, 5, 4, 3, 2, 1), strict=True)
    }),
    "hqq_columns": hqq(torch.bfloat16, **{
        tag: {"nbits": bits, "group_size": 32, "axis": 0} for tag, bits in zip(TAGS, (8, 6, 1.58, 4, 3, 2, 1), strict=True)
    }),
    "hqq_as_float": hqq(torch.float32, **{
        tag: {"nbits": bits, "group_size": size, "axis": axis, "view_as_float": True}
        for tag, bits, size, axis in zip(TAGS, (8, 4, 3, 2, 1, 4, 8), (64, 32, 32, 64, 64, None, None), (1, 0, 1, 1, 1, 1, 0), strict=True)
    }),
    "bitnet": bitnet("bitlinear", 31.25),
    "bitnet_auto": bitnet("autobitlinear", 0.0373),
    "torchao": torchao,
}  # fmt: skip


def main(folder: Path, names: list[str]) -> None:
    for name, write in MODELS.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as inner:
            digests = write(Path(inner, "written"))
            (folder / name).mkdir(parents=True, exist_ok=True)
            for file in ("model.safetensors", "config.json"):
                shutil.copy(Path(inner, "written", file), folder / name)
            (folder / name / "expected.json").write_text(json.dumps(dict(sorted(digests.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
