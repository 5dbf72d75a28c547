"""Audits of many checkpoints into folders, and the reference that is made of many.

An engine gets a task per layer, and one that ends each audit. Finished layers are on disk, one file
each, so that a later run can continue an audit that was interrupted.
"""

import csv
import io
import json
import shutil
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.engine import Engine, unexpected
from weightscope.core.errors import CheckpointError, counted, one_line, printable
from weightscope.core.files import HIDDEN, Files, OutputFolder, regular_file, writing
from weightscope.core.progress import bar, phase
from weightscope.core.tables import Column, Link, Table
from weightscope.heads.audit.audit import END, RESULTS, AuditOptions, conclude, measure_task
from weightscope.heads.audit.measure import Arrays, MeasuredHeads
from weightscope.heads.audit.reference import (
    OWN,
    ComparableMatrices,
    Known,
    Reference,
    distribution,
)
from weightscope.heads.tensors.matrices import read_matrices
from weightscope.model.model import Model
from weightscope.model.run_identity import (
    UNREADABLE,
    RunIdentity,
    arrays_of,
    content_identity,
    keep_arrays,
    kept_arrays,
    weights_digest,
    weights_size,
)
from weightscope.model.sources import RESERVED, Source, folder_names, read_list
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.report.findings import SEVERITIES, fails, finding_kinds


class FinishedLayers:
    """A folder with one file per finished layer, named for all that its numbers depend on.

    Each file appears complete under its name or not at all. Layers of other weights or options are
    discarded; layers of this identity are kept with `resume`.
    """

    left: list[int]  # layers that are not finished
    notice: str | None  # tells a person about discarded layers

    def __init__(
        self, out: Path, identity: RunIdentity, layers: Sequence[int], resume: bool
    ) -> None:
        self._layers = list(layers)
        self._identity = identity.digest.encode()
        self.folder = out / HIDDEN / f"layers-{identity.digest[:16]}"
        discarded = foreign = 0  # finished layers of this identity and of others
        for folder in (out / HIDDEN).glob("layers-*"):
            finished = sum(map(_looks_finished, folder.glob("layer-*.npz")))
            if folder != self.folder:
                foreign += finished
            elif not resume:
                discarded += finished
            else:
                continue
            with writing(folder, "removed"):
                shutil.rmtree(folder)
        self.notice = _notice(discarded, foreign, resume)
        self.left = [layer for layer in self._layers if self.get(layer) is None]

    def _file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.npz"

    def get(self, layer: int) -> dict[str, np.ndarray] | None:
        """The arrays of a layer, or None where it is not finished or its file was changed since."""
        arrays = kept_arrays(self._file(layer), self._identity)
        try:
            return None if arrays is None else arrays_of(arrays, f"layer {layer}")
        except CheckpointError:
            return None

    def put(self, layer: int, measured: Mapping[str, np.ndarray]) -> None:
        """Keep a finished layer."""
        keep_arrays(self._file(layer), measured, self._identity)
        self.left.remove(layer)

    def all(self) -> "LayersOnDisk":
        """The arrays of every layer, once none is left."""
        for layer in self._layers:
            if not _looks_finished(self._file(layer)):
                raise self.removed(layer)
        return LayersOnDisk(self, self._layers)

    def removed(self, layer: int) -> CheckpointError:
        """Error about a finished layer that is gone; possible where a folder cannot be locked."""
        cause = "another audit of this folder has removed it since"
        problem = f"layer {layer} was finished, and {cause}; run one at a time"
        return CheckpointError(problem, file=self.folder)

    def clear(self) -> None:
        """Remove the layers, once the results are written."""
        shutil.rmtree(self.folder, ignore_errors=True)


class LayersOnDisk(Mapping[int, Arrays]):
    """Finished layers, read when asked for; a worker on another machine gets all of them."""

    def __init__(self, finished: FinishedLayers, layers: Sequence[int]) -> None:
        self._finished, self._layers = finished, layers

    def __getitem__(self, layer: int) -> Arrays:
        if layer not in self._layers:
            raise KeyError(layer)
        measured = self._finished.get(layer)
        if measured is None:
            raise self._finished.removed(layer)
        return measured

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _looks_finished(path: Path) -> bool:
    """True if a file looks like a finished layer; a pipe is not waited for."""
    try:
        with regular_file(path) as file:
            return zipfile.is_zipfile(file)
    except UNREADABLE:
        return False


def _notice(discarded: int, foreign: int, resume: bool) -> str | None:
    if discarded:
        layers = f"{counted(discarded, 'finished layer')} of an interrupted audit"
        return f"discards {layers}; `resume` would have kept them"
    layers = counted(foreign, "finished layer")
    if foreign and resume:
        return f"starts afresh: discards {layers} of other options or weights"
    if foreign:
        return f"discards {layers} of an interrupted audit with other options or weights"
    return None


def layers_identity(model: Model, options: AuditOptions) -> RunIdentity:
    """Identity of a layer's numbers, which decides if finished layers may be used again."""
    return RunIdentity.of_model(
        model,
        layers=options.layers_of(model),
        deltas=list(options.deltas),
        window=options.window,
        device=options.device,
    )


def results_identity(model: Model, options: AuditOptions) -> RunIdentity:
    """Identity of an audit's tables and page, which decides if finished results are kept."""
    asked = asdict(options) | {"layers": options.layers_of(model)}
    read = {"reference": content_identity(Path(options.reference or OWN))}
    read |= {name: content_identity(path) for name, path in options.lists.items()}
    layers, tokenizer = layers_identity(model, options), Tokenizer.place_of(model)
    return layers.of_pages(model, tokenizer, asked=asked, **read)


# Audits of a list

REPORT = -1  # in place of a layer, in the key of the task that ends an audit
KEPT = f"{HIDDEN}/summary.json"  # row in a list's summary, for a later run that keeps the results
RESULT = f"{HIDDEN}/result.json"  # audit as JSON, for such a run
DEEPEST = 6  # levels of a result in JSON


@dataclass(frozen=True)
class Job:
    """A checkpoint to audit, and the folder for its results."""

    source: Source
    out: Path
    has_page: bool = True  # False where the folder is thrown away


@dataclass(frozen=True)
class AuditOutcome:
    """End of a checkpoint's audit: a report, the results of an earlier run, or an error."""

    job: Job
    digest: str  # digest of all that the results depend on; empty if the checkpoint was not opened
    summary: dict[str, Any] | None = None  # None where it failed
    text: str = ""  # the audit on a terminal; empty where an earlier run's results are kept
    error: Exception | None = None
    result: dict[str, Any] = field(default_factory=dict)  # the audit as JSON; empty where it failed

    def findings_that_fail(self, limits: Collection[str]) -> list[dict[str, Any]]:
        """The findings that fail a gate, as JSON; known ones do not count."""
        new = (f for f in self.result.get("findings", ()) if not f.get("known"))
        return [finding for finding in new if fails(finding["kind"], limits)]

    @property
    def problem(self) -> str:
        """The error in one line, with its type if it is a defect and not about the input."""
        if self.error is None:
            return ""
        text = one_line(self.error)
        is_defect = not isinstance(self.error, CheckpointError)
        return f"{type(self.error).__name__}: {text}" if is_defect else text


@dataclass(frozen=True)
class Report:
    """Answer of the last task of an audit."""

    files: dict[str, bytes]  # the results by name, in the order in which they are written
    text: str  # the audit on a terminal
    summary: dict[str, Any]  # the checkpoint as one row of numbers
    result: dict[str, Any] = field(default_factory=dict)  # the audit as JSON


def audit_list(
    sources: Sequence[Source],
    out: Path,
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    names: Sequence[str] | None = None,
) -> Iterator[AuditOutcome]:
    """Audit every source into OUT/NAME (see `folder_names`); yield each outcome as it ends.

    summary.csv has one row per checkpoint that has ended, the most severe first; summary.html is
    written at the end.
    """
    from weightscope.heads.audit.page import write_summary_page

    names = names or folder_names([source.source for source in sources])
    jobs = [Job(source, out / name) for source, name in zip(sources, names, strict=True)]

    def say_of(job: Job, line: str) -> None:
        say(f"{job.out.name}: {line}")

    ended: dict[Job, AuditOutcome] = {}
    with OutputFolder(out, names=RESERVED) as folder:
        for outcome in audit_all(jobs, options, engine, resume, say_of):
            ended[outcome.job] = outcome
            outcomes = [ended[job] for job in jobs if job in ended]
            summary = summary_of(outcomes)
            folder.table("summary.csv", summary)
            yield outcome
        read = [source for each in outcomes for source in each.result.get("sources", ())]
        write_summary_page(folder, summary, Provenance().of_all(read))


def audit_all(
    jobs: Sequence[Job],
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[Job, str], None] = lambda job, line: None,
) -> Iterator[AuditOutcome]:
    """Audit checkpoints and yield each outcome as it ends; `say` gets notices for people.

    One that fails does not stop the others. Results are written in this process; workers only read.
    """
    waiting = deque(enumerate(jobs))
    running: dict[int, _Run] = {}
    with bar(what="layers", unit="layer", total=0) as layers:
        try:
            while waiting or engine.busy:
                if waiting and engine.hungry:
                    number, job = waiting.popleft()
                    say_of_job = partial(say, job)
                    run = _run(number, job, options, engine, resume, say_of_job, layers)
                    running[number] = run
                    go_on = partial(next, run)
                else:
                    # The task that ends an audit shows its progress itself, unless it is in another
                    # process.
                    shown: AbstractContextManager[Any] = nullcontext()
                    if engine.elsewhere and layers.n == layers.total:
                        shown = phase("finding tokens and what stands out, drawing figures")
                    with shown:
                        (number, index), value, error = engine.next()
                    go_on = partial(running[number].send, (index, value, error))
                try:
                    go_on()
                    continue
                except StopIteration as ended:
                    outcome = ended.value
                del running[number]
                yield outcome
        finally:
            for run in running.values():
                run.close()  # releases its folder


_Run = Generator[None, tuple[int, Any, Exception | None], AuditOutcome]


def _run(
    number: int,
    job: Job,
    options: AuditOptions,
    engine: Engine,
    resume: bool,
    say: Callable[[str], None],
    layers: Any,
) -> _Run:
    """Audit one checkpoint: submit tasks, and be sent (index, value, error) of each as it ends."""
    digest, left = "", []
    try:
        model = job.source.open()
        baseline, options = options.baseline, options.of_folder(job.out.name)
        if baseline is not None and options.baseline is None:
            say(f"{baseline} has no folder {job.out.name}: all of its findings are new")
        options.entries()  # lists that cannot be read are refused before the work starts
        identity, provenance = results_identity(model, options), Provenance.of(model.checkpoint)
        digest, folder = identity.digest, OutputFolder(job.out, identity.facts, RESULTS)
        if resume and (earlier := _earlier(folder)) is not None:
            result = _of_this_run(earlier.result, provenance)
            return AuditOutcome(job, digest, earlier.summary, result=result)
        elsewhere = engine.elsewhere
        get_model = job.source.as_seen(model).elsewhere if elsewhere else lambda: model
        with folder:
            wanted, of_layers = options.layers_of(model), layers_identity(model, options)
            finished = FinishedLayers(job.out, of_layers, wanted, resume)
            if finished.notice is not None:
                say(finished.notice)
            left = finished.left
            layers.total += len(left)
            for index, following in pairwise((*left, END)):
                # another process may measure that one
                ahead = None if engine.elsewhere else following
                engine.submit((number, index), measure_task, get_model, index, options, ahead)
            if job.has_page and not elsewhere:  # takes 0.2 s; layers are measured meanwhile
                import_module("weightscope.heads.audit.page")
            while left:
                index, measured = _value_of((yield))
                finished.put(index, arrays_of(measured, f"layer {index}"))
                layers.update()
            key = number, REPORT
            engine.submit(
                key, report_task, get_model, finished.all(), options, provenance, job.has_page
            )
            report = report_of(_value_of((yield))[1])
            folder.add(report.files)
            folder.json(KEPT, report.summary)
            result = _of_this_run(report.result, provenance)
            folder.json(RESULT, result)
            finished.clear()
        return AuditOutcome(job, digest, report.summary, report.text, result=result)
    except Exception as error:
        engine.forget(lambda key: key[0] == number)
        layers.total -= len(left)
        return AuditOutcome(job, digest, error=error)


def report_task(
    get_model: Callable[[], Model],
    layers: Mapping[int, Arrays],
    options: AuditOptions,
    provenance: Provenance | None = None,
    has_page: bool = True,
) -> Report:
    """The task that ends a checkpoint's audit: findings, tables, figures and page, as bytes."""
    audit, files = conclude(get_model(), layers, options), Files()
    # a worker does not know the command
    audit = replace(audit, provenance=provenance or audit.provenance)
    if has_page:
        audit.write_report(files)  # figures come no later than the numbers
        with phase("writing tables"):
            audit.write_tables(files)
    return Report(files.contents, str(audit), audit.summary(), audit.as_json())


def _of_this_run(result: Mapping[str, Any], provenance: Provenance) -> dict[str, Any]:
    """A worker's or an earlier run's result, with this process's sources and command."""
    return {**result, **provenance.envelope(result.get("lead", ""))}


def _value_of(ended: tuple[int, Any, Exception | None]) -> tuple[int, Any]:
    """A task's index and value, or its error raised."""
    index, value, error = ended
    if error is not None:
        raise error
    return index, value


# A worker may run another version, or be hostile. Its messages are pickles, and unpickling one may
# run code: these checks do not make an untrusted network safe (docs/scale.md). They keep malformed
# results out, and files inside their folder.


def _is_audit(result: Any) -> bool:
    is_json = isinstance(result, dict) and _is_json(result)
    return is_json and _are_findings(result.get("findings", []))


# parts of a report: a description, and a check
PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "files": (
        "files by name",
        lambda files: isinstance(files, dict) and {*map(type, files.values())} <= {bytes},
    ),
    "text": (
        "lines that a terminal can show",
        lambda text: isinstance(text, str) and all(map(str.isprintable, text.split("\n"))),
    ),
    "summary": (
        "a row of plain values",
        lambda row: isinstance(row, dict) and {*map(type, row.values())} <= {str, int, float},
    ),
    "result": ("JSON with findings of known kinds", _is_audit),
}


def report_of(answer: Any) -> Report:
    """Check a worker's last answer: a report whose parts have the expected types and safe names."""
    if type(answer) is not Report:
        raise unexpected("its report", type(answer).__name__, "a report")
    for name, (expected, is_valid) in PARTS.items():
        if not is_valid(part := getattr(answer, name, None)):
            raise unexpected("its report", type(part).__name__, expected)
    for name in answer.files:
        if not isinstance(name, str) or not _is_result_name(name):
            shown = printable(name)[:100]
            raise CheckpointError(f"a worker names a file '{shown}', which is not a result's name")
    return answer


def _is_result_name(name: str) -> bool:
    """True for a plain name, also within folders of plain names: not absolute, nothing hidden."""
    parts = name.split("/")
    return "\\" not in name and all(p and p.isprintable() and p[0] != "." for p in parts)


def _is_json(value: Any, depth: int = 0) -> bool:
    """True for types that JSON has, nested no deeper than a result is, with finite numbers."""
    if depth > DEEPEST:
        return False
    if type(value) is dict:
        return all(type(key) is str and _is_json(entry, depth + 1) for key, entry in value.items())
    if type(value) is list:
        return all(_is_json(entry, depth + 1) for entry in value)
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and isfinite(value))


def _are_findings(value: Any) -> bool:
    kinds = finding_kinds() if value else {}

    def is_finding(entry: Any) -> bool:
        texts = [entry.get(name) for name in ("kind", "title", "text")]
        return {*map(type, texts)} == {str} and entry["kind"] in kinds

    return type(value) is list and all(type(each) is dict and is_finding(each) for each in value)


BY_SEVERITY = [f"{severity}s" for severity in SEVERITIES]  # columns by which a summary is sorted
COUNTS = ("layers", "heads", "d_model", "findings", *BY_SEVERITY)


def _earlier(folder: OutputFolder) -> Report | None:
    """Summary and result of an earlier run with this identity; None if unfinished or malformed."""
    if not folder.is_finished("heads.csv", "report.html", KEPT, RESULT):
        return None
    try:
        summary, result = (json.loads(folder.kept(name) or b"") for name in (KEPT, RESULT))
        report_of(Report({}, "", summary, result))
    except (CheckpointError, ValueError, RecursionError):
        return None
    if not all(type(summary.get(name)) is int for name in COUNTS):
        return None
    family, count = summary.get("family"), len(result.get("findings", ()))
    is_named = isinstance(family, str) and family.isprintable()
    is_whole = is_named and summary["findings"] == count
    return Report({}, "", summary, result) if is_whole else None


SUMMARY = (
    Column("name", symbol="checkpoint"), Column("source"), Column("status"), Column("family"),
    Column("layers"), Column("heads"), Column("d_model", symbol="width"), Column("findings"),
    *map(Column, BY_SEVERITY),
    Column("qk_sigma1", symbol="σ₁(W_QK)"), Column("qk_effective_rank", symbol="erank(W_QK)"),
    Column("vo_sigma1", symbol="σ₁(W_VO)"), Column("vo_copying_score", symbol="copying score"),
    Column("error", symbol="what was wrong"), Column("plan"),
)  # fmt: skip


def summary_of(outcomes: Sequence[AuditOutcome]) -> Table:
    """One row per checkpoint: status, sizes and medians over its heads. Its csv() is summary.csv.

    Failed ones come first, then those with most errors, most warnings, most notes.
    """

    def severity(outcome: AuditOutcome) -> tuple[int, ...]:
        if outcome.summary is None:
            return (1,)
        counts = (outcome.summary.get(column) for column in BY_SEVERITY)
        return 0, *(count if isinstance(count, int) else 0 for count in counts)

    rows = []
    for outcome in sorted(outcomes, key=severity, reverse=True):
        name, source = outcome.job.out.name, outcome.job.source.given or outcome.job.source.source
        cells = {
            "name": Link(f"{name}/report.html", name),
            "source": source,
            "error": outcome.problem,
            "status": "failed" if outcome.summary is None else "ok",
            "plan": outcome.digest,
        } | (outcome.summary or {})
        rows.append([cells.get(column.name, "") for column in SUMMARY])
    return Table.of_rows(SUMMARY, rows)


# A reference made from a list of checkpoints: each is measured, and identified by a digest of its
# weights.
COLUMNS = tuple(field.name for field in fields(Known))
MEASURED = AuditOptions(deltas=(0,), directions=0)  # a reference has no measures of rotated maps


def read_checkpoints(path: Path) -> list[dict[str, str]]:
    """One dictionary per checkpoint of a list: a .csv with a column `source`, or a text file."""
    if path.suffix.lower() != ".csv":
        rows = [{"source": source} for source in read_list(path)]
    else:
        try:
            with io.TextIOWrapper(regular_file(path), encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                columns = list(reader.fieldnames or [])
                rows = [{name: row.get(name) or "" for name in columns} for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            problem = f"cannot be read as a list of checkpoints ({error})"
            raise CheckpointError(problem, file=path) from None
        if "source" not in columns or set(columns) - set(COLUMNS):
            given = printable(", ".join(columns))
            expected = f"source and any of {', '.join(COLUMNS)} are expected"
            raise CheckpointError(f"has the columns {given}; {expected}", file=path)
    sources = [row["source"] for row in rows]
    if not all(sources) or not sources or len(set(sources)) < len(sources):
        problem = "must name at least one checkpoint, each once, without empty lines"
        raise CheckpointError(problem, file=path)
    checkpoints = []
    for name, row in zip(folder_names(sources), rows, strict=True):
        checkpoints.append({"name": name} | {key: cell for key, cell in row.items() if cell})
    return checkpoints


def make_reference(path: Path, all_tensors: bool = False) -> Reference:
    """The reference of the checkpoints in a list, with `all_tensors` of their matrices too."""
    rows, parts = read_checkpoints(path), list[tuple[Known, Mapping[str, np.ndarray]]]()
    # all are opened first, so that a missing one is noticed before the first is measured
    models = [Source.named(row["source"]).open() for row in rows]
    digests: dict[str, str] = {}
    n_layers = sum(len(model.own_layers) for model in models)
    with bar(what="layers", unit="layer", total=n_layers) as layers:
        for row, model in zip(rows, models, strict=True):
            known = _known(row, model)
            if known.sha256 in digests:
                both = f"{known.name} and {digests[known.sha256]}"
                raise CheckpointError(
                    f"{both} have the same weights, which may be listed only once"
                )
            digests[known.sha256] = known.name
            measured = {}
            for index in model.own_layers:
                measured[index] = measure_task(lambda model=model: model, index, MEASURED)  # type: ignore[misc]
                layers.update()
            distributions = distribution(MeasuredHeads(measured, model.config.d_model))
            if all_tensors:
                distributions |= ComparableMatrices.of(read_matrices(model)).distribution()
            parts.append((known, distributions))
    return Reference.of(parts)


def _known(row: dict[str, str], model: Model) -> Known:
    """A checkpoint's record in a reference; a digest in the list must match its weights."""
    digest = weights_digest(model)
    if row.get("sha256", digest) != digest:
        problem = f"has weights with SHA-256 {digest}; the list says {row['sha256'][:64]}"
        raise CheckpointError(problem, file=model.checkpoint.name)
    return Known(
        name=row["name"],
        source=row["source"],
        licence=row.get("licence", ""),
        origin=row.get("origin", ""),
        sha256=digest,
        size=weights_size(model),
        family=model.family.name,
        layers=len(model.own_layers),
        heads=model.config.n_heads,
        d_model=model.config.d_model,
    )
