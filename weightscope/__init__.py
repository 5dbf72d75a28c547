"""Analyse the attention heads of a transformer checkpoint from its weights alone.

    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")  # a folder, a file or a Hub id; a small GPT-2 is embedded
    >>> head = model.layer(3).head(5)
    >>> head.qk.shape
    (192, 192)

Checkpoints and their heads
    `open_model`, `Model`, `Factored`, `CheckpointError`
Every head of a checkpoint, and how heads move between checkpoints
    `audit`, `compare`
Whether a copy is still the same model
    `same`, `identity`, `card`
Where a checkpoint comes from, and what was done to it
    `lineage`, `fingerprint`
Many checkpoints; matrices to train
    `atlas`, `rank`
What was trained into a checkpoint
    `learned`
What each head is, and which heads read what others write
    `circuits`
The first layer as a function of tokens and positions
    `first_layer`, `FirstLayer`, `neighbours`, `bigram_auroc`, `positions`, `load_counts`
Activations, with PyTorch
    `open_runner`
Results
    `Table`, `load`

Names are imported on first use: `import weightscope` does not load NumPy, SciPy, Matplotlib or
PyTorch.

The wings (folders) of the package, from the top down. A module imports from its own wing and from
those below it; to understand it, read what is below. Each wing's docstring says what lies inside
and where to begin.

    cli           one module for each group of commands; what they share
    adopting      find and verify a row for an unknown architecture (PyTorch)
    pairs         questions about two checkpoints or more: deeds, compare, same, identity, card,
                  learned, lineage, rank, claims, atlas
    heads         questions about one checkpoint: audit, tensors, circuits, detok, norms, outliers,
                  sinks
    report        pages, findings, results read back
    runner        load a model, observe it, patch it (PyTorch)
    model         tensors to heads: rows of architectures, meaning of configs, layers, metrics, text
    checkpoint    bytes to tensors: safetensors, GGUF, packings, adapters, the Hub
    core          what everything stands on: errors, files, tables, results, compute
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.core.errors import CheckpointError
    from weightscope.core.tables import Table
    from weightscope.heads.audit.audit import audit
    from weightscope.heads.circuits.circuits import circuits
    from weightscope.heads.detok.first_layer import FirstLayer, first_layer, neighbours
    from weightscope.heads.detok.heads import bigram_auroc
    from weightscope.heads.detok.kernels import positions
    from weightscope.model.layers.factored import Factored
    from weightscope.model.model import Model, open_model
    from weightscope.model.text.counts import load_counts
    from weightscope.pairs.atlas.atlas import atlas
    from weightscope.pairs.card.card import card
    from weightscope.pairs.compare.compare import compare
    from weightscope.pairs.identity.identity import identity
    from weightscope.pairs.learned.learned import learned
    from weightscope.pairs.lineage.lineage import lineage
    from weightscope.pairs.lineage.sketches import fingerprint
    from weightscope.pairs.rank.rank import rank
    from weightscope.pairs.same.same import same
    from weightscope.report.written import load
    from weightscope.runner.runner import open_runner

__all__ = [
    "CheckpointError", "Factored", "FirstLayer", "Model", "Table", "atlas", "audit",
    "bigram_auroc", "card", "circuits", "compare", "fingerprint", "first_layer", "identity",
    "learned", "lineage", "load", "load_counts", "neighbours", "open_model", "open_runner",
    "positions", "rank", "same",
]  # fmt: skip
__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "core.errors",
    "Factored": "model.layers.factored",
    "FirstLayer": "heads.detok.first_layer",
    "Model": "model.model",
    "Table": "core.tables",
    "atlas": "pairs.atlas.atlas",
    "audit": "heads.audit.audit",
    "bigram_auroc": "heads.detok.heads",
    "card": "pairs.card.card",
    "circuits": "heads.circuits.circuits",
    "compare": "pairs.compare.compare",
    "fingerprint": "pairs.lineage.sketches",
    "first_layer": "heads.detok.first_layer",
    "identity": "pairs.identity.identity",
    "learned": "pairs.learned.learned",
    "lineage": "pairs.lineage.lineage",
    "load": "report.written",
    "load_counts": "model.text.counts",
    "neighbours": "heads.detok.first_layer",
    "open_model": "model.model",
    "open_runner": "runner.runner",
    "positions": "heads.detok.kernels",
    "rank": "pairs.rank.rank",
    "same": "pairs.same.same",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    value = getattr(import_module(f"weightscope.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
