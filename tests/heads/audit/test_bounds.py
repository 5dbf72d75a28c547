"""Limits on the time, memory and output that a hostile checkpoint can cost an audit."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.files import write_shards
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS
from weightscope.checkpoint import opening
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.heads.audit import duplicates
from weightscope.heads.audit.audit import LONGEST_WINDOW, MOST_DELTAS
from weightscope.heads.audit.duplicates import UNLIKE_A_HEAD, SpaceLikeness, clusters, joined
from weightscope.model.model import MOST_ROWS


def test_equal_heads_are_one_finding_and_compared_once_each(tmp_path: Path, monkeypatch) -> None:
    n_layers, n_heads, d = 24, 12, 96
    weights = gpt2_weights(n_layers, d, vocab=30, n_positions=8)
    part = np.random.default_rng(0).standard_normal((d, d // n_heads)).astype(np.float32)
    for layer in range(n_layers):
        weights[f"h.{layer}.attn.c_attn.weight"] = np.tile(part, (1, 3 * n_heads))
        weights[f"h.{layer}.attn.c_proj.weight"] = np.tile(part.T, (n_heads, 1))
        weights[f"h.{layer}.ln_1.weight"] = weights["h.0.ln_1.weight"]
    compared, exactly = [], duplicates.likeness_of
    monkeypatch.setattr(duplicates, "likeness_of", lambda *heads: compared.append(heads) or exactly(*heads))
    audit = ws.audit(ws.open_model(write_checkpoint(tmp_path, weights, n_head=n_heads)), directions=0)
    findings = [finding for finding in audit.findings if finding.kind == "duplicate_heads"]
    assert [finding.map for finding in findings] == ["qk", "vo"]
    everyone = {(layer, head) for layer in range(n_layers) for head in range(n_heads)}
    for finding in findings:
        assert {
            (finding.layer if member.layer is None else member.layer, member.index) for member in finding.members
        } == everyone
        assert "288 heads have the same spaces, layer 0 heads 0-11; layer 1 heads 0-11;" in finding.text
        assert finding.number == pytest.approx(1, abs=1e-6) and len(finding.text) < 500
    assert len(compared) == 2 * (len(everyone) - 1)
    assert len(json.dumps(audit.findings.as_json())) < 100_000


def test_a_cluster_is_what_is_linked_and_tells_its_weakest_link() -> None:
    """0-2-4 and 1-5 are alike, 3 is not; 0 and 4 only by way of 2."""
    sketches = np.ones((6, 4)) / 2
    alike: dict[tuple[int, int], SpaceLikeness] = {
        (0, 2): SpaceLikeness(0.9, 0.2, 1.0),
        (2, 4): SpaceLikeness(0.8, 0.1, 0.5),
        (1, 5): SpaceLikeness(1.0, 0.0, -1.0),
    }
    clusters_found = list(clusters(sketches, sketches, lambda a, b: alike.get((a, b))))
    assert clusters_found == [([0, 2, 4], (0.8, 0.2, 0.5, "")), ([1, 5], (1.0, 0.0, -1.0, ""))] == list(joined(alike))


def test_heads_that_only_look_alike_are_compared_with_few() -> None:
    sketches, compared = np.ones((200, 4)) / 2, []
    assert not list(clusters(sketches, sketches, lambda *pair: compared.append(pair)))
    assert len(compared) <= UNLIKE_A_HEAD * len(sketches)


def test_memory_does_not_grow_with_the_window() -> None:
    layer = fixture("llama").model.layer(0)
    turned = [layer.qk_forms((delta,), 1)[f"delta{delta}"] for delta in range(1, 300)]
    mean = np.mean([np.eye(layer.head_dim), *turned], axis=0)
    np.testing.assert_array_equal(layer.qk_forms((), 300)["mean300"], mean)
    tracemalloc.start()
    layer.qk_forms((), 20_000)
    peak = tracemalloc.get_traced_memory()[1]  # of every thread: threads of earlier tests may hold some
    tracemalloc.stop()
    assert peak < 5_000 * layer.head_dim**2 * 8


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--window", LONGEST_WINDOW + 1, "window is 131073; an average is of 1 to 131072 distances"),
        ("--deltas", f"0-{MOST_DELTAS}", "deltas are 257 distances; at most 256 are measured"),
    ],
)
def test_more_distances_than_that_are_refused(option: str, value, said: str, tmp_path: Path) -> None:
    result = run("audit", TWO_LAYERS, "--out", tmp_path, option, value)
    assert is_one_line(result) and said in result.stderr


def test_empty_tensors_are_counted_over_all_shards(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(opening, "MAX_TENSORS", 10)
    shards = [{f"{shard}.{i}": np.empty((0, 3), np.float32) for i in range(6)} for shard in range(3)]
    write_shards(tmp_path, *shards[:1])
    assert len(open_checkpoint(tmp_path)) == 6
    write_shards(tmp_path, *shards)
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"never opened")
    with pytest.raises(ws.CheckpointError, match="has over 11 tensors; at most 10 are read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("tensor", ["wte.weight", "wpe.weight", "lm_head.weight"])
def test_no_embedding_has_more_rows_than_any_vocabulary(tensor: str, tmp_path: Path) -> None:
    """The rows are a hole in a sparse file: they cost an attacker nothing."""
    size = (MOST_ROWS + 1) * 4 * 2
    endless = {"dtype": "F16", "shape": [MOST_ROWS + 1, 4], "data_offsets": [8, size + 8]}
    gain = {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}
    header = json.dumps({"h.0.ln_1.weight": gain, tensor: endless}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(tmp_path / "model.safetensors", 8 + len(header) + 8 + size)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    result = run("inspect", tmp_path)
    assert is_one_line(result)
    assert f"tensor '{tensor}' has 2097153 rows; no vocabulary has more than 2097152" in result.stderr


def test_a_layers_tensors_are_found_without_a_look_at_the_others(monkeypatch) -> None:
    """So that thousands of layers are not each compared with the names of all."""
    model = ws.open_model(TWO_LAYERS)
    expected = [tensor.name for tensor in model.attention_tensors(1)]
    monkeypatch.setattr(Checkpoint, "__iter__", lambda checkpoint: pytest.fail("all names are gone through"))
    again = model.unchecked()
    assert [tensor.name for tensor in again.attention_tensors(1)] == expected
    assert again.layer(1).n_heads == 8
