"""A model's need of its sinks, of their value or their attention: each is changed in a run.

Head by head, at every query i but the sink s itself, where A is the head's attention and u_j what
key j writes:

zero        A_is u_s is taken away: the sink writes nothing
mean        u_s becomes its mean over other texts: the sink writes a constant
ordinary    u_s becomes the update of a token drawn from another text: an ordinary one's
redirected  A_is goes to the other keys, in proportion to what they get: there is no sink

A no-op needs its attention and no value: the first two cost nothing, the last two something. A
broadcast needs its value: all cost something, but the mean if the value is a constant.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError, counted
from weightscope.core.tables import Column, Table
from weightscope.heads.sinks.bias import change_interval, perplexity
from weightscope.heads.sinks.mechanisms import (
    MECHANISM_NAMES,
    SinkInputs,
    SinkMechanisms,
    sink_mechanisms,
)
from weightscope.heads.sinks.strength import sink_strength
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.sinks import MECHANISMS
from weightscope.model.text.sequences import Texts, token_windows
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations, Intervention, Observer, Runner, losses_under


class Replacements(NamedTuple):
    """Updates from T other texts to put in the place of a head's sink update."""

    mean: np.ndarray  # (d,) mean of the sink's update
    ordinary: np.ndarray  # (T, d) the update of another token of each text


class Sink(NamedTuple):
    """The strongest key of one head on one text of n tokens."""

    position: int
    attention: np.ndarray  # (n, n) the head's
    updates: np.ndarray  # (n, d) u_j of every key

    @property
    def to_sink(self) -> np.ndarray:
        """Attention that the other tokens give it, (n, 1): 0 for itself."""
        column = self.attention[:, self.position, None].copy()
        column[self.position] = 0
        return column


# A sink, its replacements, and a number that differs from text to text -> an addition to the
# output, (n, d).
Change = Callable[[Sink, Replacements, int], np.ndarray]


def _redirection(sink: Sink) -> np.ndarray:
    """Move attention from the sink to other keys; queries that see no other keep theirs."""
    rest = sink.attention.copy()
    rest[:, sink.position] = 0
    total = rest.sum(axis=1, keepdims=True)  # (n, 1)
    moved = sink.to_sink * (total > 0)
    written = (rest @ sink.updates) / np.where(total > 0, total, 1)
    return np.asarray(moved * (written - sink.updates[sink.position]))


def _replacing(sink: Sink, update: np.ndarray) -> np.ndarray:
    return np.asarray(sink.to_sink * (update - sink.updates[sink.position]))


CHANGES: dict[str, tuple[Change, str]] = {
    "zero": (
        lambda sink, _, text: _replacing(sink, np.zeros_like(sink.updates[0])),
        "the sink writes nothing",
    ),
    "mean": (
        lambda sink, given, text: _replacing(sink, given.mean),
        "the sink writes its mean over other texts",
    ),
    "ordinary": (
        lambda sink, given, text: _replacing(sink, given.ordinary[text % len(given.ordinary)]),
        "the sink writes what a token of another text does",
    ),
    "redirected": (
        lambda sink, _, text: _redirection(sink),
        "the sink's attention goes to the other keys",
    ),
}
Heads = Sequence[tuple[int, int]]  # layer and head


def sinks_of(
    layer: Layer, heads: Sequence[int], x: np.ndarray, attention: np.ndarray
) -> Iterator[Sink]:
    """The sinks of some heads on one text: x (n, d), attention (H, n, n)."""
    v = layer.inner_values(x)  # (G, n, r_v)
    for head in map(layer.head, heads):
        of_head = attention[head.index]
        yield Sink(int(sink_strength(of_head).argmax()), of_head, v[head.kv_head] @ head.w_o)


def replacements(
    runner: Runner, heads: Heads, texts: Sequence[np.ndarray], seed: int = 0
) -> dict[tuple[int, int], Replacements]:
    """Means and ordinary updates of heads, from unchanged texts (n,) of two tokens or more."""
    rng = np.random.default_rng(seed)
    of_sinks, ordinary = defaultdict(list), defaultdict(list)
    by_layer = _by_layer(heads)

    def observer(seen: Activations) -> None:
        chosen = by_layer[seen.layer.index]
        if np.triu(seen.attention, 1).any():
            problem = "attention is not causal; perplexity needs a causal language model"
            raise CheckpointError(f"layer {seen.layer.index}: {problem}", file=runner.model.name)
        for x, attention in seen.each():
            for head, sink in zip(chosen, sinks_of(seen.layer, chosen, x, attention), strict=True):
                of_sinks[seen.layer.index, head].append(sink.updates[sink.position])
                keys = np.delete(np.arange(len(x)), sink.position)
                ordinary[seen.layer.index, head].append(sink.updates[rng.choice(keys)])

    runner.observe(texts, observer, layers=sorted(by_layer))
    return {
        head: Replacements(np.mean(of_sinks[head], axis=0), np.stack(ordinary[head]))
        for head in heads
    }


def changing(
    change: Change, heads: Heads, given: Mapping[tuple[int, int], Replacements]
) -> Observer:
    """An observer that changes what these heads write, at the sinks that the running model has."""
    by_layer = _by_layer(heads)

    def observer(seen: Activations) -> np.ndarray:
        new, chosen, index = seen.output.copy(), by_layer[seen.layer.index], seen.layer.index
        assert seen.tokens is not None  # only texts have losses
        for output, tokens, (x, attention) in zip(new, seen.tokens, seen.each(), strict=True):
            for head, sink in zip(chosen, sinks_of(seen.layer, chosen, x, attention), strict=True):
                output += change(sink, given[index, head], int(tokens.sum()))
        return new

    return observer


def _by_layer(heads: Heads) -> dict[int, list[int]]:
    by_layer = defaultdict(list)
    for layer, head in heads:
        by_layer[layer].append(head)
    return by_layer


class Group(NamedTuple):
    """Heads that are changed together."""

    name: str
    mechanism: str  # common to all of them; empty where they differ
    heads: Heads


def groups(sinks: SinkMechanisms) -> list[Group]:
    """Every sink head, each mechanism's together, all together, and as many weak heads.

    The weak ones are heads of the same layers whose strongest keys get the least attention.
    """
    table = sinks.heads
    layer, head, mechanism = table["layer"], table["head"], table["mechanism"]

    def chosen(rows: np.ndarray) -> Heads:
        return list(zip(layer[rows].tolist(), head[rows].tolist(), strict=True))

    sinking = np.flatnonzero(mechanism != "")
    all_groups = []
    for row in sinking:
        name = f"{layer[row]}.{head[row]}"
        all_groups.append(Group(name, str(mechanism[row]), chosen(np.array([row]))))
    for name in MECHANISMS:
        rows = np.flatnonzero(mechanism == name)
        all_groups.append(Group(f"every {MECHANISM_NAMES[name]}", name, chosen(rows)))
    all_groups.append(Group("every sink head", "", chosen(sinking)))
    weakest = [np.zeros(0, int)]
    for index in dict.fromkeys(layer[sinking].tolist()):
        rest = np.flatnonzero((layer == index) & (mechanism == ""))
        by_strength = rest[np.argsort(table["strength"][rest], kind="stable")]
        weakest.append(by_strength[: (layer[sinking] == index).sum()])
    weak_heads = chosen(np.concatenate(weakest))
    all_groups.append(Group("weakest heads beside them", "", weak_heads))
    return [group for group in all_groups if group.heads]


def sinks_and_changes(
    runner: Runner,
    inputs: SinkInputs,
    texts: Texts,
    *,
    n: int,
    length: int,
    seed: int = 0,
    own_first: bool = False,
) -> SinkMechanisms:
    """Run `sink_mechanisms`, and add the table `causal` if there are sink heads.

    It has the perplexity of n texts under every change of every sink head. Means and ordinary
    updates come from every other document, perplexity from those between: they share none.
    """
    for index, layer in runner.layers.items():
        if layer.modulated:
            problem = (
                f"layer {index} has a gate, a norm or the like behind its values, so that "
                "updates do not add up"
            )
            raise CheckpointError(problem, file=runner.model.name)
    framing = framing_of(runner.model, own_first=own_first)
    length = min(length, runner.model.config.n_positions or length)
    sources = token_windows(framing, texts.texts[::2], n, length, seed)
    tried = token_windows(framing, texts.texts[1::2], n, length, seed)
    if not sources or not tried:
        problem = (
            f"windows of {length} tokens in every other document, and in those between, are needed"
        )
        raise CheckpointError(f"too little text: {problem}")
    sinks = sink_mechanisms(runner, inputs)
    changed = groups(sinks)
    if not changed:
        return sinks
    heads = sorted({head for group in changed for head in group.heads})
    given = replacements(runner, heads, sources, seed)
    interventions = []
    for group in changed:
        layers = list(_by_layer(group.heads))
        for change, _ in CHANGES.values():
            interventions.append(Intervention(layers, changing(change, group.heads, given)))
    losses = losses_under(runner, tried, interventions)  # (1 + groups x changes, T)
    tokens = np.array([len(text) - 1 for text in tried])
    note = (
        f"Changed on {counted(len(tried), 'text')} of {length} tokens; means and ordinary updates "
        f"are of {len(sources)} others, from {texts.source}."
    )
    return replace(sinks, causal=causal_table(changed, losses, tokens, note))


def causal_table(
    changed: Sequence[Group], losses: np.ndarray, tokens: np.ndarray, caption: str
) -> Table:
    """One row per group: losses (1 + groups x changes, T) in nats, the unchanged model's first."""
    plain, by_group = losses[0], losses[1:].reshape(len(changed), len(CHANGES), -1)
    before = float(perplexity(plain, tokens))
    names, mechanisms, heads = zip(*changed, strict=True)
    columns = [
        Column("heads", names),
        Column("mechanism", mechanisms),
        Column("number", list(map(len, heads)), "number of heads"),
        Column("perplexity", [before] * len(changed), meaning="of the model as it is"),
    ]
    for place, (name, (_, meaning)) in enumerate(CHANGES.items()):
        under = by_group[:, place]  # (groups, T)
        intervals = np.array([change_interval(of_group, plain, tokens) for of_group in under])
        change = perplexity(under, tokens) - before
        columns.append(Column(name, change, meaning=f"change in perplexity where {meaning}"))
        for side, end in enumerate(("low", "high")):
            values, interval = intervals[:, side], f"{end} end of its 95 % interval over texts"
            columns.append(Column(f"{name}_{end}", values, f"{name}, {end}", meaning=interval))
    return Table(columns, caption)
