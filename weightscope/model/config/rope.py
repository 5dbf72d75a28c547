"""Rotary positions of text and images: from config.json to the rotation they mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log, sqrt
from typing import Annotated, NamedTuple

import numpy as np

from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.config.config import LARGEST_NUMBER, ModelConfig, OneOf, Within
from weightscope.model.config.rules import always, in_list
from weightscope.model.layers.rotation import (
    COLUMN,
    FRAME,
    ROW,
    GridRotation,
    Rotation,
    inverse_powers,
    llama3_frequencies,
    ntk_frequencies,
    yarn_frequencies,
    yarn_temperature,
)

# Multimodal RoPE: a token has several coordinates, and each pair of dimensions turns by one.


def contiguous(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Section after section: time, then height, then width (Qwen2-VL)."""
    return np.repeat(np.arange(len(sizes)), sizes)


def interleaved(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Time, height, width in turn until height and width end, then time (Qwen3-VL)."""
    axes = np.zeros(pairs, int)
    for axis in (1, 2):
        axes[axis : 3 * sizes[axis] : 3] = axis
    return axes


def height_and_width_first(sizes: tuple[int, ...], pairs: int) -> np.ndarray:
    """Height and width in turn, then time; sections are in this order (ERNIE 4.5 VL)."""
    return np.concatenate((np.tile((1, 2), sizes[0]), np.zeros(sizes[2], int)))


@dataclass(frozen=True)
class Sections:
    """Multimodal RoPE: every pair turns by one of a token's coordinates (time, height, width).

    Text stands at the same number on every axis, so that there it is RoPE.
    """

    # (sizes of the sections, number of pairs) -> each pair's axis
    arranged: Callable[[tuple[int, ...], int], np.ndarray]
    usual: tuple[int, ...]  # sizes where rope_parameters has no `mrope_section`

    def axes(self, given: Config, pairs: int) -> np.ndarray:
        """The axis of each pair, (pairs,); the config's three sizes must add up to the pairs."""
        key = "mrope_section"
        value = given.get(key) or list(self.usual)
        wanted = f"three sizes that add up to the {pairs} pairs that turn"
        if not isinstance(value, list | tuple) or [*map(type, value)] != [int, int, int]:
            raise given.error(key, wanted)
        if min(value) < 0 or (sum(value) != pairs and self.arranged is not interleaved):
            raise given.error(key, wanted)
        axes = self.arranged(tuple(value), pairs)
        if len(axes) != pairs:
            raise given.error(key, wanted)
        return axes


# Rotary parameters as config.json has them, in either dialect, and the rotation they mean.

SMALLEST_BASE = 1.001  # with a base of 1 every pair turns alike, and YaRN divides by its logarithm
Base = Annotated[float, Within(SMALLEST_BASE, LARGEST_NUMBER)]


def _base(given: Config) -> float:
    return given.number("rope_theta", smallest=SMALLEST_BASE)


@dataclass(frozen=True)
class Rope:
    """Rotation of queries and keys in an architecture.

    transformers 4 wrote flat keys (`rope_theta`, `rope_scaling`, `partial_rotary_factor`);
    transformers 5 writes `rope_parameters`, nested by layer type where layers differ. `numbers`
    makes the latter from either.
    """

    interleaved: bool = False  # pairs are neighbours (2j, 2j + 1) rather than halves apart
    theta_key: str = "rope_theta"  # flat key of the base; empty where no config changes it
    theta: Base = 10000.0  # base where the config has none
    # key of the bases of all layers, 0 where one does not rotate; empty where there is none
    thetas: str = ""
    fraction_key: str = "partial_rotary_factor"  # flat key of the share of a head that rotates
    # share where the config has none; None: whole heads turn, and the code asks for no share
    fraction: Annotated[float, Within(1e-6, 1.0)] | None = None
    dims_key: str = ""  # flat key of the number of dimensions, where configs have that
    # flat key and usual value of the base in sliding-window layers, where it differs
    local: tuple[str, float] | None = None
    local_scaled: bool = True  # a flat rope_scaling applies to sliding-window layers too
    width_key: str = ""  # flat key of the number of dimensions in a file of another dialect
    scaling: bool = True  # rope_scaling is read; its code has no place for it otherwise
    # rope_parameters may be nested by layer type, although the class's own are not
    by_type: bool = False
    start_key: str = ""  # key of the number of dimensions before those that rotate
    interleaved_key: str = ""  # key that may switch interleaving off
    # True for layers that rotate
    rotates: Callable[[ModelConfig, int], bool] = always
    scaled_in: str = ""  # key of a list of the layers whose rotation is scaled; empty where all are
    scaled: str = ""  # kind of scaling that any other is read as
    backwards: bool = False  # pairs turn the other way round
    # dynamic scaling by an `alpha` is fixed: the base grows by alpha^(w / (w - 2))
    alpha: bool = False
    rounded: bool = False  # an odd number of dimensions is rounded up
    # the coordinate that turns each pair, where positions have several
    sections: Sections | None = None

    def parameters(self, config: Config, layer_type: str) -> Config:
        """The rotary parameters of one layer type, under transformers 5's names."""
        given = config.inside("rope_parameters")
        if any(isinstance(value, Mapping) for value in given.values()):
            if layer_type not in given:
                raise config.error("rope_parameters", f"an entry for {layer_type} layers")
            given = given.inside(layer_type)
        merged = Config(
            {"rope_type": "default", "partial_rotary_factor": 1.0, **given}, config.file
        )
        merged.number("partial_rotary_factor", largest=1.0)
        if merged.has("rope_theta"):
            _base(merged)
        return self._of_whole_heads(merged) if self.fraction is None else merged

    def _of_whole_heads(self, given: Config) -> Config:
        """Turn whole heads, as transformers' code of these families does if nothing scales."""
        if given["rope_type"] == "proportional":
            return given
        if given["rope_type"] != "default" and given.number("partial_rotary_factor") != 1.0:
            raise given.error("partial_rotary_factor", "1: this architecture turns whole heads")
        return Config({**given, "partial_rotary_factor": 1.0}, given.file)

    def rotation(self, config: ModelConfig, layer: int) -> Rotation | None:
        """The rotation of one layer, or None where it does not rotate."""
        if not self.rotates(config, layer):
            return None
        given = config.rope[config.layer_types[layer]]
        if self.thetas and config.has(self.thetas):
            listed = in_list(config, self.thetas, layer, "a list with every layer's base")
            base = Config({self.thetas: listed}, config.file).number(self.thetas)
            if not base:
                return None
            given = Config({**given, "rope_theta": base}, given.file)
        start = config.size(self.start_key) if self.start_key else 0
        share = 1.0
        if given["rope_type"] != "proportional":
            share = given.number("partial_rotary_factor", largest=1.0)
        width = int((config.head_dim - start) * share)
        if self.dims_key:
            width = config.size(self.dims_key)
            # share of the config's head_dim, which is a whole head's or this part's
            share = given.number("partial_rotary_factor")
            if self.start_key and int(config.size("head_dim", default=width) * share) != width:
                raise config.error(
                    "head_dim", f"{width}: with {self.start_key}, the part of a head that turns"
                )
        turning = width + width % 2 if self.rounded else width
        if turning % 2 or turning < 2 or start + turning > config.head_dim:
            raise given.error(
                "partial_rotary_factor",
                f"an even number of the head's {config.head_dim} dimensions",
            )
        interleaved = self.interleaved
        if self.interleaved_key:
            interleaved = config.flag(self.interleaved_key)
        kind = given["rope_type"]
        if self.scaled_in and layer not in config.layers(self.scaled_in):
            kind = "default"
        kind = self.scaled if self.scaled and kind != "default" else kind
        if self.alpha and kind == "dynamic" and given.get("alpha"):
            kind = "alpha"
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise given.error("rope_type", "one of " + ", ".join(SCALINGS))
        trained = given.size("original_max_position_embeddings", default=config.n_positions or 1)
        allowed = config.n_positions or trained
        scaled = SCALINGS[kind](Scaling(given, _base(given), width, trained, allowed))
        axes = self.sections.axes(given, width // 2) if self.sections else None
        if self.backwards:
            scaled = scaled.backwards()
        return Rotation(interleaved=interleaved, start=start, axes=axes, **scaled.__dict__)


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(ShowsShapes):
    """Frequencies and their exceptions, as Rotation takes them."""

    frequencies: np.ndarray
    factor: float = 1.0
    stretched: Callable[[int], np.ndarray] | None = None
    longest: int = 0

    def backwards(self) -> "Scaled":
        """The frequencies with the other sense of rotation."""
        stretched = self.stretched
        return replace(
            self,
            frequencies=-self.frequencies,
            stretched=stretched and (lambda length: -stretched(length)),
        )


class Scaling(NamedTuple):
    """Rotary parameters of a config, and the sizes that their scaling depends on."""

    given: Config
    theta: float
    width: int  # dimensions that turn
    trained: int  # positions that the model was first trained on
    allowed: int  # positions that it takes now

    @property
    def plain(self) -> np.ndarray:
        """The frequencies without scaling."""
        return inverse_powers(self.theta, self.width)

    def factor(self, default: float | None = None) -> float:
        """The config's factor of scaling."""
        return self.given.number("factor", default=default, smallest=1e-6)

    def stretch(self, key: str) -> np.ndarray:
        """A list of the config with a divisor of each pair's frequency."""
        value, pairs = self.given.get(key), self.width // 2
        wanted = f"a list of {pairs} positive numbers"
        if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
            raise self.given.error(key, wanted)
        if len(value) != pairs:
            raise self.given.error(key, wanted)
        stretch = np.array(value, np.float64)
        if not ((stretch >= 1e-6) & (stretch <= 1e12)).all():
            raise self.given.error(key, wanted)
        return stretch

    def refuse_single_pair(self) -> None:
        """Refuse one pair, whose base does not grow."""
        if self.width == 2:
            raise self.given.error("rope_type", "one that a single pair can be scaled by")


# Kinds of scaling.


def _default(scaling: Scaling) -> Scaled:
    return Scaled(scaling.plain)


def _proportional(scaling: Scaling) -> Scaled:
    """The first pairs of a whole head turn as in a whole head, the others do not."""
    frequencies, share = scaling.plain / scaling.factor(1.0), "partial_rotary_factor"
    frequencies[int(scaling.given.number(share) * scaling.width // 2) :] = 0
    return Scaled(frequencies)


def _linear(scaling: Scaling) -> Scaled:
    return Scaled(scaling.plain / scaling.factor())


def _dynamic(scaling: Scaling) -> Scaled:
    _, theta, width, _, allowed = scaling
    factor = scaling.factor()
    scaling.refuse_single_pair()
    # a partial, unlike a function made here, has the same repr for the same numbers
    stretched = partial(ntk_frequencies, theta, width, factor, trained=allowed)
    return Scaled(scaling.plain, stretched=stretched, longest=allowed)


def _alpha(scaling: Scaling) -> Scaled:
    scaling.refuse_single_pair()
    given, theta, width, *_ = scaling
    growth = given.number("alpha", smallest=1e-6) ** (width / (width - 2))
    return Scaled(inverse_powers(theta * growth, width))


def _yarn(scaling: Scaling) -> Scaled:
    given, theta, width, trained, allowed = scaling
    factor = scaling.factor(allowed / trained)
    weight, weight_all = (given.number(key, default=0) for key in ("mscale", "mscale_all_dim"))
    usual = yarn_temperature(factor)
    if weight and weight_all:
        usual = yarn_temperature(factor, weight) / yarn_temperature(factor, weight_all)
    fast, slow = (given.number(key, default=0) for key in ("beta_fast", "beta_slow"))
    rounded = given.get("truncate", True) is not False
    frequencies = yarn_frequencies(
        theta, width, factor, trained, fast or 32, slow or 1, whole=rounded
    )
    return Scaled(frequencies, given.number("attention_factor", default=usual))


def _longrope(scaling: Scaling) -> Scaled:
    given, trained, plain = scaling.given, scaling.trained, scaling.plain
    factor = scaling.factor(scaling.allowed / trained)
    usual = sqrt(1 + log(factor) / log(trained)) if factor > 1 and trained > 1 else 1.0
    short, long = scaling.stretch("short_factor"), scaling.stretch("long_factor")
    scale = given.number("attention_factor", default=usual)
    return Scaled(plain / short, scale, lambda length: plain / long, trained)


def _mscale(scaling: Scaling) -> Scaled:
    """Phi-3.5-MoE: the short factors at any length, and a scale of cos and sin of its own."""
    given = scaling.given
    short, long = (given.number(f"{length}_mscale") for length in ("short", "long"))
    if given["rope_type"] != "longrope":
        raise given.error("rope_type", "longrope")
    if short != long:
        wanted = f"{short:g}, as short_mscale: one scale of cos and sin at any length"
        raise given.error("long_mscale", wanted)
    return Scaled(scaling.plain / scaling.stretch("short_factor"), short)


def _llama3(scaling: Scaling) -> Scaled:
    given, theta, width, trained, _ = scaling
    keys = ("low_freq_factor", "high_freq_factor")
    low, high = (given.number(key, smallest=1e-6) for key in keys)
    if high <= low:
        raise given.error("high_freq_factor", "more than low_freq_factor")
    return Scaled(llama3_frequencies(theta, width, scaling.factor(), trained, low, high))


SCALINGS: dict[str, Callable[[Scaling], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "alpha": _alpha,  # HunYuan's dynamic scaling
    "yarn": _yarn,
    "longrope": _longrope,
    "mscale": _mscale,
    "su": _longrope,  # its name before transformers 4.45
    "llama3": _llama3,
    "mrope": _default,  # transformers 4's name for several axes (`Rope.sections`)
}


# Rotation by row and column in vision towers: one formula that each architecture writes in its way.

# (base, width of a head) -> frequency and axis of every pair
Spelling = Callable[[float, int], tuple[np.ndarray, np.ndarray]]


AXES = {"frame": FRAME, "row": ROW, "column": COLUMN}


@dataclass(frozen=True)
class OneAfterAnother:
    """A block of pairs for each axis, with the same frequencies; an odd rest does not turn."""

    axes: tuple[Annotated[str, OneOf(*AXES)], ...]

    def __call__(self, theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
        frequencies = inverse_powers(theta, 2 * (width // len(self.axes) // 2))
        axes = [AXES[axis] for axis in self.axes]
        return np.tile(frequencies, len(axes)), np.repeat(axes, len(frequencies))


ROWS_THEN_COLUMNS = OneAfterAnother(("row", "column"))


@dataclass(frozen=True)
class InTurn:
    """The axes in turn, a frequency for each turn (Kimi)."""

    axes: tuple[Annotated[str, OneOf(*AXES)], ...]

    def __call__(self, theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
        frequencies = inverse_powers(theta, width // len(self.axes))
        axes = [AXES[axis] for axis in self.axes]
        return np.repeat(frequencies, len(axes)), np.tile(axes, len(frequencies))


def odd_and_even(theta: float, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole head's frequencies: even pairs for rows, then odd ones for columns (Pixtral)."""
    of_head = inverse_powers(theta, width)
    rows, columns = of_head[0::2], of_head[1::2]
    return np.concatenate((rows, columns)), np.repeat((ROW, COLUMN), (len(rows), len(columns)))


@dataclass(frozen=True)
class GridRope:
    """Rotation by row and column in an architecture."""

    spelled: Spelling = ROWS_THEN_COLUMNS
    interleaved: bool = False  # like `Rotation`'s
    blocks: int = 1  # like `Rotation`'s
    theta: Base | None = 10000.0  # the base where the config has none; None where it must
    image: str = ""  # config key of the image's side; empty where images are of any size
    patch: str = "patch_size"  # config key of the patch's side
    prefix: int = 0  # number of tokens before the patches, such as a class token
    suffix: int = 0  # number of tokens after the patches
    registers: str = ""  # config key of the number of registers, which are before the patches too
    merge: str = ""  # config key of the side of blocks that patches are ordered by
    window: str = ""  # config key of the side of windows that patches are ordered by
    window_unit: str = ""  # config key of the side of a window's unit, if that is not a patch
    origin: float = 0.0  # like `GridRotation`'s
    centred: bool = False  # like `GridRotation`'s
    # config key of a window's side in patches, where positions count within windows (SAM 3)
    side: str = ""
    whole: str = ""  # config key of the layers that see the whole image then

    def parameters(self, config: Config, layer_type: str) -> Config:
        """The base alone; a config in which something scales it is refused."""
        given = config.inside("rope_parameters")
        if given.get("rope_type", given.get("type", "axial")) not in ("axial", "default"):
            raise given.error("rope_type", "axial")
        source = given if given.has("rope_theta") else config
        if config.has("rope_theta") and source["rope_theta"] != config["rope_theta"]:
            raise config.error("rope_theta", f"{source['rope_theta']}, as rope_parameters says,")
        theta = source.number("rope_theta", default=self.theta, smallest=SMALLEST_BASE)
        return Config(
            {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}, config.file
        )

    def rotation(self, config: ModelConfig, layer: int) -> GridRotation:
        """The rotation of a layer, the same for every one unless some see a window."""
        theta = config.rope[config.layer_types[layer]].number("rope_theta")
        frequencies, axes = self.spelled(theta, config.head_dim)
        n_axes = len(set(axes.tolist()))
        if len(axes) == 0 or (FRAME not in axes and config.head_dim % (2 * n_axes)):
            problem = f"heads of {config.head_dim} dimensions do not turn in pairs by {n_axes} axes"
            raise CheckpointError(problem, file=config.file)
        grid: tuple[int, ...] = ()
        if self.image:
            sides = zip(sides_of(config, self.image), sides_of(config, self.patch), strict=True)
            grid = tuple(max(image // patch, 1) for image, patch in sides)
        merge = config.size(self.merge) if self.merge else 1
        registers = config.count(self.registers) if self.registers else 0
        rotation = GridRotation(
            2 * np.pi * frequencies if self.centred else frequencies,
            interleaved=self.interleaved,
            blocks=self.blocks,
            axes=axes,
            grid=grid,
            prefix=self.prefix + registers,
            suffix=self.suffix,
            merge=merge,
            window=self._window(config, merge),
            origin=self.origin,
            centred=self.centred,
        )
        return self._within_windows(rotation, config, layer) if self.side else rotation

    def _within_windows(self, image: GridRotation, config: ModelConfig, layer: int) -> GridRotation:
        """A layer's rotation in its window; over the whole image it is no faster than that."""
        side = config.size(self.side)
        if len(set(image.grid)) > 1:
            raise config.error(self.image, "a square image")
        if layer in config.layers(self.whole):
            return replace(image, frequencies=image.frequencies * side / image.grid[-1])
        return replace(image, grid=(side, side))

    def _window(self, config: ModelConfig, merge: int) -> int:
        """The side of a window in blocks of patches."""
        if not self.window:
            return 0
        unit = config.size(self.window_unit) if self.window_unit else 1
        return max(config.size(self.window) // merge // unit, 1)


def sides_of(config: Config, key: str) -> tuple[int, int]:
    """(height, width) of something that may be one number."""
    value = config.get(key)
    pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
    height, width = (Config({key: side}, config.file).size(key) for side in pair)
    return height, width
