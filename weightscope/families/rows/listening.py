"""Encoders within models of language that hear, and what stands between them and the language: Q-Formers."""

from weightscope.families.cells import Biases, Inputs, Memory, QkNorm, biases, layer_norm, rms_norm
from weightscope.families.config import Every
from weightscope.families.layouts import stacked
from weightscope.families.rope import Rope
from weightscope.families.rows.audio import WAV2VEC2
from weightscope.families.rows.encoders import BERT
from weightscope.families.rows.llama import LLAMA

# Whisper's encoder, its keys without biases.
WHISPER_LIKE = WAV2VEC2.but(
    name="whisper_like_encoder",
    model_types=(
        "qwen2_audio_encoder", "qwen2_5_omni_audio_encoder", "voxtral_encoder",
        "audioflamingo3_encoder", "moss_transcribe_diarize_audio",
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

VOXTRAL_REALTIME_ENCODER = GLM_ASR.but(
    name="voxtral_realtime_encoder",
    model_types=("voxtral_realtime_encoder",),
    norm=rms_norm("self_attn_layer_norm"),
    rope=Rope(),
    kv_heads=(),
    defaults={"rms_norm_eps": 1e-5, "head_dim": 64},
)

# Nemotron's: no biases but of the output.
NEMOTRON_DIARIZATION = GLM_ASR.but(
    name="nemotron3_diarization",
    model_types=("nemotron3_diarization_audio",),
    biases=biases(False, True),
    norm=layer_norm("layer_norm1", eps=1e-5),
    rope=Rope(fraction=1.0),
    defaults={"max_position_embeddings": 5000},
)

NEMOTRON_TRANSCRIBE = NEMOTRON_DIARIZATION.but(
    name="nemotron3_5_transcribe",
    model_types=("nemotron3_5_transcribe_asr_audio", "nemotron3_5_transcribe_word_timestamp"),
    qk_norm=QkNorm(centred=True, bias=True, eps=1e-5),
    rope=Rope(fraction=0.5),
)

# As they are published: Q, K and V in one tensor.
FUSED = {
    "layout": stacked, "query": "attn.w_qkv", "key": "attn.w_qkv", "value": "attn.w_qkv", "output": "attn.out_proj",
    "norm": layer_norm("norm1", eps=1e-5),
}  # fmt: skip
NEMOTRON_PUBLISHED_DIARIZATION = NEMOTRON_DIARIZATION.but(**FUSED)
NEMOTRON_PUBLISHED_TRANSCRIBE = NEMOTRON_TRANSCRIBE.but(
    **FUSED, qk_norm=QkNorm("attn.q_norm", "attn.k_norm", centred=True, bias=True, eps=1e-5)
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

LISTENING = (
    WHISPER_LIKE, WHISPER_LIKE_BIASED, GLM_ASR, VOXTRAL_REALTIME_ENCODER, NEMOTRON_DIARIZATION, NEMOTRON_TRANSCRIBE,
    NEMOTRON_PUBLISHED_DIARIZATION, NEMOTRON_PUBLISHED_TRANSCRIBE, QFORMER, QFORMER_CROSS,
)  # fmt: skip
