"""Mixers of layers without a softmax: their tensors by role, and ggml's changes to them undone.

A row's cell `mixer` has a kind and a module, as "mamba2:mixer". Kinds are of names: the same kind
is called the same in transformers, whatever the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from weightscope.checkpoint.checkpoint import DerivedTensor, StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import Config
from weightscope.model.rows.cells import Names

OF_MIXER = "mixer."  # prefix of roles
NORMS = ("norm.mixer", "norm.before")  # before a mixer; the first that is there

OF_ALL = {"A_log": "A_log", "dt_bias": "dt_bias", "out_proj": "out"}
OF_SPACES = {**OF_ALL, "in_proj": "in", "conv1d": "conv", "D": "D"}
CONVOLVED = {f"{letter}_conv1d": f"{letter}_conv" for letter in "qkv"}
# Kind -> name within its module -> role without prefix.
MIXERS: Mapping[str, Mapping[str, str]] = {
    "mamba": {
        **OF_SPACES,
        "x_proj": "x",
        "x_proj_weight": "x",
        "dt_proj": "dt",
        "dt_proj_weight": "dt",
        "dt_proj.bias": "dt_bias",
        "dt_proj_bias": "dt_bias",
        "dt_layernorm": "dt_norm",
        "b_layernorm": "B_norm",
        "c_layernorm": "C_norm",
    },
    "mamba2": {**OF_SPACES, "norm": "norm"},
    "delta": {
        **OF_ALL,
        "in_proj_qkvz": "qkvz",
        "in_proj_qkv": "qkv",
        "in_proj_z": "gate",
        "in_proj_ba": "ba",
        "in_proj_b": "beta",
        "in_proj_a": "alpha",
        "conv1d": "conv",
        "norm": "norm",
    },
    "kda": {
        **OF_ALL,
        **{f"{letter}_proj": letter for letter in "qkv"},
        **CONVOLVED,
        **{f"{letter}_conv.conv": f"{letter}_conv" for letter in "qkv"},  # mlx
        "b_proj": "beta",
        "a_proj": "alpha",
        "f_proj": "alpha",
        "f_a_proj": "alpha_a",
        "f_b_proj": "alpha_b",
        "g_proj": "gate",
        "g_a_proj": "gate_a",
        "g_b_proj": "gate_b",
        "o_norm": "norm",
        "o_proj": "out",
        "dense": "out",
    },
    "conv": {"in_proj": "in", "conv": "conv", "out_proj": "out"},
    "lightning": {
        "qkv_proj": "qkv",
        "output_gate": "gate",
        "norm": "norm",
        "out_proj": "out",
        "slope_rate": "slope",
        "query_decay": "decay.query",
        "key_decay": "decay.key",
        "diagonal_decay": "decay.within",
    },
    "rglru": {
        "linear_x": "in",
        "linear_y": "gate",
        "conv_1d": "conv",
        "linear_out": "out",
        "rg_lru.recurrent_param": "lambda",
        "rg_lru.recurrent_gate_weight": "alpha",
        "rg_lru.recurrent_gate_bias": "alpha.bias",
        "rg_lru.input_gate_weight": "beta",
        "rg_lru.input_gate_bias": "beta.bias",
    },
    "rwkv": {
        "key": "k",
        "value": "v",
        "receptance": "gate",
        "output": "out",
        "time_decay": "decay",
        "time_first": "bonus",
        "time_mix_key": "shift_k",
        "time_mix_value": "shift_v",
        "time_mix_receptance": "shift_gate",
    },
}

# ggml's names -> roles; a kind has one of each.
OF_GGML: Mapping[str, Names] = {
    "ssm_in": ("in", "qkvz"),
    "ssm_out": ("out",),
    "ssm_x": ("x",),
    "ssm_dt": ("dt",),
    "ssm_dt.bias": ("dt_bias",),
    "ssm_a": ("A_log",),
    "ssm_d": ("D",),
    "ssm_conv1d": ("conv",),
    "ssm_norm": ("norm",),
    "ssm_dt_norm": ("dt_norm",),
    "ssm_b_norm": ("B_norm",),
    "ssm_c_norm": ("C_norm",),
    "ssm_ba": ("ba",),
    "ssm_alpha": ("alpha",),
    "ssm_beta": ("beta",),
    "attn_qkv": ("qkv",),
    "attn_gate": ("gate",),
    "attn_k": ("k",),
    "attn_v": ("v",),
    **{f"ssm_conv1d_{letter}": (f"{letter}_conv",) for letter in "qkv"},
    "ssm_f_a": ("alpha_a",),
    "ssm_f_b": ("alpha_b",),
    "ssm_g_a": ("gate_a",),
    "ssm_g_b": ("gate_b",),
    "shortconv.in_proj": ("in",),
    "shortconv.conv": ("conv",),
    "shortconv.out_proj": ("out",),
}


def roles_of(mixers: Names) -> dict[str, str]:
    """The role of every module and tensor of a row's mixers, by its name in a layer."""
    named: dict[str, str] = {}
    for mixer in mixers:
        kind, _, module = mixer.partition(":")
        named |= {f"{module}.{name}": OF_MIXER + role for name, role in MIXERS[kind].items()}
    return named


def named_by_ggml(mixers: Names) -> dict[str, str]:
    """Modules and tensors of a row's mixers by ggml's names."""
    by_role: dict[str, str] = {}
    for name, role in roles_of(mixers).items():
        by_role.setdefault(role.removeprefix(OF_MIXER), name)
    return {
        ggml: by_role[role] for ggml, roles in OF_GGML.items() for role in roles if role in by_role
    }


# Heads of their values: counts and width, by keys of config.json.
HEADS = (
    ("linear_num_value_heads", "linear_num_key_heads", "linear_value_head_dim"),
    ("linear_num_heads", "linear_num_heads", "linear_head_dim"),
    ("mamba_num_heads", "mamba_num_heads", "mamba_head_dim"),
    ("mamba_n_heads", "mamba_n_heads", "mamba_d_head"),
)


def heads_of(config: Config) -> tuple[int, ...]:
    """Value heads of a mixer, the key heads that they share, and their width; empty if unknown."""
    named = next((keys for keys in HEADS if all(type(config.get(k)) is int for k in keys)), ())
    return tuple(map(config.size, named))


# ggml's changes to them, undone.


@dataclass(frozen=True)
class Tiled:
    """Value heads by their key head again, where ggml has the first of each key head first.

    Of K key heads with r value heads each, ggml stores r K heads as (r, K), transformers (K, r).
    """

    n_keys: int
    n_values: int
    first: int = 0  # rows of queries and keys, which come before
    axis: int = 0

    def divides(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of this shape has these heads."""
        rows = shape[self.axis] - self.first if len(shape) > self.axis else 0
        return rows > 0 and rows % self.n_values == 0 == self.n_values % self.n_keys

    def __call__(self, stored: np.ndarray, *_: int) -> np.ndarray:
        rows = np.moveaxis(stored, self.axis, 0)
        heads = rows[self.first :].reshape(-1, self.n_keys, *self._of_head(rows))  # (r, K, ...)
        grouped = heads.swapaxes(0, 1).reshape(-1, *rows.shape[1:])
        return np.moveaxis(np.concatenate([rows[: self.first], grouped]), 0, self.axis)

    def _of_head(self, rows: np.ndarray) -> tuple[int, ...]:
        return (len(rows) - self.first) // self.n_values, *rows.shape[1:]


def tiled(config: Config) -> dict[str, Tiled]:
    """The order of value heads by role, where each key head has several."""
    n_keys = config.size("linear_num_key_heads")
    n_values = config.size("linear_num_value_heads")
    if n_keys == n_values:
        return {}
    first = 2 * n_keys * config.size("linear_key_head_dim")
    whole = Tiled(n_keys, n_values)
    return {
        **dict.fromkeys(("gate", "alpha", "beta", "A_log", "dt_bias"), whole),
        **dict.fromkeys(("qkv", "conv"), replace(whole, first=first)),
        "out": replace(whole, axis=1),
    }


@dataclass(frozen=True)
class JoinedGates(DerivedTensor, WholeTensor):
    """Qwen3-Next's projection of queries, keys, values and gates by key head; ggml has two."""

    stored: Tensor  # queries, keys and values: (2 K k + V v, d)
    gates: Tensor  # (V v, d)
    n_keys: int

    def __post_init__(self) -> None:
        rows, gates = self.stored.shape, self.gates.shape
        of_keys = rows[0] - gates[0] if len(rows) == len(gates) == 2 else -1
        if of_keys <= 0 or of_keys % (2 * self.n_keys) or gates[0] % self.n_keys:
            problem = f"has shape {rows}, which {gates} of '{self.gates.name}' does not fit"
            raise self.stored.refuse(f"{problem}; heads of {self.n_keys} keys were expected")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[0] + self.gates.shape[0], *self.stored.shape[1:]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.stored.parts, *self.gates.parts)

    def unchecked(self, noted: set[str]) -> Tensor:
        stored, gates = self.stored.unchecked(noted), self.gates.unchecked(noted)
        return replace(self, stored=stored, gates=gates)

    def read(self) -> np.ndarray:
        rows, gates = self.stored.read(), self.gates.read()
        n = (len(rows) - len(gates)) // 2
        parts = (rows[:n], rows[n : 2 * n], rows[2 * n :], gates)
        by_head = [part.reshape(self.n_keys, -1, rows.shape[1]) for part in parts]
        return np.concatenate(by_head, axis=1).reshape(self.shape)
