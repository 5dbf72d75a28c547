"""The table of architectures as a table to read: `weightscope families`."""

from pathlib import Path

from weightscope.families.own_rows import known_rows
from weightscope.tables import Table

SPECIAL = {
    "qk_norm": "norm of queries and keys", "rope": "rotation", "additive": "position bias", "softcap": "softcap",
    "clip": "clipped", "sinks": "sinks", "output_scale": "LayerScale", "closing": "post-norm",
    "attention_types": "hybrid", "variants": "by config",
}  # fmt: skip


def families_table(families: str | Path | None = None) -> Table:
    """A row a family and stack: name, model_types, stack, how projections lie, what is special, where it is from."""
    return Table.of_rows(
        ["family", "model_types", "stack", "layout", "special", "from"],
        [
            (
                row.name, " ".join(row.model_types), row.tower or ("text" if row.inputs.tokens else "vision"),
                row.layout.__name__, ", ".join(said for cell, said in SPECIAL.items() if getattr(row, cell)),
                row.origin or "weightscope",
            )
            for row in known_rows(families)
        ],
    )  # fmt: skip
