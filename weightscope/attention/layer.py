"""One attention layer on arrays: its scores and values, and its heads as matrices. Knows no file and no family."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from weightscope.attention.factored import Factored
from weightscope.attention.folding import Affine, InverseRms, Latent, rms, sigma
from weightscope.attention.position_bias import Buckets, Slopes
from weightscope.attention.rotation import Delta, Rotation
from weightscope.checkpoint.dtypes import Weights
from weightscope.device import CPU, Device, namespace
from weightscope.errors import CheckpointError


@dataclass(frozen=True)
class Divisor:
    """The scalar a norm divides a token by once the rest of it is folded.

    Attributes
    ----------
    centred : bool
        The norm is a LayerNorm; otherwise an RMSNorm.
    eps : float
    """

    centred: bool
    eps: float

    def __call__(self, x: Any) -> Any:
        """sigma(x) over the last axis."""
        return sigma(x, self.eps) if self.centred else rms(x, self.eps)


@dataclass(frozen=True)
class Layer:
    """One attention layer, its norm folded into the projections.

    H query heads in G groups, each group with one key-value head; nothing is repeated within a group.

    Attributes
    ----------
    index : int
    q, k, v : Affine or Latent
        (H, d, r), (G, d, r) and (G, d, r_v) maps of x / sigma(x).
    w_o : (H, r_v, d) array or Narrow
    output_bias : (d,) array
    scale : float
        Multiplies scores before additive terms and the softmax.
    divisor : Divisor or None
        sigma; None where the layer reads x as it is.
    q_rms, k_rms, v_rms : InverseRms or None
        Per-token scalars of norms inside attention, which multiply q, k and v.
    q_shift, k_shift : (heads, r) array or None
        What such a norm adds after its scalar.
    gate : Affine or None
        Its sigmoid multiplies what a head has gathered.
    rotation : Rotation or None
    additive : Slopes, Buckets or None
        A term by distance, added after scaling.
    softcap : float or None
    clip : float or None
        q, k and v are clipped to [-clip, clip].
    sinks : (H,) array or None
        Learned sink logits.
    caveats : tuple of str
        What of its scores and values the heads' matrices leave out.
    """

    index: int
    q: Affine | Latent
    k: Affine | Latent
    v: Affine | Latent
    w_o: Weights
    output_bias: np.ndarray
    scale: float
    divisor: Divisor | None = None
    q_rms: InverseRms | None = None
    k_rms: InverseRms | None = None
    v_rms: InverseRms | None = None
    q_shift: np.ndarray | None = None
    k_shift: np.ndarray | None = None
    gate: Affine | None = None
    rotation: Rotation | None = None
    additive: Slopes | Buckets | None = None
    softcap: float | None = None
    clip: float | None = None
    sinks: np.ndarray | None = None
    caveats: tuple[str, ...] = ()

    @property
    def n_heads(self) -> int:
        """H, query heads."""
        return self.q.heads

    @property
    def n_kv_heads(self) -> int:
        """G, key-value heads."""
        return self.k.heads

    def head(self, index: int) -> "Head":
        """One query head.

        Raises
        ------
        CheckpointError
            No such head.
        """
        if not 0 <= index < self.n_heads:
            raise CheckpointError(f"no head {index}: a layer has {self.n_heads}")
        return Head(self, index)

    def heads(self) -> "list[Head]":
        """All query heads of the layer."""
        return [self.head(index) for index in range(self.n_heads)]

    def on(self, device: Device) -> "Layer":
        """The layer with its maps on a device, where `normalised`, `scalars`, `queries` and `inner_values` then run.

        They take and give arrays of that device. W_O, the gate and what is added to scores stay on this machine.
        """
        if device is CPU:
            return self

        def there(inverse: InverseRms | None) -> InverseRms | None:
            return inverse and replace(inverse, source=inverse.source.on(device))

        return replace(
            self, q=self.q.on(device), k=self.k.on(device), v=self.v.on(device),
            q_rms=there(self.q_rms), k_rms=there(self.k_rms), v_rms=there(self.v_rms),
            q_shift=None if self.q_shift is None else device.put(self.q_shift),
        )  # fmt: skip

    def normalised(self, x: Any) -> Any:
        """x / sigma(x), (n, d) -> (n, d): what the folded maps act on."""
        return x if self.divisor is None else x / self.divisor(x)[..., None]

    def scalars(self, x: Any) -> tuple[Any, Any]:
        """Per-token factors that norms inside attention put on queries and keys; ones where there are none.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.

        Returns
        -------
        (H, n) array, (G, n) array
            The second multiplies a latent key's position-free part only.
        """
        z, xp, n = self.normalised(x), namespace(x), x.shape[0]
        ones = xp.ones(n, dtype=z.dtype)
        of_q = ones if self.q_rms is None else self.q_rms(z)
        of_k = ones if self.k_rms is None else self.k_rms(z)
        return xp.broadcast_to(of_q, (self.n_heads, n)), xp.broadcast_to(of_k, (self.n_kv_heads, n))

    def queries(self, x: Any) -> Any:
        """What the layer's queries are before rotation, their norm included: (n, d) -> (H, n, r)."""
        z = self.normalised(x)
        return _after_norm(self._clipped(self.q(z)), self.q_rms, self.q_shift, z)

    def scores(self, x: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """The model's scaled pre-softmax attention scores, without the mask and without learned sinks.

        Terms constant in the key may be missing (ALiBi is counted from the query); the softmax cannot tell.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        positions : (n,) int array, optional
            Their positions; 0 .. n-1 by default.

        Returns
        -------
        (n_heads, n, n) array
            Queries along the second axis, keys along the third.
        """
        x = np.asarray(x)
        positions = np.arange(len(x)) if positions is None else np.asarray(positions)
        z = self.normalised(x)
        q = self.queries(x)  # (H, n, r)
        k = _after_norm(self._clipped(self.k(z)), self.k_rms, self.k_shift, z)  # (G, n, r)
        if self.rotation is not None:
            q, k = self.rotation.rotate(q, positions), self.rotation.rotate(k, positions)
        n, r = q.shape[1:]
        of_group = q.reshape(self.n_kv_heads, -1, r) @ k.transpose(0, 2, 1)  # (G, H/G n, n)
        scores = self.scale * of_group.reshape(self.n_heads, n, n)
        if self.additive is not None:
            bias = self.additive.times * self.position_bias(positions[:, None] - positions)
            scores = scores + bias.astype(scores.dtype)
        return scores if self.softcap is None else self.softcap * np.tanh(scores / self.softcap)

    def position_bias(self, delta: np.ndarray | int) -> np.ndarray:
        """What is added to scaled scores at distances i - j: ALiBi, relative biases; zero for everyone else.

        Parameters
        ----------
        delta : int array of any shape

        Returns
        -------
        (n_heads, ...) array
        """
        delta = np.asarray(delta)
        return np.zeros((self.n_heads, *delta.shape)) if self.additive is None else self.additive(delta)

    def values(self, x: np.ndarray) -> np.ndarray:
        """f(x) = v(x) W_O of every head, so that the layer's output is sum_j alpha_ij f(x_j) + output_bias.

        Where a gate multiplies what a head has gathered (`gate`), that sum is not the output; see `output`.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.

        Returns
        -------
        (n_heads, n, d) array
        """
        v = self.inner_values(np.asarray(x))  # (G, n, r_v)
        of_head = np.asarray(self.w_o).reshape(self.n_kv_heads, -1, *self.w_o.shape[1:])  # (G, H/G, r_v, d)
        return (v[:, None] @ of_head).reshape(self.n_heads, len(x), -1)

    def output(self, attention: np.ndarray, x: np.ndarray) -> np.ndarray:
        """What attention adds to the stream, the gate included.

        Parameters
        ----------
        attention : (n_heads, n, n) array
            Attention probabilities.
        x : (n, d) array
            The residual stream that enters the layer.

        Returns
        -------
        (n, d) array
        """
        v = self.inner_values(np.asarray(x))
        g, n, r_v = v.shape
        gathered = (attention.reshape(g, -1, n) @ v).reshape(self.n_heads, -1, r_v)  # (H, n, r_v)
        if self.gate is not None:
            gathered = gathered / (1 + np.exp(-self.gate(self.normalised(x))))
        return np.einsum("hnr,hrd->nd", gathered, np.asarray(self.w_o), optimize=True) + self.output_bias

    def inner_values(self, x: Any) -> Any:
        """v(x) of every key-value head, before W_O: (n, d) -> (n_kv_heads, n, r_v)."""
        z = self.normalised(x)
        return _after_norm(self._clipped(self.v(z)), self.v_rms, None, z)

    def _clipped(self, x: Any) -> Any:
        return x if self.clip is None else namespace(x).clip(x, -self.clip, self.clip)

    def after(self, w: np.ndarray, b: np.ndarray) -> "Layer":
        """The layer on inputs y with x = y w + b, w of shape (e, d) and b of shape (d,)."""
        return self._on_other_input(lambda affine: affine.after(w, b), lambda latent: latent.after(w, b))

    def after_norm(self, gamma: np.ndarray, beta: np.ndarray, divisor: Divisor) -> "Layer":
        """The layer on inputs y with x = norm(y), the norm folded into every map but for its `divisor`."""
        folded = self._on_other_input(
            lambda affine: affine.after_norm(gamma, beta, centred=divisor.centred),
            lambda latent: latent.after_norm(gamma, beta, centred=divisor.centred),
        )
        return replace(folded, divisor=divisor)

    def _on_other_input(self, change: Callable[[Affine], Affine], change_latent: Callable[[Latent], Latent]) -> "Layer":
        def maps(of: Affine | Latent) -> Affine | Latent:
            return change_latent(of) if isinstance(of, Latent) else change(of)

        def source(inverse: InverseRms | None) -> InverseRms | None:
            return inverse and replace(inverse, source=change(inverse.source))

        return replace(
            self, q=maps(self.q), k=maps(self.k), v=maps(self.v), gate=self.gate and change(self.gate),
            q_rms=source(self.q_rms), k_rms=source(self.k_rms), v_rms=source(self.v_rms),
        )  # fmt: skip


def _after_norm(x: Any, inverse: InverseRms | None, shift: Any, z: Any) -> Any:
    """Queries, keys or values (heads, n, r) times their norm's scalar, and shifted."""
    if inverse is not None:
        scalars = inverse(z)[..., None]
        if inverse.dims is None:
            x = x * scalars
        else:
            x = namespace(x).concat((x[..., : inverse.dims] * scalars, x[..., inverse.dims :]), axis=-1)
    return x if shift is None else x + shift[:, None, :]


@dataclass(frozen=True)
class Head:
    """One query head of a layer, as bilinear and linear maps on x / sigma(x).

    score(i, j) = x_i qk x_j' / (sigma_i sigma_j) + qk_bias x_j' / sigma_j, up to terms constant in j and before `scale`
    (detokenization paper, eq. 14); f(x) = x vo / sigma(x) + vo_bias. Under rotation qk holds at distance 0, qk_at at
    any; what else stands between them and the model's scores is in `caveats`.

    Attributes
    ----------
    layer : Layer
    index : int
    """

    layer: Layer
    index: int

    @property
    def kv_head(self) -> int:
        """The key-value head that this query head shares."""
        return self.index * self.layer.n_kv_heads // self.layer.n_heads

    @property
    def scale(self) -> float:
        """What multiplies the score before the softmax, 1/sqrt(d') as a rule."""
        return self.layer.scale

    @property
    def caveats(self) -> tuple[str, ...]:
        """What of this head's scores and values the matrices leave out."""
        return self.layer.caveats

    @cached_property
    def _q(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layer.q.of(self.index)

    @cached_property
    def _k(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layer.k.of(self.kv_head)

    @cached_property
    def _v(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layer.v.of(self.kv_head)

    @property
    def qk(self) -> Factored:
        """W_QK = W_Q W_K', (d, d); under rotation the content form, at distance 0."""
        return self.qk_at(0)

    def qk_at(self, delta: Delta) -> Factored:
        """W_QK(delta) = W_Q R(delta) W_K' at distance delta = i - j; without rotation the same at every distance.

        For DINOv3 a number counts columns; a (rows, columns) pair is taken too.
        """
        return Factored(self._turned(self._q[0], delta), self._k[0])

    @property
    def qk_bias(self) -> np.ndarray:
        """b_QK = b_Q W_K', (d,); under rotation at distance 0."""
        return self.qk_bias_at(0)

    def qk_bias_at(self, delta: Delta) -> np.ndarray:
        """b_Q R(delta) W_K', (d,): the keys' term."""
        return self._k[0] @ self._turned(self._q[1], delta)

    def key_bias_at(self, delta: Delta) -> np.ndarray:
        """W_Q R(delta) b_K', (d,): the queries' term, constant in the key unless rotation makes it depend on delta."""
        return self._turned(self._q[0], delta) @ self._k[1]

    def bias_at(self, delta: Delta) -> float:
        """b_Q R(delta) b_K': the term of neither token."""
        return float(self._turned(self._q[1], delta) @ self._k[1])

    @property
    def qk_free(self) -> Factored:
        """The part of W_QK that does not depend on position: all of it without rotation, none of it under full RoPE."""
        rotation, q, k = self.layer.rotation, self._q[0], self._k[0]
        turning = np.array([], int) if rotation is None else rotation.turning
        return Factored(np.delete(q, turning, axis=1), np.delete(k, turning, axis=1))

    def qk_rotary_at(self, delta: Delta) -> Factored:
        """The part of W_QK(delta) that turns; `qk_free` and this add up to `qk_at`."""
        rotation, whole = self.layer.rotation, self.qk_at(delta)
        turning = np.array([], int) if rotation is None else rotation.turning
        return Factored(whole.left[:, turning], whole.right[:, turning])

    def _turned(self, w: np.ndarray, delta: Delta) -> np.ndarray:
        return w if self.layer.rotation is None else self.layer.rotation.rotate_at(w, delta)

    @property
    def vo(self) -> Factored:
        """W_VO = W_V W_O, (d, d)."""
        return Factored(self._v[0], np.asarray(self.layer.w_o[self.index]).T)

    @property
    def vo_bias(self) -> np.ndarray:
        """b_V W_O, (d,)."""
        return self._v[1] @ np.asarray(self.layer.w_o[self.index])
