"""A GGUF file as it is: its keys, and its tensors under ggml's names and in ggml's order."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf_header import MAX_HEADER_BYTES, GgufEntry, parse_gguf
from weightscope.checkpoint.header import MAX_OFFSET, TensorEntry
from weightscope.checkpoint.local import OpenFile
from weightscope.checkpoint.others import START, refuse_other
from weightscope.checkpoint.tensor import StoredTensor
from weightscope.errors import CheckpointError

PLAIN = ("F32", "F16", "F64", "BF16")
BLOCKS_AT_ONCE = 4096  # as one row: the gguf package takes 16 rows at a time, whose overhead outweighs short ones


def header_bytes(file: OpenFile) -> bytes:
    """A file's start, long enough to hold the header, once it is known to be GGUF."""
    text = file.read(0, min(file.size, MAX_HEADER_BYTES)).tobytes()
    if not text.startswith(b"GGUF"):
        refuse_other(file.path, text[:START], file.size)
    return text


def header_of(path: Path, lists: Collection[str] = ()) -> dict[str, Any]:
    """The keys of a GGUF file, with those lists of strings; the gguf package is not needed for them."""
    return parse_gguf(header_bytes(OpenFile(path)), file=path, lists=lists)[0]


class GgufFile(OpenFile):
    """One GGUF file.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    tensors : dict of TensorEntry
    config : Config
        The file's keys.

    Raises
    ------
    CheckpointError
        The gguf package is not installed, or the file is not right.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        keys, entries, data_start = parse_gguf(header_bytes(self), file=path)
        self.config = Config(keys, path)
        self.tensors = {name: self._locate(name, entry, data_start) for name, entry in entries.items()}
        self._refuse_overlaps(self.tensors)

    def _locate(self, name: str, entry: GgufEntry, data_start: int) -> TensorEntry:
        """Where a tensor lies, checked against its type and the file's size."""
        constants = _package().constants

        def refuse(problem: str) -> CheckpointError:
            return CheckpointError(problem, file=self.path, tensor=name)

        try:
            kind = constants.GGMLQuantizationType(entry.type)
            per_block, block_bytes = constants.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise refuse(f"is of type {entry.type}, which the gguf package does not know") from None
        row = entry.shape[-1] if entry.shape else 1
        if row % per_block:
            raise refuse(f"has rows of {row}, which blocks of {per_block} do not divide")
        n_bytes = prod(entry.shape) // per_block * block_bytes
        start = data_start + entry.offset
        if not 0 <= start <= start + n_bytes <= min(self.size, MAX_OFFSET):
            raise refuse(f"ends at byte {start + n_bytes}, but the file has {self.size}; is it cut short?")
        return TensorEntry(kind.name, entry.shape, start, start + n_bytes)

    def _refuse_overlaps(self, located: Mapping[str, TensorEntry]) -> None:
        end = 0
        for name, entry in sorted(located.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start < end:
                raise CheckpointError("overlaps the tensor before it", file=self.path, tensor=name)
            end = max(end, entry.stop)


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of one of ggml's types, which the gguf package dequantises."""

    def check_readable(self) -> None:
        if self.dtype not in PLAIN and self.dtype not in _dequantised_types():
            raise self.refuse(f"is of ggml type {self.dtype}, which the gguf package does not dequantise")

    def rows(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) == 1 and self.dtype not in PLAIN:  # a block holds many rows of one element
            self.check_rows(start, stop)
            return self.read()[start:stop]
        return super().rows(start, stop)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        if self.dtype in PLAIN:
            return super().decode(raw)
        if not len(raw):
            return np.empty(0, np.float32)
        package = _package()
        kind = package.constants.GGMLQuantizationType[self.dtype]
        block_bytes = package.constants.GGML_QUANT_SIZES[kind][1]
        pieces = np.split(raw, range(BLOCKS_AT_ONCE * block_bytes, len(raw), BLOCKS_AT_ONCE * block_bytes))
        with np.errstate(over="ignore", invalid="ignore"):  # hostile scales; what comes of them is found and named
            return np.concatenate([package.quants.dequantize(piece[None], kind)[0] for piece in pieces])


def _package() -> Any:
    """The gguf package, an extra."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise CheckpointError("GGUF files need the gguf package: pip install gguf") from None
    return gguf


def _dequantised_types() -> set[str]:
    return {kind.name for kind in _package().quants._type_traits}
