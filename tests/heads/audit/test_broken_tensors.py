"""NaN or infinity in any tensor that is read is a finding that names the tensor."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import EACH_MECHANISM, NAMES, fixture
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.report.findings import Finding


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of all tensors that are read, even in part, while the test runs."""
    names: set[str] = set()
    raw = StoredTensor.raw

    def noting(tensor: StoredTensor, start: int | None = None, stop: int | None = None) -> np.ndarray:
        names.add(tensor.name)
        return raw(tensor, start, stop)

    monkeypatch.setattr(StoredTensor, "raw", noting)
    return names


def test_a_layer_is_read_from_the_tensors_that_are_listed_for_it(read: set[str], subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(fixture=name):
            tower = fixture(name).case.tower or None
            model = ws.open_model(fixture(name).folder, tower=tower)
            for index in model.attention_layers:
                read.clear()
                model.layer(index)
                assert read == {tensor.name for tensor in model.attention_tensors(index)}


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_every_tensor_that_is_read_is_named_if_it_is_broken(name: str, read: set[str], tmp_path: Path) -> None:
    """One value of every tensor of the file is spoilt; the audit must name all those it has read."""
    model = fixture(name)
    weights = load_file(model.folder / "model.safetensors")
    counts = {name for name, tensor in weights.items() if np.issubdtype(tensor.dtype, np.integer)}  # of batches
    for number, tensor in enumerate(tensor for name, tensor in weights.items() if name not in counts):
        tensor.flat[-1 if number % 2 else 0] = (np.nan, np.inf, -np.inf)[number % 3]
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(model.folder / "config.json", tmp_path)
    audit = ws.audit(ws.open_model(tmp_path, tower=model.case.tower or None))
    texts = [finding.text for finding in audit.findings if finding.kind == "not_finite"]
    assert read
    assert {tensor_name for tensor_name in read if any(f" {tensor_name}" in text for text in texts)} == read
    json.dumps(audit.findings.as_json(), allow_nan=False)


Q, K, V = (slice(24 * part, 24 * part + 24) for part in range(3))  # of c_attn in a GPT-2 of width 24, 4 heads of 6


def broken(tensor: str, where: object, tmp_path: Path) -> list[Finding]:
    weights = gpt2_weights()
    weights[tensor][where] = np.nan
    findings = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights))).findings
    return [finding for finding in findings if finding.kind == "not_finite"]


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("tensor", "where", "count", "reached"),
    [
        ("h.1.attn.c_attn.bias", 13, 1, {("qk", (2,))}),  # of a query
        ("h.1.attn.c_attn.bias", 24 + 13, 1, {(None, ())}),  # of a key: every key has it, so no score tells
        ("h.1.attn.c_attn.bias", slice(48 + 13, 48 + 20), 7, {("vo", (2, 3))}),
        ("h.1.attn.c_proj.bias", 0, 1, {(None, ())}),
        ("h.1.ln_1.bias", 5, 1, {("qk", ALL), ("vo", ALL)}),
        ("h.1.ln_1.weight", 5, 1, {("qk", ALL), ("vo", ALL)}),
        ("h.1.attn.c_proj.weight", (7, 3), 1, {("vo", (1,))}),
    ],
)
def test_a_finding_says_what_is_reached(tensor: str, where, count: int, reached: set, tmp_path: Path) -> None:
    findings = broken(tensor, where, tmp_path)
    assert {(finding.map, finding.items) for finding in findings} == reached
    for finding in findings:
        assert (finding.layer, finding.number) == (1, count)
        assert f"({count} in {tensor})" in finding.text


@pytest.mark.parametrize("tensor", ["wpe.weight", "wte.weight"])
def test_rows_of_an_embedding_are_told_of_once(tensor: str, tmp_path: Path) -> None:
    (finding,) = broken(tensor, (3, slice(None)), tmp_path)
    assert finding.items == (3,)
    assert f"1 row of {tensor}" in finding.text
