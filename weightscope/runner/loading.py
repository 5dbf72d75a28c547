"""transformers' eager model of a checkpoint that weightscope has open."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weightscope.checkpoint.source import downloaded, locate
from weightscope.device import Device, open_device
from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.progress import phase

INSTALL = "pip install torch transformers"
# No code that a checkpoint brings along is run. Left unsaid, transformers would ask on the terminal whether it may.
NO_CODE = {"trust_remote_code": False}
# Parameters that stand after everything looked at here; a checkpoint may lack them.
AFTERWARDS = ("pooler.", "classifier.", "score.", "qa_outputs.")


def import_torch() -> Any:
    """The torch module.

    Raises
    ------
    CheckpointError
        PyTorch or transformers is not installed.
    """
    try:
        with phase("loading PyTorch"):
            import torch
            import transformers
    except ImportError as error:
        raise CheckpointError(f"running a model needs PyTorch and transformers: {INSTALL}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch


def torch_device(device: Device) -> str:
    """PyTorch's name for where a device's arrays lie; of any but a card, this machine's memory.

    Raises
    ------
    CheckpointError
        PyTorch does not reach the card.
    """
    if device.name != "cuda":
        return "cpu"
    torch = import_torch()
    if not torch.cuda.is_available():
        raise CheckpointError(f"device cuda: PyTorch {torch.__version__} sees no CUDA device; install a build for CUDA")
    torch.backends.cudnn.allow_tf32 = False  # products in full float32, as on this machine; elsewhere that is default
    return "cuda"


def check_device(name: str) -> None:
    """Make sure, before anything is read, that PyTorch is installed, that a device is there and PyTorch reaches it.

    Raises
    ------
    CheckpointError
        One of them does not hold.
    """
    device = open_device(name)
    import_torch()
    torch_device(device)


@contextmanager
def room_for(what: str, model: Model) -> Iterator[None]:
    """Work that needs memory where PyTorch computes.

    Raises
    ------
    CheckpointError
        There is not enough on the device.
    """
    try:
        yield
    except import_torch().OutOfMemoryError:
        raise CheckpointError(f"the device has no room for {what}", file=model.name) from None


def first_line(error: Exception) -> str:
    """What an error of transformers says, in one line; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load_eager(model: Model, *, language: bool) -> Any:
    """The torch module, in float32 and evaluation mode, its attention computed eagerly.

    Parameters
    ----------
    model : Model
        What to load; safetensors and GGUF only.
    language : bool
        With the head that predicts the next token.

    Raises
    ------
    CheckpointError
        transformers cannot load it, or the checkpoint lacks parameters that would be made up.
    """
    torch = import_torch()
    import transformers

    auto = transformers.AutoModelForCausalLM if language else transformers.AutoModel
    name, options = _location(model)
    try:
        loaded, report = auto.from_pretrained(
            name, **options, **NO_CODE, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # of whatever class: transformers has none of its own
        raise CheckpointError(f"transformers cannot load it: {first_line(error)}", file=model.name) from error
    missing = sorted(key for key in report["missing_keys"] if not key.removeprefix("model.").startswith(AFTERWARDS))
    if missing:
        problem = f"lacks {len(missing)} parameters, '{missing[0]}' the first; a model with made-up ones is not run"
        raise CheckpointError(problem, file=model.name)
    return loaded.eval()


def _location(model: Model) -> tuple[str, dict[str, Any]]:
    """What to give from_pretrained for where the checkpoint is."""
    if model.checkpoint.note:
        problem = "is a LoRA adapter on a base; transformers runs what peft's merge_and_unload makes of the two"
        raise CheckpointError(problem, file=model.name)
    where = locate(model.source)
    if not isinstance(where, Path):
        where = downloaded(where)
    if where.suffix == ".gguf":
        return str(where.parent), {"gguf_file": where.name, "local_files_only": True}
    folder = where if where.is_dir() else where.parent
    return str(folder), {"use_safetensors": True, "local_files_only": True}
