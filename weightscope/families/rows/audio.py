"""Encoders of sound, and of series of numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weightscope.attention.maps import Affine
from weightscope.attention.position_bias import BiasGate
from weightscope.checkpoint.config import Config
from weightscope.families.cells import Inputs, biases, layer_norm, rms_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, When
from weightscope.families.layouts import separate
from weightscope.families.odd_layouts import keys_with_values, scaled_by_dimension
from weightscope.families.relative import Listed, Projected, SharedTable, near_keys, near_values, within_blocks
from weightscope.families.rope import Rope
from weightscope.families.rows.bart import BART_CROSS, BART_DECODER
from weightscope.families.rows.encoders import DEBERTA_V2
from weightscope.families.rows.gpt import unscaled
from weightscope.families.rows.llama import LLAMA, QWEN3
from weightscope.families.rows.t5 import Distances
from weightscope.families.tensors import LayerTensors

ROTATED_INPUT = "rotary positions: what enters attention is rotated, before queries and keys are made of it"

WAV2VEC2 = Family(
    name="wav2vec2",
    model_types=("wav2vec2", "hubert", "unispeech", "unispeech-sat", "data2vec-audio", "sew"),
    prefixes=("wav2vec2.", "hubert.", ""),
    layer="encoder.layers.{i}.",
    layout=separate,
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.out_proj",
    biases=biases(True, True),
    norm=None,
    closing=layer_norm("final_layer_norm"),
    inputs=Inputs(),
    variants=(When("do_stable_layer_norm", True, norm=layer_norm("layer_norm"), closing=None),),
    defaults={"layer_norm_eps": 1e-5, "do_stable_layer_norm": False},
)


def gate_of_bias(tensors: LayerTensors, config: ModelConfig) -> BiasGate:
    """WavLM's: a Linear of each head's part of the token, the same for all heads, whose outputs add up to two."""
    h, r, module = config.n_heads, config.head_dim, "attention.gru_rel_pos_linear"
    own = tensors.read(module + ".weight", (8, r)).reshape(2, 4, r).sum(axis=1).T  # (r, 2)
    bias = tensors.read(module + ".bias", (8,)).reshape(2, 4).sum(axis=1)
    w = np.einsum("hg,ro->hgro", np.eye(h, dtype=own.dtype), own).reshape(h, h * r, 2)
    factor = tensors.read("attention.gru_rel_pos_const", (1, h, 1, 1)).ravel()
    return BiasGate(Affine(w, np.tile(bias, (h, 1))), factor)


WAVLM = WAV2VEC2.but(
    name="wavlm",
    model_types=("wavlm",),
    prefixes=("wavlm.", ""),
    additive=Distances(WAV2VEC2.layer, table="attention.rel_attn_embed", sizes=("num_buckets", "max_bucket_distance")),
    additive_gate=gate_of_bias,
    shared=(f"{WAV2VEC2.layer.format(i=0)}attention.rel_attn_embed.weight",),
    others=("attention.gru_rel_pos_linear",),
    loose=("attention.gru_rel_pos_const",),
    defaults={"num_buckets": 320, "max_bucket_distance": 800},
)

SPEECHT5_ENCODER = WAV2VEC2.but(
    name="speecht5",
    model_types=("speecht5",),
    tower="encoder",
    prefixes=("speecht5.encoder.wrapped_encoder.", "encoder.wrapped_encoder.", "wrapped_encoder."),
    layer="layers.{i}.",
    relative=SharedTable("embed_positions.pe_k.weight", "encoder_max_relative_position"),
    shared=("embed_positions.pe_k.weight",),
    keys={"n_layers": ("encoder_layers",), "n_heads": ("encoder_attention_heads",)},
    inputs=Inputs(more="what a prenet makes of sound or of text"),
    variants=(),
    defaults={"encoder_max_relative_position": 160},
)
SPEECHT5_DECODER, SPEECHT5_CROSS = (
    row.but(
        name="speecht5",
        model_types=("speecht5",),
        prefixes=("speecht5.decoder.wrapped_decoder.", "decoder.wrapped_decoder.", "wrapped_decoder."),
        layer="layers.{i}.",
        norm=None,
        closing=layer_norm("final_layer_norm"),
        inputs=Inputs(more="what a prenet makes of sound or of text"),
        outputs=None,
        variants=(),
        defaults={"layer_norm_eps": 1e-5},
    )
    for row in (BART_DECODER, BART_CROSS)
)

VITS = WAV2VEC2.but(
    name="vits",
    model_types=("vits",),
    prefixes=("text_encoder.encoder.", "encoder.", ""),
    layer="layers.{i}.",
    biases=biases("use_bias", "use_bias"),
    relative=near_keys,
    relative_values=near_values,
    loose=("attention.emb_rel_k", "attention.emb_rel_v"),
    inputs=Inputs(more="the sounds of a language, scaled"),
    variants=(When("window_size", 0, relative=None, relative_values=None, loose=()),),
    defaults={"use_bias": True, "window_size": 4},
)

WAV2VEC2_CONFORMER = WAV2VEC2.but(
    name="wav2vec2-conformer",
    model_types=("wav2vec2-conformer",),
    prefixes=("wav2vec2_conformer.", ""),
    query="self_attn.linear_q",
    key="self_attn.linear_k",
    value="self_attn.linear_v",
    output="self_attn.linear_out",
    norm=layer_norm("self_attn_layer_norm", eps=1e-5),
    variants=(
        When(
            "position_embeddings_type", "relative",
            relative=Projected("self_attn.linear_pos", "self_attn.pos_bias_u", "self_attn.pos_bias_v"),
            others=("self_attn.linear_pos",),
            query_bias="self_attn.pos_bias_u",
            loose=("self_attn.pos_bias_u", "self_attn.pos_bias_v"),
        ),
        When("position_embeddings_type", "rotary", refused=ROTATED_INPUT),
    ),
    defaults={"position_embeddings_type": "relative"},
)  # fmt: skip

WAV2VEC2_BERT = WAV2VEC2_CONFORMER.but(
    name="wav2vec2-bert",
    model_types=("wav2vec2-bert",),
    prefixes=("wav2vec2_bert.", ""),
    norm=layer_norm("self_attn_layer_norm"),
    variants=(
        *WAV2VEC2_CONFORMER.variants,
        When(
            "position_embeddings_type", "relative_key",
            relative=Listed(
                "self_attn.distance_embedding", "left_max_position_embeddings", "right_max_position_embeddings"
            ),
            others=("self_attn.distance_embedding",),
        ),
    ),
    defaults={
        "position_embeddings_type": "relative_key",
        "left_max_position_embeddings": 64,
        "right_max_position_embeddings": 8,
    },
)  # fmt: skip

SEW_D = DEBERTA_V2.but(
    name="sew-d",
    model_types=("sew-d",),
    prefixes=("sew_d.encoder.", "encoder."),
    inputs=Inputs(),
    defaults={"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
)

SEAMLESS_SPEECH = WAV2VEC2_CONFORMER.but(
    name="seamless_m4t",
    model_types=("seamless_m4t",),
    tower="speech",
    prefixes=("speech_encoder.",),
    keys={"n_layers": ("speech_encoder_layers",), "n_heads": ("speech_encoder_attention_heads",)},
)

SEAMLESS_V2_SPEECH = WAV2VEC2_BERT.but(
    name="seamless_m4t_v2",
    model_types=("seamless_m4t_v2",),
    tower="speech",
    prefixes=("speech_encoder.",),
    norm=layer_norm("self_attn_layer_norm", eps=1e-5),
    keys=SEAMLESS_SPEECH.keys,
)

# After the encoder: each of its layers halves the sequence, or more, before its attention.
SEAMLESS_ADAPTER, SEAMLESS_V2_ADAPTER = (
    row.but(
        tower="adapter",
        layer="adapter.layers.{i}.",
        norm=None,
        variants=(),
        keys={"n_layers": ("num_adapter_layers",), "n_heads": ("speech_encoder_attention_heads",)},
        inputs=Inputs(more="what a convolution of a normalised stream and its gate make of it, over several tokens"),
        caveats=(
            "a norm, a convolution over tokens and its gate stand before queries, keys and values: x is their output",
        ),
    )
    for row in (SEAMLESS_SPEECH, SEAMLESS_V2_SPEECH)
)


def of_its_own(stem: str) -> Callable[[Config], Mapping[str, Any]]:
    """FastSpeech2's sizes of one half: what the object of that name says, and the config's own keys do not."""

    def derived(config: Config) -> Mapping[str, Any]:
        own = config.inside(f"{stem}_config")
        return {
            f"{stem}_{key}": own[key] for key in ("layers", "num_attention_heads", "normalize_before") if key in own
        }

    return derived


FASTSPEECH2_ENCODER = WAV2VEC2_CONFORMER.but(
    name="fastspeech2_conformer",
    model_types=("fastspeech2_conformer",),
    tower="encoder",
    prefixes=("encoder.", "model.encoder."),
    layer="conformer_layers.{i}.",
    keys={"n_layers": ("encoder_layers",), "n_heads": ("encoder_num_attention_heads",)},
    variants=(
        *WAV2VEC2_CONFORMER.variants,
        When("encoder_normalize_before", False, norm=None),
    ),
    derived=of_its_own("encoder"),
    defaults={"encoder_normalize_before": False},
)

FASTSPEECH2_DECODER = FASTSPEECH2_ENCODER.but(
    tower="decoder",
    prefixes=("decoder.", "model.decoder."),
    keys={"n_layers": ("decoder_layers",), "n_heads": ("decoder_num_attention_heads",)},
    variants=(
        *WAV2VEC2_CONFORMER.variants,
        When("decoder_normalize_before", False, norm=None),
    ),
    derived=of_its_own("decoder"),
    defaults={"decoder_normalize_before": False},
)

PARAKEET = LLAMA.but(
    name="parakeet_encoder",
    model_types=("parakeet_encoder", "nemotron_asr_streaming_encoder"),
    prefixes=("encoder.", ""),
    norm=layer_norm("norm_self_att", eps=1e-5),
    inputs=Inputs(),
    outputs=None,
    rope=None,
    relative=Projected("self_attn.relative_k_proj", "self_attn.bias_u", "self_attn.bias_v"),
    others=("self_attn.relative_k_proj",),
    query_bias="self_attn.bias_u",
    loose=("self_attn.bias_u", "self_attn.bias_v"),
    defaults={"attention_bias": True, "max_position_embeddings": 5000},
)

GRANITE_SPEECH = WAV2VEC2.but(
    name="granite_speech",
    model_types=("granite_speech_encoder", "granite_speech_plus_encoder"),
    prefixes=("encoder.", ""),
    layer="layers.{i}.",
    layout=keys_with_values,
    query="attn.to_q",
    key="attn.to_kv",
    value="attn.to_kv",
    output="attn.to_out",
    biases=biases(False, True),
    norm=layer_norm("attn.pre_norm", eps=1e-5),
    closing=None,
    relative=within_blocks,
    others=("attn.rel_pos_emb",),
    keys={"n_layers": ("num_layers",), "d_model": ("hidden_dim",), "n_heads": ("num_heads",)},
    head_dim=("dim_head",),
    variants=(),
    caveats=("attention is within blocks of context_size: distances are those within one",),
    defaults={
        "num_layers": 10, "hidden_dim": 1024, "num_heads": 8, "max_pos_emb": 512, "context_size": 200,
    },
)  # fmt: skip

LASR = LLAMA.but(
    name="lasr_encoder",
    model_types=("lasr_encoder",),
    prefixes=("encoder.", ""),
    norm=layer_norm("norm_self_att", bias=False),
    inputs=Inputs(),
    outputs=None,
    defaults={"layer_norm_eps": 1e-6, "max_position_embeddings": 10000},
)

PE_AUDIO = QWEN3.but(
    name="pe_audio_encoder",
    model_types=("pe_audio_encoder", "pe_video_encoder", "pe_audio_video_encoder"),
    prefixes=("", "model."),
    inputs=Inputs(),
    outputs=None,
    rope=Rope(theta=20000.0, interleaved=True),
    kv_heads=("num_key_value_heads",),
    defaults={
        "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": None, "max_position_embeddings": 10000
    },
)  # fmt: skip

TIMESFM = LLAMA.but(
    name="timesfm",
    model_types=("timesfm",),
    prefixes=("decoder.", "model.", ""),
    layout=scaled_by_dimension,
    loose=("self_attn.scaling",),
    biases=biases(True, True),
    norm=rms_norm("input_layernorm"),
    inputs=Inputs(),
    outputs=None,
    rope=None,
    kv_heads=(),
    scale=unscaled,
    defaults={"head_dim": 80},
)

AUDIO = (
    WAV2VEC2, WAVLM, SPEECHT5_DECODER, SPEECHT5_CROSS, SPEECHT5_ENCODER, VITS, WAV2VEC2_CONFORMER, WAV2VEC2_BERT,
    SEAMLESS_SPEECH, SEAMLESS_V2_SPEECH, SEAMLESS_ADAPTER, SEAMLESS_V2_ADAPTER, FASTSPEECH2_ENCODER,
    FASTSPEECH2_DECODER, SEW_D, PARAKEET, GRANITE_SPEECH, LASR, PE_AUDIO, TIMESFM,
)  # fmt: skip
