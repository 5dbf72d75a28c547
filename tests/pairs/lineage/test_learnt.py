"""What two checkpoints of one initialisation learnt, once that is taken out."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.plants.kinds import initial, learnt, tuned
from tests.support.plants.named_parts import read_weights, write_weights


@pytest.fixture(scope="module")
def start(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialisation, two checkpoints that were trained from it apart, and a tune of the first."""
    folder, begun = tmp_path_factory.mktemp("learnt"), initial(read_weights(base), 7)
    first = learnt(begun, 1)
    for name, weights in (("init", begun), ("a", first), ("b", learnt(begun, 2)), ("tune", tuned(first, 3, 0.1))):
        write_weights(weights, folder / name)
    return folder


def cosine(*folders: Path) -> float:
    """Of the changes of the first two from the third, over all matrices of layers at once."""
    x, y, begun = (load_file(folder / "model.safetensors") for folder in folders)
    names = [name for name in begun if ".layers." in name and begun[name].ndim == 2]
    a, b = (np.concatenate([(side[n].astype(np.float64) - begun[n]).ravel() for n in names]) for side in (x, y))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(("name", "least", "most"), [("b", -0.05, 0.05), ("tune", 0.9, 1.0)])
def test_what_was_learnt_apart_is_told_from_what_was_learnt_together(
    start: Path, name: str, least: float, most: float
) -> None:
    result = ws.lineage(start / name, [start / "a", start / "init"])
    assert result.verdict == "related"
    assert result.learnt == pytest.approx({"a": cosine(start / name, start / "a", start / "init")}, abs=1e-6)
    assert least < result.learnt["a"] < most
    assert f"With init taken out, the changes in the layers of {name} have a cosine of {result.learnt['a']:.2f}" in (
        result.lead
    )
    by_base = {each["name"]: each["learnt"] for each in json.loads(json.dumps(result.as_json()))["bases"]}
    assert by_base == {"a": result.learnt["a"], "init": None}


def test_nothing_is_taken_out_without_an_initialisation(start: Path) -> None:
    result = ws.lineage(start / "tune", [start / "a", start / "b"])
    assert result.learnt == {}
    assert "taken out" not in result.lead
