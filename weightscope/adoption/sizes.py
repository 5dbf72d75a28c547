"""The sizes that tiny models get: two of each, in which no two numbers of one model are equal by accident."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """Sizes of one tiny model.

    Attributes
    ----------
    heads, groups, head_dim : int
        H query heads in G groups, r wide.
    free : int
        Width of the stream where a config says the heads' width itself; H r elsewhere.
    ffn, vocabulary, length : int
    rope, nope, value, q_rank, kv_rank : int
        Widths of a latent head's parts, and of its latents.
    window : int
    grid : int
        Patches along one side of an image.
    """

    heads: int
    groups: int
    head_dim: int
    free: int
    ffn: int
    vocabulary: int
    length: int
    rope: int
    nope: int
    value: int
    q_rank: int
    kv_rank: int
    window: int
    grid: int


SIZES = (
    Size(4, 2, 24, 80, 56, 151, 17, 8, 12, 10, 14, 18, 4, 4),
    Size(6, 3, 32, 120, 88, 173, 23, 16, 20, 28, 26, 38, 6, 6),
    Size(8, 4, 32, 160, 96, 173, 23, 16, 20, 28, 26, 38, 4, 8),  # where six heads do not go
)


@dataclass(frozen=True)
class Plan:
    """How boldly sizes are set apart: not every architecture can be built with all of them different."""

    free_width: bool
    grouped: bool
    filled: bool = False  # sizes that a config leaves open are given
    own_heads: bool = False  # heads are as wide as the architecture's own: sections of rotations stand in its code
    shrunk: bool = True


PLANS = (
    Plan(True, True), Plan(True, True, filled=True), Plan(False, True, filled=True), Plan(False, False, filled=True),
    Plan(True, True, filled=True, own_heads=True), Plan(False, False, filled=True, own_heads=True),
    Plan(False, False, shrunk=False),
)  # fmt: skip
LACKED: Mapping[
    str, Mapping[str, Any]
] = {  # by model_type or a key of the part: what a default config lacks and its model reads
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 28},
    "codec_nothink_id": {"spatial_merge_size": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGAZ": 9}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "kv_n_heads": {"rope_theta": 10000.0, "clip_qkv": 1.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
}
# By model_type of a part: widths of convolutions, which divide one another, and so large by default that no model of
# them is a tiny one.
CONVOLVED: Mapping[str, Mapping[str, Any]] = {
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 16},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "chameleon_vqgan": {"base_channels": 32, "latent_channels": 32},
    "rt_detr": {"encoder_in_channels": [16, 24, 32]},
    "rt_detr_v2": {"encoder_in_channels": [16, 24, 32]},
    "rt_detr_resnet": {
        "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "out_features": ["stage2", "stage3", "stage4"],
    },
    "mimi": {"upsample_groups": 8, "codebook_dim": 256},
    "mimi_decoder": {"upsample_groups": 8, "codebook_dim": 256},
}  # fmt: skip
FILLED: Mapping[str, Any] = {
    "head_dim": 0, "num_key_value_heads": 0, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 28, "moe_intermediate_size": 28, "moe_topk": 2, "mask_token_id": 3,
    "attn_layer_indices": [1], "prediction_length": 4, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 0,
}  # fmt: skip
