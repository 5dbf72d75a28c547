"""Find which of two relatives came first, from the whole weights of small checkpoints."""

from dataclasses import replace
from typing import Any, NamedTuple

from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.opening import locate
from weightscope.core.engine import unexpected
from weightscope.core.errors import CheckpointError
from weightscope.model.model import Model
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import Source
from weightscope.pairs.lineage.lineage import lineage

NONCE = "atlas"  # nonce of the probes, so that a later run computes the same
LONGEST = 2_000  # characters of what differs


class Direction(NamedTuple):
    """The answer for one pair of relatives."""

    came_first: str = ""  # "first" or "second"; empty where it is not proved
    how: str = ""  # map from that one to the other
    differs: str = ""  # kinds of change


def find_direction(first: Source, second: Source, states: tuple[str, str]) -> tuple[str, str, str]:
    """Run the task of one pair, both as they were when their fingerprints were made."""
    models = [_at(source, state) for source, state in zip((first, second), states, strict=True)]
    result = lineage(models[1], [models[0]], nonce=NONCE)
    older = {None: "", "base": "first", "suspect": "second"}[result.came_first]
    how = result.proof.how if older and result.proof is not None else ""
    kinds = "; ".join(dict.fromkeys(kind.kind for kind in result.kinds))
    return older if how else "", how, kinds[:LONGEST]


def direction_of(answer: Any) -> Direction:
    """Check a worker's answer, or a kept one."""
    is_triple = isinstance(answer, tuple | list) and len(answer) == 3
    fits = is_triple and all(isinstance(text, str) and len(text) <= LONGEST for text in answer)
    if not fits or answer[0] not in ("", "first", "second"):
        raise unexpected("a pair", type(answer).__name__, "which came first, how, and what differs")
    return Direction(*answer)


def _at(source: Source, state: str) -> Model:
    """Open a checkpoint in this state: a commit, or a digest of its identity."""
    where = locate(source.source, source.revision)
    if isinstance(where, Repository):
        model = replace(source, source=where.id, revision=state).open()
        model.checkpoint.prefetch(model.checkpoint)
        return model
    model = source.open()
    if RunIdentity.of_model(model).digest != state:
        raise CheckpointError("has changed since its fingerprint was made", file=model.name)
    return model
