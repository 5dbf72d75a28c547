"""The same heads with other tools, if they are installed: TransformerLens and WeightWatcher.

Each runs in a separate process under an interpreter that you choose, because its dependencies can conflict with
weightscope's:

python -m benchmarks.audit --checkpoint GPT2_FOLDER --peer-python VENV/bin/python
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

ROUNDS = 2
ENOUGH = 10.0  # seconds; no further round after this
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
    """WeightWatcher's analysis of the same projections as whole matrices, since it does not know heads."""
    import torch
    import weightwatcher as ww

    model = torch.nn.ModuleList()
    for projection in (q, k, v, o):
        for layer in projection.transpose(0, 1, 3, 2).reshape(len(projection), -1, projection.shape[2]):  # (H r, d)
            module = torch.nn.Linear(layer.shape[1], layer.shape[0], bias=False)
            module.weight = torch.nn.Parameter(torch.from_numpy(layer), requires_grad=False)
            model.append(module)
    ww.WeightWatcher(model=model, log_level="ERROR").analyze()


@dataclass(frozen=True)
class Peer:
    """A tool's function of the factors q, k, v, o of heads, its title, and its package."""

    title: str
    package: str
    work: Callable[..., None]


PEERS = {
    "svd": Peer("TransformerLens' FactoredMatrix.svd (float32)", "transformer-lens", factored_matrix),
    "weightwatcher": Peer("WeightWatcher.analyze of whole projections", "weightwatcher", weightwatcher),
}


@dataclass(frozen=True)
class PeerCost:
    """The best of a few rounds with one thread and with all: wall-clock and CPU seconds."""

    wall: float
    cpu: float


def peer_cost(peer: str, python: str, factors: dict[str, np.ndarray]) -> PeerCost | None:
    """The cost of a peer on factors q, k, v, o, each float32 (L, H, d, r); None if it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "factors.npz"
        np.savez(file, **factors)
        command = [python, str(Path(__file__)), peer, str(file)]
        costs = []
        for threads in {1, os.cpu_count() or 1}:  # one thread is often faster on small matrices
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode == NOT_INSTALLED:
                return None
            if done.returncode:
                raise click.ClickException(f"{peer} failed: {done.stderr.splitlines()[-1]}")
            costs.append(json.loads(done.stdout.splitlines()[-1]))
    return PeerCost(min(each["wall"] for each in costs), min(each["cpu"] for each in costs))


def spectra_of_file(folder: str) -> None:
    """All singular values of W_QK and W_VO of a model that TransformerLens loads."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, device="cpu")
    for maps in (model.QK, model.OV):
        assert torch.isfinite(maps.svd()[1]).all()


def weightwatcher_of_file(folder: str) -> None:
    """WeightWatcher's analysis of every matrix of a model."""
    import weightwatcher as ww
    from transformers import AutoModelForCausalLM

    ww.WeightWatcher(model=AutoModelForCausalLM.from_pretrained(folder), log_level="ERROR").analyze()


OF_FILES = {"spectra": spectra_of_file, "weightwatcher": weightwatcher_of_file}  # see `benchmarks.other_tools`


def _timed(peer: str, file: str) -> None:
    """Print the cost of one peer as JSON. Two layers run first, to import."""
    factors, work = dict(np.load(file)), PEERS[peer].work
    work(**{name: factor[:2] for name, factor in factors.items()})
    costs: list[dict[str, float]] = []
    while len(costs) < ROUNDS and sum(cost["wall"] for cost in costs) < ENOUGH:
        wall, cpu = time.perf_counter(), time.process_time()
        work(**factors)
        costs.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    print("\n" + json.dumps(min(costs, key=lambda cost: cost["wall"])))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "file":
            OF_FILES[sys.argv[2]](sys.argv[3])
        else:
            _timed(*sys.argv[1:])
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_INSTALLED)
