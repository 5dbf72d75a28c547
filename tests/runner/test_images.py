"""Photographs become pixels by the settings that a checkpoint names; what cannot be an image is refused in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import weightscope as ws
from tests.support.cases import VIT
from tests.support.hub_server import Hub
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES
from weightscope.runner.images import DESCRIPTION, TOGETHER, image_processor, photographs, read_images

transformers = pytest.importorskip("transformers", reason="the image processors are transformers'")

pytestmark = pytest.mark.check

FIXTURES = Path(__file__).parents[1] / "model" / "rows" / "fixtures"
PHOTOGRAPH = np.random.default_rng(0).integers(0, 256, size=(53, 41, 3)).astype(np.uint8)
PROCESSORS = {
    "vit": ("ViTImageProcessor", {"size": {"height": 12, "width": 12}, "image_mean": [0.1, 0.2, 0.3]}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 20}, "crop_size": {"height": 12, "width": 16}}),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 9}, "crop_size": {"height": 12, "width": 12}}),
    "siglip": ("SiglipImageProcessor", {"size": {"height": 12, "width": 12}, "resample": 0}),
}


def colour_model(folder: Path, family: str, description: dict | None = None) -> ws.Model:
    """A tiny model of three channels with a preprocessor_config.json of this content, or with none."""
    sizes = VIT | {"num_channels": 3}
    nested = family in ("clip", "siglip")
    config = {"model_type": family} | ({"vision_config": sizes} if nested else sizes)
    (folder / "config.json").write_text(json.dumps(config))
    fixture = f"{family}_vision" if nested else family
    (folder / "model.safetensors").write_bytes((FIXTURES / fixture / "model.safetensors").read_bytes())
    if description is not None:
        (folder / DESCRIPTION).write_text(json.dumps(description))
    return ws.open_model(folder, tower="vision" if nested else None)


def pixels(witness: Any, picture: np.ndarray) -> np.ndarray:
    return witness(Image.fromarray(picture), return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize("picture", [PHOTOGRAPH, PHOTOGRAPH.swapaxes(0, 1)], ids=["upright", "wide"])
@pytest.mark.parametrize("family", PROCESSORS)
def test_pixels_are_those_of_the_processor_that_was_saved(family: str, picture: np.ndarray, tmp_path: Path) -> None:
    """To the last bit, whatever class, sizes, filter and means the file has."""
    name, options = PROCESSORS[family]
    witness = getattr(transformers, f"{name}Pil")(**options)
    witness.save_pretrained(tmp_path)
    process = image_processor(colour_model(tmp_path, family))
    made = process(np.ascontiguousarray(picture))
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, pixels(witness, picture))
    assert type(process.processor) is type(witness) and DESCRIPTION in str(process)


def test_torchvision_is_not_needed_whatever_a_file_names(tmp_path: Path) -> None:
    """The processors that are named "fast", and DINOv3's, compute with it: others take their settings."""
    settings = {"image_mean": [0.1, 0.2, 0.3], "size": {"height": 12, "width": 12}}
    witness = transformers.ViTImageProcessorPil(**settings)
    for name in (
        "ViTImageProcessorFast",
        "ViTFeatureExtractor",
        "DINOv3ViTImageProcessorFast",
        "OfNobodysImageProcessor",
    ):
        model = colour_model(tmp_path, "vit", {"image_processor_type": name, **settings})
        process = image_processor(model)
        assert type(process.processor) is transformers.ViTImageProcessorPil
        np.testing.assert_array_equal(process(PHOTOGRAPH), pixels(witness, PHOTOGRAPH))


def test_a_name_that_is_no_image_processor_is_not_called(tmp_path: Path) -> None:
    """`auto_map` neither: no code that a checkpoint brings along is run."""
    named = {"image_processor_type": "is_torch_available", "auto_map": {"AutoImageProcessor": "own.Own"}, "size": 12}
    (tmp_path / "own.py").write_text("raise AssertionError('it ran')\n")
    for name in ("is_torch_available", "LlamaForCausalLM", "models", ["list"]):
        process = image_processor(colour_model(tmp_path, "vit", named | {"image_processor_type": name}))
        assert type(process.processor) is transformers.ViTImageProcessorPil


def test_settings_beside_those_of_a_tokenizer_come_first(tmp_path: Path) -> None:
    """transformers 5 writes them so for models of images and text."""
    model = colour_model(tmp_path, "clip", {"size": 20, "crop_size": 20})
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 12}, "crop_size": 12}
    (tmp_path / TOGETHER).write_text(json.dumps({"image_processor": settings, "processor_class": "CLIPProcessor"}))
    process = image_processor(model)
    assert process.file == TOGETHER and process(PHOTOGRAPH).shape == (3, 12, 12)


@pytest.mark.parametrize(("family", "name"), [("vit", "ViT"), ("clip", "CLIP")])
def test_one_number_is_a_square_or_a_shorter_side(family: str, name: str, tmp_path: Path) -> None:
    """The files of 2021 have `size: 224`; a family that crops means the shorter side by it."""
    described = {"size": 12} if name == "ViT" else {"size": 12, "crop_size": 12}
    full = {"size": {"height": 12, "width": 12}} if name == "ViT" else {"size": {"shortest_edge": 12}, "crop_size": 12}
    made = image_processor(colour_model(tmp_path, family, described))(PHOTOGRAPH)
    np.testing.assert_array_equal(made, pixels(getattr(transformers, f"{name}ImageProcessorPil")(**full), PHOTOGRAPH))


@pytest.mark.parametrize("row", [row for row in FAMILIES if row.images], ids=lambda row: row.name)
def test_without_a_file_the_familys_own_processor_makes_the_models_size(row: Family) -> None:
    """The fixtures have one channel, so this is grey: the mean of colours that Pillow weighs, by the family's mean."""
    fixture = f"{row.name}_vision" if row.tower else row.name
    process = image_processor(ws.open_model(FIXTURES / fixture, tower=row.tower or None))
    assert f"no {DESCRIPTION}" in str(process)
    white = process(np.full((30, 20, 3), 255, np.uint8))
    assert white.shape == (1, 12, 12)
    usual = getattr(transformers, f"{row.images.processor}Pil")(**row.images.settings)
    np.testing.assert_allclose(white, (1 - np.mean(usual.image_mean)) / np.mean(usual.image_std), rtol=1e-5)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({"size": 12, "image_std": [0.5, 0, 0.5]}, "makes pixels that are not finite numbers"),
        ({"size": 12, "image_mean": [0.5, 0.5]}, "cannot prepare an image by it .*mean must have 3 elements"),
        ({"size": 12, "image_mean": "bright"}, "cannot prepare an image by it"),
        ({"size": 12, "resample": 17}, "cannot prepare an image by it"),
        ({"size": {"longest_edge": 3}}, "transformers "),
        ({"size": -3}, "cannot prepare an image by it"),
        ({"size": {"height": 10**9, "width": 10**9}}, "asks for more than 4096 pixels a side"),
        ({"size": "large"}, "transformers makes no image processor of it"),
        ({"size": 12, "preprocess": "by hand"}, "cannot prepare an image by it"),
        ({"size": 12, "do_center_crop": True, "crop_size": {"shortest_edge": 3}}, "cannot prepare an image by it"),
        ({"size": 64}, r"makes images of 3 x 64 x 64 numbers; the model takes 3 x 12 x 12 \(channels, height, width\)"),
        ([], "is a JSON list; an object was expected"),
    ],
)
def test_a_file_that_is_not_right_is_refused(described: object, problem: str, tmp_path: Path) -> None:
    model = colour_model(tmp_path, "vit", described)
    with pytest.raises(ws.CheckpointError, match=f"^{DESCRIPTION}: .*{problem}"):
        image_processor(model)


def test_the_hub_gives_the_file_where_there_is_one(hub: Hub, tmp_path: Path) -> None:
    colour_model(tmp_path, "vit", {"size": 12})
    hub.publish("someone/vit", tmp_path)
    assert image_processor(ws.open_model("someone/vit")).file == DESCRIPTION
    del hub.repositories["someone/vit"][DESCRIPTION]
    hub.repositories["someone/plain"] = hub.repositories["someone/vit"]
    assert image_processor(ws.open_model("someone/plain")).file == ""


def test_a_model_that_reads_takes_no_images(two_layers: ws.Model) -> None:
    with pytest.raises(ws.CheckpointError, match="gpt2 does not take images"):
        image_processor(two_layers)


def test_a_folder_of_images_is_read_by_name_and_turned_upright(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    Image.fromarray(PHOTOGRAPH).save(tmp_path / "inner" / "b.png")
    sideways = Image.Exif()
    sideways[0x0112] = 6  # EXIF orientation: to be turned a quarter clockwise
    Image.fromarray(PHOTOGRAPH).save(tmp_path / "a.PNG", exif=sideways)
    Image.fromarray(PHOTOGRAPH[..., 0]).save(tmp_path / "c.png")
    (tmp_path / "notes.txt").write_text("no image")
    images = read_images(tmp_path, 10)
    assert list(images) == ["a.PNG", "c.png", "inner/b.png"]
    np.testing.assert_array_equal(images["inner/b.png"], PHOTOGRAPH)
    np.testing.assert_array_equal(images["a.PNG"], np.rot90(PHOTOGRAPH, -1))
    np.testing.assert_array_equal(images["c.png"], np.repeat(PHOTOGRAPH[..., :1], 3, axis=-1))
    assert list(read_images(tmp_path, 1)) == ["a.PNG"]
    assert list(read_images(tmp_path / "c.png", 1)) == ["c.png"]


def test_files_that_are_not_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="no such file or folder"):
        read_images(tmp_path / "missing", 1)
    with pytest.raises(ws.CheckpointError, match="has no image"):
        read_images(tmp_path, 1)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing follows")
    with pytest.raises(ws.CheckpointError, match=r"broken\.png: cannot be read as an image"):
        read_images(tmp_path, 1)


def test_photographs_come_first_and_crops_are_pieces_of_them() -> None:
    images = photographs(12, seed=3)
    assert list(images)[:2] == ["china", "flower"] and len(images) == 12
    for name, crop in list(images.items())[2:]:
        photograph, side, _, _, top, left = name.replace(",", "").split()
        top, left, side = int(top), int(left), int(side)
        np.testing.assert_array_equal(crop, images[photograph][top : top + side, left : left + side])
        assert crop.shape == (side, side, 3)
    again, different = photographs(12, seed=3), photographs(12, seed=4)
    assert list(again) == list(images) != list(different)
    assert list(photographs(1)) == ["china"]
