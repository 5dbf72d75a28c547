"""GGUF files: how fast blocks of every ggml type become float32, and an audit of Q4_K_M against one of BF16.

python -m benchmarks.ggml            # GB/s of float32 written on one core: the gguf package, NumPy, numba
python -m benchmarks.ggml --audit    # some layers of a 7B
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import gguf.quants
import numpy as np

from benchmarks.audit import SHAPES, write_synthetic
from benchmarks.commands import Cost, command_cost
from weightscope.checkpoint.ggml_blocks import AT_ONCE, LAYOUTS, Codebook, Layout, unpack_of
from weightscope.checkpoint.gguf import GRIDS

ROW = 4096  # weights; the package unpacks sixteen rows at a time
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_output": "Q4_K"}  # Q4_K_M; attn_v is Q6_K in half of the layers


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def speeds(kind: str, megabytes: int, rounds: int) -> dict[str, float | None]:
    """GB of float32 per second; our functions write where the caller says, as the package cannot."""
    layout = LAYOUTS[kind]
    n = megabytes * 10**6 // 4 // ROW * ROW
    blocks = np.random.default_rng(0).integers(0, 256, (n // layout.weights, layout.bytes), np.uint8)
    traits = gguf.quants._type_traits.get(getattr(gguf.GGMLQuantizationType, kind, None))
    out, step = np.empty((len(blocks), layout.weights), np.float32), AT_ONCE // layout.weights

    def package() -> None:
        traits.dequantize(blocks.reshape(n // ROW, -1))

    def ours(fast: bool) -> Callable[[], None]:
        unpack = unpack_of(layout, fast)

        def work() -> None:
            for start in range(0, len(blocks), step):
                unpack(blocks[start : start + step], out[start : start + step])

        return work

    works = {"package": package if traits else None, "NumPy": ours(False), "numba": ours(True)}
    with np.errstate(all="ignore"):
        return {name: work and 4 * n / fastest(work, rounds) / 1e9 for name, work in works.items()}


def write_gguf(path: Path, layers: int) -> None:
    """Attention of a 7B, with random codes and the scales of small weights."""
    sizes = SHAPES["llama-2-7b"]
    d, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(d)
    writer.add_head_count(heads)
    writer.add_context_length(4096)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32000)
    for layer in range(layers):
        kinds = MIXED | {"attn_v": "Q6_K" if layer % 2 else "Q4_K"}
        for name, kind in kinds.items():
            raw_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed(rng, LAYOUTS[kind], kind, d), raw_dtype=raw_type)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed(rng: np.random.Generator, layout: Layout | Codebook, kind: str, d: int) -> np.ndarray:
    """A (d, d) matrix of random codes; scales and minima that make its weights about 0.02."""
    blocks = rng.integers(0, 256, (d * d // layout.weights, layout.bytes), np.uint8)
    for scales in GRIDS[kind].scales:
        blocks[:, scales] &= 0x3F  # scales that are not negative, or far beyond others
    halves = blocks.view(np.float16)
    if kind == "Q6_K":
        halves[:, -1] = 2e-5
    else:
        halves[:, :2] = 1e-4, 1e-4 * 7.5
    return blocks.reshape(d, -1)


def audits(layers: int, rounds: int) -> None:
    """Seconds of the whole command, numba's compilation cached, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        bf16 = write_synthetic(Path(folder) / "bf16", "llama-2-7b", layers)
        write_gguf(mixed := Path(folder) / "model.gguf", layers)
        costs: dict[str, list[Cost]] = {"BF16": [], "Q4_K_M": []}
        command_cost("audit", mixed, "--out", Path(folder) / "first")
        for number in range(rounds):
            for name, source in (("BF16", bf16), ("Q4_K_M", mixed)):
                costs[name].append(command_cost("audit", source, "--out", Path(folder) / f"{name}-{number}"))
    for name, each in costs.items():
        seconds, cpu = median(cost.wall for cost in each), median(cost.cpu for cost in each)
        click.echo(f"{name}: {seconds:.1f} s, {cpu:.1f} s of CPU time, {max(cost.peak for cost in each):.0f} MB")
    ratios = [mine.wall / theirs.wall for mine, theirs in zip(costs["Q4_K_M"], costs["BF16"], strict=True)]
    click.echo(f"Q4_K_M takes {median(ratios):.2f} x as long as BF16 ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")


@click.command()
@click.option("--audit", is_flag=True, help="Audit a 7B's layers in Q4_K_M and in BF16 instead.")
@click.option("--layers", default=4, help="Of the 7B.")
@click.option("--megabytes", default=64, help="Of float32 for each type.")
@click.option("--rounds", default=5, help="The fastest counts; of audits the median.")
def main(audit: bool, layers: int, megabytes: int, rounds: int) -> None:
    """Print GB/s for each type, or the ratio of the audits."""
    if audit:
        return audits(layers, rounds)
    click.echo("| type | gguf package | NumPy | numba |\n| --- | --- | --- | --- |")
    for kind in LAYOUTS:
        each = speeds(kind, megabytes, rounds)
        base = each["package"]
        cells = [
            f"{speed:.2f}" + (f" ({speed / base:.1f} x)" if base else "") for speed in [*each.values()][1:] if speed
        ]
        click.echo(f"| {kind} | {'' if base is None else f'{base:.2f}'} | {' | '.join(cells)} |")
    return None


if __name__ == "__main__":
    main()
