"""Switches of a config that a row was not proved under: each is turned over in a tiny model, refused if it matters."""

import re
from collections.abc import Iterator
from typing import Any

from weightscope.adoption.census import TRIALS, at_work
from weightscope.adoption.derived import Derived
from weightscope.adoption.judge import Stored, stacks
from weightscope.adoption.trial import Tiny, nearness
from weightscope.checkpoint import open_checkpoint
from weightscope.families.family import Family, When
from weightscope.writing import scratch_folder

BOUND = 1.5  # of scores, queries, keys or values, that tells whether a key of the config is one
MOST = 16  # switches that are tried
NO_ATTENTION = re.compile(
    r"use_cache|tie_.*|return_dict|output_.*|torchscript|use_bfloat16|is_decoder|is_encoder_decoder|.*dropout.*"
    r"|add_cross_attention|gradient_checkpointing|.*(router|aux_loss|cls|mask_token|pooling|spec_augment).*",
    re.ASCII,
)


def guarded(row: Family, derived: Derived) -> Family:
    """The row with a refusal of every switch that, turned over, makes attention another.

    A row is saved under its model_type, and other checkpoints of that type may have other switches set. Bounds that
    this config leaves open are tried, too, and become cells.
    """
    for key in _open(derived):
        if _matters(row, derived, key, BOUND):
            capped = (row.but(softcap=key), row.but(clip=(key,)))
            row = next((other for other in capped if not _matters(other, derived, key, BOUND)), row)
    for key, value in _switches(row, derived):
        if _matters(row, derived, key, not value):
            said = f"{key} {str(not value).lower()}, which this row was not proved for"
            usual = derived.left_out(key)
            row = row.but(variants=(*row.variants, When(key, not value, refused=said)))
            row = row if usual is None else row.but(defaults={key: usual})
    return row


def _open(derived: Derived) -> list[str]:
    """Bounds of scores, queries, keys and values that the config leaves open."""
    return [key for key, value in derived.first.config.items() if value is None and re.search("clip|cap", key)]


def _switches(row: Family, derived: Derived) -> Iterator[tuple[str, bool]]:
    """The config's true and false values that the row does not go by and that may be attention's."""
    read = {row.biases.query, row.biases.key, row.biases.value, row.biases.output}
    found = [(key, value) for key, value in derived.first.config.items() if isinstance(value, bool)]
    yield from [one for one in found if one[0] not in read and not NO_ATTENTION.fullmatch(one[0])][:MOST]


def _matters(row: Family, derived: Derived, key: str, value: object) -> bool:
    """Whether the row is not exact of a tiny model with that switch; one that is not built tells nothing."""
    config = derived.first.tiny.model.config
    values = config.to_dict()
    part = values
    for inner in filter(None, derived.first.part.split(".")):
        part = part[inner]
    part[key] = value
    try:
        model, observed = at_work(type(config).from_dict(values), *TRIALS[0])
    except Exception:  # whatever transformers raises of switches that do not go together
        return False
    with scratch_folder() as folder:
        model.save_pretrained(folder)
        tiny = Tiny(model, open_checkpoint(folder), Stored(model, folder), stacks(observed))
        there: Any = tiny.stacks.get(derived.stack)
        return there is not None and bool(nearness(row, tiny, derived.stack).said)
