"""Copies packed by compressed-tensors, llm-compressor, ModelOpt, AutoRound and HQQ, each in a Python that has it.

The environment variable of a writer names its Python (`Packer.python`); a writer without one is left out. A script gets
SOURCE, a list of options as JSON and OUT, and writes OUT/0, OUT/1 ... Nothing runs what these write: each rests on
its writer, whose own unpacking tests/checkpoint compares with ours.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analyses.experiments.faithful_sources import Made, Source
from weightscope.pairs.same.judge import QUANTISED


class Packer(NamedTuple):
    """A writer and its settings."""

    name: str
    python: str  # environment variable with the path of its Python
    packages: tuple[str, ...]  # whose versions are noted
    code: str
    options: Sequence[Mapping[str, Any]]


BEGIN = """
import json, shutil, sys
from pathlib import Path
import torch, transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
torch.manual_seed(0)
source, options, made = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
config = AutoConfig.from_pretrained(source)
kind = getattr(transformers, config.architectures[0])

def load(dtype="float32"):
    return kind.from_pretrained(source, dtype=getattr(torch, dtype)).eval()

def tokenizer():
    from tokenizers import Tokenizer, models
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32)}, "t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2")
"""

END = """
made.mkdir(parents=True, exist_ok=True)
for i, option in enumerate(options):
    try:
        make(made / str(i), option)
    except Exception as error:  # the writer does not know the architecture, or a layer of it
        print(f"FAILS with {option}: {type(error).__name__}: {error}"[:200].replace(chr(10), " "))
"""

COMPRESSED_TENSORS = """
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (QuantizationArgs, QuantizationConfig, QuantizationScheme,
                                             QuantizationStatus, apply_quantization_config)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

def extremes(w, args):  # of each scale's share
    if args.strategy == "tensor":
        return w.min().reshape(1), w.max().reshape(1)
    if args.strategy == "channel":
        return w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        w = w.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        return w.amin((1, 3)), w.amax((1, 3))
    w = w.unflatten(1, (-1, args.group_size))
    return w.amin(2), w.amax(2)

def make(out, option):
    model = load(option.pop("dtype", "float32"))
    if "scale_dtype" in option:
        option |= {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**option))
    settings = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*gate$"],
                                  quantization_status=QuantizationStatus.INITIALIZED)
    apply_quantization_config(model, settings)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        args, w = module.quantization_scheme.weights, module.weight.data
        given = {}
        if args.strategy == "tensor_group":
            given["global_scale"] = generate_gparam(w.min(), w.max())
            module.weight_global_scale.data.copy_(given["global_scale"])
        scale, zero = calculate_qparams(*extremes(w, args), args, **given)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if getattr(module, "weight_zero_point", None) is not None:
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
"""

LLM_COMPRESSOR = """
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

def make(out, option):
    source_of_it = made / "source"
    load().save_pretrained(source_of_it)
    words = tokenizer()
    words.save_pretrained(source_of_it)
    model = kind.from_pretrained(source_of_it).eval()
    modifier = GPTQModifier if option.pop("gptq", False) else QuantizationModifier
    what = ({"scheme": option["scheme"], "targets": "Linear"} if "scheme" in option else
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": option}}})
    data = {}
    if modifier is GPTQModifier:
        texts = torch.randint(0, 32, (64, 32))
        rows = {"input_ids": texts.tolist(), "attention_mask": torch.ones_like(texts).tolist()}
        data = {"dataset": Dataset.from_dict(rows), "num_calibration_samples": 64, "max_seq_length": 32}
    oneshot(model=model, recipe=modifier(ignore=["lm_head", "re:.*gate$"], **what), processor=words, **data)
    model.save_pretrained(out, save_compressed=True)
    shutil.rmtree(source_of_it)
"""

MODEL_OPT = """
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint

def make(out, option):
    inputs = torch.arange(16)[None]
    quantised = mtq.quantize(load(option["dtype"]), getattr(mtq, option["config"]), lambda model: model(inputs))
    export_hf_checkpoint(quantised, export_dir=out)
"""

AUTO_ROUND = """
from auto_round import AutoRound

texts = [{"input_ids": torch.randint(0, 32, (4, 32)), "attention_mask": torch.ones(4, 32, dtype=torch.long)}
         for _ in range(4)]

def make(out, option):
    packing, tuned = option.pop("packing"), {"batch_size": 4, "nsamples": 16, "seqlen": 32, "dataset": texts}
    rounder = AutoRound(load(), tokenizer(), disable_opt_rtn=option.pop("rtn"), device_map="cpu", **tuned, **option)
    rounder.quantize_and_save(str(out / "all"), format=packing)
    written = next((out / "all").rglob("model.safetensors")).parent
    for name in ("model.safetensors", "config.json"):
        shutil.move(written / name, out / name)
"""

HQQ = """
from hqq.core.quantize import BaseQuantizeConfig
from hqq.models.hf.base import AutoHQQHFModel

def make(out, option):
    model = load()
    AutoHQQHFModel.quantize_model(model, BaseQuantizeConfig(**option), compute_dtype=torch.float32, device="cpu")
    AutoHQQHFModel.save_to_safetensors(model, str(out))
"""

INT4, INT8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
FLOAT8, FLOAT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
GROUP = {"strategy": "group", "group_size": 64}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "uint8"}
PACKERS = (
    Packer("compressed-tensors", "COMPRESSED_TENSORS_PYTHON", ("compressed-tensors",), COMPRESSED_TENSORS, (
        INT4 | GROUP, INT4 | GROUP | {"symmetric": False}, INT4 | {"strategy": "channel"},
        INT4 | {"strategy": "tensor"}, INT4 | GROUP | {"dtype": "bfloat16"},
        INT8 | {"strategy": "channel"}, INT8 | GROUP, {"num_bits": 3, "type": "int"} | GROUP,
        {"num_bits": 2, "type": "int"} | GROUP | {"symmetric": False},
        FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "tensor"}, FLOAT8 | GROUP,
        FLOAT8 | {"strategy": "block", "block_structure": [64, 64]},
        FLOAT4 | {"strategy": "tensor_group", "group_size": 16},
        FLOAT4 | MX, FLOAT8 | MX,
    )),
    Packer("llm-compressor", "COMPRESSED_TENSORS_PYTHON", ("llmcompressor",), LLM_COMPRESSOR, (
        {"scheme": "W8A8"}, {"scheme": "FP8_DYNAMIC"}, {"scheme": "NVFP4A16"}, {"scheme": "MXFP4A16"},
        {"scheme": "W4A16"},
        INT4 | GROUP | {"gptq": True}, INT4 | GROUP | {"gptq": True, "symmetric": False},
        INT4 | GROUP | {"gptq": True, "actorder": "weight"}, INT4 | {"strategy": "channel", "gptq": True},
    )),
    Packer("ModelOpt", "MODELOPT_PYTHON", ("nvidia-modelopt",), MODEL_OPT, tuple(
        {"config": config, "dtype": dtype} for config, dtype in (
            ("NVFP4_DEFAULT_CFG", "bfloat16"), ("NVFP4_DEFAULT_CFG", "float32"), ("W4A16_NVFP4_CFG", "float32"),
            ("NVFP4_MLP_ONLY_CFG", "bfloat16"), ("FP8_DEFAULT_CFG", "bfloat16"), ("FP8_DEFAULT_CFG", "float32"),
            ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "float32"), ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "float32"),
            ("MXFP8_DEFAULT_CFG", "bfloat16"),
        )
    )),
    Packer("AutoRound", "AUTO_ROUND_PYTHON", ("auto-round",), AUTO_ROUND, (
        *({"packing": packing, "bits": bits, "group_size": 64, "sym": sym, "rtn": True, "iters": 0}
          for packing, bits, sym in (("auto_round", 4, True), ("auto_round", 3, False), ("auto_round", 8, True),
                                     ("auto_gptq", 4, True), ("auto_gptq", 8, True), ("auto_awq", 4, False),
                                     ("auto_round:gptqmodel", 4, False))),
        *({"packing": packing, "bits": bits, "group_size": 64, "sym": sym, "rtn": False, "iters": iters}
          for packing, bits, sym, iters in (("auto_gptq", 4, True, 0), ("auto_round", 2, False, 0),
                                            ("auto_round", 4, True, 50), ("auto_awq", 4, False, 50))),
    )),
    Packer("HQQ", "HQQ_PYTHON", ("hqq",), HQQ, tuple(
        {"nbits": bits, "group_size": size, "axis": axis}
        for bits, size, axis in ((8, 64, 1), (4, 64, 1), (3, 64, 1), (2, 64, 1), (4, 64, 0), (4, None, 1))
    )),
)  # fmt: skip
VERSIONS = "import sys; from importlib.metadata import version; print(', '.join(map(version, sys.argv[1:])))"


def packed(packer: Packer, source: Source, work: Path) -> Iterator[Made]:
    """What one writer makes of a source with each of its options."""
    python = os.environ.get(packer.python)
    if not python or source.model is None or not source.name.startswith("wide"):
        return
    out = work.parent / f"{packer.name}-made"
    command = [python, "-c", BEGIN + packer.code + END, str(source.folder), json.dumps(packer.options), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("FAILS")]
    refusals += [(done.stderr.splitlines() or ["fails"])[-1]] if done.returncode else []
    for refusal in refusals:
        print(f"{source.name}, {packer.name}: {refusal}")
    command = [python, "-c", VERSIONS, *packer.packages]
    about = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for i, option in enumerate(packer.options):
        if list((out / str(i)).glob("*.safetensors")):
            how = ", ".join(f"{key} {value}" for key, value in option.items())
            yield Made(packer.name, about, "safetensors", how, QUANTISED, out / str(i), None, "nothing runs it here")
    shutil.rmtree(out, ignore_errors=True)
