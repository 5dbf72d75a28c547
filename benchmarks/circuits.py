"""Wiring of all pairs of heads: weightscope beside the dense way, on the same heads.

    python -m benchmarks.circuits SOURCE [--pairs 40]

The dense way is TransformerLens': W_OV and W_QK as d x d matrices and their product for the composition score, two QR
decompositions a pair for the projection kernel. It is timed on some pairs and multiplied by how many there are. "bare"
is what the float32 products of whole layers cost, written and read at once, with nothing done to them.
"""

from time import perf_counter

import click
import numpy as np

import weightscope as ws
from weightscope.attention.head import Head
from weightscope.circuitry.passes import wiring
from weightscope.circuitry.wiring import KINDS


def dense(a: Head, b: Head) -> tuple[float, float]:
    """PK and CS by keys of one pair."""
    written, read = np.linalg.qr(a.vo.right)[0], np.linalg.qr(b.qk.right)[0]
    w_vo, w_qk = a.vo.dense(), b.qk.dense().T
    composed = np.linalg.norm(w_vo @ w_qk) / (np.linalg.norm(w_vo) * np.linalg.norm(w_qk))
    return float(np.linalg.norm(written.T @ read) ** 2), float(composed)


def bare(model: ws.Model) -> float:
    """Seconds of the products alone."""
    rng, config = np.random.default_rng(0), model.config
    n, width = len(model.attention_layers), config.head_dim * (config.n_heads + 2 * config.n_kv_heads)
    left = rng.standard_normal((config.n_heads * config.head_dim, config.d_model), dtype=np.float32)
    right = rng.standard_normal((config.d_model, width), dtype=np.float32)
    begin = perf_counter()
    for _ in range(n * (n - 1) // 2):
        left @ right
    return perf_counter() - begin


@click.command()
@click.argument("source")
@click.option("--pairs", default=40, show_default=True, help="Pairs that the dense way is timed on.")
def main(source: str, pairs: int) -> None:
    model = ws.open_model(source)
    begin = perf_counter()
    found = wiring(model)
    ours = perf_counter() - begin
    n, h = found.rank["o"].shape
    rng = np.random.default_rng(0)
    layers = [model.layer(int(layer)) for layer in found.layers[:4]]
    drawn = [(rng.integers(h), rng.integers(1, len(layers)), rng.integers(h)) for _ in range(pairs)]
    begin = perf_counter()
    for a, j, b in drawn:
        dense(layers[0].head(int(a)), layers[int(j)].head(int(b)))
    a_pair = (perf_counter() - begin) / len(drawn)
    count = len(KINDS) * h * h * n * (n - 1) // 2
    print(f"{model.name}: {n} layers of {h} heads, {count:,} pairs")
    print(f"weightscope {ours:.2f} s, bare products {bare(model):.2f} s")
    print(f"dense {a_pair * count:,.0f} s, {1e3 * a_pair:.1f} ms a pair")


if __name__ == "__main__":
    main()
