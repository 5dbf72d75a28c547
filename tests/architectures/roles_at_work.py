"""The roles of modules around attention, by what flows through them in transformers' own model, whatever their names.

A matrix is `down` if act(gate x) * (up x) or act(up x) entered it, and `gate` if it is what the activation took. A norm
is `norm.mlp` if what it gave entered `up` and what it took is the stream that the network's output joins; and so on.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from weightscope.adopting import hooks
from weightscope.adopting.hooks import Event

NEAR = 6  # linear modules before `down` among which gate and up are looked for
SAMPLE = 300  # numbers of a tensor that are compared
AFTER = 80  # calls after the network among which the stream that its output joins is looked for
SAME, NOTHING, SOME = 1e-5, 1e-2, 5e-2  # of relative errors, of coefficients that are none, and of those that count
ACTIVATIONS = (
    torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.relu, torch.nn.functional.leaky_relu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"), lambda x: torch.nn.functional.relu(x) ** 2,
    lambda x: x * torch.sigmoid(1.702 * x), torch.sigmoid, torch.tanh, torch.nn.functional.mish,
)  # fmt: skip
HALVES = {
    "gate+up": lambda h: h.chunk(2, -1), "up+gate": lambda h: h.chunk(2, -1)[::-1],
    "gate+up as alternating": lambda h: (h[..., ::2], h[..., 1::2]),
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A feed-forward network that was seen at work."""

    modules: dict[str, str]  # role by module
    entered: torch.Tensor
    start: Event
    down: Event


def logs(model: Any, size: Any, seed: int, start: int) -> tuple[list[list[Event]], list[str]]:
    """Every call of every module in each run of `observe`, and the modules that were seen to attend."""
    runs: list[list[Event]] = []
    watch = hooks.watch

    def kept(*given: Any) -> Any:
        log = watch(*given)
        runs.append(sorted(log.events, key=lambda event: event.start))
        return log

    with patch.object(hooks, "watch", kept):
        observed, _ = hooks.observe(model, size, seed, start)
    return runs, sorted({call.module for call in observed})


def mark(tensor: torch.Tensor) -> tuple[int, int]:
    """The same for equal tensors, whatever their axes."""
    return tensor.numel(), hash(tensor.float().contiguous().numpy().tobytes())


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its numbers, the same places of all tensors of a size: enough to tell equations that hold."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].double()


def proportional(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one tensor is a multiple of another."""
    if a.numel() != b.numel():
        return False
    a, b = sample(a), sample(b)
    over, largest = float(a @ a), float(b.abs().max())
    return over > 0 and largest > 0 and float((a * (a @ b / over) - b).abs().max() / largest) < SAME


def is_norm(event: Event) -> bool:
    """Whether a call is a norm's."""
    kind = type(event.module).__name__.lower()
    return "norm" in kind and "batchnorm" not in kind and bool(event.inputs and event.outputs) and (
        event.inputs[0].numel() == event.outputs[0].numel()
    ) and not any(True for child in event.module.children() if any(True for _ in child.parameters()))  # fmt: skip


def is_linear(event: Event) -> bool:
    """Whether a call is of one matrix."""
    weight = vars(event.module).get("_parameters", {}).get("weight")
    kind = type(event.module)
    if weight is None or weight.ndim < 2 or issubclass(kind, torch.nn.Embedding) or not event.inputs:
        return False
    convolves = weight.ndim > 2 and any(size != 1 for size in weight.shape[2:])
    return bool(event.outputs) and not convolves and not list(event.module.children())


def networks(events: Sequence[Event]) -> Iterator[Network]:
    """Every feed-forward network of a run."""
    linear = [event for event in events if is_linear(event)]
    norms = {mark(event.outputs[0]): event for event in events if is_norm(event)}
    for i, down in enumerate(linear):
        z, inner = down.inputs[0], norms.get(mark(down.inputs[0]))
        before = [event for event in linear[max(0, i - NEAR) : i] if event.end < down.start]
        for entered in filter(None, ([z], inner and [inner.inputs[0]])):
            modules = _into(entered[0], before, events)
            if modules:
                roles = {event.name: role for event, role in modules.items()} | {down.name: "down"}
                if inner is not None and entered[0] is not z:
                    roles[inner.name] = "norm.mlp_inner"
                first = min(modules, key=lambda event: event.start)
                yield Network(roles, first.inputs[0], first, down)
                break


def _into(z: torch.Tensor, before: Sequence[Event], events: Sequence[Event]) -> dict[Event, str] | None:
    """Which of the matrices before made z, and how: by an activation, times another or not."""
    for g in reversed(before):
        h = g.outputs[0]
        if h.numel() == z.numel():
            for a in _activated(g, h, events):
                if proportional(a, z):
                    return {_Key(g): "up"}
                for u in before:
                    beside = u is not g and u.outputs[0].numel() == z.numel() and mark(u.inputs[0]) == mark(g.inputs[0])
                    if beside and proportional(a.reshape(-1) * u.outputs[0].reshape(-1), z):
                        return {_Key(g): "gate", _Key(u): "up"}
        elif h.numel() == 2 * z.numel():
            for role, split in HALVES.items():
                gate, up = split(h)
                for a in _activated(g, gate, events):
                    if proportional(a.reshape(-1) * up.reshape(-1), z):
                        return {_Key(g): role}
    return None


class _Key:
    """An event as a key."""

    def __init__(self, event: Event) -> None:
        self.name, self.start, self.inputs, self.end = event.name, event.start, event.inputs, event.end


def _activated(g: Event, h: torch.Tensor, events: Sequence[Event]) -> Iterator[torch.Tensor]:
    """What activations may have made of h: by a module that was called after, or by a function."""
    for event in (event for event in events if g.end < event.start < g.end + 40 and event.inputs and event.outputs):
        took, gave = event.inputs[0], event.outputs[0]
        if took.numel() != h.numel() or gave.numel() != h.numel() or is_linear(event) or is_norm(event):
            continue
        if proportional(took, h) and not proportional(took, gave):
            yield gave
    for function in ACTIVATIONS:
        yield function(h.float())


def fitted(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[float] | None:
    """The coefficients with which parts add up to a tensor; None where they do not."""
    columns = torch.stack([sample(part) for part in parts], 1)
    goal = sample(target)[:, None]
    found = torch.linalg.lstsq(columns, goal, driver="gelsd").solution
    return found[:, 0].tolist() if float((columns @ found - goal).abs().max() / goal.abs().max()) < 1e-4 else None


def inside(outer: Event, event: Event) -> bool:
    return outer.start < event.start and event.end < outer.end


def roles(events: Sequence[Event], outs: Sequence[str], ins: Sequence[str]) -> dict[str, str]:
    """The role of every module that one run shows; `outs` and `ins` are the modules of W_O and W_Q."""
    found: dict[str, str] = {}
    seen = [*networks(events)]
    norms = [event for event in events if is_norm(event)]
    attention = [event for event in events if event.name in set(outs)]
    into_attention = {mark(event.inputs[0]) for event in events if event.name in set(ins) and event.inputs}
    through_attention = {mark(out) for event in attention for out in _upwards(event, events, [n.down for n in seen])}
    for network in seen:
        if network.down.name in set(outs):
            continue
        found |= network.modules
    seen = [network for network in seen if network.down.name not in set(outs)]
    into = defaultdict(list)
    for network in seen:
        into[mark(network.entered)].append(network)
    through = {mark(out): network for network in seen for out in _upwards(network.down, events, attention)}
    for norm in norms:
        took, gave = norm.inputs[0], norm.outputs[0]
        if mark(took) in through_attention:
            found.setdefault(norm.name, "norm.attention_output")
        elif mark(took) in through and norm.start > through[mark(took)].down.end:
            found.setdefault(norm.name, "norm.mlp_output")
        elif mark(gave) in into and mark(gave) not in into_attention:
            for network in into[mark(gave)]:
                if norm.end < network.start.start and (role := _of_stream(norm, network, events, norms)):
                    found.setdefault(norm.name, role)
        else:
            for network in seen:
                near = took.numel() == network.entered.numel() == network.down.outputs[0].numel()
                if near and network.down.end < norm.start < network.down.end + AFTER:
                    parts = fitted(took, [network.entered, network.down.outputs[0]])
                    if parts and min(map(abs, parts)) > SOME:
                        found.setdefault(norm.name, "norm.after")
    return found


def _upwards(event: Event, events: Sequence[Event], unless: Sequence[Event]) -> Iterator[torch.Tensor]:
    """What a module gave, and the same where the modules around it hand it on."""
    made = event.outputs[0]
    yield made
    for outer in reversed(events):
        if inside(outer, event) and outer.outputs and not any(inside(outer, each) for each in unless):
            if not proportional(made, outer.outputs[0]):
                return
            yield outer.outputs[0]


def _of_stream(norm: Event, network: Network, events: Sequence[Event], norms: Sequence[Event]) -> str:
    """The role of a norm before a network, by which of its input and output goes on beside the network."""
    took, gave, made = norm.inputs[0], norm.outputs[0], network.down.outputs[0]
    if took.numel() != made.numel():
        return ""
    normed = [n.outputs[0] for n in norms if n.start > network.down.end and proportional(n.inputs[0], made)]
    given = [made, *normed[:1]]
    later = [event for event in events if network.down.end < event.end < network.down.end + AFTER]
    for event in later:
        for target in (*event.inputs[:1], *event.outputs[:1]):
            if target.numel() != took.numel() or target.abs().max() == 0:
                continue
            for out in given:
                parts = fitted(target, [took, gave, out])
                if parts and abs(parts[2]) > 1e-3:
                    if abs(parts[0]) > SOME and abs(parts[1]) < NOTHING:
                        return "norm.mlp"
                    if abs(parts[1]) > SOME and abs(parts[0]) < NOTHING:
                        return "norm.after_attention"
    return ""
