"""What mixers without a softmax compute, in NumPy, from tensors by their roles: the equations of transformers' code.

Each function takes the roles of one layer (without "mixer."), its input (n, d) and the config, and gives its output.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Roles = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


def rms(x: np.ndarray, eps: float, groups: int = 1) -> np.ndarray:
    y = x.reshape(*x.shape[:-1], groups, -1)
    return (y / np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + eps)).reshape(x.shape)


def convolved(x: np.ndarray, kernels: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Each channel with its own kernel, the last tap on the token itself: (n, c), (c, 1, k) -> (n, c)."""
    taps = kernels.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return sum(padded[i : i + len(x)] * kernels[:, 0, i] for i in range(taps)) + bias


def selective_scan(u: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: Any) -> np.ndarray:
    """Mamba's state of each channel: u, dt (n, c); a (c, s); b, c (n, s)."""
    state, out = np.zeros(a.shape), []
    for t in range(len(u)):
        state = np.exp(dt[t][:, None] * a) * state + (dt[t] * u[t])[:, None] * b[t]
        out.append(state @ c[t] + d * u[t])
    return np.array(out)


def mamba(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Mamba (Gu and Dao 2023), with Jamba's norms of steps, B and C, or FalconMamba's without gains."""
    u, z = np.split(x @ w["in"].T, 2, axis=1)
    u = silu(convolved(u, w["conv"], w["conv.bias"]))
    n_state, rank = w["A_log"].shape[-1], w["dt"].shape[-1]
    dt, b, c = np.split(u @ w["x"].T, [rank, rank + n_state], axis=1)
    if config.model_type == "falcon_mamba":
        dt, b, c = (rms(each, config.mixer_rms_eps) for each in (dt, b, c))
    if "dt_norm" in w:
        eps = config.rms_norm_eps
        dt, b, c = (rms(each, eps) * w[norm] for each, norm in ((dt, "dt_norm"), (b, "B_norm"), (c, "C_norm")))
    dt = softplus(dt @ w["dt"].T + w["dt_bias"])
    return (selective_scan(u, dt, -np.exp(w["A_log"]), b, c, w["D"]) * silu(z)) @ w["out"].T


def mamba_of_heads(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Zamba's Mamba: rows of in are inputs and gates in turn; each head has steps, B and C of its own."""
    entered, gates = (x @ w["in"].T)[:, ::2], (x @ w["in"].T)[:, 1::2]
    u = silu(convolved(entered, w["conv"], w["conv.bias"]))
    n_state, rank, outs = w["A_log"].shape[-1], w["dt"].shape[-1], []
    for head, part in enumerate(np.split(u, len(w["A_log"]), axis=1)):
        dt, b, c = np.split(part @ w["x"][head].T, [rank, rank + n_state], axis=1)
        dt = softplus(dt @ w["dt"][head].T + w["dt_bias"][head])
        outs.append(selective_scan(part, dt, -np.exp(w["A_log"][head]), b, c, w["D"][head]))
    return (np.concatenate(outs, axis=1) * silu(gates)) @ w["out"].T


def mamba2(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Mamba 2 (Dao and Gu 2024): in is [gate, x, B, C, dt], B and C shared by groups of heads."""
    inner, heads = w["out"].shape[1], len(w["A_log"])
    groups_by_state = (len(w["conv"]) - inner) // 2
    z, xbc, dt = np.split(x @ w["in"].T, [inner, inner + len(w["conv"])], axis=1)
    xbc = silu(convolved(xbc, w["conv"], w["conv.bias"]))
    u, b, c = np.split(xbc, [inner, inner + groups_by_state], axis=1)
    groups = next(
        getattr(config, key) for key in ("mamba_n_groups", "n_groups", "mamba_ngroups") if hasattr(config, key)
    )
    b, c = (each.reshape(len(x), groups, -1).repeat(heads // groups, axis=1) for each in (b, c))  # (n, H, state)
    u = u.reshape(len(x), heads, -1)
    dt = softplus(dt + w["dt_bias"])
    decay, state, out = np.exp(-np.exp(w["A_log"]) * dt), np.zeros((*u.shape[1:], b.shape[-1])), []
    for t in range(len(x)):
        state = decay[t][:, None, None] * state + (dt[t][:, None] * u[t])[..., None] * b[t][:, None]
        out.append((np.einsum("hps,hs->hp", state, c[t]) + w["D"][:, None] * u[t]).reshape(-1))
    y = np.array(out) * silu(z)
    if "norm" in w:
        eps = next(getattr(config, key) for key in ("rms_norm_eps", "layer_norm_epsilon") if hasattr(config, key))
        grouped = config.model_type in ("mamba2", "nemotron_h", "zamba2")
        y = rms(y, 1e-5 if config.model_type == "zamba2" else eps, groups if grouped else 1) * w["norm"]
    return y @ w["out"].T


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def delta_rule(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The gated delta rule (Yang, Kautz and Hatamizadeh 2024): (n, H, ...) each; decay of heads or of key channels."""
    q, k = unit(q) / np.sqrt(q.shape[-1]), unit(k)
    state, out = np.zeros((*k.shape[1:], v.shape[-1])), []  # (H, k, v)
    for t in range(len(q)):
        state = state * decay[t].reshape(len(state), -1, 1)
        wrong = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * wrong)
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.array(out)


def delta(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: value heads grouped by their key head."""
    n_k, n_v = config.linear_num_key_heads, config.linear_num_value_heads
    d_k, d_v = config.linear_key_head_dim, config.linear_value_head_dim
    if "qkvz" in w:
        rows = (x @ w["qkvz"].T).reshape(len(x), n_k, -1)
        q, k, v, z = np.split(rows, np.cumsum([d_k, d_k, n_v // n_k * d_v]), axis=2)
        b, a = np.split((x @ w["ba"].T).reshape(len(x), n_k, -1), 2, axis=2)
        qkv = np.concatenate([part.reshape(len(x), -1) for part in (q, k, v)], axis=1)
    else:
        qkv, z, b, a = (x @ w[role].T for role in ("qkv", "gate", "beta", "alpha"))
    q, k, v = np.split(silu(convolved(qkv, w["conv"])), [n_k * d_k, 2 * n_k * d_k], axis=1)
    q, k = (each.reshape(len(x), n_k, d_k).repeat(n_v // n_k, axis=1) for each in (q, k))
    decay = np.exp(-np.exp(w["A_log"]) * softplus(a.reshape(len(x), n_v) + w["dt_bias"]))
    y = delta_rule(q, k, v.reshape(len(x), n_v, d_v), decay, sigmoid(b.reshape(len(x), n_v)))
    y = rms(y, config.rms_norm_eps) * w["norm"] * silu(z.reshape(len(x), n_v, d_v))
    return y.reshape(len(x), -1) @ w["out"].T


def kda(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Kimi Delta Attention: a decay for each channel of the keys; and OLMo Hybrid's, by head, under the same names."""
    heads = w["A_log"].size
    entered = np.concatenate([x @ w[letter].T for letter in "qkv"], axis=1)
    kernels = np.concatenate([w[f"{letter}_conv"] for letter in "qkv"])  # transformers saves OLMo's in equal parts
    widths = np.cumsum([len(w["q"]), len(w["k"])])
    parts = np.split(silu(convolved(entered, kernels)), widths, axis=1)
    n_keys = getattr(config, "linear_num_key_heads", heads)
    q, k = (part.reshape(len(x), n_keys, -1).repeat(heads // n_keys, axis=1) for part in parts[:2])
    v = parts[2].reshape(len(x), heads, -1)
    alpha = x @ w["alpha_a"].T @ w["alpha_b"].T if "alpha_a" in w else x @ w["alpha"].T
    gate = x @ w["gate_a"].T @ w["gate_b"].T if "gate_a" in w else x @ w["gate"].T
    rates, of_olmo = np.exp(w["A_log"].reshape(-1, 1)), config.model_type == "olmo_hybrid"
    beta = sigmoid(x @ w["beta"].T) * (1 + (of_olmo and config.linear_allow_neg_eigval))
    steps = (alpha + w["dt_bias"]).reshape(len(x), heads, -1)
    if getattr(config, "kda_safe_gate", False):
        decay = np.exp(config.kda_lower_bound * sigmoid(rates * steps))
    else:
        decay = np.exp(-rates * softplus(steps))
    y = delta_rule(q, k, v, decay, beta)
    y = rms(y, 1e-5 if of_olmo else config.rms_norm_eps) * w["norm"]
    return (y * (silu if of_olmo else sigmoid)(gate).reshape(y.shape)).reshape(len(x), -1) @ w["out"].T


def convolution(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """LFM2's gated short convolution."""
    b, c, u = np.split(x @ w["in"].T, 3, axis=1)
    return (c * convolved(b * u, w["conv"])) @ w["out"].T


def lightning(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """MiniMax's lightning attention: a fixed decay for each head."""
    heads = w["slope"].size
    q, k, v = np.split(silu(x @ w["qkv"].T).reshape(len(x), heads, -1), 3, axis=2)
    kept, state, out = np.exp(-w["slope"].reshape(-1, 1, 1)), np.zeros((heads, k.shape[-1], v.shape[-1])), []
    for t in range(len(x)):
        state = kept * state + np.einsum("hk,hv->hkv", k[t], v[t])
        out.append(np.einsum("hkv,hk->hv", state, q[t]).reshape(-1))
    y = rms(np.array(out), 1e-6) * w["norm"]
    return (sigmoid(x @ w["gate"].T) * y) @ w["out"].T


def rglru(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """Griffin's recurrent block (De et al. 2024): a real-gated linear recurrent unit."""
    u = convolved(x @ w["in"].T + w["in.bias"], w["conv"], w["conv.bias"])
    y = x @ w["gate"].T + w["gate.bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    heads = u.reshape(len(x), len(w["beta"]), -1)
    into, kept = (
        sigmoid(np.einsum("nhi,hij->nhj", heads, w[role]) + w[f"{role}.bias"]).reshape(len(x), -1)
        for role in ("beta", "alpha")
    )
    a = np.exp(-8 * kept * softplus(w["lambda"]))
    state, out = np.zeros(u.shape[1]), []
    for t in range(len(x)):
        entering = into[t] * u[t] * (1 if t == 0 else np.sqrt(1 - a[t] ** 2))
        state = (a[t] if t else 0) * state + entering
        out.append(state)
    return (np.array(out) * y) @ w["out"].T + w["out.bias"]


def rwkv(w: Roles, x: np.ndarray, config: Any) -> np.ndarray:
    """RWKV 4's time mixing (Peng et al. 2023)."""
    before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
    mixed = {
        role: x * w[role].reshape(-1) + before * (1 - w[role].reshape(-1))
        for role in ("shift_k", "shift_v", "shift_gate")
    }
    k, v, r = mixed["shift_k"] @ w["k"].T, mixed["shift_v"] @ w["v"].T, sigmoid(mixed["shift_gate"] @ w["gate"].T)
    kept = np.exp(-np.exp(w["decay"]))
    above, below, out = np.zeros(k.shape[1]), np.zeros(k.shape[1]), []
    for t in range(len(x)):
        now = np.exp(w["bonus"] + k[t])
        out.append((above + now * v[t]) / (below + now))
        above, below = kept * above + np.exp(k[t]) * v[t], kept * below + np.exp(k[t])
    return (r * np.array(out)) @ w["out"].T


MIXED: Mapping[str, Callable[[Roles, np.ndarray, Any], np.ndarray]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "delta": delta,
    "kda": kda,
    "conv": convolution,
    "lightning": lightning,
    "rglru": rglru,
    "rwkv": rwkv,
}
