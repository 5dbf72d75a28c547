"""Faithful conversions of a checkpoint, by the writers that people use: `WRITERS`."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from analyses.experiments import faithful_gguf
from analyses.experiments.faithful_sources import Made, Source, Writer
from weightscope.files import Folder
from weightscope.same.judge import ROUNDED, SAME_VALUES

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
            dtypes = {name: parameter.dtype for name, parameter in cast.named_parameters()}
            how = f"{name}, {'shards of 40 kB' if shards else 'one file'}"
            yield Made(*about, "safetensors", how, expected, folder, partial(_both, source, folder, dtypes))
    base = getattr(source.model, source.model.base_model_prefix, None)
    inner = {id(parameter) for parameter in base.parameters()} if base is not None else set()
    if base is not source.model and inner == {id(parameter) for parameter in source.model.parameters()}:
        base.save_pretrained(folder)
        yield Made(*about, "safetensors", "the base model, of tied embeddings", SAME_VALUES, folder,
                   lambda: (source.model, source.load(folder)))  # fmt: skip


def safetensors_copies(source: Source, work: Path) -> Iterator[Made]:
    """Files rewritten tensor by tensor, as conversion scripts do."""
    about = "safetensors", version("safetensors"), "safetensors"
    config = json.loads((source.folder / "config.json").read_text())
    folder = work / "copy"

    def cast(*dtypes: torch.dtype) -> Path:
        weights = {}
        for key, value in _weights(source.folder).items():
            for dtype in dtypes if value.is_floating_point() else ():
                value = value.to(dtype)
            weights[key] = value
        return _write(weights, folder, config)

    def runs(*dtypes: torch.dtype) -> Callable[[], tuple[Any, Any]]:
        def both() -> tuple[Any, Any]:
            read = _write({k: v.float() if v.is_floating_point() else v for k, v in _weights(folder).items()},
                          work / "read", config)  # fmt: skip
            return source.with_weights(_rounded(*dtypes)), source.load(read)

        return both

    shutil.copytree(source.folder, folder)
    yield Made(*about, "the files copied", "same bytes", folder, runs())
    _write(dict(reversed(_weights(source.folder).items())), folder, config)
    yield Made(*about, "written again, tensors in reverse order", SAME_VALUES, folder, runs())
    for name, dtype in FLOAT8.items():
        cast(dtype)
        yield Made(*about, f"{name} without scales", ROUNDED, folder, runs(dtype))
    cast(torch.bfloat16, torch.float16)
    yield Made(*about, "float16 of bfloat16", ROUNDED, folder, runs(torch.bfloat16, torch.float16))
    if source.is_tied:
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
            yield Made(*about, "the tied head written out", SAME_VALUES, folder, runs())
            _write(weights, folder, config | {"tie_word_embeddings": False})
            yield Made(*about, "the tied head written out and untied in config.json", SAME_VALUES, folder, runs())


WRITERS: dict[str, Writer] = {
    "transformers": transformers_saves, "safetensors": safetensors_copies, "gguf": faithful_gguf.conversions,
}  # fmt: skip
