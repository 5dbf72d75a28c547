"""A weight made of several stored tensors, as all packings make it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, NoReturn

import numpy as np

from weightscope.checkpoint.checkpoint import StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.consolidated import JoinedTensor
from weightscope.checkpoint.storage import Storage

# Bits of fields whose codes are looked up together, by bits of a code. A field ends in the byte
# where it begins or in the next. Wider ones were slower: their tables leave the cache.
FIELD = {1: 8, 2: 8, 3: 12, 4: 8, 5: 10, 6: 12, 7: 7, 8: 8}
FLOATS = ("F16", "BF16", "F32", "F64")
# Suffixes of tensors that scale a packed weight's inputs or outputs; reading the weight needs none.
OF_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "activation_scale")


def parts_of(
    prefix: str, stored: Mapping[str, StoredTensor], *keys: str, joint: str = "."
) -> dict[str, StoredTensor]:
    """The parts of a weight that are there, by the ends of their names."""
    names = {key: f"{prefix}{joint}{key}" for key in keys}
    return {key: stored[name] for key, name in names.items() if name in stored}


def stated_weights(settings: Config) -> list[Mapping[str, Any]]:
    """Settings of weights in config_groups, of compressed-tensors or ModelOpt, by group."""
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in listed if isinstance(group, dict)]
    return [stated for stated in weights if isinstance(stated, dict)]


def unpack_columns(packed: np.ndarray, bits: int) -> np.ndarray:
    """Integers of 32-bit words, lowest bits first: (rows, words) -> (rows, words * 32 / bits)."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (packed[:, :, None] >> shifts & (2**bits - 1)).astype(np.uint8).reshape(len(packed), -1)


def unpacked(packed: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each code: packed bytes (n_bytes,), values (2^bits,) -> (n_codes,).

    Examples
    --------
    >>> unpacked(np.array([0b10_00_11_01], np.uint8), np.float32([0, 1, 2, 3])).tolist()
    [1.0, 3.0, 0.0, 2.0]
    """
    bits = len(values).bit_length() - 1
    width = FIELD[bits]
    per_field = width // bits
    codes = np.arange(1 << width)[:, None] >> bits * np.arange(per_field) & (1 << bits) - 1
    return values[codes].take(_fields(packed, width), axis=0).reshape(-1)


def _fields(packed: np.ndarray, width: int) -> np.ndarray:
    """Integers of `width` bits, lowest bits first: (n_bytes,) -> (n_bytes * 8 / width,)."""
    if width == 8:
        return packed
    in_bytes = packed.reshape(-1, lcm(8, width) // 8)
    fields = np.empty((len(in_bytes), in_bytes.shape[1] * 8 // width), np.uint16)
    for i in range(fields.shape[1]):
        first, shift = divmod(i * width, 8)
        field = in_bytes[:, min(first + 1, in_bytes.shape[1] - 1)].astype(np.uint16) << 8
        field |= in_bytes[:, first]
        field >>= shift
        fields[:, i] = field & (1 << width) - 1
    return fields.reshape(-1)


@dataclass(frozen=True)
class FilledTensor(StoredTensor):
    """Codes of the stored ones' shape, all the same: one byte or three, again and again."""

    fill: int = 0

    def raw(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        repeated = self.fill.to_bytes(1 if self.fill < 256 else 3, "little")
        pattern = np.roll(np.frombuffer(repeated, np.uint8), -(start or 0))
        return np.resize(pattern, (self.nbytes if stop is None else stop) - (start or 0))


@dataclass(frozen=True)
class DequantisedTensor(WholeTensor):
    """A weight made of several stored tensors."""

    name: str
    by_key: dict[str, StoredTensor]  # the parts by role, the main one first
    settings: Config  # quantization_config
    noted: set[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def file(self) -> Storage:  # type: ignore[override]
        return self.parts[0].file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.by_key["weight"].shape

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return tuple(self.by_key.values())

    def unchecked(self, noted: set[str]) -> Tensor:
        # The weight's NaN and infinity are noted, not its parts'.
        by_key = {key: replace(part, noted=set()) for key, part in self.by_key.items()}
        return replace(self, by_key=by_key, noted=noted)

    @abstractmethod
    def check(self) -> None:
        """Refuse missing parts, and dtypes and shapes that do not fit together."""

    @abstractmethod
    def dequantise(self) -> np.ndarray:
        """The weight, float32, of `shape`."""

    def read(self) -> np.ndarray:
        for file in {id(part.file): part.file for part in self.parts}.values():
            file.prefetch([part.entry for part in self.parts if part.file is file])
        hostile_scales = np.errstate(over="ignore", invalid="ignore", divide="ignore")
        with hostile_scales:
            weight = self.dequantise()
        return self.check_finite(weight)

    def part(self, key: str, dtypes: tuple[str, ...], n_dimensions: int) -> StoredTensor:
        """A required part, of one of these dtypes."""
        part = self.by_key.get(key)
        if part is None:
            raise self.refuse(f"has no {key}; {self.dtype} needs one")
        if part.dtype not in dtypes or len(part.shape) != n_dimensions:
            problem = f"has {key} of dtype {part.dtype} and shape {part.shape}"
            needed = f"{' or '.join(dtypes)} of {n_dimensions} dimensions"
            raise self.refuse(f"{problem}; {self.dtype} needs {needed}")
        return part

    def misshapen(self) -> NoReturn:
        """Refuse parts whose shapes do not fit together."""
        shapes = ", ".join(f"{key} {part.shape}" for key, part in self.by_key.items())
        raise self.refuse(f"is in parts that do not fit together: {shapes}")

    def codes(self) -> tuple[int, int, int | tuple[float, ...]] | None:
        """Bytes that hold the codes of the first and last level, and levels as in `ends`."""
        return None

    def ends(self) -> tuple[Tensor, Tensor, int | tuple[float, ...]] | None:
        if (codes := self.codes()) is None:
            return None
        key, packed = next(iter(self.by_key.items()))  # the main part

        def filled(fill: int) -> Tensor:
            codes = FilledTensor(packed.name, packed.entry, packed.file, None, fill)
            return replace(self, by_key={**self.by_key, key: codes})

        first, last, levels = codes
        return filled(first), filled(last), levels

    def words(self, key: str) -> np.ndarray:
        """A part of 32-bit words."""
        part = self.by_key[key]
        return part.raw().view("<u4").reshape(part.shape)


def renamed(tensor: Tensor, name: str) -> Tensor:
    """A stored tensor, or one made of several, under another name."""
    if isinstance(tensor, StoredTensor | DequantisedTensor | JoinedTensor):
        return replace(tensor, name=name)
    return tensor


def scales_activations(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """True if this is the scale of a packed weight's activations."""
    module, _, last = name.rpartition(".")
    return last in OF_ACTIVATIONS and isinstance(tensors.get(f"{module}.weight"), DequantisedTensor)


# Finder of the weight whose main part a stored tensor is, by all tensors and settings; else None.
Find = Callable[[StoredTensor, Mapping[str, StoredTensor], Config], DequantisedTensor | None]
