"""Rotation by row and column in vision towers: one formula, spelled by each architecture in its own way."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weightscope.attention.rotation import COLUMN, FRAME, ROW, GridRotation, inverse_powers
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.config import ModelConfig
from weightscope.families.rope import SMALLEST_BASE

# Each takes a base and the head's width, and gives the frequency and the axis of every pair.
Spelling = Callable[[float, int], tuple[np.ndarray, np.ndarray]]


def one_after_another(*axes: int) -> Spelling:
    """A block of pairs for each axis, the same frequencies in each; an odd rest of the head does not turn."""

    def spelled(theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
        own = inverse_powers(theta, 2 * (width // len(axes) // 2))
        return np.tile(own, len(axes)), np.repeat(axes, len(own))

    return spelled


ROWS_THEN_COLUMNS = one_after_another(ROW, COLUMN)


def in_turn(*axes: int) -> Spelling:
    """The axes in turn, a frequency for each turn (Kimi)."""

    def spelled(theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
        own = inverse_powers(theta, width // len(axes))
        return np.repeat(own, len(axes)), np.tile(axes, len(own))

    return spelled


def odd_and_even(theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The frequencies of a whole head: those of even pairs for rows, then those of odd ones for columns (Pixtral)."""
    of_head = inverse_powers(theta, width)
    rows, columns = of_head[0::2], of_head[1::2]
    return np.concatenate((rows, columns)), np.repeat((ROW, COLUMN), (len(rows), len(columns)))


@dataclass(frozen=True)
class GridRope:
    """How an architecture rotates by row and column.

    Attributes
    ----------
    spelled : function of (base, width of a head) -> (frequencies, axes)
    interleaved, blocks
        As of `Rotation`.
    theta : float or None
        The base where the config has none; None where it must.
    image, patch : tuple of str
        Config keys of the image's and the patch's side; empty where images are of any size.
    prefix, suffix : int or str
        Tokens before and after the patches, or the config key of their number; `registers` come after the class token.
    registers : str
        Config key of the number of registers, which are before the patches too.
    merge, window, window_unit : str
        Config key of the side of blocks of patches; of the side of windows, where patches follow so; and of the side of
        what a window's side is counted in, if not patches.
    origin, centred
        As of `GridRotation`.
    """

    spelled: Spelling = ROWS_THEN_COLUMNS
    interleaved: bool = False
    blocks: int = 1
    theta: float | None = 10000.0
    image: str = ""
    patch: str = "patch_size"
    prefix: int = 0
    suffix: int = 0
    registers: str = ""
    merge: str = ""
    window: str = ""
    window_unit: str = ""
    origin: float = 0.0
    centred: bool = False

    def parameters(self, config: Config, layer_type: str) -> Config:
        """The base alone; nothing scales it.

        Raises
        ------
        CheckpointError
            Something does.
        """
        given = config.inside("rope_parameters")
        if given.get("rope_type", "axial") not in ("axial", "default"):
            raise given.error("rope_type", "axial")
        source = given if given.has("rope_theta") else config
        theta = source.number("rope_theta", default=self.theta, smallest=SMALLEST_BASE)
        return Config({"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}, config.file)

    def rotation(self, config: ModelConfig, layer: int) -> GridRotation:
        """The same for every layer.

        Raises
        ------
        CheckpointError
            Heads are of a width that does not turn in pairs by every axis.
        """
        theta = config.rope[config.layer_types[layer]].number("rope_theta")
        frequencies, axes = self.spelled(theta, config.head_dim)
        n_axes = len(set(axes.tolist()))
        if len(axes) == 0 or (FRAME not in axes and config.head_dim % (2 * n_axes)):
            problem = f"heads of {config.head_dim} dimensions do not turn in pairs by {n_axes} axes"
            raise CheckpointError(problem, file=config.file)
        image, patch = (sides_of(config, key) if self.image else (1, 1) for key in (self.image, self.patch))
        grid = tuple(max(whole // part, 1) for whole, part in zip(image, patch, strict=True)) if self.image else ()
        merge = config.size(self.merge) if self.merge else 1
        return GridRotation(
            2 * np.pi * frequencies if self.centred else frequencies,
            interleaved=self.interleaved, blocks=self.blocks, axes=axes, grid=grid,
            prefix=self.prefix + (config.count(self.registers) if self.registers else 0), suffix=self.suffix,
            merge=merge, window=self._window(config, merge), origin=self.origin, centred=self.centred,
        )  # fmt: skip

    def _window(self, config: ModelConfig, merge: int) -> int:
        """The side of a window in blocks of patches."""
        if not self.window:
            return 0
        unit = config.size(self.window_unit) if self.window_unit else 1
        return max(config.size(self.window) // merge // unit, 1)


@dataclass(frozen=True)
class WindowRope(GridRope):
    """Rotation within square windows of an image; in some layers over all of it, no faster than in a window (SAM 3).

    Attributes
    ----------
    side, whole : str
        Config keys of a window's side in patches, and of the layers that see the whole image.
    """

    side: str = "window_size"
    whole: str = "global_attn_indexes"

    def rotation(self, config: ModelConfig, layer: int) -> GridRotation:
        """A layer's rotation; errors as of `GridRope`."""
        image, side = super().rotation(config, layer), config.size(self.side)
        if len(set(image.grid)) > 1:
            raise config.error(self.image, "a square image")
        if layer in config.layers(self.whole):
            return replace(image, frequencies=image.frequencies * side / image.grid[-1])
        return replace(image, grid=(side, side))


def sides_of(config: Config, key: str) -> tuple[int, int]:
    """(height, width) of something that may be given as one number."""
    value = config.get(key)
    pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
    height, width = (Config({key: side}, config.file).size(key) for side in pair)
    return height, width
