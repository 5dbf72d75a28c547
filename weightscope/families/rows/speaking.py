"""Decoders of LLaMA's kind within models that speak or listen, of codes of sound, and of bytes."""

from weightscope.families.cells import Biases, Inputs, Outputs, biases, layer_norm
from weightscope.families.family import When, default_scale
from weightscope.families.layouts import stacked
from weightscope.families.rope import Rope
from weightscope.families.rows.gpt import GPT2
from weightscope.families.rows.llama import LLAMA

CSM = LLAMA.but(
    name="csm",
    model_types=("csm",),
    prefixes=("backbone_model.", "model.", ""),
    rope=Rope(theta=5e5),
    inputs=Inputs(tokens="embed_tokens.embed_audio_tokens.weight"),
    outputs=None,
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
)  # fmt: skip

CSM_DEPTH = CSM.but(
    name="csm_depth",
    model_types=("csm_depth_decoder_model",),
    prefixes=("depth_decoder.model.", "model.", ""),
    inputs=Inputs(tokens="embed_tokens.weight", width="backbone_hidden_size"),
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 33, "backbone_hidden_size": 2048, "tie_word_embeddings": False,
    },
)  # fmt: skip

VOXTRAL_REALTIME = LLAMA.but(
    name="voxtral_realtime",
    model_types=("voxtral_realtime_text",),
    biases=Biases(),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072,
    },
)  # fmt: skip

KYUTAI = LLAMA.but(
    name="kyutai_speech_to_text",
    model_types=("kyutai_speech_to_text",),
    query="self_attn.q_proj.linear",
    key="self_attn.k_proj.linear",
    value="self_attn.v_proj.linear",
    output="self_attn.o_proj.linear",
    biases=Biases(),
    inputs=Inputs(tokens="embed_tokens.embed_tokens.weight"),
    defaults={
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 64,
        "rms_norm_eps": 1e-8, "max_position_embeddings": 750,
    },
)  # fmt: skip

MOSHI = KYUTAI.but(
    name="moshi",
    model_types=("moshi",),
    prefixes=("decoder.model.", "model.", ""),
    inputs=Inputs(tokens="embed_tokens.weight"),
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128, "max_position_embeddings": 3000,
    },
)  # fmt: skip

HIGGS_AUDIO = LLAMA.but(
    name="higgs_audio_v2",
    model_types=("higgs_audio_v2",),
    caveats=("tokens of audio pass a norm of their own, audio_input_layernorm; the matrices are those of text",),
    rope=Rope(theta=5e5),
    defaults={
        "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

BLT = LLAMA.but(
    name="blt",
    model_types=("blt_local_encoder", "blt_local_decoder"),
    biases=Biases(),
    rope=Rope(theta=5e5, interleaved=True),
    head_dim=(),
    outputs=None,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 24576},
)

BLT_GLOBAL = BLT.but(
    name="blt_global", model_types=("blt_global_transformer",), defaults={"max_position_embeddings": 4096}
)

BLT_PATCHER = BLT.but(
    name="blt_patcher", model_types=("blt_patcher",), rope__theta=1e4, defaults={"max_position_embeddings": 8192}
)

MIMI_ENCODER = LLAMA.but(
    name="mimi",
    model_types=("mimi", "mimi_encoder", "pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_encoder"),
    tower="encoder",
    prefixes=("encoder_transformer.", "encoder.encoder_transformer."),
    norm=layer_norm("input_layernorm"),
    output_scale="self_attn_layer_scale.scale",
    inputs=Inputs(),
    outputs=None,
    defaults={
        "norm_eps": 1e-5, "max_position_embeddings": 8000, "tie_word_embeddings": True,
    },
)  # fmt: skip

MIMI_DECODER = MIMI_ENCODER.but(
    model_types=("mimi", "mimi_decoder", "pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_decoder"),
    tower="decoder",
    prefixes=("decoder_transformer.", "decoder.decoder_transformer."),
)

BARK_FINE = GPT2.but(
    name="bark",
    model_types=("fine_acoustics",),
    gguf=None,
    tower="audio",
    prefixes=("fine_acoustics.", ""),
    layer="layers.{i}.",
    layout=stacked,
    transposed=(),
    query="attn.att_proj",
    key="attn.att_proj",
    value="attn.att_proj",
    output="attn.out_proj",
    biases=biases("bias", "bias"),
    norm=layer_norm("layernorm_1", eps=1e-5),
    inputs=Inputs(positions="position_embeds_layer.weight", more="the tokens of several codebooks"),
    outputs=None,
    scale=default_scale,
    keys={"n_positions": ("block_size",), "vocab_size": ("input_vocab_size",)},
    defaults={"bias": True},
)
BARK = BARK_FINE.but(
    model_types=("semantic", "coarse_acoustics"),
    tower="",
    prefixes=("semantic.", "coarse_acoustics.", ""),
    inputs=Inputs(tokens="input_embeds_layer.weight", positions="position_embeds_layer.weight"),
    outputs=Outputs(layer_norm("layernorm_final", eps=1e-5)),
    variants=(
        When(
            "bias", False,
            norm=layer_norm("layernorm_1", bias=False, eps=1e-5),
            outputs__norm=layer_norm("layernorm_final", bias=False, eps=1e-5),
        ),
    ),
)  # fmt: skip

POCKET = LLAMA.but(
    name="pocket_tts",
    model_types=("pocket_tts",),
    norm=layer_norm("input_layernorm"),
    outputs=None,
    defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 8192},
)

# As its runtime stores it: a Linear of thirds, in which neighbours turn together. So heads are not grouped.
PHONON = POCKET.but(
    name="gradium_phonon_tts",
    model_types=("gradium_phonon_tts",),
    layout=stacked,
    query="self_attn.in_proj",
    key="self_attn.in_proj",
    value="self_attn.in_proj",
    rope=Rope(interleaved=True),
    kv_heads=(),
)
PHONON_RUNTIME = PHONON.but(
    tower="text",
    prefixes=("flow_lm.transformer.",),
    output="self_attn.out_proj",
    norm=layer_norm("norm1"),
    inputs=Inputs(more="text, and a voice"),
)

CODE2WAV = LLAMA.but(
    name="qwen3_omni_moe_code2wav",
    model_types=("qwen3_omni_moe",),
    tower="code2wav",
    nested="code2wav_config",
    prefixes=("code2wav.pre_transformer.",),
    output_scale="self_attn_layer_scale.scale",
    inputs=Inputs(),
    outputs=None,
    defaults={
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8000,
    },
)  # fmt: skip

SPEAKING = (
    CSM, CSM_DEPTH, VOXTRAL_REALTIME, KYUTAI, MOSHI, HIGGS_AUDIO, BLT, BLT_GLOBAL, BLT_PATCHER, MIMI_ENCODER,
    MIMI_DECODER, BARK, BARK_FINE, POCKET, PHONON, PHONON_RUNTIME, CODE2WAV,
)  # fmt: skip
