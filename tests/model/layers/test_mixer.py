"""Layers without a softmax: time scales are how transformers' own modules forget, maps what they are handed."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from tests.model.rows.mixers_models import tiny_mixers  # noqa: E402
from weightscope.checkpoint.checkpoint import StoredTensor  # noqa: E402
from weightscope.core.errors import CheckpointError  # noqa: E402
from weightscope.model.layers.mixer import Mixer, names_read, read_mixer, slopes, step_rates  # noqa: E402
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
    read = []
    for index in tensors.of_mixers:
        module = next(each for each in layers[index].modules() if any(hasattr(each, name) for name in MARKS))
        read.append((module, read_mixer(tensors, index)))
    assert read
    return model, read


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
    model, read = opened(kind, tmp_path)
    width = getattr(model.config, "text_config", model.config).hidden_size
    for module, mixer in read:
        left = left_of_state(module, mixer, width)
        assert left.shape == mixer.rates.shape
        np.testing.assert_allclose(np.exp(-TOKENS / mixer.time_scales), left, rtol=2e-5)


def with_short_steps(model: Any) -> None:
    """Steps that transformers' code clips at both ends, Falcon-H1's multipliers, and an open gate of KDA."""
    config = model.config
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.dt_bias.data[0], module.dt_bias.data[1] = -20, 5
            if config.model_type not in ("nemotron_h", "zamba2"):  # their modules do not read it
                module.time_step_limit = config.time_step_limit = (0.01, 0.2)
        if hasattr(module, "mup_vector"):
            code = sys.modules[type(module).__module__]
            config.ssm_multipliers = [2.0, 0.5, 0.3, 0.7, 3.0]
            config.ssm_in_multiplier, config.ssm_out_multiplier = 1.5, 0.9
            module.mup_vector, module.ssm_in_multiplier = code.compute_mup_vector(config), 1.5
        if hasattr(module, "safe_gate"):
            module.safe_gate = config.kda_safe_gate = False


@pytest.mark.check
@pytest.mark.parametrize("kind", [*MAMBA2, "bailing_hybrid"])
@torch.no_grad()
def test_time_scales_follow_what_the_config_says_of_steps(kind: str, tmp_path: Path) -> None:
    model, read = opened(kind, tmp_path, with_short_steps)
    for module, mixer in read:
        left = left_of_state(module, mixer, model.config.hidden_size)
        np.testing.assert_allclose(np.exp(-TOKENS / mixer.time_scales), left, rtol=2e-5)


@torch.no_grad()
def handed_on(module: Any, layer: Any, width: int) -> list[np.ndarray]:
    """The matrices of the stream that a module's recurrence is handed as q, k and v, each (H, d, r), in float64.

    Tokens are the axes of the stream, as the norm before the layer leaves them; convolution and activation are taken
    out.
    """
    code = sys.modules[type(module).__module__]
    norm = next((getattr(layer, name) for name in NORMS if hasattr(layer, name)), None)
    axes = torch.eye(width, dtype=torch.float64)
    entering = axes if norm is None else norm(axes) * (1 / width + eps_of(norm)) ** 0.5
    handed: dict[str, Any] = {}

    def keep(*given: Any, **_: Any) -> Any:
        handed["given"] = given
        raise StopIteration

    name = next(name for name in vars(code) if re.fullmatch(r"(torch_)?chunk_\w+|mamba2_chunk_scan", name))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(code, "causal_conv1d_fn", lambda x, *_, **__: x)
        patch.setattr(code, name, keep)
        module(entering[None])
    if name == "mamba2_chunk_scan":
        x, _, _, b, c = handed["given"][:5]
        given = c, b, x
    else:
        given = handed["given"][:3]
    return [part[0].transpose(0, 1).double().numpy() for part in given]


NORMS = ("attention_layer_norm", "input_layernorm", "norm")


def eps_of(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)))


def dense_outputs(module: Any, n_heads: int) -> np.ndarray:
    """A module's W_O with the gain before it, (H, r_v, d), in float64."""
    out = getattr(module, "o_proj", None) or module.out_proj
    norm = getattr(module, "o_norm", None) or getattr(module, "norm", None)
    w = out.weight.double().numpy().T
    gain = norm.weight.double().numpy() if hasattr(norm, "weight") else np.ones(1)
    return (np.tile(gain, len(w) // len(gain))[:, None] * w).reshape(n_heads, -1, w.shape[1])


@pytest.mark.check
@pytest.mark.parametrize("kind", [*DELTA, *MAMBA2])
@torch.no_grad()
def test_maps_are_what_the_recurrence_is_handed(kind: str, tmp_path: Path) -> None:
    model, read = opened(kind, tmp_path, with_short_steps if kind == "falcon_h1" else None)
    model.double()
    lists = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    config = getattr(model.config, "text_config", model.config)
    for module, mixer in read:
        holder = next(
            each for layer in lists for each in layer.modules() if any(child is module for child in each.children())
        )
        q, k, v = handed_on(module, holder, config.hidden_size)
        w_o = dense_outputs(module, mixer.n_heads) * getattr(config, "ssm_out_multiplier", 1.0)
        assert len(mixer.heads) == mixer.n_heads > 1
        for head in mixer.heads:
            qk = q[head.index * len(q) // mixer.n_heads] @ k[head.index * len(k) // mixer.n_heads].T
            vo = v[head.index] @ w_o[head.index]
            for found_map, dense in ((head.qk, qk), (head.vo, vo)):
                assert np.abs(found_map.dense() - dense).max() < 1e-5 * np.abs(dense).max()


@pytest.mark.check
@torch.no_grad()
def test_lightning_attention_has_q_k_v_of_each_head_in_turn(tmp_path: Path) -> None:
    model, read = opened("minimax", tmp_path)
    n_layers, n_heads = model.config.num_hidden_layers, model.config.num_attention_heads
    for module, mixer in read:
        np.testing.assert_allclose(
            slopes(n_heads, mixer.index, n_layers), module.slope_rate.double().numpy().ravel(), rtol=1e-5
        )
        gamma = model.model.layers[mixer.index].input_layernorm.weight.double().numpy()
        rows = module.qkv_proj.weight.double().numpy().reshape(n_heads, 3, -1, len(gamma)) * gamma
        w_o = dense_outputs(module, n_heads)
        for head in mixer.heads:
            q, k, v = rows[head.index]
            assert np.abs(head.qk.dense() - q.T @ k).max() < 1e-6
            assert np.abs(head.vo.dense() - v.T @ w_o[head.index]).max() < 1e-6


@pytest.mark.check
@pytest.mark.parametrize("kind", WITHOUT_MAPS)
def test_layers_without_queries_and_keys_say_so(kind: str, tmp_path: Path) -> None:
    for _, mixer in opened(kind, tmp_path)[1]:
        with pytest.raises(CheckpointError, match=r"has no W_QK and W_VO: .+"):
            mixer.head(0)


def test_time_scales_of_mamba_2_as_initialised() -> None:
    """A uniform in [1, 16] and steps log-uniform in [0.001, 0.1]: between 1 / (16 x 0.1) and 1 / (1 x 0.001) tokens."""
    rng = np.random.default_rng(0)
    steps = np.exp(rng.uniform(np.log(0.001), np.log(0.1), 10_000))
    bias = steps + np.log(-np.expm1(-steps))  # the inverse of softplus, as in transformers' code
    rates = step_rates(np.log(rng.uniform(1, 16, 10_000)), bias)
    scales = Mixer(0, "Mamba 2", rates).time_scales
    assert 0.625 <= scales.min() < 1 < 500 < scales.max() <= 1000
    grid = np.linspace(0, 1, 2001)
    product = np.multiply.outer(1 + 15 * grid, 0.001 * 100**grid)
    assert np.median(scales) == pytest.approx(np.median(1 / product), rel=0.03) == pytest.approx(14, rel=0.03)


@pytest.mark.check
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", "kimi_linear", "bamba", "minimax", "jamba", "lfm2", "recurrent_gemma"]
)
def test_the_tensors_that_are_listed_are_the_ones_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_mixers(kind).save_pretrained(tmp_path)
    tensors = open_tensors(tmp_path).tensors
    read: set[str] = set()
    raw = StoredTensor.raw

    def noting(tensor: StoredTensor, *where: Any) -> np.ndarray:
        read.add(tensor.name)
        return raw(tensor, *where)

    monkeypatch.setattr(StoredTensor, "raw", noting)
    for index in tensors.of_mixers:
        read.clear()
        mixer = read_mixer(tensors, index)
        for head in () if mixer.refused else mixer.heads:
            assert head.qk.shape == head.vo.shape
        assert read == {*names_read(tensors, index)}


@pytest.mark.check
@pytest.mark.parametrize("kind", ["bailing_hybrid", "nemotron_h", "zamba2", "bamba", "falcon_h1", "qwen3_next"])
def test_a_number_that_a_config_leaves_out_is_the_classs_or_refused(kind: str, tmp_path: Path) -> None:
    tiny_mixers(kind).save_pretrained(tmp_path)
    tensors = open_tensors(tmp_path).tensors
    written = json.loads((tmp_path / "config.json").read_text())
    usual = CONFIG_MAPPING[kind]().to_dict()
    for key in {*MEANT} & {*written}:
        (tmp_path / "config.json").write_text(json.dumps({k: value for k, value in written.items() if k != key}))
        left_out = open_tensors(tmp_path).tensors
        for index in left_out.of_mixers:
            if key in SIZES:
                with pytest.raises(CheckpointError, match=r"_(groups|ngroups|heads|dim)' is None"):
                    read_mixer(left_out, index)
            else:
                if key not in ("time_step_limit", "ssm_multipliers"):  # spelled otherwise in a file, or None
                    assert written[key] == usual[key]
                np.testing.assert_array_equal(read_mixer(left_out, index).rates, read_mixer(tensors, index).rates)


SIZES = ("n_groups", "mamba_n_groups", "mamba_ngroups", "linear_num_key_heads", "linear_key_head_dim")
MEANT = (
    *SIZES, "kda_safe_gate", "kda_lower_bound", "time_step_min", "time_step_limit", "ssm_multipliers",
    "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip
