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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

ROUNDS = 2
ENOUGH = 10.0  # seconds; no further round after this
NOT_INSTALLED = 3  # exit status
FOUND = "found.npy"


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


def _as_their_model(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> Any:
    """An object with the parts of a model that TransformerLens' functions of all pairs of heads use."""
    import torch

    blocks = []
    for number, layer in enumerate(zip(q, k, v, o, strict=True)):
        w_q, w_k, w_v, w_o = map(torch.from_numpy, layer)
        attention = SimpleNamespace(W_Q=w_q, W_K=w_k, W_V=w_v, W_O=w_o.transpose(-1, -2))
        blocks.append((number, SimpleNamespace(attn=attention)))
    return SimpleNamespace(
        cfg=SimpleNamespace(device="cpu", n_heads=q.shape[1]),
        blocks_with=lambda _: blocks,
        _reject_encoder_decoder_composition=lambda: None,
        _expand_kv_heads=lambda weights: weights,  # each query head has its own copy already
        _reshape_qkv=None,
        _reshape_o=None,
    )


def projection_kernel(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
    """TransformerLens' projection kernel of what heads write and what others' keys read, (L, H, L, H)."""
    from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity

    return attention_head_subspace_affinity(_as_their_model(q, k, v, o), target_role="K").scores.numpy()


def composition_scores(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
    """TransformerLens' composition scores by keys, (L, H, L, H)."""
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.all_composition_scores(_as_their_model(q, k, v, o), "K").scores.numpy()


@dataclass(frozen=True)
class Peer:
    """A tool's function of the factors q, k, v, o of heads, its title, and its package."""

    title: str
    package: str
    work: Callable[..., np.ndarray | None]


PEERS = {
    "svd": Peer("TransformerLens' FactoredMatrix.svd (float32)", "transformer-lens", factored_matrix),
    "weightwatcher": Peer("WeightWatcher.analyze of whole projections", "weightwatcher", weightwatcher),
    "pk": Peer("TransformerLens' projection kernel (float32)", "transformer-lens", projection_kernel),
    "cs": Peer("TransformerLens' composition scores (float32)", "transformer-lens", composition_scores),
}


@dataclass(frozen=True)
class PeerCost:
    """The best of a few rounds with one thread and with all: wall-clock and CPU seconds."""

    wall: float
    cpu: float
    result: np.ndarray = field(repr=False)  # what the function returned; empty for None


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
        result = np.load(file.with_name(FOUND))
    return PeerCost(min(each["wall"] for each in costs), min(each["cpu"] for each in costs), result)


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
    """Print the cost of one peer as JSON and save its result. Two layers run first, to import."""
    factors, work = dict(np.load(file)), PEERS[peer].work
    work(**{name: factor[:2] for name, factor in factors.items()})
    costs: list[dict[str, float]] = []
    while len(costs) < ROUNDS and sum(cost["wall"] for cost in costs) < ENOUGH:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work(**factors)
        costs.append({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    np.save(Path(file).with_name(FOUND), np.empty(0) if result is None else result)
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
