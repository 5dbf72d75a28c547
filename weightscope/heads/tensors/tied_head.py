"""Compare the language-model head with the token embedding that config.json may tie it to.

Of a file with two matrices that differ, under a config that ties them, transformers 5 keeps both
(modeling_utils.py, tie_weights); 4.56 overwrites the head with the embedding, and so does every
older version.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import printable
from weightscope.model.model import Model
from weightscope.report.findings import Finding, Member, finding

TIED = "tie_word_embeddings"
ROWS = 64  # rows per step of a first look
STEPS = 16  # steps of a first look
BLOCK = 1 << 22  # values compared at a time


def says_tied(model: Model) -> bool:
    """True if the config ties the head to the embedding; a wrapper's own config comes first."""
    whole, part = model.checkpoint.config, model.reading.part
    if part.raw is whole.raw:
        return model.config.get(TIED) is True
    return (whole if whole.get(TIED) is not None else part).get(TIED) is True


def tie_holds(model: Model, *, first_look: bool = False) -> bool | None:
    """Compare the head with the token embedding: true if not stored twice, or with equal values.

    A first look reads some rows, and nothing over a network. None where there is no head, or where
    it was not read.
    """
    tokens, head = stored_ends(model)
    if tokens is None:
        return None
    if head is None:
        return True if model.ends.tied else None
    if first_look and model.checkpoint.bytes_to_fetch([tokens.name, head.name]):
        return None
    return _equal(tokens, head, first_look)


def overwritten_head(model: Model, *, first_look: bool = False) -> str:
    """Describe a head that the config ties and the file holds with other values, if any."""
    tokens, head = stored_ends(model)
    if tokens is None or head is None or not says_tied(model):
        return ""
    if tie_holds(model, first_look=first_look) is not False:
        return ""
    names = f"{printable(head.name)} and {printable(tokens.name)}"
    return (
        f"The config says {TIED}, and {names} differ: transformers 5 keeps the head of the file, "
        "which is read here; 4.56 and older overwrite it with the embedding."
    )


overwritten = finding(
    "overwritten_head",
    "a head that the config ties to the embedding",
    severity="warning",
    rank=205,
    look_next="Set tie_word_embeddings to false in config.json, if the head of the file is meant; "
    "else leave it out of the file.",
)


def tied_head_finding(model: Model) -> Iterator[Finding]:
    """A head in the file that readers overwrite, as its config ties it."""
    _, head = stored_ends(model)
    if head is not None and (text := overwritten_head(model)):
        members = (Member("tensor", None, name=head.name),)
        yield overwritten(measure="tensors", number=1.0, usual=0.0, text=text, members=members)


def stored_ends(model: Model) -> tuple[Tensor | None, Tensor | None]:
    """The token embedding and the head in the file; None for one that it lacks."""
    checkpoint = model.checkpoint.unchecked()
    tokens = checkpoint.get(model.prefix + model.family.inputs.tokens)
    return tokens, checkpoint.get(model.ends.head_name)


def _equal(x: Tensor, y: Tensor, first_look: bool) -> bool:
    if x.shape != y.shape or not x.shape:
        return x.shape == y.shape and np.array_equal(x.read(), y.read(), equal_nan=True)
    rows = x.shape[0]
    step = ROWS if first_look else max(1, BLOCK // max(1, prod(x.shape[1:])))
    starts = [*range(0, rows, step)]
    if first_look:
        starts = starts[:: max(1, len(starts) // STEPS)]
    for start in starts:
        stop = min(start + step, rows)
        if not np.array_equal(x.rows(start, stop), y.rows(start, stop), equal_nan=True):
            return False
    return True
