"""The vision transformers that replace DINOv2: how they are trained, and that the Hub's are taken first."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the recipes need the extra `runner`")

import weightscope as ws  # noqa: E402
from analyses.recipes import sink_mechanisms  # noqa: E402
from analyses.toys import train_canvases, train_vit  # noqa: E402
from tests.support.cases import case_of  # noqa: E402
from tests.support.hub_server import Hub  # noqa: E402
from tests.support.random_models import random_model  # noqa: E402
from weightscope.heads.sinks.mechanisms import SinkInputs  # noqa: E402
from weightscope.runner import Runner  # noqa: E402

pytestmark = pytest.mark.check

ON_THE_HUB = {"dinov2": "facebook/dinov2-small", "dinov2_with_registers": "facebook/dinov2-with-registers-small"}


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Four files as Fashion-MNIST has them, of a few images of noise."""
    rng = np.random.default_rng(0)
    for part in ("train", "t10k"):
        for kind, values in (
            ("images-idx3", rng.integers(0, 256, (6, train_vit.SIDE, train_vit.SIDE), np.uint8)),
            ("labels-idx1", rng.integers(0, train_vit.GARMENTS, 6, np.uint8)),
        ):
            header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))
    return tmp_path


def test_training_writes_models_that_open_and_the_images_shown(photographs: Path) -> None:
    arguments = ["--images", str(photographs), "--out", str(photographs), "--epochs", "20"]
    result = CliRunner().invoke(train_vit.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(list((photographs / "images").iterdir())) == 6
    for name, recipe in train_vit.KEPT.items():
        model = ws.open_model(photographs / name)
        assert model.family.name == list(ON_THE_HUB)[recipe.registers > 0]
        assert len(model.attention_layers) == recipe.layers
        summary = json.loads((photographs / name / "training.json").read_text())
        assert summary["pairs of a head and an image"] == 6 * 4 * recipe.layers
        assert summary["nop"] + summary["broadcast"] + summary["neither"] == summary["sink events"]


def small_reader(spread: float | None = None) -> train_vit.Reader:
    return train_vit.Reader(10, 8, 4, 16, 2, spread, num_hidden_layers=1, num_attention_heads=2)


def test_each_patch_is_asked_for_its_own_pixels() -> None:
    """A reading that undoes the patch embedding finds exactly the pixels that the loss compares with."""
    reader, images = small_reader(), torch.randn(2, 1, 8, 8)
    kernel = reader.network.embeddings.patch_embeddings.projection
    embedded = torch.nn.functional.conv2d(images, kernel.weight, stride=4).flatten(2).transpose(1, 2)
    reader.pixels = torch.nn.Linear(16, 16, bias=False)
    reader.pixels.weight = torch.nn.Parameter(torch.linalg.inv(kernel.weight.flatten(1)))
    reader.forward = lambda *_: torch.cat([torch.zeros(2, 1, 16), embedded], dim=1)
    of_class, of_pixels = reader.losses(images, torch.tensor([1, 2]), train_vit.EVERY_TOKEN)
    assert float(of_pixels.detach()) == pytest.approx(0, abs=1e-4)
    named = reader.named(reader(images))  # (2, 5, 10)
    by_hand = torch.stack([-named[i].log_softmax(-1)[:, answer].mean() for i, answer in enumerate((1, 2))]).mean()
    torch.testing.assert_close(of_class, by_hand)


@pytest.mark.parametrize("asked", [train_vit.EVERY_TOKEN, train_vit.CLASS_TOKEN], ids=["every token", "class token"])
def test_only_the_tokens_that_are_asked_name_the_class(asked: slice) -> None:
    reader, images, tokens = small_reader(), torch.randn(2, 1, 8, 8), torch.randn(2, 5, 16)
    losses = []
    for value in (tokens, torch.cat([tokens[:, :1], torch.randn(2, 4, 16)], dim=1)):
        reader.forward = lambda *_, value=value: value
        losses.append(reader.losses(images, torch.tensor([1, 2]), asked)[0])
    assert (losses[0] == losses[1]) == (asked == train_vit.CLASS_TOKEN)


def test_registers_differ_only_where_they_are_drawn() -> None:
    for spread, differ in ((None, False), (0.5, True)):
        first, second = small_reader(spread).network.embeddings.register_tokens[0]
        assert torch.equal(first, second) != differ


@pytest.mark.parametrize(("folder", "tables"), [("vit", ["ten-epochs.csv"]), ("canvases", ["models.csv", "tries.csv"])])
def test_the_page_tells_the_tries_as_their_table_has_them(folder: str, tables: list[str]) -> None:
    kept = Path(train_vit.__file__).parent / folder
    page = (kept / "SOURCES.md").read_text()
    for row in [row for table in tables for row in csv.DictReader((kept / table).read_text().splitlines())]:
        counts = [
            f"{int(row['pairs of a head and an image']):,}",
            *(row[column] for column in ("sink events", "nop", "broadcast")),
        ]
        sizes = [f"{float(row[column]):.2f}" for column in ("largest strength", "smallest value-norm ratio")]
        heads = f"{row['sink heads']} of {row['heads']}"
        length = row["epochs"] if folder == "vit" else row["steps"]
        assert " | ".join([f"`{row['name']}`", row["registers"], length, *counts, heads, *sizes]) in page


def test_a_canvas_has_one_digit_in_negative_and_the_rest_as_asked() -> None:
    canvases, subjects = train_canvases.draw(40, 0.0, torch.Generator().manual_seed(0), test=True)
    cells = canvases.reshape(40, train_canvases.GRID, train_canvases.PATCH, train_canvases.GRID, train_canvases.PATCH)
    brightness = cells.mean(dim=(2, 4)).flatten(1)  # (b, CELLS)
    assert ((brightness > 0.3).sum(dim=1) == 1).all() and set(subjects.tolist()) == set(range(10))
    crowded, _ = train_canvases.draw(40, 1.0, torch.Generator().manual_seed(0))
    assert crowded.mean() > 4 * canvases.mean()


@pytest.mark.parametrize("name", ["vit-named-registers", "vit-pixels-registers", "vit-named"])
def test_models_of_canvases_open(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {key: replace(recipe, steps=2, batch=4) for key, recipe in train_canvases.RECIPES.items()}
    monkeypatch.setattr(train_canvases, "RECIPES", short)
    monkeypatch.setattr(train_canvases, "SHOWN", 3)
    arguments = ["--out", str(tmp_path), "--only", name]
    assert CliRunner().invoke(train_canvases.main, arguments, catch_exceptions=False).exit_code == 0
    recipe, model = short[name], ws.open_model(tmp_path / name)
    assert len(model.attention_layers) == recipe.layers
    summary = json.loads((tmp_path / name / "training.json").read_text())
    assert summary["pairs of a head and an image"] == 3 * recipe.layers * recipe.layer_heads


@pytest.mark.parametrize("reached", [True, False], ids=["the Hub answers", "the Hub does not"])
def test_dinov2_comes_from_the_hub_where_it_can(
    reached: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reached:
        for fixture, name in ON_THE_HUB.items():
            folder = tmp_path / fixture
            random_model(case_of(fixture)).save_pretrained(folder)
            hub.publish(name, folder)
    seen = {name: sink_mechanisms.DEFAULTS[name] for name in ("dinov2", "dinov2-registers")}
    monkeypatch.setattr(sink_mechanisms, "DEFAULTS", seen)
    run: dict[str, str] = {}

    def measured(runner: Runner, inputs: SinkInputs) -> SimpleNamespace:
        def write(out: Path) -> None:
            run[out.name] = f"{runner.model.name}: {inputs.note}"

        return SimpleNamespace(write=write, printed=list)

    monkeypatch.setattr(sink_mechanisms, "sink_mechanisms", measured)
    result = CliRunner().invoke(sink_mechanisms.main, ["--out", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for name, source, kept in zip(seen, ON_THE_HUB.values(), train_vit.KEPT, strict=True):
        assert run[name].startswith(f"{source if reached else kept}: Run on 64 images")
        assert ("scikit-learn's two photographs" if reached else "vit/images") in run[name]
