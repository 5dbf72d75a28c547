"""The seam between kernels and array libraries: what is missing is said in a line, and copies arrive in time."""

import sys
import weakref
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from weightscope import CheckpointError
from weightscope.core.compute.device import CPU, Cuda, Device, open_device, rows_that_fit

GB = 10**9


class TestRows:
    @pytest.mark.parametrize(
        ("free", "fixed", "per_row", "most", "rows"),
        [
            (24 * GB, 0, 32 * 50_257, 1336, 1336),  # more room than blocks want
            (1 * GB, 0, 32 * 50_257, 1336, 435),
            (1 * GB, 400_000_000, 32 * 128_256, 524, 73),
            (10_000, 0, 7_000, 5, 1),
        ],
    )
    def test_rows_that_fit_the_memory(self, free, fixed, per_row, most, rows):
        assert rows_that_fit(free, fixed, per_row, most) == rows

    def test_a_block_never_takes_more_than_its_share(self):
        for free in range(10**6, 10**8, 10**6 + 7):
            rows = rows_that_fit(free, 300_000, 3001, 10**9)
            assert 300_000 + 3001 * rows <= 0.7 * free < 300_000 + 3001 * (rows + 1)

    def test_memory_for_less_than_one_row_is_refused_with_both_numbers(self):
        with pytest.raises(CheckpointError, match="the device has 10 MB free; this needs 17 MB at least"):
            rows_that_fit(10**7, 2 * 10**6, 10**7, 4)


class TestOpening:
    def test_the_cpu_needs_nothing(self):
        assert open_device("cpu") is CPU

    def test_missing_cupy_is_refused(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(CheckpointError, match=r"^device cuda needs CuPy: pip install 'cupy-cuda12x\[ctk\]'$"):
            open_device("cuda")

    def test_broken_cupy_says_why(self, monkeypatch, tmp_path):
        (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1: cannot open\\nmore')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        with pytest.raises(CheckpointError, match=r"needs CuPy.* \(libcuda.so.1: cannot open\)$"):
            open_device("cuda")

    @pytest.mark.parametrize(
        ("count", "ones", "says"),
        [
            (0, None, "none found"),
            (RuntimeError("cudaErrorNoDevice: no CUDA-capable device\nis detected"), None, "no CUDA-capable device$"),
            (1, RuntimeError("CuPy failed to load libnvrtc.so.12"), "libnvrtc"),
            (1, MemoryError(), "MemoryError"),
        ],
    )
    def test_no_usable_device_is_refused(self, monkeypatch, count, ones, says):
        def get_device_count():
            if isinstance(count, Exception):
                raise count
            return count

        def ones_there(*arguments):
            raise ones

        cupy = ModuleType("cupy")
        cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=get_device_count))
        cupy.ones, cupy.float32 = ones_there, np.float32
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        with pytest.raises(CheckpointError, match=f"no usable CUDA device: .*{says}") as caught:
            open_device("cuda")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(("name", "says"), [("no_such_module", "there are cpu and cuda"), ("json", "standard")])
    def test_unknown_array_library_is_refused(self, name, says):
        with pytest.raises(CheckpointError, match=says):
            open_device(name)


@pytest.mark.parametrize("device", [CPU, Device("numpy", np), open_device("array_api_strict")], ids=lambda d: d.name)
class TestArrays:
    def test_arrays_come_back_from_the_device_unchanged(self, device):
        for array in (np.arange(6.0).reshape(2, 3).T, np.array(2, np.int64), np.zeros((0, 3), np.float32)):
            back = device.get(device.put(array))
            assert back.dtype == array.dtype
            np.testing.assert_array_equal(back, array)

    def test_bits(self, device):
        numbers = np.array([[0.0, -0.0], [1.5, -np.inf]], np.float32)
        np.testing.assert_array_equal(device.get(device.bits(device.put(numbers))), numbers.view(np.int32))

    def test_blocks_keep_their_order(self, device):
        blocks = [(np.full(n, n), np.arange(n)) for n in range(5)]
        returned = [tuple(device.get(array) for array in block) for block in device.put_ahead(blocks)]
        for block, there in zip(blocks, returned, strict=True):
            for array, copy in zip(block, there, strict=True):
                np.testing.assert_array_equal(copy, array)


class Pool:
    """Memory that is handed out again as soon as its holder is gone, as CuPy's pools do."""

    def __init__(self):
        self.free = defaultdict(list)

    def take(self, shape, dtype):
        size = (tuple(shape), np.dtype(dtype))
        return self.free[size].pop() if self.free[size] else np.full(shape, -1, dtype)

    def give_back_after(self, holder, memory):
        weakref.finalize(holder, self.free[memory.shape, memory.dtype].append, memory)


class Stream:
    """Work in order, done as soon as it is queued or not before somebody waits for it."""

    def __init__(self, late):
        self.late, self.queue, self.done = late, [], 0

    def do(self, work):
        self.queue.append(work)
        if not self.late:
            self.until(len(self.queue))

    def until(self, end):
        while self.done < end:
            self.done += 1
            self.queue[self.done - 1]()

    def record(self):
        end = len(self.queue)
        return SimpleNamespace(synchronize=lambda: self.until(end))

    def wait_event(self, event):
        self.do(event.synchronize)


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies at the last moment"])
def test_memory_is_reused_only_after_its_copy_has_ended(monkeypatch, late):
    """The extremes of what two streams may do: kernels run at the very end, copies at once or when waited for."""
    kernels, copies, on_card, pinned = Stream(late=True), Stream(late), Pool(), Pool()

    class OnCard:
        def __init__(self, shape, dtype):
            self.shape, self.memory = shape, on_card.take(shape, dtype)
            on_card.give_back_after(self, self.memory)

        def set(self, source, stream):
            there, here = self.memory, source.memory
            stream.do(lambda: np.copyto(there, here))

    class Pinned(np.ndarray):
        def __new__(cls, array, order):
            memory = pinned.take(array.shape, array.dtype)
            made = memory.view(cls)
            made.memory = memory
            pinned.give_back_after(made, memory)
            return made

    cuda = SimpleNamespace(Stream=lambda non_blocking: copies, get_current_stream=lambda: kernels)
    cupyx = ModuleType("cupyx")
    cupyx.empty_like_pinned = Pinned
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    device = Cuda("cuda", SimpleNamespace(cuda=cuda, empty=OnCard))

    sums, handed_out = [], 0
    blocks = [(np.full(4, n), np.full((2, 2), 10 * n)) for n in range(1, 7)]

    def counted():
        nonlocal handed_out
        for block in blocks:
            handed_out += 1
            yield block

    for seen, (a, b) in enumerate(device.put_ahead(counted()), start=1):
        assert handed_out == min(seen + 1, len(blocks))  # the next block is on its way
        kernels.do(lambda a=a.memory, b=b.memory: sums.append(a.sum() + b.sum()))
        del a, b
    kernels.until(len(kernels.queue))
    assert sums == [44 * n for n in range(1, 7)]
