"""Feed-forward networks and what stands around them, against transformers' eager models, layer by layer."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import CASES, GPT, LLAMA, MHA, Case
from tests.support.remote_rows import is_remote
from weightscope.heads.circuits import stream as followed
from weightscope.heads.circuits.names import unembedding
from weightscope.heads.circuits.stream import rest_of_layer, sequences, streams, why_no_stream
from weightscope.model.rows.table import FAMILIES

torch = pytest.importorskip("torch", reason="the eager models are torch's, which is not installed")
transformers = pytest.importorskip("transformers", reason="the eager models are transformers', which is not installed")
from tests.support.random_models import inputs_of, random_model  # noqa: E402
from weightscope.runner.hooks import blocks_of  # noqa: E402

pytestmark = pytest.mark.check

by_name = {case.name: case for case in CASES}


def with_config(name: str, suffix: str, **config: Any) -> Case:
    return replace(by_name[name], name=f"{name}_{suffix}", config=by_name[name].config | config)


FOLLOWED = {row.name for row in FAMILIES if row.mlp is not None and not is_remote(row)}
# Rows whose attention is another's, so that they have no golden file of their own.
MORE = (
    Case("cohere2", "cohere2", LLAMA | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    Case("exaone4", "exaone4", LLAMA | {"sliding_window": 64, "sliding_window_pattern": 2}),
    Case("ministral", "ministral", LLAMA | {"head_dim": 8}),
    Case("ministral3", "ministral3", LLAMA | {"head_dim": 8}),
    Case("vaultgemma", "vaultgemma", LLAMA | {"head_dim": 8, "sliding_window": 64}),
    Case("seed_oss", "seed_oss", LLAMA | {"head_dim": 8, "mlp_bias": True}),
    Case("helium", "helium", LLAMA | {"head_dim": 4}),
    Case("cwm", "cwm", LLAMA | {"head_dim": 8, "sliding_window": 64}),
    Case("nemotron", "nemotron", LLAMA | {"mlp_bias": True}),
    Case("jais2", "jais2", LLAMA | {"head_dim": 4}),
    Case("persimmon", "persimmon", MHA, output=r"self_attn\.dense$"),
    Case("gpt_bigcode", "gpt_bigcode", GPT | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 8},
         output=r"attn\.c_proj$"),
    Case("biogpt", "biogpt", MHA, output=r"self_attn\.out_proj$"),
)  # fmt: skip
THOSE = (
    *{case.model_type: case for case in reversed((*CASES, *MORE)) if case.model_type in FOLLOWED}.values(),
    *(by_name[name] for name in ("opt_post_norm", "falcon_grouped", "falcon_one_norm", "falcon_alibi")),
    with_config("llama", "bias", mlp_bias=True),
    with_config("gpt_neox", "serial", use_parallel_residual=False),
    with_config("stablelm", "parallel", use_parallel_residual=True),
    with_config("starcoder2", "no_bias", use_bias=False),
    with_config("opt", "no_bias", enable_bias=False, layer_norm_elementwise_affine=False),
)


def test_there_is_a_case_for_every_row() -> None:
    assert {case.model_type for case in THOSE} == FOLLOWED


def array(value: Any) -> np.ndarray:
    value = value[0] if isinstance(value, tuple) else value
    return value.detach().numpy().reshape(-1, value.shape[-1]).copy()


@contextmanager
def recorded(network: Any, case: Case, model: ws.Model) -> Iterator[dict[str, list[np.ndarray]]]:
    """What enters and leaves every layer, and what its attention gives, each a list by layer."""
    seen: dict[str, list[np.ndarray]] = {"in": [], "attended": [], "out": []}

    def layer(module: Any, given: Any, named: Any, output: Any) -> None:
        seen["in"].append(array(given[0] if given else named["hidden_states"]))
        seen["out"].append(array(output))

    hooks, blocks = [], {id(block) for block in blocks_of(network, model)}
    for name, module in network.named_modules():
        if id(module) in blocks:
            hooks.append(module.register_forward_hook(layer, with_kwargs=True))
        elif re.search(case.output, name):
            hooks.append(module.register_forward_hook(lambda m, i, o: seen["attended"].append(array(o))))
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("case", THOSE, ids=[case.name for case in THOSE])
def test_layers_beside_attention_are_the_eager_model_s(case: Case, tmp_path: Path) -> None:
    network = random_model(case)
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    assert why_no_stream(model) is None
    row = model.family.mlp
    assert row is not None
    assert unembedding(model, np.arange(3)).shape == (3, model.config.d_model)
    with recorded(network, case, model) as seen, torch.inference_mode():
        network(**inputs_of(case))
    assert len(seen["in"]) == len(seen["attended"]) == model.config.n_layers
    for index, (x, attended, out) in enumerate(zip(*seen.values(), strict=True)):
        output = rest_of_layer(model, row, index, x, attended)
        np.testing.assert_allclose(output, out, rtol=0, atol=1e-5 * max(1, np.abs(out).max()), err_msg=str(index))


def unwindowed(config: dict[str, Any]) -> dict[str, Any]:
    """The config with windows that no short text fills."""
    return config | {key: 64 for key in ("sliding_window",) if key in config}


@pytest.mark.parametrize("case", THOSE, ids=[case.name for case in THOSE])
def test_a_stream_is_the_eager_model_s_but_for_what_is_averaged(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short text without padding that fits every window."""
    monkeypatch.setattr(followed, "N_TOKENS", 4)
    monkeypatch.setattr(followed, "sample_tokens", lambda model, n, p=None: np.arange(n) + (5 if p is None else 9))
    monkeypatch.setattr(followed, "first_token", lambda model: 4)
    config = json.loads(json.dumps(case.config), object_hook=unwindowed)
    network = random_model(replace(case, config=config))
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    tokens = sequences(model)
    with recorded(network, case, model) as seen, torch.inference_mode():
        network(input_ids=torch.tensor(tokens))
    causal = model.family.mlp is not None and model.family.mlp.causal
    first = [stream.x[:, 0] for stream in streams(model)]
    monkeypatch.setattr(followed, "averaged", lambda attention: attention)
    for index, (stream, x) in enumerate(zip(streams(model), seen["in"], strict=True)):
        expected, atol = x.reshape(stream.x.shape), 2e-5 * max(1, np.abs(x).max())
        np.testing.assert_allclose(stream.x, expected, rtol=0, atol=atol, err_msg=str(index))
        if causal:
            np.testing.assert_allclose(first[index], expected[:, 0], rtol=0, atol=atol, err_msg=str(index))


def changed(name: str, folder: Path, **config: Any) -> ws.Model:
    """A whole random model opened with its config.json changed."""
    random_model(by_name[name]).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return ws.open_model(folder)


def test_gemma_s_gelu_is_the_approximate_one_whatever_its_first_configs_say(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    outputs = []
    for activation in ("gelu", "gelu_pytorch_tanh"):
        model = changed("gemma", tmp_path / activation, hidden_act=activation)
        assert transformers.AutoConfig.from_pretrained(tmp_path / activation).hidden_act == "gelu_pytorch_tanh"
        row = model.family.mlp
        assert row is not None
        outputs.append(rest_of_layer(model, row, 0, x, x))
    np.testing.assert_array_equal(*outputs)


def test_a_layer_that_no_row_can_say_is_not_followed(tmp_path: Path) -> None:
    model = changed("bloom", tmp_path, apply_residual_connection_post_layernorm=True)
    assert why_no_stream(model) == "the place of the feed-forward network in bloom models is not known here"


def test_gate_and_up_of_another_size_are_one_clear_error(tmp_path: Path) -> None:
    model = changed("phi3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    save_file(weights | {name: weights[name][:-1].copy()}, tmp_path / "model.safetensors")
    model = ws.open_model(tmp_path)
    with pytest.raises(ws.CheckpointError, match=r"gate_up_proj\.weight.* has shape \(15, 16\); .* needs \(16, 16\)"):
        list(streams(model))
