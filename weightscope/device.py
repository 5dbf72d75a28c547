"""Which array library computes: NumPy on this machine's cores unless asked otherwise, CuPy on a card.

A kernel that can run elsewhere takes a `Device` and is written against the Python array API standard (2023.12); what
the standard leaves to each library - copies between the two memories, bit patterns, how much room there is - it asks
of the device. Where this machine's cores have a faster kernel of their own, `CPU` chooses that. CuPy is imported here
and nowhere else.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from weightscope.errors import CheckpointError

SHARE_OF_FREE = 0.7  # of a card's free memory that blocks may take; the rest is for libraries and fragmentation


@dataclass(frozen=True)
class Device:
    """A namespace of the array API standard whose arrays lie in this machine's memory, and what goes with it.

    Attributes
    ----------
    name : str
    xp : namespace
    memory : int
        Bytes that blocks are sized to.
    """

    name: str
    xp: Any
    memory: int = 1 << 30

    def put(self, array: np.ndarray) -> Any:
        """A NumPy array as one of this namespace."""
        return self.xp.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        """An array of this namespace as NumPy's."""
        return np.asarray(array)

    def bits(self, array: Any) -> Any:
        """The bit patterns of float32 numbers as int32."""
        return self.put(self.get(array).view(np.int32))

    def free_bytes(self) -> int:
        """How much memory new arrays may take."""
        return self.memory

    def put_ahead(self, blocks: Iterable[tuple[np.ndarray, ...]]) -> Iterator[tuple[Any, ...]]:
        """Each block's arrays as this namespace's, the next block's on their way while one is worked on."""
        for block in blocks:
            yield tuple(self.put(array) for array in block)


@dataclass(frozen=True)
class Cuda(Device):
    """CuPy on the first CUDA device it sees; `memory` says nothing here, the card is asked."""

    def get(self, array: Any) -> np.ndarray:
        return self.xp.asnumpy(array)

    def bits(self, array: Any) -> Any:
        return array.view(self.xp.int32)

    def free_bytes(self) -> int:
        free, _ = self.xp.cuda.Device().mem_info
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def put_ahead(self, blocks: Iterable[tuple[np.ndarray, ...]]) -> Iterator[tuple[Any, ...]]:
        """Copied from page-locked memory in a stream of their own, so that copies and kernels run side by side."""
        copying = self.xp.cuda.Stream(non_blocking=True)
        on_their_way: deque[tuple[Any, ...]] = deque()
        for block in blocks:
            on_their_way.append(self._send(block, copying))
            if len(on_their_way) > 1:
                yield self._received(*on_their_way.popleft())
        while on_their_way:
            yield self._received(*on_their_way.popleft())

    def _send(self, block: tuple[np.ndarray, ...], copying: Any) -> tuple[Any, ...]:
        """Begin copying a block: its arrays-to-be, the page-locked originals, and the event that ends it."""
        from cupyx import empty_like_pinned

        pinned = tuple(empty_like_pinned(array, order="C") for array in block)
        for source, array in zip(block, pinned, strict=True):
            np.copyto(array, source)
        # The memory pool hands out what kernels still under way may be reading: those are waited for before a byte is
        # written. They are the kernels of the blocks before the last, so copying keeps up with the one in work.
        arrays = tuple(self.xp.empty(array.shape, array.dtype) for array in pinned)
        copying.wait_event(self.xp.cuda.get_current_stream().record())
        for source, array in zip(pinned, arrays, strict=True):
            array.set(source, stream=copying)
        return arrays, pinned, copying.record()

    def _received(self, arrays: tuple[Any, ...], pinned: tuple[np.ndarray, ...], copied: Any) -> tuple[Any, ...]:
        copied.synchronize()  # before the page-locked memory is used again
        return arrays


CPU = Device("cpu", np)


@cache
def open_device(name: str) -> Device:
    """Where to compute, by name.

    Parameters
    ----------
    name : str
        "cpu": `CPU`, this machine's cores. "cuda": the first visible CUDA device, through CuPy. Anything else is a
        module that implements the array API standard, such as "array_api_strict", by which the kernels are tested
        without a card; the command line does not offer it.

    Raises
    ------
    CheckpointError
        CuPy or a usable card is missing, or there is no such module.
    """
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
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == "cupy" else f" ({_first_line(error)})"
        raise CheckpointError(f"device cuda needs CuPy: pip install 'cupy-cuda12x[ctk]'{why}") from None
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            raise RuntimeError("none found")
        tried = cupy.ones((2, 2), cupy.float32)
        (tried @ tried + 1).get()  # a product and a kernel compiled here: what is missing shows now, in one line
    except (RuntimeError, ImportError, OSError, MemoryError) as error:
        raise CheckpointError(f"device cuda: no usable CUDA device: {_first_line(error)}") from None
    return Cuda("cuda", cupy)


def namespace(array: Any) -> Any:
    """The array library that an array is of: the one it names, as the standard has it, else CuPy, which names none."""
    named = getattr(array, "__array_namespace__", None)
    return named() if named else import_module("cupy")


def vecdot(a: Any, b: Any) -> Any:
    """The sum of a * b over the last axis, as the standard has it; CuPy does not yet."""
    xp = namespace(a)
    return xp.vecdot(a, b) if hasattr(xp, "vecdot") else xp.sum(a * b, axis=-1)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rows_that_fit(free: int, beside: int, a_row: int, most: int) -> int:
    """How many rows of a computation a block may have.

    Parameters
    ----------
    free : int
        Bytes that are free.
    beside : int
        Bytes of what has to lie there beside any block.
    a_row : int
        Bytes that a row takes, everything worked out of it included.
    most : int
        More rows than this gain nothing.

    Raises
    ------
    CheckpointError
        Not even one row fits.
    """
    fit = (int(SHARE_OF_FREE * free) - beside) // max(a_row, 1)
    if fit < 1:
        needed = (beside + a_row) / SHARE_OF_FREE
        raise CheckpointError(f"the device has {free / 1e6:,.0f} MB free; this needs {needed / 1e6:,.0f} MB at least")
    return max(1, min(fit, most))
