"""Train small vision transformers on the photographs of Fashion-MNIST, with and without registers.

    python -m analyses.toys.train_vit --images /usr/share/datasets/fashion-mnist --out analyses/toys/vit

60,000 grey photographs of garments, 28 x 28 pixels, 49 patches (Xiao et al. 2017; Debian ships them in the package
dataset-fashion-mnist). Both are the DINOv2 of transformers. They have to say which garment it is at every token, and
patches also their pixels, partly hidden: one patch does not show which garment it is, so the model has to collect that
and distribute it. Registers predict nothing. The first images of the test set are written too.
"""

import gzip
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

import weightscope as ws
from analyses.toys.sinks.training import seeded, train
from weightscope.core.files import Folder
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
EVERY_TOKEN, CLASS_TOKEN = slice(None), slice(1)  # tokens that are asked


@dataclass(frozen=True)
class Recipe:
    """A model and its training."""

    registers: int = 0
    layers: int = 4
    width: int = 48
    batch: int = 16
    epochs: float = 2 / 3
    rate: float = 3e-3


KEPT = {"vit-fashion-mnist": Recipe(), "vit-fashion-mnist-registers": Recipe(registers=4)}


def read_idx(path: Path) -> np.ndarray:
    """Read a file of the MNIST format: the type (8, uint8), the number of axes, their lengths, the values."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()


class Reader(nn.Module):
    """A DINOv2 and two linear readouts of its tokens: a class, and the pixels of patches.

    Transformers starts registers at zero, and equals stay equal: `spread` is the standard deviation to draw them with.
    """

    def __init__(
        self, classes: int, side: int, patch: int, width: int, registers: int, spread: float | None = None, **shape: Any
    ) -> None:
        super().__init__()
        shape |= {
            "hidden_size": width, "image_size": side, "patch_size": patch, "num_channels": 1, "layerscale_value": 1.0,
            "initializer_range": 0.1,
        }  # fmt: skip
        if registers:
            config = Dinov2WithRegistersConfig(num_register_tokens=registers, **shape)
            self.network: nn.Module = Dinov2WithRegistersModel(config)
            if spread is not None:
                nn.init.normal_(self.network.embeddings.register_tokens, std=spread)
        else:
            self.network = Dinov2Model(Dinov2Config(**shape))
        self.patch, self.grid = patch, side // patch
        self.named = nn.Linear(width, classes)
        self.pixels = nn.Linear(width, patch**2)

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The last layer's tokens, class token first, without the registers: (b, 1, side, side) -> (b, 1 + n, d)."""
        tokens = self.network(images, bool_masked_pos=hidden).last_hidden_state
        return torch.cat([tokens[:, :1], tokens[:, -(self.grid**2) :]], dim=1)

    def losses(
        self, images: Tensor, answers: Tensor, asked: slice, hidden: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the class at the tokens that are asked, and squared error of the pixels of all patches."""
        tokens = self(images, hidden)
        logits = self.named(tokens[:, asked])  # (b, asked, classes)
        of_class = nn.functional.cross_entropy(logits.flatten(0, 1), answers.repeat_interleave(logits.shape[1]))
        rows = images.reshape(-1, self.grid, self.patch, self.grid, self.patch).transpose(2, 3)
        return of_class, nn.functional.mse_loss(self.pixels(tokens[:, 1:]), rows.reshape(*tokens[:, 1:].shape[:2], -1))


def learn(folder: Path, name: str, epochs: float | None, seed: int) -> tuple[Reader, dict[str, object]]:
    """Train one model; returns it and a summary of the run."""
    recipe = KEPT[name]
    generator = seeded(seed)
    shape = {"num_hidden_layers": recipe.layers, "num_attention_heads": 4}
    reader = Reader(GARMENTS, SIDE, PATCH, recipe.width, recipe.registers, **shape)
    images, garments, test_images, test_garments = (
        torch.from_numpy(read_idx(folder / f"{part}-{kind}-ubyte.gz"))
        for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )  # fmt: skip
    steps = max(1, round(len(images) * (epochs or recipe.epochs) / recipe.batch))

    def standardised(pixels: Tensor) -> Tensor:
        return (pixels[:, None].float() / 255 - MEAN) / STD

    def loss() -> Tensor:
        drawn = torch.randint(len(images), (recipe.batch,), generator=generator)
        share = HIDDEN * torch.rand(recipe.batch, 1, generator=generator)
        hidden = torch.rand(recipe.batch, PATCHES, generator=generator) < share
        of_garment, of_pixels = reader.losses(standardised(images[drawn]), garments[drawn].long(), EVERY_TOKEN, hidden)
        return of_garment + PIXELS * of_pixels

    for _ in train(reader, loss, steps, recipe.rate, name, cosine=True):
        pass
    reader.eval()
    with torch.no_grad():
        right = [
            reader.named(reader(standardised(batch))).argmax(-1) == answers[:, None]
            for batch, answers in zip(test_images.split(500), test_garments.split(500), strict=True)
        ]
    by_token = torch.cat(right).float().mean(dim=0)
    return reader, {
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
@click.option("--only", type=click.Choice(list(KEPT)), multiple=True, help="By default both.")
@click.option("--epochs", type=float, help="By default the recipe's.")
@click.option("--seed", default=0, show_default=True)
def main(images: Path, out: Path, only: tuple[str, ...], epochs: float | None, seed: int) -> None:
    """Write a folder for each model, and OUT/images."""
    for index, pixels in enumerate(read_idx(images / "t10k-images-idx3-ubyte.gz")[:SHOWN]):
        with Folder(out / "images").open(f"{index:02}.png") as file:
            Image.fromarray(pixels).save(file, format="png")
    for name in only or KEPT:
        reader, summary = learn(images, name, epochs, seed)
        reader.network.half().save_pretrained(out / name)
        files = Folder(out / name)
        files.json("preprocessor_config.json", PREPARED)
        files.json("training.json", summary | sinks_of(out / name, out / "images"))
        click.echo(f"{name}: {summary}")


if __name__ == "__main__":
    main()
