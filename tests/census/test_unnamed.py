"""Where the tensors are that have no role."""

import pytest

from tests.census.unnamed import Named, named, places
from tests.support.tiny_models import fixture

pytestmark = pytest.mark.check  # adopting imports PyTorch


def test_tensors_without_a_role_are_within_layers_or_elsewhere() -> None:
    tensors = fixture("llama").model.tensors
    names = ["model.layers.0.novel.weight", "model.layers.1.novel.bias", "projector.0.weight", "model.head.weight"]
    assert places(names, tensors) == "in layers: novel; elsewhere: projector, head"
    assert places([f"part{i}.weight" for i in range(8)], tensors).endswith("part5 and 2 more")


def test_every_tensor_is_counted() -> None:
    assert named([]) == Named(0, 0, "no stack is read")
    model = fixture("llama").model
    assert named([model]) == Named(len(model.checkpoint), 0)
    assert named([fixture("falcon_h1").model]).unnamed == 0
