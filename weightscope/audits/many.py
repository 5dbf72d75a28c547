"""Audits of many checkpoints as tasks for an engine: one a layer, and one that ends each checkpoint's audit."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.audits.audit import (
    Audit,
    AuditOptions,
    LayersToMeasure,
    Measured,
    layers_fingerprint,
    measure_one,
)
from weightscope.engine import Engine
from weightscope.fingerprint import tokenizer_identity
from weightscope.folder import OutputFolder
from weightscope.model import Model
from weightscope.progress import PROGRESS, Bar, phase
from weightscope.sources import Source


@dataclass(frozen=True)
class Commission:
    """A checkpoint to audit, and the folder for its results."""

    source: Source
    out: Path


@dataclass(frozen=True)
class Headline:
    """A checkpoint's audit in a row of numbers: its sizes, how many findings, medians over its heads."""

    family: str
    layers: int
    heads: int
    d_model: int
    findings: int
    qk_sigma1: float
    qk_effective_rank: float
    vo_sigma1: float
    vo_copying_score: float


@dataclass(frozen=True)
class Delivery:
    """What the last task of a checkpoint's audit sends back.

    Attributes
    ----------
    files : dict of bytes
        The results by name, in the order in which they are to be written.
    lines : list of str
        The audit on a terminal.
    headline : Headline
    """

    files: dict[str, bytes]
    lines: list[str]
    headline: Headline


@dataclass(frozen=True)
class Ended:
    """A checkpoint's audit that has ended: delivered, done before, or failed.

    Attributes
    ----------
    commission : Commission
    plan : str
        Digest of all that the results depend on; empty where the checkpoint could not be opened.
    delivery : Delivery or None
        None where it failed, or was done by an earlier run.
    error : Exception or None
    """

    commission: Commission
    plan: str
    delivery: Delivery | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class _UnderWay:
    commission: Commission
    opened: Callable[[], Model]
    work: LayersToMeasure
    plan: str
    folder: OutputFolder


Deliver = Callable[[Callable[[], Model], Measured, AuditOptions, Path], Delivery]
Done = Callable[[Commission, str], bool]
Say = Callable[[Commission, str], None]
CONCLUSION = -1  # what stands for a layer in the key of the task that ends an audit


def audit_all(
    commissions: Sequence[Commission],
    options: AuditOptions,
    engine: Engine,
    deliver: Deliver,
    resume: bool = False,
    done: Done = lambda commission, plan: True,
    say: Say = lambda commission, line: None,
) -> Iterator[Ended]:
    """Audit checkpoints, and say of each how its audit ended as soon as it has.

    One that fails does not keep the others. Results are written here; whoever measures only reads.

    Parameters
    ----------
    commissions : sequence of Commission
        Each with a folder of its own.
    options : AuditOptions
    engine : Engine
    deliver : function of (opened, heads, options, out)
        The task that ends an audit, and makes its tables, figures and page.
    resume : bool
        Use the layers that an earlier run has finished, and its results where it has finished all.
    done : function of (commission, plan)
        Whether results that an earlier run has finished will do.
    say : function of (commission, line)
        Told what a person should know while the audit goes on.

    Raises
    ------
    CheckpointError
        The engine itself failed.
    """
    waiting = deque(commissions)
    with Bar(total=0, desc="layers", unit="layer", **PROGRESS) as bar:
        desk = _Desk(options, engine, deliver, resume, done, say, bar)
        with closing(desk):
            while waiting or engine.busy:
                ended = desk.begin(waiting.popleft()) if waiting and engine.hungry else desk.go_on()
                if ended is not None:
                    yield ended


class _Desk:
    """What `audit_all` has under way."""

    def __init__(
        self, options: AuditOptions, engine: Engine, deliver: Deliver, resume: bool, done: Done, say: Say, bar: Any
    ) -> None:
        self._options, self._engine, self._deliver = options, engine, deliver
        self._resume, self._done, self._say, self._bar = resume, done, say, bar
        self._under_way: dict[int, _UnderWay] = {}
        self._begun = 0

    def begin(self, commission: Commission) -> Ended | None:
        """Open a checkpoint, and hand out the layers that are left of its audit."""
        options, engine, folder = self._options, self._engine, OutputFolder(commission.out)
        try:
            model = commission.source.open()
            fingerprint = layers_fingerprint(model, options).also(
                directions=options.directions, tokenizer=tokenizer_identity(model.checkpoint.folder)
            )
            digest, folder = fingerprint.digest, OutputFolder(commission.out, fingerprint.facts)
            if self._resume and folder.is_finished() and self._done(commission, digest):
                return Ended(commission, digest)
            opened = commission.source.as_seen(model).elsewhere if engine.elsewhere else partial(_itself, model)
            folder.begin()
            work = LayersToMeasure(model, commission.out, options, self._resume)
        except Exception as error:
            folder.release()
            return Ended(commission, "", error=error)
        if work.notice is not None:
            self._say(commission, work.notice)
        number, self._begun = self._begun, self._begun + 1
        self._under_way[number] = own = _UnderWay(commission, opened, work, digest, folder)
        self._bar.total += len(work.left)
        for index in work.left:
            engine.submit((number, index), measure_one, opened, index, options)
        try:
            if not work.left:
                self._conclude(number, own)
        except Exception as error:
            return self._end(number, error=error)
        return None

    def go_on(self) -> Ended | None:
        """Wait for a task to end and do what follows from it."""
        measured = not any(own.work.left for own in self._under_way.values())
        with phase("drawing figures") if measured else nullcontext():
            (number, index), value, error = self._engine.next()
        own = self._under_way[number]
        try:
            if error is not None:
                raise error
            if index != CONCLUSION:
                own.work.put(index, value)
                self._bar.update()
                if not own.work.left:
                    self._conclude(number, own)
                return None
            own.folder.add(value.files)
            own.work.clear()
            own.folder.finish()
            return self._end(number, delivery=value)
        except Exception as problem:
            self._engine.forget(lambda key: key[0] == number)
            self._bar.total -= len(own.work.left)
            return self._end(number, error=problem)

    def close(self) -> None:
        """Let go of the folders of audits that have not ended."""
        for own in self._under_way.values():
            own.folder.release()

    def _end(self, number: int, delivery: Delivery | None = None, error: Exception | None = None) -> Ended:
        own = self._under_way.pop(number)
        own.folder.release()
        return Ended(own.commission, own.plan, delivery, error)

    def _conclude(self, number: int, own: _UnderWay) -> None:
        heads = own.work.heads()
        self._engine.submit((number, CONCLUSION), self._deliver, own.opened, heads, self._options, own.commission.out)


def _itself(model: Model) -> Model:
    return model


def headline(model: Model, results: Audit) -> Headline:
    """An audit in a row of numbers."""
    columns = results.heads.columns
    n_layers, n_heads = columns["qk_sigma1"].shape

    def median(name: str) -> float:
        known: Any = columns[name][np.isfinite(columns[name])]
        return float(np.median(known)) if len(known) else np.nan

    return Headline(
        model.family.name,
        n_layers,
        n_heads,
        model.config.d_model,
        len(results.findings),
        *(median(name) for name in ("qk_sigma1", "qk_effective_rank", "vo_sigma1", "vo_copying_score")),
    )
