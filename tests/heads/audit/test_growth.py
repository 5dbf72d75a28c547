"""How memory grows with tensors, layers and tokens."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from weightscope.core.files import Folder
from weightscope.heads.audit.audit import AuditOptions, conclude, logit_bounds, measure_task, token_logits
from weightscope.heads.audit.batch import FinishedLayers
from weightscope.heads.circuits import passes
from weightscope.heads.tensors.measure import read_everything
from weightscope.model.run_identity import RunIdentity

pytestmark = pytest.mark.check


def peak(work: Callable[[], object]) -> int:
    """Bytes that some work holds at most."""
    tracemalloc.start()
    kept = work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return most


def test_a_tensor_costs_two_kilobytes_and_its_values_nothing(tmp_path: Path) -> None:
    few, many = (Sizes(layers=2, inner=16, experts=n) for n in (100, 400))
    folders = [write(tmp_path / str(sizes.experts), sizes) for sizes in (few, many)]
    ws.open_model(folders[0])
    held = [peak(lambda: ws.open_model(folder)) for folder in folders]  # noqa: B023
    tensors = len(list(many.shapes)) - len(list(few.shapes))
    assert (held[1] - held[0]) / tensors < 2500


def test_files_as_large_as_a_disk_cost_their_headers(tmp_path: Path) -> None:
    sizes = Sizes(layers=62, width=16384, heads=128, head_dim=128, kv_heads=8, vocabulary=128_256, inner=53248)
    folder = write(tmp_path, sizes, shards=96, holes=True)
    ws.open_model(folder)  # what is imported on the way is not its memory
    assert peak(lambda: ws.open_model(folder)) < 6e6
    assert ws.open_model(folder).checkpoint.nbytes > 4e11


def measured(folder: Path) -> None:
    """All layers, kept on disk one by one as the command does."""
    model, options = ws.open_model(folder), AuditOptions()
    finished = FinishedLayers(folder, RunIdentity.of(), options.layers_of(model), resume=False)
    for index in options.layers_of(model):
        finished.put(index, measure_task(lambda: model, index, options))


def test_measuring_holds_one_layer_however_many_there_are(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(n), Sizes(layers=n, width=256, heads=4, head_dim=64)) for n in (3, 12)]
    measured(folders[0])  # what is imported and cached on the way is not its memory
    few, many = (peak(lambda: measured(folder)) for folder in folders)  # noqa: B023
    assert many < 1.2 * few, (few, many)


def test_what_an_audit_keeps_of_a_head_is_some_kilobytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def concluded(folder: Path) -> int:
        model, options = ws.open_model(folder), AuditOptions(directions=0)
        layers = {i: measure_task(lambda: model, i, options) for i in options.layers_of(model)}
        return peak(lambda: conclude(model, layers, options))

    folders = [write(tmp_path / str(n), Sizes(layers=n)) for n in (4, 24)]
    concluded(folders[0])
    few, many = map(concluded, folders)
    assert (many - few) / (20 * 4) < 32_000, (few, many)


def test_what_a_comparison_keeps_of_two_heads_is_some_kilobytes(tmp_path: Path) -> None:
    """A head's own weights are 262 kB here, and none of them is kept."""
    folders = [write(tmp_path / str(n), Sizes(layers=n, width=256, heads=4, head_dim=64)) for n in (3, 12)]
    pairs = [(ws.open_model(folder), ws.open_model(folder)) for folder in folders]
    ws.compare(*pairs[0])
    few, many = (peak(lambda: ws.compare(*pair)) for pair in pairs)  # noqa: B023
    assert (many - few) / (9 * 4) < 120_000, (few, many)  # about 61,000 on average; a run may differ by 15,000


def test_a_pair_of_heads_costs_its_measures_and_what_ranks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six float32 numbers and three truth values are the result; ranking one of them takes two numbers more."""
    monkeypatch.setattr(passes, "WRITTEN_BYTES", 1 << 18)  # of a group of layers, small compared with all pairs
    models = [ws.open_model(write(tmp_path / str(n), Sizes(layers=n))) for n in (8, 48)]
    ws.circuits(models[0])
    few, many = (peak(lambda: ws.circuits(model)) for model in models)  # noqa: B023
    assert (many - few) / ((48 * 4) ** 2 - (8 * 4) ** 2) < 60, (few, many)


def test_every_tensor_of_a_file_costs_a_kilobyte_and_its_values_nothing(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{experts}-{inner}", Sizes(inner=inner, experts=experts))
        for experts, inner in ((100, 16), (400, 16), (100, 64))
    ]
    checkpoints = [ws.open_model(folder).checkpoint for folder in files]
    read_everything(checkpoints[0])
    few, many, large = (peak(lambda: read_everything(checkpoint)) for checkpoint in checkpoints)  # noqa: B023
    assert (many - few) / (2 * 3 * 300) < 1000, (few, many)
    assert large < few + 1e6 and checkpoints[2].nbytes > checkpoints[0].nbytes + 3e6


def test_a_row_of_the_vocabulary_costs_its_norm_and_what_judges_it(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(n), Sizes(vocabulary=n, width=16, head_dim=4)) for n in (200_000, 400_000)]
    held = [peak(lambda: ws.audit(ws.open_model(folder), directions=0)) for folder in folders]  # noqa: B023
    assert (held[1] - held[0]) / 200_000 < 150, held


def test_scores_of_all_pairs_of_tokens_are_held_some_at_a_time(tmp_path: Path) -> None:
    model = ws.open_model(write(tmp_path, Sizes(vocabulary=30_000, width=16, head_dim=4)))
    bounds = logit_bounds(model, 0)
    assert np.isfinite(token_logits(model, 0, bounds)).all()
    assert peak(lambda: token_logits(model, 0, bounds)) < 100e6  # all scores of a head: 7 GB


def test_json_is_written_without_holding_its_text(tmp_path: Path) -> None:
    value = [{"tokens": ["token"] * 20, "scores": [0.5] * 20}] * 1000
    assert peak(lambda: Folder(tmp_path).json("big.json", value)) < (tmp_path / "big.json").stat().st_size / 3
    assert (tmp_path / "big.json").read_text() == json.dumps(value, indent=1) + "\n"
