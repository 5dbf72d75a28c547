"""Faithful conversions of a checkpoint, by the writers that people use: `WRITERS`."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import weightscope as ws
from analyses.experiments import faithful_gguf
from analyses.experiments.faithful_packings import PACKERS, packed
from analyses.experiments.faithful_sources import Made, Source, Writer
from weightscope.core.files import Folder
from weightscope.pairs.same import QUANTISED, ROUNDED, SAME_VALUES

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
SMALL_SHARDS = "40KB"


def _rounded(*dtypes: torch.dtype) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Round a weight to each of these in turn."""

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        for dtype in dtypes:
            weight = weight.to(dtype)
        return weight.float()

    return change


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def _write(weights: dict[str, torch.Tensor], folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    Folder(folder).text("config.json", json.dumps(config, indent=1))
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def _both(source: Source, folder: Path, dtypes: Mapping[str, torch.dtype]) -> tuple[Any, Any]:
    """The source's model with its weights rounded in memory, and the copy."""
    return source.with_weights(lambda name, weight: weight.to(dtypes[name]).float()), source.load(folder)


def transformers_saves(source: Source, work: Path) -> Iterator[Made]:
    """save_pretrained after from_pretrained: each dtype, in one file and in shards."""
    if source.model is None:
        return
    kind = type(source.model)
    about = "transformers", version("transformers")
    folder = work / "copy"
    for name, dtype in DTYPES.items():
        expected = ROUNDED if dtype.itemsize < 4 else SAME_VALUES
        for shards in (None, SMALL_SHARDS):
            if (name, shards) == ("float64", SMALL_SHARDS):
                continue
            cast = kind.from_pretrained(source.folder, dtype=dtype)
            cast.save_pretrained(folder, max_shard_size=shards or "5GB")
            # Some types keep some of their weights in float32.
            dtypes = {name: parameter.dtype for name, parameter in cast.state_dict().items()}
            how = f"{name}, {'shards of 40 kB' if shards else 'one file'}"
            yield Made(*about, "safetensors", how, expected, folder, partial(_both, source, folder, dtypes))
    if source.gguf is not None:
        original = partial(ws.open_model, source.gguf)
        yield Made(*about, "safetensors", "float32 of GGUF", SAME_VALUES, source.folder,
                   lambda: (source.model, source.load(source.folder)), original=original)  # fmt: skip
    base = getattr(source.model, source.model.base_model_prefix, None)
    inner = {id(parameter) for parameter in base.parameters()} if base is not None else set()
    if base is not source.model and inner == {id(parameter) for parameter in source.model.parameters()}:
        base.save_pretrained(folder)
        yield Made(*about, "safetensors", "the base model, of tied embeddings", SAME_VALUES, folder,
                   lambda: (source.model, source.load(folder)))  # fmt: skip


def safetensors_copies(source: Source, work: Path) -> Iterator[Made]:
    """Files rewritten tensor by tensor, as conversion scripts do."""
    about = "safetensors", version("safetensors"), "safetensors"
    why = "" if source.model is not None else "weights are missing: nothing runs it"
    config = json.loads((source.folder / "config.json").read_text())
    folder = work / "copy"

    def cast(*dtypes: torch.dtype) -> Path:
        weights = {}
        for key, value in _weights(source.folder).items():
            for dtype in dtypes if value.is_floating_point() else ():
                value = value.to(dtype)
            weights[key] = value
        return _write(weights, folder, config)

    def runs(*dtypes: torch.dtype) -> Callable[[], tuple[Any, Any]] | None:
        def both() -> tuple[Any, Any]:
            read = _write({k: v.float() if v.is_floating_point() else v for k, v in _weights(folder).items()},
                          work / "read", config)  # fmt: skip
            return source.with_weights(_rounded(*dtypes)), source.load(read)

        return both if source.model is not None else None

    shutil.copytree(source.folder, folder)
    yield Made(*about, "the files copied", "same bytes", folder, runs(), why)
    _write(dict(reversed(_weights(source.folder).items())), folder, config)
    yield Made(*about, "written again, tensors in reverse order", SAME_VALUES, folder, runs(), why)
    for name, dtype in FLOAT8.items():
        cast(dtype)
        yield Made(*about, f"{name} without scales", ROUNDED, folder, runs(dtype), why)
    cast(torch.bfloat16, torch.float16)
    yield Made(*about, "float16 of bfloat16", ROUNDED, folder, runs(torch.bfloat16, torch.float16), why)
    if source.model is not None and source.is_tied:
        weights = _weights(source.folder)
        names = {id(weight): name for name, weight in source.model.state_dict(keep_vars=True).items()}
        head = next(
            name for name, module in source.model.named_modules() if module is source.model.get_output_embeddings()
        )
        tokens = names[id(source.model.get_input_embeddings().weight)]
        stored = next((name for name in (tokens, f"{head}.weight") if name in weights), None)
        if stored is not None:
            weights |= {f"{head}.weight": weights[stored].clone(), tokens: weights[stored].clone()}
            _write(weights, folder, config)
            yield Made(*about, "the tied head written out", SAME_VALUES, folder, runs(), why)
            _write(weights, folder, config | {"tie_word_embeddings": False})
            yield Made(*about, "the tied head written out and untied in config.json", SAME_VALUES, folder, runs(), why)


def peft_merges(source: Source, work: Path) -> Iterator[Made]:
    """A LoRA adapter merged by PEFT, against base and adapter: each kind of weight alone and all, and each dtype."""
    try:
        import peft
    except ImportError:
        return
    if source.model is None:
        return
    modules = {name.rpartition(".")[2]: module for name, module in source.model.named_modules() if ".0." in name}
    linear = [name for name, module in modules.items() if type(module).__name__ in ("Linear", "Conv1D")]
    for targets, base in [*(([name], "float32") for name in linear), *((linear, dtype) for dtype in DTYPES)]:
        if base == "float64" or not linear:
            continue
        torch.manual_seed(0)
        kind = type(source.model)
        kind.from_pretrained(source.folder, dtype=DTYPES[base]).save_pretrained(work / "base")
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
        try:
            model = peft.get_peft_model(kind.from_pretrained(work / "base", dtype=DTYPES[base]), settings)
        except ValueError:  # in mixtures PEFT takes gate and up only together, whatever they belong to
            continue
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        model.save_pretrained(work / "adapter")
        merged = model.merge_and_unload()
        merged.save_pretrained(work / "copy")
        original = partial(ws.open_model, work / "adapter", base=str(work / "base"))
        how = f"merged LoRA of {', '.join(targets)}, base in {base}"
        runs = partial(_adapted, source, work, merged if base != "float32" else None)
        yield Made("peft", version("peft"), "safetensors", how, ROUNDED, work / "copy", runs, original=original)


def _adapted(source: Source, work: Path, merged: Any) -> tuple[Any, Any]:
    """The base with its adapter, merged already where the base has fewer bits; and the copy."""
    import peft

    if merged is None:
        merged = peft.PeftModel.from_pretrained(source.load(work / "base"), work / "adapter")
    return merged.float().eval(), source.load(work / "copy")


MLX = """
import json, shutil, sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
source, options, inputs = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[4])

def as_quantised(weight, bits, group_size, mode="affine", dtype=None):  # the weight that mlx computes with, in float32
    if weight.ndim < 2 or weight.shape[-1] % group_size:
        return weight
    packed, scales, *biases = mx.quantize(weight, group_size, bits, mode)
    floats = [each.astype(mx.float32) for each in biases] or None
    scales = scales.astype(mx.float32) if floats else scales
    return mx.dequantize(packed, scales, *(floats or [None]), group_size, bits, mode, dtype=mx.float32)

for i, option in enumerate(options):
    model, config = load_model(source, lazy=False)
    if dtype := option.pop("dtype", None):
        model.set_dtype(getattr(mx, dtype))
    if option:
        model, config = quantize_model(model, config, **option)
    out = Path(sys.argv[3]) / str(i)
    out.mkdir(parents=True)
    save_model(out, model)
    save_config(config, out / "config.json")
    model, _ = load_model(out, lazy=False)
    model.set_dtype(mx.float32)  # what is stored as it is, and computed without more rounding
    if inputs.is_file():
        np.save(out / "logits.npy", np.array(model(mx.array(np.load(inputs))).astype(mx.float32)))
    plain, stored = {}, mx.load(str(out / "model.safetensors"))
    for name, weight in mx.load(str(source / "model.safetensors")).items():
        weight = weight.astype(getattr(mx, dtype or "float32"))
        turned = config["model_type"] == "gpt2" and ".c_" in name and weight.ndim == 2  # (in, out) there
        weight = weight.T if turned else weight
        is_plain = name.endswith("gate.weight") and name.replace("weight", "scales") not in stored
        weight = as_quantised(weight, **option) if option and not is_plain else weight
        plain[name] = mx.contiguous((weight.T if turned else weight).astype(mx.float32))
    (out / "plain").mkdir()
    mx.save_safetensors(str(out / "plain" / "model.safetensors"), plain, {"format": "pt"})
    shutil.copy(source / "config.json", out / "plain")
"""


def mlx_converts(source: Source, work: Path) -> Iterator[Made]:
    """mlx-lm's own functions of `mlx_lm.convert`, in the environment whose Python MLX_PYTHON names."""
    python = os.environ.get("MLX_PYTHON")
    if not python or not source.name.startswith("wide"):
        return
    options = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float16"},
               *({"bits": bits, "group_size": size} for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)),
               {"bits": 4, "group_size": 64, "dtype": "bfloat16"}, {"bits": 8, "group_size": 64, "dtype": "bfloat16"},
               {"bits": 4, "group_size": 64, "dtype": "float16"},
               {"bits": 4, "group_size": 32, "mode": "mxfp4"}, {"bits": 4, "group_size": 16, "mode": "nvfp4"},
               {"bits": 8, "group_size": 32, "mode": "mxfp8"}]  # fmt: skip
    out, inputs = work.parent / "mlx-made", work.parent / "inputs.npy"
    work.parent.mkdir(parents=True, exist_ok=True)
    np.save(inputs, source.inputs["input_ids"].numpy())
    command = [python, "-c", MLX, str(source.folder), json.dumps(options), str(out), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{source.name}: mlx-lm fails: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    about = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
    for i, option in enumerate(options):
        if (out / str(i)).is_dir():
            expected = QUANTISED if "bits" in option else SAME_VALUES if option["dtype"] == "float32" else ROUNDED
            how = ", ".join(f"{key} {value}" for key, value in option.items())
            runs = partial(_as_mlx_computes, source, out / str(i))
            yield Made("mlx-lm", about, "MLX", how, expected, out / str(i), runs)
    shutil.rmtree(out, ignore_errors=True)


def _as_mlx_computes(source: Source, copy: Path) -> tuple[Any, Any]:
    """transformers on weights that mlx rounded or quantised apart from the copy; and what mlx-lm computes of it."""
    logits = torch.from_numpy(np.load(copy / "logits.npy"))
    return source.load(copy / "plain"), lambda **inputs: {"logits": logits}


VERSIONS = "from importlib.metadata import version; print(version('mlx-lm'), 'with mlx', version('mlx'))"
WRITERS: dict[str, Writer] = {
    "transformers": transformers_saves, "safetensors": safetensors_copies, "gguf": faithful_gguf.conversions,
    "peft": peft_merges, "mlx": mlx_converts, **{packer.name: partial(packed, packer) for packer in PACKERS},
}  # fmt: skip
