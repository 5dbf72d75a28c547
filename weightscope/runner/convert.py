"""Pickled checkpoints of PyTorch as safetensors, without running any code of theirs."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.formats import (
    ADAPTER_WEIGHTS,
    LONE,
    META_PART,
    PICKLED,
    SAFETENSORS,
    TORCH_ADAPTER,
    TORCH_LONE,
    TORCH_SHARDS,
)
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError, counted, one_line, printable, sized
from weightscope.core.files import new_file, regular_file
from weightscope.core.progress import bar
from weightscope.runner.loading import import_torch

# Dictionaries around all of a model, whose names are no part of its tensors' names.
AROUND = ("state_dict", "model_state_dict", "model", "module")
NAMED = 5  # things left out that a sentence names
# Files next to the weights that belong to the model: its config, its tokenizer, its template.
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
INDEX = ".index.json"
MAX_BESIDE = 64 * 2**20  # bytes of such a file


@dataclass(frozen=True)
class Converted:
    """A written file of safetensors, all values of it read again and compared."""

    source: str
    file: Path
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name
    nbytes: int
    left_out: tuple[str, ...]  # names of what is no tensor of the model

    @property
    def lead(self) -> str:
        """The result in a sentence or two."""
        held = f"{counted(len(self.tensors), 'tensor')}, {sized(self.nbytes)}"
        text = f"{printable(self.source)}: {held}, each read again and equal."
        if self.left_out:
            names = ", ".join(map(printable, self.left_out[:NAMED]))
            more = f" and {len(self.left_out) - NAMED} more" if self.left_out[NAMED:] else ""
            text += f" Left out, as no tensors of the model: {names}{more}."
        return text


def convert(source: str | Path, out: str | Path) -> Converted:
    """Write the tensors of a pickled checkpoint of PyTorch as safetensors.

    Tensors keep their names; a dictionary within the file adds its own name before them, but for
    the usual ones around a whole model (`AROUND`). An optimiser's state is left out. Tied tensors
    are written twice, as the format wants it. Config and tokenizer files are copied along.

    Parameters
    ----------
    source : str or Path
        A file, or a folder with pytorch_model.bin, its shards, adapter_model.bin or Meta's
        consolidated.NN.pth, which stay in parts.
    out : str or Path
        The folder to write into.

    Raises
    ------
    CheckpointError
        The file needs code of its own, holds no tensor or one of a kind that safetensors does not
        have, or the folder already holds weights.

    Examples
    --------
    >>> from weightscope.runner.convert import convert
    >>> convert("missing.pt", "converted/")
    Traceback (most recent call last):
    ...
    weightscope.core.errors.CheckpointError: no such file or folder: missing.pt
    """
    torch = import_torch()
    source, out = Path(source), Path(out)
    files, name = pickled_files(source)
    in_parts = META_PART.fullmatch(name) is not None
    names = [name]
    if in_parts:
        names = [file.with_suffix(SAFETENSORS).name for file in files]
    elif len(files) > 1:
        count, stem = len(files), Path(name).stem
        names = [f"{stem}-{i:05d}-of-{count:05d}{SAFETENSORS}" for i in range(1, count + 1)]
    has_index = len(files) > 1 and not in_parts
    target = out / (f"{name}{INDEX}" if has_index else names[0])
    if weights := next(out.glob(f"*{SAFETENSORS}*"), None):
        raise CheckpointError("is there already; give another folder", file=weights)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    left_out: list[str] = []
    written: dict[str, Path] = {}
    nbytes = 0
    try:
        for file, part_name in zip(files, names, strict=True):  # one in memory at a time
            named = dict(_tensors(torch, file, left_out))
            if not named:
                continue
            if not in_parts and (twice := next((path for path in named if path in kinds), None)):
                raise CheckpointError(f"tensor {printable(twice)} is in two files", file=file)
            part, stored = out / part_name, stored_dtypes(torch)
            for path, each in named.items():
                held = f"{part_name}: {path}" if in_parts else path
                kinds[held], written[held] = (stored[each.dtype], tuple(each.shape)), part
            nbytes += _write(torch, named, stored, part)
            _compare(torch, named, part)
        if not kinds:
            raise CheckpointError("holds no tensor", file=source)
    except BaseException:
        for part in {*written.values()}:
            part.unlink(missing_ok=True)
        raise
    if has_index:
        weight_map = {path: part.name for path, part in written.items()}
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        with new_file(target) as opened:
            opened.write(json.dumps(index, indent=2).encode())
    _copy_beside(source if source.is_dir() else source.parent, out)
    return Converted(str(source), target, kinds, nbytes, tuple(left_out))


def pickled_files(source: Path) -> tuple[list[Path], str]:
    """The files of a pickled checkpoint, and the usual name of its weights as safetensors."""
    if source.is_file():
        return [source], ADAPTER_WEIGHTS if source.name == TORCH_ADAPTER else LONE
    if not source.is_dir():
        raise CheckpointError(f"no such file or folder: {printable(source)}")
    for name, usual in ((TORCH_LONE, LONE), (TORCH_ADAPTER, ADAPTER_WEIGHTS)):
        if (source / name).is_file():
            return [source / name], usual
    shards = sorted(source.glob(TORCH_SHARDS))
    parts = sorted(file for file in source.iterdir() if META_PART.fullmatch(file.name))
    if parts and not shards:
        return parts, parts[0].name
    if not shards:
        expected = f"{TORCH_LONE}, {TORCH_SHARDS}, {TORCH_ADAPTER} or consolidated.*.pth"
        pickled = [each.name for each in sorted(source.iterdir()) if each.suffix in PICKLED]
        advice = f"; name one of its files: {', '.join(pickled[:NAMED])}" if pickled else ""
        raise CheckpointError(f"has no {expected}{advice}", file=source)
    return shards, LONE


def leaves(content: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything in nested dictionaries, but an optimiser's state."""
    if not isinstance(content, Mapping):
        yield at.removesuffix(".") or "the file's content", content
        return
    for key, value in content.items():
        if isinstance(value, Mapping) and str(key).startswith("optim"):
            yield f"{at}{key}", None
        elif isinstance(value, Mapping):
            yield from leaves(value, at if key in AROUND and not at else f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def stored_dtypes(torch: Any) -> dict[Any, str]:
    """The dtypes that safetensors has, by PyTorch's."""
    names = {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
        "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
        "uint16": "U16", "uint32": "U32", "uint64": "U64",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    }  # fmt: skip
    return {getattr(torch, name): code for name, code in names.items() if hasattr(torch, name)}


def _tensors(torch: Any, file: Path, left_out: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a pickled file, without running any code; note other objects."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        problem = "cannot be loaded without running code of its own, or is damaged"
        raise CheckpointError(f"{problem}: {one_line(error)[:200]}", file=file) from None
    stored = stored_dtypes(torch)
    for path, value in leaves(content):
        if not torch.is_tensor(value):
            left_out.append(path)
        elif value.dtype not in stored or value.layout is not torch.strided:
            kind = f"{value.dtype}, {value.layout}".replace("torch.", "")
            problem = f"tensor {printable(path)} is of a kind that safetensors does not have"
            raise CheckpointError(f"{problem} ({kind})", file=file)
        else:
            yield path, value


def _as_bytes(torch: Any, tensor: Any) -> np.ndarray:
    """A tensor's values in their order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    values: np.ndarray = plain.view(torch.uint8).numpy()
    return values


def _write(torch: Any, named: Mapping[str, Any], stored: Mapping[Any, str], target: Path) -> int:
    """Write one tensor after the other; return the bytes of all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for path, tensor in named.items():
        end = start + tensor.numel() * tensor.element_size()
        facts = {"dtype": stored[tensor.dtype], "shape": list(tensor.shape)}
        header[path] = facts | {"data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    with new_file(target) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in bar(named.values(), "writing", "tensor", total=len(named)):
            file.write(_as_bytes(torch, tensor).tobytes())
    return start


def _compare(torch: Any, named: Mapping[str, Any], target: Path) -> None:
    """Read the written file as `same` does, and refuse it if a byte differs from the original."""
    written = LocalFile(target)
    for path, tensor in bar(named.items(), "comparing", "tensor", total=len(named)):
        expected, entry = _as_bytes(torch, tensor), written.tensors[path]
        if not np.array_equal(written.bytes_of(entry, 0, expected.size), expected):
            raise CheckpointError(f"tensor {printable(path)} was not written well", file=target)


def _copy_beside(folder: Path, out: Path) -> None:
    """Copy config and tokenizer files that the folder does not have yet."""
    for file in sorted(folder.iterdir()):
        is_small = file.is_file() and file.stat().st_size <= MAX_BESIDE
        is_wanted = file.name.endswith(BESIDE) and not file.name.endswith(INDEX)
        if is_small and is_wanted and not (out / file.name).exists():
            with regular_file(file) as read, new_file(out / file.name) as written:
                shutil.copyfileobj(read, written)
