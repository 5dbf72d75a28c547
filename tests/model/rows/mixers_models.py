"""Tiny random models of every type with layers without a softmax, each with several such layers."""

from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.model.rows.llama_cpp import ASSUMED, tiny
from weightscope.adopting.tiny_models import classes_of

KINDS = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "olmo_hybrid", "jamba", "mamba",
    "falcon_mamba", "zamba", "mamba2", "bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "lfm2",
    "lfm2_moe", "lfm3", "minimax", "recurrent_gemma", "rwkv",
)  # fmt: skip
# Types that no usual size fits.
SIZED = {
    "mamba2": {
        "hidden_size": 96,
        "num_heads": 12,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "num_hidden_layers": 2,
        "vocab_size": 173,
    },
    "recurrent_gemma": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "lru_width": 64,
        "num_hidden_layers": 3,
        "attention_window_size": 16,
        "vocab_size": 173,
    },
}


def tiny_mixers(kind: str) -> Any:
    """A tiny model with random norms, biases and rates."""
    if kind in SIZED:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**SIZED[kind])
        model = next(each for each in classes_of(config) if each.__name__.endswith("ForCausalLM"))(config)
    else:
        classes = classes_of(CONFIG_MAPPING[kind]())
        model = tiny(kind, sorted(classes, key=lambda each: not each.__name__.endswith("ForCausalLM")))
        factors = {key: value for key, value in ASSUMED.get(kind, {}).items() if "multiplier" in key}
        if factors:  # the equations of roles have none
            for key, value in factors.items():
                setattr(model.config, key, [1.0] * len(value) if isinstance(value, list) else 1.0)
            torch.manual_seed(0)
            model = type(model)(model.config)
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.float().eval()
