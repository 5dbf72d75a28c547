"""A sample of damage to layers without a softmax, in every type: called different, by the tensor that was damaged."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")

from tests.model.rows.mixers_models import KINDS
from tests.support.plants.mixers import LAYERS, judged, plants_of

pytestmark = pytest.mark.check
EACH = 19  # plants from one that is made to the next


def test_every_type_is_of_one_kind_of_layer() -> None:
    assert sorted(kind for kinds in LAYERS.values() for kind in kinds) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_mixer_is_called_different(kind: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    for i, plant in enumerate([*plants_of(kind, original)][::EACH]):
        (tmp_path / str(i)).mkdir()
        row = judged(plant, plant.make(tmp_path / str(i)))
        assert row["found"], plant.name
        assert row["verdict"] == ("different" if i else "same bytes"), plant.name
        assert i or not row["logits"], plant.name
