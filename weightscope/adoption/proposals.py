"""Rows that may read an architecture: those of the table whose modules a checkpoint has, and what differs in kind only.

Names and shapes do not tell a LayerNorm without a bias from an RMSNorm, nor neighbours that turn from halves that do;
each is proposed, and the eager model decides. It decides of layers alone: what stands before the first and after the
last is left out of a row, but for a table of tokens that enters as it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from weightscope.checkpoint import Checkpoint
from weightscope.families import Family
from weightscope.families.cells import Inputs
from weightscope.families.config import KEYS
from weightscope.families.nesting import prefixes_of
from weightscope.families.rope import Rope
from weightscope.families.stored import as_data

SAME = ("name", "model_types", "prefixes", "defaults")  # cells in which rows may differ and read alike


def proposals(checkpoint: Checkpoint, model_type: str, usual: dict[str, Any], rows: Iterable[Family]) -> list[Family]:
    """Rows to try, those of the table first, then those with another norm or another order of what turns.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of the architecture that a row is wanted for; only names and the config are looked at.
    model_type : str
    usual : dict
        What the architecture's config holds where config.json says nothing.
    rows : iterable of Family
    """
    fitting: dict[str, Family] = {}
    for row in rows:
        found = prefixes_of(checkpoint, row)
        if not found or _foreign(row, usual):
            continue
        defaults = {key: usual.get(key, value) for key, value in row.defaults.items()}
        own = row.but(name=model_type, model_types=(model_type,), prefixes=tuple(found), nested="", gguf=None)
        own = replace(own, defaults=defaults, outputs=None, inputs=_sure(row.inputs))
        cells = {key: value for key, value in as_data(own).items() if key not in SAME}
        fitting.setdefault(str(cells), own)
    first = sorted(fitting.values(), key=lambda row: len(str(as_data(row))))
    return first + [other for row in first for other in _altered(row, checkpoint)]


def _foreign(row: Family, usual: dict[str, Any]) -> bool:
    """Whether a row goes by a setting that the architecture has not: what it decides no tiny model may show."""
    tried = (*KEYS.values(), row.kv_heads, row.head_dim)
    common = {key for keys in tried if not isinstance(keys, int) for key in keys}
    settings = {key for key, value in row.defaults.items() if value not in (False, None)}
    return bool(settings - usual.keys() - common)


def _sure(inputs: Inputs) -> Inputs:
    """What enters the first layer, where that is rows of a table and nothing else."""
    return inputs if inputs == Inputs(tokens=inputs.tokens) else Inputs()


def _altered(row: Family, checkpoint: Checkpoint) -> Iterator[Family]:
    """A row with the other kinds of norm, and with neighbours turning instead of halves, or halves of neighbours."""
    ropes = [row.rope]
    if isinstance(row.rope, Rope):
        ropes.append(replace(row.rope, interleaved=not row.rope.interleaved, interleaved_key=""))
    norms = [row.norm]
    if row.norm is not None and row.norm.module:
        with_bias = any(name.endswith(f"{row.norm.module}.bias") for name in checkpoint)
        kinds = ((True, 0.0), (False, 0.0), (False, 1.0))
        norms += [replace(row.norm, centred=centred, bias=with_bias, offset=offset) for centred, offset in kinds]
    for norm in norms:
        for rope in ropes:
            if norm != row.norm or rope != row.rope:
                yield replace(row, norm=norm, rope=rope)
