"""Audits of many checkpoints into folders: tasks for an engine, one per layer and one that ends each audit."""

import json
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from weightscope.audit.audit import END, RESULTS, AuditOptions, conclude, measure_task
from weightscope.audit.measure import Arrays
from weightscope.audit.resume import FinishedLayers, arrays_of, layers_identity, results_identity
from weightscope.engine import Engine, unexpected
from weightscope.errors import CheckpointError, one_line, printable
from weightscope.files import HIDDEN, Files, OutputFolder
from weightscope.findings import SEVERITIES, fails, finding_kinds
from weightscope.model import Model
from weightscope.progress import bar, phase
from weightscope.provenance import Provenance
from weightscope.sources import RESERVED, Source, folder_names
from weightscope.tables import Column, Link, Table

REPORT = -1  # in place of a layer, in the key of the task that ends an audit
KEPT = f"{HIDDEN}/summary.json"  # a checkpoint's row in a list's summary, for a later run that keeps its results
RESULT = f"{HIDDEN}/result.json"  # the audit as JSON, for the same
DEEPEST = 6  # levels of a result in JSON


@dataclass(frozen=True)
class Job:
    """A checkpoint to audit, and the folder for its results."""

    source: Source
    out: Path


@dataclass(frozen=True)
class Outcome:
    """How the audit of a checkpoint ended: with a report, with the results of an earlier run, or with an error."""

    job: Job
    digest: str  # of everything that the results depend on; empty where the checkpoint could not be opened
    summary: dict[str, Any] | None = None  # None where it failed
    text: str = ""  # the audit on a terminal; empty where an earlier run's results are kept
    error: Exception | None = None
    result: dict[str, Any] = field(default_factory=dict)  # the audit as JSON; empty where it failed

    def findings_that_fail(self, limits: Collection[str]) -> list[dict[str, Any]]:
        """The findings that fail a gate, as JSON; known ones do not count."""
        findings = self.result.get("findings", ())
        return [finding for finding in findings if not finding.get("known") and fails(finding["kind"], limits)]

    @property
    def problem(self) -> str:
        """The error in one line; an error that is not about the input is a defect, and its type is named."""
        if self.error is None:
            return ""
        text = one_line(self.error)
        return text if isinstance(self.error, CheckpointError) else f"{type(self.error).__name__}: {text}"


@dataclass(frozen=True)
class Report:
    """What the last task of an audit sends back."""

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
) -> Iterator[Outcome]:
    """Audit every source into OUT/NAME (by default as `folder_names` names it); yield each outcome as it ends.

    summary.csv has one row per checkpoint that has ended, the most severe first; summary.html is written at the end.
    """
    from weightscope.audit.page import write_summary_page

    names = names or folder_names([source.source for source in sources])
    jobs = [Job(source, out / name) for source, name in zip(sources, names, strict=True)]
    ended: dict[Job, Outcome] = {}
    with OutputFolder(out, names=RESERVED) as folder:
        for outcome in audit_all(jobs, options, engine, resume, lambda job, line: say(f"{job.out.name}: {line}")):
            ended[outcome.job] = outcome
            summary = summary_of([ended[job] for job in jobs if job in ended])
            folder.table("summary.csv", summary)
            yield outcome
        read = [source for job in jobs if job in ended for source in ended[job].result.get("sources", ())]
        write_summary_page(folder, summary, Provenance().of_all(read))


def audit_all(
    jobs: Sequence[Job],
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[Job, str], None] = lambda job, line: None,
) -> Iterator[Outcome]:
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
                    running[number] = _run(number, job, options, engine, resume, partial(say, job), layers)
                    go_on = partial(next, running[number])
                else:
                    # The task that ends an audit shows its progress itself, unless it is in another process.
                    unseen = engine.elsewhere and layers.n == layers.total
                    with phase("finding tokens and what stands out, drawing figures") if unseen else nullcontext():
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


_Run = Generator[None, tuple[int, Any, Exception | None], Outcome]


def _run(
    number: int, job: Job, options: AuditOptions, engine: Engine, resume: bool, say: Callable[[str], None], layers: Any
) -> _Run:
    """The audit of one checkpoint: submits tasks, and is sent (index, value, error) of each as it ends."""
    digest, left = "", []
    try:
        model = job.source.open()
        baseline, options = options.baseline, options.of_folder(job.out.name)
        if baseline is not None and options.baseline is None:
            say(f"{baseline} has no folder {job.out.name}: all of its findings are new")
        options.entries()  # lists of known findings that cannot be read are refused before the work starts
        of_layers, of_results = layers_identity(model, options), results_identity(model, options)
        provenance = Provenance.of(model.checkpoint)
        digest, folder = of_results.digest, OutputFolder(job.out, of_results.facts, RESULTS)
        if resume and (earlier := _earlier(folder)) is not None:
            return Outcome(job, digest, earlier.summary, result=_of_this_run(earlier.result, provenance))
        get_model = job.source.as_seen(model).elsewhere if engine.elsewhere else partial(_itself, model)
        with folder:
            finished = FinishedLayers(job.out, of_layers, options.layers_of(model), resume)
            if finished.notice is not None:
                say(finished.notice)
            left = finished.left
            layers.total += len(left)
            for index, following in pairwise((*left, END)):
                ahead = None if engine.elsewhere else following  # another process may measure that one
                engine.submit((number, index), measure_task, get_model, index, options, ahead)
            while left:
                index, measured = _value_of((yield))
                finished.put(index, arrays_of(measured, index))
                layers.update()
            engine.submit((number, REPORT), report_task, get_model, finished.all(), options, provenance)
            report = report_of(_value_of((yield))[1])
            folder.add(report.files)
            folder.json(KEPT, report.summary)
            result = _of_this_run(report.result, provenance)
            folder.json(RESULT, result)
            finished.clear()
        return Outcome(job, digest, report.summary, report.text, result=result)
    except Exception as error:
        engine.forget(lambda key: key[0] == number)
        layers.total -= len(left)
        return Outcome(job, digest, error=error)


def report_task(
    get_model: Callable[[], Model],
    layers: Mapping[int, Arrays],
    options: AuditOptions,
    provenance: Provenance | None = None,
) -> Report:
    """The task that ends a checkpoint's audit: findings, tables, figures and page, as bytes."""
    audit, files = conclude(get_model(), layers, options), Files()
    audit = replace(audit, provenance=provenance or audit.provenance)  # a worker does not know the command
    audit.write_report(files)  # figures come no later than the numbers
    with phase("writing tables"):
        audit.write_tables(files)
    return Report(files.contents, str(audit), audit.summary(), audit.as_json())


def _of_this_run(result: Mapping[str, Any], provenance: Provenance) -> dict[str, Any]:
    """A result of a worker or an earlier run, with the sources that this process has opened and its command."""
    return {**result, **provenance.envelope(result.get("lead", ""))}


def _value_of(ended: tuple[int, Any, Exception | None]) -> tuple[int, Any]:
    """A task's index and value, or its error raised."""
    index, value, error = ended
    if error is not None:
        raise error
    return index, value


def _itself(model: Model) -> Model:
    return model


# A worker may run another version, or be hostile. Its messages are pickles, and unpickling one may run code: these
# checks do not make an untrusted network safe (docs/scale.md). They keep malformed results out, and files inside their
# folder.

PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "files": (
        "files by name",
        lambda files: isinstance(files, dict) and all(isinstance(content, bytes) for content in files.values()),
    ),
    "text": (
        "lines that a terminal can show",
        lambda text: isinstance(text, str) and all(line.isprintable() for line in text.split("\n")),
    ),
    "summary": (
        "a row of plain values",
        lambda row: isinstance(row, dict) and all(type(value) in (str, int, float) for value in row.values()),
    ),
    "result": (
        "JSON with findings of known kinds",
        lambda result: isinstance(result, dict) and _is_json(result) and _are_findings(result.get("findings", [])),
    ),
}  # of a report: what each has to be


def report_of(answer: Any) -> Report:
    """A worker's last answer, if it is a report whose parts have the expected types and safe names."""
    if type(answer) is not Report:
        raise unexpected("its report", type(answer).__name__, "a report")
    for name, (expected, is_valid) in PARTS.items():
        if not is_valid(part := getattr(answer, name, None)):
            raise unexpected("its report", type(part).__name__, expected)
    for name in answer.files:
        if not isinstance(name, str) or not _is_result(name):
            raise CheckpointError(f"a worker names a file '{printable(name)[:100]}', which is not a result's name")
    return answer


def _is_result(name: str) -> bool:
    """A plain name, or one within folders of plain names: nothing absolute, nothing hidden."""
    return "\\" not in name and all(part and part.isprintable() and part[0] != "." for part in name.split("/"))


def _is_json(value: Any, depth: int = 0) -> bool:
    """Types that JSON has, nested no deeper than a result is, with finite numbers."""
    if depth > DEEPEST:
        return False
    if type(value) is dict:
        return all(type(key) is str and _is_json(entry, depth + 1) for key, entry in value.items())
    if type(value) is list:
        return all(_is_json(entry, depth + 1) for entry in value)
    return type(value) in (str, int, bool, type(None)) or (type(value) is float and isfinite(value))


def _are_findings(value: Any) -> bool:
    kinds = finding_kinds() if value else {}
    return type(value) is list and all(
        type(finding) is dict
        and all(type(finding.get(name)) is str for name in ("kind", "title", "text"))
        and finding["kind"] in kinds
        for finding in value
    )


BY_SEVERITY = [f"{severity}s" for severity in SEVERITIES]  # columns by which a summary is sorted
COUNTS = ("layers", "heads", "d_model", "findings", *BY_SEVERITY)


def _earlier(folder: OutputFolder) -> Report | None:
    """Summary and result of an earlier run of the same run identity; None if it is not finished or malformed."""
    if not folder.is_finished("heads.csv", "report.html", KEPT, RESULT):
        return None
    try:
        summary, result = (json.loads(folder.kept(name) or b"") for name in (KEPT, RESULT))
        report_of(Report({}, "", summary, result))
    except (CheckpointError, ValueError, RecursionError):
        return None
    family, n_findings = summary.get("family"), len(result.get("findings", ()))
    counted = all(type(summary.get(name)) is int for name in COUNTS) and summary["findings"] == n_findings
    return Report({}, "", summary, result) if counted and isinstance(family, str) and family.isprintable() else None


SUMMARY = (
    Column("name", symbol="checkpoint"), Column("source"), Column("status"), Column("family"), Column("layers"),
    Column("heads"), Column("d_model", symbol="width"), Column("findings"), *map(Column, BY_SEVERITY),
    Column("qk_sigma1", symbol="σ₁(W_QK)"),
    Column("qk_effective_rank", symbol="erank(W_QK)"), Column("vo_sigma1", symbol="σ₁(W_VO)"),
    Column("vo_copying_score", symbol="copying score"), Column("error", symbol="what was wrong"), Column("plan"),
)  # fmt: skip


def summary_of(outcomes: Sequence[Outcome]) -> Table:
    """One row per checkpoint: how its audit ended, its sizes, and medians over its heads. Its csv() is summary.csv.

    Failed ones come first, then those with most errors, most warnings, most notes.
    """

    def severity(outcome: Outcome) -> tuple[int, ...]:
        if outcome.summary is None:
            return (1,)
        counts = (outcome.summary.get(column) for column in BY_SEVERITY)
        return 0, *(count if isinstance(count, int) else 0 for count in counts)

    rows = []
    for outcome in sorted(outcomes, key=severity, reverse=True):
        name, source = outcome.job.out.name, outcome.job.source.given or outcome.job.source.source
        cells = {
            "name": Link(f"{name}/report.html", name), "source": source, "error": outcome.problem,
            "status": "failed" if outcome.summary is None else "ok", "plan": outcome.digest,
        } | (outcome.summary or {})  # fmt: skip
        rows.append([cells.get(column.name, "") for column in SUMMARY])
    return Table.of_rows(SUMMARY, rows)
