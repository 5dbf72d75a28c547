"""The adaptive no-op task (two-sink-mechanisms paper, section 3.1 and appendix A.1).

One attention head has to return every token unchanged, except those that a fixed direction flags: their update has to
be damped, by default to zero. A softmax has to put its attention somewhere, so a head that must write nothing for the
flagged tokens needs a token whose value is zero.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor, nn

from analyses.toys.sinks.attention import Options, PreNormAttention, Registers, Trace, traces
from analyses.toys.sinks.diagnosis import attention_shares, update_stable_rank
from analyses.toys.sinks.training import Kept, Size, as_array, direction, seeded, train
from weightscope.heads.sinks import strength as sinks


@dataclass(frozen=True)
class UntilFlat(Size):
    """A schedule that ends early once the sink score is flat: its mean over some looks is that over as many before."""

    looks: int = 100
    change: float = 0.01

    def is_flat(self, score: Sequence[float]) -> bool:
        recent, before = score[-self.looks :], score[-2 * self.looks : -self.looks]
        return len(before) == self.looks and bool(abs(np.mean(recent) - np.mean(before)) < self.change)


HELD_OUT = 256  # sequences
WATCHED = 64  # sequences of these, for the sink score during training and for the histogram
DEFAULT_SIZE = Size(width=32, tokens=16, batch=64, steps=600, rate=3e-3, every=20)
PAPER_SIZE = UntilFlat(width=64, tokens=32, batch=2048, steps=30_000, rate=3e-3, every=10)
DAMPINGS = (0.0, 0.01, 0.1, 0.5, 1.0)
PROBABILITIES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Task:
    """Which tokens are flagged, and how far their update is damped."""

    # gamma: a flagged token x shall be given gamma x. At 1 nothing is asked of flags: the model without a sink.
    damping: float = 0.0
    # Of a flag: a token is flagged when its component along the gate lies above lambda = Phi^-1(1 - p)
    probability: float = 0.5

    def flags(self, x: Tensor, gate: Tensor) -> Tensor:
        """(b, n, d) and (d,) -> bool (b, n)."""
        return x @ gate > float(ndtri(1 - self.probability))

    def target(self, x: Tensor, gate: Tensor) -> Tensor:
        """m gamma x + (1 - m) x, (b, n, d)."""
        return torch.where(self.flags(x, gate)[..., None], self.damping * x, x)


class NopModel(nn.Module):
    """One pre-norm attention layer over a learned first token and the given tokens, all at learned positions.

    The paper's text adds its learned offset to a random first token. In its code's interventions, and here, the first
    token is the offset alone: every run then ends in a sink; otherwise about half of the short runs do.
    """

    def __init__(self, size: Size, options: Options) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(size.tokens, size.width) * 0.02)
        self.first = nn.Parameter(torch.randn(size.width) * 0.02)
        self.registers = Registers(options.registers, size.width)
        self.attention = PreNormAttention(size.width, 1, size.width, options)

    def forward(self, x: Tensor) -> Tensor:
        """The update of every given token, (b, n - 1, d) -> (b, n - 1, d)."""
        x = torch.cat([self.first.expand(len(x), 1, -1), x], dim=1)  # (b, n, d)
        update = self.attention(self.registers.append(x + self.positions))  # (b, n + R, d)
        return self.registers.discard(update)[:, 1:]


@dataclass
class NopRun:
    """The results of one training, from which the figures are drawn."""

    variant: str
    damping: float
    probability: float
    seed: int
    steps: list[int] = field(default_factory=list)
    # Sink score at those steps: max_j of the mean attention received. The rest is of the trained model.
    score: list[float] = field(default_factory=list)
    loss: float = np.nan
    sink: int = -1
    strength: float = np.nan  # The last sink score
    flagged_attention: float = np.nan  # Share of its attention that the mean flagged token gives the sink
    other_attention: float = np.nan
    # sum_j |A_ij| of the mean flagged token: 1 for a softmax, less where attention may be withheld
    flagged_weight: float = np.nan
    ratio: float = np.nan  # The sink's value-norm ratio, mean over sequences
    cancelled: float = np.nan  # How far the sink cancels what the others write to flagged tokens (Lemma 1)
    rank: float = np.nan  # Stable rank of the update, mean over sequences
    singular_values: list[float] = field(default_factory=list)  # Of W_QK
    sink_norm: float = np.nan  # |u_s|, mean over sequences
    # |u_j| of one given token, in each of some sequences, that is not the sink
    other_norms: list[float] = field(default_factory=list)


def train_nop(
    task: Task, variant: str, options: Options, size: Size, seed: int, folder: Path | None = None
) -> tuple[NopModel, NopRun]:
    """Train one model, kept in `folder`, and measure it on sequences it has not seen."""
    generator = seeded(seed)
    model = NopModel(size, options)
    gate = direction(size.width, generator)
    held_out = torch.randn(HELD_OUT, size.tokens - 1, size.width, generator=generator)

    def loss() -> Tensor:
        x = torch.randn(size.batch, size.tokens - 1, size.width, generator=generator)
        return nn.functional.mse_loss(model(x), task.target(x, gate))

    run = NopRun(variant, task.damping, task.probability, seed)
    label = f"NOP, {variant}, damping {task.damping:g}, p {task.probability:g}, seed {seed}"
    settings = {"size": asdict(size), "task": asdict(task)}
    kept = Kept(folder, label, settings, generator, (run.steps, run.score)) if folder else None
    for step in train(model, loss, size.steps, size.rate, label, kept=kept):
        if step == 1 or step % size.every == 0:
            run.steps.append(step)
            run.score.append(round(float(received(traces(model, held_out[:WATCHED])[0]).max()), 4))
            if isinstance(size, UntilFlat) and size.is_flat(run.score):
                break
    measure(model, task, gate, held_out, run)
    return model, run


def received(trace: Trace) -> np.ndarray:
    """Share of attention that each position receives, mean over sequences and queries, (n,)."""
    return sinks.sink_strength(attention_shares(trace.attention)).mean(axis=(0, 1))


def measure(model: NopModel, task: Task, gate: Tensor, x: Tensor, run: NopRun) -> None:
    """Fill in the measures of the trained model on x."""
    (trace,) = traces(model, x)
    with torch.no_grad():
        run.loss = float(nn.functional.mse_loss(model(x), task.target(x, gate)))
    run.sink, run.strength = int(received(trace).argmax()), float(received(trace).max())
    flagged = as_array(task.flags(x, gate))  # (b, n - 1)
    given = slice(1, 1 + x.shape[1])  # rows of the tokens with a task
    to_sink = attention_shares(trace.attention)[:, 0, given, run.sink]  # (b, n - 1)
    run.flagged_attention = float(to_sink[flagged].mean())
    run.other_attention = float(to_sink[~flagged].mean())
    run.flagged_weight = float(np.abs(trace.attention[:, 0, given]).sum(axis=-1)[flagged].mean())
    sink = np.full(trace.attention.shape[:2], run.sink)  # (b, 1)
    run.ratio = float(sinks.value_norm_ratio(trace.updates, sink).mean())
    to_flagged = trace.attention[:, :, given] * flagged[:, None, :, None]  # other rows count for nothing
    run.cancelled = float(np.nanmean(sinks.rank_one(to_flagged, trace.updates, sink).cancelled))
    run.rank = float(update_stable_rank(trace.attention, trace.updates).mean())
    run.singular_values = [round(float(value), 5) for value in model.attention.qk(0).svdvals()]
    norms = np.linalg.norm(trace.updates[:, 0], axis=-1)  # (b, n + R)
    run.sink_norm = float(norms[:, run.sink].mean())
    run.other_norms = [round(float(norm), 4) for norm in norms[:WATCHED, 1 if run.sink != 1 else 2]]
