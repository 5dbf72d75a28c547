"""Photographs as a vision model's pixel arrays, made by transformers' own image processors.

Only processors that compute with Pillow and NumPy are used, without torchvision. The checkpoint
names one and its settings in preprocessor_config.json. If the checkpoint has no such file, or names
a processor that needs torchvision (DINOv3's), the family's usual one is used.
"""

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
TOGETHER = "processor_config.json"  # transformers 5 writes the same here, if there is text too
SIZES = ("size", "crop_size", "pad_size")
LARGEST_SIDE = 4096  # pixels; no model takes images near it, and a hostile file may ask for any
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SMALLEST_CROP = 0.4  # share of the photograph's shorter side


@dataclass(frozen=True)
class ImageProcessor:
    """Turns a photograph into the pixels that a model takes."""

    processor: Any
    channels: int  # 3, or 1 for grey
    side: int | None  # height and width of the images that the model takes; None if it takes any
    file: str  # the file with the settings; empty where the checkpoint has none
    model: str  # the model's name, for errors

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Pixels of one image: image (height, width, 3) -> (channels, height, width)."""
        picture = image
        if self.channels == 1:
            picture = np.asarray(Image.fromarray(image).convert("L"))[..., None]
        layout = {"input_data_format": "channels_last", "return_tensors": "np"}
        try:
            with np.errstate(all="ignore"):
                made = self.processor(picture, **layout)
            pixels = np.ascontiguousarray(made["pixel_values"][0], np.float32)
        except Exception as error:  # any class: the settings are the checkpoint's
            problem = f"transformers cannot prepare an image by it ({first_line(error)})"
            raise self.error(problem) from error
        if len(pixels) != self.channels or self.side not in (None, *pixels.shape[1:]):
            n, height, width = pixels.shape
            side = self.side or "any"
            wanted = f"{self.channels} x {side} x {side} (channels, height, width)"
            problem = f"makes images of {n} x {height} x {width} numbers"
            raise self.error(f"{problem}; the model takes {wanted}")
        if not np.isfinite(pixels).all():
            raise self.error("makes pixels that are not finite numbers")
        return pixels

    def error(self, problem: str) -> CheckpointError:
        """The error to raise if the settings do not fit the model."""
        return CheckpointError(problem, file=self.file or self.model)

    def __str__(self) -> str:
        shown = []
        for key in SIZES:
            if size := dict(getattr(self.processor, key, None) or {}):
                shown.append(f"{key.replace('_', ' ')} {' x '.join(map(str, size.values()))}")
        for name in ("mean", "std"):
            values = np.ravel(getattr(self.processor, f"image_{name}"))
            shown.append(f"{name} {', '.join(f'{value:.3g}' for value in values)}")
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
        problem = f"takes images of {channels} channels; photographs have 3, or 1"
        raise CheckpointError(problem, file=model.name)
    usual = _with_pillow(images.processor)
    settings, file = _settings(model)
    kind = _with_pillow(settings.get("image_processor_type")) or usual
    try:
        if settings:
            processor = kind.from_dict(settings)
        else:
            processor = _resized(usual(**images.settings), side, channels)
        sizes = [dict(getattr(processor, key, None) or {}) for key in SIZES]
    except Exception as error:  # any class: transformers has none of its own
        problem = f"transformers makes no image processor of it ({first_line(error)})"
        raise CheckpointError(problem, file=file or model.name) from error
    fixed_side = None if images.any_size else side
    prepared = ImageProcessor(processor, channels, fixed_side, file, model.name)
    if max((n for size in sizes for n in size.values()), default=0) > LARGEST_SIDE:
        raise prepared.error(f"asks for more than {LARGEST_SIDE} pixels a side")
    prepared(np.zeros((side, side, 3), np.uint8))  # refuses unsuitable settings
    return prepared


def _with_pillow(name: object) -> Any:
    """transformers' image processor of this name that computes with Pillow and NumPy, or None."""
    import transformers

    suffix = "Pil" if hasattr(transformers, "ViTImageProcessorPil") else ""  # transformers 5
    kind = getattr(transformers, str(name).removesuffix("Fast") + suffix, None)
    is_class = isinstance(kind, type) and issubclass(kind, transformers.ImageProcessingMixin)
    return kind if is_class else None


def _resized(processor: Any, side: int, channels: int) -> Any:
    """The family's processor for a model of another size; grey takes the mean of the colours."""
    square = {"height": side, "width": side}
    changes: dict[str, Any] = {"size": square}
    if getattr(processor, "crop_size", None):
        changes = {"size": {"shortest_edge": side}, "crop_size": square}
    if channels == 1:
        for key in ("image_mean", "image_std"):
            changes[key] = [float(np.mean(getattr(processor, key)))]
        changes["do_convert_rgb"] = False
    return type(processor)(**{**processor.to_dict(), **changes})


def _settings(model: Model) -> tuple[dict[str, Any], str]:
    """The checkpoint's settings for its image processor, and their file; both empty if none."""
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
    except CheckpointError:  # the Hub cannot be asked, so its cache has to do
        return where.cached(name)


def read_images(path: str | Path, most: int) -> dict[str, np.ndarray]:
    """The images under a folder, or one image, by name: -> (height, width, 3)."""
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"no such file or folder: {path}")
    if path.is_file():
        return {path.name: _read(path)} if most else {}
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise CheckpointError(f"has no image ({', '.join(SUFFIXES)})", file=path)
    return {str(file.relative_to(path)): _read(file) for file in files[:most]}


def _read(file: Path) -> np.ndarray:
    try:
        with regular_file(file) as opened, Image.open(opened) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"cannot be read as an image ({error})", file=file) from None


def photographs(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """scikit-learn's two photographs, then random square crops of them -> (height, width, 3)."""
    from sklearn.datasets import load_sample_images

    loaded = load_sample_images()
    photos = [
        (Path(name).stem, photo)
        for name, photo in zip(loaded.filenames, loaded.images, strict=True)
    ]
    images = dict(photos)
    rng = np.random.default_rng(seed)
    for index in range(n - len(photos)):
        name, photo = photos[index % len(photos)]
        height, width = photo.shape[:2]
        shorter = min(height, width)
        side = int(rng.integers(int(SMALLEST_CROP * shorter), shorter + 1))
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        crop = photo[top : top + side, left : left + side]
        images[f"{name} {side} px at {top}, {left}"] = crop
    return dict(list(images.items())[:n])
