"""Layers without a softmax: time scales are how transformers' own modules forget, maps what they are handed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.model.rows.mixers_models import tiny_mixers  # noqa: E402
from weightscope.model.layers.mixer import Mixer, read_mixer  # noqa: E402
from weightscope.model.model import open_tensors  # noqa: E402

DELTA = ("qwen3_next", "qwen3_5_text", "kimi_linear", "bailing_hybrid", "olmo_hybrid")
MAMBA2 = ("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2")
WITHOUT_MAPS = ("jamba", "mamba", "falcon_mamba", "zamba", "recurrent_gemma", "rwkv", "lfm2")
TOKENS = 3
MARKS = ("A_log", "conv1d", "slope_rate", "rg_lru", "time_decay", "conv")  # of a mixer's module


def opened(kind: str, folder: Path, change: Any = None) -> tuple[Any, list[tuple[Any, Mixer]]]:
    """A tiny model, and each mixer's module in transformers with what is read of the saved file."""
    model = tiny_mixers(kind)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    tensors = open_tensors(folder).tensors
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    found = []
    for index in tensors.of_mixers:
        module = next(each for each in layers[index].modules() if any(hasattr(each, name) for name in MARKS))
        found.append((module, read_mixer(tensors, index)))
    assert found
    return model, found


class Kept:
    """What a module asks of a cache, with one state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> Any:
        return self.state

    get_linear_cache = get_recurrent_state

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update_conv_state(self, given: Any, *_: Any, **__: Any) -> Any:
        return given

    def update_recurrent_state(self, state: Any, *_: Any, **__: Any) -> None:
        self.state = state

    def set_linear_cache(self, _: int, state: Any) -> None:
        self.state = state


def left_of_state(module: Any, mixer: Mixer, width: int) -> np.ndarray:
    """What TOKENS tokens without an input leave of a state of ones, by the module's own forward, (H, ...)."""
    shape: tuple[int, ...]
    x = torch.zeros(1, TOKENS, width)
    if hasattr(module, "rg_lru"):
        rates = mixer.rates
        module.rg_lru.recurrent_states = torch.ones(1, rates.size)
        module.rg_lru(torch.zeros(1, TOKENS, rates.size), torch.arange(5, 5 + TOKENS)[None])
        return module.rg_lru.recurrent_states.reshape(rates.shape).double().numpy()
    if mixer.kind == "RWKV":
        state = [torch.ones(1, mixer.rates.size), torch.ones(1, mixer.rates.size), torch.zeros(1, mixer.rates.size)]
        rwkv = sys.modules[type(module).__module__].rwkv_linear_attention_cpu
        nothing = torch.zeros(1, TOKENS, mixer.rates.size)
        _, state = rwkv(module.time_decay, module.time_first, nothing, nothing, state, return_state=True)
        return (state[0] * state[2].exp()).double().numpy()
    if hasattr(module, "conv1d"):
        for parameter in module.conv1d.parameters():
            parameter.zero_()  # nothing is written, and no queries
    if mixer.kind == "Mamba":
        shape = mixer.rates.shape[-3:]
        kept = Kept(torch.ones(1, *(shape[1:] if shape[0] == 1 else shape)))
    else:
        assert mixer.w_o is not None and mixer.k is not None
        r, r_v = mixer.k.shape[2], mixer.w_o.shape[1]
        kept = Kept(torch.ones(1, mixer.n_heads, *((r_v, r) if mixer.kind == "Mamba 2" else (r, r_v))))
    if hasattr(module, "slope_rate"):
        module(x, None, None, past_key_values=kept)
    elif mixer.kind == "Mamba":  # only its form for one token takes a state
        for _ in range(TOKENS):
            module(x[:, :1], cache_params=kept)
    else:
        module(x, cache_params=kept)
    state = kept.state[0].double().numpy()
    if mixer.kind == "Mamba":
        return state.reshape(mixer.rates.shape)
    return state[:, :, 0].reshape(mixer.n_heads, -1) if mixer.rates.ndim == 2 else state[:, 0, 0]


@pytest.mark.check
@pytest.mark.parametrize("kind", [*DELTA, *MAMBA2, "minimax", *WITHOUT_MAPS[:-1]])
@torch.no_grad()
def test_a_state_fades_by_1_over_e_in_its_time_scale(kind: str, tmp_path: Path) -> None:
    model, found = opened(kind, tmp_path)
    width = getattr(model.config, "text_config", model.config).hidden_size
    for module, mixer in found:
        left = left_of_state(module, mixer, width)
        assert left.shape == mixer.rates.shape
        np.testing.assert_allclose(np.exp(-TOKENS / mixer.time_scales), left, rtol=2e-5)
