"""An audit: every attention head of a checkpoint measured from the weights alone, and what stands out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from weightscope.attention.layer import Layer
from weightscope.audits.coverage import attention_only, other_stacks, tensors_of_heads
from weightscope.audits.directions import HeadDirections, directions_of, how_many_read, with_tokens
from weightscope.audits.findings import Findings
from weightscope.audits.measure import Arrays, measure_layer
from weightscope.audits.measures import MeasuredHeads
from weightscope.audits.model_findings import findings_of, positions_of
from weightscope.audits.reference import OWN, Reference
from weightscope.audits.roles import Roles, roles_of, with_roles
from weightscope.audits.standing import Standing
from weightscope.audits.tensor_findings import tensor_findings
from weightscope.audits.tensors import Everything, read_everything
from weightscope.device import open_device
from weightscope.errors import CheckpointError, counted, printable
from weightscope.folder import Files, OutputFolder
from weightscope.model import Model
from weightscope.notebook import notebook
from weightscope.parallel import one_blas_thread
from weightscope.progress import bar, progress_shown
from weightscope.tables import Column, Table, as_json

LONGEST_WINDOW = 131_072  # distances: each is turned and summed by itself, and no model was trained on longer texts
MOST_DELTAS = 256  # distances, each with spectra of its own for every head
SUMMED_UP = ("qk_sigma1", "qk_effective_rank", "vo_sigma1", "vo_copying_score")  # measures that stand for a checkpoint

RESULTS = (
    "heads.csv", "percentiles.csv", "findings.csv", "findings.json", "spectra.npz", "directions.json", "report.html",
    "spectra.csv",
    *(f"{figure}.{kind}" for figure in ("heads", "spectra", "depth") for kind in ("png", "svg")),
)  # fmt: skip


@dataclass(frozen=True)
class AuditOptions:
    """What may be asked of an audit; see `audit`."""

    layers: tuple[int, ...] | None = None
    deltas: tuple[int, ...] = (0, 1)
    window: int = 64
    directions: int | None = None
    device: str = "cpu"
    all_tensors: bool = False
    reference: str | None = None

    def __post_init__(self) -> None:
        if self.layers == ():
            raise CheckpointError("layers is empty: there is nothing to audit")
        if not 1 <= self.window <= LONGEST_WINDOW:
            problem = f"window is {self.window}; an average is of 1 to {LONGEST_WINDOW} distances"
            raise CheckpointError(problem)
        if len(self.deltas) > MOST_DELTAS:
            raise CheckpointError(f"deltas are {len(self.deltas)} distances; at most {MOST_DELTAS} are measured")
        if self.directions is not None and self.directions < 0:
            raise CheckpointError(f"directions is {self.directions}; it is how many to read")
        if self.reference is not None:
            Reference.load(self.reference)  # refused before the work, not after it

    def layers_of(self, model: Model) -> list[int]:
        """The layers to measure."""
        return list(model.attention_layers if self.layers is None else self.layers)


def audit(
    model: Model,
    layers: Sequence[int] | None = None,
    deltas: Sequence[int] = (0, 1),
    window: int = 64,
    directions: int | None = None,
    device: str = "cpu",
    all_tensors: bool = False,
    reference: str | Path | None = None,
    progress: bool = False,
) -> "Audit":
    """Measure every head, and say what stands out.

    Memory grows with one layer's attention tensors, not with the model. Values that are not finite are no error: they
    reach the heads they belong to, as NaN, and are a finding.

    Parameters
    ----------
    model : Model
    layers : sequence of int, optional
        Only these; all that have attention by default.
    deltas : sequence of int
        Distances i - j at which a rotated W_QK is measured; 0 always is.
    window : int
        Distances 0 .. window - 1 over which a rotated W_QK is averaged.
    directions : int, optional
        Singular directions of each map to read through the tokens; by default two where that takes seconds, else none.
    device : {"cpu", "cuda"}
        Where Gram matrices and other products of whole factors are computed.
    all_tensors : bool
        Read every tensor of the checkpoint too, attention or not; see `read_everything`.
    reference : path, optional
        What the heads are compared with, as `weightscope reference` writes it; by default what comes with the package.
    progress : bool
        Show a bar.

    Raises
    ------
    CheckpointError
        An argument makes no sense, there is no such layer, or its tensors are missing or misshapen.

    Examples
    --------
    >>> import weightscope as ws
    >>> audit = ws.audit(ws.open_model("embedded"), directions=0)
    >>> audit
    Audit(embedded: 2 layers of 8 heads, 2 findings)
    >>> audit.heads["qk_sigma1"].shape
    (16,)
    """
    options = AuditOptions(
        None if layers is None else tuple(layers),
        tuple(deltas),
        window,
        directions,
        device,
        all_tensors,
        None if reference is None else str(reference),
    )
    with progress_shown(progress):
        indices = options.layers_of(model)
        steps = bar(pairwise((*indices, None)), "layers", "layer", total=len(indices))
        measured = {index: measure_task(lambda: model, index, options, following) for index, following in steps}
        return conclude(model, measured, options)


def measure_task(
    get_model: Callable[[], Model], index: int, options: AuditOptions, following: int | None = None
) -> dict[str, np.ndarray]:
    """The task an audit consists of: one layer of one checkpoint, read and measured.

    The layer `following` it here comes to this machine, from a server or from its disk, while this one is measured.
    """
    model = get_model()
    with one_blas_thread():
        unchecked = model.unchecked()  # a copy, because a model keeps the last layer it was asked for
        layer = unchecked.layer(index)
        with fetching(model, following):
            directions = how_many_read(model, options.layers_of(model), options.directions)
            measured = measured_layer(layer, measured_forms(model, options), options, directions)
        return measured | {"broken": np.array(sorted(unchecked.checkpoint.noted or ()), dtype=str)}


@contextmanager
def fetching(model: Model, index: int | None) -> Iterator[None]:
    """A layer's tensors are brought to this machine while the block runs; what goes wrong is said when it is read."""

    if index is None:
        yield
        return

    def fetch(index: int) -> None:
        with suppress(CheckpointError):
            model.checkpoint.prefetch(tensor.name for tensor in model.attention_tensors(index))

    thread = Thread(target=fetch, args=(index,), daemon=True)
    thread.start()
    yield
    thread.join()


def measured_layer(
    layer: Layer, forms: Sequence[str], options: AuditOptions, directions: int = 0
) -> dict[str, np.ndarray]:
    """All that an audit keeps of a layer."""
    between = layer.qk_forms(options.deltas, options.window)
    return measure_layer(layer, {form: between[form] for form in forms}, open_device(options.device), directions)


def measured_forms(model: Model, options: AuditOptions) -> list[str]:
    """The forms of W_QK that are measured beside W_QK itself: those in which it differs in some layer of the model."""
    rotations = [rotation for rotation in model.rotations.values() if rotation is not None]
    if not rotations:
        return []
    partly = any(len(rotation.turning) < model.config.head_dim for rotation in rotations)
    distances = [f"delta{delta}" for delta in options.deltas if delta]
    return [*distances, f"mean{options.window}", *(["free", "turning"] if partly else [])]


def conclude(model: Model, layers: Mapping[int, Arrays], options: AuditOptions) -> "Audit":
    """What stands out in layers that have been measured, and the tokens along their heads' directions."""
    unchecked = model.unchecked()  # the embeddings too may hold a NaN, which is a finding, not the end
    heads = MeasuredHeads(layers, model.config.d_model)
    indices = heads.layers.tolist()
    with one_blas_thread():
        directions, notes = directions_of(unchecked, heads, options.directions)
        notes += tuple(filter(None, positions_of(unchecked)[1:]))
        notes = tuple(filter(None, (model.checkpoint.note, other_stacks(model), *notes)))
        findings = with_tokens(findings_of(unchecked, heads), directions)
    roles = roles_of(model)
    everything = read_everything(model.checkpoint) if options.all_tensors else None
    if everything is not None:
        padding = model.config.get("pad_token_id")
        judged = tensors_of_heads(unchecked, indices)
        judged += [member.name for one in findings for member in one.members if member.what == "tensor"]
        findings = Findings([*findings, *tensor_findings(everything, judged, padding)])
    findings = with_roles(findings, roles)
    read = tensors_of_heads(unchecked, indices, bool(directions))
    only = attention_only(model.checkpoint, read, ", embeddings included")
    coverage = only if everything is None else everything.lead
    standing = Standing(model, heads, Reference.load(options.reference or OWN))
    return Audit(
        model.name,
        model.family.called,
        model.config.d_model,
        heads,
        findings,
        directions,
        notes,
        standing,
        coverage,
        everything,
        roles,
    )


@dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """What an audit says of a checkpoint. A notebook shows it as a table, `print` as the command does.

    Attributes
    ----------
    name, family : str
        Of the checkpoint.
    d_model : int
    measured : MeasuredHeads
        Measures by layer and head, and the spectra.
    findings : Findings
        A list, the gravest first.
    directions : list of HeadDirections
        The tokens along every head's first singular directions; empty where no tokens were read.
    notes : tuple of str
        What was left out, and why, in sentences.
    standing : Standing
        Where the heads stand among those of other checkpoints.
    coverage : str
        How much of the checkpoint was read, in a sentence.
    everything : Everything or None
        All tensors, attention or not, where that was asked for.
    roles : dict of str
        What heads are called, by layer and head; see `roles_of`.
    """

    name: str
    family: str
    d_model: int
    measured: MeasuredHeads
    findings: Findings
    directions: list[HeadDirections]
    notes: tuple[str, ...]
    standing: Standing
    coverage: str = ""
    everything: Everything | None = None
    roles: Roles = field(default_factory=dict)

    @property
    def heads(self) -> Table:
        """A row a head: layer, head, kv_head, and every measure; its csv() is heads.csv."""
        return self.measured.table

    @property
    def percentiles(self) -> Table:
        """A row a head: where it stands in each measure among the heads of other checkpoints; see `Reference`."""
        return self.standing.table

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the numbers leave out of the heads' scores."""
        return self.measured.caveats

    @property
    def lead(self) -> str:
        """What was looked at, what was found and what was left out, in a few sentences."""
        heads = self.measured
        n_kv = int(self.heads["kv_head"].max()) + 1
        kv = f", {n_kv} key-value heads" if n_kv != heads.n_heads else ""
        routes = [*self.heads["qk_route"], *self.heads["vo_route"]]
        by_qr = [f"{routes.count('qr')} of {len(routes)} spectra took the accurate QR route."] if "qr" in routes else []
        sizes = f"{counted(len(heads.layers), 'layer')} of {counted(heads.n_heads, 'head')}{kv}, width {self.d_model}."
        read = [self.coverage] if self.coverage else []
        return " ".join([f"{self.family}, {sizes}", *read, self.findings.headline, *by_qr, *self.notes])

    def __repr__(self) -> str:
        heads = self.measured
        sizes = f"{counted(len(heads.layers), 'layer')} of {counted(heads.n_heads, 'head')}"
        return f"Audit({printable(self.name)}: {sizes}, {counted(len(self.findings), 'finding')})"

    def __str__(self) -> str:
        caveats = [f"not in these numbers: {caveat}" for caveat in self.caveats]
        return "\n".join([self.lead, *([repr(self.findings)] if self.findings else []), self.ranges().text(), *caveats])

    def _repr_html_(self) -> str:
        mapped = [measure.name for measure in self.measured.measures if measure.scale]
        heads = self.heads.select("layer", "head", *mapped)
        return notebook(self.lead, self.findings, heads)

    def ranges(self) -> Table:
        """Where the heads lie in the measures that sum a checkpoint up."""
        rows = []
        for measure in self.measured.measures:
            values = self.heads[measure.name]
            if measure.name in SUMMED_UP and np.isfinite(values).any():
                rows.append((measure.label, *np.percentile(values[np.isfinite(values)], (5, 50, 95))))
        return Table.of_rows(["measure", *(Column(name, format=".3g") for name in ("5 %", "median", "95 %"))], rows)

    def summary(self) -> dict[str, str | int | float]:
        """The checkpoint in a row of numbers: its sizes, how many findings, medians over its heads."""
        medians = {name: self.heads[name][np.isfinite(self.heads[name])] for name in SUMMED_UP}
        return {
            "family": self.family,
            "layers": len(self.measured.layers),
            "heads": self.measured.n_heads,
            "d_model": self.d_model,
            "findings": len(self.findings),
            **{f"{severity}s": count for severity, count in self.findings.severities.items()},
            **{name: float(np.median(known)) if len(known) else np.nan for name, known in medians.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """The whole result as `weightscope audit --json` prints it; NaN as null."""
        said = {name: getattr(self, name) for name in ("name", "lead", "caveats", "notes", "coverage")}
        every = {} if self.everything is None else {"tensors": self.everything.table.records()}
        whole = (
            said
            | every
            | {"summary": self.summary(), "findings": self.findings.as_json(), "heads": self.heads.records()}
        )
        return dict(as_json(whole))

    def write(self, out: str | Path) -> None:
        """Write tables, figures and report.html into a folder, as `weightscope audit` does.

        Raises
        ------
        CheckpointError
            It cannot be written to, or another run is writing into it.
        """
        with OutputFolder(Path(out), names=RESULTS) as folder:
            self.write_report(folder)
            self.write_tables(folder)

    def write_tables(self, files: Files) -> None:
        """Write the tables: heads, findings, spectra; directions, and those of all tensors, where they were read."""
        files.table("heads.csv", self.heads)
        files.table("percentiles.csv", self.percentiles)
        files.table("findings.csv", self.findings.table)
        files.npz("spectra.npz", **self.measured.spectra())
        files.json("findings.json", self.findings.as_json())
        if self.everything is not None:
            self.everything.write(files)
        if self.directions:
            files.json("directions.json", [one.as_json() for one in self.directions])

    def write_report(self, files: Files) -> None:
        """Write the figures heads, spectra and depth as PNG and SVG, and report.html."""
        from weightscope.audits.page import write_audit_page

        write_audit_page(files, self)

    def plot(self) -> Any:
        """Layers against heads, a heat map a measure: a matplotlib Figure."""
        from weightscope.audits.figures import head_maps

        return head_maps(self.measured)
