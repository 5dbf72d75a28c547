"""The same heads by other tools, where they are installed: TransformerLens' FactoredMatrix and WeightWatcher.

Each runs in a process of its own, under an interpreter of one's choice, because their dependencies need not agree with
weightscope's:

python -m benchmarks.audit --checkpoint GPT2_FOLDER --peer-python VENV/bin/python
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

ROUNDS = 2
NOT_INSTALLED = 3  # exit status


def factored_matrix(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
    """All singular values of W_QK and W_VO, layer by layer, as TransformerLens has them: an SVD of each factor."""
    import torch
    from transformer_lens import FactoredMatrix

    for layer in zip(q, k, v, o, strict=True):
        w_q, w_k, w_v, w_o = map(torch.from_numpy, layer)  # (H, d, r)
        for left, right in ((w_q, w_k), (w_v, w_o)):
            assert torch.isfinite(FactoredMatrix(left, right.transpose(-1, -2)).svd()[1]).all()


def weightwatcher(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> None:
    """WeightWatcher's analysis of the same projections, whole matrices, as it has no heads."""
    import torch
    import weightwatcher as ww

    model = torch.nn.ModuleList()
    for projection in (q, k, v, o):
        for layer in projection.transpose(0, 1, 3, 2).reshape(len(projection), -1, projection.shape[2]):  # (H r, d)
            module = torch.nn.Linear(layer.shape[1], layer.shape[0], bias=False)
            module.weight = torch.nn.Parameter(torch.from_numpy(layer), requires_grad=False)
            model.append(module)
    ww.WeightWatcher(model=model, log_level="ERROR").analyze()


PEERS = {"transformer-lens": factored_matrix, "weightwatcher": weightwatcher}
TITLES = {
    "transformer-lens": "TransformerLens' FactoredMatrix.svd (float32)",
    "weightwatcher": "WeightWatcher.analyze of whole projections",
}


@dataclass(frozen=True)
class PeerCost:
    """The best of a few rounds with one thread and with all, in seconds on the clock and of all cores together."""

    wall: float
    cpu: float


def peer_cost(peer: str, python: str, factors: dict[str, np.ndarray]) -> PeerCost | None:
    """What a peer takes for heads' factors q, k, v, o, each float32 (L, H, d, r); None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "factors.npz"
        np.savez(file, **factors)
        command = [python, str(Path(__file__)), peer, str(file)]
        found = []
        for threads in {1, os.cpu_count() or 1}:  # on small matrices one is often the faster
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode == NOT_INSTALLED:
                return None
            if done.returncode:
                raise click.ClickException(f"{peer} failed: {done.stderr.splitlines()[-1]}")
            found.append(PeerCost(**json.loads(done.stdout.splitlines()[-1])))
    return PeerCost(min(each.wall for each in found), min(each.cpu for each in found))


def _timed(peer: str, file: str) -> None:
    """Print the cost of one peer as JSON; the first round, which also imports, does not count."""
    factors = dict(np.load(file))
    costs = []
    for _ in range(1 + ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        PEERS[peer](**factors)
        costs.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    print("\n" + json.dumps(min(costs[1:], key=lambda cost: cost["wall"])))


if __name__ == "__main__":
    try:
        _timed(*sys.argv[1:])
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_INSTALLED)
