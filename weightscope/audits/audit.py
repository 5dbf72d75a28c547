"""`weightscope audit`: what every attention head of a checkpoint is, layer by layer, from the weights alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from weightscope.attention.layer import Layer
from weightscope.audits.directions import DEFAULT, HeadDirections, can_read_directions, read_directions, token_names
from weightscope.audits.finding import Finding, as_json, in_order
from weightscope.audits.finished_layers import FinishedLayers
from weightscope.audits.head_findings import MAPS, SHARE_THAT_EXPLAINS, Heads, head_findings
from weightscope.audits.head_table import head_columns, middle_names
from weightscope.audits.layer_measures import measure_layer
from weightscope.audits.lenient import lenient
from weightscope.audits.middles import middles
from weightscope.audits.model_findings import (
    broken_tensors,
    duplicates,
    embedding_rows,
    outlier_dimensions,
    outlier_gains,
)
from weightscope.device import open_device
from weightscope.errors import CheckpointError
from weightscope.fingerprint import Fingerprint
from weightscope.folder import remove_earlier, write_csv, write_json, write_npz
from weightscope.model import Model
from weightscope.parallel import one_blas_thread
from weightscope.progress import PROGRESS

OPTIONAL_RESULTS = r"directions\.json"  # of an audit's results


@dataclass(frozen=True)
class AuditOptions:
    """What may be asked of an audit.

    Attributes
    ----------
    layers : tuple of int, or None
        Only these; None for all that have attention.
    deltas : tuple of int
        Distances i - j at which a rotated W_QK is measured; 0 always is.
    window : int
        Distances 0 .. window - 1 over which a rotated W_QK is averaged.
    directions : int or None
        Singular directions of each map to read through the tokens; None for two where that takes seconds, else none.
    device : str
        Where Gram matrices and other products of whole factors are computed; see `open_device`.
    """

    layers: tuple[int, ...] | None = None
    deltas: tuple[int, ...] = (0, 1)
    window: int = 64
    directions: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Measured:
    """The heads of a checkpoint as numbers.

    Attributes
    ----------
    layers : (L,) int array
    kv_heads : (H,) int array
        The key-value head each query head reads.
    measured : dict of (L, H, ...) arrays, and (L, d) for qk_column_share
        Spectra and sketches; where layers differ in width the shorter are filled with NaN.
    columns : dict of (L, H) arrays
        The measures of heads.csv.
    caveats : tuple of str
        What the matrices leave out of the heads' scores.
    """

    layers: np.ndarray
    kv_heads: np.ndarray
    measured: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    caveats: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """An audit's results.

    Attributes
    ----------
    heads : Measured
    findings : list of Finding
        The gravest first.
    directions : list of HeadDirections
        Empty where no tokens were read.
    notes : tuple of str
        What was left out, and why.
    """

    heads: Measured
    findings: list[Finding]
    directions: list[HeadDirections]
    notes: tuple[str, ...]


def audit(model: Model, out: Path, options: AuditOptions, resume: bool = False) -> Audit:
    """Measure every head, and say what stands out.

    Each layer is kept on disk, within `out`, as soon as it is finished. Memory grows with
    one layer's attention tensors, not with the model.

    Parameters
    ----------
    model : Model
    out : Path
        Where the work in progress lies; see `write_audit` for the results.
    options : AuditOptions
    resume : bool
        Go on with an earlier run of the same audit.

    Raises
    ------
    CheckpointError
        A layer's tensors are missing or misshapen, `out` cannot be written to, or another audit is at work there.
        Values that are not finite are no error here: they reach the heads they belong to, as NaN.
    """
    return conclude(model, measure(model, out, options, resume), options)


def measure(model: Model, out: Path, options: AuditOptions, resume: bool) -> Measured:
    """The spectra and measures of every head, layer by layer; see `audit`."""
    work = LayersToMeasure(model, out, options, resume)
    for index in tqdm(list(work.left), desc="layers", unit="layer", **PROGRESS):
        work.put(index, measure_one(lambda: model, index, options))
    return work.heads()


class LayersToMeasure:
    """The layers of an audit: which are to be measured still, and what was measured of the others.

    Parameters
    ----------
    model, out, options, resume
        As in `audit`.

    Attributes
    ----------
    left : list of int
        Layers that are not measured yet.
    notice : str or None
        As in `FinishedLayers`.
    """

    def __init__(self, model: Model, out: Path, options: AuditOptions, resume: bool) -> None:
        self._model = model
        self._layers = list(model.attention_layers if options.layers is None else options.layers)
        self._finished = FinishedLayers(out, layers_fingerprint(model, options), resume)
        self.notice = self._finished.notice
        self.left = [index for index in self._layers if index not in self._finished]

    def put(self, index: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep what was measured of a layer."""
        self._finished.put(index, measured)
        self.left.remove(index)

    def clear(self) -> None:
        """Throw away what is kept of the layers, once the results stand."""
        self._finished.clear()

    def heads(self) -> Measured:
        """All of them as one, once none is left.

        Raises
        ------
        CheckpointError
            One that was finished is not there any more.
        """
        found = []
        for index in self._layers:
            layer = self._finished.get(index)
            if layer is None:  # where a folder could not be locked
                problem = f"layer {index} was finished, and another audit of this folder has taken it away since"
                raise CheckpointError(f"{problem}; run one at a time (--resume goes on)", file=self._finished.folder)
            found.append(layer)
        return gather(self._model, self._layers, found)


def measure_one(opened: Callable[[], Model], index: int, options: AuditOptions) -> dict[str, np.ndarray]:
    """The task an audit consists of: one layer of one checkpoint, read and described."""
    model = opened()
    model.checkpoint.prefetch(tensor.name for tensor in model.attention_tensors(index))
    with one_blas_thread():
        layer = lenient(model).layer(index)  # of a copy, because a model keeps the last layer it was asked for
        return describe_layer(layer, options)


def conclude(model: Model, heads: Measured, options: AuditOptions) -> Audit:
    """What stands out in heads that have been measured, and the tokens along their directions."""
    unchecked = lenient(model)  # the embeddings too may hold a NaN, which is a finding, not the end
    layers = heads.layers.tolist()
    with one_blas_thread():
        why_not = can_read_directions(unchecked, layers, options.directions)
        directions: list[HeadDirections] = []
        if why_not is None:
            text = token_names(model.checkpoint.folder)
            directions = read_directions(unchecked, layers, options.directions or DEFAULT, text)
        return Audit(heads, findings(unchecked, heads), directions, () if why_not is None else (why_not,))


def gather(model: Model, layers: Sequence[int], found: Sequence[Mapping[str, np.ndarray]]) -> Measured:
    """What `describe_layer` found of each layer, as one."""
    caveats = tuple(dict.fromkeys(str(caveat) for layer in found for caveat in layer["caveats"]))
    names = [name for name in found[0] if name not in {"caveats", "kv_head"}]
    stacked = {name: stack_padded([layer[name] for layer in found]) for name in names}
    columns = head_columns(stacked, model.config.d_model)
    return Measured(np.array(layers), found[0]["kv_head"], stacked, columns, caveats)


def findings(model: Model, found: Measured) -> list[Finding]:
    """Everything about a model's heads that a person should look at; nothing in a fresh initialisation."""
    layers = found.layers.tolist()
    dimensions = list(outlier_dimensions(layers, found.measured["qk_column_share"]))
    explained = frozenset(layers.index(f.layer) for f in dimensions if f.number >= SHARE_THAT_EXPLAINS)
    spectra = {name: found.measured[f"{name}_singular_values"] for name in MAPS}
    return in_order(
        [
            *broken_tensors(model, layers, found.columns),
            *head_findings(Heads(found.layers, found.columns, spectra, explained)),
            *duplicates(model, layers, found.measured),
            *dimensions,
            *outlier_gains(model, layers),
            *embedding_rows(model),
        ]
    )


def describe_layer(layer: Layer, options: AuditOptions) -> dict[str, np.ndarray]:
    """All that an audit keeps of a layer; it depends on the layer's tensors and the options alone."""
    heads = layer.heads()
    caveats = list(dict.fromkeys(caveat for head in heads for caveat in head.caveats))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN weights make NaN measures, and a finding of their own
        measured = measure_layer(layer, middles(layer, options.deltas, options.window), open_device(options.device))
    return measured | {"kv_head": np.array([head.kv_head for head in heads]), "caveats": np.array(caveats, dtype=str)}


def layers_fingerprint(model: Model, options: AuditOptions) -> Fingerprint:
    """Everything that the numbers of a layer depend on, to tell whether finished ones may be used again."""
    return Fingerprint.of_model(
        model,
        layers=list(model.attention_layers if options.layers is None else options.layers),
        deltas=list(options.deltas),
        window=options.window,
        device=options.device,
    )


def stack_padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one rank as one, the smaller filled with NaN at their ends: L of (H, r) -> (L, H, r)."""
    shape = np.max([array.shape for array in arrays], axis=0)
    if all(array.shape == tuple(shape) for array in arrays):
        return np.stack(arrays)
    whole = np.full((len(arrays), *shape), np.nan, arrays[0].dtype)
    for i, array in enumerate(arrays):
        whole[i][tuple(slice(n) for n in array.shape)] = array
    return whole


def write_audit(results: Audit, out: Path) -> None:
    """Write heads.csv (one row a head), spectra.npz, findings.json, and directions.json where tokens were read."""
    found = results.heads
    n_layers, n_heads = found.columns["qk_sigma1"].shape
    remove_earlier(out, OPTIONAL_RESULTS)
    write_csv(
        out / "heads.csv",
        ["layer", "head", "kv_head", *found.columns],
        (
            [int(found.layers[i]), h, int(found.kv_heads[h]), *(column[i, h] for column in found.columns.values())]
            for i in range(n_layers)
            for h in range(n_heads)
        ),
    )
    write_npz(out / "spectra.npz", layers=found.layers, **spectra_arrays(found.measured))
    write_json(out / "findings.json", as_json(results.findings))
    if results.directions:
        write_json(out / "directions.json", [one.as_json() for one in results.directions])


def spectra_arrays(measured: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What spectra.npz holds beside the layers' indices."""
    names = ["qk_singular_values", *(f"qk_singular_values_{name}" for name in middle_names(measured))]
    names += ["vo_singular_values", "vo_affine_singular_values", "vo_eigenvalues", "qk_symmetric_eigenvalues"]
    return {name: measured[name] for name in [*names, "qk_column_share"]}
