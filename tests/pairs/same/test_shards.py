"""Shards that do not belong together, as A and as B: each has its deed, or one clear error."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.plants.families import random_llama

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
PLANTED = random_llama()
NAMES = list(PLANTED.tensors)
HALF = len(NAMES) // 2


def written(folder: Path) -> Path:
    """A small Llama of random weights in two shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLANTED.config))
    parts = dict(zip(SHARDS, (NAMES[:HALF], NAMES[HALF:]), strict=True))
    for file, names in parts.items():
        save_file({name: PLANTED.tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    write_index(folder, {name: file for file, names in parts.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def added_to_the_second(folder: Path, name: str, w: np.ndarray) -> None:
    save_file(load_file(folder / SHARDS[1]) | {name: w}, folder / SHARDS[1])


def cut(folder: Path, size: int) -> None:
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:size])


def of_another_step(folder: Path) -> None:
    rng = np.random.default_rng(0)
    moved = {name: w + np.float32(0.05) * w.std() * rng.standard_normal(w.shape, np.float32)
             for name, w in load_file(folder / SHARDS[1]).items()}  # fmt: skip
    save_file(moved, folder / SHARDS[1])


def zeros_at_the_end(folder: Path) -> None:
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-20_000] + bytes(20_000))


@pytest.fixture(params=["A", "B"])
def compared(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Path], object]], Result]:
    """What the command says of the original and a damaged copy, which is A or B."""

    def compare(damage: Callable[[Path], object]) -> Result:
        damage(written(tmp_path / "damaged"))
        pair = [tmp_path / "damaged", written(tmp_path / "whole")]
        return run("same", *(pair if request.param == "A" else reversed(pair)), "--json")

    return compare


REFUSED = {
    "one name in two shards": (
        lambda folder: added_to_the_second(folder, NAMES[0], PLANTED.tensors[NAMES[0]]), f"is also in {SHARDS[0]}"),
    "one name, other values": (
        lambda folder: added_to_the_second(folder, NAMES[0], -PLANTED.tensors[NAMES[0]]), f"is also in {SHARDS[0]}"),
    "index points to the other shard": (
        lambda folder: write_index(folder, index_of(folder) | {NAMES[0]: SHARDS[1]}), f"is not in {SHARDS[1]}, where"),
    "index names what is nowhere": (
        lambda folder: write_index(folder, index_of(folder) | {"x": SHARDS[1]}), f"is not in {SHARDS[1]}, where"),
    "cut short": (lambda folder: cut(folder, -1000), "is it cut short?"),
    "cut within its header": (lambda folder: cut(folder, 100), "is it cut short?"),
    "empty": (lambda folder: cut(folder, 0), "has 0 bytes"),
    "missing": (lambda folder: (folder / SHARDS[1]).unlink(), "which is not in the folder"),
}  # fmt: skip


@pytest.mark.parametrize("damage", REFUSED)
def test_refused_in_one_line(compared: Callable[[Callable[[Path], object]], Result], damage: str) -> None:
    do, words = REFUSED[damage]
    result = compared(do)
    assert is_one_line(result), result.output
    assert words in result.stderr


@pytest.mark.parametrize(("damage", "deed"), [
    (of_another_step, "a shard of another step"), (zeros_at_the_end, "zero"),
    (lambda folder: write_index(folder, {n: f for n, f in index_of(folder).items() if f == SHARDS[0]}),
     "in a file that is not read"),
], ids=["of another step", "zeros at the end", "shard that the index does not name"])  # fmt: skip
def test_named_by_its_deed(
    compared: Callable[[Callable[[Path], object]], Result], damage: Callable[[Path], object], deed: str
) -> None:
    result = compared(damage)
    value = json.loads(result.stdout)
    assert (result.exit_code, value["verdict"]) == (3, "different")
    deeds = {(each["tensor"] or each["name_a"]): each["deed"] for each in value["differences"]}
    assert deeds
    assert {*deeds} <= {*NAMES[HALF:]}
    assert all(each.startswith(deed) for each in deeds.values())


def test_a_file_that_is_not_read_is_said(tmp_path: Path) -> None:
    a, b = (written(tmp_path / name) for name in ("a", "b"))
    save_file({"more": np.ones((4, 4), np.float32)}, b / "model-00003-of-00003.safetensors")
    same = ws.same(a, b)
    assert same.verdict == "same bytes"
    assert any("model-00003-of-00003" in str(part) for part in same.printed())


def test_a_shard_of_another_step_is_named_beside_a_single_file(tmp_path: Path) -> None:
    of_another_step(written(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(PLANTED.config))
    save_file(PLANTED.tensors, tmp_path / "b" / "model.safetensors")
    same = ws.same(tmp_path / "a", tmp_path / "b")
    assert {each.deed for each in same.differing} == {"a shard of another step"}
    assert all(f"A's {SHARDS[1]}" in each.detail for each in same.differing)


def overlaid(folder: Path) -> Path:
    """The same model, whose second matrix of the first shard is stale: a later file has it, as the index says."""
    written(folder)
    name, file = NAMES[0], "model-overlay.safetensors"
    save_file({name: PLANTED.tensors[name]}, folder / file, metadata={"format": "pt"})
    first = load_file(folder / SHARDS[0]) | {name: -PLANTED.tensors[name]}
    save_file(first, folder / SHARDS[0], metadata={"format": "pt"})
    write_index(folder, index_of(folder) | {name: file})
    return folder


def test_an_index_that_assigns_every_name_once_is_enough(tmp_path: Path) -> None:
    whole, overlay = written(tmp_path / "whole"), overlaid(tmp_path / "overlay")
    for a, b in ((whole, overlay), (overlay, whole)):
        same = ws.same(a, b)
        assert same.verdict == "same values"
        assert any(f"1 tensor of {SHARDS[0]} ({NAMES[0]}) is stale" in str(part) for part in same.printed())
    assert f"1 tensor of {SHARDS[0]}" in run("inspect", overlay).stdout
    kinds = [finding.kind for finding in ws.audit(overlay).findings]
    assert "weights_beside" in kinds


@pytest.mark.check
def test_transformers_loads_what_the_index_has_in_the_last_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = overlaid(tmp_path / "overlay")
    values = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()[NAMES[0]]
    np.testing.assert_array_equal(values.float().numpy(), PLANTED.tensors[NAMES[0]])
