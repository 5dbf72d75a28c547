"""Whole runs and every kernel on a device that is none: array_api_strict, which has what the standard has and no more.

What differs from NumPy is rounding alone: products are of other shapes than the tuned kernels', sums in other order.
"""

import csv
import inspect
import json
import pickle
import shutil
import sys
import tracemalloc
from pathlib import Path

import array_api_strict
import numpy as np
import pytest
import scipy.sparse
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import case_of
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.cli import main
from weightscope.core.compute import device as backend
from weightscope.core.compute.device import Device, open_device
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import FinishedLayers, layers_identity
from weightscope.heads.circuits import passes
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import ScorerOnWorker, measure_heads
from weightscope.heads.detok.positions import sigma_statistics
from weightscope.model.layers.factored import inner
from weightscope.model.metrics.auroc import auroc_by_token
from weightscope.model.sources import Source
from weightscope.model.text.counts import Counts, load_counts
from weightscope.model.text.kinds import TokenKinds

STRICT = Device("array_api_strict", array_api_strict, memory=200_000_000)


@pytest.fixture(autouse=True)
def standard_of_2023():
    """Nothing newer than the 2023.12 standard."""
    with array_api_strict.ArrayAPIStrictFlags(api_version="2023.12"):
        yield


@pytest.fixture
def cuda_is_strict(monkeypatch):
    """`--device cuda` means array_api_strict."""
    open_device.cache_clear()
    monkeypatch.setattr(backend, "_cuda", lambda: STRICT)
    yield
    open_device.cache_clear()


def random_counts(n: int, seed: int = 0) -> Counts:
    """About three tokens seen before each token, some tokens after none."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(1, 9, (n, n)) * (rng.random((n, n)) < 3 / n)
    matrix = scipy.sparse.csr_array(dense.astype(np.int64))
    arrays = (np.asarray(x, np.int64) for x in (matrix.indptr, matrix.indices, matrix.data))
    return Counts(*arrays, "", ("corpus.txt",), 1, 10**6)


def run_all_kernels(device: Device) -> dict[str, np.ndarray]:
    """Each kernel's numbers on factors of whole numbers, whose products float32 holds exactly in any order."""
    rng = np.random.default_rng(3)
    left, right, positions = (rng.integers(-9, 10, (n, 8)).astype(np.float32) for n in (120, 120, 30))
    counts = scipy.sparse.csr_array(rng.integers(0, 9, (120, 120)) * (rng.random((120, 120)) < 0.05))
    tokens = [(start, left[start : start + 50]) for start in range(0, 120, 50)]
    statistics = sigma_statistics(lambda: tokens, 120, positions, 1e-5, device=device)
    a, b = device.put(left), device.put(right)
    return {
        "auroc": auroc_by_token(left, right, counts, device=device),
        "gram": inner(a, device=device),
        "product": inner(a, b, device=device),
        **{f"sigma {name}": values for name, values in vars(statistics).items()},
    }


def test_numpy_and_array_api_strict_give_the_same_bits():
    plain, strict = run_all_kernels(Device("numpy", np, memory=200_000_000)), run_all_kernels(STRICT)
    for name, values in plain.items():
        np.testing.assert_array_equal(strict[name], values, err_msg=name)


def test_the_tuned_kernels_give_the_same_numbers():
    """Exactly where the factors are whole numbers; sigma to the rounding of its float32 products."""
    tuned, strict = run_all_kernels(backend.CPU), run_all_kernels(STRICT)
    for name, values in tuned.items():
        exact = not name.startswith("sigma")
        np.testing.assert_allclose(strict[name], values, rtol=0 if exact else 2e-6, atol=0, err_msg=name)


@pytest.mark.parametrize("memory", [300_000, 1 << 22, 1 << 30])
def test_blocks_of_any_size_give_the_same_auroc(memory):
    rng = np.random.default_rng(4)
    left, right = (rng.integers(-3, 4, (400, 6)).astype(np.float32) for _ in range(2))
    counts = scipy.sparse.csr_array(rng.integers(0, 9, (400, 400)) * (rng.random((400, 400)) < 0.03))
    steps: list[int] = []
    aurocs = auroc_by_token(
        left, right, counts, device=Device("strict", array_api_strict, memory), progress=steps.append
    )
    np.testing.assert_array_equal(aurocs, auroc_by_token(left, right, counts))
    assert sum(steps) == 400
    some = slice(37, 190)
    of_some = auroc_by_token(left[some], right, counts[some], device=Device("strict", array_api_strict, memory))
    np.testing.assert_array_equal(of_some, aurocs[some])
    assert len(steps) > (10 if memory == 300_000 else 1)


@pytest.mark.parametrize("most_seen", [30, 600])
def test_blocks_keep_within_the_memory_they_are_sized_to(most_seen):
    """Everything that AUROC and sigma allocate on the device, and here NumPy with it."""
    rng = np.random.default_rng(5)
    left, right, positions = (rng.standard_normal((n, 8), np.float32) for n in (2000, 2000, 700))
    counts = scipy.sparse.csr_array(rng.integers(1, 9, (2000, 2000)) * (rng.random((2000, 2000)) < most_seen / 2000))
    counts.sort_indices()
    memory = 160_000_000
    works = {
        "auroc": lambda device: auroc_by_token(left, right, counts, device=device),
        "sigma": lambda device: sigma_statistics(lambda: [(0, left)], 2000, positions, 1e-5, device=device),
    }
    for name, work in works.items():
        tracemalloc.start()
        work(Device("numpy", np, memory))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < memory, name


def test_a_device_with_no_room_for_one_row_is_refused():
    counts = scipy.sparse.csr_array(np.eye(300, dtype=np.int64))
    with pytest.raises(ws.CheckpointError, match="the device has 0 MB free"):
        auroc_by_token(np.ones((300, 2)), np.ones((300, 2)), counts, device=Device("strict", array_api_strict, 5000))


def test_detokenization_of_whole_numbers_is_the_same_to_the_bit(tmp_path):
    """An OPT that divides by no sigma: with whole numbers for weights all scores are whole, and so exact."""
    folder = tmp_path / "whole"
    shutil.copytree(FIXTURES / "opt_post_norm", folder)
    [file] = folder.glob("*.safetensors")
    weights = {name: np.round(8 * w).astype(np.float32) for name, w in load_file(file).items()}
    assert max(np.abs(w).max() for w in weights.values()) < 100
    save_file(weights, file)
    model = ws.open_model(folder)
    counts = random_counts(model.embeddings.n_tokens)
    here, there = (measure_heads(FirstLayer(model, device=name), counts) for name in ("cpu", "array_api_strict"))
    np.testing.assert_array_equal(there.auroc, here.auroc)
    assert there.heads.csv() == here.heads.csv()
    assert np.nanstd(here.auroc) > 0.1


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert", "gemma2"])
def test_factors_of_t_ee_are_the_same(name, monkeypatch):
    """With sigma, grouped queries, rotation and a norm inside attention; rows kept on the device and not."""
    model = fixture(name).model
    heads = model.config.n_heads, model.config.n_kv_heads
    here = FirstLayer(model)
    for share in (0.3, 0.0):
        monkeypatch.setattr("weightscope.heads.detok.first_layer.SHARE_KEPT", share)
        there = FirstLayer(model, device="array_api_strict")
        for n, measured, expected in zip(
            heads, (there.query_factor, there.key_factor), (here.query_factor, here.key_factor), strict=True
        ):
            for head in range(n):
                assert measured(head).dtype == np.float32
                np.testing.assert_allclose(measured(head), expected(head), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(there.query_factor(0, 5, 17), here.query_factor(0, 5, 17), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "falcon_grouped", "qwen3", "deepseek_v3", "opt_post_norm"])
def test_an_audit_measures_the_same(name):
    """Every measure of every head, to 1e-9 of the largest of its kind."""
    model = fixture(name).model
    here, there = (ws.audit(model, directions=0, device=d).measured.arrays for d in ("cpu", "array_api_strict"))
    assert here.keys() == there.keys()
    for key, values in here.items():
        if values.dtype.kind in "US":
            np.testing.assert_array_equal(there[key], values)
        else:
            largest = np.nanmax(np.abs(values), initial=0)
            np.testing.assert_allclose(there[key], values, rtol=1e-9, atol=1e-9 * largest, err_msg=key)


KINDS = TokenKinds(("first", "other"), np.array([0, *[1] * 23], np.int8))
TEXTS = [np.array([0, 7, 9, 2, 11, 3]), np.array([0, 8, 2, 12]), np.array([0, 2, 20, 3, 21, 22])]


# Post-norm; LayerNorm; grouped heads that turn; norms of queries and keys, with a shift, of a latent; clipped.
@pytest.mark.check
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "cohere_qk_norm", "deepseek_v3", "mpt"])
def test_norms_and_contributions_of_running_models_are_the_same(name, tmp_path):
    """|f(x)| and C of eq. 7, worked out of a layer's own maps on the device, against the same on the cores."""
    pytest.importorskip("torch", reason="the runner needs the extra `runner`")
    from tests.support.random_models import random_model
    from weightscope.heads.norms.measure import measure_norms
    from weightscope.heads.outliers.measure import observe_contributions
    from weightscope.runner import open_runner

    random_model(case_of(name)).save_pretrained(tmp_path)
    here, there = (open_runner(ws.open_model(tmp_path), device=device) for device in ("cpu", "array_api_strict"))
    norms = [vars(measure_norms(runner, TEXTS, KINDS)) for runner in (here, there)]
    for key in ("alpha_f", "f_by_kind"):
        np.testing.assert_allclose(norms[1][key], norms[0][key], rtol=1e-5)
    by_device = [observe_contributions(runner, TEXTS, KINDS).by_kind for runner in (here, there)]
    np.testing.assert_allclose(by_device[1], by_device[0], rtol=1e-5, atol=1e-6 * np.abs(by_device[0]).max())


def test_a_layer_on_a_device_computes_there():
    """What it takes and gives are arrays of the device."""
    layer = fixture("llama").model.layer(0)
    x = np.ones((3, layer.q.stored.shape[1]), np.float32)
    there = layer.on(STRICT)
    assert layer.on(backend.CPU) is layer
    for array in (there.queries(STRICT.put(x)), there.inner_values(STRICT.put(x)), *there.scalars(STRICT.put(x))):
        assert isinstance(array, type(STRICT.put(x)))


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random GPT-2 of 300 tokens, and bigram counts."""
    folder = write_checkpoint(tmp_path_factory.mktemp("device"), gpt2_weights(vocab=300), vocab_size=300)
    random_counts(300).save(folder / "counts.npz")
    return folder


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_detok_from_end_to_end(folder, tmp_path, cuda_is_strict):
    """Scores that differ in their last bits may change places: a token's AUROC by a pair or two, a mean by less."""
    for device in ("cpu", "cuda"):
        result = run("detok", folder, "--counts", folder / "counts.npz", "--out", tmp_path / device, "--device", device)
        assert result.exit_code == 0, result.output
        assert (tmp_path / device / "report.html").stat().st_size
    here, there = (np.load(tmp_path / device / "tokens.npz")["auroc"] for device in ("cpu", "cuda"))
    np.testing.assert_array_equal(np.isnan(there), np.isnan(here))
    np.testing.assert_allclose(there, here, rtol=0, atol=0.01)
    np.testing.assert_allclose(np.nanmean(there, axis=1), np.nanmean(here, axis=1), rtol=0, atol=1e-4)


@pytest.mark.check
def test_positions_from_end_to_end(folder, tmp_path, cuda_is_strict):
    for device in ("cpu", "cuda"):
        result = run("positions", folder, "--out", tmp_path / device, "--query", 20, "--device", device)
        assert result.exit_code == 0, result.output
    here, there = (np.load(tmp_path / device / "positions.npz") for device in ("cpu", "cuda"))
    for name in ("t_p", "t_pp"):
        np.testing.assert_allclose(there[name], here[name], rtol=1e-5, atol=1e-5)


@pytest.mark.check
def test_audit_from_end_to_end(folder, tmp_path, cuda_is_strict):
    for device in ("cpu", "cuda"):
        result = run("audit", folder, "--out", tmp_path / device, "--device", device)
        assert result.exit_code == 0, result.output
    here, there = (np.load(tmp_path / device / "spectra.npz") for device in ("cpu", "cuda"))
    for name in here.files:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-9, atol=1e-9 * np.abs(here[name]).max())
    findings = [json.loads((tmp_path / device / "findings.json").read_text()) for device in ("cpu", "cuda")]
    assert len(findings[0]) == len(findings[1])
    assert table(tmp_path / "cpu" / "heads.csv")[0] == table(tmp_path / "cuda" / "heads.csv")[0]


@pytest.mark.check
def test_circuits_from_end_to_end_are_exact_whatever_their_size(tmp_path, cuda_is_strict, monkeypatch):
    result = run("circuits", "embedded", "--out", tmp_path / "cpu")
    monkeypatch.setattr(passes, "EXACT_UP_TO", 0)
    result = run("circuits", "embedded", "--out", tmp_path / "cuda", "--device", "cuda")
    assert result.exit_code == 0, result.output
    here, there = (np.load(tmp_path / device / "wiring.npz") for device in ("cpu", "cuda"))
    for name in here.files:
        np.testing.assert_allclose(there[name], here[name], rtol=1e-5)
    assert there["exact_ok"][0, :, 1].all()


def test_an_audit_is_not_resumed_on_another_device(folder, tmp_path):
    """Its numbers would be of two kinds."""
    model, out = ws.open_model(folder), tmp_path

    def layers_on(device):
        return FinishedLayers(out, layers_identity(model, AuditOptions((0,), device=device)), [0], resume=True)

    layers_on("cpu").put(0, {"qk_route": np.array(["gram"])})
    assert layers_on("cpu").left == []
    assert layers_on("array_api_strict").left == [0]


@pytest.mark.parametrize(
    "command", [["audit"], ["detok", "--counts", "counts.npz"], ["positions"]], ids=lambda command: command[0]
)
def test_a_missing_device_is_one_line_and_status_2(command, tmp_path, monkeypatch):
    """Before the checkpoint, which is not there either, is looked for."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    open_device.cache_clear()
    result = run(command[0], "nowhere", *command[1:], "--out", tmp_path / "out", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "weightscope: device cuda needs CuPy: pip install 'cupy-cuda12x[ctk]'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("order", [0, 1])
def test_cluster_may_use_a_device_that_this_machine_lacks(folder, tmp_path, monkeypatch, order):
    """Whichever option comes first, it is the scheduler that is missing here."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    open_device.cache_clear()
    options = [["--engine", "dask", "--scheduler", "nowhere.json"], ["--device", "cuda"]]
    result = run("audit", folder, "--out", tmp_path, *options[order], *options[1 - order])
    assert result.exit_code == 2
    assert "CuPy" not in result.output


def test_processes_do_not_share_a_device(folder, tmp_path, cuda_is_strict):
    result = run("audit", folder, "--out", tmp_path, "--jobs", "2", "--device", "cuda")
    assert result.exit_code == 2
    assert "a GPU is used by one process" in result.output


def test_task_for_another_machine_carries_the_device_name(folder):
    source, counts = Source.named(str(folder)), load_counts(folder / "counts.npz")
    expected = measure_heads(FirstLayer(source.open()), counts).auroc
    for name in ("array_api_strict", "no_such_module"):
        sent = ScorerOnWorker.of(source, FirstLayer(source.open(), device=name), folder / "counts.npz")
        scorer = pickle.loads(pickle.dumps(sent))()
        if name == "no_such_module":
            with pytest.raises(ws.CheckpointError, match="no device 'no_such_module'"):
                scorer.aurocs(1, range(20, 90))
        else:
            np.testing.assert_allclose(scorer.aurocs(1, range(20, 90))[0], expected[1, 20:90], rtol=0, atol=0.01)


class Watched:
    """A namespace that remembers what was called, and how."""

    def __init__(self, xp, calls, prefix=""):
        self._xp, self._calls, self._prefix = xp, calls, prefix

    def __getattr__(self, name):
        attribute = getattr(self._xp, name)
        if isinstance(attribute, type):
            return attribute

        def call(*arguments, **named):
            self._calls.setdefault(self._prefix + name, []).append((arguments, named))
            return attribute(*arguments, **named)

        return call


def test_cupy_supports_every_call_of_the_kernels():
    """No device is needed to ask."""
    cupy = pytest.importorskip("cupy", reason="CuPy comes with the extra `cuda`")
    calls: dict[str, list] = {}
    run_all_kernels(Device("watched", Watched(np, calls), memory=200_000_000))
    assert {"searchsorted", "sort", "astype", "asarray"} < calls.keys()
    for name, ways in calls.items():
        function = getattr(cupy, name)
        try:
            signature = inspect.signature(function)
        except ValueError:  # of a ufunc
            assert all(not named for _, named in ways), name
            continue
        for arguments, named in ways:
            signature.bind(*arguments, **named)
