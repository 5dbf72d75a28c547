"""A small ViT on mosaics of digits: how gates and registers change its sinks and its patch tokens.

Section 5 and Table 1 of the two-sink-mechanisms paper train ViT-L on ImageNet without labels: three days on four H100s
per run, which is out of reach here. This model has 40,000 weights and is trained on class labels. Its results say
nothing about larger models.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import jaccard_score
from torch import Tensor, nn

from analyses.toys.sinks.attention import Options, PreNormAttention, Registers, Trace, traces
from analyses.toys.sinks.broadcast import mlp
from analyses.toys.sinks.diagnosis import diagnose
from analyses.toys.sinks.mosaics import CLASSES, PATCH, PATCHES, Mosaics, mosaics
from analyses.toys.sinks.training import Kept, as_array, seeded, train
from weightscope.heads.sinks import strength as sinks
from weightscope.model.metrics.sinks import MECHANISMS, mechanism


@dataclass(frozen=True)
class Size:
    """Sizes and schedule."""

    width: int
    heads: int
    layers: int
    images: int  # Training images, seen again and again
    batch: int
    steps: int
    rate: float


SINK_STRENGTH = 0.5  # a key that gets this share of attention or more, on average over queries, is a sink
SAMPLED = 40  # sinks per layer in the scatter plot
# The rate is high so that attention sharpens into sinks within a minute of training.
DEFAULT_SIZE = Size(width=32, heads=4, layers=3, images=8000, batch=32, steps=1000, rate=5e-3)
LARGE_SIZE = Size(width=128, heads=4, layers=6, images=50_000, batch=128, steps=20_000, rate=1e-3)
TEST_IMAGES = 500
PROBE_IMAGES = 400  # whose patches train the linear probe
DIAGNOSED = 200  # test images whose sinks are measured


class Vit(nn.Module):
    """Patches and a class token at learned positions, registers without; the class is predicted from the mean patch.

    Predicting it from the class token would leave the last layer's attention at the patches untrained.
    """

    def __init__(self, size: Size, options: Options) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, size.width)
        self.positions = nn.Parameter(torch.randn(1 + PATCHES, size.width) * 0.02)
        self.class_token = nn.Parameter(torch.randn(size.width) * 0.02)
        self.registers = Registers(options.registers, size.width)
        head_dim = size.width // size.heads
        self.attention = nn.ModuleList(
            PreNormAttention(size.width, size.heads, head_dim, options) for _ in range(size.layers)
        )
        self.mlp = nn.ModuleList(mlp(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.classes = nn.Linear(size.width, CLASSES)

    def tokens(self, patches: Tensor) -> Tensor:
        """Normalised tokens of the last layer, class token first: (b, PATCHES, pixels) -> (b, 1 + PATCHES, d)."""
        x = torch.cat([self.class_token.expand(len(patches), 1, -1), self.patch(patches)], dim=1)
        x = self.registers.append(x + self.positions)
        for attention, feed_forward in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x)
            x = x + feed_forward(x)
        return self.norm(self.registers.discard(x))

    def forward(self, patches: Tensor) -> Tensor:
        """Logits of the class, (b, PATCHES, pixels) -> (b, CLASSES)."""
        return self.classes(self.tokens(patches)[:, 1:].mean(dim=1))


@dataclass
class LayerSinks:
    """Sinks of one layer (keys of at least SINK_STRENGTH), as shares of all pairs of a test image and a head.

    A sink event requires that nearly all queries agree, which is rare in a model this small.
    """

    strength: float  # Of the strongest key, mean over these pairs
    event: float
    nop: float
    broadcast: float
    neither: float
    on_class: float  # Sinks that are the class token
    on_register: float
    on_patch: float
    similarity_before: float
    similarity_after: float  # Mean cosine between different tokens, before and after the layer's attention
    largest_norm: float  # The largest patch norm over the median one, after the attention; mean over images
    ratios: list[float]  # Value-norm ratios of sinks, at most SAMPLED of them, and the stable ranks of the same
    ranks: list[float]


@dataclass
class VitRun:
    """The results of one training."""

    variant: str
    seed: int
    accuracy: float = np.nan  # Of the class, on test images
    patch_accuracy: float = np.nan  # Of the linear probe that labels frozen patch tokens, on test images
    patch_iou: float = np.nan  # Mean over the eleven labels of intersection over union, as in semantic segmentation
    layers: list[LayerSinks] = field(default_factory=list)


def train_vit(variant: str, options: Options, size: Size, seed: int, folder: Path | None = None) -> VitRun:
    """Train on class labels, kept in `folder`, then measure sinks and probe the frozen patch tokens."""
    generator = seeded(seed)
    model = Vit(size, options)
    training, test = mosaics(size.images, seed, test=False), mosaics(TEST_IMAGES, seed, test=True)
    patches, classes = torch.as_tensor(training.patches), torch.as_tensor(training.classes)

    def loss() -> Tensor:
        drawn = torch.randint(len(patches), (size.batch,), generator=generator)
        return nn.functional.cross_entropy(model(patches[drawn]), classes[drawn])

    label = f"ViT, {variant}, seed {seed}"
    kept = Kept(folder, label, {"size": asdict(size)}, generator, ()) if folder else None
    for _ in train(model, loss, size.steps, size.rate, label, cosine=True, kept=kept):
        pass
    run = VitRun(variant, seed)
    with torch.no_grad():
        seen = torch.as_tensor(test.patches)
        run.accuracy = float((as_array(model(seen).argmax(dim=-1)) == test.classes).mean())
        run.patch_accuracy, run.patch_iou = probed(model, training, test)
    run.layers = [layer_sinks(trace) for trace in traces(model, seen[:DIAGNOSED])]
    return run


def probed(model: Vit, training: Mosaics, test: Mosaics) -> tuple[float, float]:
    """Accuracy and mean IoU, on test images, of a linear classifier of the frozen patch tokens."""

    def features(images: np.ndarray) -> np.ndarray:
        return as_array(model.tokens(torch.as_tensor(images))[:, 1:].flatten(0, 1))  # (images * PATCHES, d)

    probe = LogisticRegression(max_iter=300)
    probe.fit(features(training.patches[:PROBE_IMAGES]), training.labels[:PROBE_IMAGES].ravel())
    predicted, labels = probe.predict(features(test.patches)), test.labels.ravel()
    return float((predicted == labels).mean()), float(jaccard_score(labels, predicted, average="macro"))


def layer_sinks(trace: Trace) -> LayerSinks:
    """The sinks of one layer. Tokens are the class token, the patches, then any registers."""
    diagnosis = diagnose(trace)  # (b, h)
    sinking = diagnosis.strength >= SINK_STRENGTH
    key = diagnosis.sink[sinking]
    kinds = {"on_class": key == 0, "on_patch": (key > 0) & (key <= PATCHES), "on_register": key > PATCHES}
    kind_of_sink = mechanism(diagnosis.ratio, diagnosis.rank)
    patch_norms = np.linalg.norm(trace.after[:, 1 : 1 + PATCHES], axis=-1)  # (b, PATCHES)
    shown = np.random.default_rng(0).permutation(len(key))[:SAMPLED]
    return LayerSinks(
        strength=float(diagnosis.strength.mean()),
        event=float(diagnosis.event.mean()),
        **{name: float((sinking & (kind_of_sink == name)).mean()) for name in MECHANISMS},
        **{kind: float(which.sum() / diagnosis.sink.size) for kind, which in kinds.items()},
        similarity_before=float(sinks.similarity_between_tokens(trace.before).mean()),
        similarity_after=float(sinks.similarity_between_tokens(trace.after).mean()),
        largest_norm=float((patch_norms.max(axis=1) / np.median(patch_norms, axis=1)).mean()),
        ratios=diagnosis.ratio[sinking][shown].round(4).tolist(),
        ranks=diagnosis.rank[sinking][shown].round(4).tolist(),
    )
