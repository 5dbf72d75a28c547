"""Lineages of every family's stacks, and of checkpoints whose values are out of scale."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.slow import mostly_checked
from tests.support.tiny_models import FIXTURES, changed
from weightscope.core.errors import CheckpointError
from weightscope.pairs.lineage.sketches import fingerprint

EVERY = sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors"))


@pytest.mark.parametrize("fixture", mostly_checked(EVERY, fast=EVERY[::8]))
def test_every_stack_matches_itself_and_no_stranger(fixture, tmp_path):
    """Read from weights and from a fingerprint's file; a stranger has the same sizes and scales."""
    rng = np.random.default_rng(0)
    stranger = changed(fixture, tmp_path / "stranger", lambda w: w.mean() + w.std() * rng.standard_normal(w.shape))
    stacks = [name for name, stack in ws.open_model(FIXTURES / fixture).stacks.items() if not stack.refusal]
    for tower in stacks:
        model = ws.open_model(FIXTURES / fixture, tower=tower)
        fingerprint(model).save(tmp_path / "kept.wsf")
        lineage = ws.lineage(model, model)
        assert (lineage.verdict, [kind.kind for kind in lineage.kinds]) == ("related", ["same bytes"]), tower
        assert ws.lineage(model, tmp_path / "kept.wsf").verdict == "related", tower
        assert ws.lineage(ws.open_model(stranger, tower=tower), model).verdict not in ("derived", "related"), tower


@pytest.mark.parametrize(("scale", "verdict"), [(0.0, "undecided"), (1e-30, "related")])
def test_zero_maps_are_undecided(scale, verdict, tmp_path):
    """Maps, of two factors, of 1e-60 are zero; the rest, of one factor, is still alike."""
    silent = changed("llama", tmp_path / "silent", lambda w: scale * w)
    for pair in (silent, FIXTURES / "llama"), (FIXTURES / "llama", silent):
        lineage = ws.lineage(*pair)
        assert (lineage.verdict, lineage.parts["attention"].verdict) == (verdict, "undecided")
        assert "most heads of silent are zero" in lineage.parts["attention"].lead


def test_maps_that_exceed_float32_are_refused(tmp_path):
    large = changed("llama", tmp_path / "large", lambda w: 1e30 * w)
    with pytest.raises(CheckpointError, match="layers 0-1: W_QK or W_VO of a head exceeds float32"):
        ws.lineage(large, FIXTURES / "llama")


def test_hybrid_with_other_layers_changed_is_no_copy(tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(FIXTURES / "nemotron_h", folder)
    weights = load_file(folder / "model.safetensors")
    layers = ws.open_model(folder).attention_layers
    left_out = [name for name in weights if ".layers." in name and not any(f".layers.{i}." in name for i in layers)]
    assert left_out
    save_file(weights | {name: 1.5 * weights[name] for name in left_out}, folder / "model.safetensors")
    assert "same bytes" not in [kind.kind for kind in ws.lineage(folder, FIXTURES / "nemotron_h").kinds]
