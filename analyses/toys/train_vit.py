"""Train small vision transformers on the photographs of Fashion-MNIST, with and without registers.

    python -m analyses.toys.train_vit --images /usr/share/datasets/fashion-mnist --out analyses/toys/vit
    python -m analyses.toys.train_vit --images /usr/share/datasets/fashion-mnist --out out/vit --only masked

60,000 grey photographs of garments, 28 x 28 pixels, 49 patches (Xiao et al. 2017; Debian ships them in the package
dataset-fashion-mnist). All are the DINOv2 of transformers. `RECIPES` says what each learns. The two that the repository
keeps have to say which garment it is at every token, and patches also their pixels, partly hidden: one patch
does not show which garment it is, so the model has to collect that and distribute it. The other recipes ask the class
token alone, or for pixels; OUT/tries.csv counts the sinks of each.
Registers predict nothing. The first images of the test set are written too.
"""

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

import weightscope as ws
from analyses.toys.sinks.training import seeded, train
from weightscope.core.files import Folder
from weightscope.core.tables import Table
from weightscope.heads.sinks.mechanisms import read_inputs, sink_mechanisms
from weightscope.model.metrics.sinks import MECHANISMS
from weightscope.runner import open_runner

SIDE, PATCH = 28, 4
GRID = SIDE // PATCH
PATCHES = GRID**2
GARMENTS = 10
MEAN, STD = 0.286, 0.353  # of the pixels
PREPARED = {
    "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE}, "do_convert_rgb": False, "image_mean": [MEAN], "image_std": [STD],
}  # fmt: skip
HIDDEN = 0.6  # largest share of an image's patches that is hidden
PIXELS = 0.3  # weight of the pixels' squared error, relative to the garment's cross-entropy
SHOWN = 64  # test images that are written
MASKED = {"masked": 0.6, "repaired": 0.15}  # share of patches hidden, by what is asked


@dataclass(frozen=True)
class Recipe:
    """A model and its training task."""

    # "every token": see above; "class": the garment of the class token; "masked": hidden pixels; "repaired": the
    # pixels of all patches, so that those that are not hidden have to stay as they are
    asked: str
    registers: int = 0
    layers: int = 4
    width: int = 48
    batch: int = 64
    epochs: float = 10
    rate: float = 3e-3


KEPT = {
    "vit-fashion-mnist": Recipe("every token", batch=16, epochs=2 / 3),
    "vit-fashion-mnist-registers": Recipe("every token", registers=4, batch=16, epochs=2 / 3),
}
TRIES = {
    "class": Recipe("class"),
    "class-registers": Recipe("class", registers=4),
    "masked": Recipe("masked", layers=6),
    "repaired": Recipe("repaired"),
}
RECIPES = KEPT | TRIES


def read_idx(path: Path) -> np.ndarray:
    """Read a file of the MNIST format: the type (8, uint8), the number of axes, their lengths, the values."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()


class Learner(nn.Module):
    """A DINOv2 and two linear readouts of its tokens: the garment, and the pixels."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        shape = {
            "hidden_size": recipe.width, "num_hidden_layers": recipe.layers, "num_attention_heads": 4,
            "image_size": SIDE, "patch_size": PATCH, "num_channels": 1, "layerscale_value": 1.0,
            "initializer_range": 0.1,
        }  # fmt: skip
        if recipe.registers:
            config = Dinov2WithRegistersConfig(num_register_tokens=recipe.registers, **shape)
            self.network: nn.Module = Dinov2WithRegistersModel(config)
        else:
            self.network = Dinov2Model(Dinov2Config(**shape))
        self.asked = recipe.asked
        self.garment = nn.Linear(recipe.width, GARMENTS)
        self.pixels = nn.Linear(recipe.width, PATCH**2)

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The last layer's tokens, class token first, without the registers: (b, 1, SIDE, SIDE) -> (b, 50, d)."""
        tokens = self.network(images, bool_masked_pos=hidden).last_hidden_state
        return torch.cat([tokens[:, :1], tokens[:, -PATCHES:]], dim=1)

    def loss(self, images: Tensor, garments: Tensor, hidden: Tensor | None) -> Tensor:
        """Cross-entropy of the garment and squared error of the pixels, over the tokens that are asked for them."""
        tokens = self(images, hidden)
        named = tokens if self.asked == "every token" else tokens[:, :1]
        logits = self.garment(named).flatten(0, 1)
        of_garment = nn.functional.cross_entropy(logits, garments.repeat_interleave(named.shape[1]))
        if self.asked == "class":
            return of_garment
        rows = images.reshape(-1, GRID, PATCH, GRID, PATCH).transpose(2, 3).reshape(-1, PATCHES, PATCH**2)
        read = self.pixels(tokens[:, 1:])
        if self.asked == "every token":
            return of_garment + PIXELS * nn.functional.mse_loss(read, rows)
        if self.asked == "repaired":
            return nn.functional.mse_loss(read, rows)
        return nn.functional.mse_loss(read[hidden], rows[hidden])


def hide(recipe: Recipe, generator: torch.Generator) -> Tensor | None:
    """Which patches are hidden from a batch, bool (batch, PATCHES)."""
    if recipe.asked == "class":
        return None
    every = recipe.asked == "every token"
    share = HIDDEN * torch.rand(recipe.batch, 1, generator=generator) if every else MASKED[recipe.asked]
    return torch.rand(recipe.batch, PATCHES, generator=generator) < share


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """A batch mirrored or not, and moved by up to two pixels, so that many epochs are not learned by heart."""
    if torch.rand(1, generator=generator) < 0.5:
        images = images.flip(-1)
    across, down = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return torch.roll(images, (across, down), (1, 2))


def learn(folder: Path, name: str, epochs: float | None, seed: int) -> tuple[Learner, dict[str, object]]:
    """Train one model; returns it and a summary of the run."""
    recipe = RECIPES[name]
    generator = seeded(seed)
    learner = Learner(recipe)
    images, garments, test_images, test_garments = (
        torch.from_numpy(read_idx(folder / f"{part}-{kind}-ubyte.gz"))
        for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )  # fmt: skip
    steps = max(1, round(len(images) * (epochs or recipe.epochs) / recipe.batch))

    def standardised(pixels: Tensor) -> Tensor:
        return (pixels[:, None].float() / 255 - MEAN) / STD

    def loss() -> Tensor:
        drawn = torch.randint(len(images), (recipe.batch,), generator=generator)
        batch = images[drawn] if name in KEPT else shifted(images[drawn], generator)
        return learner.loss(standardised(batch), garments[drawn].long(), hide(recipe, generator))

    for _ in train(learner, loss, steps, recipe.rate, name, cosine=True):
        pass
    learner.eval()
    with torch.no_grad():
        right = [
            learner.garment(learner(standardised(batch))).argmax(-1) == answers[:, None]
            for batch, answers in zip(test_images.split(500), test_garments.split(500), strict=True)
        ]
    by_token = torch.cat(right).float().mean(dim=0)
    return learner, {
        **asdict(recipe), "images": len(images), "steps": steps, "seed": seed,
        "accuracy of the class token": round(float(by_token[0]), 4),
        "accuracy of a patch": round(float(by_token[1:].mean()), 4),
    }  # fmt: skip


def sinks_of(model: Path, images: Path) -> dict[str, object]:
    """How many sinks a trained model has on the images that are shown, by the rule of the paper's code."""
    opened = ws.open_model(model)
    sinks = sink_mechanisms(open_runner(opened), read_inputs(opened, (), images))
    return {
        "pairs of a head and an image": sinks.event.size, "sink events": int(sinks.event.sum()),
        **{does: int((sinks.mechanism == does).sum()) for does in MECHANISMS},
        "heads": sinks.sink_heads.size, "sink heads": int(sinks.sink_heads.sum()),
        "largest strength": round(float(sinks.strength.mean(axis=0).max()), 4),
        "smallest value-norm ratio": round(float(np.nanmedian(sinks.ratio, axis=0).min()), 4),
    }  # fmt: skip


@click.command("train-vit")
@click.option(
    "--images",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Folder of its four files.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--only", type=click.Choice(list(RECIPES)), multiple=True, help="By default the two that are kept.")
@click.option("--epochs", type=float, help="By default the recipe's.")
@click.option("--seed", default=0, show_default=True)
def main(images: Path, out: Path, only: tuple[str, ...], epochs: float | None, seed: int) -> None:
    """Write a folder for each model, OUT/images and OUT/tries.csv, a row for each model in OUT."""
    for index, pixels in enumerate(read_idx(images / "t10k-images-idx3-ubyte.gz")[:SHOWN]):
        with Folder(out / "images").open(f"{index:02}.png") as file:
            Image.fromarray(pixels).save(file, format="png")
    for name in only or KEPT:
        learner, summary = learn(images, name, epochs, seed)
        learner.network.half().save_pretrained(out / name)
        files = Folder(out / name)
        files.json("preprocessor_config.json", PREPARED)
        files.json("training.json", summary | sinks_of(out / name, out / "images"))
        click.echo(f"{name}: {summary}")
    runs = {name: out / name / "training.json" for name in RECIPES}
    rows = [{"name": name} | json.loads(path.read_text()) for name, path in runs.items() if path.exists()]
    Folder(out).table("tries.csv", Table.of_rows(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
