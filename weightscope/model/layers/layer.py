"""One attention layer and its heads on arrays (scores, values, W_QK, W_VO); no file, no family."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from weightscope.core.compute.device import CPU, Device, namespace
from weightscope.core.compute.half import Weights
from weightscope.core.errors import CheckpointError, whole
from weightscope.core.results import SPECTRA, function_at, notebook
from weightscope.model.layers.factored import Factored, spectra
from weightscope.model.layers.gathered import (
    GATES,
    AllHeadsNorm,
    DifferentialNorm,
    EachHeadNorm,
    mass_beside,
)
from weightscope.model.layers.maps import Affine, InnerNorm, Latent, Norm
from weightscope.model.layers.positions import (
    NOTHING_ADDED,
    Added,
    BiasFactor,
    Buckets,
    RelativeKeys,
    RelativeValues,
    Slopes,
    Temperature,
    WindowBias,
)
from weightscope.model.layers.rotation import Delta, Rotation, forms_between

Item = TypeVar("Item")


class OnDemand(Sequence[Item], Generic[Item]):
    """A sequence whose items are made when asked for and not kept, like a model's layers.

    Parameters
    ----------
    indices : sequence of int
    make : function of an index
    what : str
        Plural of the items, for repr.
    """

    def __init__(self, indices: Sequence[int], make: Callable[[int], Item], what: str) -> None:
        self._indices, self._make, self._what = indices, make, what

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> "OnDemand[Item]": ...
    def __getitem__(self, place: int | slice) -> "Item | OnDemand[Item]":
        if isinstance(place, slice):
            return OnDemand(self._indices[place], self._make, self._what)
        if not -len(self) <= (place := whole(place, "index")) < len(self):
            raise IndexError(f"no index {place}: there are {len(self)} {self._what}")
        return self._make(self._indices[place])

    def __iter__(self) -> Iterator[Item]:
        return map(self._make, self._indices)

    def __repr__(self) -> str:
        shown = [str(index) for index in self._indices]
        if len(shown) > 7:
            shown = [*shown[:6], "..."]
        return f"<{len(self)} {self._what}: {', '.join(shown)}>"


@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """One query head of a layer, as bilinear and linear maps on x / sigma(x).

    score(i, j) = x_i qk x_j' / (sigma_i sigma_j) + qk_bias x_j' / sigma_j, up to terms constant in
    j and before `scale` (detokenization paper, eq. 14); f(x) = x vo / sigma(x) + vo_bias. Under
    rotation qk holds at distance 0, qk_at at any; `caveats` lists what else the model does to these
    scores.

    Attributes
    ----------
    layer : Layer
    index : int

    Examples
    --------
    >>> import weightscope as ws
    >>> head = ws.open_model("embedded").layers[3].heads[5]
    >>> head
    Head(layer 3, head 5: width 192, head_dim 32)
    >>> head.w_q.shape, head.w_o.shape, head.b_q.shape
    ((192, 32), (32, 192), (32,))
    >>> head.qk
    Factored(192 x 192, rank <= 32)
    """

    layer: "Layer"
    index: int

    def __repr__(self) -> str:
        layer = self.layer
        sizes = f"width {layer.d_model}, head_dim {layer.head_dim}"
        return f"Head(layer {layer.index}, head {self.index}: {sizes})"

    @property
    def kv_head(self) -> int:
        """The key-value head that this query head shares."""
        return self.index * self.layer.n_kv_heads // self.layer.n_heads

    @property
    def scale(self) -> float:
        """Factor of the score before the softmax, usually 1/sqrt(d')."""
        return self.layer.scale

    @property
    def caveats(self) -> tuple[str, ...]:
        """Operations on this head's scores and values that the matrices leave out, in words."""
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
    def w_q(self) -> np.ndarray:
        """W_Q, (d, r), with the norm before it folded in; before rotation."""
        return self._q[0]

    @property
    def w_k(self) -> np.ndarray:
        """W_K, (d, r), with the norm before it folded in; before rotation."""
        return self._k[0]

    @property
    def w_v(self) -> np.ndarray:
        """W_V, (d, r_v), with the norm before it folded in."""
        return self._v[0]

    @property
    def w_o(self) -> np.ndarray:
        """W_O, (r_v, d)."""
        return np.asarray(self.layer.w_o[self.index])

    # as TransformerLens spells them
    W_Q, W_K, W_V, W_O = w_q, w_k, w_v, w_o

    @property
    def b_q(self) -> np.ndarray:
        """b_Q, (r,), including the contribution of the norm."""
        return self._q[1]

    @property
    def b_k(self) -> np.ndarray:
        """b_K, (r,), including the contribution of the norm."""
        return self._k[1]

    @property
    def b_v(self) -> np.ndarray:
        """b_V, (r_v,), including the contribution of the norm."""
        return self._v[1]

    def query_at(self, delta: Delta) -> tuple[np.ndarray, np.ndarray]:
        """W_Q R(delta), (d, r), and b_Q R(delta), (r,): the query side at distance delta."""
        rotation = self.layer.rotation
        if rotation is None:
            return self.w_q, self.b_q
        return rotation.rotate_at(self.w_q, delta), rotation.rotate_at(self.b_q, delta)

    @property
    def qk(self) -> Factored:
        """W_QK = W_Q W_K', (d, d); under rotation the content form, at distance 0."""
        return self.qk_at(0)

    def qk_at(self, delta: Delta) -> Factored:
        """W_QK(delta) = W_Q R(delta) W_K' at distance delta = i - j; constant without rotation.

        In vision towers that rotate by row and column, a number counts columns and a (rows,
        columns) pair is accepted; where positions have several axes, give a distance on each.
        """
        return Factored(self.query_at(delta)[0], self.w_k)

    def forms(self, deltas: Sequence[int] = (0, 1), window: int = 64) -> dict[str, Factored]:
        """Other forms of W_QK, by the names of `Layer.qk_forms`.

        Examples
        --------
        >>> import weightscope as ws
        >>> head = ws.open_model("embedded").layers[3].heads[5]  # learned positions: no rotation
        >>> {name: form.rank_bound for name, form in head.forms().items()}
        {'delta1': 32, 'mean64': 32, 'free': 32, 'turning': 0}
        """
        w = self.qk
        forms = {}
        for name, between in self.layer.qk_forms(deltas, window).items():
            used = between.any(axis=0)
            forms[name] = Factored(w.left @ between[:, used], w.right[:, used])
        return forms

    @property
    def qk_bias(self) -> np.ndarray:
        """b_QK = b_Q W_K', (d,); under rotation at distance 0."""
        return self.qk_bias_at(0)

    def qk_bias_at(self, delta: Delta) -> np.ndarray:
        """b_Q R(delta) W_K', (d,): the keys' term."""
        return self.w_k @ self.query_at(delta)[1]

    @property
    def vo(self) -> Factored:
        """W_VO = W_V W_O, (d, d)."""
        return Factored(self.w_v, self.w_o.T)

    @property
    def ov(self) -> Factored:
        """W_VO again, by its other usual name."""
        return self.vo

    @property
    def vo_bias(self) -> np.ndarray:
        """b_V W_O, (d,)."""
        return self.b_v @ self.w_o

    def plot_spectrum(self) -> Any:
        """A Matplotlib figure of the singular values of W_QK and W_VO, in the caller's style."""
        maps = {"$W_{QK}$": self.qk, "$W_{VO}$": self.vo}
        return function_at(SPECTRA)(maps, f"layer {self.layer.index} head {self.index}")

    @property
    def lead(self) -> str:
        """A short description, with what the matrices leave out."""
        shared = ""
        if self.layer.n_kv_heads != self.layer.n_heads:
            shared = f", with key-value head {self.kv_head}"
        left_out = [f"Not in these numbers: {caveat}." for caveat in self.caveats]
        scale = f"Scores are W_QK's times {self.scale:.3g}."
        return " ".join([f"{repr(self).removesuffix(')')}{shared}).", scale, *left_out])

    def _repr_png_(self) -> bytes:
        return bytes(self.plot_spectrum()._repr_png_())

    def _repr_html_(self) -> str:
        return notebook(
            self.lead, spectra({"W_QK": self.qk, "W_VO": self.vo}), picture=self._repr_png_()
        )


# Attributes of a layer that are maps of its input, and of the input of its keys.
QUERY_SIDE = ("q", "gate", "q_norm", "additive_gate")
KEY_SIDE = ("k", "v", "k_norm", "v_norm")


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One attention layer, its norm folded into the projections.

    H query heads in G groups, each group with one key-value head; nothing is repeated within a
    group.

    In cross-attention, keys and values are computed from a second input, the memory: the encoder's
    output.
    """

    # q, k, v: (H, d, r), (G, d, r) and (G, d, r_v) maps of x / sigma(x); k and v of the memory in
    # cross-attention
    q: Affine | Latent
    k: Affine | Latent
    v: Affine | Latent
    w_o: Weights  # (H, r_v, d)
    output_bias: np.ndarray  # (d,)
    index: int = 0  # the layer's place in the model
    scale: float = 1.0  # multiplies scores before additive terms and the softmax
    # the norm before the layer, folded except for sigma; None where the layer reads x as it is
    norm: Norm | None = None
    # q_norm, k_norm, v_norm: norms of queries, keys and values
    q_norm: InnerNorm | None = None
    k_norm: InnerNorm | None = None
    v_norm: InnerNorm | None = None
    # multiplies each head's weighted sum of values, per dimension or by one number per head
    gate: Affine | None = None
    gate_kind: str = "sigmoid"  # its activation, one of `gathered.GATES`
    # divides each head's weighted sum of values
    gathered_norm: AllHeadsNorm | EachHeadNorm | DifferentialNorm | None = None
    rotation: Rotation | None = None
    # (1 or H, r) factors of rotated queries, if a q/k-norm follows the rotation: gamma relative to
    # its mean over each pair, which is folded into `q`
    gain: np.ndarray | None = None
    temperature: Temperature | None = None  # multiplies queries, by position
    # bias by distance, or by two positions in a window, added after scaling
    additive: Slopes | Buckets | WindowBias | None = None
    additive_gate: BiasFactor | None = None  # factor of that bias for each query
    # relative, relative_values: terms of one token and a distance, added before scaling; values of
    # distances, added to tokens' values
    relative: tuple[RelativeKeys, ...] = ()
    relative_values: RelativeValues | None = None
    softcap: float | None = None
    clip: float | None = None  # q, k and v are clipped to [-clip, clip] after their norms
    sinks: np.ndarray | None = None  # (H,) learned sink logits
    # (H,) sink logits outside attention: each head's sum is multiplied by the mass that they leave
    outer_sinks: np.ndarray | None = None
    cross: bool = False  # keys and values are computed from a memory
    keys_of: int | None = None  # the earlier layer whose keys and values this layer reuses
    memory_norm: Norm | None = None  # the norm of the memory, folded except for sigma
    added: Added = NOTHING_ADDED  # positions added to the inputs of queries and keys (DETR)
    caveats: tuple[str, ...] = ()  # operations that the heads' matrices leave out, in words

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
        """The query heads, a sequence; a head's matrices are computed when asked for."""
        return OnDemand(range(self.n_heads), lambda index: Head(self, index), "heads")

    def head(self, index: int) -> Head:
        """One query head.

        Raises
        ------
        CheckpointError
            No such head.
        """
        index = whole(index, "head")
        if not 0 <= index < self.n_heads:
            raise CheckpointError(f"no head {index}: a layer has {self.n_heads}")
        return Head(self, index)

    def qk_forms(self, deltas: Sequence[int] = (0, 1), window: int = 64) -> dict[str, np.ndarray]:
        """The (r, r) matrices M of other forms W_Q(0) M W_K' of W_QK than the one at distance 0.

        - `delta7`, for each distance but 0: R(7);
        - `mean64`: the mean of R(0) .. R(63), the score averaged over distances in the window;
        - `free`, `turning`: the dimensions without and with rotation, at distance 0. In multi-head
          latent attention these are the latent part and the rotary key.

        Without rotation W_QK is the same at every distance: everything is free and nothing turns. A
        scale that the rotation applies to scores is part of W_Q(0) = W_Q R(0).

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
        """The layer with its maps on a device.

        `normalised`, `scalars`, `queries` and `inner_values` then run there, on arrays of the
        device. W_O, the gate and additive terms stay on the CPU.
        """
        if device is CPU:
            return self
        return replace(
            self,
            q=self.q.on(device),
            k=self.k.on(device),
            v=self.v.on(device),
            q_norm=self.q_norm and self.q_norm.on(device),
            k_norm=self.k_norm and self.k_norm.on(device),
            v_norm=self.v_norm and self.v_norm.on(device),
        )

    def normalised(self, x: Any) -> Any:
        """x / sigma(x), (n, d) -> (n, d): the input of the folded maps."""
        return x if self.norm is None else x / self.norm.sigma(x)[..., None]

    def normalised_memory(self, memory: Any) -> Any:
        """The input of the folded maps of keys and values: in cross-attention the memory's."""
        norm = self.memory_norm if self.cross else self.norm
        return memory if norm is None else memory / norm.sigma(memory)[..., None]

    def scalars(self, x: Any, memory: Any = None) -> tuple[Any, Any]:
        """Factors per token that norms inside attention put on queries and keys; ones without them.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        memory : (m, d_memory) array, optional
            In cross-attention the input of keys.

        Returns
        -------
        (H, n) array, (G, n or m) array
            The second multiplies a latent key's position-free part only.
        """
        xp, y = namespace(x), self._memory(x, memory)

        def factors(norm: InnerNorm | None, z: Any, heads: int) -> Any:
            scalars = xp.ones(z.shape[0], dtype=z.dtype) if norm is None else norm.scalars(z)
            return xp.broadcast_to(scalars, (heads, z.shape[0]))

        of_queries = factors(self.q_norm, self.normalised(x), self.n_heads)
        return of_queries, factors(self.k_norm, self.normalised_memory(y), self.n_kv_heads)

    def _memory(self, x: Any, memory: Any) -> Any:
        """The input of keys and values: the memory in cross-attention, x itself elsewhere."""
        if self.cross == (memory is not None):
            return memory if self.cross else x
        problem = "has no memory"
        if self.cross:
            kind = "is cross-attention"
            if self.keys_of is not None:
                kind = f"attends to what enters layer {self.keys_of}"
            problem = f"{kind}: say what to attend to, `memory=`"
        raise CheckpointError(f"layer {self.index} {problem}")

    def _stream(self, x: ArrayLike, of_keys: bool = False) -> np.ndarray:
        """An input of the layer as (n, d) array: of queries, or (`of_keys`) of keys and values."""
        stream, width = np.asarray(x), (self.k if of_keys else self.q).shape[1]
        if stream.ndim != 2 or stream.shape[1] != width or stream.dtype.kind not in "fiu":
            name = "memory" if of_keys and self.cross else "x"
            given = f"shape {stream.shape} and dtype {stream.dtype}"
            raise ValueError(
                f"{name} has {given}; layer {self.index} needs numbers of shape (tokens, {width})"
            )
        return stream

    def queries(self, x: Any) -> Any:
        """Queries before rotation, with their norm: (n, d) -> (H, n, r)."""
        return self._made(self.q, self.q_norm, self.normalised(x))

    def keys(self, x: Any) -> Any:
        """Keys before rotation, with their norm, of x or the memory: (n, d) -> (G, n, r)."""
        return self._made(self.k, self.k_norm, self.normalised_memory(x))

    def _made(self, projection: Affine | Latent, norm: InnerNorm | None, z: Any) -> Any:
        """Queries, keys or values of tokens z = x / sigma(x): (n, d) -> (heads, n, r)."""
        made = projection(z) if norm is None else norm(projection(z), z)
        return made if self.clip is None else namespace(made).clip(made, -self.clip, self.clip)

    def scores(
        self,
        x: np.ndarray,
        positions: np.ndarray | None = None,
        memory: np.ndarray | None = None,
        added: ArrayLike | None = None,
        added_to_memory: ArrayLike | None = None,
    ) -> np.ndarray:
        """The model's scaled attention scores before the softmax, without mask and learned sinks.

        Terms constant in the key may be missing (ALiBi is counted from the query); the softmax
        cannot tell.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer.
        positions : (n,) or (n, axes) int array, optional
            Positions; 0 .. n-1 by default. Several coordinates where the rotation has axes: time,
            height and width in multimodal RoPE, row and column of a patch in a vision tower.
        memory : (m, d_memory) array, optional
            For cross-attention only: the encoder's output, at positions 0 .. m-1.
        added : (n, e) array or 0, optional
            Positions that the model adds to the input of queries and (except in cross-attention)
            keys, not of values (DETR, section A.3). Layers that do so require it; 0 adds nothing.
        added_to_memory : (m, e) array or 0, optional
            Likewise for the keys of cross-attention.

        Returns
        -------
        (n_heads, n, n or m) array
            Queries along the second axis, keys along the third.
        """
        x, y = self._stream(x), self._stream(self._memory(x, memory), of_keys=True)
        positions = np.arange(len(x)) if positions is None else np.asarray(positions)
        fits = positions.shape[:1] == (len(x),) and positions.ndim <= 2
        if not fits or positions.dtype.kind not in "fiu":
            given = f"shape {positions.shape} and dtype {positions.dtype}"
            raise ValueError(
                f"positions has {given}; x needs numbers of shape ({len(x)},) or ({len(x)}, axes)"
            )
        of_keys = np.arange(len(y)) if self.cross and self.keys_of is None else positions
        q, k = self.added.to(
            self.queries(x),
            self.keys(y),
            added,
            added_to_memory,
            cross=self.cross,
            index=self.index,
        )
        terms = [self.scale * keys.between(q, k, positions) for keys in self.relative]
        q, k = self.placed(q, k, positions, of_keys)
        n, r = q.shape[1:]
        products = q.reshape(self.n_kv_heads, -1, r) @ k.transpose(0, 2, 1)  # (G, H/G n, m)
        scores = sum(terms, self.scale * products.reshape(self.n_heads, n, len(y)))
        if self.additive is not None:
            bias = self.additive.times * self.additive.between(positions, of_keys)
            if self.additive_gate is not None:
                bias = self.additive_gate(self.normalised(x))[:, :, None] * bias
            scores = scores + bias.astype(scores.dtype)
        return scores if self.softcap is None else self.softcap * np.tanh(scores / self.softcap)

    def placed(
        self, q: np.ndarray, k: np.ndarray, positions: np.ndarray, of_keys: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rotated queries (H, n, r) and keys (G, n, r), with gain and temperature applied."""
        if self.rotation is not None:
            of_keys = positions if of_keys is None else of_keys
            q, k = self.rotation.rotate(q, positions), self.rotation.rotate(k, of_keys)
        if self.gain is not None:
            q = q * self.gain[:, None, :]
        if self.temperature is not None:
            q = q * self.temperature(positions)[:, None].astype(q.dtype)
        return q, k

    def position_bias(self, delta: np.ndarray | int) -> np.ndarray:
        """Bias added to scaled scores at distances i - j (ALiBi, relative, window), or zero.

        Parameters
        ----------
        delta : int array of any shape

        Returns
        -------
        (n_heads, ...) array, before the factor of the query (`additive_gate`), if any
        """
        delta = np.asarray(delta)
        if self.additive is None:
            return np.zeros((self.n_heads, *delta.shape))
        return self.additive(delta)

    def values(self, x: np.ndarray) -> np.ndarray:
        """f(x) = v(x) W_O of every head.

        The layer's output is sum_j alpha_ij f(x_j) + output_bias, unless it is `modulated` (a gate,
        a norm before W_O); see `output`.

        Parameters
        ----------
        x : (n, d) array
            The residual stream that enters the layer; in cross-attention the memory, (m, d_memory).

        Returns
        -------
        (n_heads, n or m, d) array
        """
        x = self._stream(x, of_keys=True)
        v = self.inner_values(x)  # (G, n, r_v)
        # (G, H/G, r_v, d)
        of_head = np.asarray(self.w_o).reshape(self.n_kv_heads, -1, *self.w_o.shape[1:])
        return (v[:, None] @ of_head).reshape(self.n_heads, len(x), -1)

    @property
    def modulated(self) -> bool:
        """True if a gate, norm, outer sink or relative value stands between values and output."""
        return any(
            part is not None
            for part in (self.gate, self.gathered_norm, self.outer_sinks, self.relative_values)
        )

    def output(
        self,
        attention: np.ndarray,
        x: np.ndarray,
        part: np.ndarray | None = None,
        memory: np.ndarray | None = None,
    ) -> np.ndarray:
        """Attention's addition to the residual stream, including gates and norms before W_O.

        Parameters
        ----------
        attention : (n_heads, n, n or m) array
            Attention probabilities.
        x : (n, d) array
            The residual stream that enters the layer.
        part : (n_heads, n, n or m) array, optional
            The part of `attention` whose output is wanted. The outputs of parts add up, except for
            `output_bias`.
        memory : (m, d_memory) array, optional
            The encoder's output, in cross-attention; without a gate, `output(attention, memory)` is
            the same.

        Returns
        -------
        (n, d) array
        """
        y = x if self.cross and self.gate is None and memory is None else self._memory(x, memory)
        v = self.inner_values(self._stream(y, of_keys=True))
        attention = np.asarray(attention)
        shape = (self.n_heads, *attention.shape[1:2], v.shape[1])
        wanted = {
            "attention": f"({shape[0]}, queries, {shape[-1]})",
            "part": f"attention's, {shape}",
        }
        for name, given in {"attention": attention, "part": part}.items():
            if given is not None and np.shape(given) != shape:
                raise ValueError(
                    f"{name} has shape {np.shape(given)}; layer {self.index} needs {wanted[name]}"
                )
        total = self._gathered(attention, v)  # (H, n, r_v)
        gathered = total if part is None else self._gathered(np.asarray(part), v)
        if self.gate is not None:
            gathered = gathered * GATES[self.gate_kind](self.gate(self.normalised(x)))
        if self.outer_sinks is not None:
            scores = np.where(attention > 0, self.scores(x), -np.inf)
            gathered = gathered * mass_beside(self.outer_sinks, scores)
        if self.gathered_norm is not None:
            gathered = gathered / self.gathered_norm.sizes(total)
        written = np.einsum("hnr,hrd->nd", gathered, np.asarray(self.w_o), optimize=True)
        return written + self.output_bias

    def _gathered(self, attention: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Every head's weighted sum of values: v (G, n, r_v) -> (H, n, r_v)."""
        g, n, r_v = v.shape
        gathered = (attention.reshape(g, -1, n) @ v).reshape(self.n_heads, -1, r_v)
        if self.relative_values is None:
            return gathered
        return gathered + self.relative_values(attention)

    def inner_values(self, x: Any) -> Any:
        """v(x) of every key-value head before W_O, of x or the memory: (n, d) -> (G, n, r_v)."""
        return self._made(self.v, self.v_norm, self.normalised_memory(x))

    def after(self, w: np.ndarray, b: np.ndarray) -> "Layer":
        """The layer on inputs y with x = y w + b, w of shape (e, d) and b of shape (d,)."""
        return self._changed(lambda part: part.after(w, b), *QUERY_SIDE, *KEY_SIDE)

    def after_norm(self, norm: Norm) -> "Layer":
        """The layer on inputs y with x = norm(y), the norm folded into the maps but for sigma."""
        names = QUERY_SIDE if self.cross else (*QUERY_SIDE, *KEY_SIDE)
        return replace(self._changed(lambda part: part.after_norm(norm), *names), norm=norm)

    def after_memory_norm(self, norm: Norm) -> "Layer":
        """Cross-attention to norm(memory), folded likewise."""
        changed = self._changed(lambda part: part.after_norm(norm), *KEY_SIDE)
        return replace(changed, memory_norm=norm)

    def _changed(self, change: Callable[[Any], Any], *names: str) -> "Layer":
        """The layer with some of its maps replaced."""
        maps = {name: getattr(self, name) for name in names}
        changed = {name: change(part) for name, part in maps.items() if part is not None}
        return replace(self, **changed)
