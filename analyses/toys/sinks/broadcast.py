"""The broadcast task (two-sink-mechanisms paper, section 3.2, eq. 3 and appendix A.2).

The model has to add to every token a rotated copy of one token, the one farthest along a fixed direction:
y_i = x_i + alpha x_{j*} R with j* = argmax_j <x_j, u>. All tokens attend to the same token, to read its value.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from analyses.toys.sinks.attention import Options, PreNormAttention, Registers, Trace, traces
from analyses.toys.sinks.diagnosis import attention_shares, diagnose, strongest_sink
from analyses.toys.sinks.training import WEIGHT_DECAY, Kept, Size, as_array, direction, seeded, train
from weightscope.heads.sinks import strength as sinks
from weightscope.model.metrics.sinks import BROADCAST, NOP

HELD_OUT = 256  # sequences
DEFAULT_SIZE = Size(width=16, tokens=16, batch=64, steps=1000, rate=5e-3, every=100)
PAPER_SIZE = Size(width=64, tokens=32, batch=1024, steps=30_000, rate=5e-4, every=1000)


@dataclass(frozen=True)
class Setting:
    """What a trial changes of the task, of the model and of its training."""

    layers: int = 2
    weight_decay: float = WEIGHT_DECAY
    noise: float = 0.0  # Standard deviation of what is added to the targets in training
    margin: float = 0.0  # How far the selected token is moved along u: from 2 on it cannot be mistaken for the next one
    feed_forward: bool = True  # Whether an MLP follows attention


STANDARD = Setting()
# One change at a time, to see whether the second layer then stops broadcasting, as it does in Fig. 3.
TRIALS = {
    "as it is": (STANDARD, DEFAULT_SIZE),
    "weight decay 0.1": (Setting(weight_decay=0.1), DEFAULT_SIZE),
    "weight decay 1": (Setting(weight_decay=1.0), DEFAULT_SIZE),
    "noisy targets": (Setting(noise=1.0), DEFAULT_SIZE),
    "selected token stands out": (Setting(margin=2.0), DEFAULT_SIZE),
    "one layer": (Setting(layers=1), DEFAULT_SIZE),
    "three layers": (Setting(layers=3), DEFAULT_SIZE),
    "no MLPs": (Setting(feed_forward=False), DEFAULT_SIZE),
    "paper's width, length and rate": (STANDARD, Size(width=64, tokens=32, batch=32, steps=1500, rate=5e-4, every=300)),
}
LONG_TRIALS = {"paper's size, batches of 64": (STANDARD, replace(PAPER_SIZE, batch=64))}  # about 15 minutes


@dataclass(frozen=True)
class Task:
    """The selector u and the rotation R, with the targets that they give; alpha is 1."""

    selector: Tensor  # (d,)
    rotation: Tensor  # (d, d), orthogonal
    margin: float = 0.0

    @classmethod
    def drawn(cls, width: int, generator: torch.Generator, margin: float = 0.0) -> "Task":
        """A task at random."""
        rotation = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
        return cls(direction(width, generator), rotation, margin)

    def tokens(self, count: int, size: Size, generator: torch.Generator) -> Tensor:
        """Sequences of Gaussian tokens, with the selected one moved by the margin, (count, n, d)."""
        x = torch.randn(count, size.tokens, size.width, generator=generator)
        x[torch.arange(count), self.selected(x)] += self.margin * self.selector
        return x

    def selected(self, x: Tensor) -> Tensor:
        """j*, (b, n, d) -> (b,)."""
        return (x @ self.selector).argmax(dim=-1)

    def target(self, x: Tensor) -> Tensor:
        """x_i + x_{j*} R, (b, n, d)."""
        payload = x[torch.arange(len(x)), self.selected(x)] @ self.rotation  # (b, d)
        return x + payload[:, None]


class BroadcastModel(nn.Module):
    """Two pre-norm layers of one head and an MLP each; only the first attention sees the learned positions."""

    def __init__(self, size: Size, options: Options, setting: Setting = STANDARD) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(size.tokens + options.registers, size.width) * 0.02)
        self.registers = Registers(options.registers, size.width)
        self.attention = nn.ModuleList(
            PreNormAttention(size.width, 1, size.width, options) for _ in range(setting.layers)
        )
        self.mlp = nn.ModuleList(mlp(size.width) for _ in range(setting.layers if setting.feed_forward else 0))

    def forward(self, x: Tensor) -> Tensor:
        """(b, n, d) -> (b, n, d)."""
        x = self.registers.append(x)
        for i, attention in enumerate(self.attention):
            x = x + attention(x + self.positions if i == 0 else x)
            if len(self.mlp):
                x = x + self.mlp[i](x)
        return self.registers.discard(x)


def mlp(width: int) -> nn.Sequential:
    """What follows attention in a layer: LayerNorm, four times the width, GELU."""
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )  # fmt: skip


@dataclass
class LayerMeasures:
    """Measures of one attention layer, means over sequences that the model has not seen."""

    match: float  # Share of sequences whose strongest sink is the selected token
    strength: float
    event: float
    ratio: float  # Value-norm ratio of the strongest sink
    selected_ratio: float  # Of the selected token, sink or not
    rank: float
    broadcast: float  # Share of sequences whose sink the rule calls a broadcast
    nop: float
    query_similarity: float  # Mean cosine between a sequence's queries: 1 when all ask for the same
    similarity_before: float
    similarity_after: float  # Mean cosine between different tokens, before and after the update
    key_ratio: float  # The selected token's key norm over the others' mean (appendix A.2)
    update_spread: float  # Standard deviation over mean of |o_i|, what positions gather before W_O (appendix A.2)
    diagonal: float  # Mean attention of a token to itself; 1/n where it is spread evenly
    loss_without: float  # The model's loss when this layer's attention writes nothing


@dataclass
class BroadcastRun:
    """The results of one training."""

    variant: str  # A kind of attention; of a trial its name
    seed: int
    loss: float = np.nan
    payload: float = np.nan  # The loss of a model that leaves out the payload: what there was to learn
    steps: list[int] = field(default_factory=list)
    match: list[list[float]] = field(default_factory=list)  # At those steps, for each layer
    layers: list[LayerMeasures] = field(default_factory=list)


@dataclass
class BroadcastExample:
    """Arrays of a trained model's layers for Fig. 3."""

    attention: np.ndarray  # (layers, n, n), of one sequence
    selected: int  # j* of that sequence
    selected_norms: np.ndarray  # |u_j*|, (layers, b)
    other_norms: np.ndarray  # |u_j| of a token that was not selected, (layers, b)
    queries: np.ndarray  # (layers, tokens of some sequences, r)
    keys: np.ndarray  # (layers, the same tokens, r)
    is_selected: np.ndarray  # Which of these tokens are selected, bool


def train_broadcast(
    variant: str, options: Options, size: Size, seed: int, setting: Setting = STANDARD, folder: Path | None = None
) -> tuple[BroadcastModel, BroadcastRun, BroadcastExample]:
    """Train one model, kept in `folder`, and measure it on sequences it has not seen."""
    generator = seeded(seed)
    model = BroadcastModel(size, options, setting)
    task = Task.drawn(size.width, generator, setting.margin)
    held_out = task.tokens(HELD_OUT, size, generator)
    selected = as_array(task.selected(held_out))

    def loss() -> Tensor:
        x = task.tokens(size.batch, size, generator)
        target = task.target(x)
        if setting.noise:
            target = target + setting.noise * torch.randn(target.shape, generator=generator)
        return nn.functional.mse_loss(model(x), target)

    run = BroadcastRun(variant, seed)
    label = f"broadcast, {variant}, seed {seed}"
    settings = {"size": asdict(size), "setting": asdict(setting)}
    kept = Kept(folder, label, settings, generator, (run.steps, run.match)) if folder else None
    for step in train(model, loss, size.steps, size.rate, label, weight_decay=setting.weight_decay, kept=kept):
        if step == 1 or step % size.every == 0:
            run.steps.append(step)
            run.match.append([matching(trace, selected) for trace in traces(model, held_out)])
    with torch.no_grad():
        run.loss = float(nn.functional.mse_loss(model(held_out), task.target(held_out)))
        run.payload = float(nn.functional.mse_loss(held_out, task.target(held_out)))
    layer_traces = traces(model, held_out)
    losses = [loss_without(layer, model, held_out, task.target(held_out)) for layer in model.attention]
    run.layers = [measured(trace, selected, without) for trace, without in zip(layer_traces, losses, strict=True)]
    return model, run, example(layer_traces, selected, size.tokens)


def matching(trace: Trace, selected: np.ndarray) -> float:
    """Share of sequences whose strongest sink is the selected token (appendix A.2)."""
    sink = strongest_sink(attention_shares(trace.attention)).position[:, 0]
    return round(float((sink == selected).mean()), 4)


@torch.no_grad()
def loss_without(attention: nn.Module, model: BroadcastModel, x: Tensor, target: Tensor) -> float:
    """The model's loss on x when one attention layer writes nothing."""
    silent = attention.register_forward_hook(lambda _, given, output: torch.zeros_like(output))
    loss = float(nn.functional.mse_loss(model(x), target))
    silent.remove()
    return loss


def measured(trace: Trace, selected: np.ndarray, without: float) -> LayerMeasures:
    """One layer's measures, all means over sequences."""
    diagnosis = diagnose(trace)
    return LayerMeasures(
        match=matching(trace, selected),
        strength=float(diagnosis.strength.mean()),
        event=float(diagnosis.event.mean()),
        ratio=float(diagnosis.ratio.mean()),
        selected_ratio=float(sinks.value_norm_ratio(trace.updates, selected[:, None]).mean()),
        rank=float(np.nanmean(diagnosis.rank)),  # without a softmax, attention writes nothing in some sequences
        broadcast=float((diagnosis.mechanism == BROADCAST).mean()),
        nop=float((diagnosis.mechanism == NOP).mean()),
        query_similarity=float(sinks.similarity_between_tokens(trace.queries).mean()),
        similarity_before=float(sinks.similarity_between_tokens(trace.before).mean()),
        similarity_after=float(sinks.similarity_between_tokens(trace.after).mean()),
        key_ratio=float(sinks.value_norm_ratio(trace.keys, selected[:, None]).mean()),
        update_spread=float(np.nanmean(sinks.relative_spread(trace.attention @ trace.values))),
        diagonal=float(np.diagonal(trace.attention, axis1=-2, axis2=-1).mean()),
        loss_without=without,
    )


def example(layer_traces: list[Trace], selected: np.ndarray, n: int, sequences: int = 32) -> BroadcastExample:
    """The arrays of Fig. 3, without registers. The sequence shown has the median sink strength."""
    strength = strongest_sink(layer_traces[-1].attention).strength[:, 0]
    shown = np.argsort(strength)[len(strength) // 2]
    every = np.arange(len(selected))
    norms = np.stack([np.linalg.norm(trace.updates[:, 0], axis=-1) for trace in layer_traces])  # (layers, b, n)
    return BroadcastExample(
        attention=np.stack([trace.attention[shown, 0, :n, :n] for trace in layer_traces]),
        selected=int(selected[shown]),
        selected_norms=norms[:, every, selected],
        other_norms=norms[:, every, (selected + 1) % n],
        queries=np.stack([trace.queries[:sequences, 0, :n].reshape(sequences * n, -1) for trace in layer_traces]),
        keys=np.stack([trace.keys[:sequences, 0, :n].reshape(sequences * n, -1) for trace in layer_traces]),
        is_selected=(np.arange(n) == selected[:sequences, None]).ravel(),
    )
