"""A derivation that is said to preserve the function does, by the eager model; the others change it; maps are exact."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.plants import derivations
from tests.support.plants.derivations import DERIVATIONS, those_for
from tests.support.plants.named_parts import Weights, read_weights, stored_as, write_weights

torch = pytest.importorskip("torch", reason="the eager models need the extra `runner`")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.check

LLAMA = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "intermediate_size": 96, "max_position_embeddings": 32, "initializer_range": 0.2,
    "tie_word_embeddings": True,
}  # fmt: skip
BERT = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 96,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"num_key_value_heads": 8},
    "gemma3_text": LLAMA | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 32, "initializer_range": 0.2},
    "bert": BERT,
    "mpnet": BERT,
}
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of every dialect, whose norms and biases are random too."""
    made = {}
    for model_type, options in CONFIGS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **options)
        auto = transformers.AutoModel if model_type in ("bert", "mpnet") else transformers.AutoModelForCausalLM
        model = auto.from_config(config)
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.data = weight.data + 0.3 * torch.randn(weight.shape)
        made[model_type] = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(made[model_type])
    return made


def outputs(folder: Path) -> np.ndarray:
    """Logits of the eager model, or the products of an encoder's last states, whose basis may be another."""
    config = transformers.AutoConfig.from_pretrained(folder)
    encoder = config.model_type in ("bert", "mpnet")
    auto = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        output = model.eval()(TOKENS)
    if encoder:
        return (output.last_hidden_state @ output.last_hidden_state.mT).numpy()
    return output.logits.numpy()


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_checkpoint_is_written_as_it_was_read(model_type, folders, tmp_path):
    write_weights(read_weights(folders[model_type]), tmp_path)
    np.testing.assert_array_equal(outputs(tmp_path), outputs(folders[model_type]))


@pytest.mark.parametrize("name", [name for name, made in DERIVATIONS.items() if made.preserving])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_preserves_the_function_gives_the_same_logits(model_type, name, folders, tmp_path):
    weights = read_weights(folders[model_type])
    if name not in those_for(weights):
        pytest.skip("not for this family")
    made = DERIVATIONS[name].change(weights)
    write_weights(made, tmp_path)
    expected = outputs(folders[model_type])
    np.testing.assert_allclose(outputs(tmp_path), expected, atol=1e-4 * np.abs(expected).max())
    if "same bytes" not in DERIVATIONS[name].kinds:
        assert not same(made, weights)


@pytest.mark.parametrize("name", [name for name, made in DERIVATIONS.items() if not made.preserving])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_others_change_the_checkpoint_and_leave_one_that_runs(model_type, name, folders, tmp_path):
    weights = read_weights(folders[model_type])
    if name not in those_for(weights):
        pytest.skip("not for this family")
    before = copy.deepcopy(weights.parts)
    write_weights(DERIVATIONS[name].change(weights), tmp_path)
    assert np.isfinite(outputs(tmp_path)).all()
    assert ws.open_model(tmp_path).layer(0).head(0).qk.frobenius() > 0
    assert all(np.array_equal(w, weights.parts[part]) for part, w in before.items())  # the base is not touched


def same(a: Weights, b: Weights) -> bool:
    return a.parts.keys() == b.parts.keys() and all(np.array_equal(w, b.parts[part]) for part, w in a.parts.items())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_layers_are_those_of_the_base_that_the_map_names(model_type, folders):
    weights = read_weights(folders[model_type])
    for name, made in those_for(weights).items():
        if "," in name or not any(kind.startswith("layers") for kind in made.kinds):
            continue
        derived = made.change(weights)
        assert len(derived.came_from) == derived.size("layers"), name
        for layer, origin in enumerate(derived.came_from):
            np.testing.assert_array_equal(derived.parts[layer, "q.w"], weights.parts[origin, "q.w"])


def test_depth_upscaling_is_that_of_solar():
    """32 layers: 0-23, then 8-31 (Kim et al. 2023, section 2)."""
    assert derivations.upscaled(32) == [*range(24), *range(8, 32)]


GRIDS = {
    "4 bits": (partial(derivations.groups_to_nearest, bits=4, group=32), 15),
    "4 bits with minima": (partial(derivations.groups_to_nearest, bits=4, group=32, symmetric=False), 16),
    "NF4": (derivations.nf4, 16),
    "Q4_0": (partial(derivations.ggml, kind="Q4_0"), 16),
    "Q4_K": (derivations.q4_k, 16),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_group_of_32_has_no_more_values_than_its_grid(name):
    pytest.importorskip("gguf")
    quantise, values = GRIDS[name]
    rows = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    rounded = quantise(rows)
    groups = np.sort(rounded.reshape(-1, 32), axis=1)
    assert (1 + (np.diff(groups, axis=1) > 1e-6).sum(axis=1)).max() <= values
    error = np.linalg.norm(rounded - rows) / np.linalg.norm(rows)
    assert 0.05 < error < 0.12  # a uniform step of a fifteenth of 4 to 5 deviations, over the root of 12


def test_bfloat16_is_rounded_as_torch_rounds():
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    bits = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(stored_as(x, "bfloat16"), bits)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_low_rank_update_has_its_rank_and_size(rank, folders):
    weights = read_weights(folders["llama"])
    made = derivations.updated(weights, rank, 0.1)
    for part, w in weights.matrices():
        change = made.parts[part].astype(np.float64) - w
        values = np.linalg.svd(change, compute_uv=False)
        assert values[rank] < 1e-5 * values[0]
        assert np.linalg.norm(change) == pytest.approx(0.1 * np.linalg.norm(w), rel=1e-4)
