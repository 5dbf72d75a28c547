"""What people have instead of a checkpoint that is read: told by first bytes, by names, by what lies beside it."""

import struct
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from weightscope.checkpoint.jsontext import MAX_BYTES, parse_json, read_json, read_small, refuse_pointer
from weightscope.errors import CheckpointError

# Pickled files run code when they are loaded: they are never opened.
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HOW_TO_CONVERT = (
    "pickled files can run any code when they are loaded, so weightscope does not open them; convert where you trust "
    "the file: transformers' AutoModel.from_pretrained(...).save_pretrained(FOLDER) writes .safetensors"
)
ONNX = "is an ONNX graph, whose weights have lost their names; the model that it was exported from is read"
TENSORFLOW = (
    "holds TensorFlow's weights, which are not read; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_tf=True).save_pretrained(OTHER)"
)
FLAX = (
    "holds Flax's weights, which are not read; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_flax=True).save_pretrained(OTHER)"
)
LLAMA2_C = "is a checkpoint of llama2.c, which is not read; its export.py writes a folder that is, as version -1"
OLD_GGML = "is of ggml's format from before GGUF, which is not read; llama.cpp converts the model anew"
WEB_PAGE = "is a web page, not the file: what was downloaded is an answer to a browser"

BY_SUFFIX = {
    **dict.fromkeys(PICKLED, HOW_TO_CONVERT),
    ".onnx": ONNX,
    ".h5": TENSORFLOW,
    ".msgpack": FLAX,
    ".npz": "is an archive of NumPy's; .safetensors files, shards of them and .gguf files are read",
    ".ot": "holds weights of tch-rs, which are not read; the checkpoint that they were converted from is",
}
BY_START = {
    b"PK\x03\x04": HOW_TO_CONVERT,  # what torch.save writes
    **{bytes((0x80, protocol)): HOW_TO_CONVERT for protocol in range(2, 6)},
    b"\x89HDF\r\n": TENSORFLOW,
    b"24ka": LLAMA2_C,
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), OLD_GGML),
    **dict.fromkeys((b"<!doctype", b"<!DOCTYPE", b"<html"), WEB_PAGE),
}
START = 512  # bytes that tell a file
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NEEDS_ITS_BASE = (
    "is a LoRA adapter: its weights are changes to another model's, which has to be named too: "
    "`weightscope audit ADAPTER --base BASE`, `weightscope compare BASE ADAPTER`"
)
PIPELINE = "model_index.json"
PIPELINE_ROOT = "is a pipeline of diffusers, whose models are in folders of their own: name one that is a transformer"
MODULES = "modules.json"


def refuse_other(path: Path, start: bytes, size: int) -> None:
    """Refuse a file that is known to be something else, saying what.

    Parameters
    ----------
    path : Path
    start : bytes
        Its first bytes.
    size : int
        All its bytes.
    """
    refuse_pointer(start, path)
    for begins, problem in BY_START.items():
        if start.startswith(begins):
            raise CheckpointError(problem, file=path)
    if path.suffix == ".bin" and _is_llama2_c(start, size):
        raise CheckpointError(LLAMA2_C, file=path)
    if path.suffix in BY_SUFFIX:
        raise CheckpointError(BY_SUFFIX[path.suffix], file=path)


def _is_llama2_c(start: bytes, size: int) -> bool:
    """llama2.c's first format: seven sizes, then all weights in float32."""
    if len(start) < 28:
        return False
    d, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from("<7i", start)
    vocabulary, shared = abs(vocabulary), vocabulary > 0  # a vocabulary below 0 says that the last matrix is there too
    if min(d, hidden, layers, heads, kv_heads, vocabulary, positions) < 1 or d % heads or heads % kv_heads:
        return False
    kv = d // heads * kv_heads
    a_layer = 2 * d + 2 * d * d + 2 * d * kv + 3 * d * hidden
    floats = vocabulary * d * (1 if shared else 2) + layers * a_layer + d + positions * (d // heads)
    return size == 28 + 4 * floats


def other_folder(names: Sequence[str]) -> str:
    """What a folder or repository of these files is, if it is known not to be a checkpoint of its own; else empty."""
    if ADAPTER in names:
        return NEEDS_ITS_BASE
    return PIPELINE_ROOT if PIPELINE in names else ""


def refuse_pipeline(folder: Path) -> None:
    """Refuse a root of diffusers, naming the folders in it that hold transformers' models."""
    if not (folder / PIPELINE).is_file():
        return
    entries = read_json(folder / PIPELINE).items()
    pairs = [(name, value) for name, value in entries if isinstance(value, list) and len(value) == 2]
    inside = [
        f"{name} ({kind})" for name, (library, kind) in pairs if library == "transformers" and "Model" in str(kind)
    ]
    raise CheckpointError(PIPELINE_ROOT + (f": {', '.join(inside)}" if inside else ""), file=folder)


def transformer_in(folder: Path) -> Path:
    """The folder of the transformer in a root of sentence-transformers without weights of its own; else `folder`.

    Raises
    ------
    CheckpointError
        The root has no transformer, or says that it is outside the root.
    """
    listed = folder / MODULES
    if not listed.is_file() or any(folder.glob("*.safetensors")):
        return folder
    text = read_small(listed, MAX_BYTES)
    modules = parse_json(b'{"modules":' + text + b"}", file=listed)["modules"]
    modules = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    path = next((m.get("path") for m in modules if str(m.get("type")).endswith(".Transformer")), None)
    if path is None:
        kinds = ", ".join(str(m.get("type")).rpartition(".")[2][:40] for m in modules) or "none"
        raise CheckpointError(f"names no Transformer among the modules of sentence-transformers ({kinds})", file=listed)
    if not isinstance(path, str) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise CheckpointError(f"has its transformer outside its folder: '{str(path)[:200]}'", file=listed)
    return folder / path
