"""Measure every attention head of a checkpoint from its weights, and report what stands out."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import one_blas_thread
from weightscope.core.compute.device import open_device
from weightscope.core.errors import CheckpointError, counted, printable, sized, wholes
from weightscope.core.files import HIDDEN, REPORT, OutputFolder
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import Result, holds_arrays
from weightscope.core.tables import Column, Table, as_json
from weightscope.heads.audit.directions import (
    HeadDirections,
    directions_of,
    how_many_read,
    with_tokens,
)
from weightscope.heads.audit.findings import (
    broken_mixers,
    findings_of,
    outlier_dimension,
    positions_of,
    with_roles,
)
from weightscope.heads.audit.known_findings import Entry, read_entries, unmatched, with_known
from weightscope.heads.audit.measure import UNSCALED, Arrays, MeasuredHeads, measure_layer
from weightscope.heads.audit.mixers import FIXED, MeasuredMixers, measured_mixers
from weightscope.heads.audit.reference import OWN, ComparableMatrices, Reference, Standing
from weightscope.heads.audit.removed_directions import Removed, removed_directions, removed_findings
from weightscope.heads.circuits.names import (
    FirstTokenSinks,
    Roles,
    affordable_names,
    first_token_sinks,
)
from weightscope.heads.tensors.findings import (
    beside_findings,
    name_findings,
    other_gains,
    tensor_findings,
    zero_tensor,
)
from weightscope.heads.tensors.matrices import Matrices, read_matrices
from weightscope.heads.tensors.untrained_parts import untrained_parts
from weightscope.heads.tensors.unused_neurons import network_findings
from weightscope.model.layers.kernel import FAST, NEAR
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.logits import LogitBounds
from weightscope.model.metrics.sinks import EVENT_WEIGHT, MECHANISMS, Massive
from weightscope.model.model import Model, as_model, distinct
from weightscope.report.findings import Finding, Findings, indexed

END = -1  # in place of a layer after the last one: tensors that are read after the layers
BASELINE = "findings.csv"  # in the folder of an earlier audit
LONGEST_WINDOW = 131_072  # distances, each rotated by itself; no model was trained on longer texts
ALL_PAIRS = 4e11  # multiply-adds of the scores of all pairs of tokens in layer 0: a few seconds
A_SCORE = 64  # multiply-adds in the time that a score takes besides its products
MOST_DELTAS = 256  # distances, each with spectra of its own for every head
# measures that summarise a checkpoint
FIRST_NUMBERS = {  # measures whose largest value an audit begins with
    "qk_sigma1": "largest singular value of W_QK",
    "qk_logit_bound": "largest bound on a logit",
}
SUMMARY = ("qk_sigma1", "qk_effective_rank", "vo_sigma1", "vo_copying_score")

# figures: a function of figures.py, the file with the numbers, and a description
FIGURES = {
    "heads": ("head_maps", "heads.csv", "six measures of every head"),
    "spectra": ("spectra", "spectra.csv", "singular values of every head"),
    "depth": ("depth", "heads.csv", "measures by depth"),
}
TABLES: dict[str, Callable[["Audit"], Any]] = {
    "heads.csv": lambda audit: audit.heads,
    "percentiles.csv": lambda audit: audit.percentiles,
    "findings.csv": lambda audit: audit.findings.table,
    "spectra.npz": lambda audit: audit.measured.spectra(),
    "findings.json": lambda audit: audit.findings.as_json(),
    "directions.json": lambda audit: [head.as_json() for head in audit.directions] or None,
    "matrices.csv": lambda audit: None if audit.everything is None else audit.everything.table,
    "mixers.csv": lambda audit: audit.of_mixers,
}
RESULTS = (
    *TABLES,
    *REPORT,
    "spectra.csv",
    *(f"{name}.{kind}" for name in (*FIGURES, "matrices", "mixers") for kind in ("png", "svg")),
)


@dataclass(frozen=True)
class AuditOptions:
    """The options of an audit; see `audit`."""

    layers: Sequence[int] | None = None
    deltas: Sequence[int] = (0, 1)
    window: int = 64
    directions: int | None = None
    device: str = "cpu"
    all_tensors: bool = False
    reference: str | Path | None = None
    baseline: str | Path | None = None
    accept: str | Path | None = None
    sinks: bool | None = None
    exact: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {"deltas": wholes(self.deltas, "deltas")}
        if self.layers is not None:
            plain["layers"] = wholes(self.layers, "layers")
        for name in ("reference", "baseline", "accept"):
            if getattr(self, name) is not None:
                plain[name] = str(getattr(self, name))
        for name, value in plain.items():  # values that compare, pickle and are written as JSON
            object.__setattr__(self, name, value)
        if self.layers == ():
            raise CheckpointError("layers is empty: there is nothing to audit")
        if not 1 <= self.window <= LONGEST_WINDOW:
            raise CheckpointError(
                f"window is {self.window}; an average is of 1 to {LONGEST_WINDOW} distances"
            )
        if len(self.deltas) > MOST_DELTAS:
            raise CheckpointError(
                f"deltas are {len(self.deltas)} distances; at most {MOST_DELTAS} are measured"
            )
        if self.clip is not None and not 0 < self.clip < np.inf:
            raise CheckpointError(
                f"clip is {self.clip}; it is the largest logit to allow, a number above 0"
            )
        if self.directions is not None and self.directions < 0:
            raise CheckpointError(f"directions is {self.directions}; it is how many to read")
        if self.reference is not None:
            Reference.load(self.reference)  # an unreadable one is refused before the work starts

    def of_folder(self, name: str) -> "AuditOptions":
        """Options for one audit of a list, with the baseline of this name if there is one."""
        if self.baseline is None:
            return self
        folder = Path(self.baseline)
        if (folder / name / BASELINE).is_file():
            return replace(self, baseline=folder / name)
        only_others = any(folder.glob(f"*/{BASELINE}")) and not (folder / BASELINE).is_file()
        return replace(self, baseline=None) if only_others else self

    @property
    def lists(self) -> dict[str, Path]:
        """The files of known findings."""
        lists = {}
        if self.baseline is not None:
            lists["baseline"] = Path(self.baseline) / BASELINE
        if self.accept is not None:
            lists["accept"] = Path(self.accept)
        return lists

    def entries(self) -> dict[str, list[Entry]]:
        """The known findings in each list; what somebody has accepted comes first."""
        lists, entries = self.lists, {}
        for name, why in (("accept", "accepted"), ("baseline", "in the baseline")):
            if name in lists:
                entries[name] = read_entries(lists[name], why)
        if self.baseline is not None and not OutputFolder(Path(self.baseline)).recorded(BASELINE):
            problem = f"does not match {HIDDEN}/manifest.json; copy the whole folder of an audit"
            problem += ", or give a list of your own as `accept`"
            raise CheckpointError(problem, file=lists["baseline"])
        return entries

    def layers_of(self, model: Model) -> list[int]:
        """The layers to measure."""
        return list(model.own_layers if self.layers is None else distinct(self.layers, model))


def audit(
    model: Model | str | Path,
    layers: Sequence[int] | None = None,
    deltas: Sequence[int] = (0, 1),
    window: int = 64,
    directions: int | None = None,
    device: str = "cpu",
    all_tensors: bool = False,
    reference: str | Path | None = None,
    progress: bool | None = None,
    baseline: str | Path | None = None,
    accept: str | Path | None = None,
    sinks: bool | None = None,
    exact: bool = False,
    clip: float | None = None,
) -> "Audit":
    """Measure every head, and report what stands out.

    Memory grows with one layer's attention tensors, not with the model. Values that are not finite
    are not an error: they make the measures of their heads NaN, and are a finding.

    Parameters
    ----------
    model : Model, str or Path
        A model, or what `open_model` opens.
    layers : sequence of int, optional
        Layers to measure; all that have attention by default.
    deltas : sequence of int
        Distances i - j at which a rotated W_QK is measured; 0 is always included.
    window : int
        Distances 0 .. window - 1 over which a rotated W_QK is averaged.
    directions : int, optional
        Singular directions of each map to read through the tokens; by default two where that takes
        seconds, else none.
    device : {"cpu", "cuda"}
        Where Gram matrices and other products of whole factors are computed.
    all_tensors : bool
        Also read every tensor of the checkpoint, attention or not; see `read_matrices`.
    reference : path, optional
        Other checkpoints to compare the heads with, a file that `weightscope reference` wrote; by
        default the one that comes with the package.
    progress : bool, optional
        Show a bar; by default in a notebook only.
    baseline : path, optional
        Folder of an earlier audit: its findings are marked as known, unless they are worse by a
        tenth.
    accept : path, optional
        A file of reviewed findings, also marked as known: findings.json or rows of findings.csv.
        Location cells may be left empty to match everything; `reason` may say why.
    sinks : bool, optional
        Follow random tokens through the feed-forward networks, and measure what heads do with the
        first token; by default where these are on this machine and have at most 2 GB.
    exact : bool
        With `all_tensors`, compute every spectrum in full; by default spectra of matrices whose
        smaller side is above 2,048 are sketches.
    clip : float, optional
        Largest logit tau that QK-Clip allows: heads get a column of the smallest factor by which it
        may multiply their scores.

    Raises
    ------
    CheckpointError
        An argument is invalid, a layer does not exist, or its tensors are missing or have the wrong
        shape.

    Examples
    --------
    >>> import weightscope as ws
    >>> audit = ws.audit("embedded", directions=0)
    >>> audit
    Audit(embedded: 4 layers of 6 heads, 5 findings)
    >>> audit.heads["qk_sigma1"].shape
    (24,)
    """
    opened = as_model(model)
    options = AuditOptions(
        layers, deltas, window, directions, device, all_tensors,
        reference, baseline, accept, sinks, exact, clip,
    )  # fmt: skip
    options.entries()  # read before the work starts
    with progress_shown(progress):
        indices, measured = options.layers_of(opened), {}
        steps = pairwise((*indices, END))
        for index, following in bar(steps, "layers", "layer", total=len(indices)):
            measured[index] = measure_task(lambda: opened, index, options, following)
        return conclude(opened, measured, options)


def measure_task(
    get_model: Callable[[], Model], index: int, options: AuditOptions, following: int | None = None
) -> dict[str, np.ndarray]:
    """The task that an audit consists of: read and measure one layer of one checkpoint.

    Meanwhile, what follows it in this process is fetched from a server or disk: a layer, or at the
    END the embeddings.
    """
    model = get_model()
    with one_blas_thread():
        unchecked = model.unchecked()  # a copy, because a model caches its last layer
        layer = unchecked.layer(index)
        directions = how_many_read(model, options.layers_of(model), options.directions)
        with model.checkpoint.prefetching(read_next(model, following, bool(directions))):
            forms, bounds = measured_forms(model, options), logit_bounds(unchecked, index)
            measured = measured_layer(layer, forms, options, directions, bounds)
            broken = sorted(unchecked.checkpoint.noted or ())  # before embeddings are read
            measured["qk_token_logit"] = token_logits(unchecked, index, bounds)
        return measured | {"broken": np.array(broken, dtype=str)}


def read_next(model: Model, index: int | None, tokens_read: bool) -> Iterator[str]:
    """Names of a layer's tensors or, at the END, of those read after the layers; lazy."""
    if index == END:
        yield from (*tensors_of_heads(model, (), tokens_read), *other_gains(model))
    elif index is not None:
        yield from (tensor.name for tensor in model.attention_tensors(index))


def logit_bounds(model: Model, index: int) -> LogitBounds:
    """The bounds on the logits of a layer's heads, for the sequences that a model takes."""
    return LogitBounds(model.normed_layer(index), model.config.n_positions)


def token_logits(model: Model, index: int, bounds: LogitBounds) -> np.ndarray:
    """Largest |score| of two tokens for each head (H,); NaN beyond layer 0 or if too costly."""
    unknown = np.full(model.config.n_heads, np.nan)
    try:
        if index != 0 or model.family.inputs.more or model.positions is not None:
            return unknown
        pair_cost = max(model.config.head_dim, A_SCORE)
        if model.embeddings.n_tokens**2 * model.config.n_heads * pair_cost > ALL_PAIRS:
            return unknown
        with np.errstate(invalid="ignore", over="ignore"):  # broken weights are a finding
            bounds = LogitBounds(model.layer(0), bounds.length)
            return bounds.of_tokens(model.ends.into_stream(model.embeddings.tokens))
    except CheckpointError:  # no token embedding, or positions that should be there
        return unknown


def measured_layer(
    layer: Layer,
    forms: Sequence[str],
    options: AuditOptions,
    directions: int = 0,
    bounds: LogitBounds | None = None,
) -> dict[str, np.ndarray]:
    """Everything that an audit keeps of a layer."""
    between = layer.qk_forms(options.deltas, options.window)
    device = open_device(options.device)
    return measure_layer(layer, {form: between[form] for form in forms}, device, directions, bounds)


def measured_forms(model: Model, options: AuditOptions) -> list[str]:
    """Forms of W_QK, besides itself, that differ from it in some layer of the model."""
    rotations = [rotation for rotation in model.rotations.values() if rotation is not None]
    if not rotations:
        return []
    partly = any(len(rotation.turning) < model.config.head_dim for rotation in rotations)
    distances = [f"delta{delta}" for delta in options.deltas if delta]
    return [*distances, f"mean{options.window}", *(["free", "turning"] if partly else [])]


def conclude(model: Model, layers: Mapping[int, Arrays], options: AuditOptions) -> "Audit":
    """Make the audit of layers that have been measured."""
    unchecked = model.unchecked()  # NaN in the embeddings is a finding, not an error
    sinks = first_token_sinks(model, list(layers), options.sinks)
    heads = MeasuredHeads(layers, model.config.d_model, sink_columns(sinks))
    if (clip := options.clip) is not None:
        factor = "The smallest factor by which QK-Clip may multiply scores to keep them below"
        gamma = clip / np.maximum(heads.table["qk_logit_bound"], clip)
        heads.append(Column("qk_clip", gamma, "γ", meaning=f"{factor} {clip:g}: min(1, τ/bound)."))
    standing = Standing(model, heads, Reference.load(options.reference or OWN))
    measured_layers = heads.layers.tolist()
    with one_blas_thread():
        directions, tokens_notes = directions_of(unchecked, heads, options.directions)
        findings = findings_of(unchecked, heads, standing)
        findings = with_tokens(with_massive(findings, sinks.massive), directions)
        removed, undecided = removed_directions(unchecked, measured_layers, options.all_tensors)
        subjects: list[Iterable[Finding]] = [
            removed_findings(unchecked, removed),
            beside_findings(model.checkpoint.weight_files),
            name_findings(model.checkpoint),
        ]
        if (mixers := measured_mixers(unchecked, options.layers)) is not None:
            subjects.append(broken_mixers(unchecked, mixers.broken))
        findings = Findings(chain(findings, *subjects))
    notes = (
        model.checkpoint.note,
        model.names_note,
        model.checkpoint.weight_files.sentence,
        f"The row of {model.unread}." if model.unread else "",
        other_stacks(model),
        model.sharing,
        *tokens_notes,
        *undecided,
        positions_of(unchecked)[1],
        unbounded_note(heads.unbounded),
        sinks.note or sink_note(sinks),
        massive_note(sinks),
        *(mixers.remarks if mixers else ()),
    )
    roles = affordable_names(model)
    if options.all_tensors:
        matrices = read_matrices(model, options.exact)
        percentiles = ComparableMatrices.of(matrices).percentiles(standing.reference)
        everything = replace(matrices, percentiles=tuple(percentiles))
        read = tensors_of_heads(unchecked, measured_layers)
        findings = with_tensor_findings(findings, unchecked, everything, read)
        coverage = everything.lead
    else:
        everything = None
        names = tensors_of_heads(unchecked, measured_layers, tokens_read=bool(directions))
        names += other_gains(model)
        names += mixers.names if mixers else ()
        besides = ", embeddings and layers without a softmax" if mixers else ", embeddings"
        coverage = attention_only(model.checkpoint, {*names}, f"{besides} included")
    findings, unmatched_notes = with_lists(with_roles(findings, roles), options)
    return Audit(
        name=model.name,
        family=model.family.called,
        d_model=model.config.d_model,
        measured=heads,
        findings=findings,
        directions=directions,
        notes=tuple(filter(None, (*notes, *unmatched_notes))),
        standing=standing,
        removed=removed,
        coverage=coverage,
        everything=everything,
        roles=roles,
        massive=sinks.massive,
        mixers=mixers,
        provenance=Provenance.of(model.checkpoint),
    )


def with_tensor_findings(
    findings: Findings, model: Model, everything: Matrices, read: Sequence[str]
) -> Findings:
    """Add findings about all tensors; `read` are those that the heads were measured from."""
    reported = [m.name for finding in findings for m in finding.members if m.what == "tensor"]
    zero = {m.name for f in findings if f.kind == zero_tensor.name for m in f.members}
    subjects = (
        tensor_findings(everything, [*read, *reported], model.config.get("pad_token_id")),
        untrained_parts(model, everything),
        network_findings(model, everything),
    )
    more = []
    for finding in chain.from_iterable(subjects):
        names = {member.name for member in finding.members}
        if finding.kind != zero_tensor.name or names - zero:
            more.append(finding)
    return Findings([*findings, *more])


def with_lists(findings: Findings, options: AuditOptions) -> tuple[Findings, list[str]]:
    """Mark findings in the lists of known ones; note entries that match none."""
    lists, notes = options.entries(), []
    if lists:
        findings, left = with_known(findings, [*chain.from_iterable(lists.values())])
        unused = set(map(id, left))
        for name, entries in lists.items():
            unused_entries = [entry for entry in entries if id(entry) in unused]
            notes.append(unmatched(str(options.lists[name]), unused_entries))
    return findings, notes


def sink_columns(sinks: FirstTokenSinks) -> tuple[Column, ...]:
    """The last columns of heads.csv, all of one pass of random tokens."""
    peak = (
        f"Distance, of 0 to {NEAR - 1}, with the highest mean score of random tokens; NaN as "
        "sink_share, and without"
    )
    fast = (
        "Share of the product of query and key norms in pairs of dimensions that turn once within "
        f"{FAST} tokens."
    )
    share = (
        "Mean attention that the last of five random tokens gives the first; NaN if tokens were "
        "not followed."
    )
    kind = (
        "What a head that gives the first token half of that or more does with it: nop, broadcast "
        "or neither."
    )
    peak += " positions in the scores."
    return (
        Column("kernel_peak", sinks.peak.ravel(), "distance preferred", "tokens", peak),
        Column("fast_share", sinks.fast.ravel(), "fast pairs", meaning=fast),
        Column("sink_share", sinks.share.ravel(), "attention to token 0", meaning=share),
        Column("sink_kind", sinks.kind.ravel(), "kind of sink", meaning=kind),
    )


def unbounded_note(reasons: Mapping[int, str]) -> str:
    """Why nothing bounds the logits of some layers, in a sentence; empty where all are bounded."""
    by_reason: dict[str, list[int]] = {}
    for layer, reason in reasons.items():
        by_reason.setdefault(reason, []).append(layer)
    parts = [f"in {indexed('layer', layers)} {reason}" for reason, layers in by_reason.items()]
    return f"Nothing bounds the logits: {'; '.join(parts)}." if parts else ""


def sink_note(sinks: FirstTokenSinks) -> str:
    """Count heads that give the first token half of their attention, by kind, as a sentence."""
    known = np.isfinite(sinks.share)
    if not known.any():
        return ""
    heads = counted(int(known.sum()), "head")
    sink = known & (np.nan_to_num(sinks.share) >= EVENT_WEIGHT)
    if not sink.any():
        none = f"No head of {heads} gives the first token half of its attention or more"
        return f"{none} (sink_share in heads.csv)."
    kinds = sinks.kind[sink].tolist()
    counts = ", ".join(f"{n} {kind}" for kind in MECHANISMS if (n := kinds.count(kind)))
    some = f"{sink.sum()} of {heads} give the first token half of their attention"
    return f"{some} or more (sink_share in heads.csv{f'; kinds: {counts}' * bool(counts)})."


def with_massive(findings: Findings, massive: Massive | None) -> Findings:
    """Add the first token's massive activation to findings about outlier dimensions."""
    if massive is None:
        return findings

    def joined(finding: Finding) -> Finding:
        which = "one of these" if massive.dimension in finding.items else "not one of these"
        where = f"dimension {massive.dimension}, {which}"
        text = f"{finding.text} The first token's massive activation is in {where}."
        return replace(finding, text=text)

    dimensions = outlier_dimension.name
    return Findings(joined(each) if each.kind == dimensions else each for each in findings)


def massive_note(sinks: FirstTokenSinks) -> str:
    """The massive activation of the first token, in a sentence; empty where it has none."""
    if (massive := sinks.massive) is None:
        return ""
    times = f"{massive.times_median:,.0f} times the median of the stream"
    where = f"{massive.value:,.0f} in dimension {massive.dimension}, at most {times}"
    note = f"The first token has a massive activation: {where}, from layer {massive.layer} on"
    if (weight := sinks.super_weight) is None:
        return f"{note}."
    entry = f"entry ({weight.dimension}, {weight.unit}) of layer {weight.layer}'s down-projection"
    share = f"{weight.share:.0%}".replace("%", " %")
    return f"{note}; {entry}, {weight.weight:.3g}, writes {share} of what its network adds there."


def tensors_of_heads(model: Model, layers: Sequence[int], tokens_read: bool = False) -> list[str]:
    """Names of the tensors that these layers' heads and the embeddings are measured from."""
    tensors = [tensor for index in layers for tensor in model.attention_tensors(index)]
    tensors += model.ends.input_tensors
    tensors += model.ends.output_tensors.values() if tokens_read else ()
    return list(dict.fromkeys(tensor.name for tensor in tensors))


def other_stacks(model: Model) -> str:
    """The other attention stacks of a checkpoint, in a sentence; empty where there are none."""
    stacks = model.stacks.others.items()
    names = [name + " (not read)" * bool(stack.refusal) for name, stack in stacks]
    note = f"The file has other attention stacks, each a `tower` of its own: {', '.join(names)}."
    return note if names else ""


def attention_only(checkpoint: Checkpoint, names: Collection[str], included: str = "") -> str:
    """Share of the checkpoint that was read, as a sentence; empty if it was everything."""
    if len(names) == len(checkpoint):
        return ""
    share = f"{sized(checkpoint.bytes_to_read(names))} of {sized(checkpoint.nbytes)}"
    return (
        f"Attention only: {len(names)} of {len(checkpoint)} tensors were read ({share}{included}); "
        "`weightscope audit --all` and `compare --all` read every tensor."
    )


def short(value: float) -> str:
    """A number in three digits, thousands with commas."""
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.3g}"


class Number(NamedTuple):
    """One of the numbers that an audit begins with."""

    value: str
    meaning: str
    detail: str  # where it is, or of how many

    def __str__(self) -> str:
        return f"{self.value:>8}  {self.meaning}{self.detail and f' ({self.detail})'}"


@holds_arrays
class Audit(Result):
    """The result of an audit. A notebook shows it as a table, `print` as the command does."""

    FIGURE, PAGE = "figures:audit_figure", "page:write_audit_page"
    TABLES, FILES = TABLES, RESULTS

    name: str
    family: str
    d_model: int
    measured: MeasuredHeads
    findings: Findings  # the most severe first
    directions: list[HeadDirections]  # tokens along every head's first directions, if computed
    notes: tuple[str, ...]  # sentences on parts that were left out, and why
    standing: Standing  # percentiles of the heads among the heads of other checkpoints
    removed: list[Removed] = field(default_factory=list)  # directions that layers lost
    coverage: str = ""  # share of the checkpoint that was read, as a sentence
    everything: Matrices | None = None  # all tensors, attention or not, with `all_tensors`
    roles: Roles = field(default_factory=dict)  # names of heads for what they do, by layer and head
    massive: Massive | None = None  # the first token's massive activation, if it has one
    mixers: MeasuredMixers | None = None  # layers without a softmax, if there are any
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def heads(self) -> Table:
        """One row per head: layer, head, kv_head, and every measure; its csv() is heads.csv."""
        return self.measured.table

    @property
    def percentiles(self) -> Table:
        """One row per head: its percentiles among other checkpoints' heads; see `Reference`."""
        return self.standing.table

    @property
    def of_mixers(self) -> Table | None:
        """One row per head of the layers without a softmax; None without such layers."""
        return self.mixers.table if self.mixers and len(self.mixers.table) else None

    @property
    def caveats(self) -> tuple[str, ...]:
        """Parts of the heads' scores that the numbers leave out."""
        return self.measured.caveats

    @property
    def lead(self) -> str:
        """Summary of what was found, measured and left out, in a few sentences."""
        return " ".join([self.findings.headline, f"{self.described}.", *self.remarks])

    @property
    def described(self) -> str:
        """The architecture and its sizes."""
        n_kv = int(self.heads["kv_head"].max()) + 1
        kv = f", {n_kv} key-value heads" * (n_kv != self.measured.n_heads)
        return f"{self.family}, {self._sizes}{kv}, width {self.d_model}"

    @property
    def remarks(self) -> list[str]:
        """Sentences on what was read, how, and what was left out."""
        routes = [*self.heads["qk_route"], *self.heads["vo_route"]]
        by_qr = f"{routes.count('qr')} of {len(routes)} spectra took the accurate QR route."
        return [*filter(None, (self.coverage, by_qr * ("qr" in routes), *self.notes))]

    @property
    def numbers(self) -> list[Number]:
        """The numbers to begin with; those that were not computed are left out."""
        numbers = [Number(f"{len(self.heads):,}", "heads", self.described)]
        for name, meaning in FIRST_NUMBERS.items():
            values = self.heads[name]
            if np.isfinite(values).any():
                row = int(np.where(np.isfinite(values), values, -np.inf).argmax())
                where = f"layer {self.heads['layer'][row]} head {self.heads['head'][row]}"
                if name == "qk_logit_bound" and self.measured.unbounded:
                    where += f"; none in {indexed('layer', self.measured.unbounded)}"
                numbers.append(Number(short(values[row]), meaning, where))
        if self.mixers is not None and self.of_mixers is not None:
            least, median, most = np.percentile(self.of_mixers["time_scale"], (0, 50, 100))
            meaning = "tokens, median time scale of the heads without a softmax"
            where = f"{short(least)} to {short(most)} where {FIXED}; {self.mixers.where}"
            numbers.append(Number(short(median), meaning, where))
        shares = self._known("sink_share")
        if not len(shares):
            return numbers
        kinds = [*self.heads["sink_kind"]]
        by_kind = ", ".join(f"{n} {kind}" for kind in MECHANISMS if (n := kinds.count(kind)))
        half = "heads that give the first token at least half of their attention"
        n_sinks = int((shares >= EVENT_WEIGHT).sum())
        of_all = f"of {len(shares):,}{by_kind and f': {by_kind}'}"
        numbers.append(Number(f"{n_sinks:,}", half, of_all))
        value, where = "none", ""
        if self.massive is not None:
            value = f"{self.massive.value:,.0f}"
            where = f"dimension {self.massive.dimension}, from layer {self.massive.layer} on"
        return [*numbers, Number(value, "massive activation of the first token", where)]

    @property
    def _sizes(self) -> str:
        n_layers, n_heads = len(self.measured.layers), self.measured.n_heads
        return f"{counted(n_layers, 'layer')} of {counted(n_heads, 'head')}"

    @property
    def about(self) -> str:
        return f"{printable(self.name)}: {self._sizes}, {counted(len(self.findings), 'finding')}"

    def __str__(self) -> str:
        caveats = [f"not in these numbers: {caveat}" for caveat in self.caveats]
        findings = [repr(self.findings)] if self.findings else []
        unscaled = f"W_QK: {UNSCALED[0].lower()}{UNSCALED[1:]}"
        numbers = [*map(str, self.numbers), self.ranges().text(), unscaled]
        first = [self.findings.headline, *findings]
        return "\n".join([*first, *numbers, *caveats, " ".join(self.remarks)]).rstrip()

    def ranges(self) -> Table:
        """The spread of the heads in the measures that summarise a checkpoint."""
        labels = {m.name: m.label for m in self.measured.measures if m.name in SUMMARY}
        if "sink_share" in self.heads.names:
            labels["sink_share"] = "attention to token 0"
        rows = []
        for name, label in labels.items():
            known = self._known(name)
            if len(known):
                rows.append((label, *np.percentile(known, (5, 50, 95))))
        shares = (Column(name, format=".3g") for name in ("5 %", "median", "95 %"))
        return Table.of_rows(["measure", *shares], rows)

    def _known(self, name: str) -> np.ndarray:
        values = self.heads[name]
        return values[np.isfinite(values)]

    def summary(self) -> dict[str, str | int | float]:
        """The checkpoint as one row: its sizes, numbers of findings and medians over its heads."""
        severities = self.findings.severities.items()
        row: dict[str, str | int | float] = {
            "family": self.family,
            "layers": len(self.measured.layers),
            "heads": self.measured.n_heads,
            "d_model": self.d_model,
            "findings": len(self.findings),
            **{f"{severity}s": count for severity, count in severities},
            "known": sum(bool(finding.known) for finding in self.findings),
        }
        for name in SUMMARY:
            known = self._known(name)
            row[name] = float(np.median(known)) if len(known) else np.nan
        return row

    def as_json(self) -> dict[str, Any]:
        """The whole result as `weightscope audit --json` prints it; NaN as null."""
        texts = {name: getattr(self, name) for name in ("name", "caveats", "notes", "coverage")}
        tensors = {} if self.everything is None else {"tensors": self.everything.table.records()}
        result = {
            "summary": self.summary(),
            "findings": self.findings.as_json(),
            "heads": self.heads.records(),
        }
        if self.of_mixers is not None:
            result["mixers"] = self.of_mixers.records()
        return dict(as_json(self.provenance.envelope(self.lead) | texts | tensors | result))

    def shown(self) -> list[Any]:
        """Findings, and the measures of every head that the maps show."""
        mapped = [measure.name for measure in self.measured.measures if measure.scale]
        sinks = [name for name in ("sink_share", "sink_kind") if name in self.heads.names]
        of_mixers = [self.of_mixers] if self.of_mixers is not None else []
        return [self.findings, self.heads.select("layer", "head", *sinks, *mapped), *of_mixers]
