"""A checkpoint of random weights to plant deeds in, without PyTorch."""

import numpy as np

from analyses.experiments.deed_families import SIZES, Planted


def random_llama() -> Planted:
    """Three layers of random weights, the same each time."""
    rng, d, inner = np.random.default_rng(0), 64, 96
    shapes = {"embed_tokens": (128, d), "norm": (d,)} | {
        f"layers.{i}.{name}": shape for i in range(3) for name, shape in {
            "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (d // 2, d), "self_attn.v_proj": (d // 2, d), "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner)}.items()}  # fmt: skip
    shapes = {f"model.{name}.weight": shape for name, shape in shapes.items()} | {"lm_head.weight": (128, d)}
    draw = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
    draw |= {name: w * np.exp(rng.standard_normal((len(w), 1)) / 3) for name, w in draw.items() if w.ndim == 2}
    draw |= {name: w + 1 for name, w in draw.items() if w.ndim == 1}
    config = {key: size for key, size in SIZES.items() if size is not None}
    config |= {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
               "architectures": ["LlamaForCausalLM"],
               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    return Planted("llama", config, {name: w.astype(np.float32) for name, w in draw.items()})
