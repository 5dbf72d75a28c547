"""Report what readers of config.json take otherwise, with the file's tensors at hand."""

from collections.abc import Iterator

from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.heads.tensors.tied_head import says_tied, stored_ends, tie_holds
from weightscope.model.config.readers import (
    FOUR,
    Disagreement,
    Place,
    Takes,
    What,
    disagreements,
    taken,
)
from weightscope.model.model import Model
from weightscope.report.findings import Finding, finding

CONFIG = "config.json"
TIED = Place(What.TIED)
NAMED = 3  # disagreements in a sentence


def taken_by_readers(model: Model, *, first_look: bool = False) -> list[Takes]:
    """Read a model's config.json as each reader does; an error where it has none."""
    if not _has_config(model):
        problem = "was read without a config.json, so other readers take nothing from one"
        raise CheckpointError(problem, file=model.name)
    readings = taken(model.checkpoint.config, model.reading.part, model.row)
    _, head = stored_ends(model)
    if head is None:
        return readings
    # all run the head that is in the file, but 4.57 overwrites it where its config ties
    ties = any(each.reader == FOUR and each.values.get(TIED) for each in readings)
    overwrites = ties and not says_tied(model) and tie_holds(model, first_look=first_look) is False
    return [_with_head(reading, overwrites) for reading in readings]


def _with_head(reading: Takes, overwrites: bool) -> Takes:
    """A reading of a file with a head; `overwrites` if a tie to the embedding changes it."""
    values = dict(reading.values)
    is_tied = values.pop(TIED, None)
    if overwrites and is_tied is not None:
        values[TIED] = is_tied and reading.reader == FOUR
    return reading._replace(values=values)


def readers_disagree(model: Model, *, first_look: bool = False) -> list[Disagreement]:
    """List what readers take otherwise from a model's config.json, if it has one."""
    if not _has_config(model):
        return []
    return disagreements(taken_by_readers(model, first_look=first_look), model.checkpoint.config)


def disagreement_line(found: list[Disagreement]) -> str:
    """Disagreements and what to do, as sentences."""
    more = f"; and {counted(len(found) - NAMED, 'more')}" if len(found) > NAMED else ""
    advice = dict.fromkeys(each.advice for each in found[:NAMED])
    values = "; ".join(each.values for each in found[:NAMED])
    return printable(f"Readers of config.json disagree: {values}{more}. {' '.join(advice)}")


taken_otherwise = finding(
    "readers_disagree",
    "a config.json that readers take otherwise",
    severity="warning",
    rank=206,
    look_next="`weightscope inspect SOURCE --readers` shows what each takes; write the number into "
    "config.json where the others look for it too.",
)


def reader_findings(model: Model) -> Iterator[Finding]:
    """One finding where readers take something otherwise."""
    if found := readers_disagree(model):
        text = disagreement_line(found)
        yield taken_otherwise(measure="readers", number=float(len(found)), usual=0.0, text=text)


def _has_config(model: Model) -> bool:
    return any(name.rpartition("/")[2] == CONFIG for name, *_ in model.checkpoint.config.stored)
