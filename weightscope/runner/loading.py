"""Loads transformers' eager model of a checkpoint that weightscope has open."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import read_json, without_code
from weightscope.checkpoint.gguf import open_parts
from weightscope.checkpoint.opening import downloaded
from weightscope.core.compute.device import Device, open_device
from weightscope.core.errors import CheckpointError, first_line
from weightscope.core.files import new_file, scratch_folder
from weightscope.core.progress import phase
from weightscope.model.model import Model

INSTALL = "pip install torch transformers"
# Code in a checkpoint is never run. Without this, transformers would ask on the terminal.
NO_CODE = {"trust_remote_code": False}
# Parameters above everything that is analysed; a checkpoint may lack them.
AFTERWARDS = ("pooler.", "classifier.", "score.", "qa_outputs.")


def import_torch() -> Any:
    """Import PyTorch, with transformers silenced."""
    try:
        with phase("loading PyTorch"):
            import torch
            import transformers
    except ImportError as error:
        problem = f"running a model needs PyTorch and transformers: {INSTALL}"
        raise CheckpointError(problem) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch


def torch_device(device: Device) -> str:
    """PyTorch's name for the place of a device's arrays: `cuda`, or `cpu` for this machine."""
    if device.name != "cuda":
        return "cpu"
    torch = import_torch()
    if not torch.cuda.is_available():
        problem = f"device cuda: PyTorch {torch.__version__} sees no CUDA device"
        raise CheckpointError(f"{problem}; install a build for CUDA")
    torch.backends.cudnn.allow_tf32 = False  # products in full float32, as the CPU has them
    return "cuda"


def check_device(name: str) -> None:
    """Make sure, before anything is read, that PyTorch is installed and reaches a device."""
    device = open_device(name)
    import_torch()
    torch_device(device)


@contextmanager
def room_for(what: str, model: Model) -> Iterator[None]:
    """Turn PyTorch's out-of-memory error into a CheckpointError within the block."""
    try:
        yield
    except import_torch().OutOfMemoryError:
        raise CheckpointError(f"the device has no room for {what}", file=model.name) from None


def load_eager(model: Model, *, language: bool) -> Any:
    """The torch module, in float32 and evaluation mode, its attention computed eagerly."""
    torch = import_torch()
    import transformers

    auto = transformers.AutoModelForCausalLM if language else transformers.AutoModel
    with _data(model) as (folder, options):
        options |= NO_CODE | {"attn_implementation": "eager", "dtype": torch.float32}
        try:
            loaded, report = auto.from_pretrained(str(folder), **options, output_loading_info=True)
        except Exception as error:  # any class: transformers has none of its own
            problem = f"transformers cannot load it: {first_line(error)}"
            raise CheckpointError(problem, file=model.name) from error
    absent = sorted(report["missing_keys"])
    missing = [key for key in absent if not key.removeprefix("model.").startswith(AFTERWARDS)]
    if missing:
        problem = f"lacks {len(missing)} parameters, '{missing[0]}' the first"
        why = "a model with made-up ones is not run"
        raise CheckpointError(f"{problem}; {why}", file=model.name)
    return loaded.eval()


def check_gguf(path: Path) -> None:
    """Refuse a GGUF file in parts, or a broken one: the gguf package's reader may hang."""
    parts = open_parts(path)
    if len(parts) > 1:
        problem = f"is one of {len(parts)} parts; transformers reads a GGUF file that is whole"
        raise CheckpointError(f"{problem}: llama.cpp's llama-gguf-split merges them", file=path)


@contextmanager
def _data(model: Model) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder with the checkpoint's weights and its config without code; how to load from it.

    transformers does not see anything else in the checkpoint's folder (adapters, code, kernels).
    """
    if model.checkpoint.note:
        problem = "is a LoRA adapter on a base"
        advice = "transformers runs what peft's merge_and_unload makes of the two"
        raise CheckpointError(f"{problem}; {advice}", file=model.name)
    where = model.where
    if not isinstance(where, Path):
        where = downloaded(where)
    if where.is_dir() and model.checkpoint.is_gguf:  # its one, or parts
        where = Path(model.checkpoint.files[0].path)
    folder = where if where.is_dir() else where.parent
    with scratch_folder() as clean:
        if where.suffix == ".gguf":
            check_gguf(where)
            (clean / where.name).symlink_to(where.absolute())
            yield clean, {"gguf_file": where.name, "local_files_only": True}
            return
        for path in folder.iterdir():
            if path.name.endswith((".safetensors", ".safetensors.index.json")):
                (clean / path.name).symlink_to(path.absolute())
        config = folder / "config.json"
        if config.exists():
            values = without_code(read_json(config), config)
            with new_file(clean / "config.json") as file:
                file.write(json.dumps(values).encode())
        yield clean, {"use_safetensors": True, "local_files_only": True}
