"""Decoders of LLaMA's kind within models that speak or listen, of codes of sound, and of bytes."""

from weightscope.families.cells import Biases, Inputs, layer_norm
from weightscope.families.rope import Rope
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
        "norm_eps": 1e-5, "rms_norm_eps": None, "max_position_embeddings": 8000, "tie_word_embeddings": True,
    },
)  # fmt: skip

MIMI_DECODER = MIMI_ENCODER.but(
    model_types=("mimi", "mimi_decoder", "pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_decoder"),
    tower="decoder",
    prefixes=("decoder_transformer.", "decoder.decoder_transformer."),
)

SPEAKING = (
    CSM, CSM_DEPTH, VOXTRAL_REALTIME, KYUTAI, MOSHI, HIGGS_AUDIO, BLT, BLT_GLOBAL, BLT_PATCHER, MIMI_ENCODER,
    MIMI_DECODER,
)  # fmt: skip
