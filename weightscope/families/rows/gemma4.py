"""Gemma 3n, Gemma 4 and what is made of them: values normed, wider heads in some layers, keys that serve as values."""

from collections.abc import Mapping
from typing import Any

from weightscope.families.cells import QkNorm, rms_norm
from weightscope.families.config import ModelConfig, listed_sizes
from weightscope.families.family import In, When
from weightscope.families.rows.gpt import unscaled
from weightscope.families.rows.llama import GEMMA3, OUTPUT_NORM


def global_sizes(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Heads of layers that see everything: of `per_layer_config`, or of two keys in its stead."""
    if "per_layer_config" in config or config.layer_types[layer] != "full_attention":
        return listed_sizes(config, layer)
    own = {"head_dim": config.size("global_head_dim")}
    if config.has("num_global_key_value_heads") and config.get("attention_k_eq_v", True):
        own["num_key_value_heads"] = config.size("num_global_key_value_heads")
    return own


def last_own(config: ModelConfig, layer: int) -> int:
    """The last `num_kv_shared_layers` attend to keys and values of the last layer before them of their type."""
    own = config.n_layers - config.count("num_kv_shared_layers")
    if layer < own:
        return layer
    alike = [i for i in range(max(own, 0)) if config.layer_types[i] == config.layer_types[layer]]
    if not alike:
        raise config.error("num_kv_shared_layers", "layers of every type that make keys and values of their own")
    return alike[-1]


KEYS_ARE_VALUES = (In("full_attention", value="self_attn.k_proj"),)

GEMMA3N = GEMMA3.but(
    name="gemma3n",
    model_types=("gemma3n_text",),
    nested="",
    norm=rms_norm("input_layernorm"),
    qk_norm=QkNorm(),
    values_normed=True,
    keys_of=last_own,
    scale=unscaled,
    outputs__norm=rms_norm("norm"),
    caveats=(
        OUTPUT_NORM,
        "layers read one of several streams (AltUp) and add a low-rank map of their normed input to their output",
    ),
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 35, "num_key_value_heads": 2, "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15, "max_position_embeddings": 32768,
    },
)  # fmt: skip

GEMMA4 = GEMMA3N.but(
    name="gemma4",
    model_types=("gemma4_text",),
    sizes=global_sizes,
    caveats=(OUTPUT_NORM,),
    variants=(When("attention_k_eq_v", True, in_layers=KEYS_ARE_VALUES),),
    defaults={
        "hidden_size": 2304, "num_hidden_layers": 30, "num_key_value_heads": 4, "sliding_window_pattern": 6,
        "num_kv_shared_layers": 0, "max_position_embeddings": 131072, "attention_k_eq_v": False,
        "global_head_dim": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
)  # fmt: skip

GEMMA4_UNIFIED = GEMMA4.but(
    name="gemma4_unified",
    model_types=("gemma4_unified_text",),
    defaults={"max_position_embeddings": 262144},
)

DIFFUSION_GEMMA = GEMMA4.but(
    name="diffusion_gemma",
    model_types=("diffusion_gemma_text",),
    in_layers=KEYS_ARE_VALUES,
    variants=(),
    defaults={"attention_k_eq_v": None},
)

EMBEDDING_GEMMA2 = GEMMA4.but(
    name="embedding_gemma2",
    model_types=("embedding_gemma2_text",),
    outputs=None,
    variants=(),
    defaults={
        "hidden_size": 512, "num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_global_key_value_heads": 1, "attention_k_eq_v": None, "max_position_embeddings": 262144,
        "tie_word_embeddings": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
)  # fmt: skip

GEMMAS = (GEMMA3N, GEMMA4, GEMMA4_UNIFIED, DIFFUSION_GEMMA, EMBEDDING_GEMMA2)
