"""One matrix of scores and a softmax each way: Grounding DINO's fusion of image and text, as transformers has it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.tiny_models import softmax

torch = pytest.importorskip("torch", reason="the module is transformers'")
transformers = pytest.importorskip("transformers", reason="the module is transformers'")

SIZES = {"d_model": 24, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "encoder_layers": 1, "decoder_layers": 1}
TOWERS = ("image_to_text", "text_to_image")


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of one fusion layer, what entered it, and what it gave each side: output and attention."""
    from transformers.models.grounding_dino.modeling_grounding_dino import GroundingDinoFusionLayer

    torch.manual_seed(0)
    layer = GroundingDinoFusionLayer(transformers.GroundingDinoConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
        image, text = torch.randn(1, 9, 24), torch.randn(1, 5, 24)
        (seen, to_text), (read, to_image) = layer(image, text)
        seen, read = seen - layer.layer_norm_vision(image), read - layer.layer_norm_text(text)
    folder = tmp_path_factory.mktemp("fusion")
    stem = "encoder.layers.0.fusion_layer."
    save_file(
        {stem + name: one.numpy().copy() for name, one in layer.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": "grounding-dino"}))
    streams = {"image": image[0].numpy(), "text": text[0].numpy()}
    gave = dict(zip(TOWERS, ((to_text, seen), (to_image, read)), strict=True))
    return folder, streams | {of: (a.numpy(), out[0].numpy()) for of, (a, out) in gave.items()}


@pytest.mark.parametrize("tower", TOWERS)
def test_each_way_is_a_stack_of_its_own(fused: Any, tower: str) -> None:
    folder, seen = fused
    own, other = (seen[name] for name in tower.split("_to_"))
    layer = ws.open_model(folder, tower=tower).layer(0)
    attention, output = seen[tower]
    np.testing.assert_allclose(
        softmax(layer.scores(own, memory=other), None), attention.reshape(2, len(own), -1), atol=1e-5
    )
    found = layer.output(attention.reshape(2, len(own), -1), own, memory=other)
    np.testing.assert_allclose(found, output, atol=1e-5 * np.abs(output).max())


def test_both_share_their_scores(fused: Any) -> None:
    folder, seen = fused
    there, back = (ws.open_model(folder, tower=tower).layer(0) for tower in TOWERS)
    image, text = seen["image"], seen["text"]
    forth = there.scores(image, memory=text)
    difference = forth - back.scores(text, memory=image).transpose(0, 2, 1)
    assert np.abs(difference - difference.mean(axis=(1, 2), keepdims=True)).max() < 1e-4 * np.abs(forth).max()
