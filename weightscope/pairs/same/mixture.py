"""Run the router and experts of mixtures on random inputs, to see if both compute the same.

Experts may be in another order, if the rows of the router are in the same one, and so may the
neurons of each. Which activation they have is not known here: they go through `asymmetric`, which
no other change leaves as it is. So this never proves too much, and too little where a scale or sign
was moved within an expert; `gated` tells these.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from weightscope.core.errors import CheckpointError
from weightscope.heads.circuits.stream import ACTIVATIONS
from weightscope.model.model import Model, TensorsOnly
from weightscope.pairs.deeds.orders import places_of

MIXTURE = ("router", "expert.", "shared_expert.")  # prefixes of its tensors' roles
OF_ROUTER = ("router.bias", "router.correction")
NORM = "norm.mlp"  # the norm of its input


class Mixture:
    """The mixture of one layer on these inputs, as they leave the norm's division: x (n, d)."""

    def __init__(self, model: Model, index: int, x: np.ndarray, join: "Join") -> None:
        self._tensors, self._stem, self._join = model.tensors, f"layer {index} ", join
        here = (
            tensor
            for tensor in model.tensors
            if tensor.layer == index and tensor.stack == model.tensors.own
        )
        self._roles = frozenset(tensor.role for tensor in here)
        gain, bias = (self._vector(role) for role in (NORM, f"{NORM}.bias"))
        self._x = x * (1 if gain is None else gain) + (0 if bias is None else bias)

    @cached_property
    def logits(self) -> np.ndarray:
        """The router's logits, and its correction as a last column: (experts, n or n + 1)."""
        of_router = sorted(role for role in self._roles if role.startswith("router."))
        unknown = [role for role in of_router if role not in OF_ROUTER]
        if unknown:
            problem = f"has a {unknown[0]}, which is not run here"
            raise CheckpointError(problem, file=self._tensors.checkpoint.name)
        rows = self._mapped("router", "router", self._x).T
        correction = self._vector("router.correction")
        return rows if correction is None else np.column_stack([rows, correction])

    def expert(self, index: int) -> np.ndarray:
        """The output of an expert: (n, d)."""
        return self._network(f"expert {index} ", "expert.")

    def shared(self) -> np.ndarray:
        """Output of the shared expert, times its own router's logit: (n, d), zeros without one."""
        router = "shared_expert.router"
        if not any(role.startswith("shared_expert.") for role in self._roles):
            return np.zeros_like(self._x)
        share = self._mapped(router, router, self._x) if router in self._roles else 1
        return self._network("shared_expert.", "shared_expert.") * share

    def _network(self, stem: str, roles: str) -> np.ndarray:
        parts = {
            part
            for role in self._roles
            if role.startswith(roles)
            for part in role.removeprefix(roles).split(".")[0].split("+")
        }
        enter = [
            self._mapped(stem + part, roles + part, self._x)
            for part in ("gate", "up")
            if part in parts
        ]
        return self._mapped(f"{stem}down", f"{roles}down", self._join(enter[0], enter[-1]))

    def _mapped(self, label: str, role: str, x: np.ndarray) -> np.ndarray:
        """x W' + b of the tensor of this label; a bias where the file has one for its role."""
        y = x @ self._tensors[self._stem + label].array().T
        module, _, part = role.rpartition(".")
        biases = (
            each.removesuffix(".bias").rpartition(".")
            for each in self._roles
            if each.endswith(".bias")
        )
        is_biased = any(module == stem and part in parts.split("+") for stem, _, parts in biases)
        return y + self._tensors[f"{self._stem}{label}.bias"].array() if is_biased else y

    def _vector(self, role: str) -> np.ndarray | None:
        return self._tensors[self._stem + role].array() if role in self._roles else None


# A function of neurons' gates and inputs, (n, neurons) each.
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]
_silu, _open = ACTIVATIONS["silu"], ACTIVATIONS["leaky_relu"]


def asymmetric(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Something that only the order of neurons leaves as it is, and that no input closes."""
    return np.asarray(_open(gate + np.float32(0.5)) * (_open(up) + np.float32(0.3)))


def gated(model: Model) -> Join:
    """The gated activation of config.json; inputs may be scaled, where outputs are scaled back."""
    names = (
        model.config.get(key) for key in ("hidden_act", "hidden_activation", "activation_function")
    )
    act = ACTIVATIONS.get(str(next(filter(None, names), "silu")), _silu)
    return lambda gate, up: act(gate) * up


def order_of_experts(
    a: Model, before: Mixture, after: Mixture, tolerance: float
) -> np.ndarray | None:
    """The expert of A that each expert of B is, by the router; None without a possible order."""
    order = places_of(before.logits, after.logits, 1, tolerance)
    return order if order is not None and is_free(a, order) else None


def is_free(a: Model | TensorsOnly, order: np.ndarray) -> bool:
    """True if experts may be in this order: groups stay whole, no unnamed tensor counts them."""
    if (order == np.arange(len(order))).all():
        return True
    count = a.checkpoint.config.get("n_group")
    groups = count if isinstance(count, int) and count > 0 and len(order) % count == 0 else 1
    size = len(order) // groups
    if np.ptp(order.reshape(groups, size) // size, axis=1).any():
        return False
    return not any(tensor.shape[:1] == (len(order),) for tensor in a.tensors if not tensor.has_role)
