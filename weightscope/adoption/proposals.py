"""Rows of the table that may read a stack of another architecture: those whose modules its layers have.

The eager model decides. It decides of layers alone: what stands before the first and after the last is left out of a
row, but for a table of tokens that enters as it is.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from weightscope.checkpoint import Checkpoint
from weightscope.families import Family
from weightscope.families.cells import Inputs
from weightscope.families.config import KEYS
from weightscope.families.nesting import prefixes_of
from weightscope.families.stored import as_data

SAME = ("name", "model_types", "prefixes", "defaults")  # cells in which rows may differ and read alike


def proposals(
    checkpoint: Checkpoint,
    stems: Collection[str],
    usual: dict[str, Any],
    left_out: Callable[[str], Any],
    rows: Iterable[Family],
    **own: Any,
) -> list[Family]:
    """Rows to try, those with the fewest cells first.

    Parameters
    ----------
    checkpoint : Checkpoint
        Of a tiny model.
    stems : collection of str
        What stands before the names of the tensors of its layers.
    usual : dict
        What the architecture's config holds by default.
    left_out : function of a key
        What it holds where config.json lacks that key; None where other keys decide.
    rows : iterable of Family
    **own
        Cells that every one of them gets: a name, model_types ...
    """
    fitting: dict[str, Family] = {}
    for row in rows:
        if _foreign(row, usual):
            continue
        for prefix in prefixes_of(checkpoint, row):
            if prefix + row.layer.format(i=0) in stems or any(
                prefix + row.layer.format(i=i) in stems for i in range(8)
            ):
                defaults = {key: value for key in row.defaults if (value := left_out(key)) is not None}
                same = row.but(prefixes=(prefix,), gguf=None, **own)
                same = replace(same, defaults=defaults, outputs=None, inputs=_sure(row.inputs))
                cells = {key: value for key, value in as_data(same).items() if key not in SAME}
                fitting.setdefault(str(cells), same)
    return sorted(fitting.values(), key=lambda row: len(str(as_data(row))))


def _foreign(row: Family, usual: dict[str, Any]) -> bool:
    """Whether a row goes by a setting that the architecture has not: what it decides no tiny model may show."""
    tried = (*KEYS.values(), row.kv_heads, row.head_dim)
    common = {key for keys in tried if not isinstance(keys, int) for key in keys}
    settings = {key for key, value in row.defaults.items() if value not in (False, None)}
    return bool(settings - usual.keys() - common)


def _sure(inputs: Inputs) -> Inputs:
    """What enters the first layer, where that is rows of a table and nothing else."""
    return inputs if inputs == Inputs(tokens=inputs.tokens) else Inputs()
