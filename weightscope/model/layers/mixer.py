"""Layers without a softmax: how long the state of a head lasts, and its maps.

The state of a head is a matrix, to which a token adds its key times its value, and which its query
reads: S_t = a_t S_(t-1) + k_t' v_t, o_t = q_t S_t (linear attention; in Mamba 2 C, B and x are q, k
and v). The equations of each kind are above its function. No family; sizes come from shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from weightscope.core.errors import CheckpointError, counted, whole
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.factored import Factored
from weightscope.model.layers.maps import Affine, Norm
from weightscope.model.rows.mixers import NORMS

if TYPE_CHECKING:
    from weightscope.model.rows.names import NamedTensor, Tensors

# Rates of decay: minus the logarithm of what a token leaves of the state, at zero input part.


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x), elementwise."""
    return np.logaddexp(x, 0.0)


def step_rates(
    a_log: np.ndarray, bias: np.ndarray, limits: tuple[float, float] = (0.0, np.inf)
) -> np.ndarray:
    """Rates of decay of states with steps, exp(A_log) softplus(dt_bias), per token.

    a_t = exp(-exp(A_log) Delta_t) with Delta_t = softplus(dt_bias + input part): Mamba (Gu and Dao
    2023, algorithm 2), Mamba 2 (Dao and Gu 2024), Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024,
    eq. 10) and KDA (Kimi Team 2025). The input part is taken to be zero.

    Parameters
    ----------
    a_log, bias : arrays that broadcast
    limits : (float, float)
        Steps below or above these are moved to them.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # broken weights are named elsewhere
        return np.exp(a_log) * np.clip(softplus(bias), *limits)


def bounded_rates(a_log: np.ndarray, bias: np.ndarray, lowest: float) -> np.ndarray:
    """Rates -lowest sigmoid(exp(A_log) dt_bias), per token: KDA with a bounded gate (Ling 3)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return -lowest / (1 + np.exp(-np.exp(a_log) * bias))


def slopes(n_heads: int, layer: int, n_layers: int) -> np.ndarray:
    """Lightning attention's fixed rates, per token: 2^(-8 (h + 1) / H) (1 - l / (L - 1)).

    Head h of H in layer l of L (MiniMax-01, 2025; Qin et al. 2024); 1e-5 is added twice, as in
    transformers' code.
    """
    of_heads = 2.0 ** (-8.0 * np.arange(1, n_heads + 1) / n_heads)  # (H,)
    return of_heads * (1 - layer / (n_layers - 1 + 1e-5) + 1e-5)


def gated_rates(recurrent: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """RG-LRU's rates, 8 sigmoid(b_a) softplus(Lambda), per token (De et al. 2024, eqs 1 and 3)."""
    with np.errstate(over="ignore"):
        return 8 / (1 + np.exp(-bias)) * softplus(recurrent)


# Layers and heads


@dataclass(frozen=True, eq=False, repr=False)
class Mixer:
    """One layer without a softmax.

    Attributes
    ----------
    index : int
        Its index in the checkpoint.
    kind : str
        Its kind in words, such as "Gated DeltaNet".
    rates : float64 array of shape (n_heads, ...)
        Minus the logarithm of what a token leaves of a head's state, at zero input part; with
        further axes where channels of a head decay each at a rate of their own.
    caveats : tuple of str
        Operations that stand between the matrices of the heads and what the layer computes.
    refused : str
        Why its heads have no W_QK and W_VO; empty where they have.

    Examples
    --------
    >>> import numpy as np
    >>> mixer = Mixer(3, "lightning attention", slopes(4, 3, 8))
    >>> mixer
    Mixer(3: lightning attention, 4 heads)
    >>> mixer.time_scales.round(1)
    array([  7.,  28., 112., 448.])
    """

    index: int
    kind: str
    rates: np.ndarray = field(repr=False)
    q: Affine | None = field(default=None, repr=False)  # (G, d, r), G key heads
    k: Affine | None = field(default=None, repr=False)  # (G, d, r)
    v: Affine | None = field(default=None, repr=False)  # (H, d, r_v)
    w_o: np.ndarray | None = field(default=None, repr=False)  # (H, r_v, d), a gain before it folded
    caveats: tuple[str, ...] = field(default=(), repr=False)
    refused: str = field(default="", repr=False)

    def __repr__(self) -> str:
        return f"Mixer({self.index}: {self.kind}, {counted(self.n_heads, 'head')})"

    @property
    def n_heads(self) -> int:
        """H, heads that have a state; 0 in a convolution."""
        return len(self.rates)

    @property
    def time_scales(self) -> np.ndarray:
        """Tokens after which 1/e of a state is left, at zero input part: 1 / rates, (n_heads, ...).

        The half life is 0.693 times this. Tokens change it by the input part of their step, but in
        lightning attention and RWKV, where it is fixed.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(1 / self.rates)

    def head(self, index: int) -> "MixerHead":
        """One head with its matrices.

        Raises
        ------
        CheckpointError
            This kind of layer has no W_QK and W_VO, or no such head.
        """
        index = whole(index, "head")
        if self.refused:
            raise CheckpointError(f"layer {self.index} has no W_QK and W_VO: {self.refused}")
        if not 0 <= index < self.n_heads:
            raise CheckpointError(f"layer {self.index} has no head {index}, but {self.n_heads}")
        return MixerHead(self, index)

    @property
    def heads(self) -> list["MixerHead"]:
        """All heads; see `head`."""
        return [self.head(index) for index in range(self.n_heads)]


@dataclass(frozen=True, eq=False, repr=False)
class MixerHead:
    """One head of a layer without a softmax, as maps of x / sigma(x), the norm before it folded in.

    What is left out between the maps and the layer's output is listed in `caveats`.
    """

    mixer: Mixer
    index: int

    def __repr__(self) -> str:
        return f"MixerHead(layer {self.mixer.index}, head {self.index}: {self.mixer.kind})"

    @property
    def key_head(self) -> int:
        """The head of queries and keys that it shares."""
        assert self.mixer.k is not None
        return self.index * self.mixer.k.shape[0] // self.mixer.n_heads

    @property
    def time_scale(self) -> np.ndarray:
        """Tokens after which 1/e of the state is left at zero input part, () or of its channels."""
        return np.asarray(self.mixer.time_scales[self.index])

    @property
    def caveats(self) -> tuple[str, ...]:
        """Operations that the matrices leave out, in words."""
        return self.mixer.caveats

    @cached_property
    def w_q(self) -> np.ndarray:
        """W_Q, (d, r): what reads the state; Mamba 2's C."""
        assert self.mixer.q is not None
        return self.mixer.q.of(self.key_head)[0]

    @cached_property
    def w_k(self) -> np.ndarray:
        """W_K, (d, r): what the state is written along; Mamba 2's B."""
        assert self.mixer.k is not None
        return self.mixer.k.of(self.key_head)[0]

    @cached_property
    def w_v(self) -> np.ndarray:
        """W_V, (d, r_v): what is written; Mamba 2's x."""
        assert self.mixer.v is not None
        return self.mixer.v.of(self.index)[0]

    @property
    def w_o(self) -> np.ndarray:
        """W_O, (r_v, d), with the gain of the norm before it folded in."""
        assert self.mixer.w_o is not None
        return np.asarray(self.mixer.w_o[self.index])

    @property
    def qk(self) -> Factored:
        """W_QK = W_Q W_K', (d, d): along what the state is read and written."""
        return Factored(self.w_q, self.w_k)

    @property
    def vo(self) -> Factored:
        """W_VO = W_V W_O, (d, d): what a token's value adds to the stream when it is read."""
        return Factored(self.w_v, self.w_o.T)


# Layers from their tensors by role.


@dataclass(frozen=True)
class MixerTensors:
    """The tensors of one layer by role, and the config that says how they are divided."""

    index: int
    tensors: Mapping[str, "NamedTensor"]  # roles without "mixer."
    config: ModelConfig

    def __contains__(self, role: str) -> bool:
        return role in self.tensors

    def tensor(self, role: str) -> "NamedTensor":
        """The unread tensor of a role, with one axis at least."""
        if role not in self.tensors:
            problem = f"layer {self.index} has no tensor of the role mixer.{role}"
            raise CheckpointError(f"{problem}, which its decay or maps need", file=self.config.file)
        if not all(self.tensors[role].shape or [0]):
            raise self.refuse(role, "values")
        return self.tensors[role]

    def read(self, role: str) -> np.ndarray:
        """A tensor as float32, matrices with a row for each output."""
        return self.tensor(role).array()

    def refuse(self, role: str, wanted: str) -> CheckpointError:
        """The error for a tensor that has another shape."""
        tensor = self.tensors[role]
        return tensor.tensor.refuse(f"has shape {tensor.shape}; {wanted} were expected")

    def split(self, role: str, sizes: Sequence[int], n: int = 1) -> list[np.ndarray]:
        """Rows of a tensor in parts of these sizes, of each of n groups: (n, size, ...) each."""
        rows, d = self.read(role), self.config.d_model
        is_bias = role.endswith(".bias")
        if min(sizes) < 1 or rows.shape != (n * sum(sizes), d)[: 2 - is_bias]:
            raise self.refuse(role, f"{n} x {' + '.join(map(str, sizes))} rows for width {d}")
        grouped = rows.reshape(n, -1, *rows.shape[1:])
        return np.split(grouped, np.cumsum(sizes)[:-1], axis=1)

    def split_evenly(self, role: str, n: int, parts: int = 1) -> list[np.ndarray]:
        """Rows of a tensor in equal parts, of each of n groups."""
        return self.split(role, [self.tensor(role).shape[0] // (n * parts)] * parts, n)

    def decays(self, role: str, n: int) -> np.ndarray:
        """Numbers of n heads, (n, ...), in float64."""
        values = self.read(role).astype(np.float64)
        if values.size % n:
            raise self.refuse(role, f"a multiple of {n} values")
        return values.reshape(n, -1)

    @cached_property
    def norm(self) -> Norm | None:
        """The norm before the layer; only its gain matters here."""
        role = next((role for role in NORMS if role in self), None)
        if role is None:
            return None
        if (gamma := self.read(role)).shape != (self.config.d_model,):
            raise self.refuse(role, f"{self.config.d_model} values")
        return Norm(centred=False, eps=0.0, gamma=gamma)

    def affine(self, rows: np.ndarray, bias: np.ndarray | None = None) -> Affine:
        """Maps of the stream from their rows (A, r, d), and biases (A, r)."""
        bias = np.zeros(rows.shape[:2], np.float32) if bias is None else bias
        return Affine(rows.transpose(0, 2, 1), bias, self.norm)

    def outputs(self, n_heads: int) -> np.ndarray:
        """W_O (H, r_v, d), the gain of the norm before it folded in."""
        out, d = self.read("out"), self.config.d_model
        if out.ndim != 2 or len(out) != d or not out.shape[1] or out.shape[1] % n_heads:
            raise self.refuse("out", f"{d} rows and a multiple of {n_heads} columns")
        w_o = out.T.reshape(n_heads, -1, d)
        if "norm" not in self:
            return w_o
        gain = self.read("norm").reshape(-1)
        if gain.size not in w_o.shape[1:2] + out.shape[1:]:  # for one head, or for all together
            raise self.refuse("norm", f"{w_o.shape[1]} or {out.shape[1]} values")
        return w_o * np.resize(gain, out.shape[1]).reshape(n_heads, -1, 1)


def read_mixer(tensors: "Tensors", index: int) -> Mixer:
    """One layer without a softmax from the tensors of a checkpoint.

    Raises
    ------
    CheckpointError
        It has no such layer, or a tensor of it is missing, broken, or of another shape.
    """
    reader, layers = tensors.readers[0], tensors.of_mixers
    if index not in layers:
        advice = f"those are {', '.join(map(str, layers))}" if layers else "it has none"
        problem = f"layer {index} is not one without a softmax; {advice}"
        raise CheckpointError(problem, file=tensors.checkpoint.name)
    kind, _, _ = reader.family.mixer[0].partition(":")
    return KINDS[kind](MixerTensors(index, layers[index], reader.config))


# Roles of the tensors that rates and maps are made of; others are not read.
OF_RATES = {"A_log", "dt_bias", "slope", "lambda", "alpha.bias", "decay"}
OF_MAPS = {"q", "k", "v", "qkv", "qkvz", "in", "in.bias", "out", "norm", *NORMS}
WITH_MAPS = {"mamba2", "delta", "kda", "lightning"}


def names_read(tensors: "Tensors", index: int) -> list[str]:
    """Names of the tensors that `read_mixer` reads."""
    kind, _, _ = tensors.readers[0].family.mixer[0].partition(":")
    roles = OF_RATES | OF_MAPS if kind in WITH_MAPS else OF_RATES
    stored = tensors.of_mixers.get(index, {})
    return [tensor.name for role, tensor in stored.items() if role in roles]


CONVOLVED = "a causal convolution of each channel and SiLU between projections and state"
LENGTHS = "queries and keys are divided by their lengths"
ERASES = "a key's old value is taken out of the state before the new one is added (delta rule)"
NORMED = "what is read is divided by its root mean square"
GATED = "what is read is multiplied by a gate of the token"
STEPS = "the step of a token scales its key and value, and how much of the state it leaves"
SKIPPED = "D times the token's own value is added to what is read"


def _delta(stored: MixerTensors) -> Mixer:
    """Gated DeltaNet: S_t = a_t (1 - beta_t k_t' k_t) S_(t-1) + beta_t k_t' v_t, a_t of a head."""
    n_heads, d = prod(stored.tensor("A_log").shape), stored.config.d_model
    n_keys = stored.config.size("linear_num_key_heads")
    width = stored.config.size("linear_key_head_dim")
    w_o = stored.outputs(n_heads)
    if n_heads % n_keys:
        raise stored.config.error("linear_num_key_heads", f"a divisor of {n_heads}")
    if "qkvz" in stored:
        of_values = n_heads // n_keys * w_o.shape[1]
        maps = stored.split("qkvz", [width, width, of_values, of_values], n_keys)
    else:
        maps = stored.split("qkv", [n_keys * width, n_keys * width, n_heads * w_o.shape[1]])
    heads = zip(maps, (n_keys, n_keys, n_heads), strict=False)
    q, k, v = (stored.affine(rows.reshape(n, -1, d)) for rows, n in heads)
    return Mixer(
        stored.index,
        "Gated DeltaNet",
        step_rates(stored.decays("A_log", n_heads), stored.decays("dt_bias", n_heads))[:, 0],
        q,
        k,
        v,
        w_o,
        (CONVOLVED, LENGTHS, ERASES, NORMED, GATED),
    )


def _kda(stored: MixerTensors) -> Mixer:
    """KDA: as Gated DeltaNet, with a_t of each channel of the keys; OLMo Hybrid's is of a head."""
    n_heads = prod(stored.tensor("A_log").shape)
    n_keys = stored.config.size("linear_num_key_heads", default=n_heads)
    a_log, bias = stored.decays("A_log", n_heads), stored.decays("dt_bias", n_heads)
    if stored.config.get("kda_safe_gate") is True:
        lowest = stored.config.number("kda_lower_bound", smallest=-1e3, largest=0.0)
        rates = bounded_rates(a_log, bias, lowest)
    else:
        rates = step_rates(a_log, bias)
    by_head, heads = bias.size == n_heads, {"q": n_keys, "k": n_keys, "v": n_heads}
    q, k, v = (stored.affine(stored.split_evenly(role, n)[0]) for role, n in heads.items())
    return Mixer(
        stored.index,
        "Gated DeltaNet" if by_head else "KDA",
        rates[:, 0] if by_head else rates,
        q,
        k,
        v,
        stored.outputs(n_heads),
        (CONVOLVED, LENGTHS, ERASES, NORMED, GATED),
    )


GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
# steps that transformers raises to time_step_min; it clips other types' to time_step_limit
FLOORED = {"nemotron_h", "zamba2"}
# Falcon-H1's factors of the gate, x, B, C and the step
MULTIPLIERS = "ssm_multipliers"


def _mamba2(stored: MixerTensors) -> Mixer:
    """Mamba 2: S_t = a_t S_(t-1) + Delta_t B_t' x_t, o_t = C_t S_t + D x_t; a_t of a head."""
    config, n_heads = stored.config, prod(stored.tensor("A_log").shape)
    n_groups = config.size(*GROUPS)
    w_o = stored.outputs(n_heads)
    inner = n_heads * w_o.shape[1]
    of_state = stored.tensor("conv").shape[0] - inner
    if of_state < 2 * n_groups or of_state % (2 * n_groups) or n_heads % n_groups:
        raise stored.refuse("conv", f"{inner} channels and a multiple of {2 * n_groups}")
    sizes = [inner, inner, of_state // 2, of_state // 2, n_heads]
    rows = [part[0] for part in stored.split("in", sizes)]
    biases = [np.zeros(size, np.float32) for size in sizes]
    if "in.bias" in stored:
        biases = [part[0] for part in stored.split("in.bias", sizes)]
    if (factors := config.get(MULTIPLIERS)) is not None:
        if not isinstance(factors, list) or [*map(_is_number, factors)] != [True] * 5:
            raise config.error(MULTIPLIERS, "a list of five numbers")
        entering = config.number("ssm_in_multiplier", default=1.0)
        rows = [row * np.float32(by * entering) for row, by in zip(rows, factors, strict=True)]
        biases = [bias * np.float32(by) for bias, by in zip(biases, factors, strict=True)]
        w_o = w_o * np.float32(config.number("ssm_out_multiplier", default=1.0))
    steps = stored.decays("dt_bias", n_heads)[:, 0] + biases[4]
    rates = step_rates(stored.decays("A_log", n_heads)[:, 0], steps, _limits_of_steps(config))
    d = w_o.shape[2]
    x, b, c = (
        stored.affine(rows[i].reshape(n, -1, d), biases[i].reshape(n, -1))
        for i, n in ((1, n_heads), (2, n_groups), (3, n_groups))
    )
    caveats = CONVOLVED, STEPS, SKIPPED, *((NORMED,) if "norm" in stored else ()), GATED
    return Mixer(stored.index, "Mamba 2", rates, c, b, x, w_o, caveats)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _limits_of_steps(config: ModelConfig) -> tuple[float, float]:
    """Least and largest step of Mamba 2, as transformers clips them."""
    if config.model_type in FLOORED:
        return config.number("time_step_min", default=1e-3), np.inf
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, np.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.error("time_step_limit", "a list of two numbers")
    # transformers 5 writes infinity as an object
    given = [each.get("__float__") if isinstance(each, dict) else each for each in limits]
    least, most = (np.inf if each == "Infinity" else each for each in given)
    if not (_is_number(least) and _is_number(most)):
        raise config.error("time_step_limit", "a list of two numbers")
    return float(least), float(most)


def _lightning(stored: MixerTensors) -> Mixer:
    """Lightning attention: S_t = a S_(t-1) + k_t' v_t, a of a head and layer."""
    n_heads = stored.config.n_heads
    if "slope" in stored:
        rates = stored.decays("slope", n_heads)[:, 0]
    else:
        rates = slopes(n_heads, stored.index, stored.config.n_layers)
    q, k, v = map(stored.affine, stored.split_evenly("qkv", n_heads, 3))
    caveats = "SiLU of queries, keys and values", NORMED, GATED
    w_o = stored.outputs(n_heads)
    return Mixer(stored.index, "lightning attention", rates, q, k, v, w_o, caveats)


def _mamba(stored: MixerTensors) -> Mixer:
    """Mamba: each channel has states of its own, S_t = exp(-exp(A_log) Delta_t) S_(t-1) + ..."""
    a_log = stored.read("A_log").astype(np.float64)  # (channels, states); Zamba's by head
    bias = stored.read("dt_bias").astype(np.float64)
    if a_log.ndim < 2 or bias.size * a_log.shape[-1] != a_log.size:
        raise stored.refuse("A_log", f"{bias.size} channels by states")
    rates = step_rates(a_log, bias.reshape(*a_log.shape[:-1], 1))
    why = "its B and C are made of convolved channels, not of the stream"
    rates = rates if a_log.ndim == 3 else rates[None]
    return Mixer(stored.index, "Mamba", rates, refused=why)


def _rglru(stored: MixerTensors) -> Mixer:
    """RG-LRU: h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t x_t), a_t of a channel."""
    bias = stored.read("alpha.bias").astype(np.float64)  # (H, channels)
    if bias.ndim != 2:
        raise stored.refuse("alpha.bias", "heads by channels")
    rates = gated_rates(stored.decays("lambda", len(bias)), bias)
    why = "a channel has one number as its state, and no queries and keys"
    return Mixer(stored.index, "RG-LRU", rates, refused=why)


def _rwkv(stored: MixerTensors) -> Mixer:
    """RWKV 4: a channel's sums decay by exp(-exp(w)), whatever the token (Peng et al. 2023)."""
    rates = np.exp(stored.read("decay").astype(np.float64)).reshape(1, -1)
    why = "a channel's state is read through a gate, and no queries"
    return Mixer(stored.index, "RWKV", rates, refused=why)


def _convolution(stored: MixerTensors) -> Mixer:
    """A convolution keeps no state."""
    taps = stored.tensor("conv").shape[-1]
    why = f"a convolution keeps no state; it sees {taps} tokens"
    return Mixer(stored.index, "short convolution", np.empty(0), refused=why)


KINDS: Mapping[str, Callable[[MixerTensors], Mixer]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "delta": _delta,
    "kda": _kda,
    "conv": _convolution,
    "lightning": _lightning,
    "rglru": _rglru,
    "rwkv": _rwkv,
}
