"""The header of a safetensors file, checked before a byte of data is believed.

Layout: 8 bytes little-endian header length, the header as JSON, then the data section that the offsets refer to.
The checks are those of the safetensors library, made here because the header is all that an unread file gives, and in
words that say which tensor is wrong. Then the library reads the header too: where the two find different tensors in one
file, one of them can be made to see what the other does not, and the file is refused.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from safetensors import SafetensorError, safe_open

from weightscope.checkpoint.dtypes import BITS
from weightscope.checkpoint.jsontext import MAX_BYTES, parse_json
from weightscope.errors import CheckpointError

MAX_OFFSET = 2**63 - 1
MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: dtype, shape, and the byte range [start, stop) within its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_length(prefix: bytes, file_size: int, *, file: object) -> int:
    """The header's length in bytes, from the file's first eight.

    Raises
    ------
    CheckpointError
        The file is too short, or the length is past the file or past 16 MB. The safetensors library allows 100 MB,
        which no Python reader parses in bounded memory and no published file comes near.
    """
    if len(prefix) < 8:
        raise CheckpointError(f"has {file_size} bytes; a safetensors file has at least 8", file=file)
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_BYTES:
        raise CheckpointError(f"header of {length} bytes; at most {MAX_BYTES} are read", file=file)
    if 8 + length > file_size:
        raise CheckpointError(
            f"header of {length} bytes, but the file has only {file_size}; is it cut short?", file=file
        )
    return length


def parse_header(text: bytes, file_size: int, *, file: object) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Tensors and metadata that a header declares, every claim checked against the file's size.

    Parameters
    ----------
    text : bytes
        The header alone, without its length.
    file_size : int
        Size of the whole file in bytes.
    file : path-like
        Named in errors.

    Returns
    -------
    dict of TensorEntry, dict of str
        Tensors by name, in file order, with absolute offsets; and the `__metadata__`.

    Raises
    ------
    CheckpointError
        The JSON is broken, a key stands twice, a dtype is unknown, a shape is not a shape, or the byte ranges overlap,
        leave gaps, disagree with shape and dtype, or do not end where the file ends.
    """
    entries = parse_json(text, file=file, what="header ")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("__metadata__ is not a map of strings", file=file)

    data_start = 8 + len(text)
    tensors = {name: _entry(name, entry, data_start, file) for name, entry in entries.items()}
    in_order = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    expected = data_start
    for name, tensor in in_order:
        if tensor.start != expected:
            kind = "overlaps the tensor before it" if tensor.start < expected else "leaves a gap before it"
            found, due = tensor.start - data_start, expected - data_start
            raise CheckpointError(f"starts at offset {found} and {kind}; {due} was due", file=file, tensor=name)
        expected = tensor.stop
    if expected != file_size:
        problem = f"tensors end at byte {expected}, but the file has {file_size}"
        raise CheckpointError(problem + ("; is it cut short?" if expected > file_size else ""), file=file)
    _compare_with_library(text, file_size, dict(in_order), file)
    return dict(in_order), metadata


def _compare_with_library(text: bytes, file_size: int, tensors: Mapping[str, TensorEntry], file: object) -> None:
    """Refuse a header in which the safetensors library finds something else than we do.

    The library maps the file that it opens, and whoever reads through a map is killed when another process cuts the
    file short. So it gets a file of its own: this header and a hole of the right length, which takes no room.
    """
    try:
        memory = os.memfd_create("header") if hasattr(os, "memfd_create") else None
        with tempfile.TemporaryFile() if memory is None else os.fdopen(memory, "w+b") as copy:
            copy.write(len(text).to_bytes(8, "little") + text)
            copy.truncate(file_size)
            with safe_open(f"/dev/fd/{copy.fileno()}", "np") as library:
                slices = {name: library.get_slice(name) for name in library.offset_keys()}
                theirs = {name: (own.get_dtype(), tuple(own.get_shape())) for name, own in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"the safetensors library refuses the header ({error})", file=file) from None
    except OSError as error:
        raise CheckpointError(f"its header cannot be checked ({error.strerror})", file=file) from None
    ours = {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
    in_order = [[name for name, (_, shape) in each.items() if 0 not in shape] for each in (theirs, ours)]
    if theirs != ours or in_order[0] != in_order[1]:  # tensors without elements lie anywhere
        raise CheckpointError("the safetensors library finds other tensors in the header", file=file)


def _entry(name: str, entry: Any, data_start: int, file: object) -> TensorEntry:
    def is_size(number: Any) -> bool:
        return type(number) is int and 0 <= number <= MAX_OFFSET

    def bad(problem: str) -> CheckpointError:
        return CheckpointError(problem, file=file, tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("has a broken entry; dtype, shape and data_offsets were expected")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(f"has dtype {str(dtype)[:40]}, which safetensors does not define")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_size, shape)):
        raise bad(f"has shape {str(shape)[:80]}; a list of at most {MAX_DIMENSIONS} sizes was expected")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise bad(f"has data_offsets {str(offsets)[:80]}; two byte offsets were expected")
    # A zero among the sizes makes the product zero; the others must still make an array that NumPy can address.
    if prod(size for size in shape if size) * 8 > MAX_OFFSET:
        raise bad(f"has shape {str(tuple(shape))[:80]}, more elements than any file holds")
    bits, (start, stop) = prod(shape) * BITS[dtype], offsets
    if bits % 8 or stop - start != bits // 8:
        raise bad(f"has {stop - start} bytes; {dtype} of shape {tuple(shape)} needs {bits / 8:.15g}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)
