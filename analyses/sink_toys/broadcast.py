"""The broadcast task (two-sink-mechanisms paper, section 3.2, eq. 3 and appendix A.2).

Every token is to have a rotated copy of one token added, the one that lies farthest along a fixed direction:
y_i = x_i + alpha x_{j*} R with j* = argmax_j <x_j, u>. All attend to the same token, and what it says is the point.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from analyses.sink_toys.attention import Options, PreNormAttention, Registers, Trace, traces
from analyses.sink_toys.diagnosis import diagnose
from analyses.sink_toys.training import Size, direction, seeded, train
from weightscope.sinks import strength as sinks

LAYERS = 2
HELD_OUT = 256  # sequences
DEFAULT_SIZE = Size(width=16, tokens=16, batch=64, steps=1000, rate=5e-3, every=100)
PAPER_SIZE = Size(width=64, tokens=32, batch=1024, steps=30_000, rate=5e-4, every=1000)


@dataclass(frozen=True)
class Task:
    """The selector u, the rotation R, and what they make of tokens; alpha is 1."""

    selector: Tensor
    """(d,)"""
    rotation: Tensor
    """(d, d), orthogonal"""

    @classmethod
    def drawn(cls, width: int, generator: torch.Generator) -> "Task":
        """A task at random."""
        rotation = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        return cls(direction(width, generator), rotation)

    def selected(self, x: Tensor) -> Tensor:
        """j*, (b, n, d) -> (b,)."""
        return (x @ self.selector).argmax(dim=-1)

    def target(self, x: Tensor) -> Tensor:
        """x_i + x_{j*} R, (b, n, d)."""
        payload = x[torch.arange(len(x)), self.selected(x)] @ self.rotation  # (b, d)
        return x + payload[:, None]


class BroadcastModel(nn.Module):
    """Two pre-norm layers of one head and an MLP each; learned positions reach the first attention alone."""

    def __init__(self, size: Size, options: Options) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(size.tokens + options.registers, size.width) * 0.02)
        self.registers = Registers(options.registers, size.width)
        self.attention = nn.ModuleList(PreNormAttention(size.width, 1, size.width, options) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(mlp(size.width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """(b, n, d) -> (b, n, d)."""
        x = self.registers.append(x)
        for i, (attention, feed_forward) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(x + self.positions if i == 0 else x)
            x = x + feed_forward(x)
        return self.registers.discard(x)


def mlp(width: int) -> nn.Sequential:
    """What follows attention in a layer: LayerNorm, four times the width, GELU."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )  # fmt: skip


@dataclass
class LayerMeasures:
    """One attention layer on sequences that the model has not seen; means over them."""

    match: float
    """Share of sequences whose strongest sink is the selected token."""
    strength: float
    event: float
    ratio: float
    """Value-norm ratio of the strongest sink."""
    selected_ratio: float
    """Of the selected token, sink or not."""
    rank: float
    broadcast: float
    """Share of sequences whose sink the rule calls a broadcast."""
    nop: float
    query_similarity: float
    """Mean cosine between a sequence's queries: 1 when all ask for the same."""
    similarity_before: float
    similarity_after: float
    """Mean cosine between different tokens, before and after the update."""


@dataclass
class BroadcastRun:
    """What became of one training."""

    variant: str
    seed: int
    loss: float = np.nan
    payload: float = np.nan
    """The loss of a model that leaves out the payload: what there was to learn."""
    steps: list[int] = field(default_factory=list)
    match: list[list[float]] = field(default_factory=list)
    """At those steps, for each layer."""
    layers: list[LayerMeasures] = field(default_factory=list)


@dataclass
class BroadcastExample:
    """Arrays of a trained model's layers for Fig. 3."""

    attention: np.ndarray
    """(layers, n, n), of one sequence."""
    selected: int
    """j* of that sequence."""
    selected_norms: np.ndarray
    """|u_j*|, (layers, b)"""
    other_norms: np.ndarray
    """|u_j| of a token that was not selected, (layers, b)"""
    queries: np.ndarray
    """(layers, tokens of some sequences, r)"""
    keys: np.ndarray
    """(layers, the same tokens, r)"""
    is_selected: np.ndarray
    """Which of these tokens are selected, bool."""


def train_broadcast(
    variant: str, options: Options, size: Size, seed: int
) -> tuple[BroadcastModel, BroadcastRun, BroadcastExample]:
    """Train one model and measure it on sequences it has not seen."""
    generator = seeded(seed)
    model = BroadcastModel(size, options)
    task = Task.drawn(size.width, generator)
    held_out = torch.randn(HELD_OUT, size.tokens, size.width, generator=generator)
    selected = task.selected(held_out).numpy()

    def loss() -> Tensor:
        x = torch.randn(size.batch, size.tokens, size.width, generator=generator)
        return nn.functional.mse_loss(model(x), task.target(x))

    run = BroadcastRun(variant, seed)
    for step in train(model, loss, size.steps, size.rate, f"broadcast, {variant}, seed {seed}"):
        if step == 1 or step % size.every == 0:
            run.steps.append(step)
            run.match.append([matching(trace, selected) for trace in traces(model, held_out)])
    with torch.no_grad():
        run.loss = float(nn.functional.mse_loss(model(held_out), task.target(held_out)))
        run.payload = float(nn.functional.mse_loss(held_out, task.target(held_out)))
    found = traces(model, held_out)
    run.layers = [measured(trace, selected) for trace in found]
    return model, run, example(found, selected, size.tokens)


def matching(trace: Trace, selected: np.ndarray) -> float:
    """Share of sequences whose strongest sink is the selected token (appendix A.2)."""
    sink = sinks.strongest_sink(sinks.attention_shares(trace.attention)).position[:, 0]
    return round(float((sink == selected).mean()), 4)


def measured(trace: Trace, selected: np.ndarray) -> LayerMeasures:
    """One layer's measures, all of them means over sequences."""
    found = diagnose(trace)
    return LayerMeasures(
        match=matching(trace, selected),
        strength=float(found.strength.mean()),
        event=float(found.event.mean()),
        ratio=float(found.ratio.mean()),
        selected_ratio=float(sinks.value_norm_ratio(trace.updates, selected[:, None]).mean()),
        rank=float(np.nanmean(found.rank)),  # attention that may withhold itself writes nothing in some sequences
        broadcast=float((found.mechanism == sinks.BROADCAST).mean()),
        nop=float((found.mechanism == sinks.NOP).mean()),
        query_similarity=float(sinks.similarity_between_tokens(trace.queries).mean()),
        similarity_before=float(sinks.similarity_between_tokens(trace.before).mean()),
        similarity_after=float(sinks.similarity_between_tokens(trace.after).mean()),
    )


def example(found: list[Trace], selected: np.ndarray, n: int, sequences: int = 32) -> BroadcastExample:
    """The arrays of Fig. 3; registers, if any, are left out. The sequence shown has the median strength of a sink."""
    strength = sinks.strongest_sink(found[-1].attention).strength[:, 0]
    shown = np.argsort(strength)[len(strength) // 2]
    every = np.arange(len(selected))
    norms = np.stack([np.linalg.norm(trace.updates[:, 0], axis=-1) for trace in found])  # (layers, b, n)
    return BroadcastExample(
        attention=np.stack([trace.attention[shown, 0, :n, :n] for trace in found]),
        selected=int(selected[shown]),
        selected_norms=norms[:, every, selected],
        other_norms=norms[:, every, (selected + 1) % n],
        queries=np.stack([trace.queries[:sequences, 0, :n].reshape(sequences * n, -1) for trace in found]),
        keys=np.stack([trace.keys[:sequences, 0, :n].reshape(sequences * n, -1) for trace in found]),
        is_selected=(np.arange(n) == selected[:sequences, None]).ravel(),
    )
