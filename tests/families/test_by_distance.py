"""Positions of speech as transformers' own modules have them: gated biases, keys and values of distances."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.tiny_models import softmax
from weightscope.attention.layer import Layer

torch = pytest.importorskip("torch", reason="the modules are transformers'")
transformers = pytest.importorskip("transformers", reason="the modules are transformers'")

SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 30}
KINDS = {
    "wavlm": ({"num_buckets": 8, "max_bucket_distance": 12}, "encoder.layers.0.attention."),
    "vits": ({"window_size": 3}, "text_encoder.encoder.layers.0.attention."),
}


def module_of(kind: str, config: Any) -> Any:
    from transformers.models.vits.modeling_vits import VitsAttention
    from transformers.models.wavlm.modeling_wavlm import WavLMAttention

    if kind == "vits":
        return VitsAttention(config)
    return WavLMAttention(24, 3, num_buckets=config.num_buckets, max_distance=config.max_bucket_distance)


@pytest.fixture(scope="module", params=KINDS)
def seen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layer, np.ndarray, np.ndarray, np.ndarray]:
    """A layer, what entered it, and the attention and output of the module whose tensors it was read from."""
    values, stem = KINDS[request.param]
    torch.manual_seed(0)
    module = module_of(request.param, transformers.AutoConfig.for_model(request.param, **SIZES, **values)).eval()
    attention: list[np.ndarray] = []
    softmaxes: Callable[..., Any] = torch.nn.functional.softmax

    def watched(scores: Any, *args: Any, **kwargs: Any) -> Any:
        attention.append(softmaxes(scores, *args, **kwargs).numpy())
        return softmaxes(scores, *args, **kwargs)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
        x = torch.randn(1, 15, 24)
        patch.setattr("torch.nn.functional.softmax", watched)
        output = module(x)[0][0].numpy()
    folder: Path = tmp_path_factory.mktemp(request.param)
    tensors = {stem + name: one.numpy().copy() for name, one in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES | values | {"model_type": request.param}))
    return ws.open_model(folder).layer(0), x[0].numpy(), attention[0].reshape(3, 15, 15), output


def test_scores_and_outputs_are_the_modules(seen: Any) -> None:
    layer, x, attention, output = seen
    np.testing.assert_allclose(softmax(layer.scores(x), None), attention, atol=1e-5)
    np.testing.assert_allclose(layer.output(attention, x), output, atol=1e-5 * np.abs(output).max())


def test_what_depends_on_distance_matters_and_is_named(seen: Any) -> None:
    layer, x, attention, output = seen
    said = " ".join(layer.caveats)
    if layer.additive_gate is not None:
        plain = replace(layer, additive_gate=None)
        assert np.abs(softmax(plain.scores(x), None) - attention).max() > 1e-2
        assert "a factor of the query" in said
    else:
        plain = replace(layer, relative_values=None)
        assert np.abs(plain.output(attention, x) - output).max() > 1e-2 * np.abs(output).max()
        assert "values of distances" in said and layer.modulated
