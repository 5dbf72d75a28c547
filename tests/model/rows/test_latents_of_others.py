"""Ling 3.0 with queries from a latent, and Kimi K3: what differs from DeepSeek's rows that they start from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws

D, HEADS, Q_LATENT, LATENT, FREE, TURNING, VALUE = 48, 4, 20, 16, 8, 4, 12
SIZES = {
    "hidden_size": D, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 2,
    "q_lora_rank": Q_LATENT, "kv_lora_rank": LATENT, "qk_nope_head_dim": FREE, "qk_rope_head_dim": TURNING,
    "v_head_dim": VALUE, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 50, "intermediate_size": 40,
    "tie_word_embeddings": False,
}  # fmt: skip
LING = {"self_attn.": "attention.", "o_proj": "dense", "embed_tokens": "word_embeddings"}


def weights(gates: int) -> dict[str, np.ndarray]:
    """Random weights of two layers under DeepSeek's names; `gates`: rows of g_proj, 0 without one."""
    rng = np.random.default_rng(0)
    maps = {
        "q_a_proj": (Q_LATENT, D), "q_b_proj": (HEADS * (FREE + TURNING), Q_LATENT),
        "kv_a_proj_with_mqa": (LATENT + TURNING, D), "kv_b_proj": (HEADS * (FREE + VALUE), LATENT),
        "o_proj": (D, HEADS * VALUE), **({"g_proj": (gates, D)} if gates else {}),
    }  # fmt: skip
    made: dict[str, np.ndarray] = {"model.embed_tokens.weight": rng.standard_normal((50, D))}
    made |= {"model.norm.weight": np.ones(D), "lm_head.weight": rng.standard_normal((50, D))}
    for i in range(2):
        stem = f"model.layers.{i}."
        made |= {f"{stem}self_attn.{name}.weight": rng.standard_normal(shape) for name, shape in maps.items()}
        for name, size in (("q_a_layernorm", Q_LATENT), ("kv_a_layernorm", LATENT)):
            made[f"{stem}self_attn.{name}.weight"] = 1 + 0.3 * rng.standard_normal(size)
        made |= {f"{stem}{name}_layernorm.weight": np.ones(D) for name in ("input", "post_attention")}
        for name, shape in (("gate", (40, D)), ("up", (40, D)), ("down", (D, 40))):
            made[f"{stem}mlp.{name}_proj.weight"] = rng.standard_normal(shape)
    return {name: np.asarray(w, np.float32) for name, w in made.items()}


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_ling_with_a_latent_of_queries_is_deepseek_with_a_gate(tmp_path: Path) -> None:
    """Published files have a linear layer's head_dim, which transformers' class replaces."""
    gated, renamed = weights(HEADS), {}
    for name, w in gated.items():
        for ours, theirs in LING.items():
            name = name.replace(ours, theirs)
        renamed[name] = w
    config = {**SIZES, "model_type": "bailing_hybrid", "layer_group_size": 1, "head_dim": 128}
    ling = ws.open_model(saved(tmp_path / "ling", config, renamed))
    plain = {name: w for name, w in gated.items() if "g_proj" not in name}
    deepseek = ws.open_model(
        saved(tmp_path / "v3", {**SIZES, "model_type": "deepseek_v3", "rope_interleave": True}, plain)
    )
    x = np.random.default_rng(1).standard_normal((7, D)).astype(np.float32)
    for i in (0, 1):
        np.testing.assert_allclose(ling.layer(i).scores(x), deepseek.layer(i).scores(x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ling.layer(i).values(x), deepseek.layer(i).values(x), rtol=1e-5, atol=1e-5)
        assert ling.layer(i).gate is not None
    assert all(tensor.has_role for tensor in ling.tensors)


def kimi(**more: object) -> dict[str, Any]:
    """Kimi K3's config, whose text says that it is Kimi Linear."""
    full = {"full_attn_layers": [1, 2], "kda_layers": []}
    text = {**SIZES, "model_type": "kimi_linear", "linear_attn_config": full, "mla_use_nope": True, **more}
    return {"model_type": "kimi_k3", "text_config": text}


def test_kimi_k3_is_refused_by_what_enters_its_layers(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": w for name, w in weights(HEADS * VALUE).items()}
    folder = saved(tmp_path / "k3", kimi(attn_res_block_size=4, mla_use_output_gate=True), tensors)
    with pytest.raises(ws.CheckpointError, match="attn_res_block_size: every layer reads a softmax"):
        ws.open_model(folder)
    model = ws.open_model(saved(tmp_path / "gated", kimi(mla_use_output_gate=True), tensors))
    assert model.layer(1).gate is not None


@pytest.mark.parametrize("kind", ["iquestloopcoder", "deepseek_v41", "talkie", "baichuan_m1", "phi3small", "afm7"])
def test_what_only_other_readers_know_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", {**SIZES, "model_type": kind}, weights(0))
    with pytest.raises(ws.CheckpointError, match=f"no row can describe {kind}: it "):
        ws.open_model(folder)
