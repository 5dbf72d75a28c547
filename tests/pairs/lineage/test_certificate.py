"""What `same` proves of a copy is what `lineage` says of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.two_layers import TWO_LAYERS

GROUP = 32


def packed(base: Path, folder: Path, *, searched: bool, noise: float = 0.0) -> Path:
    """Matrices in MLX's four bits; searched codes are not always the nearest, as where other values make up for it."""
    rng, weights = np.random.default_rng(0), load_file(base / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight") and weights[name].shape[1] % GROUP == 0]:
        w, module = weights[name], name.removesuffix(".weight")
        w = w + noise * w.std() * rng.standard_normal(w.shape, np.float32)
        groups = w.reshape(len(w), -1, GROUP)
        low = groups.min(-1)
        scales = (groups.max(-1) - low) / np.float32(15)
        places = (groups - low[..., None]) / scales[..., None]
        codes = np.rint(places)
        if searched:
            is_moved = (np.abs(places - codes) > 0.3) & (rng.random(places.shape) < 0.3)
            codes += np.where(is_moved, np.sign(places - codes), 0)
        nibbles = np.clip(codes, 0, 15).astype(np.uint32).reshape(len(w), -1, 8)
        weights[name] = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=-1)
        weights |= {f"{module}.scales": scales, f"{module}.biases": low}
    folder.mkdir()
    save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, folder / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": GROUP, "bits": 4}}))
    return folder


@pytest.mark.parametrize("searched", [True, False])
def test_quantised_copy_is_derived_if_every_value_is_in_its_cell(base: Path, tmp_path: Path, searched: bool) -> None:
    """A quantiser that searches its codes leaves them, as another model's small changes do: no direction is shown."""
    copy = packed(base, tmp_path / "copy", searched=searched)
    assert ws.same(base, copy).verdict == ("undecided" if searched else "quantised")
    result = ws.lineage(copy, base)
    assert result.verdict == ("related" if searched else "derived"), result.lead
    assert any(kind.kind.startswith("quantised") for kind in result.kinds)
    reverse = ws.lineage(base, copy)
    assert reverse.verdict == "related"
    assert ("so base came first" in reverse.lead) == (not searched)


def test_what_was_trained_and_then_quantised_is_not_derived(base: Path, tmp_path: Path) -> None:
    copy = packed(base, tmp_path / "copy", searched=True, noise=0.5)
    assert ws.same(base, copy).verdict == "different"
    assert ws.lineage(copy, base).verdict == "related"


def test_same_bytes_is_said_of_files(base: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(base, tmp_path / "copied")
    assert [kind.kind for kind in ws.lineage(copied, base).kinds] == ["same bytes"]
    weights = load_file(base / "model.safetensors")
    (tmp_path / "again").mkdir()
    shutil.copy(base / "config.json", tmp_path / "again")
    save_file(weights, tmp_path / "again" / "model.safetensors", metadata={"saved": "again"})
    result = ws.lineage(tmp_path / "again", base)
    assert [kind.kind for kind in result.kinds] == ["same bytes in other files"]
    assert "byte for byte" in result.lead
    assert "Nothing differs: same bytes" not in result.lead


@pytest.mark.check
@pytest.mark.parametrize("name", ["NF4", "8 bits, rows", "Q8_0", "4 bits, rows"])
def test_levels_that_were_rounded_once_more_are_still_levels(tmp_path: Path, name: str) -> None:
    """The base is float16, and so are the levels: a fine grid's steps are off by up to an eighth of one."""
    write_weights(DERIVATIONS[name].change(read_weights(TWO_LAYERS)), tmp_path / "copy")
    result = ws.lineage(tmp_path / "copy", TWO_LAYERS)
    assert result.verdict == "derived", result.lead
    assert ws.lineage(TWO_LAYERS, tmp_path / "copy").verdict == "related"


def test_an_original_can_be_forged_and_the_first_line_says_so(base: Path, tmp_path: Path) -> None:
    """Noise within the steps of rounded weights makes a file from which they can be recomputed."""
    rng, weights = np.random.default_rng(0), load_file(base / "model.safetensors")
    bits = {name: np.ascontiguousarray(w, np.float32).view(np.uint32) & 0xFFFF0000 for name, w in weights.items()}
    for name in ("rounded", "forged"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(base / "config.json", folder)
        tensors = {}
        for tensor, whole in bits.items():
            values = whole.view(np.float32)
            above, below = (near.view(np.float32) for near in (whole + np.uint32(0x10000), whole - np.uint32(0x10000)))
            steps = np.minimum(np.abs(above - values), np.abs(values - below))
            noise = rng.uniform(-0.4999, 0.4999, values.shape) * np.where(values == 0, 0, np.nan_to_num(steps))
            tensors[tensor] = values if name == "rounded" else (values + noise).astype(np.float32)
        save_file(tensors, folder / "model.safetensors")
    result = ws.lineage(tmp_path / "rounded", tmp_path / "forged")
    assert result.verdict == "derived" and "only an original forged for this would show the same" in result.lead
