"""Photographs as the pixel arrays that a vision model takes, made by transformers' own image
processors.

They are those that compute with Pillow and NumPy, so that torchvision is not needed. The checkpoint
names one and its settings in preprocessor_config.json. If the checkpoint has no such file, or names
a processor that needs torchvision (DINOv3's), the family's usual one is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from weightscope.checkpoint.config import MAX_BYTES, read_json
from weightscope.core.errors import CheckpointError, first_line
from weightscope.core.files import regular_file
from weightscope.model.model import Model
from weightscope.runner.loading import import_torch

DESCRIPTION = "preprocessor_config.json"
# where transformers 5 writes the same, for models of images and text
TOGETHER = "processor_config.json"
SIZES = ("size", "crop_size", "pad_size")
LARGEST_SIDE = 4096  # pixels; no model takes images near it, and a hostile file may ask for any
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SMALLEST_CROP = 0.4  # of the photograph's shorter side


@dataclass(frozen=True)
class ImageProcessor:
    """Turns a photograph into the pixels that a model takes."""

    processor: Any
    channels: int  # 3, or 1 for grey
    side: int | None  # Height and width of the images that the model takes; None if it takes any
    file: str  # The file with the settings; empty where the checkpoint has none
    model: str  # The model's name, for errors

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Pixels of one image: image (height, width, 3) -> (channels, height, width)."""
        picture = (
            image
            if self.channels == 3
            else np.asarray(Image.fromarray(image).convert("L"))[..., None]
        )
        try:
            with np.errstate(all="ignore"):
                made = self.processor(
                    picture, input_data_format="channels_last", return_tensors="np"
                )
            pixels = np.ascontiguousarray(made["pixel_values"][0], np.float32)
        except Exception as error:  # of whatever class: the settings are the checkpoint's
            raise self.error(
                f"transformers cannot prepare an image by it ({first_line(error)})"
            ) from error
        side = self.side or "any"
        if len(pixels) != self.channels or self.side not in (None, *pixels.shape[1:]):
            made, wanted = (
                f"{n} x {h} x {w}" for n, h, w in (pixels.shape, (self.channels, side, side))
            )
            raise self.error(
                f"makes images of {made} numbers; the model takes {wanted} (channels, height, width)"
            )
        if not np.isfinite(pixels).all():
            raise self.error("makes pixels that are not finite numbers")
        return pixels

    def error(self, problem: str) -> CheckpointError:
        """The error to raise if the settings do not fit the model."""
        return CheckpointError(problem, file=self.file or self.model)

    def __str__(self) -> str:
        sizes = {key: dict(getattr(self.processor, key, None) or {}) for key in SIZES}
        shown = [
            f"{key.replace('_', ' ')} {' x '.join(map(str, size.values()))}"
            for key, size in sizes.items()
            if size
        ]
        for name, values in (
            ("mean", self.processor.image_mean),
            ("std", self.processor.image_std),
        ):
            shown.append(f"{name} {', '.join(f'{value:.3g}' for value in np.ravel(values))}")
        origin = self.file or f"usual for its family; the checkpoint has no {DESCRIPTION}"
        return f"{type(self.processor).__name__} with {', '.join(shown)} ({origin})"


def image_processor(model: Model) -> ImageProcessor:
    """The image processor of a model."""
    images = model.family.images
    if images is None:
        raise CheckpointError(f"{model.family.name} does not take images", file=model.name)
    import_torch()
    side = model.config.size("image_size", largest=LARGEST_SIDE)
    channels = model.config.size("num_channels", default=3)
    if channels not in (1, 3):
        raise CheckpointError(
            f"takes images of {channels} channels; photographs have 3, or 1", file=model.name
        )
    usual = _with_pillow(images.processor)
    settings, file = _settings(model)
    kind = _with_pillow(settings.get("image_processor_type")) or usual
    try:
        processor = (
            kind.from_dict(settings)
            if settings
            else _resized(usual(**images.settings), side, channels)
        )
        sides = [n for key in SIZES for n in dict(getattr(processor, key, None) or {}).values()]
    except Exception as error:  # of whatever class: transformers has none of its own
        problem = f"transformers makes no image processor of it ({first_line(error)})"
        raise CheckpointError(problem, file=file or model.name) from error
    prepared = ImageProcessor(
        processor, channels, None if images.any_size else side, file, model.name
    )
    if max(sides, default=0) > LARGEST_SIDE:
        raise prepared.error(f"asks for more than {LARGEST_SIDE} pixels a side")
    # unsuitable settings are refused here, before any photograph
    prepared(np.zeros((side, side, 3), np.uint8))
    return prepared


def _with_pillow(name: object) -> Any:
    """transformers' image processor of this name that computes with Pillow and NumPy, or None."""
    import transformers

    # before transformers 5 the plain name
    suffix = "Pil" if hasattr(transformers, "ViTImageProcessorPil") else ""
    kind = getattr(transformers, str(name).removesuffix("Fast") + suffix, None)
    return (
        kind
        if isinstance(kind, type) and issubclass(kind, transformers.ImageProcessingMixin)
        else None
    )


def _resized(processor: Any, side: int, channels: int) -> Any:
    """The family's processor for a model of another size; grey takes the mean of the colours."""
    square = {"height": side, "width": side}
    cropped = bool(getattr(processor, "crop_size", None))
    changes: dict[str, Any] = (
        {"size": {"shortest_edge": side}, "crop_size": square} if cropped else {"size": square}
    )
    if channels == 1:
        changes |= {
            key: [float(np.mean(getattr(processor, key)))] for key in ("image_mean", "image_std")
        }
        changes["do_convert_rgb"] = False
    return type(processor)(**{**processor.to_dict(), **changes})


def _settings(model: Model) -> tuple[dict[str, Any], str]:
    """The checkpoint's settings for its image processor, and their file; both empty if there are
    none.
    """
    for name in (TOGETHER, DESCRIPTION):
        path = _small_file(model, name)
        file = read_json(path) if path is not None and path.is_file() else {}
        settings = file.get("image_processor") if name == TOGETHER else file
        if isinstance(settings, dict) and settings:
            return settings, name
    return {}, ""


def _small_file(model: Model, name: str) -> Path | None:
    where = model.where
    if isinstance(where, Path):
        return (where if where.is_dir() else where.parent) / name
    try:
        return where.file(name, MAX_BYTES)
    except CheckpointError:  # the Hub cannot be asked: what its cache has is all there is
        return where.cached(name)


def read_images(path: str | Path, most: int) -> dict[str, np.ndarray]:
    """The images under a folder, or one image, by name: -> (height, width, 3)."""
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"no such file or folder: {path}")
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    )
    if not files:
        raise CheckpointError(f"has no image ({', '.join(SUFFIXES)})", file=path)
    return {
        file.name if file == path else str(file.relative_to(path)): _read(file)
        for file in files[:most]
    }


def _read(file: Path) -> np.ndarray:
    try:
        with regular_file(file) as opened, Image.open(opened) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"cannot be read as an image ({error})", file=file) from None


def photographs(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """scikit-learn's two photographs, then square crops of them at places and in sizes drawn at
    random -> (height,
    width, 3).
    """
    from sklearn.datasets import load_sample_images

    loaded = load_sample_images()
    photos = {
        Path(name).stem: image for name, image in zip(loaded.filenames, loaded.images, strict=True)
    }
    rng = np.random.default_rng(seed)
    return dict(list((photos | _crops(photos, n - len(photos), rng)).items())[:n])


def _crops(
    whole: Mapping[str, np.ndarray], n: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    names: Sequence[str] = list(whole)
    crops = {}
    for index in range(n):
        name = names[index % len(names)]
        height, width = whole[name].shape[:2]
        shorter = min(height, width)
        side = int(rng.integers(int(SMALLEST_CROP * shorter), shorter + 1))
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        crops[f"{name} {side} px at {top}, {left}"] = whole[name][
            top : top + side, left : left + side
        ]
    return crops
