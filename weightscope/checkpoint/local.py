"""Files on this machine: a safetensors file read piece by piece, and what to say of files of other formats."""

import hashlib
import os
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from shlex import quote
from types import MappingProxyType
from typing import Any

import numpy as np

from weightscope.checkpoint.config import MAX_BYTES, parse_json, read_json, read_small, refuse_pointer
from weightscope.checkpoint.header import HeaderDigest, TensorEntry, etag_digest, header_length, parse_header
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
    header = HeaderDigest(0, "")
    tensors: Mapping[str, TensorEntry] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size, self._modified = self._now()  # bytes, nanoseconds
        self._whole = ""  # its SHA-256, once it was read for that

    @property
    def identity(self) -> dict[str, Any]:
        """Of a file in the Hub's cache, the repository's file; of any other, name, size, time and content."""
        if self.published is not None:
            return self.published
        # An archive with normalised times, or cp -p, gives other weights the same name, size and time.
        place = {} if self.size <= WHOLE else {"inode": os.fstat(self._descriptor).st_ino}
        return {"name": self.path.name, "size": self.size, "modified": self._modified, "sha256": self._digest} | place

    @cached_property
    def published(self) -> dict[str, Any] | None:
        """Of a file in the Hub's cache, the repository's file; None of any other."""
        return cached_identity(self.path, self.size)

    @property
    def sha256(self) -> str:
        """SHA-256 of the whole file, where it was read whole or is its etag; else empty."""
        small = self.size <= WHOLE and "_digest" in vars(self)
        return self._whole or etag_digest(self.published) or (self._digest if small else "")

    @property
    def samples(self) -> str:
        """SHA-256 of a large file's header and samples, where it was read to know the file again; else empty."""
        return self._digest if self.size > WHOLE and "_digest" in vars(self) else ""

    def read_digest(self, step: Callable[[int], object] = lambda count: None) -> None:
        """Read the whole file for its SHA-256; refused where the Hub says that it is another."""
        digest = hashlib.sha256()
        for start in range(0, self.size, READ):
            digest.update(self.read(start, min(start + READ, self.size)))
            step(min(READ, self.size - start))
        self._whole, etag = digest.hexdigest(), etag_digest(self.published)
        if etag and etag != self._whole:
            problem = f"its SHA-256 is {self._whole}, on the Hub it is {etag}: the copy in the Hub's cache is damaged"
            raise CheckpointError(problem, file=self.path)

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
        self.header = HeaderDigest.of(start[:8] + text)
        self.tensors, self.metadata = parse_header(text, self.size, file=path)


# Files of other formats, recognised by their first bytes or their names

PICKLE = "pickled files can run any code when they are loaded, so weightscope does not open them"
# What `python -c` is given to convert one. It has no single quotes, so that a shell takes it between them. Tensors keep
# their names; those in dictionaries within the file are named after these too, but for the usual ones (UNNAMED) around
# all of a model. An optimiser's state is left out. Tied tensors are stored twice, as safetensors wants it.
CONVERSION = (
    "import sys, torch, safetensors.torch as st; "
    'UNNAMED = ("state_dict", "model_state_dict", "model", "module"); '
    'named = lambda d, at="": {n: t for k, v in d.items() if not (isinstance(v, dict) and str(k).startswith("optim")) '
    'for n, t in (named(v, at if k in UNNAMED and not at else f"{at}{k}.") '
    'if isinstance(v, dict) else {f"{at}{k}": v}).items()}; '
    "*files, out = sys.argv[1:]; "
    "st.save_file({n: t.detach().clone(memory_format=torch.contiguous_format) for f in files "
    'for n, t in named(torch.load(f, map_location="cpu", weights_only=True)).items() if torch.is_tensor(t)} '
    'or sys.exit("no tensor in " + files[0]), out, {"format": "pt"})'
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
NUMPY = "is a NumPy archive; .safetensors files, shards of them and .gguf files can be read"
LLAMA2_C = "is a checkpoint of llama2.c, which is not supported; its export.py converts it (version -1)"
OLD_GGML = "is in ggml's format from before GGUF, which is not supported; convert the model again with llama.cpp"
WEB_PAGE = "is a web page, not a checkpoint: the download was an answer meant for a browser"

GZIPPED = "is compressed; unpack it first"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BY_SUFFIX = {
    **dict.fromkeys(PICKLED[1:], PICKLE),
    ".onnx": ONNX,
    ".h5": TENSORFLOW,
    ".msgpack": FLAX,
    ".npz": NUMPY,
    ".ot": "holds weights of tch-rs, which are not supported; open the checkpoint that they were converted from",
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
# One of several files that make up one: X.zip.001, X.gguf.part00, part01.bin
PART = re.compile(
    r"(?P<whole>.+\.(?:zip|gguf))\.(?:part[-_]?)?(?P<n>\d{1,4})|(?:(?P<stem>.+)[-_.])?part[-_]?(?P<m>\d{1,4})\.bin"
)
# What trainers save beside the weights.
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state).*")
# As transformers and PEFT name what they pickle.
TORCH_LONE, TORCH_ADAPTER, TORCH_SHARDS = "pytorch_model.bin", "adapter_model.bin", "pytorch_model-*.bin"
TORCH_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")


def refuse_other_format(path: Path, start: bytes, size: int) -> None:
    """Refuse a file of a known other format, saying which and how to convert it."""
    refuse_pointer(start, path)
    if format_is := other_format(path, start, size):
        raise CheckpointError(format_is + (how_to_convert(path) if format_is == PICKLE else ""), file=path)


def other_format(path: Path, start: bytes, size: int) -> str:
    """What a file that is no checkpoint of ours is, by its first bytes before its name; empty where that is unknown."""
    if part := PART.fullmatch(path.name):
        of = "a GGUF file" if start.startswith(b"GGUF") else "a zip" if start.startswith(b"PK") else "a file"
        whole = part["whole"] or "model.gguf"
        return f"is one part of {of} that was split; join the parts in order: cat PARTS > {whole}"
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
    if path.suffix == ".bin":
        return (
            LLAMA2_C
            if _is_llama2_c(start, size)
            else f"has no format that weightscope knows; it begins with {start[:8]!r}"
        )
    return BY_SUFFIX.get(path.suffix, "")


def of_other_formats(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    """The file with the weights of a folder without a checkpoint of ours, and what it is; both empty without one."""
    weights = [name for name in names if name.endswith((*PICKLED, *BY_SUFFIX)) or PART.fullmatch(name)]
    sizes = {name: (folder / name).stat().st_size for name in weights if (folder / name).is_file()}
    if not (models := {name: size for name, size in sizes.items() if not NO_WEIGHTS.fullmatch(name)} or sizes):
        return "", ""
    name = max(models, key=lambda name: (name == TORCH_LONE, TORCH_SHARD.fullmatch(name) is not None, models[name]))
    file = OpenFile(folder / name)
    start = file.read(0, min(START, file.size)).tobytes()
    refuse_pointer(start, file.path)
    format_is = other_format(file.path, start, file.size)
    return name, format_is + (how_to_convert(file.path) if format_is == PICKLE else "")


def how_to_convert(file: Path) -> str:
    """The command that writes the tensors of a pickled file, or of all shards, beside it, as bash takes it."""
    folder, shard = file.parent, TORCH_SHARD.fullmatch(file.name)
    given = f"{quote(str(folder))}/{TORCH_SHARDS}" if shard else quote(str(file))
    plain = LONE if shard or file.name == TORCH_LONE else ADAPTER_WEIGHTS if file.name == TORCH_ADAPTER else ""
    out = folder / (plain if plain and not (folder / plain).exists() else f"{file.name}.safetensors")
    return (
        "; with PyTorch this writes its tensors as safetensors, and runs none of its code: "
        f"python -c '{CONVERSION}' {given} {quote(str(out))}"
    )


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
