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


@pytest.mark.parametrize("names", [list(train_vit.KEPT), list(train_vit.TRIES)], ids=["kept", "tries"])
def test_training_writes_models_that_open_the_images_shown_and_a_table(names: list[str], photographs: Path) -> None:
    only = [word for name in names if names != list(train_vit.KEPT) for word in ("--only", name)]
    arguments = ["--images", str(photographs), "--out", str(photographs), "--epochs", "20", *only]
    result = CliRunner().invoke(train_vit.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(list((photographs / "images").iterdir())) == 6
    with (photographs / "tries.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == names
    for name in names:
        recipe, model = train_vit.RECIPES[name], ws.open_model(photographs / name)
        assert model.family.name == list(ON_THE_HUB)[recipe.registers > 0]
        assert len(model.attention_layers) == recipe.layers
        summary = json.loads((photographs / name / "training.json").read_text())
        assert summary["pairs of a head and an image"] == 6 * 4 * recipe.layers
        assert summary["nop"] + summary["broadcast"] + summary["neither"] == summary["sink events"]


def test_each_patch_is_asked_for_its_own_pixels() -> None:
    """A reading that undoes the patch embedding finds exactly the pixels that the loss compares with."""
    learner = train_vit.Learner(train_vit.RECIPES["vit-fashion-mnist"])
    images = torch.randn(2, 1, train_vit.SIDE, train_vit.SIDE)
    kernel = learner.network.embeddings.patch_embeddings.projection
    embedded = torch.nn.functional.conv2d(images, kernel.weight, stride=train_vit.PATCH).flatten(2).transpose(1, 2)
    learner.pixels = torch.nn.Linear(embedded.shape[-1], train_vit.PATCH**2, bias=False)
    learner.pixels.weight = torch.nn.Parameter(torch.linalg.pinv(kernel.weight.flatten(1)))
    learner.forward = lambda *_: torch.cat([torch.zeros(2, 1, embedded.shape[-1]), embedded], dim=1)
    garments = torch.zeros(2, dtype=torch.long)
    named = learner.garment(learner(images)).flatten(0, 1)
    of_names = torch.nn.functional.cross_entropy(named, garments.repeat_interleave(50))
    torch.testing.assert_close(learner.loss(images, garments, None), of_names, rtol=1e-4, atol=1e-4)


ASKED = {
    "class": {"class token"},
    "masked": {"hidden"},
    "repaired": {"seen", "hidden"},
    "every token": {"class token", "seen", "hidden"},
}


@pytest.mark.parametrize("asked", ASKED)
def test_only_the_tokens_that_are_asked_are_judged(asked: str) -> None:
    images, hidden = torch.randn(2, 1, train_vit.SIDE, train_vit.SIDE), torch.rand(2, train_vit.PATCHES) < 0.5
    tokens, nowhere = torch.randn(2, 1 + train_vit.PATCHES, 48), torch.zeros(2, train_vit.PATCHES, dtype=torch.bool)
    is_class = torch.arange(1 + train_vit.PATCHES).expand(2, -1) == 0
    learner = train_vit.Learner(train_vit.Recipe(asked))

    def loss(value: torch.Tensor) -> float:
        learner.forward = lambda *_: value
        return float(learner.loss(images, torch.tensor([1, 2]), hidden).detach())

    matter = set()
    for name, patches in (("class token", None), ("seen", ~hidden), ("hidden", hidden)):
        where = is_class if patches is None else torch.cat([nowhere[:, :1], patches], dim=1)
        if loss(tokens) != loss(torch.where(where[..., None], tokens + torch.randn(48), tokens)):
            matter.add(name)
    assert matter == ASKED[asked]


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
def test_models_of_canvases_open_and_their_registers_differ(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {key: replace(recipe, steps=2, batch=4) for key, recipe in train_canvases.RECIPES.items()}
    monkeypatch.setattr(train_canvases, "RECIPES", short)
    monkeypatch.setattr(train_canvases, "SHOWN", 3)
    arguments = ["--out", str(tmp_path), "--only", name]
    assert CliRunner().invoke(train_canvases.main, arguments, catch_exceptions=False).exit_code == 0
    recipe, model = short[name], ws.open_model(tmp_path / name)
    assert len(model.attention_layers) == recipe.layers
    summary = json.loads((tmp_path / name / "training.json").read_text())
    assert summary["pairs of a head and an image"] == 3 * recipe.layers * recipe.layer_heads
    if recipe.registers:
        registers = train_canvases.Learner(recipe).network.embeddings.register_tokens[0]
        assert torch.cdist(registers, registers).fill_diagonal_(1).min() > 0.1


def test_only_the_tokens_that_are_asked_name_the_subject() -> None:
    canvases, subjects = train_canvases.draw(4, 1.0, torch.Generator().manual_seed(0))
    tokens = torch.randn(4, 1 + train_canvases.CELLS, 32)
    for recipe, asked in ((train_canvases.PIXELS, False), (replace(train_canvases.PIXELS, every_token=True), True)):
        learner = train_canvases.Learner(replace(recipe, pixels=0.0))
        losses = []
        for value in (tokens, torch.cat([tokens[:, :1], torch.randn(tokens[:, 1:].shape)], dim=1)):
            learner.forward = lambda *_, value=value: value
            losses.append(float(learner.loss(canvases, subjects).detach()))
        assert (losses[0] != losses[1]) == asked


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
