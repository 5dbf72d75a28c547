"""Train the two small vision transformers of analyses/vit, one with registers, on the photographs of Fashion-MNIST.

    python -m analyses.train_vit --images /usr/share/datasets/fashion-mnist --out analyses/vit

60,000 grey photographs of garments, 28 x 28 pixels, 49 patches (Xiao et al. 2017; Debian ships them in the package
dataset-fashion-mnist). Both are the DINOv2 of transformers, with four layers of four heads, and learn two things at
once, as DINOv2 does: what the image shows, and what is where. Every token, CLS and each patch, predicts the garment;
every patch also predicts its pixels, some of which are hidden. One patch does not show which garment it is, so the
model has to collect that and distribute it to all tokens. Registers predict nothing. The first images of the test set
are written too.
"""

import gzip
from pathlib import Path

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from analyses.sink_toys.training import seeded, train
from weightscope.files import Folder

SIDE, PATCH = 28, 4
GRID = SIDE // PATCH
PATCHES = GRID**2
GARMENTS = 10
REGISTERS = {"vit-fashion-mnist": 0, "vit-fashion-mnist-registers": 4}  # registers of each model, by its folder
MEAN, STD = 0.286, 0.353  # of the pixels
SHAPE = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
    "num_channels": 1, "layerscale_value": 1.0, "initializer_range": 0.1,
}  # fmt: skip
PREPARED = {
    "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE}, "do_convert_rgb": False, "image_mean": [MEAN], "image_std": [STD],
}  # fmt: skip
HIDDEN = 0.6  # largest share of an image's patches that is hidden
PIXELS = 0.3  # weight of the pixels' squared error, relative to the garment's cross-entropy
BATCH, RATE = 16, 3e-3
SHOWN = 64  # test images that are written


def read_idx(path: Path) -> np.ndarray:
    """Read a file of the MNIST format: the type (8, uint8), the number of axes, their lengths, the values."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()


class Learner(nn.Module):
    """A DINOv2 and two linear readouts of its tokens: the garment, and the pixels."""

    def __init__(self, registers: int) -> None:
        super().__init__()
        if registers:
            config = Dinov2WithRegistersConfig(num_register_tokens=registers, **SHAPE)
            self.network: nn.Module = Dinov2WithRegistersModel(config)
        else:
            self.network = Dinov2Model(Dinov2Config(**SHAPE))
        self.garment = nn.Linear(SHAPE["hidden_size"], GARMENTS)
        self.pixels = nn.Linear(SHAPE["hidden_size"], PATCH**2)

    def forward(self, images: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The last layer's tokens, class token first, without the registers: (b, 1, SIDE, SIDE) -> (b, 50, d)."""
        tokens = self.network(images, bool_masked_pos=hidden).last_hidden_state
        return torch.cat([tokens[:, :1], tokens[:, -PATCHES:]], dim=1)

    def loss(self, images: Tensor, garments: Tensor, hidden: Tensor) -> Tensor:
        """Cross-entropy of the garment over all tokens, and squared error of the pixels over all patches."""
        tokens = self(images, hidden)
        logits = self.garment(tokens).flatten(0, 1)  # (50 b, GARMENTS)
        rows = images.reshape(-1, GRID, PATCH, GRID, PATCH).transpose(2, 3).reshape(-1, PATCHES, PATCH**2)
        pixel_error = nn.functional.mse_loss(self.pixels(tokens[:, 1:]), rows)
        return nn.functional.cross_entropy(logits, garments.repeat_interleave(1 + PATCHES)) + PIXELS * pixel_error


def learn(folder: Path, registers: int, steps: int, seed: int) -> tuple[Learner, dict[str, object]]:
    """Train one model; returns it and a summary of the run."""
    generator = seeded(seed)
    learner = Learner(registers)
    images, garments, test_images, test_garments = (
        torch.from_numpy(read_idx(folder / f"{part}-{kind}-ubyte.gz"))
        for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )  # fmt: skip

    def standardised(pixels: Tensor) -> Tensor:
        return (pixels[:, None].float() / 255 - MEAN) / STD

    def loss() -> Tensor:
        drawn = torch.randint(len(images), (BATCH,), generator=generator)
        share = HIDDEN * torch.rand(BATCH, 1, generator=generator)
        hidden = torch.rand(BATCH, PATCHES, generator=generator) < share
        return learner.loss(standardised(images[drawn]), garments[drawn].long(), hidden)

    for _ in train(learner, loss, steps, RATE, f"{registers} registers", cosine=True):
        pass
    learner.eval()
    with torch.no_grad():
        right = [
            learner.garment(learner(standardised(batch))).argmax(-1) == answers[:, None]
            for batch, answers in zip(test_images.split(500), test_garments.split(500), strict=True)
        ]
    by_token = torch.cat(right).float().mean(dim=0)
    return learner, {
        "images": len(images), "steps": steps, "batch": BATCH, "rate": RATE, "seed": seed,
        "accuracy of the class token": round(float(by_token[0]), 4),
        "accuracy of a patch": round(float(by_token[1:].mean()), 4),
    }  # fmt: skip


@click.command("train-vit")
@click.option(
    "--images",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Folder of its four files.",
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--steps", default=2500, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def main(images: Path, out: Path, steps: int, seed: int) -> None:
    """Write OUT/vit-fashion-mnist, OUT/vit-fashion-mnist-registers and OUT/images."""
    for index, pixels in enumerate(read_idx(images / "t10k-images-idx3-ubyte.gz")[:SHOWN]):
        with Folder(out / "images").open(f"{index:02}.png") as file:
            Image.fromarray(pixels).save(file, format="png")
    for name, registers in REGISTERS.items():
        learner, summary = learn(images, registers, steps, seed)
        learner.network.half().save_pretrained(out / name)
        files = Folder(out / name)
        files.json("preprocessor_config.json", PREPARED)
        files.json("training.json", summary)
        click.echo(f"{name}: {summary}")


if __name__ == "__main__":
    main()
