"""A class of the user's own proves a row as one of transformers' does; a checkpoint's own code is never run."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

import weightscope as ws
from tests.support.commands import run
from weightscope.adopting.user_class import Order, _carried_out
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.rope import Rope
from weightscope.model.sources import Source

torch = pytest.importorskip("torch", reason="the user's class is torch's, which is not installed")
pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.adopting.zephyrine import Brief, BriefConfig, Zephyrine, ZephyrineConfig  # noqa: E402
from weightscope.adopting.adopt import adopt as rows_adopted  # noqa: E402
from weightscope.adopting.user_class import registered  # noqa: E402

pytestmark = pytest.mark.check

HERE = "tests.adopting.zephyrine"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zephyrine")
    torch.manual_seed(0)
    model = Zephyrine(ZephyrineConfig())
    save_file(
        {name: tensor.detach().clone() for name, tensor in model.named_parameters()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "zephyrine", **asdict(ZephyrineConfig())}))
    return folder


def adopt(folder: Path, code: str, *options: object) -> Result:
    return run("adopt", folder, "--with", code, *options)


def test_a_row_proved_by_a_users_class_reads_what_the_class_computes(checkpoint: Path, tmp_path: Path) -> None:
    done = adopt(checkpoint, f"{HERE}:Zephyrine", "--attention", "blocks.*.mixer", "--out", tmp_path / "row.toml")
    assert done.exit_code == 0, done.output
    assert f"proved against {HERE}:Zephyrine (PyTorch {torch.__version__})" in done.stdout
    model = ws.open_model(checkpoint, families=tmp_path / "row.toml")
    proof = f"adopted, proved against {HERE}:Zephyrine (PyTorch {torch.__version__})"
    assert model.family.origin == f"{proof}; unproved beyond texts of 1,152 tokens"  # no key of it is a window
    user_model = Zephyrine(ZephyrineConfig())
    user_model.load_state_dict(_weights(checkpoint, user_model))
    assert_reads(model, user_model)


def assert_reads(model: ws.Model, user_model: Zephyrine) -> None:
    """A layer of the model gives what the class gives."""
    x, layer = np.random.default_rng(0).normal(size=(9, 48)).astype(np.float32), model.layer(1)
    with torch.no_grad():
        expected = user_model.blocks[1].mixer(user_model.blocks[1].pre(torch.from_numpy(x)[None]))[0].numpy()
    scores = np.where(np.tri(9, dtype=bool), layer.scores(x), -np.inf)
    attention = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(layer.output(attention / attention.sum(-1, keepdims=True), x), expected, atol=1e-5)


def _weights(folder: Path, user_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    stored = load_file(folder / "model.safetensors")
    return {name: stored.get(name, stored["words.weight"]) for name in user_model.state_dict()}


def test_arguments_of_a_class_are_filled_from_config_keys(checkpoint: Path) -> None:
    done = adopt(checkpoint, f"{HERE}:OfNumbers")
    assert done.exit_code == 0 and "proved against" in done.stdout and "built" not in done.stdout, done.output


def test_config_values_are_read_under_any_key(checkpoint: Path, tmp_path: Path) -> None:
    """A row found with one base and eps reads a checkpoint that has others."""
    changed = BriefConfig(wavelength=30.0, delta=0.1)
    for folder, config in ((tmp_path / "one", BriefConfig()), (tmp_path / "changed", changed)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
        (folder / "config.json").write_text(json.dumps({"model_type": "brief", **asdict(config)}))
    registered(Brief, {"model_type": "brief"}, "*")
    (row,) = rows_adopted(open_checkpoint(tmp_path / "one")).rows
    assert row.config.keys == {"n_layers": ("L",), "d_model": ("D",), "n_heads": ("H",), "norm_eps": ("delta",)}
    assert row.heads.kv_heads == ("G",) and row.rope == Rope(theta_key="wavelength") and not row.when
    user_model = Brief(changed)
    user_model.load_state_dict(_weights(checkpoint, user_model))
    assert_reads(ws.Model.of_row(open_checkpoint(tmp_path / "changed"), row), user_model)


def test_a_gain_of_a_norm_may_have_any_name(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    gained = {name.replace(".pre.weight", ".pre.gain"): 1.5 * tensor for name, tensor in tensors.items()}
    save_file(gained, tmp_path / "model.safetensors")
    done = adopt(tmp_path, f"{HERE}:Gained", "--out", tmp_path / "row.toml")
    assert done.exit_code == 0 and 'norms.before = { norm = "rms:pre", gain = "gain" }' in done.stdout, done.output
    gamma = ws.open_model(tmp_path, families=tmp_path / "row.toml").layer(0).norm.gamma
    np.testing.assert_array_equal(gamma, gained["blocks.0.pre.gain"].numpy())


def test_a_key_of_the_config_may_be_called_as_one_of_generation(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    config = json.loads((checkpoint / "config.json").read_text()) | {"temperature": 0.7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = adopt(tmp_path, f"{HERE}:Zephyrine")
    assert done.exit_code == 0 and "proved against" in done.stdout, done.output


@pytest.mark.parametrize(("code", "said"), [
    ("Bends", "no row reads it exactly; nearest: values are right; attention is off"),
    ("Dies", "ended with status 3 and no answer"),
    ("Nope", "cannot be imported: AttributeError"),
    ("ZephyrineConfig", "is not a torch.nn.Module"),
])  # fmt: skip
def test_an_unusable_class_is_refused_in_one_line(code: str, said: str, checkpoint: Path) -> None:
    done = adopt(checkpoint, f"{HERE}:{code}")
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", ["torch.nn:Module", "torch.jit:ScriptModule"])
def test_a_class_that_cannot_be_inherited_is_refused_in_one_line(
    code: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    order = Order(Source.named(str(checkpoint)), code, "", tmp_path / "answer", shows=False, parent=0)
    with pytest.raises(CheckpointError, match=f"`with` {code} is no class that can be run: (Type|Attribute)Error"):
        _carried_out(order)


def test_code_in_the_checkpoints_folder_is_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "theirs.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    done = adopt(tmp_path, "theirs:Model")
    assert done.exit_code == 2 and "lies in the checkpoint's folder, whose code is not run" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["adopt", "inspect"])
def test_an_unknown_model_type_names_every_remedy(command: str, checkpoint: Path) -> None:
    done = run(command, checkpoint)
    ways = ("--with module:Class", "weightscope draft SOURCE", "--families FILE", "weightscope inspect SOURCE --check")
    assert done.exit_code == 2 and all(way in done.stderr for way in ways), done.stderr
    assert "pip install" not in done.stderr
