"""Names that wrappers leave, or that no class loads: read by every command, and said."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run, run_undrawn
from tests.support.slow import mostly_checked
from tests.support.tiny_models import FIXTURES

Rename = Callable[[str], str]
WRAPPED: dict[str, Rename] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "ddp": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "each layer": lambda name: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name),
    "FSDP": lambda name: re.sub(r"(layers\.\d+\.)", r"_fsdp_wrapped_module.\1_checkpoint_wrapped_module.", name),
    "each layer, DDP": lambda name: re.sub(r"(layers\.\d+\.)", r"\1module.", name),
    "within attention": lambda name: name.replace("self_attn.", "self_attn._orig_mod."),
}  # fmt: skip


def renamed(folder: Path, rename: Rename, fixture: str = "llama") -> Path:
    shutil.copytree(FIXTURES / fixture, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({rename(name): values for name, values in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("how", mostly_checked(WRAPPED, fast=["FSDP"]))
def test_segments_of_wrappers_are_read_through_anywhere_in_a_name(how: str, tmp_path: Path) -> None:
    folder = renamed(tmp_path / "wrapped", WRAPPED[how])
    same = ws.same(FIXTURES / "llama", folder)
    value = same.as_json()
    plain, in_file = (load_file(each / "model.safetensors") for each in (FIXTURES / "llama", folder))
    changed = [name for name in in_file if name not in plain]
    assert same.verdict == "same values"
    assert sorted(value["names"]) == sorted(changed)
    assert {each["tensor"] for each in value["tensors"]} == {*in_file}
    assert f"{len(changed)} of {len(value['tensors'])} names" in same.lead
    shown = run("inspect", folder).stdout
    assert "0 bytes of it" not in shown
    assert "own class would not load" in shown
    assert run_undrawn("audit", folder, "--out", tmp_path / "out").exit_code == 0
    assert "own class would not load" in (tmp_path / "out" / "report.html").read_text()


def test_the_names_of_the_fixtures_are_as_loaded() -> None:
    for folder in sorted(FIXTURES.iterdir()):
        if (folder / "model.safetensors").is_file():
            assert ws.open_model(folder).names_note == "", folder.name


@pytest.mark.parametrize(("fixture", "prefix", "loads"), [
    ("llama", "", True), ("llama", "model.", True), ("llama", "tower.", False), ("llama", "model.model.", True),
    ("llama", "language_model.model.", False),
    ("bert", "bert.", True), ("bert", "", True), ("bert", "encoder_q.", False),
])  # fmt: skip
def test_a_tower_under_another_prefix_is_not_loaded(fixture: str, prefix: str, loads: bool, tmp_path: Path) -> None:
    """transformers adds or takes off its base model's prefix, twice too, and no other."""
    own = "model." if fixture == "llama" else "bert."
    place = lambda name: prefix + name.removeprefix(own) if name.startswith(own) or fixture == "bert" else name  # noqa: E731
    folder = renamed(tmp_path / "moved", place, fixture)
    same = ws.same(FIXTURES / fixture, folder)
    assert same.verdict in ("same values", "same bytes")
    assert (same.as_json()["names"] == "as loaded") == loads
    assert ("own class would not load" in same.lead) != loads


def test_names_that_would_collide_are_left_as_they_are(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "llama", tmp_path / "both")
    weights = load_file(FIXTURES / "llama" / "model.safetensors")
    twice = {f"_orig_mod.{name}": values for name, values in weights.items()} | weights
    save_file(twice, tmp_path / "both" / "model.safetensors")
    result = run("inspect", tmp_path / "both")
    assert result.exit_code in (0, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_module_of_an_unknown_architecture_may_be_called_module(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "own", lambda name: name.replace("layers.", "layers.module."))
    (folder / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    value = ws.same(folder, folder).as_json()
    assert value["names"] == "as loaded"
    assert any(".module." in each["tensor"] for each in value["tensors"])


def test_layers_under_a_segment_that_nobody_knows_are_refused_by_name(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "own", lambda name: re.sub(r"(layers\.\d+\.)", r"\1own.", name))
    for command in (("inspect",), ("audit", "--out", tmp_path / "out")):
        result = run(command[0], folder, *command[1:])
        assert result.exit_code == 2
        assert "self_attn" in result.stderr


@pytest.mark.check
@pytest.mark.parametrize(("prefix", "loads"), [("", True), ("model.", True), ("tower.", False), ("model.model.", True)])
def test_transformers_agrees_on_which_prefix_loads(prefix: str, loads: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    place = lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else name  # noqa: E731
    folder = renamed(tmp_path / "moved", place)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert any("self_attn" in key for key in report["missing_keys"]) != loads
