"""Rotary parameters as config.json has them, in either dialect, and the rotation they mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log, sqrt
from typing import Any

import numpy as np

from weightscope.attention.rotation import (
    Rotation,
    inverse_powers,
    llama3_frequencies,
    ntk_frequencies,
    yarn_frequencies,
    yarn_temperature,
)
from weightscope.checkpoint.config import Config
from weightscope.families.axes import Sections
from weightscope.families.config import ModelConfig
from weightscope.families.within import always
from weightscope.shapes import ShowsShapes

SMALLEST_BASE = 1.001  # with a base of 1 every pair turns alike, and YaRN divides by its logarithm


def _base(given: Config) -> float:
    return given.number("rope_theta", smallest=SMALLEST_BASE)


@dataclass(frozen=True)
class Rope:
    """How an architecture rotates queries and keys.

    transformers 4 wrote flat keys (`rope_theta`, `rope_scaling`, `partial_rotary_factor`); transformers 5 writes
    `rope_parameters`, nested by layer type where layers differ.

    Attributes
    ----------
    interleaved : bool
        Pairs are neighbours (2j, 2j + 1) rather than halves apart.
    theta_key, fraction_key, dims_key : str
        Flat keys of the base, of the share of a head that rotates, and, where the config counts the dimensions
        instead, of their number.
    thetas : str
        Key of the bases of all layers, 0 where one does not rotate; empty where there is none.
    theta : float
        What holds where the config says nothing.
    fraction : float or None
        Likewise; None where the architecture turns whole heads and its code asks for no share.
    local : (str, float) or None
        Flat key and usual value of the base in sliding-window layers, where it differs.
    local_scaled : bool
        A flat rope_scaling applies to sliding-window layers too.
    start_key : str
        Key of how many dimensions come before those that rotate.
    interleaved_key : str
        Key that may switch interleaving off.
    rotates : function of (ModelConfig, layer index) -> bool
        Which layers rotate at all.
    scaled_in : str
        Key of a list of the layers whose rotation is scaled; empty where all are.
    scaled : str
        A kind of scaling that any scaling is read as.
    backwards : bool
        Pairs turn the other way round.
    alpha : bool
        Dynamic scaling by an `alpha` is once and for all: the base grows by alpha^(w / (w - 2)) at any length.
    rounded : bool
        Of an odd number of dimensions the one beside them turns too.
    sections : Sections or None
        Which coordinate turns which pair, where positions have several.
    """

    interleaved: bool = False
    theta_key: str = "rope_theta"
    theta: float = 10000.0
    thetas: str = ""
    fraction_key: str = "partial_rotary_factor"
    fraction: float | None = None
    dims_key: str = ""
    local: tuple[str, float] | None = None
    local_scaled: bool = True
    start_key: str = ""
    interleaved_key: str = ""
    rotates: Callable[[ModelConfig, int], bool] = always
    scaled_in: str = ""
    scaled: str = ""
    backwards: bool = False
    alpha: bool = False
    rounded: bool = False
    sections: Sections | None = None

    def parameters(self, config: Config, layer_type: str) -> Config:
        """The rotary parameters of one layer type, under transformers 5's names.

        Raises
        ------
        CheckpointError
            They are not what they should be.
        """
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        given = config.inside(key)
        nested = any(isinstance(value, Mapping) for value in given.values())
        sliding = self.local is not None and layer_type == "sliding_attention"
        if nested and layer_type not in given:
            raise config.error(key, f"an entry for {layer_type} layers")
        own: Mapping[str, Any] = given.inside(layer_type) if nested else given
        if sliding and not nested and not self.local_scaled:
            own = {}
        base_key, base = self.local if sliding and self.local else (self.theta_key, self.theta)
        flat = {
            "rope_theta": config.number(base_key, default=base, smallest=SMALLEST_BASE),
            "partial_rotary_factor": config.number(self.fraction_key, default=self.fraction or 1.0, largest=1.0),
            "rope_type": own.get("type", "default"),
        }
        merged = Config({**flat, **{k: v for k, v in own.items() if v is not None}}, config.file)
        return self._of_whole_heads(merged) if self.fraction is None else merged

    def _of_whole_heads(self, given: Config) -> Config:
        """transformers' code of these families turns whole heads whatever the config says, unless something scales."""
        if given["rope_type"] == "proportional":
            return given
        if given["rope_type"] != "default" and given.number("partial_rotary_factor") != 1.0:
            raise given.error("partial_rotary_factor", "1: this architecture turns whole heads")
        return Config({**given, "partial_rotary_factor": 1.0}, given.file)

    def _own_base(self, config: Config, layer: int) -> float:
        listed = config.get(self.thetas)
        if not isinstance(listed, list) or len(listed) <= layer:
            raise config.error(self.thetas, "a list with every layer's base")
        return Config({self.thetas: listed[layer]}, config.file).number(self.thetas)

    def rotation(self, config: ModelConfig, layer: int) -> Rotation | None:
        """The rotation of one layer, or None where it does not rotate.

        Raises
        ------
        CheckpointError
            The parameters are absurd, or of a kind that is not known.
        """
        if not self.rotates(config, layer):
            return None
        given = config.rope[config.layer_types[layer]]
        if self.thetas and config.has(self.thetas):
            base = self._own_base(config, layer)
            if not base:
                return None
            given = Config({**given, "rope_theta": base}, given.file)
        start = config.size(self.start_key) if self.start_key else 0
        share = 1.0 if given["rope_type"] == "proportional" else given.number("partial_rotary_factor", largest=1.0)
        width = int((config.head_dim - start) * share)
        if self.dims_key:
            width = config.size(self.dims_key)
            share = given.number("partial_rotary_factor")  # of the config's head_dim: of whole heads, or of this part
            if self.start_key and config.has("head_dim") and int(config.size("head_dim") * share) != width:
                raise config.error("head_dim", f"{width}: with {self.start_key}, the part of a head that turns")
        turning = width + width % 2 if self.rounded else width
        if turning % 2 or turning < 2 or start + turning > config.head_dim:
            raise given.error("partial_rotary_factor", f"an even number of the head's {config.head_dim} dimensions")
        interleaved = config.flag(self.interleaved_key) if self.interleaved_key else self.interleaved
        kind = given["rope_type"]
        if self.scaled_in and layer not in config.layers(self.scaled_in):
            kind = "default"
        kind = self.scaled if self.scaled and kind != "default" else kind
        if self.alpha and kind == "dynamic" and given.get("alpha"):
            kind = "alpha"
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise given.error("rope_type", "one of " + ", ".join(SCALINGS))
        # Where the config counts original positions at its top level (Phi-3), that number wins.
        original = "original_max_position_embeddings"
        trained = (config if config.has(original) else given).size(original, default=config.n_positions or 1)
        scaled = SCALINGS[kind](given, _base(given), width, trained, config.n_positions or trained)
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
        """The same, turning the other way round."""
        stretched = self.stretched
        return replace(self, frequencies=-self.frequencies, stretched=stretched and (lambda length: -stretched(length)))


# Each takes the given parameters, the base, the rotated width, positions first trained on, positions now allowed.
def _default(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    return Scaled(inverse_powers(theta, width))


def _proportional(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    """The first pairs of a whole head turn as in a whole head, the others do not."""
    frequencies = inverse_powers(theta, width) / given.number("factor", default=1.0, smallest=1e-6)
    frequencies[int(given.number("partial_rotary_factor") * width // 2) :] = 0
    return Scaled(frequencies)


def _linear(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    return Scaled(inverse_powers(theta, width) / given.number("factor", smallest=1e-6))


def _dynamic(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    factor = given.number("factor", smallest=1e-6)
    if width == 2:
        raise given.error("rope_type", "one that a single pair can be scaled by")
    stretched = partial(_ntk, theta, width, factor, allowed)
    return Scaled(inverse_powers(theta, width), stretched=stretched, longest=allowed)


def _alpha(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    if width == 2:
        raise given.error("rope_type", "one that a single pair can be scaled by")
    return Scaled(inverse_powers(theta * given.number("alpha", smallest=1e-6) ** (width / (width - 2)), width))


def _ntk(theta: float, width: int, factor: float, trained: int, length: int) -> np.ndarray:
    return ntk_frequencies(theta, width, factor, length, trained)


def _yarn(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    factor = given.number("factor", default=allowed / trained, smallest=1e-6)
    weight, weight_all = given.number("mscale", default=0), given.number("mscale_all_dim", default=0)
    usual = yarn_temperature(factor)
    if weight and weight_all:
        usual = yarn_temperature(factor, weight) / yarn_temperature(factor, weight_all)
    frequencies = yarn_frequencies(
        theta, width, factor, trained,
        given.number("beta_fast", default=0) or 32, given.number("beta_slow", default=0) or 1,
        whole=given.get("truncate", True) is not False,
    )  # fmt: skip
    return Scaled(frequencies, given.number("attention_factor", default=usual))


def _longrope(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    factor = given.number("factor", default=allowed / trained, smallest=1e-6)
    usual = sqrt(1 + log(factor) / log(trained)) if factor > 1 and trained > 1 else 1.0
    short, long = (_stretch(given, key, width // 2) for key in ("short_factor", "long_factor"))
    plain = inverse_powers(theta, width)
    return Scaled(plain / short, given.number("attention_factor", default=usual), lambda length: plain / long, trained)


def _mscale(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    """Phi-3.5-MoE: its code keeps the short factors at any length, and scales cos and sin by a number of its own."""
    short, long = (given.number(f"{length}_mscale") for length in ("short", "long"))
    if given["rope_type"] != "longrope":
        raise given.error("rope_type", "longrope")
    if short != long:
        raise given.error("long_mscale", f"{short:g}, as short_mscale: one scale of cos and sin at any length")
    return Scaled(inverse_powers(theta, width) / _stretch(given, "short_factor", width // 2), short)


def _stretch(given: Config, key: str, pairs: int) -> np.ndarray:
    value = given.get(key)
    wanted = f"a list of {pairs} positive numbers"
    if not isinstance(value, list) or len(value) != pairs or not all(type(v) in (int, float) for v in value):
        raise given.error(key, wanted)
    stretch = np.array(value, np.float64)
    if not ((stretch >= 1e-6) & (stretch <= 1e12)).all():
        raise given.error(key, wanted)
    return stretch


def _llama3(given: Config, theta: float, width: int, trained: int, allowed: int) -> Scaled:
    low, high = (given.number(key, smallest=1e-6) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise given.error("high_freq_factor", "more than low_freq_factor")
    return Scaled(llama3_frequencies(theta, width, given.number("factor", smallest=1e-6), trained, low, high))


SCALINGS: dict[str, Callable[[Config, float, int, int, int], Scaled]] = {
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
    "mrope": _default,  # what transformers 4 called several axes (`Rope.sections`)
}
