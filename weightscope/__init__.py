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
Whether a copy is still the same model
    `same`
Where a checkpoint comes from, and what was done to it
    `lineage`
What was trained into a checkpoint
    `learned`
What each head is, and which heads read what others write
    `circuits`
The first layer as a function of tokens and positions
    `first_layer`, `FirstLayer`, `neighbours`, `bigram_auroc`, `load_counts`
Activations, with PyTorch
    `open_runner`
Results
    `Table`, `load`

Names are imported on first use: `import weightscope` does not load NumPy, SciPy, Matplotlib or PyTorch.

The rooms (folders and modules) of the package, a floor a line. Imports go down only: to understand a module, read what
is below it.

    __main__
    cli                         one module for each group of commands; what they share
    sinks                       attention sinks: a constant bias, a NOP or a broadcast (PyTorch)
    atlas                       many checkpoints: fingerprints, families and their trees, all heads in one table
    claims                      a lineage that others can recompute: statement, signature, check, SBOM
    lineage                     where a checkpoint comes from, and what was done to it
    learned                     what was trained into a checkpoint: directions, intruders, words
    same                        is this still the same model: every tensor, the config and the tokenizer
    compare                     how far each head moved from one checkpoint to the next
    rank                        which matrices to train or merge, as a file for axolotl, PEFT or mergekit
    changes                     what changed between two checkpoints: tensors, heads, layers, wiring
    audit norms outliers        spectra of every head and what stands out; norms of alpha f(x); outlier dimensions
    tensors                     every tensor of a file by role, attention or not
    circuits                    what each head does, and which heads read what others write
    detok                       the first layer as a function of tokens and positions
    written                     results read back from the folders that commands wrote
    pages findings              what all reports and figures share, findings for code scanning; findings and their kinds
    adopting                    find and verify a row for an unknown architecture (PyTorch)
    runner                      load a model, observe it, patch it (PyTorch)
    sources text                SOURCE as a user writes it; corpora, tokenizers, bigrams
    provenance                  which files a result is from
    run_identity                what a resumed run depends on
    model                       an opened checkpoint: its layers, heads and embeddings
    embeddings                  what enters and leaves the stack of layers
    architectures               a row for each architecture; which row reads a checkpoint, and how
    metrics                     functions of arrays that several questions use
    checkpoint attention        bytes to tensors; a layer and its heads, without files
    engine                      tasks on threads, processes or a Dask cluster
    results                     what every result shows and writes
    files                       safe reading and writing
    tables                      columns with names, symbols and meanings
    compute progress formulas   cores, LAPACK, GPU; progress bars; formulas in text
    errors embedded             the one error of bad input; the small GPT-2 that ships with the package
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightscope.attention.factored import Factored
    from weightscope.audit.audit import audit
    from weightscope.circuits.circuits import circuits
    from weightscope.compare.compare import compare
    from weightscope.detok.first_layer import FirstLayer, first_layer, neighbours
    from weightscope.detok.heads import bigram_auroc
    from weightscope.errors import CheckpointError
    from weightscope.learned.learned import learned
    from weightscope.lineage.lineage import lineage
    from weightscope.model import Model, open_model
    from weightscope.runner.runner import open_runner
    from weightscope.same.same import same
    from weightscope.tables import Table
    from weightscope.text.counts import load_counts
    from weightscope.written import load

__all__ = [
    "CheckpointError", "Factored", "FirstLayer", "Model", "Table", "audit", "bigram_auroc", "circuits", "compare",
    "first_layer", "learned", "lineage", "load", "load_counts", "neighbours", "open_model", "open_runner", "same",
]  # fmt: skip
__version__ = "0.2.0"

_HOMES = {
    "CheckpointError": "errors",
    "Factored": "attention.factored",
    "FirstLayer": "detok.first_layer",
    "Model": "model",
    "Table": "tables",
    "audit": "audit.audit",
    "bigram_auroc": "detok.heads",
    "circuits": "circuits.circuits",
    "compare": "compare.compare",
    "first_layer": "detok.first_layer",
    "learned": "learned.learned",
    "lineage": "lineage.lineage",
    "load": "written",
    "load_counts": "text.counts",
    "neighbours": "detok.first_layer",
    "open_model": "model",
    "open_runner": "runner.runner",
    "same": "same.same",
}


# A room and the function that it is opened for share a name, as `audit`. Python binds a package's name when it is first
# imported: imported and unbound here (a docstring, a few names at most), it never hides the function that __getattr__
# finds.
for _room in ("audit", "circuits", "compare", "learned", "lineage", "same"):
    import_module(f"weightscope.{_room}")
    del globals()[_room]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightscope' has no attribute {name!r}")
    value = getattr(import_module(f"weightscope.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
