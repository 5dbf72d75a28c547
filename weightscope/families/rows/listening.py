"""Encoders within models of language that hear, and what stands between them and the language: Q-Formers."""

from weightscope.families.cells import Biases, Inputs, Memory, layer_norm
from weightscope.families.config import Every
from weightscope.families.rope import Rope
from weightscope.families.rows.audio import WAV2VEC2
from weightscope.families.rows.encoders import BERT
from weightscope.families.rows.llama import LLAMA

# Whisper's encoder, its keys without biases.
WHISPER_LIKE = WAV2VEC2.but(
    name="whisper_like_encoder",
    model_types=(
        "qwen2_audio_encoder", "qwen2_5_omni_audio_encoder", "voxtral_encoder",
        "audioflamingo3_encoder",
    ),
    prefixes=("audio_tower.", ""),
    layer="layers.{i}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    biases=Biases(query=True, value=True, output=True),
    norm=layer_norm("self_attn_layer_norm", eps=1e-5),
    closing=None,
    keys={
        "n_layers": ("encoder_layers", "num_hidden_layers"),
        "n_heads": ("encoder_attention_heads", "num_attention_heads"),
    },
    variants=(),
)  # fmt: skip

WHISPER_LIKE_BIASED = WHISPER_LIKE.but(
    model_types=("qwen3_omni_moe_audio_encoder", "qwen3_asr_encoder"),
    biases=Biases(query=True, key=True, value=True, output=True),
)

GLM_ASR = LLAMA.but(
    name="glmasr_encoder",
    model_types=("glmasr_encoder",),
    biases=Biases(query=True, value=True, output=True),
    norm=layer_norm("input_layernorm", eps=1e-5),
    inputs=Inputs(),
    outputs=None,
    rope=Rope(fraction=0.5),
    defaults={"max_position_embeddings": 1500},
)

QFORMER = BERT.but(
    name="qformer",
    tower="decoder",
    model_types=("blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer"),
    prefixes=("qformer.", ""),
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    closing=layer_norm("output_query.LayerNorm"),
    inputs=Inputs(),
)

# Every so many layers, from what an image's or a sound's encoder gives.
QFORMER_CROSS = QFORMER.but(
    tower="cross",
    query="crossattention.attention.query",
    key="crossattention.attention.key",
    value="crossattention.attention.value",
    output="crossattention.output.dense",
    beside=("crossattention.output.LayerNorm",),
    memory=Memory(),
    layer_types=Every("cross_attention_frequency", 0, "cross_attention", "none"),
    attention_types=("cross_attention",),
    closing=None,
    defaults={"cross_attention_frequency": 2},
)

LISTENING = (WHISPER_LIKE, WHISPER_LIKE_BIASED, GLM_ASR, QFORMER, QFORMER_CROSS)
