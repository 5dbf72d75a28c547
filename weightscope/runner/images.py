"""Photographs as the pixel arrays that a vision model takes.

What its preprocessor_config.json says is done with Pillow: resizing, a crop from the middle, scaling, normalisation.
Where there is no such file, or it leaves something out, the habit of the model's family stands in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from weightscope.checkpoint.jsontext import MAX_BYTES, read_json
from weightscope.checkpoint.source import locate
from weightscope.errors import CheckpointError
from weightscope.families.config import Numbers
from weightscope.model import Model

DESCRIPTION = "preprocessor_config.json"
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
SMALLEST_CROP = 0.4  # of the photograph's shorter side

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
STRETCHED = {"do_center_crop": False}
CROPPED = {"do_center_crop": True}
BILINEAR, BICUBIC = {"resample": 2}, {"resample": 3}  # Pillow's numbers, as the file has them
ALWAYS: Mapping[str, Any] = {
    "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "size": None,
    "crop_size": None,
}  # fmt: skip
# What each family's published checkpoints do, in the file's own words; sizes come from the model's config.
HABITS: Mapping[str, Mapping[str, Any]] = {
    "vit": STRETCHED | BILINEAR | HALF,
    "dinov2": CROPPED | BICUBIC | IMAGENET,
    "dinov2_with_registers": CROPPED | BICUBIC | IMAGENET,
    "dinov3_vit": STRETCHED | BILINEAR | IMAGENET,
    "clip": CROPPED | BICUBIC | CLIP,
    "siglip": STRETCHED | BICUBIC | HALF,
}


@dataclass(frozen=True)
class Preparation:
    """From a photograph to pixels.

    Attributes
    ----------
    channels : int
        3, or 1 for grey.
    size : (int, int) or int, or None
        Height and width to resize to, or the shorter side; None leaves the size as it is.
    crop : (int, int) or None
        Height and width of the piece from the middle that is kept.
    resample : int
        Pillow's number of the filter.
    factor : float
        Multiplies the values 0 .. 255.
    mean, std : (channels,) float arrays
        Taken off, and divided by.
    origin : str
        Where all this comes from.
    """

    channels: int
    size: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    resample: int
    factor: float
    mean: np.ndarray
    std: np.ndarray
    origin: str

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Pixels of one image.

        Parameters
        ----------
        image : (height, width, 3) uint8 array

        Returns
        -------
        (channels, height, width) float32 array
        """
        picture = Image.fromarray(image)
        if self.size is not None:
            picture = picture.resize(self._resized(*picture.size), Image.Resampling(self.resample))
        if self.crop is not None:
            (width, height), (rows, columns) = picture.size, self.crop
            top, left = (height - rows) // 2, (width - columns) // 2
            picture = picture.crop((left, top, left + columns, top + rows))  # black where it reaches over the edge
        pixels = np.asarray(picture if self.channels == 3 else picture.convert("L"), np.float32)
        pixels = pixels.reshape(*pixels.shape[:2], self.channels).transpose(2, 0, 1)
        scaled = (pixels * self.factor - self.mean[:, None, None]) / self.std[:, None, None]
        return np.ascontiguousarray(scaled, np.float32)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, in Pillow's order."""
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        assert self.size is not None
        longer = int(self.size * max(width, height) / min(width, height))
        return (self.size, longer) if width <= height else (longer, self.size)

    def __str__(self) -> str:
        size = f"{self.size[0]} x {self.size[1]}" if isinstance(self.size, tuple) else f"shorter side {self.size}"
        crop = f", the middle {self.crop[0]} x {self.crop[1]}" if self.crop else ""
        mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        return f"{size if self.size else 'own size'}{crop}, mean {mean}, std {std} ({self.origin})"


def preparation(model: Model) -> Preparation:
    """What a model's images go through.

    Raises
    ------
    CheckpointError
        The model sees no images, or its preprocessor_config.json is not right.
    """
    habit = HABITS.get(model.family.name)
    if habit is None or model.family.inputs.tokens:
        raise CheckpointError(f"{model.family.name} does not take images", file=model.name)
    found = _description(model)
    numbers = Numbers(model.config.raw, model.file)
    side, channels = numbers.size("image_size"), numbers.size_or(3, "num_channels")
    if channels not in (1, 3):
        raise CheckpointError(f"takes images of {channels} channels; photographs have 3, or 1", file=model.name)
    values = Numbers({**ALWAYS, **habit, **(found or {})}, DESCRIPTION)
    cropped = values.flag("do_center_crop")
    factor = values.number("rescale_factor") if values.flag("do_rescale") else 1.0
    mean, std = np.zeros(channels), np.ones(channels)
    if values.flag("do_normalize"):
        mean, std = (_by_channel(values, key, channels) for key in ("image_mean", "image_std"))
        if not (std > 0).all():
            raise values.error("image_std", "numbers above 0")
    filters = [int(each) for each in Image.Resampling]
    if values.values["resample"] not in filters:
        raise values.error("resample", f"one of Pillow's filters, {filters}")
    crop = _size(values, "crop_size", side, square=True) if cropped else None
    size = _size(values, "size", side, square=not cropped) if values.flag("do_resize") else None
    if isinstance(crop, int):
        raise values.error("crop_size", "a height and a width")
    habits = f"as {model.family.name} models do; the checkpoint has no {DESCRIPTION}"
    origin = habits if found is None else DESCRIPTION
    return Preparation(channels, size, crop, values.values["resample"], factor, mean, std, origin)


def _description(model: Model) -> Mapping[str, Any] | None:
    """The checkpoint's preprocessor_config.json; None where it has none."""
    where = locate(model.source)
    path: Path | None
    if isinstance(where, Path):
        path = (where if where.is_dir() else where.parent) / DESCRIPTION
    else:
        try:
            path = where.small_file(DESCRIPTION, MAX_BYTES)
        except CheckpointError:  # the Hub cannot be asked: what its cache has is all there is
            path = where.cached(DESCRIPTION)
    if path is None or not path.is_file():
        return None
    return read_json(path)


def _size(values: Numbers, key: str, side: int, *, square: bool) -> tuple[int, int] | int:
    """A size in any of the file's dialects: one number, {"shortest_edge"}, or {"height", "width"}."""
    value = values.values[key]
    if value is None:
        return (side, side) if square else side
    if isinstance(value, Mapping):
        parts = values.inside(key)
        return parts.size("shortest_edge") if "shortest_edge" in parts.values else (
            parts.size("height"), parts.size("width")
        )  # fmt: skip
    one = values.size(key)
    return (one, one) if square else one


def _by_channel(values: Numbers, key: str, channels: int) -> np.ndarray:
    """A number for each channel; grey takes the mean of the three."""
    found = values.values[key]
    if isinstance(found, list) and len(found) in (channels, 3) and all(type(v) in (int, float) for v in found):
        return np.array(found, float) if len(found) == channels else np.array([np.mean(found)])
    raise values.error(key, f"a list of {channels} numbers")


def read_images(path: str | Path, most: int) -> dict[str, np.ndarray]:
    """The images under a folder, or one image, by name.

    Parameters
    ----------
    path : str or Path
    most : int
        So many at most, the first by name.

    Returns
    -------
    dict of (height, width, 3) uint8 arrays

    Raises
    ------
    CheckpointError
        There is none, or one cannot be read.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"no such file or folder: {path}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        raise CheckpointError(f"has no image ({', '.join(SUFFIXES)})", file=path)
    return {file.name if file == path else str(file.relative_to(path)): _read(file) for file in files[:most]}


def _read(file: Path) -> np.ndarray:
    try:
        with Image.open(file) as picture:
            return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"cannot be read as an image ({error})", file=file) from None


def photographs(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """scikit-learn's two photographs, then square crops of them at places and in sizes drawn at random.

    Parameters
    ----------
    n : int
        Images wanted.
    seed : int

    Returns
    -------
    dict of (height, width, 3) uint8 arrays
    """
    from sklearn.datasets import load_sample_images

    loaded = load_sample_images()
    whole = {Path(name).stem: image for name, image in zip(loaded.filenames, loaded.images, strict=True)}
    rng = np.random.default_rng(seed)
    return dict(list((whole | _crops(whole, n - len(whole), rng)).items())[:n])


def _crops(whole: Mapping[str, np.ndarray], n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    names: Sequence[str] = list(whole)
    found = {}
    for index in range(n):
        name = names[index % len(names)]
        height, width = whole[name].shape[:2]
        shorter = min(height, width)
        side = int(rng.integers(int(SMALLEST_CROP * shorter), shorter + 1))
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        found[f"{name} {side} px at {top}, {left}"] = whole[name][top : top + side, left : left + side]
    return found
