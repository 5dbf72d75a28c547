"""Multi-head latent attention since DeepSeek V3: other rotations, indexers, gates and scales."""

from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Gate, rms_norm
from weightscope.families.config import Every, ModelConfig, all_full
from weightscope.families.family import In
from weightscope.families.rope import Rope
from weightscope.families.rows.llama import DEEPSEEK_V3


def in_turn(config: Config, n_layers: int) -> tuple[str, ...]:
    """LongCat: each layer attends twice."""
    return ("first", "second") * (n_layers // 2)


def half(config: ModelConfig, layer: int) -> int:
    """Two layers of attention stand under each index."""
    return layer // 2


def of_pair(which: int) -> dict[str, Any]:
    """The cells that name modules, of the first or second attention of a layer."""
    stem = f"self_attn.{which}."
    return {
        "query": stem + "q_a_proj", "key": stem + "kv_a_proj_with_mqa", "value": stem + "kv_b_proj",
        "output": stem + "o_proj", "norm": rms_norm(f"input_layernorm.{which}"),
        "others": (stem + "q_b_proj", stem + "q_a_layernorm", stem + "kv_a_layernorm"),
    }  # fmt: skip


NEIGHBOURS = Rope(interleaved=True, start_key="qk_nope_head_dim", dims_key="qk_rope_head_dim")
HALVES = Rope(start_key="qk_nope_head_dim", dims_key="qk_rope_head_dim")

YOUTU = DEEPSEEK_V3.but(
    name="youtu",
    model_types=("youtu",),
    defaults={"max_position_embeddings": 131072, "tie_word_embeddings": True},
)

AXK1 = DEEPSEEK_V3.but(name="axk1", model_types=("axk1",), defaults={"max_position_embeddings": 32768})

GLM4_MOE_LITE = DEEPSEEK_V3.but(
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    rope__fraction=1.0,
    defaults={
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
)  # fmt: skip

DEEPSEEK_V32 = DEEPSEEK_V3.but(
    name="deepseek_v32",
    model_types=("deepseek_v32",),
    rope=NEIGHBOURS,
    choosing=("self_attn.indexer",),
    defaults={"max_position_embeddings": 163840},
)

GLM_MOE_DSA = DEEPSEEK_V32.but(
    name="glm_moe_dsa",
    model_types=("glm_moe_dsa",),
    defaults={
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    },
)  # fmt: skip

MINICPM3 = DEEPSEEK_V3.but(
    name="minicpm3",
    model_types=("minicpm3",),
    rope=HALVES,
    inputs__scale="scale_emb",
    defaults={
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "tie_word_embeddings": True, "scale_emb": 12,
    },
)  # fmt: skip

HY_V4 = DEEPSEEK_V32.but(
    name="hy_v4",
    model_types=("hy_v4",),
    rope=HALVES,
    gate=Gate("self_attn.linear_gate"),
    sinks="self_attn.learnable_sink_param",
    caveats=("what enters a layer is a mix of several residual streams, made by weights of its own",),
    defaults={
        "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144
    },
)  # fmt: skip

BAILING_HYBRID = DEEPSEEK_V3.but(
    name="bailing_hybrid",
    model_types=("bailing_hybrid",),
    rope=Rope(interleaved=True, theta=6e6, start_key="qk_nope_head_dim", dims_key="qk_rope_head_dim"),
    query="attention.q_proj",
    key="attention.kv_a_proj_with_mqa",
    value="attention.kv_b_proj",
    output="attention.dense",
    others=("attention.kv_a_layernorm",),
    gate=Gate("attention.g_proj"),
    layer_types=Every("layer_group_size", -1, "full_attention", "linear_attention"),
    attention_types=("full_attention",),
    defaults={"q_lora_rank": None, "layer_group_size": 6, "max_position_embeddings": 262144},
)

LONGCAT_FLASH = DEEPSEEK_V3.but(
    name="longcat_flash",
    model_types=("longcat_flash",),
    **of_pair(0),
    in_layers=(In("second", **of_pair(1)),),
    rope=Rope(interleaved=True, theta=1e7, start_key="qk_nope_head_dim", dims_key="qk_rope_head_dim"),
    latents_scaled=True,
    attentions=2,
    keys={"n_layers": ("num_layers",)},
    layer_types=in_turn,
    stored_layer=half,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
)

AXK2 = DEEPSEEK_V32.but(
    name="axk2",
    model_types=("axk2",),
    defaults={
        "kv_lora_rank": 128, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "max_position_embeddings": 131072,
    },
    refused="its input norm, which a network of the normalised token gates: no matrix on the stream holds that",
)  # fmt: skip

MISTRAL_LARGE4 = DEEPSEEK_V32.but(
    name="mistral_large4",
    model_types=("mistral_large4_text",),
    defaults={"qk_nope_head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576},
    refused="temperatures by position that each head has learned, and keys and values of other layers",
)

MISTRAL_LARGE4_RELEASED = MISTRAL_LARGE4.but(
    tower="text",
    prefixes=("language_model.",),
    query="attention.wq",
    key="attention.wkv_a_with_mqa",
    value="attention.wkv_b",
    output="attention.wo",
)

DOTS3_NOTE = DEEPSEEK_V32.but(
    name="dots3_note",
    model_types=("dots3_note_text",),
    refused="a norm of the rotary key that all heads share, beside the latent's",
)

DEEPSEEK_V4 = DEEPSEEK_V32.but(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    head_dim=("head_dim",),
    defaults={"q_lora_rank": 1024, "head_dim": 512, "max_position_embeddings": 1048576},
    layer_types=all_full,
    refused="keys that are values too and turn with them, beside keys compressed of many tokens: no score of a pair",
)

LATENT_DECODERS = (
    YOUTU, AXK1, GLM4_MOE_LITE, DEEPSEEK_V32, GLM_MOE_DSA, MINICPM3, HY_V4, BAILING_HYBRID, LONGCAT_FLASH, AXK2,
    DEEPSEEK_V4, MISTRAL_LARGE4, MISTRAL_LARGE4_RELEASED, DOTS3_NOTE,
)  # fmt: skip
