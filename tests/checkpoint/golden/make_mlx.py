"""Writes golden/mlx: models as mlx-lm 0.32.2 with mlx 0.32.4 converts them, and what mlx makes of their tensors.

Run it where mlx[cpu], mlx-lm, torch and transformers 5.23 are installed:
python -m tests.checkpoint.golden.make_mlx FOLDER

`options` holds one small matrix in every mode, with every number of bits and group size. The other folders are tiny
random models that `mlx_lm.convert` read from safetensors files of transformers. In expected.json is the SHA-256 of the
float32 values of each packed tensor: mlx.core.dequantize of the stored words with scales and biases as float32. In
original.json are the config and the shapes of the model that was converted.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.models.switch_layers import SwitchLinear
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
OF_LLAMA = {  # as the GGUF files of tests/architectures/test_gguf.py
    "vocab_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
OLDER = {"rope_theta": 10000.0, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixed": ("llama", OF_LLAMA, {"q_group_size": 32, "quant_predicate": "mixed_3_6"}),
    "tied": ("qwen3", {"tie_word_embeddings": True}, {"q_mode": "mxfp4"}),
    "experts": ("qwen3_moe", EXPERTS, {"q_group_size": 64, "q_bits": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"q_mode": "nvfp4"}),
    "fused": ("phi3", {}, {"q_mode": "mxfp8"}),
}  # folder: type, what its config has besides SIZES, options of mlx_lm.convert
AFFINE = [(bits, size) for bits in (1, 2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]


def expected(weights: dict[str, mx.array], settings: dict[str, Any]) -> dict[str, str]:
    """The digest of every packed tensor as mlx dequantises it."""
    digests = {}
    for name, packed in weights.items():
        module = name.removesuffix(".weight")
        if packed.dtype != mx.uint32 or module == name:
            continue
        own = settings.get(module, settings)
        size, bits, mode = own["group_size"], own["bits"], own.get("mode", "affine")
        scales, biases = weights[f"{module}.scales"], weights.get(f"{module}.biases")
        if mode == "affine":
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        shared = weights.get(f"{module}.global_scale")
        parts = [(packed, scales)] if shared is None else zip(packed, scales, strict=True)
        scale_of = [None] if shared is None else list(shared)
        w = [
            mx.dequantize(q, s, biases, size, bits, mode, global_scale=g, dtype=mx.float32)
            for (q, s), g in zip(parts, scale_of, strict=True)
        ]
        digests[name] = hashlib.sha256(np.concatenate([np.array(part).reshape(-1) for part in w]).tobytes()).hexdigest()
    return digests


def write_options(folder: Path) -> None:
    """One matrix in every mode, as layers of mlx."""
    random = np.random.default_rng(0)
    model, settings = nn.Module(), {}
    for bits, size in AFFINE:
        for dtype in (mx.bfloat16, *([mx.float16] if size == 64 else []), *([mx.float32] if size == 32 else [])):
            name = f"affine_{bits}_{size}_{str(dtype).rpartition('.')[2]}"
            settings[name] = {"group_size": size, "bits": bits}, dtype
    for mode, bits, size in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)):
        settings[mode] = {"group_size": size, "bits": bits, "mode": mode}, mx.bfloat16
    for name, (_, dtype) in settings.items():
        layer = nn.Linear(256, 2, bias=name == "mxfp4")
        layer.weight = mx.array(random.standard_normal((2, 256)).astype(np.float32)).astype(dtype)
        setattr(model, name, layer)
    overrides = {name: packing for name, (packing, _) in settings.items()}
    nn.quantize(model, class_predicate=lambda path, layer: dict(overrides[path]))
    experts = SwitchLinear(64, 4, 3, bias=False)
    experts.weight = mx.array(random.standard_normal((3, 4, 64)).astype(np.float32))
    overrides["experts"] = {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}
    model.experts = experts.to_quantized(**overrides["experts"])
    weights = dict(tree_flatten(model.parameters()))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    written = {"quantization": {"group_size": 64, "bits": 4, "mode": "affine", **overrides}}
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    (folder / "expected.json").write_text(json.dumps(expected(weights, written["quantization"]), indent=1))


def write_model(folder: Path, kind: str, more: dict[str, Any], options: dict[str, Any]) -> None:
    """A tiny model of transformers, converted."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as inner:
        original, converted = Path(inner, "original"), Path(inner, "converted")
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **more}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.to(torch.bfloat16).save_pretrained(original)
        config = original / "config.json"  # mlx-lm needs some keys as transformers wrote them before its version 5
        config.write_text(json.dumps({**json.loads(config.read_text()), **OLDER, **more}))
        words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "a"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(original)
        convert(str(original), str(converted), quantize=True, **options)
        folder.mkdir(parents=True)
        with safe_open(original / "model.safetensors", "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
        for name in ("model.safetensors", "config.json"):
            shutil.copy(converted / name, folder)
        written = {"config": json.loads(config.read_text()), "shapes": shapes}
        (folder / "original.json").write_text(json.dumps(written, indent=1))
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    digests = expected(mx.load(str(folder / "model.safetensors")), settings)
    (folder / "expected.json").write_text(json.dumps(digests, indent=1))


def main(folder: Path) -> None:
    mx.set_default_device(mx.cpu)
    write_options(folder / "options")
    for name, (kind, more, options) in MODELS.items():
        write_model(folder / name, kind, more, options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
