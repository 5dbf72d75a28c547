"""The roles of modules around attention, by what flows through them in transformers' own model, whatever their names.

A matrix is `down` if act(gate x) * (up x) or act(up x) entered it, and `gate` if it is what the activation took. A norm
is `norm.mlp` if `up` takes its output, and its input is the stream that the network's output joins; and so on.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
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
                    alike = u is not g and u.outputs[0].numel() == z.numel() and mark(u.inputs[0]) == mark(g.inputs[0])
                    if alike and proportional(a.reshape(-1) * u.outputs[0].reshape(-1), z):
                        return {_Key(g): "gate", _Key(u): "up"}
        elif h.numel() == 2 * z.numel():
            for role, split in HALVES.items():
                gate, up = split(h)
                for a in _activated(g, gate, events) if gate.shape == up.shape else ():
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
        holds = sum(p.numel() for p in event.module.parameters()) > 4
        if took.numel() != h.numel() or gave.numel() != h.numel() or holds or is_norm(event):
            continue
        if proportional(took, h) and not proportional(took, gave):
            yield gave
    for function in ACTIVATIONS:
        yield function(h.float())


def fitted(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[float] | None:
    """The coefficients with which parts add up to a tensor; None where they do not."""
    columns = torch.stack([sample(part) for part in parts], 1)
    goal = sample(target)[:, None]
    weights = torch.linalg.lstsq(columns, goal, driver="gelsd").solution
    return weights[:, 0].tolist() if float((columns @ weights - goal).abs().max() / goal.abs().max()) < 1e-4 else None


def inside(outer: Event, event: Event) -> bool:
    """Whether a call was made within another."""
    return outer.start < event.start and event.end < outer.end


def roles(events: Sequence[Event], attention: Mapping[str, str]) -> dict[str, str]:
    """The role of every module and parameter that one run shows; empty of what was called and does none of these.

    `attention` has the role of each module of attention, as the rows name it.
    """
    outs = [event for event in events if "o" in attention.get(event.name, "").split("+")]
    into_attention = {mark(event.inputs[0]) for event in events if event.name in attention and event.inputs}
    seen = [network for network in networks(events) if not network.modules.keys() & attention.keys()]
    seen = [network for network in seen if network.down.outputs[0].shape[-1] == network.entered.shape[-1]]
    blocks = [*mixtures(events)]
    norms = [event for event in events if is_norm(event)]
    made = [network.down for network in seen] + [block.event for block in blocks]
    through_attention = {mark(out) for event in outs for out in _upwards(event, events, made)}
    through = {mark(out): event for event in made for out in _upwards(event, events, outs)}
    for block in blocks:  # with what shared experts add
        for outer in (
            event for event in reversed(events) if inside(event, block.event) and event.inputs and event.outputs
        ):
            keeps_width = outer.outputs[0].numel() == outer.inputs[0].numel() == block.event.inputs[0].numel()
            if keeps_width and not any(inside(outer, event) for event in outs):
                through[mark(outer.outputs[0])] = block.event
                break
    entered = [(network.entered, network.start, network.down) for network in seen]
    entered += [(block.event.inputs[0], block.event, block.event) for block in blocks]
    by_name = {event.name: "" for event in events if is_linear(event) or is_norm(event)}
    for norm in norms:
        took, gave, role = norm.inputs[0], norm.outputs[0], ""
        before = [place for place in entered if norm.end < place[1].start and place[0].numel() == gave.numel()]
        feeds = [place for place in before if mark(place[0]) == mark(gave)][:1]
        if mark(took) in through_attention and _joins(gave, norm, events):
            role = "norm.attention_output"
        elif mark(took) in through and norm.start > through[mark(took)].end and _joins(gave, norm, events):
            role = "norm.mlp_output"
        elif feeds and mark(gave) not in into_attention:
            role = _of_stream(norm, feeds[0][2], events, norms)
        elif any(_after(took, out, events, attention) for out in outs if out.end < norm.start < out.end + AFTER):
            role = "norm.after_attention"
        elif not re.search(r"\.\d+(\.|$)", norm.name) and _of_last_layer(took, events):
            role = "norm.outputs"
        else:
            for x, _, down in entered:
                near = took.numel() == x.numel() == down.outputs[0].numel() and down.end < norm.start < down.end + AFTER
                parts = fitted(took, [x, down.outputs[0]]) if near else None
                if parts and min(map(abs, parts)) > SOME:
                    role = "norm.after"
        counted = _counted(norm) if role else None
        by_name[norm.name] = "" if counted is None else role + counted
    for network in seen:
        prefix = _prefix(network, seen, blocks, outs)
        if prefix is not None and (prefix or _joins(network.down.outputs[0], network.down, events, norms)):
            for name, role in network.modules.items():
                event = next(event for event in events if event.name == name)
                by_name[name] = role if role.startswith("norm.") else prefix + role + _stored(event, role)
    for name, role in {name: role for name, role in by_name.items() if role.partition(" ")[0] == "norm.mlp"}.items():
        fed = next((n for n in seen if mark(n.entered) == mark(_last(events, name).outputs[0])), None)
        if fed is not None and _prefix(fed, seen, blocks, outs) == "first.":
            by_name[name] = role.replace("norm.mlp", "norm.first")
    for block in blocks:
        by_name |= block.roles
    for event in events:
        if is_linear(event) and not by_name[event.name] and not re.search(r"\.\d+(\.|$)", event.name):
            tanh = torch.tanh(event.outputs[0])
            after = [out for each in events for out in each.outputs[:1] if each.end > event.end]
            if any(out.numel() == tanh.numel() and torch.equal(sample(out), sample(tanh)) for out in after):
                by_name[event.name] = "pooler" if _of_last_layer(event.inputs[0], events) else ""
    starts = {mark(event.inputs[0]) for event in events if re.search(r"\.0$", event.name) and event.inputs}
    for norm in norms:
        if not by_name[norm.name] and not re.search(r"\.\d+(\.|$)", norm.name) and mark(norm.outputs[0]) in starts:
            counted = _counted(norm)
            by_name[norm.name] = "" if counted is None else f"norm.inputs{counted}"
    by_name |= images(events)
    for name in attention:
        by_name.pop(name, None)
    return by_name


def images(events: Sequence[Event]) -> dict[str, str]:
    """What makes patches of an image, the table that is added to them, and the token that is put before them."""
    call = events[0]
    given = [x for x in call.inputs if x.is_floating_point() and x.numel() > SAMPLE]
    tables = {
        name: p.detach().float() for name, p in call.module.named_parameters() if p.requires_grad and 0 < p.ndim < 4
    }
    path = f"{call.name}." if call.name else ""
    by_name: dict[str, str] = {}
    for event in events:
        weight = vars(event.module).get("_parameters", {}).get("weight")
        if weight is None or weight.ndim < 2 or not event.inputs or not event.outputs:
            continue
        sums = float(event.inputs[0].double().square().sum())
        if not any(
            x.numel() == event.inputs[0].numel() and abs(float(x.double().square().sum()) - sums) < 1e-6 * sums
            for x in given
        ):
            continue
        made = event.outputs[0].float()
        rows = made.flatten(2).transpose(1, 2)[0] if made.ndim > 3 else made.reshape(-1, made.shape[-1])
        n, d = rows.shape
        if n < 2:
            continue
        later = [x for each in events if each.end > event.end for x in (*each.inputs[:1], *each.outputs[:1])][:60]
        for x in (x for x in later if x.is_floating_point() and x.ndim in (2, 3) and x.shape[-1] == d):
            x = x.float().reshape(-1, *x.shape[-2:])[0]
            if len(x) < n:
                continue
            added = x[len(x) - n :] - rows
            if float(added.abs().max()) < 1e-5:
                by_name[event.name] = "patches"
            for name, table in tables.items():
                if table.shape[-1] != d or table.numel() < n * d:
                    continue
                table = table.reshape(-1, d)
                if len(table) - n in (0, len(x) - n) and float((table[len(table) - n :] - added).abs().max()) < 1e-4:
                    by_name |= {event.name: "patches", path + name: "positions"}
                    first = x[0] - (table[0] if len(table) == len(x) else 0)
                    for token, values in tables.items():
                        same = (
                            len(x) > n
                            and values.numel() == d
                            and float((values.reshape(-1) - first).abs().max()) < 1e-4
                        )
                        by_name |= {path + token: "class"} if same else {}
    return by_name


def _upwards(event: Event, events: Sequence[Event], unless: Sequence[Event]) -> Iterator[torch.Tensor]:
    """What a module gave, and the same where the modules around it hand it on."""
    made = event.outputs[0]
    yield made
    for outer in reversed(events):
        if inside(outer, event) and outer.outputs and not any(inside(outer, each) for each in unless):
            if not proportional(made, outer.outputs[0]):
                return
            yield outer.outputs[0]


def _after(took: torch.Tensor, out: Event, events: Sequence[Event], attention: Mapping[str, str]) -> bool:
    """Whether a norm took the sum of attention's input and output, so that no norm came before attention."""
    made = out.outputs[0]
    if took.numel() != made.numel():
        return False
    asks = [event for event in events if event.start < out.start and "q" in attention.get(event.name, "").split("+")]
    read = [event.inputs[0] for event in asks[-1:] if event.inputs and event.inputs[0].numel() == took.numel()]
    parts = fitted(took, [read[0], made]) if read else None
    return bool(parts and min(map(abs, parts)) > SOME)


def _last(events: Sequence[Event], name: str) -> Event:
    return next(event for event in reversed(events) if event.name == name)


def _prefix(
    network: Network, seen: Sequence[Network], blocks: Sequence["Mixture"], outs: Sequence[Event]
) -> str | None:  # fmt: skip
    """What is before the roles of a network: nothing of a layer's only one; None of one within another's output."""
    if any(mark(network.entered) == mark(block.event.inputs[0]) for block in blocks):
        return "shared_expert."
    layer = network.down.name.rpartition(".")[0]
    while layer and not re.search(r"\.\d+$", layer):
        layer = layer.rpartition(".")[0]
    siblings = [each for each in seen if each is not network and each.down.name.startswith(layer + ".")]
    if any(mark(each.down.outputs[0]) == mark(network.entered) for each in siblings):
        return None
    attends = [event for event in outs if event.name.startswith(layer + ".")]
    if not attends or not siblings or not layer:
        return ""
    later = any(each.start.start > attends[-1].end for each in siblings)
    return "first." if later and network.down.end < attends[0].start else ""


def _joins(made: torch.Tensor, by: Event, events: Sequence[Event], norms: Sequence[Event] = ()) -> bool:
    """Whether what was made, or a norm of it, is added to something else that was there before."""
    normed = [norm.outputs[0] for norm in norms if norm.start > by.end and proportional(norm.inputs[0], made)]
    parts = [made, *normed[:1]]
    near = [event for event in events if by.end < event.end and event.start < by.end + AFTER]
    before = [event for event in events if by.start - AFTER < event.start < by.end]
    streams = {
        mark(x): x for event in before for x in (*event.inputs[:1], *event.outputs[:1]) if x.numel() == made.numel()
    }
    for target in (x for event in near for x in (*event.inputs[:1], *event.outputs[:1]) if x.numel() == made.numel()):
        for part in parts:
            for stream in list(streams.values())[-24:]:
                if target is not stream and not proportional(stream, part) and not proportional(target, part):
                    weights = fitted(target, [stream, part])
                    if weights and min(map(abs, weights)) > NOTHING:
                        return True
    return False


def _of_last_layer(took: torch.Tensor, events: Sequence[Event]) -> bool:
    """Whether every row is one that the last of some modules in a row gave."""
    lists: dict[str, Event] = {}
    for event in events:
        stem, _, index = event.name.rpartition(".")
        if (
            index.isdigit()
            and event.outputs
            and (stem not in lists or int(lists[stem].name.rpartition(".")[2]) <= int(index))
        ):
            lists[stem] = event
    rows = took.reshape(-1, took.shape[-1])[:SAMPLE]
    for event in lists.values():
        gave = event.outputs[0]
        if gave.shape[-1] == rows.shape[-1]:
            known = {row.tobytes() for row in gave.reshape(-1, gave.shape[-1]).float().numpy()}
            if all(row.tobytes() in known for row in rows.float().numpy()):
                return True
    return False


def _counted(norm: Event) -> str | None:
    """How a norm's gain is stored, as the cell `also` says it; None where it is neither the weight nor 1 + weight."""
    weight = vars(norm.module).get("_parameters", {}).get("weight")
    if weight is None:
        return ""
    bias = vars(norm.module).get("_parameters", {}).get("bias")
    took, gave = (x.reshape(-1, x.shape[-1]).double() for x in (norm.inputs[0], norm.outputs[0]))
    if weight.ndim != 1 or len(weight) != took.shape[-1]:
        return None
    gave = gave if bias is None else gave - bias.detach().double()
    for centred in (took, took - took.mean(-1, keepdim=True)):
        gain = gave[0] / centred[0]
        for how, stored in (("", weight.detach()), (" as counted from 0", 1 + weight.detach())):
            ratio = gain / stored.double()
            if float((ratio / ratio.median() - 1).abs().max()) < 1e-2:
                return how
    return None


def _stored(event: Event, role: str) -> str:
    """How a matrix is stored, where not as (out, in)."""
    weight, bias = (vars(event.module)["_parameters"].get(name) for name in ("weight", "bias"))
    if weight.ndim != 2 or weight.shape[1] == event.inputs[0].shape[-1] != weight.shape[0]:
        return ""
    if weight.shape[0] != event.inputs[0].shape[-1]:
        return ""
    x, y = (
        event.inputs[0].reshape(-1, weight.shape[0]),
        event.outputs[0].reshape(len(event.inputs[0].reshape(-1, weight.shape[0])), -1),
    )
    flipped = x @ weight.detach().float() + (0 if bias is None else bias.detach())
    same = flipped.shape == y.shape and torch.allclose(flipped, y, atol=1e-3)
    return (", (in, out)" if " as " in role else " as (in, out)") if same else ""


def _of_stream(norm: Event, down: Event, events: Sequence[Event], norms: Sequence[Event]) -> str:
    """The role of a norm before a network, by whether its input or its output is added to the network's output."""
    took, gave = norm.inputs[0], norm.outputs[0]
    outer = [event for event in events if inside(event, down) and norm.start < event.start and event.outputs]
    made = [x for x in (down.outputs[0], *(event.outputs[0] for event in outer)) if x.numel() == took.numel()]
    made += [n.outputs[0] for n in norms if n.start > down.end and any(proportional(n.inputs[0], x) for x in made)][:1]
    for event in (event for event in events if down.end < event.end < down.end + AFTER):
        for target in (*event.inputs[:1], *event.outputs[:1]):
            if target.numel() != took.numel() or target.abs().max() == 0:
                continue
            for out in made:
                parts = fitted(target, [took, gave, out])
                if parts and abs(parts[2]) > 1e-3:
                    if abs(parts[0]) > SOME and abs(parts[1]) < NOTHING:
                        return "norm.mlp"
                    if abs(parts[1]) > SOME and abs(parts[0]) < NOTHING:
                        return "norm.after_attention"
    return ""


@dataclass(frozen=True)
class Mixture:
    """Experts that were seen at work: the role of each of their parameters, and of those that choose."""

    event: Event
    roles: dict[str, str]


def mixtures(events: Sequence[Event]) -> Iterator[Mixture]:
    """Every mixture whose experts are one module, called with the experts chosen and their weights."""
    seen: set[str] = set()
    for event in events:
        stacked = {
            name: p for name, p in vars(event.module).get("_parameters", {}).items() if p is not None and p.ndim == 3
        }
        if (
            event.name in seen
            or len(stacked) not in (2, 3)
            or len({len(p) for p in stacked.values()}) != 1
            or not event.inputs
        ):
            continue
        seen.add(event.name)
        with suppress(Exception):  # it is called otherwise
            if by_name := _experts(event.module, stacked, event.inputs[0].shape[-1]):
                by_name = {f"{event.name}.{name}": role for name, role in by_name.items()}
                yield Mixture(event, by_name | _choosing(event, events, len(next(iter(stacked.values())))))


def _experts(module: Any, stacked: Mapping[str, Any], d: int) -> dict[str, str]:
    """The roles of experts' parameters: those with which the experts' formula gives what the module gives."""
    x = torch.randn(5, d, generator=torch.Generator().manual_seed(0))
    given = [*inspect.signature(module.forward).parameters][:3]
    if len(given) != 3:
        return {}
    acts = [
        *filter(callable, (getattr(module, name, None) for name in ("act_fn", "activation_fn", "act"))),
        *ACTIVATIONS,
    ]
    count = len(next(iter(stacked.values())))
    for order in permutations(stacked):
        for turned in (False, True):
            for split, halve in HALVES.items():
                names = (
                    {order[0]: split, order[1]: "down"}
                    if len(order) == 2
                    else dict(zip(order, ("gate", "up", "down"), strict=True))
                )
                if len(order) == 3 and split != "gate+up":
                    continue
                for act in acts:
                    if all(_gives(module, stacked, order, turned, halve, act, x, expert) for expert in (0, count - 1)):
                        how = [*(["(in, out)"] if turned else [])]
                        return {
                            name: "expert." + role.partition(" as ")[0] + _as([*role.partition(" as ")[2:], *how])
                            for name, role in names.items()
                        }
    return {}


def _as(how: Sequence[str]) -> str:
    how = [word for word in how if word]
    return f" as {', '.join(how)}" if how else ""


def _gives(
    module: Any, stacked: Mapping[str, Any], order: Sequence[str], turned: bool, halve: Any, act: Any,
    x: torch.Tensor, expert: int,
) -> bool:  # fmt: skip
    """Whether one expert gives what the formula gives with these parameters in these places."""
    maps = [stacked[name][expert].detach().float() for name in order]
    maps = maps if turned else [w.T for w in maps]
    if maps[0].shape[0] != x.shape[1] or maps[-1].shape[1] != x.shape[1]:
        return False
    gate, up = halve(x @ maps[0]) if len(maps) == 2 else (x @ maps[0], x @ maps[1])
    inner = act(gate) * up
    if inner.shape[1] != maps[-1].shape[0]:
        return False
    with torch.no_grad():
        index, weights = torch.full((len(x), 1), expert), torch.ones(len(x), 1)
        return proportional(inner @ maps[-1], module(x, index, weights))


def _choosing(experts: Event, events: Sequence[Event], count: int) -> dict[str, str]:
    """What decides which experts a token passes: what makes each be chosen, and none, as it is raised and lowered."""
    around = [event for event in events if inside(event, experts) and event.inputs]
    blocks = [event for event in reversed(around) if event.inputs[0].numel() == experts.inputs[0].numel()]
    if not blocks:
        return {}
    block, by_name = blocks[0], {}
    calls: list[Any] = []
    hook = experts.module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((*args, *kwargs.values())), with_kwargs=True
    )

    def chosen() -> tuple[torch.Tensor, torch.Tensor]:
        calls.clear()
        with torch.no_grad():
            block.module(block.inputs[0])
        index = next(x for x in calls[-1] if isinstance(x, torch.Tensor) and not x.is_floating_point())
        weights = [
            x for x in calls[-1] if isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == index.shape
        ]
        return index, weights[0]

    try:
        named = {**dict(block.module.named_parameters()), **dict(block.module.named_buffers())}
        inner = experts.name.removeprefix(block.name + ".")
        for name, tensor in named.items():
            of_experts = name.startswith(inner + ".") and tensor.ndim == 3
            if of_experts or tensor.shape[:1] != (count,) or tensor.ndim > 2:
                continue
            where = f"{block.name}.{name}"
            owner = next((e for e in events if e.name == where.rpartition(".")[0] and e.inputs), block)
            x = (owner if owner.inputs[0].shape[-1] == tensor.shape[-1] else block).inputs[0]
            x = x.reshape(-1, x.shape[-1])[0].float()
            if tensor.ndim == 2 and tensor.shape[1] != len(x):
                continue
            kept, right = tensor.detach().clone(), True
            for expert in (0, count - 1):
                for sign in (1, -1):
                    with torch.no_grad():
                        tensor[expert] += sign * (1000 if tensor.ndim == 1 else 1000 * x / (x @ x))
                    index, _ = chosen()
                    right &= bool((index[0] == expert).any()) is (sign == 1)
                    with torch.no_grad():
                        tensor.copy_(kept)
            if right and tensor.ndim == 2:
                by_name[where] = "router"
            elif right:
                both = []
                for much in (5, 6):
                    with torch.no_grad():
                        tensor[0] += much
                    both.append(chosen()[1])
                    with torch.no_grad():
                        tensor.copy_(kept)
                by_name[where] = "router.correction" if torch.equal(*both) else "router.bias"
    except Exception:  # the block takes more than its input
        return by_name
    finally:
        hook.remove()
    return by_name
