"""The tiny models that fixtures are made of: one line a variant that reads its tensors, norms or rotation differently.

A case is a model_type and what its config holds beyond sizes shared by all. `dialect` 4 says how transformers 4 spelled
the same; where it is missing, the two dialects differ in nothing that attention reads.
"""

from dataclasses import dataclass, field
from typing import Any

LLAMA = {
    "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 24, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MHA = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
BERT = MHA | {"type_vocab_size": 2}
VIT = {
    "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 12, "patch_size": 4, "num_channels": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
GPT = {"vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MLA = {
    "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 8,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 24,
    "max_position_embeddings": 16, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_kv": 6, "d_ff": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 24,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
TOWERS = {"text_config": TEXT, "vision_config": VIT, "projection_dim": 8}


def rope(kind: str, theta: float = 100.0, **more: Any) -> dict[str, Any]:
    """rope_parameters of transformers 5. A small base lets slow pairs matter within a dozen positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    Attributes
    ----------
    name : str
        The fixture's folder.
    model_type : str
    config : dict
    output : str
        Pattern of the modules whose outputs are the attention layers' outputs.
    length : int
        Tokens in the sequence.
    head : str
        Which of transformers' auto classes: "CausalLM", "MaskedLM" or "" for the bare model; or a class's own name.
    tower : str
        The tower that is looked at.
    inputs : dict
        What the model runs on where that is neither tokens nor an image: integers, or the shape of noise as a tuple.
    stream : str
        Pattern of the modules that hidden states enter, where the model hands out none.
    """

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    output: str = r"self_attn\.o_proj$"
    length: int = 9
    head: str = "CausalLM"
    tower: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    stream: str = ""


def vision(name: str, model_type: str, output: str, tower: str = "", **config: Any) -> Case:
    return Case(name, model_type, config or VIT, output, head="", tower=tower)


def patches(name: str, model_type: str, shape: tuple[int, ...], grid: list[int], head: str = "", **config: Any) -> Case:
    """A vision tower that takes the patches of an image one by one, of `shape` (n, ...), and the image's `grid`."""
    first = "hidden_states" if len(shape) == 2 and not head else "pixel_values"
    inputs = {first: shape, "grid_thw": [grid]}
    return Case(
        name, model_type, config, r"attn\.(out_)?proj$", head=head, inputs=inputs, stream=r"(blocks|layers)\.\d+$"
    )


def encoder(name: str, model_type: str, output: str = r"attention\.output\.dense$", **config: Any) -> Case:
    return Case(name, model_type, BERT | config, output, head="MaskedLM")


CASES = (
    Case("gpt2", "gpt2", GPT | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}, r"attn\.c_proj$"),
    Case(
        "gpt2_layer_scaled", "gpt2",
        GPT | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "scale_attn_by_inverse_layer_idx": True},
        r"attn\.c_proj$",
    ),
    Case(
        "gpt_neo", "gpt_neo",
        GPT | {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 16, "window_size": 4,
               "intermediate_size": 8, "attention_types": [[["global", "local"], 1]]},
        r"attention\.out_proj$",
    ),
    Case("gptj", "gptj", GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "rotary_dim": 4,
                                "n_inner": 8}, r"attn\.out_proj$"),
    Case("gpt_neox", "gpt_neox", MHA | {"hidden_size": 32} | rope("default", partial_rotary_factor=0.5),
         r"attention\.dense$"),
    Case("opt", "opt", MHA | {"ffn_dim": 8, "word_embed_proj_dim": 16}, r"self_attn\.out_proj$"),
    Case("opt_post_norm", "opt", MHA | {"ffn_dim": 8, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
         r"self_attn\.out_proj$"),
    Case("bloom", "bloom", GPT | {"hidden_size": 18, "n_layer": 2, "n_head": 6}, r"self_attention\.dense$"),
    Case("mpt", "mpt", GPT | {"d_model": 18, "n_heads": 6, "n_layers": 2, "max_seq_len": 16, "expansion_ratio": 1,
                              "attn_config": {"clip_qkv": 0.8}}, r"attn\.out_proj$"),
    Case("falcon_multi_query", "falcon", MHA | {"bias": True} | rope("default"), r"self_attention\.dense$"),
    Case("falcon_grouped", "falcon", MHA | {"new_decoder_architecture": True, "num_kv_heads": 2} | rope("default"),
         r"self_attention\.dense$"),
    Case("falcon_one_norm", "falcon",
         MHA | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1} | rope("default"),
         r"self_attention\.dense$"),
    Case("falcon_alibi", "falcon", MHA | {"multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
         r"self_attention\.dense$"),
    Case("llama", "llama", LLAMA | {"attention_bias": True}),
    Case("llama_llama3", "llama", LLAMA | {"hidden_size": 32} | rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)),
    Case("llama_linear", "llama", LLAMA | {"head_dim": 8} | rope("linear", factor=3.0)),
    Case("llama_dynamic", "llama", LLAMA | {"max_position_embeddings": 6} | rope("dynamic", factor=2.0), length=9),
    Case("llama_yarn", "llama", LLAMA | {"head_dim": 16, "max_position_embeddings": 4096} | rope(
        "yarn", factor=4.0, original_max_position_embeddings=1024)),
    Case("mistral", "mistral", LLAMA | {"sliding_window": 4, "head_dim": 6}),
    Case("mixtral", "mixtral", LLAMA | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    Case("granite", "granite", LLAMA | {"attention_multiplier": 0.37, "embedding_multiplier": 3.0}),
    Case("smollm3", "smollm3", LLAMA | {"no_rope_layers": [1, 0]}),
    Case("qwen2", "qwen2", LLAMA | rope("default")),
    Case("qwen2_moe", "qwen2_moe", LLAMA | EXPERTS | {"shared_expert_intermediate_size": 8}),
    Case("qwen3", "qwen3", LLAMA | {"head_dim": 6, "attention_bias": True}),
    Case("qwen3_moe", "qwen3_moe", LLAMA | EXPERTS),
    Case("qwen3_next", "qwen3_next", LLAMA | EXPERTS | {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8,
        "shared_expert_intermediate_size": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "attention_bias": True,
    } | rope("default", partial_rotary_factor=0.5)),
    Case("falcon_h1", "falcon_h1", LLAMA | {
        "attention_in_multiplier": 0.7, "key_multiplier": 1.7, "attention_out_multiplier": 0.6, "attention_bias": True,
        "mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_d_state": 4,
    } | rope("default")),
    Case("nemotron_h", "nemotron_h", {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"} | {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"], "head_dim": 6,
        "mamba_num_heads": 4, "mamba_head_dim": 4, "ssm_state_size": 4, "n_groups": 1,
    }, r"mixer\.o_proj$"),
    Case("gemma", "gemma", LLAMA | {"head_dim": 8}),
    Case("gemma2", "gemma2", LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
                                      "sliding_window": 4}),
    Case("gemma3", "gemma3_text", LLAMA | {
        "num_hidden_layers": 3, "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        },
    }),
    Case("gemma3_vision", "gemma3", {
        "text_config": LLAMA | {
            "head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": VIT, "mm_tokens_per_image": 1, "boi_token_index": 20, "eoi_token_index": 21,
        "image_token_index": 22,
    }, r"language_model.*self_attn\.o_proj$", head="ImageTextToText"),
    Case("gemma4", "gemma4_text", LLAMA | {
        "num_hidden_layers": 3, "head_dim": 6, "global_head_dim": 8, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    }),
    Case("mimo_v2_flash", "mimo_v2_flash", LLAMA | {
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "v_head_dim": 5, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"],
        "sliding_window": 4, "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("sliding_attention", 50.0), ("full_attention", 100.0))
        },
    }),
    Case("muse_spark", "muse_spark_text", LLAMA | {
        "head_dim": 6, "mlp_layer_types": ["dense", "dense"], "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4, "layer_rope_theta": [100.0, 0], "qk_scale_factor": 1.5,
    } | rope("default"), head=""),
    Case("phi", "phi", LLAMA | {"hidden_size": 32} | rope("default", partial_rotary_factor=0.5), r"self_attn\.dense$"),
    Case("phi_qk_norm", "phi", LLAMA | {"qk_layernorm": True} | rope("default", partial_rotary_factor=0.5),
         r"self_attn\.dense$"),
    Case("phi3", "phi3", LLAMA | {"original_max_position_embeddings": 64}),
    Case("phi3_longrope", "phi3", LLAMA | {"max_position_embeddings": 64, "original_max_position_embeddings": 8} | rope(
        "longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 5.0])),
    Case("phi3_longrope_short", "phi3",
         LLAMA | {"max_position_embeddings": 64, "original_max_position_embeddings": 8} | rope(
             "longrope", short_factor=[1.0, 1.5], long_factor=[2.0, 5.0]), length=7),
    Case("olmo", "olmo", LLAMA | {"clip_qkv": 0.8}),
    Case("olmo2", "olmo2", LLAMA | {"attention_bias": True}),
    Case("olmo3", "olmo3", LLAMA | {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                               "original_max_position_embeddings": 16},
        },
    }),
    Case("stablelm", "stablelm", LLAMA | {"hidden_size": 32, "use_qkv_bias": True}
         | rope("default", partial_rotary_factor=0.5)),
    Case("stablelm_qk_norm", "stablelm", LLAMA | {"qk_layernorm": True} | rope("default", partial_rotary_factor=0.5)),
    Case("starcoder2", "starcoder2", LLAMA | rope("default")),
    Case("cohere", "cohere", LLAMA | rope("default")),
    Case("cohere_qk_norm", "cohere", LLAMA | {"use_qk_norm": True, "attention_bias": True} | rope("default")),
    Case("glm", "glm", LLAMA | {"head_dim": 8, "attention_bias": True} | rope("default", partial_rotary_factor=0.5)),
    Case("glm4", "glm4", LLAMA | {"head_dim": 8} | rope("default", partial_rotary_factor=0.5)),
    Case("glm4_moe", "glm4_moe", LLAMA | EXPERTS | {
        "head_dim": 8, "use_qk_norm": True, "attention_bias": True, "n_routed_experts": 2, "first_k_dense_replace": 2,
    } | rope("default", partial_rotary_factor=0.5)),
    Case("sarvam_moe", "sarvam_moe", LLAMA | EXPERTS | {
        "head_dim": 8, "n_routed_experts": 2, "first_k_dense_replace": 2,
    } | rope("default")),
    Case("exaone", "exaone", LLAMA | rope("default")),
    Case("lara_mini", "lara_mini", LLAMA | EXPERTS | {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "head_dim": 8, "sliding_window": 4, "shared_expert_intermediate_size": 8, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    } | rope("default")),
    Case("gpt_oss", "gpt_oss", LLAMA | {
        "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4,
    } | rope("yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=32)),
    Case("deepseek_v2", "deepseek_v2", LLAMA | MLA | {"q_lora_rank": 6, "attention_bias": True} | rope("default")),
    Case("deepseek_v2_lite", "deepseek_v2", LLAMA | MLA | {"q_lora_rank": None} | rope("default")),
    Case("deepseek_v3", "deepseek_v3", LLAMA | MLA | {"q_lora_rank": 6, "n_group": 1, "topk_group": 1} | rope(
        "yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=8)),
    Case("deepseek_v3_halves", "deepseek_v3", LLAMA | MLA | {
        "q_lora_rank": 6, "n_group": 1, "topk_group": 1, "rope_interleave": False} | rope("default")),
    Case("sarvam_mla", "sarvam_mla", LLAMA | MLA | rope(
        "yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=8)),
    Case("llama4", "llama4_text", LLAMA | {
        "head_dim": 8, "no_rope_layers": [1, 0], "floor_scale": 4, "num_local_experts": 2, "intermediate_size_mlp": 8,
    } | rope("default")),
    Case("hunyuan", "hunyuan_v1_dense", LLAMA | {"head_dim": 6} | rope("dynamic", alpha=5.0, factor=1.0)),
    Case("nanochat", "nanochat", LLAMA | {"hidden_size": 32} | rope("yarn", factor=4.0,
                                                                   original_max_position_embeddings=32)),
    Case("bitnet", "bitnet", LLAMA | rope("default")),
    Case("afmoe", "afmoe", LLAMA | EXPERTS | {
        "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "num_shared_experts": 1,
    } | rope("default")),
    Case("laguna", "laguna", LLAMA | EXPERTS | {
        "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "shared_expert_intermediate_size": 8,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    }),
    Case("granite_swa", "granite_swa", LLAMA | {
        "attention_multiplier": 0.37, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"],
        "layer_rope_theta": [0, 50.0],
    } | rope("default")),
    Case("beam", "beam", LLAMA | EXPERTS | {
        "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    }),
    Case("diffllama", "diffllama", LLAMA | {"head_dim": 6} | rope("default")),
    encoder("bert", "bert"),
    encoder("roberta", "roberta", pad_token_id=1),
    encoder("electra", "electra", embedding_size=8),
    Case("distilbert", "distilbert", GPT | {"dim": 16, "hidden_dim": 8, "n_layers": 2, "n_heads": 4,
                                            "max_position_embeddings": 16}, r"attention\.out_lin$", head="MaskedLM"),
    encoder("deberta", "deberta", position_biased_input=True),
    Case("deberta_relative", "deberta", BERT | {
        "type_vocab_size": 0, "position_biased_input": False, "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
        r"attention\.output\.dense$", head="MaskedLM"),
    encoder("deberta_v2", "deberta-v2", embedding_size=8),
    Case("deberta_v3_relative", "deberta-v2", BERT | {
        "type_vocab_size": 0, "position_biased_input": False, "relative_attention": True, "share_att_key": True,
        "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
        r"attention\.output\.dense$", head="MaskedLM"),
    Case("mpnet", "mpnet", BERT | {"relative_attention_num_buckets": 32, "pad_token_id": 1}, r"attn\.o$",
         length=12, head="MaskedLM"),
    Case("albert", "albert", BERT | {"embedding_size": 8, "inner_group_num": 1}, r"attention\.dense$",
         head="MaskedLM"),
    Case("albert_two_groups", "albert", BERT | {
        "embedding_size": 8, "inner_group_num": 1, "num_hidden_layers": 3, "num_hidden_groups": 2},
        r"attention\.dense$", head="MaskedLM"),
    Case("modernbert", "modernbert", {
        **MHA, "num_hidden_layers": 4, "global_attn_every_n_layers": 3, "local_attention": 4, "cls_token_id": 1,
        "sep_token_id": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    }, r"attn\.Wo$", head="MaskedLM"),
    Case("modernbert_biases", "modernbert", MHA | {
        "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "norm_bias": True, "attention_bias": True,
    }, r"attn\.Wo$", head="MaskedLM"),
    Case("codegen", "codegen", GPT | {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 16, "rotary_dim": 2,
                                      "n_inner": 8}, r"attn\.out_proj$"),
    Case("xglm", "xglm", GPT | {"d_model": 16, "attention_heads": 4, "num_layers": 2, "ffn_dim": 8,
                                "max_position_embeddings": 16, "pad_token_id": 5}, r"self_attn\.out_proj$"),
    encoder("squeezebert", "squeezebert", r"post_attention\.conv1d$", embedding_size=16, q_groups=2, k_groups=4,
            v_groups=8, post_attention_groups=2, intermediate_groups=1, output_groups=1),
    encoder("esm", "esm", position_embedding_type="rotary", token_dropout=True, mask_token_id=23, pad_token_id=1),
    Case("esmc", "esmc", LLAMA | {"num_key_value_heads": 4, "attention_bias": True}, head=""),
    vision("vit", "vit", r"attention\.(output\.dense|o_proj)$"),
    vision("dinov2", "dinov2", r"layer_scale1$"),
    vision("dinov2_with_registers", "dinov2_with_registers", r"layer_scale1$", **VIT, num_register_tokens=3),
    vision("dinov3_vit", "dinov3_vit", r"layer_scale1$", **VIT, num_register_tokens=3),
    patches("qwen3_vl_vision", "qwen3_vl_vision", (16, 4), [1, 4, 4], depth=2, hidden_size=16, num_heads=2,
            intermediate_size=8, in_channels=1, patch_size=2, temporal_patch_size=1, num_position_embeddings=16,
            out_hidden_size=8, deepstack_visual_indexes=[]),
    patches("kimi_k25_vision", "kimi_k25_vision", (16, 3, 2, 2), [1, 4, 4], num_hidden_layers=2, hidden_size=16,
            num_attention_heads=2, intermediate_size=8, patch_size=2, pos_emb_height=4, pos_emb_width=4),
    patches("minimax_m3_vl_vision", "minimax_m3_vl_vision", (16, 8), [1, 4, 4], "MiniMaxM3VLVisionModel",
            num_hidden_layers=2, hidden_size=28, num_attention_heads=2, intermediate_size=8, num_channels=1,
            patch_size=2),
    Case("llama4_vision", "llama4_vision_model", VIT | {
        "image_size": 16, "projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8,
        "intermediate_size": 64,
    }, r"self_attn\.o_proj$", head="Llama4VisionModel", stream=r"layers\.\d+$"),
    Case("gemma4_vision", "gemma4_vision", VIT | {
        "head_dim": 8, "hidden_size": 12, "num_key_value_heads": 1, "patch_size": 2, "position_embedding_size": 8,
        "pooling_kernel_size": 1,
    } | rope("axial"), r"self_attn\.o_proj$", head="", stream=r"layers\.\d+$", inputs={
        "pixel_values": (1, 9, 12), "pixel_position_ids": [[[i % 3, i // 3] for i in range(9)]]}),
    Case("videomae", "videomae", VIT | {"num_frames": 2, "tubelet_size": 2, "image_size": 8},
         r"attention\.output\.dense$", head="", inputs={"pixel_values": (1, 2, 1, 8, 8)}),
    Case("sam_vision", "sam_vision_model", VIT | {"output_channels": 8, "global_attn_indexes": [0, 1]},
         r"attn\.proj$", head="SamVisionModel", stream=r"layers\.\d+$"),
    vision("beit", "beit", r"attention\.o_proj$", **VIT, use_relative_position_bias=True),
    Case("swin", "swin", {  # one stage, and its window the whole image
        "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 3, "image_size": 12, "patch_size": 4,
        "num_channels": 1, "mlp_ratio": 1.0,
    }, r"attention\.o_proj$", head="", stream=r"blocks\.\d+$"),
    Case("sam3_vit", "sam3_vit_model",
         VIT | {"pretrain_image_size": 12, "window_size": 2, "global_attn_indexes": [0, 1]},
         r"attention\.o_proj$", head="", stream=r"layers\.\d+$"),
    Case("step3p5_vision", "step3p5_vision", VIT, r"self_attn\.out_proj$", head="Step3p7VisionModel",
         stream=r"layers\.\d+$"),
    Case("pixtral", "pixtral", VIT, r"attention\.o_proj$", head="", stream=r"layers\.\d+$"),
    Case("granite_speech", "granite_speech_encoder", {  # a whole block
        "num_layers": 2, "hidden_dim": 16, "num_heads": 2, "dim_head": 6, "context_size": 9, "max_pos_emb": 12,
        "input_dim": 4, "output_dim": 5, "feedforward_mult": 1, "conv_kernel_size": 3,
    }, r"attn\.to_out$", head="GraniteSpeechCTCEncoder", inputs={"hidden_states": (1, 9, 4)},
        stream=r"layers\.\d+\.attn$"),
    Case("t5_encoder", "t5", T5, r"encoder.*SelfAttention\.o$", length=13, head="", tower="encoder"),
    Case("t5_decoder", "t5", T5, r"decoder.*SelfAttention\.o$", length=13, head="", tower="decoder"),
    Case("clip_text", "clip", TOWERS, r"text_model.*out_proj$", head="", tower="text"),
    Case("clip_vision", "clip", TOWERS, r"vision_model.*self_attn\.out_proj$", head="", tower="vision"),
    Case("siglip_text", "siglip", TOWERS, r"text_model.*self_attn\.out_proj$", head="", tower="text"),
    Case("siglip_vision", "siglip", TOWERS, r"vision_model.*self_attn\.out_proj$", head="", tower="vision"),
)  # fmt: skip


def case_of(name: str) -> Case:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
