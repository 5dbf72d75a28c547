"""`weightscope compare`: how every head moves between checkpoints of one architecture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from weightscope.attention.layer import Head, Layer
from weightscope.audits.audit import AuditOptions, Measured, describe_layer, gather, spectra_arrays
from weightscope.audits.lenient import lenient
from weightscope.errors import CheckpointError
from weightscope.folder import write_csv, write_npz
from weightscope.metrics.change import relative_change, space_angles
from weightscope.model import Model
from weightscope.parallel import in_threads
from weightscope.progress import PROGRESS


@dataclass(frozen=True)
class Comparison:
    """The heads of several checkpoints, in order.

    Attributes
    ----------
    labels : list of str
        One a checkpoint.
    heads : list of Measured
    from_first, from_previous : dicts of (n - 1, L, H) arrays
        qk_change and vo_change, |B - A|_F / |A|_F, and the principal angles of their spaces in radians, from the first
        and from the previous checkpoint to each later one.
    """

    labels: list[str]
    heads: list[Measured]
    from_first: dict[str, np.ndarray]
    from_previous: dict[str, np.ndarray]


def compare(models: Sequence[Model], labels: Sequence[str]) -> Comparison:
    """Measure every head of every checkpoint, and how far it moved.

    Memory grows with three layers: the first checkpoint's, the previous one's and the current one's.

    Parameters
    ----------
    models : sequence of Model
        At least two, of the same shape.
    labels : sequence of str

    Raises
    ------
    CheckpointError
        They differ in layers, heads or widths, or a tensor cannot be read.
    """
    for model, label in zip(models[1:], labels[1:], strict=True):
        _same_shape(models[0], labels[0], model, label)
    unchecked = [lenient(model) for model in models]
    layers = list(models[0].attention_layers)
    measured: list[list[dict[str, np.ndarray]]] = [[] for _ in models]
    first_changes: list[list[dict[str, np.ndarray]]] = [[] for _ in models[1:]]
    previous_changes: list[list[dict[str, np.ndarray]]] = [[] for _ in models[1:]]
    for index in tqdm(layers, desc="layers", unit="layer", **PROGRESS):
        first = previous = unchecked[0].layer(index)
        measured[0].append(describe_layer(first, AuditOptions()))
        for k, model in enumerate(unchecked[1:]):
            current = model.layer(index)
            measured[k + 1].append(describe_layer(current, AuditOptions()))
            change = layer_changes(first, current)
            first_changes[k].append(change)
            previous_changes[k].append(change if previous is first else layer_changes(previous, current))
            previous = current
    return Comparison(
        list(labels),
        [gather(model, layers, own) for model, own in zip(models, measured, strict=True)],
        _stacked(first_changes),
        _stacked(previous_changes),
    )


def layer_changes(a: Layer, b: Layer) -> dict[str, np.ndarray]:
    """How far every head of a layer moved: (H,) arrays, qk_change, qk_left_angle ... vo_right_angle_mean."""
    with np.errstate(invalid="ignore"):
        heads = list(in_threads(lambda h: _head_change(a.head(h), b.head(h)), range(a.n_heads)))
    return {name: np.array([head[name] for head in heads]) for name in heads[0]}


def _head_change(a: Head, b: Head) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, before, after in (("qk", a.qk, b.qk), ("vo", a.vo, b.vo)):
        found[f"{name}_change"] = relative_change(before, after)
        found |= {f"{name}_{angle}": value for angle, value in space_angles(before, after).items()}
    return found


def _stacked(changes: list[list[dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Lists by checkpoint and layer as (n - 1, L, H) arrays by name."""
    names = changes[0][0]
    return {name: np.array([[layer[name] for layer in own] for own in changes]) for name in names}


def _same_shape(one: Model, one_label: str, other: Model, other_label: str) -> None:
    sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")
    for size in sizes:
        a, b = getattr(one.config, size), getattr(other.config, size)
        if a != b:
            raise CheckpointError(
                f"{one_label} has {size} {a}, {other_label} has {b}; checkpoints of one shape compare"
            )


def write_comparison(found: Comparison, out: Path) -> None:
    """Write heads.csv, trajectory.csv and spectra.npz.

    heads.csv has one row a head: the change from the first checkpoint to the last and the measures of both; the heads
    that moved most come first. trajectory.csv has one row a checkpoint and head: every measure, and the change from
    the first and from the previous checkpoint. spectra.npz has the singular values of all, checkpoints first.
    """
    first, last = found.heads[0], found.heads[-1]
    n_layers, n_heads = first.columns["qk_sigma1"].shape
    changes = {name: values[-1] for name, values in found.from_first.items()}
    measures = [name for name, column in first.columns.items() if column.dtype.kind == "f"]
    write_csv(
        out / "heads.csv",
        ["layer", "head", *changes, *(f"{name}_{which}" for name in measures for which in ("a", "b"))],
        (
            [int(first.layers[i]), h, *(change[i, h] for change in changes.values())]
            + [heads.columns[name][i, h] for name in measures for heads in (first, last)]
            for i, h in most_moved(found)
        ),
    )
    since = [f"{name}_from_{which}" for name in changes for which in ("first", "previous")]
    write_csv(
        out / "trajectory.csv",
        ["checkpoint", "layer", "head", *since, *measures],
        (
            [found.labels[k], int(first.layers[i]), h]
            + [c[name][k - 1, i, h] if k else 0.0 for name in changes for c in (found.from_first, found.from_previous)]
            + [heads.columns[name][i, h] for name in measures]
            for k, heads in enumerate(found.heads)
            for i in range(n_layers)
            for h in range(n_heads)
        ),
    )
    spectra = [spectra_arrays(heads.measured) for heads in found.heads]
    write_npz(
        out / "spectra.npz", layers=first.layers, **{name: np.stack([s[name] for s in spectra]) for name in spectra[0]}
    )


def most_moved(found: Comparison) -> list[tuple[int, int]]:
    """Every head by (layer index, head), the one with the largest change of either map first; unknown ones last."""
    largest = np.fmax(found.from_first["qk_change"][-1], found.from_first["vo_change"][-1])  # (L, H)
    order = np.argsort(-np.nan_to_num(largest, nan=-1.0, posinf=1e308), axis=None, kind="stable")
    return [(int(i), int(h)) for i, h in zip(*np.unravel_index(order, largest.shape), strict=True)]
