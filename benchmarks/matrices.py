"""Spectra of every matrix at the width of a 7B, next to reading, Gram products and eigenvalues.

One matrix of each shape is measured, and counted as often as a model has it.
"""

from pathlib import Path

import numpy as np

import weightscope as ws
from benchmarks.commands import Cost, timed
from benchmarks.results import Measured, before_row
from benchmarks.synthetic import Sizes
from weightscope.core.compute import lapack
from weightscope.core.compute.cores import in_threads, usable_cores
from weightscope.heads.tensors.matrices import measured_rows

LAYER = "model.layers.0."
A_LAYER = {"self_attn.q_proj": 4, "mlp.up_proj": 2, "mlp.down_proj": 1}  # how many of its shape a layer has
SAME_ALPHA = 1e-3


def eigenvalues(model: ws.Model, name: str) -> None:
    """Read a matrix, and find the eigenvalues of its smaller Gram matrix in float64."""
    w = model.checkpoint[name].read().astype(np.float64)  # (m, n)
    lapack.symmetric_eigenvalues(w.T @ w if w.shape[0] > w.shape[1] else w @ w.T)


def floor_of(folder: Path, sizes: Sizes) -> Cost:
    """The floor of all matrices of a model, from one of each shape on every core."""
    model, cores = ws.open_model(folder), usable_cores()
    counts = {f"{LAYER}{name}.weight": sizes.layers * count for name, count in A_LAYER.items()}
    if sizes.vocabulary > sizes.width:
        counts["lm_head.weight"] = 2
    wall = cpu = 0.0
    for name, count in counts.items():
        same = [name] * cores
        cost = timed(lambda same=same: [*in_threads(lambda one: eigenvalues(model, one), same)]).times(count / cores)
        wall, cpu = wall + cost.wall, cpu + cost.cpu
    return Cost(wall, cpu)


def exact(folder: Path) -> Measured:
    """All singular values of one matrix of each shape, against the floor of these."""
    model, began = ws.open_model(folder), before_row()
    tensors = model.tensors
    named = [tensors[f"layer 0 {role}"] for role in ("q", "up", "down")]
    least = timed(lambda: [*in_threads(lambda one: eigenvalues(model, one.name), named)])
    ours = timed(lambda: measured_rows(model.checkpoint, tensors, named, exact=True))
    name = "all singular values of a matrix of each shape of a 7B"
    return Measured.of(name, [ours], [least], "reading, Gram products and eigenvalues", **began)
