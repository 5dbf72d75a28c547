"""The work of other tools, and ours next to it, each in its own process, which reports the cost after its imports.

    python peers.py transformer-lens FOLDER report.json

It runs under an interpreter that has the tool, because its dependencies can conflict with weightscope's.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Told = dict[str, Any]  # what is reported with the cost


def transformer_lens(folder: str) -> Callable[[], Told]:
    """All singular values of W_QK and W_VO of a model that TransformerLens loads."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    def work() -> Told:
        model = TransformerBridge.boot_transformers(folder, device="cpu")
        for maps in (model.QK, model.OV):
            assert torch.isfinite(maps.svd()[1]).all()
        return {}

    return work


def weightwatcher(arrays: str) -> Callable[[], Told]:
    """Spectra of whole matrices with fits of power laws, from an .npz; the exponents are told."""
    import logging

    import numpy as np
    import torch
    import weightwatcher as ww

    logging.disable(logging.CRITICAL)

    def work() -> Told:
        with np.load(arrays) as file:
            matrices = {name: torch.from_numpy(file[name]) for name in file}
        layers = [torch.nn.Linear(*w.shape[::-1], bias=False) for w in matrices.values()]
        for layer, w in zip(layers, matrices.values(), strict=True):
            layer.weight.data = w
        details = ww.WeightWatcher(model=torch.nn.Sequential(*layers)).analyze()
        names = list(matrices)
        rows = details.to_dict("records")
        return {"alpha": {names[int(row["longname"])]: float(row["alpha"]) for row in rows}}

    return work


def gguf(path: str) -> Callable[[], Told]:
    """Every tensor of a GGUF file as float32, by the gguf package."""
    import numpy as np
    from gguf import GGUFReader, dequantize

    def work() -> Told:
        for tensor in GGUFReader(path).tensors:
            np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        return {}

    return work


def our_gguf(path: str) -> Callable[[], Told]:
    """The same here."""
    import weightscope as ws

    def work() -> Told:
        checkpoint = ws.open_model(path).checkpoint
        for name in checkpoint:
            checkpoint[name].read()
        return {}

    return work


def our_spectra(folder: str) -> Callable[[], Told]:
    """Singular values of W_QK and W_VO of every head."""
    from benchmarks.audit import singular_values
    from weightscope import open_model

    return lambda: singular_values(open_model(folder)) or {}


def our_matrices(folder: str) -> Callable[[], Told]:
    """Spectra and power laws of every matrix; the exponents are told."""
    from weightscope import open_model
    from weightscope.heads.tensors.matrices import MEASURES, read_matrices

    column = [measure.name for measure in MEASURES].index("alpha")

    def work() -> Told:
        rows = [row for row in read_matrices(open_model(folder)).rows if row.spectrum and row.expert is None]
        names = [row.facts.role if row.layer is None else f"layer {row.layer} {row.facts.role}" for row in rows]
        return {"alpha": {name: row.numbers[column] for name, row in zip(names, rows, strict=True)}}

    return work


WORKS: dict[str, Callable[[str], Callable[[], Told]]] = {
    "transformer-lens": transformer_lens, "weightwatcher": weightwatcher, "gguf": gguf,
    "our gguf": our_gguf, "our spectra": our_spectra, "our matrices": our_matrices,
}  # fmt: skip

if __name__ == "__main__":
    made = WORKS[sys.argv[1]](sys.argv[2])
    wall, cpu = time.perf_counter(), time.process_time()
    told = made()
    told |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    Path(sys.argv[3]).write_text(json.dumps(told))
