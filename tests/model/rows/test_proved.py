"""What was never compared with transformers is not opened as if it were."""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import class_says
from weightscope.model.config.reading import stacks_of
from weightscope.model.config.rules import heads_of_attn_config
from weightscope.model.rows import table
from weightscope.model.rows.table import FAMILIES

EXACT: dict[str, set[str]] = defaultdict(set)  # verdicts by type, read here without the code under test
with table.RECORD.open(encoding="utf-8") as record:
    for line in csv.DictReader(text for text in record if not text.startswith("#")):
        EXACT[line["type"]].add(line["verdict"])
READ_TYPES = sorted({*EXACT, *(kind for row in FAMILIES for kind in row.types)})
IN_FIXTURES = {json.loads(file.read_text())["model_type"] for file in FIXTURES.glob("*/config.json")}


@pytest.mark.parametrize("kind", READ_TYPES)
def test_no_type_opens_unlabelled_unless_the_census_or_a_fixture_has_it_exact(kind: str) -> None:
    parts = {kind, *class_says(kind, "parts").values()}
    rows = [row for row in FAMILIES if not parts.isdisjoint(row.types)]
    for row in rows:
        labelled = table.unproved(row, kind, row.types[0])
        if (kind, table.title(row)) in table.published():
            assert labelled.startswith("proved against a tiny model after ")
        elif "exact" not in EXACT[kind] and kind not in IN_FIXTURES:
            assert labelled.startswith("unproved: ") and f"census {kind}" in labelled
    if "exact" in EXACT[kind] and rows:
        assert not all(table.unproved(row, kind, row.types[0]) for row in rows)


def test_types_compared_by_fixtures_have_a_fixture() -> None:
    assert {*table.IN_FIXTURES} <= IN_FIXTURES
    for kind in table.IN_FIXTURES:
        assert "exact" not in EXACT[kind], f"the census has {kind}: take it off the list"


VERDICTS = {
    "whole": {"llama": {"exact"}, "clip.vision": {"unseen"}},
    "partly": {"llama": {"exact", "WRONG"}, "clip.vision": {"exact"}},
    "older": {"": {"exact", "refused"}},
    "llama": {"llama": {"exact"}},
}


@pytest.mark.parametrize(("kind", "row", "part", "missing"), [
    ("whole", "llama", "llama", ""),
    ("whole", "clip.vision", "clip_vision_model", "the clip.vision stack of model_type 'whole'"),  # it never ran
    ("partly", "llama", "llama", "the llama stack of model_type 'partly'"),
    ("whole", "qwen2", "llama", ""),  # another part than by default, exact on its own
    ("whole", "qwen2", "mystery", "the qwen2 stack of model_type 'whole'"),
    ("older", "qwen2", "mystery", ""),  # a census that names no rows
    ("unlisted", "llama", "llama", "model_type 'unlisted'"),
])  # fmt: skip
def test_census_decides_whether_a_row_is_proved(
    kind: str, row: str, part: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "census", lambda: VERDICTS)
    assert table._missing(row, kind, part) == missing


@pytest.fixture
def composite(tmp_path: Path) -> Path:
    """A llama within a wrapper of unknown make."""
    text = json.loads((FIXTURES / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_no_make", "text_config": text}))
    save_file(load_file(FIXTURES / "llama" / "model.safetensors"), tmp_path / "model.safetensors")
    return tmp_path


def test_every_output_shows_the_unproved_label(composite: Path, tmp_path: Path) -> None:
    model = ws.open_model(composite)
    label = "unproved: model_type 'of_no_make' was never compared with transformers' attention"
    assert model.family.origin.startswith(label) and label in model.title and label in str(model)
    assert any("transformers' own attention" in caveat for caveat in model.layer(0).head(0).caveats)
    audit = ws.audit(model)
    assert label in audit.family and label in audit.lead and table.NOT_COMPARED in audit.caveats
    assert "unproved: model_type" in audit_of(composite, tmp_path / "out", "--json").output
    assert "unproved: model_type" in (tmp_path / "out" / "report.html").read_text()
    shown = run("inspect", str(composite)).output
    assert label in shown
    (stack,) = stacks_of(model.checkpoint).values()
    assert stack.family is not None and stack.family.origin.startswith(label)


def test_a_type_that_was_compared_has_no_label() -> None:
    model = ws.open_model(FIXTURES / "llama")
    assert not model.family.origin and table.NOT_COMPARED not in model.layer(0).caveats


def test_the_census_is_not_read_on_import() -> None:
    code = "import weightscope, weightscope.model.rows as a; from weightscope.model.rows import table\n"
    code += "assert table.census.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


D, LAYERS = 16, 2


def depth_pro(folder: Path) -> Path:
    """Depth Pro without a field of view: two encoders, and a third part of the config that no tensor belongs to."""
    random, weights = np.random.default_rng(0), {}
    for number, encoder in enumerate(("image_encoder", "patch_encoder")):
        for layer in range(LAYERS):
            stem = f"depth_pro.encoder.{encoder}.model.encoder.layer.{layer}."
            for module in ("attention.attention.query", "attention.attention.key", "attention.attention.value",
                           "attention.output.dense"):  # fmt: skip
                weights[f"{stem}{module}.weight"] = random.normal(size=(D, D)).astype(np.float32)
                weights[f"{stem}{module}.bias"] = random.normal(size=D).astype(np.float32)
            for name in ("norm1.weight", "norm1.bias", "layer_scale1.lambda1"):
                weights[stem + name] = np.full(D, 1 + number, np.float32)
    sizes = {"model_type": "dinov2", "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    eps = {"fov_model_config": 1e-1, "image_model_config": 1e-2, "patch_model_config": 1e-3}
    config = {key: sizes | {"layer_norm_eps": value} for key, value in eps.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "depth_pro", "use_fov_model": False, **config}))
    return folder


def test_a_part_without_tensors_takes_none_of_another_part(tmp_path: Path) -> None:
    folder = depth_pro(tmp_path)
    stacks = stacks_of(open_checkpoint(folder))
    assert {stack.part for stack in stacks.values()} == {"image_model_config", "patch_model_config"}
    for stack in stacks.values():
        config = ws.open_model(folder, tower=stack.name).config
        assert stack.prefix.split(".")[2] == stack.part.split("_")[0] + "_encoder"
        assert config.norm_eps == {"image_model_config": 1e-2, "patch_model_config": 1e-3}[stack.part]


def test_heads_of_dbrx_as_it_was_published() -> None:
    published = {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000}}
    with pytest.raises(CheckpointError, match=r"'rope_theta' is 500000; at the top of config\.json"):
        heads_of_attn_config(Config(published, "config.json"))
    stated = Config({**published, "rope_theta": 500000.0, "num_key_value_heads": 1}, "config.json")
    assert heads_of_attn_config(stated) == {"num_key_value_heads": 8}
