"""Which coordinate of a token turns which pair of dimensions, where positions have several: multimodal RoPE."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightscope.checkpoint.config import Config


def contiguous(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Section after section: time, then height, then width (Qwen2-VL)."""
    return np.repeat(np.arange(len(sizes)), sizes)


def interleaved(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Time, height, width in turn while the sections of height and width last, then time (Qwen3-VL)."""
    axes = np.zeros(pairs, int)
    for axis in (1, 2):
        axes[axis : 3 * sizes[axis] : 3] = axis
    return axes


def height_and_width_first(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Height and width in turn, then time (ERNIE 4.5 VL, whose sections are height, width, time)."""
    return np.concatenate((np.tile((1, 2), sizes[0]), np.zeros(sizes[2], int)))


@dataclass(frozen=True)
class Sections:
    """Multimodal RoPE: every pair turns by one of a token's coordinates (time, height, width).

    Text stands at the same number on every axis, so that there it is RoPE.

    Attributes
    ----------
    arranged : function of (sizes of the sections, number of pairs) giving each pair's axis
    usual : tuple of int
        Sizes where rope_parameters has no `mrope_section`.
    """

    arranged: Callable[[tuple[int, ...], int], np.ndarray]
    usual: tuple[int, ...]

    def axes(self, given: Config, pairs: int) -> np.ndarray:
        """The axis of every pair, shape (pairs,).

        Raises
        ------
        CheckpointError
            The sections are not three sizes that add up to the pairs there are.
        """
        key = "mrope_section"
        value = given.get(key) or list(self.usual)
        wanted = f"three sizes that add up to the {pairs} pairs that turn"
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(type(size) is int for size in value):
            raise given.error(key, wanted)
        if min(value) < 0 or (sum(value) != pairs and self.arranged is not interleaved):
            raise given.error(key, wanted)
        axes = self.arranged(tuple(value), pairs)
        if len(axes) != pairs:
            raise given.error(key, wanted)
        return axes
