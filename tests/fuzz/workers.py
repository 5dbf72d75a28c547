"""What a worker sends back to an audit: of other kinds, other names, other values.

The messages that carry it are pickles: nothing of them can be checked before they are opened. What comes out is.
"""

import pickle
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.fuzz.mutate import VALUES
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.core.files import Files, Folder
from weightscope.heads.audit.audit import AuditOptions, conclude, measure_task
from weightscope.heads.audit.batch import AuditOutcome, FinishedLayers, Job, Report, arrays_of, report_of, summary_of
from weightscope.model.model import open_model
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import Source

NAMES = (
    "../x", "/tmp/x", "a/../../x", "", ".", "..", "a/..", ".weightscope/lock", "a\\b", "a\0b", "\x1b[2J", "x.csv",
    "a/b/c/d", "heads.csv", 3, None,
)  # fmt: skip
THINGS = (
    *VALUES,
    b"x",
    np.zeros(3),
    np.array([None]),
    np.array("a"),
    {"a": np.zeros(2)},
    {"a": np.array([{}])},
    {1: 2},
    object,
)
SAVED = 4  # arrays of a layer that are kept: writing all of them takes most of the time


@cache
def _good() -> tuple[dict[str, Any], Report]:
    """What an honest worker sends for a layer, and at the end."""
    with TemporaryDirectory() as folder:
        model = open_model(write_checkpoint(Path(folder), gpt2_weights(n_layers=1)))
        options = AuditOptions(directions=0)
        layer = dict(measure_task(lambda: model, 0, options))
        files, audit = Files(), conclude(model, {0: layer}, options)
        audit.write_tables(files)
        return layer, Report(files.contents, str(audit), audit.summary())


def mutant(rng: random.Random) -> bytes:
    """An honest layer and report, or either with something else in its place."""
    layer, report = _good()
    layer = {name: layer[name] for name in rng.sample(list(layer), SAVED)}
    files, text, summary = dict(report.files), report.text, dict(report.summary)
    answers: list[Any] = [layer, Report(files, text, summary)]
    match rng.randrange(8):
        case 0:
            answers[rng.randrange(2)] = rng.choice(THINGS)
        case 1:
            layer[rng.choice((*NAMES, *layer))] = rng.choice(THINGS)
        case 2:
            files[rng.choice(NAMES)] = files.pop("heads.csv")
        case 3:
            files["heads.csv"] = rng.choice(THINGS)
        case 4:
            summary[rng.choice(("family", "heads", "new"))] = rng.choice(THINGS)
        case 5:
            answers[1] = Report(
                rng.choice((files, *THINGS)), rng.choice((text, *THINGS)), rng.choice((summary, *THINGS))
            )
    return pickle.dumps(answers)


def meet(folder: Path, content: bytes) -> str:
    """Keep a layer and write a report, as an audit does; nothing may lie outside its folder."""
    out = folder / "within" / "out"
    layer, report = pickle.loads(content)
    try:
        finished = FinishedLayers(out, RunIdentity.of(), [0], resume=False)
        finished.put(0, arrays_of(layer, "layer 0"))
        assert finished.all()
        report = report_of(report)
        Folder(out).add(report.files)
    except CheckpointError as error:
        assert str(error).isprintable()
        outcome = "refused"
    else:
        assert summary_of([AuditOutcome(Job(Source("x"), out), "", report.summary, report.text)]).csv()
        outcome = "written"
    assert {path.name for path in (*folder.iterdir(), *(folder / "within").glob("*"))} <= {"within", "out"}
    return outcome
