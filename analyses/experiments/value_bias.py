"""b of the sink-as-bias paper's eq. 1 with the values' bias in it: `figures/sink-bias-values`.

    python -m analyses.experiments.value_bias QWEN --own-first --text BOOKS --out out/sink-bias-values

f_h(x) = x W_V W_O + b_V W_O: in a model whose values have a bias, part of what token 0 writes is the same whatever the
token. `sinks --question bias` counts it to the updates, so that its b is the output's bias alone. Here b of eq. 1 is
b_O + sum_h b_V W_O (attention sums to 1), the updates are alpha x W_V W_O, and eqs 3, 5 and 6 are given both ways, of
the first texts of those that figures/sink-bias was measured on.
"""

from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

import weightscope as ws
from analyses.study import study, write
from weightscope.cli import options
from weightscope.core.files import Folder
from weightscope.core.tables import Column
from weightscope.heads.sinks.bias import PAPER
from weightscope.heads.sinks.updates import UpdateStack, decompose, influence, normalised_variance, spectral_ratio
from weightscope.model.text.sequences import read_texts, token_windows
from weightscope.runner import open_runner
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Activations

TEXTS = 12


@dataclass(eq=False, repr=False)
class Updates:
    """What token 0 and all others write in one layer, positions from 1 on, and what token 0 sends itself."""

    sink: UpdateStack = field(default_factory=UpdateStack)
    others: UpdateStack = field(default_factory=UpdateStack)
    first: list[np.ndarray] = field(default_factory=list)  # (d,) of each text

    def add(self, sink: np.ndarray, others: np.ndarray) -> None:
        """Add a text's updates, (n, d) each."""
        self.first.append(sink[0])
        self.sink.add(sink[1:])
        self.others.add(others[1:])

    def measures(self) -> list[float]:
        """Ratio, SpectralRatio, R against mu_sink and against their own mean, |mu_sink|, E|u_sink|."""
        mean, mean_square = self.sink.mean, self.sink.mean_square
        mu = (mean * self.sink.count + np.sum(self.first, axis=0)) / (self.sink.count + len(self.first))
        variance = normalised_variance(mean, mean_square, mu), normalised_variance(mean, mean_square)
        ratio, spectral = influence(self.sink, self.others), spectral_ratio(self.sink)
        return [ratio, spectral, *variance, float(np.linalg.norm(mu)), self.sink.mean_norm]


MEASURES = ("ratio", "spectral_sink", "variance_sink_mu", "variance_sink", "norm_mu", "norm_sink")
WAYS = {"": "with b_V W_O in the updates", "_linear": "with b_V W_O in b"}


@study("sink-bias-values")
@click.argument("source")
@click.option("--own-first", is_flag=True, help="Each text begins with its own first token.")
@click.option("--texts", "n", default=TEXTS, show_default=True, type=click.IntRange(1), help="How many texts.")
@options.text
def main(files: Folder, source: str, own_first: bool, n: int, text: tuple[Path, ...]) -> None:
    """Write layers.csv into OUT, one row per layer of SOURCE."""
    model = ws.open_model(source)
    framing = framing_of(model, own_first=own_first)
    texts = read_texts(text, characters=PAPER.characters).texts[::2]
    windows = token_windows(framing, texts, PAPER.texts, PAPER.tokens)[:n]
    runner = open_runner(model)
    updates = {index: [Updates(), Updates()] for index in runner.layers}
    constants = {
        index: np.stack([head.vo_bias for head in layer.heads]) for index, layer in runner.layers.items()
    }  # (H, d)

    def observe(seen: Activations) -> None:
        with_bias, linear = updates[seen.layer.index]
        constant = constants[seen.layer.index]
        for parts, attention in zip(decompose(seen), seen.attention, strict=True):
            to_first = attention[:, :, 0].T  # (n, H)
            sink = parts.sink.rows()
            with_bias.add(sink, parts.others)
            linear.add(sink - to_first @ constant, parts.others - (1 - to_first) @ constant)

    runner.observe(windows, observe)
    rows = [
        [index, np.linalg.norm(layer.output_bias), np.linalg.norm(layer.output_bias + constants[index].sum(axis=0)),
         *(value for way in updates[index] for value in way.measures())]
        for index, layer in runner.layers.items()
    ]  # fmt: skip
    header = [
        Column("layer"),
        Column("norm_bias", meaning="$|b_O|$"),
        Column("norm_bias_values", meaning="$|b_O + sum_h b_V W_O|$"),
        *(Column(f"{name}{way}", meaning=meaning) for way, meaning in WAYS.items() for name in MEASURES),
    ]
    write(files, "layers", header, rows)
    click.echo(f"{len(windows)} texts of {PAPER.tokens} tokens")


if __name__ == "__main__":
    main()
