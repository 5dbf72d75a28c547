"""Analyse the attention heads of a transformer checkpoint from its weights alone.

    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")           # a folder, a file or a Hub id; "embedded" is a small GPT-2
    >>> head = model.layer(0).head(6)
    >>> head.qk.shape
    (256, 256)

Checkpoints and their heads
    `open_model`, `Model`, `Factored`, `CheckpointError`
Every head of a checkpoint, and how heads move between checkpoints
    `audit`, `compare`
Where a checkpoint comes from, and what was done to it
    `lineage`
What each head is, and which heads read what others write
    `circuits`
The first layer as a function of tokens and positions
    `first_layer`, `FirstLayer`, `neighbours`, `bigram_auroc`, `load_counts`
Activations, with PyTorch
    `open_runner`
Results
    `Table`

Names are imported on first use: `import weightscope` does not load NumPy, SciPy, Matplotlib or PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.ancestry.lineage import lineage
    from weightscope.attention.factored import Factored
    from weightscope.audits.audit import audit
    from weightscope.circuitry.circuits import circuits
    from weightscope.comparisons.compare import compare
    from weightscope.detokenization.first_layer import FirstLayer, first_layer, neighbours
    from weightscope.detokenization.heads import bigram_auroc
    from weightscope.errors import CheckpointError
    from weightscope.model import Model, open_model
    from weightscope.runner.runner import open_runner
    from weightscope.tables import Table
    from weightscope.text.counts import load_counts

__all__ = [
    "CheckpointError", "Factored", "FirstLayer", "Model", "Table", "audit", "bigram_auroc", "circuits", "compare",
    "first_layer", "lineage", "load_counts", "neighbours", "open_model", "open_runner",
]  # fmt: skip
__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "errors",
    "Factored": "attention.factored",
    "FirstLayer": "detokenization.first_layer",
    "Model": "model",
    "Table": "tables",
    "audit": "audits.audit",
    "bigram_auroc": "detokenization.heads",
    "circuits": "circuitry.circuits",
    "compare": "comparisons.compare",
    "first_layer": "detokenization.first_layer",
    "lineage": "ancestry.lineage",
    "load_counts": "text.counts",
    "neighbours": "detokenization.first_layer",
    "open_model": "model",
    "open_runner": "runner.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    value = getattr(import_module(f"weightscope.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
