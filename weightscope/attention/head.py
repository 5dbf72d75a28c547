"""One query head as matrices: W_QK and its forms, W_VO, and their biases."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from weightscope.attention.factored import Factored, spectra
from weightscope.attention.rotation import Delta
from weightscope.notebook import notebook

if TYPE_CHECKING:
    from weightscope.attention.layer import Layer


@dataclass(frozen=True, eq=False, repr=False)
class Head:
    """One query head of a layer, as bilinear and linear maps on x / sigma(x).

    score(i, j) = x_i qk x_j' / (sigma_i sigma_j) + qk_bias x_j' / sigma_j, up to terms constant in j and before `scale`
    (detokenization paper, eq. 14); f(x) = x vo / sigma(x) + vo_bias. Under rotation qk holds at distance 0, qk_at at
    any; what else stands between them and the model's scores is in `caveats`.

    Attributes
    ----------
    layer : Layer
    index : int

    Examples
    --------
    >>> import weightscope as ws
    >>> head = ws.open_model("embedded").layers[0].heads[6]
    >>> head
    Head(layer 0, head 6: width 256, head_dim 32)
    >>> head.w_q.shape, head.w_o.shape, head.b_q.shape
    ((256, 32), (32, 256), (32,))
    >>> head.qk
    Factored(256 x 256, rank <= 32)
    """

    layer: "Layer"
    index: int

    def __repr__(self) -> str:
        layer = self.layer
        return f"Head(layer {layer.index}, head {self.index}: width {layer.d_model}, head_dim {layer.head_dim})"

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
    def w_q(self) -> np.ndarray:
        """W_Q, (d, r), the norm before it folded; before any rotation."""
        return self._q[0]

    @property
    def w_k(self) -> np.ndarray:
        """W_K, (d, r), the norm before it folded; before any rotation."""
        return self._k[0]

    @property
    def w_v(self) -> np.ndarray:
        """W_V, (d, r_v), the norm before it folded."""
        return self._v[0]

    @property
    def w_o(self) -> np.ndarray:
        """W_O, (r_v, d)."""
        return np.asarray(self.layer.w_o[self.index])

    @property
    def b_q(self) -> np.ndarray:
        """b_Q, (r,), what the norm adds included."""
        return self._q[1]

    @property
    def b_k(self) -> np.ndarray:
        """b_K, (r,), what the norm adds included."""
        return self._k[1]

    @property
    def b_v(self) -> np.ndarray:
        """b_V, (r_v,), what the norm adds included."""
        return self._v[1]

    def query_at(self, delta: Delta) -> tuple[np.ndarray, np.ndarray]:
        """W_Q R(delta) and b_Q R(delta), (d, r) and (r,): what meets W_K' at distance delta = i - j."""
        rotation = self.layer.rotation
        if rotation is None:
            return self.w_q, self.b_q
        return rotation.rotate_at(self.w_q, delta), rotation.rotate_at(self.b_q, delta)

    @property
    def qk(self) -> Factored:
        """W_QK = W_Q W_K', (d, d); under rotation the content form, at distance 0."""
        return self.qk_at(0)

    def qk_at(self, delta: Delta) -> Factored:
        """W_QK(delta) = W_Q R(delta) W_K' at distance delta = i - j; without rotation the same at every distance.

        In vision towers that rotate by row and column a number counts columns; a (rows, columns) pair is taken too,
        and where positions have several axes, a distance on each.
        """
        return Factored(self.query_at(delta)[0], self.w_k)

    def forms(self, deltas: Sequence[int] = (0, 1), window: int = 64) -> dict[str, Factored]:
        """The forms of W_QK beside W_QK itself, by the names of `Layer.qk_forms`.

        Examples
        --------
        >>> import weightscope as ws
        >>> head = ws.open_model("embedded").layers[0].heads[6]     # learned positions: nothing rotates
        >>> {name: form.rank_bound for name, form in head.forms().items()}
        {'delta1': 32, 'mean64': 32, 'free': 32, 'turning': 0}
        """
        w = self.qk
        forms = self.layer.qk_forms(deltas, window).items()
        used = {name: between.any(axis=0) for name, between in forms}
        return {name: Factored(w.left @ between[:, used[name]], w.right[:, used[name]]) for name, between in forms}

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
    def vo_bias(self) -> np.ndarray:
        """b_V W_O, (d,)."""
        return self.b_v @ self.w_o

    def plot_spectrum(self) -> Any:
        """A Matplotlib figure of the singular values of W_QK and W_VO, in the caller's style."""
        from weightscope.attention.figures import spectrum_figure

        maps = {"$W_{QK}$": self.qk, "$W_{VO}$": self.vo}
        return spectrum_figure(maps, f"layer {self.layer.index} head {self.index}")

    @property
    def lead(self) -> str:
        """What it is, and what its matrices leave out, in a few sentences."""
        shared = "" if self.layer.n_kv_heads == self.layer.n_heads else f", with key-value head {self.kv_head}"
        left_out = [f"Not in these numbers: {caveat}." for caveat in self.caveats]
        return " ".join([f"{repr(self).removesuffix(')')}{shared}).", *left_out])

    def _repr_png_(self) -> bytes:
        return bytes(self.plot_spectrum()._repr_png_())

    def _repr_html_(self) -> str:
        return notebook(self.lead, spectra({"W_QK": self.qk, "W_VO": self.vo}), picture=self._repr_png_())
