"""One attention layer on arrays: its scores, its values and its heads. Knows no file and no family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weightscope.attention.added import NOTHING_ADDED, Added
from weightscope.attention.gathered import GATES, Difference, HeadNorm, SubNorm, mass_beside
from weightscope.attention.head import Head
from weightscope.attention.maps import Affine, InnerNorm, Latent
from weightscope.attention.norms import Norm
from weightscope.attention.position_bias import BiasGate, Buckets, Slopes, WindowBias
from weightscope.attention.relative import RelativeKeys, RelativeValues
from weightscope.attention.rotation import Rotation, forms_between
from weightscope.attention.temperature import Temperature
from weightscope.device import CPU, Device, namespace
from weightscope.errors import CheckpointError
from weightscope.half import Weights
from weightscope.on_demand import OnDemand

QUERY_SIDE, KEY_SIDE = ("q", "gate", "q_norm", "additive_gate"), ("k", "v", "k_norm", "v_norm")  # maps of each


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One attention layer, its norm folded into the projections.

    H query heads in G groups, each group with one key-value head; nothing is repeated within a group.

    In cross-attention keys and values are made of a second input, the memory: what an encoder hands over.

    Attributes
    ----------
    q, k, v : Affine or Latent
        (H, d, r), (G, d, r) and (G, d, r_v) maps of x / sigma(x); k and v of the memory in cross-attention.
    w_o : (H, r_v, d) array or Half
    output_bias : (d,) array
    index : int
        The layer's place in the model.
    scale : float
        Multiplies scores before additive terms and the softmax.
    norm : Norm or None
        The norm before the layer, of which sigma is left; None where the layer reads x as it is.
    q_norm, k_norm, v_norm : InnerNorm or None
        Norms of queries, keys and values.
    gate : Affine or None
        Multiplies what a head has gathered, dimension by dimension or, where it has one output a head, as a whole.
    gate_kind : str
        Through which of `gathered.GATES` it goes.
    gathered_norm : SubNorm, HeadNorm, Difference or None
        Divides what heads have gathered.
    rotation : Rotation or None
    gain : (1 or H, r) array or None
        Multiplies rotated queries: what the gammas of norms after rotation do beyond their mean over each pair, which
        is folded into `q`.
    temperature : Temperature or None
        Multiplies queries, by position.
    additive : Slopes, Buckets, WindowBias or None
        A term by distance, or by the places of both tokens in a window, added after scaling.
    additive_gate : BiasGate or None
        Multiplies that term, by query.
    relative, relative_values : tuple of RelativeKeys, RelativeValues or None
        Terms of a token and a distance, added before scaling; what a head gathers beside tokens' values.
    softcap : float or None
    clip : float or None
        q, k and v are clipped to [-clip, clip], their norms behind them.
    sinks : (H,) array or None
        Learned sink logits.
    outer_sinks : (H,) array or None
        Sink logits that attention does not know of: what a head gathers is multiplied by the mass that they leave.
    cross : bool
        Keys and values are made of a memory.
    keys_of : int or None
        The layer of the same tokens whose input is the memory, where that is one before.
    memory_norm : Norm or None
        The norm of the memory before its keys and values, of which sigma is left.
    added : Added
        What positions add to queries and keys where they are added to what those are made of.
    caveats : tuple of str
        What of its scores and values the heads' matrices leave out.
    """

    q: Affine | Latent
    k: Affine | Latent
    v: Affine | Latent
    w_o: Weights
    output_bias: np.ndarray
    index: int = 0
    scale: float = 1.0
    norm: Norm | None = None
    q_norm: InnerNorm | None = None
    k_norm: InnerNorm | None = None
    v_norm: InnerNorm | None = None
    gate: Affine | None = None
    gate_kind: str = "sigmoid"
    gathered_norm: SubNorm | HeadNorm | Difference | None = None
    rotation: Rotation | None = None
    gain: np.ndarray | None = None
    temperature: Temperature | None = None
    additive: Slopes | Buckets | WindowBias | None = None
    additive_gate: BiasGate | None = None
    relative: tuple[RelativeKeys, ...] = ()
    relative_values: RelativeValues | None = None
    softcap: float | None = None
    clip: float | None = None
    sinks: np.ndarray | None = None
    outer_sinks: np.ndarray | None = None
    cross: bool = False
    keys_of: int | None = None
    memory_norm: Norm | None = None
    added: Added = NOTHING_ADDED
    caveats: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Layer({self.index}: {self.n_heads} heads of {self.head_dim}, width {self.d_model})"

    @property
    def d_model(self) -> int:
        """d, the width of the residual stream."""
        return int(self.w_o.shape[2])

    @property
    def n_heads(self) -> int:
        """H, query heads."""
        return int(self.q.shape[0])

    @property
    def n_kv_heads(self) -> int:
        """G, key-value heads."""
        return int(self.k.shape[0])

    @property
    def head_dim(self) -> int:
        """r, the width of a head's queries and keys."""
        return int(self.q.shape[2])

    @property
    def heads(self) -> OnDemand[Head]:
        """The query heads, a sequence; a head's matrices are worked out when they are asked for."""
        return OnDemand(range(self.n_heads), lambda index: Head(self, index), "heads")

    def head(self, index: int) -> Head:
        """One query head.

        Raises
        ------
        CheckpointError
            No such head.
        """
        if not 0 <= index < self.n_heads:
            raise CheckpointError(f"no head {index}: a layer has {self.n_heads}")
        return Head(self, index)

    def qk_forms(self, deltas: Sequence[int] = (0, 1), window: int = 64) -> dict[str, np.ndarray]:
        """The forms W_Q(0) M W_K' of the heads' W_QK, beside W_QK at distance 0 itself: the (r, r) matrices M.

        - `delta7`, for each distance asked for but 0: R(7);
        - `mean64`: the mean of R(0) .. R(63), what is left of the score when the distance is anything in the window;
        - `free`, `turning`: the dimensions that rotation leaves alone, and those it turns, at distance 0. In multi-head
          latent attention these are the latent's part and the rotary key's.

        Without rotation W_QK is the same at every distance: all of it is free, and nothing turns. A factor that a
        rotation puts on scores is in W_Q(0) = W_Q R(0).

        Parameters
        ----------
        deltas : sequence of int
            Distances i - j.
        window : int

        Returns
        -------
        dict of float64 (r, r) arrays
        """
        return forms_between(self.rotation, self.head_dim, deltas, window)

    def on(self, device: Device) -> "Layer":
        """The layer with its maps on a device, where `normalised`, `scalars`, `queries` and `inner_values` then run.

        They take and give arrays of that device. W_O, the gate and what is added to scores stay on this machine.
        """
        if device is CPU:
            return self
        return replace(
            self, q=self.q.on(device), k=self.k.on(device), v=self.v.on(device),
            q_norm=self.q_norm and self.q_norm.on(device), k_norm=self.k_norm and self.k_norm.on(device),
            v_norm=self.v_norm and self.v_norm.on(device),
        )  # fmt: skip

    def normalised(self, x: Any) -> Any:
        """x / sigma(x), (n, d) -> (n, d): what the folded maps act on."""
        return x if self.norm is None else x / self.norm.sigma(x)[..., None]

    def normalised_memory(self, memory: Any) -> Any:
        """The same of what keys and values are made of: in cross-attention the memory over its own sigma."""
        norm = self.memory_norm if self.cross else self.norm
        return memory if norm is None else memory / norm.sigma(memory)[..., None]

    def scalars(self, x: Any, memory: Any = None) -> tuple[Any, Any]:
        """Per-token factors that norms inside attention put on queries and keys; ones where there are none.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        memory : (m, d_memory) array, optional
            In cross-attention what keys are made of.

        Returns
        -------
        (H, n) array, (G, n or m) array
            The second multiplies a latent key's position-free part only.
        """
        xp, y = namespace(x), self._memory(x, memory)

        def of(norm: InnerNorm | None, z: Any, heads: int) -> Any:
            scalars = xp.ones(z.shape[0], dtype=z.dtype) if norm is None else norm.scalars(z)
            return xp.broadcast_to(scalars, (heads, z.shape[0]))

        of_q = of(self.q_norm, self.normalised(x), self.n_heads)
        return of_q, of(self.k_norm, self.normalised_memory(y), self.n_kv_heads)

    def _memory(self, x: Any, memory: Any) -> Any:
        """What keys and values are made of: the memory in cross-attention, x itself elsewhere."""
        if self.cross == (memory is None):
            kind = "is cross-attention" if self.keys_of is None else f"attends to what enters layer {self.keys_of}"
            problem = f"{kind}: say what it attends to, `memory=`" if self.cross else "has no memory"
            raise CheckpointError(f"layer {self.index} {problem}")
        return memory if self.cross else x

    def queries(self, x: Any) -> Any:
        """What the layer's queries are before rotation, their norm included: (n, d) -> (H, n, r)."""
        return self._made(self.q, self.q_norm, self.normalised(x))

    def keys(self, x: Any) -> Any:
        """What the layer's keys are before rotation, their norm included: (n, d) -> (G, n, r); or of the memory."""
        return self._made(self.k, self.k_norm, self.normalised_memory(x))

    def _made(self, of: Affine | Latent, norm: InnerNorm | None, z: Any) -> Any:
        """Queries, keys or values of tokens z = x / sigma(x): (n, d) -> (heads, n, r)."""
        made = of(z) if norm is None else norm(of(z), z)
        return made if self.clip is None else namespace(made).clip(made, -self.clip, self.clip)

    def scores(
        self, x: np.ndarray, positions: np.ndarray | None = None, memory: np.ndarray | None = None,
        added: ArrayLike | None = None, added_to_memory: ArrayLike | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The model's scaled pre-softmax attention scores, without the mask and without learned sinks.

        Terms constant in the key may be missing (ALiBi is counted from the query); the softmax cannot tell.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        positions : (n,) or (n, axes) int array, optional
            Their positions; 0 .. n-1 by default. Several coordinates where the rotation has axes: time, height and
            width in multimodal RoPE, row and column of a patch in a vision tower.
        memory : (m, d_memory) array, optional
            In cross-attention, and only there, what the layer attends to: the encoder's output, at 0 .. m-1.
        added : (n, e) array or 0, optional
            What the model adds to that of which queries and, but in cross-attention, keys are made; not to values
            (DETR, section A.3). Layers that do so need it; 0 leaves what x does alone.
        added_to_memory : (m, e) array or 0, optional
            Likewise, to that of which the keys of cross-attention are made.

        Returns
        -------
        (n_heads, n, n or m) array
            Queries along the second axis, keys along the third.
        """
        x, y = np.asarray(x), np.asarray(self._memory(x, memory))
        positions = np.arange(len(x)) if positions is None else np.asarray(positions)
        of_keys = np.arange(len(y)) if self.cross and self.keys_of is None else positions
        q, k = self.added.to(self.queries(x), self.keys(y), added, added_to_memory, cross=self.cross, index=self.index)
        terms = [self.scale * of.between(q, k, positions) for of in self.relative]
        q, k = self.placed(q, k, positions, of_keys)
        n, r = q.shape[1:]
        of_group = q.reshape(self.n_kv_heads, -1, r) @ k.transpose(0, 2, 1)  # (G, H/G n, m)
        scores = sum(terms, self.scale * of_group.reshape(self.n_heads, n, len(y)))
        if self.additive is not None:
            bias = self.additive.times * self.additive.between(positions, of_keys)
            gate = 1 if self.additive_gate is None else self.additive_gate(self.normalised(x))[:, :, None]
            scores = scores + (gate * bias).astype(scores.dtype)
        return scores if self.softcap is None else self.softcap * np.tanh(scores / self.softcap)

    def placed(
        self, q: np.ndarray, k: np.ndarray, positions: np.ndarray, of_keys: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Queries (H, n, r) and keys (G, n, r) at positions (n,): rotated, and what else depends on the position."""
        if self.rotation is not None:
            of_keys = positions if of_keys is None else of_keys
            q, k = self.rotation.rotate(q, positions), self.rotation.rotate(k, of_keys)
        if self.gain is not None:
            q = q * self.gain[:, None, :]
        if self.temperature is not None:
            q = q * self.temperature(positions)[:, None].astype(q.dtype)
        return q, k

    def position_bias(self, delta: np.ndarray | int) -> np.ndarray:
        """What is added to scaled scores at distances i - j: ALiBi, relative biases, a window's along a row; else zero.

        Parameters
        ----------
        delta : int array of any shape

        Returns
        -------
        (n_heads, ...) array, before the query's factor where it has one (`additive_gate`)
        """
        delta = np.asarray(delta)
        return np.zeros((self.n_heads, *delta.shape)) if self.additive is None else self.additive(delta)

    def values(self, x: np.ndarray) -> np.ndarray:
        """f(x) = v(x) W_O of every head, so that the layer's output is sum_j alpha_ij f(x_j) + output_bias.

        Where something multiplies what a head has gathered (`modulated`), that sum is not the output; see `output`.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer; in cross-attention the memory, (m, d_memory).

        Returns
        -------
        (n_heads, n or m, d) array
        """
        v = self.inner_values(np.asarray(x))  # (G, n, r_v)
        of_head = np.asarray(self.w_o).reshape(self.n_kv_heads, -1, *self.w_o.shape[1:])  # (G, H/G, r_v, d)
        return (v[:, None] @ of_head).reshape(self.n_heads, len(x), -1)

    @property
    def modulated(self) -> bool:
        """Whether values do not add up to the output: something multiplies what heads gather, or is added to it."""
        return any(of is not None for of in (self.gate, self.gathered_norm, self.outer_sinks, self.relative_values))

    def output(
        self, attention: np.ndarray, x: np.ndarray, part: np.ndarray | None = None, memory: np.ndarray | None = None
    ) -> np.ndarray:  # fmt: skip
        """What attention adds to the stream, gates and norms before W_O included.

        Parameters
        ----------
        attention : (n_heads, n, n or m) array
            Attention probabilities.
        x : (n, d) array
            The residual stream that enters the layer.
        part : (n_heads, n, n or m) array, optional
            The share of `attention` whose output is wanted; such shares add up, less `output_bias` but once.
        memory : (m, d_memory) array, optional
            In cross-attention what the layer attends to; without a gate `output(attention, memory)` says the same.

        Returns
        -------
        (n, d) array
        """
        y = x if self.cross and self.gate is None and memory is None else self._memory(x, memory)
        v = self.inner_values(np.asarray(y))
        whole = self._gathered(attention, v)  # (H, n, r_v)
        gathered = whole if part is None else self._gathered(part, v)
        if self.gate is not None:
            gathered = gathered * GATES[self.gate_kind](self.gate(self.normalised(x)))
        if self.outer_sinks is not None:
            scores = np.where(attention > 0, self.scores(x), -np.inf)
            gathered = gathered * mass_beside(self.outer_sinks, scores)
        if self.gathered_norm is not None:
            gathered = gathered / self.gathered_norm.sizes(whole)
        return np.einsum("hnr,hrd->nd", gathered, np.asarray(self.w_o), optimize=True) + self.output_bias

    def _gathered(self, attention: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What every head gathers of values v (G, n, r_v), (H, n, r_v)."""
        g, n, r_v = v.shape
        gathered = (attention.reshape(g, -1, n) @ v).reshape(self.n_heads, -1, r_v)
        return gathered if self.relative_values is None else gathered + self.relative_values(attention)

    def inner_values(self, x: Any) -> Any:
        """v(x) of every key-value head, before W_O: (n, d) -> (n_kv_heads, n, r_v); or of the memory."""
        return self._made(self.v, self.v_norm, self.normalised_memory(x))

    def after(self, w: np.ndarray, b: np.ndarray) -> "Layer":
        """The layer on inputs y with x = y w + b, w of shape (e, d) and b of shape (d,)."""
        return self._changed(lambda of: of.after(w, b), *QUERY_SIDE, *KEY_SIDE)

    def after_norm(self, norm: Norm) -> "Layer":
        """The layer on inputs y with x = norm(y): the norm is folded into every map of x, but for its sigma."""
        names = QUERY_SIDE if self.cross else (*QUERY_SIDE, *KEY_SIDE)
        return replace(self._changed(lambda of: of.after_norm(norm), *names), norm=norm)

    def after_memory_norm(self, norm: Norm) -> "Layer":
        """Cross-attention to a memory that a norm stands before: the norm is folded likewise."""
        return replace(self._changed(lambda of: of.after_norm(norm), *KEY_SIDE), memory_norm=norm)

    def _changed(self, change: Callable[[Any], Any], *names: str) -> "Layer":
        """Some of the maps replaced by what `change` makes of them."""
        maps = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(of) for name, of in maps.items() if of is not None})
