"""Pixels are those of transformers' own image processors; what cannot be an image says so."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weightscope as ws
from tests.checkpoint.conftest import hub  # noqa: F401
from tests.support.cases import VIT
from tests.support.hub_server import Hub
from weightscope.runner.images import DESCRIPTION, HABITS, photographs, preparation, read_images

transformers = pytest.importorskip("transformers", reason="the witness is transformers' image processors")

FIXTURES = Path(__file__).parent.parent / "families" / "fixtures"
PHOTOGRAPH = np.random.default_rng(0).integers(0, 256, size=(53, 41, 3)).astype(np.uint8)
PROCESSORS = {
    "vit": ("ViTImageProcessor", {"size": {"height": 12, "width": 16}, "image_mean": [0.1, 0.2, 0.3]}),
    "dinov2": ("BitImageProcessor", {"size": {"shortest_edge": 20}, "crop_size": {"height": 12, "width": 12}}),
    "clip": ("CLIPImageProcessor", {"size": {"shortest_edge": 14}, "crop_size": {"height": 18, "width": 12}}),
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


def processor(name: str, **options: object):
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind(**options)


@pytest.mark.parametrize("picture", [PHOTOGRAPH, PHOTOGRAPH.swapaxes(0, 1)], ids=["upright", "wide"])
@pytest.mark.parametrize("family", PROCESSORS)
def test_pixels_are_transformers_own(family: str, picture: np.ndarray, tmp_path: Path) -> None:
    """The file that a processor saves makes the pixels that it makes."""
    name, options = PROCESSORS[family]
    witness = processor(name, **options)
    witness.save_pretrained(tmp_path)
    described = json.loads((tmp_path / DESCRIPTION).read_text())
    prepare = preparation(colour_model(tmp_path, family, described))
    expected = witness(Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
    found = prepare(np.ascontiguousarray(picture))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert prepare.origin == DESCRIPTION


@pytest.mark.parametrize(("family", "name", "square"), [("vit", "ViT", True), ("clip", "CLIP", False)])
def test_one_number_is_a_square_or_a_shorter_side(family: str, name: str, square: bool, tmp_path: Path) -> None:
    """The files of 2021 have `size: 224`; a family that crops means the shorter side by it."""
    prepare = preparation(colour_model(tmp_path, family, {"size": 12} | ({} if square else {"crop_size": 12})))
    assert prepare.size == ((12, 12) if square else 12)
    assert prepare.crop == (None if square else (12, 12))
    expected = processor(
        f"{name}ImageProcessor",
        **({"size": {"height": 12, "width": 12}} if square else {"size": {"shortest_edge": 12}, "crop_size": 12}),
    )(Image.fromarray(PHOTOGRAPH), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(prepare(PHOTOGRAPH), expected, atol=1e-5)


@pytest.mark.parametrize("family", HABITS)
def test_without_a_file_the_habit_of_the_family_gives_the_models_own_size(family: str) -> None:
    """The fixtures have one channel, so this is grey: the mean of colours that Pillow weighs, by the family's mean."""
    fixture = f"{family}_vision" if family in ("clip", "siglip") else family
    model = ws.open_model(FIXTURES / fixture, tower="vision" if fixture != family else None)
    prepare = preparation(model)
    assert f"no {DESCRIPTION}" in prepare.origin
    white = prepare(np.full((30, 20, 3), 255, np.uint8))
    assert white.shape == (1, 12, 12)
    mean, std = (np.mean(HABITS[family][key]) for key in ("image_mean", "image_std"))
    np.testing.assert_allclose(white, (1 - mean) / std, rtol=1e-5)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({"image_std": [0.5, 0, 0.5]}, "'image_std' is .*; numbers above 0"),
        ({"image_mean": 0.5}, "'image_mean' is 0.5; a list of 3 numbers"),
        ({"resample": 17}, "'resample' is 17; one of Pillow's filters"),
        ({"size": {"longest_edge": 3}}, "'height' is None"),
        ({"size": -3}, "'size' is -3"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 3}}, "'crop_size' .* a height and a width"),
        ({"do_normalize": "often"}, "'do_normalize' is often"),
        ([], "is a JSON list; an object was expected"),
    ],
)
def test_a_file_that_is_not_right_is_refused(described: object, problem: str, tmp_path: Path) -> None:
    model = colour_model(tmp_path, "vit", described)
    with pytest.raises(ws.CheckpointError, match=problem):
        preparation(model)


def test_the_hub_gives_the_file_where_there_is_one(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    colour_model(tmp_path, "vit", {"size": 8})
    hub.repositories["someone/vit"] = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert preparation(ws.open_model("someone/vit")).size == (8, 8)
    del hub.repositories["someone/vit"][DESCRIPTION]
    hub.repositories["someone/plain"] = hub.repositories["someone/vit"]
    assert preparation(ws.open_model("someone/plain")).size == (12, 12)


def test_a_model_that_reads_takes_no_images(embedded: ws.Model) -> None:
    with pytest.raises(ws.CheckpointError, match="gpt2 does not take images"):
        preparation(embedded)


def test_a_folder_of_images_is_read_by_name_and_turned_upright(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    Image.fromarray(PHOTOGRAPH).save(tmp_path / "inner" / "b.png")
    sideways = Image.Exif()
    sideways[0x0112] = 6  # EXIF orientation: to be turned a quarter clockwise
    Image.fromarray(PHOTOGRAPH).save(tmp_path / "a.PNG", exif=sideways)
    Image.fromarray(PHOTOGRAPH[..., 0]).save(tmp_path / "c.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = read_images(tmp_path, 10)
    assert list(found) == ["a.PNG", "c.png", "inner/b.png"]
    np.testing.assert_array_equal(found["inner/b.png"], PHOTOGRAPH)
    np.testing.assert_array_equal(found["a.PNG"], np.rot90(PHOTOGRAPH, -1))
    np.testing.assert_array_equal(found["c.png"], np.repeat(PHOTOGRAPH[..., :1], 3, axis=-1))
    assert list(read_images(tmp_path, 1)) == ["a.PNG"]
    assert list(read_images(tmp_path / "c.png", 1)) == ["c.png"]


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(ws.CheckpointError, match="no such file or folder"):
        read_images(tmp_path / "missing", 1)
    with pytest.raises(ws.CheckpointError, match="has no image"):
        read_images(tmp_path, 1)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing follows")
    with pytest.raises(ws.CheckpointError, match=r"broken\.png: cannot be read as an image"):
        read_images(tmp_path, 1)


def test_photographs_come_first_and_crops_are_pieces_of_them() -> None:
    found = photographs(12, seed=3)
    assert list(found)[:2] == ["china", "flower"] and len(found) == 12
    for name, crop in list(found.items())[2:]:
        of, side, _, _, top, left = name.replace(",", "").split()
        top, left, side = int(top), int(left), int(side)
        np.testing.assert_array_equal(crop, found[of][top : top + side, left : left + side])
        assert crop.shape == (side, side, 3)
    again, other = photographs(12, seed=3), photographs(12, seed=4)
    assert list(again) == list(found) != list(other)
    assert list(photographs(1)) == ["china"]
