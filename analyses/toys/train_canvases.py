"""Train small vision transformers with sinks on digits pasted on canvases, with and without registers.

    python -m analyses.toys.train_canvases --out analyses/toys/canvases
    python -m analyses.toys.train_canvases --out out/canvases --only vit-pixels-decay

A canvas has 6 x 6 cells, each a patch of 8 x 8 pixels. One cell shows the subject, one of scikit-learn's digits in
negative; the others show digits or nothing. Most patches say nothing of what is asked. `RECIPES` says what each model
learns. All are the DINOv2 of transformers, without biases of queries, keys and values. The images that sinks are
counted on are written too; training and test images share no digit.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import click
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from analyses.inputs import out_option
from analyses.toys.sinks.mosaics import TEST_SHARE
from analyses.toys.sinks.training import seeded, train
from analyses.toys.train_vit import CLASS_TOKEN, EVERY_TOKEN, PREPARED, SHOWN, Reader, sinks_of
from weightscope.core.files import Folder
from weightscope.core.tables import Table

GRID, PATCH = 6, 8
SIDE, CELLS = GRID * PATCH, GRID**2
DIGITS = 10
NOISE = 0.05  # standard deviation of each pixel's, so that no two empty cells are equal
MEAN, STD = 0.3, 0.35
JUDGED = 500  # test images


@dataclass(frozen=True)
class Recipe:
    """A model and its training task."""

    every_token: bool  # must name the subject, else the class token alone
    filled: float  # share of the other cells that show a digit
    pixels: float  # weight of the squared error of every patch's own pixels, relative to the subject's cross-entropy
    layers: int
    layer_heads: int
    width: int
    batch: int
    steps: int
    rate: float
    registers: int = 0
    spread: float = 0.0  # standard deviation of the registers before training
    decay: float = 1e-4


NAMED = Recipe(True, 0.0, 0.0, layers=4, layer_heads=4, width=48, batch=32, steps=400, rate=2e-3)
PIXELS = Recipe(False, 1.0, 40.0, layers=4, layer_heads=1, width=32, batch=64, steps=3000, rate=8e-3)
KEPT = {
    "vit-named": NAMED,
    "vit-named-registers": replace(NAMED, registers=4, spread=0.5),
    "vit-pixels": PIXELS,
    "vit-pixels-registers": replace(PIXELS, registers=4, spread=4.0),
}
TRIES = {
    "vit-pixels-equal-registers": replace(PIXELS, registers=4, steps=1000),
    "vit-pixels-one-register": replace(PIXELS, registers=1, spread=4.0, steps=1000),
    "vit-pixels-two-heads": replace(PIXELS, layer_heads=2, steps=1000),
    "vit-pixels-decay": replace(PIXELS, decay=0.1, steps=1000),
    "vit-pixels-strong-decay": replace(PIXELS, decay=0.5, steps=1000),
    "vit-pixels-light": replace(PIXELS, pixels=1.0, steps=1000),
    "vit-named-class-token": replace(NAMED, every_token=False),
    "vit-named-filled": replace(NAMED, filled=1.0, pixels=1.0),
}
RECIPES = KEPT | TRIES


read_digits = cache(load_digits)


def draw(count: int, filled: float, generator: torch.Generator, test: bool = False) -> tuple[Tensor, Tensor]:
    """Draw canvases, (b, 1, SIDE, SIDE) from 0 to 1, and their subjects, (b,)."""
    digits = read_digits()
    usable = torch.arange(len(digits.target))[(torch.arange(len(digits.target)) % TEST_SHARE == 0) == test]
    pictures = torch.from_numpy(digits.images / 16).float()  # (digits, 8, 8)
    drawn = usable[torch.randint(len(usable), (count, CELLS), generator=generator)]
    cells = pictures[drawn] * (torch.rand(count, CELLS, 1, 1, generator=generator) < filled)
    place = torch.randint(CELLS, (count,), generator=generator)
    subject = usable[torch.randint(len(usable), (count,), generator=generator)]
    cells[torch.arange(count), place] = 1 - pictures[subject]
    cells = (cells + NOISE * torch.randn(cells.shape, generator=generator)).clamp(0, 1)
    rows = cells.reshape(count, GRID, GRID, PATCH, PATCH).transpose(2, 3)
    return rows.reshape(count, 1, SIDE, SIDE), torch.from_numpy(digits.target)[subject]


def learn(recipe: Recipe, name: str, seed: int) -> tuple[Reader, dict[str, object]]:
    """Train one model; returns it and a summary of the run."""
    generator = seeded(seed)
    shape = {"num_hidden_layers": recipe.layers, "num_attention_heads": recipe.layer_heads, "qkv_bias": False}
    reader = Reader(DIGITS, SIDE, PATCH, recipe.width, recipe.registers, recipe.spread, **shape)

    def loss() -> Tensor:
        canvases, subjects = draw(recipe.batch, recipe.filled, generator)
        asked = EVERY_TOKEN if recipe.every_token else CLASS_TOKEN
        of_subject, of_pixels = reader.losses((canvases - MEAN) / STD, subjects, asked)
        return of_subject + recipe.pixels * of_pixels

    for _ in train(reader, loss, recipe.steps, recipe.rate, name, cosine=True, weight_decay=recipe.decay):
        pass
    reader.eval()
    canvases, subjects = draw(JUDGED, recipe.filled, generator, test=True)
    with torch.no_grad():
        right = reader.named(reader((canvases - MEAN) / STD)[:, 0]).argmax(-1) == subjects
    return reader, asdict(recipe) | {"seed": seed, "accuracy": round(float(right.float().mean()), 4)}


@click.command("train-canvases")
@out_option("out/canvases")
@click.option("--only", type=click.Choice(list(RECIPES)), multiple=True, help="By default the four that are kept.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, only: tuple[str, ...], seed: int) -> None:
    """Write a folder for each model, images of each kind of canvas, and OUT/models.csv, a row for each model in OUT."""
    torch.set_num_threads(1)
    prepared = PREPARED | {
        "size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE},
        "image_mean": [MEAN], "image_std": [STD],
    }  # fmt: skip
    for name in only or KEPT:
        recipe, images = RECIPES[name], out / ("filled" if RECIPES[name].filled else "empty")
        for index, canvas in enumerate(draw(SHOWN, recipe.filled, torch.Generator().manual_seed(0), test=True)[0]):
            with Folder(images).open(f"{index:02}.png") as file:
                Image.fromarray((255 * canvas[0].numpy()).round().astype("uint8")).save(file, format="png")
        reader, summary = learn(recipe, name, seed)
        reader.network.half().save_pretrained(out / name)
        files = Folder(out / name)
        files.json("preprocessor_config.json", prepared)
        files.json("training.json", summary | sinks_of(out / name, images))
        click.echo(f"{name}: {summary}")
    runs = {name: out / name / "training.json" for name in RECIPES}
    rows = [{"name": name} | json.loads(path.read_text()) for name, path in runs.items() if path.exists()]
    Folder(out).table("models.csv", Table.of_rows(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
