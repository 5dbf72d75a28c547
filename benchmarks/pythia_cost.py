"""What it costs to audit every checkpoint of the Pythia runs: 154 steps of eight sizes, worked out from measured rates.

python -m benchmarks.pythia_cost [--sizes 70m,160m] [--cores 64] [--gigabits 10]

Of each size a checkpoint with its first layers and its token embedding is written, random in float16, and audited by
the tasks that a worker runs, on one core: the cost of a layer, and of the task that ends a checkpoint's audit, at two
depths, since the tokens along singular directions cost more the more layers there are. CPU seconds, not wall clock.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from weightscope.core.engine import beside_others
from weightscope.core.files import OutputFolder
from weightscope.heads.audit.audit import AuditOptions, measure_task
from weightscope.heads.audit.batch import FinishedLayers, Report, report_task
from weightscope.heads.audit.directions import AFFORDABLE, DEFAULT
from weightscope.model.run_identity import RunIdentity

STEPS = 154  # step 0, ten powers of two up to 512, then every 1,000 up to 143,000
SHALLOW, DEEP = 1, 3  # layers written


@dataclass(frozen=True)
class Shape:
    """As in the published config."""

    layers: int
    width: int
    heads: int
    vocabulary: int

    @property
    def stored_bytes(self) -> int:
        """Of the whole checkpoint: 12 d^2 + 13 d a layer, two embeddings, the last norm, two bytes each."""
        d = self.width
        return 2 * (self.layers * (12 * d * d + 13 * d) + 2 * self.vocabulary * d + 2 * d)


SHAPES = {
    "70m": Shape(6, 512, 8, 50304),
    "160m": Shape(12, 768, 12, 50304),
    "410m": Shape(24, 1024, 16, 50304),
    "1b": Shape(16, 2048, 8, 50304),
    "1.4b": Shape(24, 2048, 16, 50304),
    "2.8b": Shape(32, 2560, 32, 50304),
    "6.9b": Shape(32, 4096, 32, 50432),
    "12b": Shape(36, 5120, 40, 50688),
}


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint, measured.

    Attributes
    ----------
    layer, conclusion, without_tokens : float
        CPU seconds on one core: a layer, the end of the audit, and its end with --directions 0.
    client : float
        CPU seconds of the one process that hands out tasks and writes results.
    read, written : int
        Bytes.
    """

    layer: float
    conclusion: float
    without_tokens: float
    client: float
    read: int
    written: int


def write_synthetic(folder: Path, shape: Shape, layers: int) -> Path:
    """The token embedding and the first layers' attention, random float16, under GPT-NeoX's names."""
    from safetensors.numpy import save_file

    rng, d = np.random.default_rng(0), shape.width

    def normal(*size: int, mean: float = 0.0) -> np.ndarray:
        return (mean + rng.standard_normal(size, np.float32) * np.float32(0.02)).astype(np.float16)

    tensors = {"gpt_neox.embed_in.weight": normal(shape.vocabulary, d)}
    for i in range(layers):
        stem = f"gpt_neox.layers.{i}."
        tensors |= {
            f"{stem}input_layernorm.weight": normal(d, mean=1.0),
            f"{stem}input_layernorm.bias": normal(d),
            f"{stem}attention.query_key_value.weight": normal(3 * d, d),
            f"{stem}attention.query_key_value.bias": normal(3 * d),
            f"{stem}attention.dense.weight": normal(d, d),
            f"{stem}attention.dense.bias": normal(d),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "gpt_neox", "hidden_size": d, "num_attention_heads": shape.heads, "num_hidden_layers": layers,
        "vocab_size": shape.vocabulary, "rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "use_parallel_residual": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(size: str) -> Cost:
    """Run the tasks of one checkpoint in this process, on one core."""
    shape = SHAPES[size]
    vectors = 4 * DEFAULT * shape.layers * shape.heads
    affordable = shape.vocabulary * shape.width * vectors <= AFFORDABLE  # as an audit of all layers has it
    plain, with_tokens = AuditOptions(directions=0), AuditOptions(directions=DEFAULT)
    layer, conclusions, without_tokens, client, written = [], [], [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary) / "model", Path(temporary) / "out"
        for depth in (SHALLOW, DEEP):
            model = ws.open_model(write_synthetic(folder, shape, depth))
            finished = FinishedLayers(out, RunIdentity.of(), range(depth), resume=False)
            kept = 0.0
            for index in range(depth):
                seconds, measured = _timed(beside_others, 1, measure_task, lambda model=model: model, index, plain)
                layer.append(seconds)
                kept += _timed(finished.put, index, measured)[0]
            seconds, layers = _timed(finished.all)
            end = partial(beside_others, 1, report_task, lambda model=model: model, layers)
            if depth == SHALLOW:  # the first figure of a process also sets up matplotlib
                end(plain)
            without, report = _timed(end, plain)
            without_tokens.append(without)
            if affordable:
                without, report = _timed(end, with_tokens)
            conclusions.append(without)
            client.append(kept + seconds + _timed(_write, report, out)[0])
            written.append(sum(map(len, report.files.values())))
        attention = model.checkpoint.bytes_to_read(tensor.name for tensor in model.attention_tensors(0))
        read = shape.layers * attention + model.embeddings.token_tensor.nbytes
    return Cost(
        float(np.median(layer[1:])),
        _at(shape.layers, conclusions),
        _at(shape.layers, without_tokens),
        _at(shape.layers, client),
        read,
        int(_at(shape.layers, written)),
    )


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    began = time.process_time()
    result = work(*arguments)
    return time.process_time() - began, result


def _write(report: Report, out: Path) -> None:
    with OutputFolder(out) as folder:
        folder.add(report.files)


def _at(layers: int, costs: list[float]) -> float:
    """Extrapolate linearly from both depths to the depth of the model."""
    slope = max(0.0, (costs[1] - costs[0]) / (DEEP - SHALLOW))
    return costs[0] + slope * (layers - SHALLOW)


@click.command()
@click.option("--sizes", default=",".join(SHAPES), help="Which to measure, separated by commas.")
@click.option("--cores", default=64, show_default=True, help="Of the cluster, for the time it takes.")
@click.option("--gigabits", default=10.0, show_default=True, help="A second between the weights and the cluster.")
@click.option("--one", type=click.Choice(list(SHAPES)), hidden=True, help="Measure this alone and print JSON.")
def main(sizes: str, cores: int, gigabits: float, one: str | None) -> None:
    """Print a table, as Markdown."""
    if one is not None:
        click.echo(json.dumps(asdict(measure(one))))
        return
    columns = (
        "size", "layers x heads", "stored", "an audit reads", "s per layer", "s to finish", "s for tokens",
        "core-hours for 154", "154 read", "154 write", "client, for 154",
    )  # fmt: skip
    click.echo(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    hours, tokens_hours, read, client = 0.0, 0.0, 0, 0.0
    for size in sizes.split(","):
        shape = SHAPES[size]
        command = [sys.executable, "-m", "benchmarks.pythia_cost", "--one", size]  # one process each, like a worker
        cost = Cost(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        checkpoint = shape.layers * cost.layer + cost.conclusion
        hours += STEPS * checkpoint / 3600
        read += STEPS * cost.read
        client += STEPS * cost.client / 3600
        tokens = cost.conclusion - cost.without_tokens
        tokens_hours += STEPS * tokens / 3600
        click.echo(
            f"| {size} | {shape.layers} x {shape.heads} | {shape.stored_bytes / 1e9:.2f} GB | {cost.read / 1e9:.2f} GB "
            f"| {cost.layer:.2f} | {cost.conclusion:.1f} | {tokens:.1f} | {STEPS * checkpoint / 3600:.2f} "
            f"| {STEPS * cost.read / 1e12:.2f} TB | {STEPS * cost.written / 1e9:.1f} GB "
            f"| {STEPS * cost.client / 60:.1f} min |"
        )
    click.echo(
        f"\nTogether {hours:.1f} core-hours, {tokens_hours:.1f} of them for tokens along directions, and "
        f"{read / 1e12:.2f} TB: on {cores} cores {60 * hours / cores:.0f} min of work, at {gigabits:g} Gbit/s "
        f"{read * 8 / gigabits / 1e9 / 60:.0f} min of reading, and {60 * client:.0f} min of the client's writing, all "
        "at the same time."
    )


if __name__ == "__main__":
    main()
