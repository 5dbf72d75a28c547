"""Audits of checkpoints into folders, as tasks for an engine: one a layer, and one that ends each audit."""

import json
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from weightscope.audits.answers import arrays_of, report_of
from weightscope.audits.audit import RESULTS, AuditOptions, conclude, measure_task
from weightscope.audits.findings import fails
from weightscope.audits.finished_layers import FinishedLayers
from weightscope.audits.kinds import SEVERITIES
from weightscope.audits.measure import Arrays
from weightscope.audits.reference import OWN
from weightscope.bars import Bar
from weightscope.engine import Engine
from weightscope.errors import CheckpointError, printable
from weightscope.fingerprint import Fingerprint, content_identity
from weightscope.folder import HIDDEN, Files, OutputFolder
from weightscope.model import Model
from weightscope.progress import bar, phase
from weightscope.sources import Source, folder_names
from weightscope.tables import Column, Link, Table
from weightscope.text.tokenizer import tokenizer_at

REPORT = -1  # stands for a layer in the key of the task that ends an audit
KEPT = f"{HIDDEN}/summary.json"  # a checkpoint's row in a list's summary, for a later run that keeps its results
RESULT = f"{HIDDEN}/result.json"  # and the whole as JSON, for the gate and for programs


@dataclass(frozen=True)
class Job:
    """A checkpoint to audit, and the folder for its results."""

    source: Source
    out: Path


@dataclass(frozen=True)
class Report:
    """What the last task of an audit sends back.

    Attributes
    ----------
    files : dict of bytes
        The results by name, in the order in which they are written.
    text : str
        The audit on a terminal.
    summary : dict
        The checkpoint in a row of numbers.
    result : dict
        The audit as JSON has it.
    """

    files: dict[str, bytes]
    text: str
    summary: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How the audit of a checkpoint ended: with a report, kept from an earlier run, or with an error.

    Attributes
    ----------
    job : Job
    digest : str
        Of all that the results depend on; empty where the checkpoint could not be opened.
    summary : dict or None
        None where it failed.
    text : str
        The audit on a terminal; empty where an earlier run's results are kept.
    error : Exception or None
    result : dict
        The audit as JSON has it; empty where it failed.
    """

    job: Job
    digest: str
    summary: dict[str, Any] | None = None
    text: str = ""
    error: Exception | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def findings_that_fail(self, limits: Collection[str]) -> list[dict[str, Any]]:
        """Its findings that a gate does not let through, as JSON has them."""
        return [finding for finding in self.result.get("findings", ()) if fails(finding["kind"], limits)]

    @property
    def problem(self) -> str:
        """The error in a line; one that is not about the input is a defect, and is named by its type too."""
        if self.error is None:
            return ""
        text = printable(" ".join(str(self.error).split()))
        return text if isinstance(self.error, CheckpointError) else f"{type(self.error).__name__}: {text}"


def report_task(get_model: Callable[[], Model], layers: Mapping[int, Arrays], options: AuditOptions) -> Report:
    """The task that ends a checkpoint's audit, wherever it runs: findings, tables, figures and page, as bytes."""
    audit, files = conclude(get_model(), layers, options), Files()
    audit.write_report(files)  # a picture is there no later than the numbers
    with phase("writing tables"):
        audit.write_tables(files)
    return Report(files.contents, str(audit), audit.summary(), audit.as_json())


def audit_all(
    jobs: Sequence[Job],
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[Job, str], None] = lambda job, line: None,
) -> Iterator[Outcome]:
    """Audit checkpoints, and say of each how its audit ended as soon as it has.

    One that fails does not keep the others. Results are written here; whoever measures only reads.

    Parameters
    ----------
    jobs : sequence of Job
        Each with a folder of its own.
    options : AuditOptions
    engine : Engine
    resume : bool
        Use the layers that an earlier run has finished, and its results where it has finished all.
    say : function of (job, line)
        Told what a person should know while the audit goes on.

    Raises
    ------
    CheckpointError
        The engine itself failed.
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
                    # What ends an audit shows its own progress, but not from another process.
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
                run.close()  # lets go of its folder


_Run = Generator[None, tuple[int, Any, Exception | None], Outcome]


def _run(
    number: int, job: Job, options: AuditOptions, engine: Engine, resume: bool, say: Callable[[str], None], layers: Bar
) -> _Run:
    """The audit of one checkpoint: hands out tasks, and is sent (index, value, error) of each as it ends."""
    digest, left = "", []
    try:
        model = job.source.open()
        of_layers = layers_fingerprint(model, options)
        of_all = results_fingerprint(model, options)
        digest, folder = of_all.digest, OutputFolder(job.out, of_all.facts, RESULTS)
        if resume and folder.is_finished():
            summary, result = (json.loads((job.out / name).read_text(encoding="utf-8")) for name in (KEPT, RESULT))
            return Outcome(job, digest, summary, result=result)
        get_model = job.source.as_seen(model).elsewhere if engine.elsewhere else partial(_itself, model)
        with folder:
            finished = FinishedLayers(job.out, of_layers, options.layers_of(model), resume)
            if finished.notice is not None:
                say(finished.notice)
            left = finished.left
            layers.total += len(left)
            for index, following in pairwise((*left, None)):
                ahead = None if engine.elsewhere else following  # another process may measure that one
                engine.submit((number, index), measure_task, get_model, index, options, ahead)
            while left:
                index, measured = _value_of((yield))
                finished.put(index, arrays_of(measured, index))
                layers.update()
            engine.submit((number, REPORT), report_task, get_model, finished.all(), options)
            report = report_of(_value_of((yield))[1], Report)
            folder.add(report.files)
            folder.json(KEPT, report.summary)
            folder.json(RESULT, report.result)
            finished.clear()
        return Outcome(job, digest, report.summary, report.text, result=report.result)
    except Exception as error:
        engine.forget(lambda key: key[0] == number)
        layers.total -= len(left)
        return Outcome(job, digest, error=error)


def _value_of(ended: tuple[int, Any, Exception | None]) -> tuple[int, Any]:
    """A task's index and value, or its error raised."""
    index, value, error = ended
    if error is not None:
        raise error
    return index, value


def _itself(model: Model) -> Model:
    return model


def layers_fingerprint(model: Model, options: AuditOptions) -> Fingerprint:
    """Everything that the numbers of a layer depend on, to tell whether finished ones may be used again."""
    return Fingerprint.of_model(
        model,
        layers=options.layers_of(model),
        deltas=list(options.deltas),
        window=options.window,
        device=options.device,
    )


def results_fingerprint(model: Model, options: AuditOptions) -> Fingerprint:
    """Everything that an audit's tables and page depend on, to tell whether finished ones may be kept."""
    asked = asdict(options) | {"layers": options.layers_of(model)}
    reference = content_identity(Path(options.reference or OWN))
    return layers_fingerprint(model, options).of_pages(model, tokenizer_at(model), asked=asked, reference=reference)


def audit_list(
    sources: Sequence[Source],
    out: Path,
    options: AuditOptions,
    engine: Engine,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
    names: Sequence[str] | None = None,
) -> Iterator[Outcome]:
    """Audit every source into OUT/NAME, and say of each how it went as soon as it has ended.

    `names` are those that `folder_names` gives unless others are wanted.

    summary.csv has a row for each that has ended, the gravest first; summary.html is written at the end.

    Raises
    ------
    CheckpointError
        Two sources would share a folder, `out` cannot be written to or another audit is at work there, or the engine
        failed.
    """
    from weightscope.audits.page import write_summary_page

    own = names or folder_names([source.source for source in sources])
    jobs = [Job(source, out / name) for source, name in zip(sources, own, strict=True)]
    ended: dict[Job, Outcome] = {}
    with OutputFolder(out, names=("summary.csv", "summary.html")) as folder:
        for outcome in audit_all(jobs, options, engine, resume, lambda job, line: say(f"{job.out.name}: {line}")):
            ended[outcome.job] = outcome
            summary = summary_of([ended[job] for job in jobs if job in ended])
            folder.table("summary.csv", summary)
            yield outcome
        write_summary_page(folder, summary)


GRAVEST = [f"{severity}s" for severity in SEVERITIES]  # columns by which a summary is sorted
SUMMARY = (
    Column("name", symbol="checkpoint"), Column("source"), Column("status"), Column("family"), Column("layers"),
    Column("heads"), Column("d_model", symbol="width"), Column("findings"), *map(Column, GRAVEST),
    Column("qk_sigma1", symbol="σ₁(W_QK)"),
    Column("qk_effective_rank", symbol="erank(W_QK)"), Column("vo_sigma1", symbol="σ₁(W_VO)"),
    Column("vo_copying_score", symbol="copying score"), Column("error", symbol="what was wrong"), Column("plan"),
)  # fmt: skip


def summary_of(outcomes: Sequence[Outcome]) -> Table:
    """A row a checkpoint: how its audit ended, its sizes, and medians over its heads. Its csv() is summary.csv.

    Those that failed come first, then those with most errors, most warnings, most notes.
    """

    def gravity(outcome: Outcome) -> tuple[int, ...]:
        if outcome.summary is None:
            return (1,)
        counts = (outcome.summary.get(column) for column in GRAVEST)
        return 0, *(count if isinstance(count, int) else 0 for count in counts)

    cells = []
    for outcome in sorted(outcomes, key=gravity, reverse=True):
        name, source = outcome.job.out.name, outcome.job.source.source
        own = {
            "name": Link(f"{name}/report.html", name), "source": source, "error": outcome.problem,
            "status": "failed" if outcome.summary is None else "ok", "plan": outcome.digest,
        } | (outcome.summary or {})  # fmt: skip
        cells.append([own.get(column.name, "") for column in SUMMARY])
    return Table.of_rows(SUMMARY, cells)
