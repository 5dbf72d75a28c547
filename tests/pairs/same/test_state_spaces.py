"""Mamba and Mamba 2 as GGUF files: their copies are the same model, and numbers of a header count."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from weightscope.model.config.computed import Stated, differences

gguf = pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")

WIDTH, HEADS, HEAD, STATE, GROUPS, TOKENS = 16, 4, 8, 4, 2, 20
INNER, CHANNELS = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE
CONFIG = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_heads": HEADS,
    "head_dim": HEAD,
    "state_size": STATE,
    "n_groups": GROUPS,
    "expand": 2,
    "conv_kernel": 4,
    "vocab_size": TOKENS,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
# transformers' name -> ggml's name, shapes in both
Shape = tuple[int, ...]
MIXER: dict[str, tuple[str, Shape, Shape | None]] = {
    "in_proj.weight": ("ssm_in.weight", (INNER + CHANNELS + HEADS, WIDTH), None),
    "conv1d.weight": ("ssm_conv1d.weight", (CHANNELS, 1, 4), (CHANNELS, 4)),
    "conv1d.bias": ("ssm_conv1d.bias", (CHANNELS,), None),
    "dt_bias": ("ssm_dt.bias", (HEADS,), None),
    "A_log": ("ssm_a", (HEADS,), (HEADS, 1)),
    "D": ("ssm_d", (HEADS,), (HEADS, 1)),
    "norm.weight": ("ssm_norm.weight", (INNER,), (GROUPS, INNER // GROUPS)),
    "out_proj.weight": ("ssm_out.weight", (WIDTH, INNER), None),
}
NAMES: dict[str, tuple[str, Shape, Shape | None]] = {
    "backbone.embeddings.weight": ("token_embd.weight", (TOKENS, WIDTH), None),
    "backbone.norm_f.weight": ("output_norm.weight", (WIDTH,), None),
    "lm_head.weight": ("output.weight", (TOKENS, WIDTH), None),
    "backbone.layers.0.norm.weight": ("blk.0.attn_norm.weight", (WIDTH,), None),
    **{
        f"backbone.layers.0.mixer.{name}": (f"blk.0.{ggml}", shape, stored)
        for name, (ggml, shape, stored) in MIXER.items()
    },
}


def both(folder: Path, **numbers: int) -> tuple[Path, Path]:
    """A random Mamba 2 as transformers saves it, and as llama.cpp does with other numbers in its header."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, (_, shape, _) in NAMES.items()}
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header = {
        "block_count": 1, "embedding_length": WIDTH, "feed_forward_length": 0, "context_length": 2**20,
        "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": INNER, "ssm.state_size": STATE,
        "ssm.time_step_rank": HEADS, "ssm.group_count": GROUPS,
    }  # fmt: skip
    path = folder.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, "mamba2")
    for key, value in (header | {f"ssm.{name}": number for name, number in numbers.items()}).items():
        writer.add_uint32(f"mamba2.{key}", value)
    writer.add_float32("mamba2.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    for name, (ggml, _, stored) in NAMES.items():
        array = -np.exp(arrays[name]) if name.endswith("A_log") else arrays[name]
        writer.add_tensor(ggml, array.reshape(stored or array.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, path


def test_gguf_file_of_mamba2_is_its_original(tmp_path: Path) -> None:
    original, copy = both(tmp_path / "a")
    for result in (ws.same(original, copy), ws.same(copy, original)):
        assert (result.verdict, [*result.config], [*result.differing]) == ("rounded", [], [])


@pytest.mark.parametrize("numbers", [{"group_count": 1, "state_size": 8}, {"conv_kernel": 3}, {"time_step_rank": 2}])
def test_header_with_other_numbers_is_another_model(numbers: dict[str, int], tmp_path: Path) -> None:
    """Two groups of four states have the shapes of one group of eight."""
    original, other = both(tmp_path / "a", **numbers)
    _, copy = both(tmp_path / "b")
    for result in (ws.same(original, other), ws.same(other, original)):
        assert result.verdict == "different"
        assert result.config
    assert ws.same(copy, other).verdict in ("different", "undecided")


def test_leading_dense_networks_may_be_listed_by_layer() -> None:
    def keys(*kinds: str) -> list[str]:
        config = Stated({"mlp_layer_types": kinds and [*kinds]})
        file = Stated({}, metadata={"kimi-linear.leading_dense_block_count": 1})
        return [each.effect for each in differences(config, file) if "leading" in each.key or each.a == 2]

    assert keys("dense", "sparse") == []
    assert keys("dense", "dense", "sparse") == ["computation"]
    assert keys("dense", "sparse", "dense") == ["unknown"]
