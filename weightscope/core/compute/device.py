"""Devices that run kernels: NumPy on the CPU by default, CuPy on a GPU; only this imports CuPy.

A kernel for any device takes a `Device` and is written for the Python array API standard (2023.12).
What the standard leaves open (copies between memories, bit patterns, free memory) are methods of
the device.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from weightscope.core.errors import CheckpointError, first_line

SHARE_OF_FREE = 0.7  # share for blocks; the rest is for libraries and fragmentation


@dataclass(frozen=True)
class Device:
    """A namespace of the array API standard, with arrays in main memory."""

    name: str
    xp: Any  # the namespace
    memory: int = 1 << 30  # bytes available to blocks

    def put(self, array: np.ndarray) -> Any:
        """A NumPy array as an array of this namespace."""
        return self.xp.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        """An array of this namespace as a NumPy array."""
        return np.asarray(array)

    def bits(self, array: Any) -> Any:
        """The bit patterns of float32 numbers as int32."""
        return self.put(self.get(array).view(np.int32))

    def free_bytes(self) -> int:
        """Bytes that new arrays may take."""
        return self.memory

    def put_ahead(self, blocks: Iterable[tuple[np.ndarray, ...]]) -> Iterator[tuple[Any, ...]]:
        """Each block's arrays in this namespace; the next is copied while one is worked on."""
        for block in blocks:
            yield tuple(self.put(array) for array in block)


@dataclass(frozen=True)
class Cuda(Device):
    """CuPy on the first visible CUDA device, which reports its memory; `memory` is not used."""

    def get(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def bits(self, array: Any) -> Any:
        return array.view(self.xp.int32)

    def free_bytes(self) -> int:
        free, _ = self.xp.cuda.Device().mem_info
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def put_ahead(self, blocks: Iterable[tuple[np.ndarray, ...]]) -> Iterator[tuple[Any, ...]]:
        """Copy blocks from page-locked memory in a second stream, in parallel with kernels."""
        copying = self.xp.cuda.Stream(non_blocking=True)
        sent: deque[tuple[Any, ...]] = deque()
        for block in blocks:
            sent.append(self._send(block, copying))
            if len(sent) > 1:
                yield self._received(*sent.popleft())
        while sent:
            yield self._received(*sent.popleft())

    def _send(self, block: tuple[np.ndarray, ...], copying: Any) -> tuple[Any, ...]:
        """Begin copying a block: its arrays, their page-locked originals, the final event."""
        from cupyx import empty_like_pinned

        pinned = tuple(empty_like_pinned(array, order="C") for array in block)
        for source, array in zip(block, pinned, strict=True):
            np.copyto(array, source)
        # The memory pool may return memory that running kernels still read, so the copy waits for
        # them. They belong to the blocks before the last: copying still overlaps with the current
        # block.
        arrays = tuple(self.xp.empty(array.shape, array.dtype) for array in pinned)
        copying.wait_event(self.xp.cuda.get_current_stream().record())
        for source, array in zip(pinned, arrays, strict=True):
            array.set(source, stream=copying)
        return arrays, pinned, copying.record()

    def _received(
        self, arrays: tuple[Any, ...], pinned: tuple[np.ndarray, ...], copied: Any
    ) -> tuple[Any, ...]:
        copied.synchronize()  # before the page-locked memory is used again
        return arrays


CPU = Device("cpu", np)


@cache
def open_device(name: str) -> Device:
    """The device of a name: cpu, cuda, or a module that implements the array API standard."""
    if name == "cpu":
        return CPU
    if name == "cuda":
        return _cuda()
    try:
        xp = import_module(name)
    except ImportError:
        raise CheckpointError(f"no device {name!r}: there are cpu and cuda") from None
    if not hasattr(xp, "__array_api_version__"):
        raise CheckpointError(f"module {name!r} does not implement the array API standard")
    return Device(name, xp)


def _cuda() -> Cuda:
    try:
        import cupy
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        why = "" if is_absent else f" ({first_line(error)})"
        problem = f"device cuda needs CuPy: pip install 'cupy-cuda12x[ctk]'{why}"
        raise CheckpointError(problem) from None
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            raise RuntimeError("none found")
        # A product and a compiled kernel: a broken installation fails here, in one line.
        ones = cupy.ones((2, 2), cupy.float32)
        (ones @ ones + 1).get()
    except (RuntimeError, ImportError, OSError, MemoryError) as error:
        raise CheckpointError(f"device cuda: no usable CUDA device: {first_line(error)}") from None
    return Cuda("cuda", cupy)


def namespace(array: Any) -> Any:
    """The array library of an array: by the standard, or CuPy, which does not follow it here."""
    standard = getattr(array, "__array_namespace__", None)
    return standard() if standard else import_module("cupy")


def vecdot(a: Any, b: Any) -> Any:
    """The sum of a * b over the last axis; CuPy does not have the standard's function yet."""
    xp = namespace(a)
    return xp.vecdot(a, b) if hasattr(xp, "vecdot") else xp.sum(a * b, axis=-1)


def rows_that_fit(free: int, fixed: int, per_row: int, most: int) -> int:
    """Rows that fit into `free` bytes at `per_row` each after `fixed`; at most `most`."""
    fit = (int(SHARE_OF_FREE * free) - fixed) // max(per_row, 1)
    if fit < 1:
        needed = f"{(fixed + per_row) / SHARE_OF_FREE / 1e6:,.0f} MB"
        problem = f"the device has {free / 1e6:,.0f} MB free; this needs {needed} at least"
        raise CheckpointError(problem)
    return max(1, min(fit, most))
