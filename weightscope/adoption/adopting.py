"""A row for an architecture that the table does not list: proposed from names, proved against the eager model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adoption.census import TRIALS, at_work
from weightscope.adoption.judge import Stored, Verdict, judge
from weightscope.adoption.observed import Observed
from weightscope.adoption.proposals import proposals
from weightscope.adoption.tiny import first_line
from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.families import FAMILIES, Family
from weightscope.families.stored import as_data
from weightscope.model import Model
from weightscope.writing import scratch_folder

PROOF = f"transformers {transformers.__version__}"


@dataclass(frozen=True)
class _Tiny:
    """A tiny model of an architecture, as it was saved and as it was seen at work."""

    checkpoint: Checkpoint
    stored: Stored
    observed: Sequence[Observed]


def adopt(checkpoint: Checkpoint, rows: Iterable[Family] = FAMILIES) -> Family:
    """The row that reads a checkpoint exactly: at two sizes, of two random models, near and far.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its names, shapes and config are looked at; no code that comes with it is run.
    rows : iterable of Family
        What proposals are made from.

    Raises
    ------
    CheckpointError
        transformers has no such architecture or cannot build a tiny one, or no row is exact; the message says how far
        the nearest came.
    """
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        problem = f"{PROOF} has no architecture '{str(kind)[:40]}', and code that comes with a checkpoint is not run"
        raise CheckpointError(problem, file=checkpoint.name)
    try:
        made = CONFIG_MAPPING[kind]
        config, usual = made.from_dict(dict(checkpoint.config)), made().to_dict()
    except Exception as error:  # whatever transformers raises of a config
        raise CheckpointError(
            f"transformers cannot read it: {first_line(error)}", file=checkpoint.config.file
        ) from None
    tried = proposals(checkpoint, kind, usual, rows)
    if not tried:
        raise CheckpointError("its projections are named like no family's; no row is proposed", file=checkpoint.name)
    best: Verdict | None = None
    for sizes, seed, start in TRIALS:
        with scratch_folder() as folder:
            try:
                model, observed = at_work(config, sizes, seed, start)
                model.save_pretrained(folder)
            except Exception as error:  # likewise
                problem = f"transformers builds no tiny model of it: {first_line(error)}"
                raise CheckpointError(problem, file=checkpoint.name) from None
            tiny = _Tiny(open_checkpoint(folder), Stored(model, folder), observed)
            left = []
            for row in tried:
                verdict = _verdict(row, tiny)
                best = _nearer(best, verdict)
                if verdict.verdict == "exact":
                    left.append(row)
        tried = left
    fitting = [row for row in tried if _fits(row, checkpoint)]
    if fitting:
        return fitting[0]
    reason = best.reason if best and best.reason else "not at both sizes"
    raise CheckpointError(f"no row reads it exactly; nearest: {reason}", file=checkpoint.name)


def _verdict(row: Family, tiny: _Tiny) -> Verdict:
    """What the eager model says of a row: of the stack that it reads, all layers of it."""
    try:
        model = Model(tiny.checkpoint, row)
        found = judge(tiny.observed, tiny.stored, [model])
    except CheckpointError as error:
        return Verdict("", "", 0, "refused", str(error))
    met = [one for one in found if one.reason != "no row reads this stack"]
    worst = [one for one in met if one.verdict != "exact"]
    return (worst or met or [Verdict("", "", 0, "refused", "its tensors are none of a layer's")])[0]


def _nearer(best: Verdict | None, other: Verdict) -> Verdict:
    """The one that came nearer to exact: values that are right say more than what does not open."""

    def rank(one: Verdict) -> int:
        near = ("values are right" in one.reason) + ("attention is right" in one.reason)
        return near + (one.verdict == "WRONG")

    return other if best is None or rank(other) > rank(best) else best


def _fits(row: Family, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint itself has what the row reads, and no attention that it does not."""
    try:
        model = Model(checkpoint, row.but(origin=f"adopted, proved against {PROOF}"))
        return all(model.attention_tensors(index) for index in model.attention_layers)
    except CheckpointError:
        return False


def as_python(row: Family) -> str:
    """A row as a person would write it in the table: what it has otherwise than the nearest there."""
    own = _cells(row)
    nearest = min(FAMILIES, key=lambda other: sum(_cells(other).get(key) != value for key, value in own.items()))
    whole, near = as_data(row), as_data(nearest)
    differs = [one.name for one in fields(Family) if whole.get(one.name) != near.get(one.name)]
    lines = [f"    {name}={_written(getattr(row, name))}," for name in differs]
    named = nearest.name.upper().replace("-", "_")
    return "\n".join([f"{row.name.upper().replace('-', '_')} = {named}.but(", *lines, ")"])


def _cells(row: Family) -> dict[str, Any]:
    return {key: value for key, value in as_data(row).items() if key not in ("is", "name", "model_types")}


def _written(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        said = as_data(value)
        given = [one.name for one in fields(value) if one.name in said]
        return f"{type(value).__name__}({', '.join(f'{name}={_written(getattr(value, name))}' for name in given)})"
    if callable(value):
        return str(value.__name__)
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return repr(value)
