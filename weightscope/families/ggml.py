"""Rows of GGUF: what converting each architecture to ggml's format does to its names, its matrices and its config."""

from collections.abc import Collection
from typing import Any

import numpy as np

from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.cells import Gguf
from weightscope.families.ggml_order import HALVES, in_groups, less_one, turned

# ggml's names of modules in llama's line.
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AROUND_BOTH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = dict.fromkeys(
    ("model.norm", "input_layernorm", *AROUND_BOTH.values(), "self_attn.q_norm", "self_attn.k_norm"), less_one
)
OF_27_BILLION = (46, 62)  # layers of the largest Gemma 2 and Gemma 3
DENSE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def gemma_scalar(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """query_pre_attn_scalar: no key has it. As in llama.cpp, the head's width, but d / H in the largest."""
    own = keys.inside("own")
    heads, d = own.size("attention.head_count"), own.size("embedding_length")
    head_dim = own.size("attention.key_length", default=d // heads)
    scalar = d / heads if own.get("block_count") in OF_27_BILLION else head_dim
    softcap = own.get("attn_logit_softcapping")
    return {"query_pre_attn_scalar": scalar} | ({} if softcap is None else {"attn_logit_softcapping": softcap})


def stablelm_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Where the network reads; norms of queries and keys are stored in another way there."""
    if "attn_q_norm.weight" in names:
        raise CheckpointError("has norms of queries and keys, which are not read of this architecture", file=keys.file)
    return {"use_parallel_residual": keys.inside("own").get("use_parallel_residual")}


def granite_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """What multiplies scores and embeddings."""
    own = keys.inside("own")
    scales = {"attention_multiplier": own.get("attention.scale"), "embedding_multiplier": own.get("embedding_scale")}
    return {key: float(str(np.float32(scale))) for key, scale in scales.items() if isinstance(scale, float)}


def olmo2_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Nothing more; but OLMo 3 is called olmo2 there too, and turns otherwise in layers that see a window."""
    if keys.inside("own").get("attention.sliding_window") is not None:
        raise CheckpointError("has layers that see a window, as OLMo 3; such files are not read", file=keys.file)
    return {}


def falcon_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Which of Falcon's layouts it is: no key says so, the norms and the number of key-value heads do."""
    kv_heads, two = keys.inside("own").get("attention.head_count_kv"), "attn_norm_2.weight" in names
    if not two and kv_heads in (None, 1):
        return {"new_decoder_architecture": False, "multi_query": True}
    return {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": 1 + two}


def mpt_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The bound of queries, keys and values."""
    return {"attn_config": {"clip_qkv": keys.inside("own").get("attention.clamp_kqv")}}


def bert_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Nothing more; but RoBERTa and others are called bert there too, and their position rows are other ones."""
    if keys.get("tokenizer.ggml.model") != "bert":
        raise CheckpointError("is an encoder with other tokens than BERT's; such files are not read", file=keys.file)
    return {}


LLAMA = Gguf("llama", MODULES, HALVES)  # Mistral's files say llama too: to ggml they are the same
QWEN2 = Gguf("qwen2", MODULES)
QWEN2_MOE = Gguf("qwen2moe", MODULES, experts=True)
QWEN3 = Gguf("qwen3", MODULES)
QWEN3_MOE = Gguf("qwen3moe", MODULES, experts=True)
GEMMA = Gguf("gemma", MODULES, GEMMA_NORMS | {"post_attention_layernorm": less_one})
GEMMA2 = Gguf("gemma2", MODULES | AROUND_BOTH, GEMMA_NORMS, gemma_scalar)
GEMMA3 = Gguf("gemma3", MODULES | AROUND_BOTH, GEMMA_NORMS, gemma_scalar)
GRANITE = Gguf("granite", MODULES, HALVES, granite_config)
SMOLLM3 = Gguf("smollm3", MODULES, HALVES)
OLMO2 = Gguf(
    "olmo2",
    MODULES | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    config=olmo2_config,
)
PHI2 = Gguf(
    "phi2",
    MODULES | {
        "output_norm": "model.final_layernorm", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
)  # fmt: skip
PHI3 = Gguf("phi3", MODULES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
STABLELM = Gguf("stablelm", MODULES, config=stablelm_config)
STARCODER2 = Gguf("starcoder2", MODULES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
GPT2 = Gguf(
    "gpt2",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), turned),
)
GPT_NEOX = Gguf(
    "gptneox",
    {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        **DENSE,
    },
    {"attention.query_key_value": in_groups},
    lambda keys, names: {"use_parallel_residual": keys.inside("own").get("use_parallel_residual")},
)
BLOOM = Gguf(
    "bloom",
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        **DENSE,
    },
    {"self_attention.query_key_value": in_groups},
)
MPT = Gguf(
    "mpt",
    {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    config=mpt_config,
)
FALCON = Gguf(
    "falcon",
    {
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "attn_norm_2": "ln_attn",
        **DENSE,
    },
    {"self_attention.query_key_value": in_groups},
    falcon_config,
    {"attn_norm_2": {"attn_norm": "ln_mlp"}},
)
BERT = Gguf(
    "bert",
    {
        "token_embd": "bert.embeddings.word_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    config=bert_config,
)
