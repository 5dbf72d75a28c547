"""Files on this machine: a safetensors file read piece by piece, and what to say of files of other formats."""

import hashlib
import os
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from weightscope.checkpoint.config import MAX_BYTES, parse_json, read_json, read_small, refuse_pointer
from weightscope.checkpoint.header import TensorEntry, header_length, parse_header
from weightscope.checkpoint.hub import cached_identity
from weightscope.errors import CheckpointError
from weightscope.files import open_regular

INDEX = "model.safetensors.index.json"
LONE = "model.safetensors"
START = 512  # bytes from which the format is recognised
WHOLE = 64 << 20  # bytes of a file that is known by all of its content; of a larger one by samples and its inode
READ, SAMPLE = 1 << 20, 4096  # bytes read at a time for that, and of a sample
LARGEST_READ = 1 << 30  # systems return less than 2 GB at a time


class OpenFile:
    """A regular file held open, so that another file put in its place later is not mistaken for it.

    Data are read, not mapped: mapping would save a copy (0.2 s per GB, little next to computing its spectra), but a
    process that reads a map is killed by SIGBUS when another cuts the file short. A read reports it as an error.
    """

    bytes_fetched = 0
    tensors: Mapping[str, TensorEntry] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size, self._modified = self._now()  # bytes, nanoseconds

    @property
    def identity(self) -> dict[str, Any]:
        """Of a file in the Hub's cache, the repository's file; of any other, name, size, time and content."""
        if cached := cached_identity(self.path, self.size):
            return cached
        # An archive with normalised times, or cp -p, gives other weights the same name, size and time.
        place = {} if self.size <= WHOLE else {"inode": os.fstat(self._descriptor).st_ino}
        return {"name": self.path.name, "size": self.size, "modified": self._modified, "sha256": self._digest} | place

    @cached_property
    def _digest(self) -> str:
        """SHA-256 of a small file; of a large one, of all before its first tensor and two blocks of each tensor."""
        spans = [(start, min(start + READ, self.size)) for start in range(0, self.size, READ)]
        if self.size > WHOLE:
            entries = sorted((entry.start, entry.stop) for entry in self.tensors.values())
            spans = [(0, entries[0][0] if entries else WHOLE)]
            for start, stop in entries:
                thirds = ((stop - start) * i // 3 for i in (1, 2))
                spans += [(start + at, min(start + at + SAMPLE, stop)) for at in thirds]
        digest = hashlib.sha256()
        for span in spans:
            digest.update(self.read(*span))
        return digest.hexdigest()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the file, as a new uint8 array; refused once the file has changed."""
        try:
            buffer = np.empty(stop - start, np.uint8)
            view, done = memoryview(buffer), 0
            while done < len(view):
                count = os.preadv(self._descriptor, [view[done : done + LARGEST_READ]], start + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=self.path) from None
        except MemoryError:
            raise CheckpointError(f"no memory for {stop - start} bytes of it", file=self.path) from None
        size, modified = self._now()
        if done < len(view) or (size, modified) != (self.size, self._modified):
            shrunk = f": it had {self.size} bytes and has {size}" if size != self.size else ""
            raise CheckpointError(f"has changed since it was opened{shrunk}", file=self.path)
        return buffer

    def bytes_of(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of one tensor; see `read`."""
        return self.read(entry.start + start, entry.start + stop)

    def bytes_to_fetch(self, entries: Iterable[TensorEntry]) -> int:
        """None: the file is local."""
        return 0

    def prefetch(self, entries: Iterable[TensorEntry]) -> None:
        """Ask the system to read these tensors from disk ahead, where it takes such advice."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # reading reports what is wrong
            for entry in entries:
                os.posix_fadvise(self._descriptor, entry.start, entry.stop - entry.start, os.POSIX_FADV_WILLNEED)


class LocalFile(OpenFile):
    """One .safetensors file: its checked header is read, tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        start = self.read(0, min(START, self.size)).tobytes()
        try:
            length = header_length(start[:8], self.size, file=path)
        except CheckpointError:
            refuse_other_format(path, start, self.size)
            raise
        text = self.read(8, 8 + length).tobytes()
        self.tensors, self.metadata = parse_header(text, self.size, file=path)


# Files of other formats, recognised by their first bytes or their names

UNOPENED = "pickled files can run any code when they are loaded, so weightscope does not open them; "
OF_TRANSFORMERS = UNOPENED + (
    'where you trust the folder, type: python -c "from transformers import AutoModel; '
    "AutoModel.from_pretrained('FOLDER').save_pretrained('OTHER')\", then weightscope inspect OTHER"
)
OF_TORCH = UNOPENED + (
    'this writes its tensors, and runs no code: python -c "import torch, safetensors.torch as st; '
    "st.save_file({k: v.clone() for k, v in torch.load('FILE', weights_only=True).items()}, 'model.safetensors')\""
)
ONNX = (
    "is an ONNX graph, which drops tensor names; open the checkpoint that it was exported from, a folder or a Hub id: "
    "weightscope inspect SOURCE"
)
TENSORFLOW = (
    "holds TensorFlow weights, which are not supported; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_tf=True).save_pretrained(OTHER)"
)
FLAX = (
    "holds Flax weights, which are not supported; transformers 4 converts them: "
    "AutoModel.from_pretrained(FOLDER, from_flax=True).save_pretrained(OTHER)"
)
LLAMA2_C = "is a checkpoint of llama2.c, which is not supported; its export.py converts it (version -1)"
OLD_GGML = "is in ggml's format from before GGUF, which is not supported; convert the model again with llama.cpp"
WEB_PAGE = "is a web page, not a checkpoint: the download was an answer meant for a browser"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BY_SUFFIX = {
    **dict.fromkeys(PICKLED, OF_TORCH),
    ".bin": OF_TRANSFORMERS,
    ".onnx": ONNX,
    ".h5": TENSORFLOW,
    ".msgpack": FLAX,
    ".npz": "is a NumPy archive; .safetensors files, shards of them and .gguf files can be read",
    ".ot": "holds weights of tch-rs, which are not supported; open the checkpoint that they were converted from",
}
BY_START = {
    b"PK\x03\x04": OF_TORCH,  # what torch.save writes
    **{bytes((0x80, protocol)): OF_TORCH for protocol in range(2, 6)},
    b"\x89HDF\r\n": TENSORFLOW,
    b"24ka": LLAMA2_C,
    **dict.fromkeys((b"lmgg", b"fmgg", b"tjgg"), OLD_GGML),
    **dict.fromkeys((b"<!doctype", b"<!DOCTYPE", b"<html"), WEB_PAGE),
}


def refuse_other_format(path: Path, start: bytes, size: int) -> None:
    """Refuse a file of a known other format, saying which and how to convert it."""
    refuse_pointer(start, path)
    for magic, problem in BY_START.items():
        if start.startswith(magic):
            raise CheckpointError(BY_SUFFIX.get(path.suffix, problem) if problem == OF_TORCH else problem, file=path)
    if path.suffix == ".bin" and _is_llama2_c(start, size):
        raise CheckpointError(LLAMA2_C, file=path)
    if path.suffix in BY_SUFFIX:
        raise CheckpointError(BY_SUFFIX[path.suffix], file=path)


def _is_llama2_c(start: bytes, size: int) -> bool:
    """Whether a file has the size that llama2.c's first format implies: seven sizes, then all weights in float32."""
    if len(start) < 28:
        return False
    d, hidden, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from("<7i", start)
    vocabulary, tied = abs(vocabulary), vocabulary > 0  # a negative vocabulary means that the unembedding is stored too
    if min(d, hidden, layers, heads, kv_heads, vocabulary, positions) < 1 or d % heads or heads % kv_heads:
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
PIPELINE_ROOT = "is a diffusers pipeline, whose models are in its subfolders: name one that is a transformer"
MODULES = "modules.json"


def kind_of_folder(names: Sequence[str]) -> str:
    """Why a folder or repository with these files is no checkpoint of its own; empty if it may be one."""
    if ADAPTER in names:
        return NEEDS_ITS_BASE
    return PIPELINE_ROOT if PIPELINE in names else ""


def refuse_pipeline(folder: Path) -> None:
    """Refuse the root of a diffusers pipeline, naming the subfolders that hold transformers' models."""
    if not (folder / PIPELINE).is_file():
        return
    entries = read_json(folder / PIPELINE).items()
    models = [
        f"{name} ({value[1]})"
        for name, value in entries
        if isinstance(value, list) and len(value) == 2 and value[0] == "transformers" and "Model" in str(value[1])
    ]
    raise CheckpointError(PIPELINE_ROOT + (f": {', '.join(models)}" if models else ""), file=folder)


def transformer_in(folder: Path) -> Path:
    """The transformer's folder, for the root of a sentence-transformers model without weights; else `folder`."""
    index = folder / MODULES
    if not index.is_file() or any(folder.glob("*.safetensors")):
        return folder
    text = read_small(index, MAX_BYTES)
    modules = parse_json(b'{"modules":' + text + b"}", file=index)["modules"]
    modules = [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    path = next((m.get("path") for m in modules if str(m.get("type")).endswith(".Transformer")), None)
    if path is None:
        kinds = ", ".join(str(m.get("type")).rpartition(".")[2][:40] for m in modules) or "none"
        raise CheckpointError(f"names no Transformer among the modules of sentence-transformers ({kinds})", file=index)
    if not isinstance(path, str) or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise CheckpointError(f"has its transformer outside its folder: '{str(path)[:200]}'", file=index)
    return folder / path
