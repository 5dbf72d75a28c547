"""GGUF files: how fast blocks of every ggml type become float32 on one core, next to the gguf package."""

from collections.abc import Callable

import gguf.quants
import numpy as np

from benchmarks.commands import Cost, timed
from benchmarks.results import Measured, before_row
from weightscope.checkpoint.ggml_blocks import AT_ONCE, LAYOUTS, unpack_of

ROW = 4096  # weights; the package unpacks sixteen rows at a time
ROUNDS = 3
PACKAGE = "the gguf package"


def measure(megabytes: int = 64) -> list[Measured]:
    """Two rows for each type: blocks of so many megabytes of float32 by numba and by NumPy."""
    with np.errstate(all="ignore"):
        return [row for kind in LAYOUTS for row in rows(kind, megabytes)]


def rows(kind: str, megabytes: int) -> list[Measured]:
    """One type; our functions write where the caller says, as the package cannot."""
    layout, began = LAYOUTS[kind], before_row()
    n = megabytes * 10**6 // 4 // ROW * ROW
    blocks = np.random.default_rng(0).integers(0, 256, (n // layout.weights, layout.bytes), np.uint8)
    traits = gguf.quants._type_traits.get(getattr(gguf.GGMLQuantizationType, kind, None))
    out, step = np.empty((len(blocks), layout.weights), np.float32), AT_ONCE // layout.weights

    def package() -> None:
        traits.dequantize(blocks.reshape(n // ROW, -1))

    def ours(fast: bool) -> Callable[[], None]:
        unpack = unpack_of(layout, fast)

        def work() -> None:
            for first in range(0, len(blocks), step):
                unpack(blocks[first : first + step], out[first : first + step])

        work()  # compiles
        return work

    works = {"numba": ours(True), "NumPy": ours(False)}
    floors, costs = list[Cost](), {name: list[Cost]() for name in works}
    for _ in range(ROUNDS):
        floors += [timed(package)] if traits else []
        for name, work in works.items():
            costs[name].append(timed(work))
    return [
        Measured.of(
            f"{kind} to float32, {name}", each, floors, PACKAGE if floors else "",
            rates=f"{4 * n / min(cost.wall for cost in each) / 1e9:.2g} GB/s", **began,
        )
        for name, each in costs.items()
    ]  # fmt: skip
