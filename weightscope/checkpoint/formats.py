"""Files and folders that weightscope cannot open: their formats, and how to convert them."""

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from weightscope.checkpoint.config import read_json, refuse_pointer
from weightscope.core.errors import CheckpointError
from weightscope.core.files import regular_file

INDEX = "model.safetensors.index.json"
LONE = "model.safetensors"
SAFETENSORS, OF_INDEX = ".safetensors", ".safetensors.index.json"
START = 512  # bytes from which the format is recognised

# Files of other formats, recognised by their first bytes or their names

PICKLE = "pickled files can run any code when they are loaded, so weightscope does not open them"
CONVERT = (
    "; this writes its tensors as safetensors with PyTorch, and runs none of its code: "
    "weightscope convert {} --out {}"
)
ONNX = (
    "is an ONNX graph, which drops tensor names; open the checkpoint that it was exported from, "
    "a folder or a Hub id: weightscope inspect SOURCE"
)
TENSORFLOW = (
    "holds TensorFlow weights, which are not supported; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_tf=True).save_pretrained(OTHER)"
)
FLAX = (
    "holds Flax weights, which are not supported; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_flax=True).save_pretrained(OTHER)"
)
CTRANSLATE2 = (
    "is a model of CTranslate2 ({}), which is not supported; "
    "open the checkpoint that it was converted from: weightscope inspect SOURCE"
)
NUMPY = "is a NumPy archive; .safetensors files, shards of them and .gguf files can be read"
LLAMA2_C = (
    "is a checkpoint of llama2.c, which is not supported; its export.py converts it (version -1)"
)
OLD_GGML = (
    "is in ggml's format from before GGUF, which is not supported; "
    "convert the model again with llama.cpp"
)
WEB_PAGE = "is a web page, not a checkpoint: the download was an answer meant for a browser"
GZIPPED = "is compressed; unpack it first"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BY_SUFFIX = {
    **dict.fromkeys(PICKLED[1:], PICKLE),
    ".onnx": ONNX,
    ".h5": TENSORFLOW,
    ".msgpack": FLAX,
    ".npz": NUMPY,
    ".ot": (
        "holds weights of tch-rs, which are not supported; "
        "open the checkpoint that they were converted from"
    ),
}
BY_START = {
    **{bytes((0x80, protocol)): PICKLE for protocol in range(2, 6)},
    b"GGUF": "is a GGUF file; weightscope opens it under a name that ends in .gguf",
    b"\x93NUMPY": NUMPY,
    b"\x89HDF\r\n": TENSORFLOW,
    b"24ka": LLAMA2_C,
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), OLD_GGML),
    **dict.fromkeys((b"<!doctype", b"<!DOCTYPE", b"<html"), WEB_PAGE),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd", b"7z\xbc\xaf"), GZIPPED),
}
# Version of the format, length of the specification's name (model_spec.py, _serialize), and name.
OF_CTRANSLATE2 = re.compile(rb"[\x01-\x40]\0{3}[\x05-\x60]\0(?P<name>\w{1,80}Spec)\0", re.DOTALL)
# One of several files that make up one: X.zip.001, X.gguf.part00, part01.bin
PART = re.compile(
    r"(?P<whole>.+\.(?:zip|gguf))\.(?:part[-_]?)?(?P<n>\d{1,4})"
    r"|(?:(?P<stem>.+)[-_.])?part[-_]?(?P<m>\d{1,4})\.bin"
)
# Files that trainers save next to the weights.
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state).*")
# Names of the files that transformers and PEFT pickle.
TORCH_LONE = "pytorch_model.bin"
TORCH_ADAPTER = "adapter_model.bin"
TORCH_SHARDS = "pytorch_model-*.bin"
TORCH_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
META_PART = re.compile(r"consolidated\.\d\d\.pth", re.ASCII)  # of a model in parallel parts


def refuse_other_format(path: Path, start: bytes, size: int) -> None:
    """Refuse a file of a known other format, saying which and how to convert it."""
    refuse_pointer(start, path)
    if format_is := other_format(path, start, size):
        advice = how_to_convert(path) if format_is == PICKLE else ""
        raise CheckpointError(format_is + advice, file=path)


def other_format(path: Path, start: bytes, size: int) -> str:
    """A foreign file's format, by its first bytes before its name; empty if unknown."""
    if part := PART.fullmatch(path.name):
        kinds = {b"GGUF": "a GGUF file", b"PK": "a zip", b"": "a file"}
        kind = next(kind for magic, kind in kinds.items() if start.startswith(magic))
        advice = f"join the parts in order: cat PARTS > {part['whole'] or 'model.gguf'}"
        return f"is one part of {kind} that was split; {advice}"
    if start.startswith(b"PK\x03\x04"):  # a zip, whose first file is named at byte 30
        first = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        if first.endswith(b".npy"):
            return NUMPY
        return "is a zip; unpack it first" if first and b".pkl" not in first else PICKLE
    for magic, problem in BY_START.items():
        if start.startswith(magic):
            return problem
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and path.suffix != ".safetensors" and length <= size - 8:
        return "is a safetensors file; weightscope opens it under a name that ends in .safetensors"
    if spec := OF_CTRANSLATE2.match(start):
        return CTRANSLATE2.format(spec["name"].decode())
    if path.suffix == ".bin":
        if _is_llama2_c(start, size):
            return LLAMA2_C
        return f"has no format that weightscope knows; it begins with {start[:8]!r}"
    return BY_SUFFIX.get(path.suffix, "")


def of_other_formats(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """The weight file of a folder in a foreign format, and that format; both empty if none."""
    weights = [
        name for name in names if name.endswith((*PICKLED, *BY_SUFFIX)) or PART.fullmatch(name)
    ]
    sizes = {name: (folder / name).stat().st_size for name in weights if (folder / name).is_file()}
    if not sizes:
        return "", ""

    def weight(name: str) -> tuple[bool, bool, int]:
        return name == TORCH_LONE, TORCH_SHARD.fullmatch(name) is not None, sizes[name]

    models = [name for name in sizes if not NO_WEIGHTS.fullmatch(name)]
    name = max(models or sizes, key=weight)
    path = folder / name
    with regular_file(path) as file:
        start, size = file.read(START), os.fstat(file.fileno()).st_size
    refuse_pointer(start, path)
    format_is = other_format(path, start, size)
    return name, format_is + (how_to_convert(path) if format_is == PICKLE else "")


def how_to_convert(file: Path) -> str:
    """The command that writes a pickled file's (or all shards') tensors into a new folder."""
    is_shard = TORCH_SHARD.fullmatch(file.name) or META_PART.fullmatch(file.name)
    given = file.parent if is_shard else file
    stem = given.name.removesuffix(file.suffix) or "model"
    out = given.parent / f"{stem}-safetensors"
    return CONVERT.format(quote(str(given)), quote(str(out)))


def _is_llama2_c(start: bytes, size: int) -> bool:
    """True if a file has the size of llama2.c's first format: seven sizes, float32 weights."""
    if len(start) < 28:
        return False
    d, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from("<7i", start)
    # A negative vocabulary means that the unembedding is stored too.
    vocabulary, tied = abs(vocabulary), vocabulary > 0
    if min(d, hidden, layers, heads, kv_heads, vocabulary, positions) < 1:
        return False
    if d % heads or heads % kv_heads:
        return False
    kv = d // heads * kv_heads
    per_layer = 2 * d + 2 * d * d + 2 * d * kv + 3 * d * hidden
    floats = vocabulary * d * (1 if tied else 2) + layers * per_layer + d + positions * (d // heads)
    return size == 28 + 4 * floats


# Folders that are not checkpoints themselves

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NEEDS_ITS_BASE = (
    "is a LoRA adapter: its weights are changes to another model's, which has to be named too: "
    "`weightscope audit ADAPTER --base BASE`, `weightscope compare BASE ADAPTER`"
)
PIPELINE = "model_index.json"
PIPELINE_ROOT = (
    "is a diffusers pipeline, whose models are in its subfolders: name one that is a transformer"
)


def kind_of_folder(names: Sequence[str]) -> str:
    """Why files with these names are no checkpoint of their own; empty if they may be one."""
    if ADAPTER in names:
        return NEEDS_ITS_BASE
    return PIPELINE_ROOT if PIPELINE in names else ""


def refuse_pipeline(folder: Path) -> None:
    """Refuse the root of a diffusers pipeline, naming its subfolders of transformers' models."""
    if not (folder / PIPELINE).is_file():
        return
    entries = read_json(folder / PIPELINE).items()
    models = []
    for name, value in entries:
        library, class_name = value if isinstance(value, list) and len(value) == 2 else ("", "")
        if library == "transformers" and "Model" in str(class_name):
            models.append(f"{name} ({class_name})")
    listed = f": {', '.join(models)}" if models else ""
    raise CheckpointError(PIPELINE_ROOT + listed, file=folder)
