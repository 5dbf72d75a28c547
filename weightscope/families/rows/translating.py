"""Encoder-decoders of BART's kind under other names: SeamlessM4T, Canary, Dia, series of numbers; BERT that crosses."""

from weightscope.families.cells import Inputs, Memory, biases, layer_norm, rms_norm
from weightscope.families.family import Family, When
from weightscope.families.layouts import conv1d_crossing
from weightscope.families.relative import Projected
from weightscope.families.rows.audio import PARAKEET
from weightscope.families.rows.bart import (
    BART_CROSS,
    BART_DECODER,
    BART_ENCODER,
    BY_FORMULA,
    MBART_CROSS,
    MBART_DECODER,
    MBART_ENCODER,
    WITHOUT_ROWS,
)
from weightscope.families.rows.bert_line import BERT_GENERATION
from weightscope.families.rows.encoders import BERT, ROBERTA
from weightscope.families.rows.gpt import GPT2, unscaled
from weightscope.families.rows.llama import LLAMA

SEAMLESS = ("seamless_m4t", "seamless_m4t_v2")
UNITS = "t2u_model.model."

SEAMLESS_DECODER, SEAMLESS_ENCODER = (
    row.but(name="seamless_m4t", model_types=SEAMLESS, prefixes=("",), layer=f"text_{row.layer}", **WITHOUT_ROWS)
    for row in (MBART_DECODER, MBART_ENCODER)
)
SEAMLESS_CROSS = SEAMLESS_DECODER.but(
    tower="cross",
    query="cross_attention.q_proj",
    key="cross_attention.k_proj",
    value="cross_attention.v_proj",
    output="cross_attention.out_proj",
    norm=layer_norm("cross_attention_layer_norm", eps=1e-5),
    memory=Memory(),
)

UNIT_ENCODER = SEAMLESS_ENCODER.but(
    tower="unit_encoder",
    layer=f"{UNITS}encoder.layers.{{i}}.",
    inputs=Inputs(more="what the text decoder hands over"),
    variants=(),
    keys={"n_layers": ("t2u_encoder_layers",), "n_heads": ("t2u_encoder_attention_heads",)},
)
UNIT_DECODER, UNIT_CROSS = (
    row.but(
        model_types=("seamless_m4t",),
        tower=f"unit_{row.tower}",
        layer=f"{UNITS}decoder.layers.{{i}}.",
        inputs__tokens=f"{UNITS}decoder.embed_tokens.weight",
        keys={
            "n_layers": ("t2u_decoder_layers",), "n_heads": ("t2u_decoder_attention_heads",),
            "vocab_size": ("t2u_vocab_size",),
        },
    )
    for row in (SEAMLESS_DECODER, SEAMLESS_CROSS)
)  # fmt: skip
UNIT_DECODER_2 = UNIT_DECODER.but(
    model_types=("seamless_m4t_v2",),
    norm=None,
    closing=layer_norm("conv_layer_norm", eps=1e-5),
    inputs=Inputs(more="characters, drawn out to as many units as each is spoken for"),
    variants=(),
)

PP_FORMULANET = tuple(
    row.but(name="mbart", model_types=("pp_formulanet_text",), inputs__tokens="decoder.embed_tokens.weight")
    for row in (MBART_DECODER, MBART_CROSS)
)

CANARY_DECODER = LLAMA.but(
    name="canary",
    model_types=("canary_decoder",),
    gguf=None,
    tower="decoder",
    prefixes=("model.", ""),
    layer="decoder.layers.{i}.",
    norm=layer_norm("input_layernorm", eps=1e-5),
    rope=None,
    inputs=Inputs(
        tokens="decoder.embed_tokens.weight", norm=layer_norm("decoder.embedding_layernorm", eps=1e-5), more=BY_FORMULA
    ),
    outputs=None,
    defaults={"attention_bias": True, "max_position_embeddings": 1024},
)
CANARY_CROSS = CANARY_DECODER.but(
    tower="cross",
    query="encoder_attn.q_proj",
    key="encoder_attn.k_proj",
    value="encoder_attn.v_proj",
    output="encoder_attn.o_proj",
    norm=layer_norm("post_attention_layernorm", eps=1e-5),
    memory=Memory(),
)

COHERE_ASR_ENCODER = PARAKEET.but(
    name="cohere_asr",
    model_types=("cohere_asr",),
    tower="encoder",
    nested="encoder_config",
    prefixes=("encoder.",),
    query="self_attn.linear_q",
    key="self_attn.linear_k",
    value="self_attn.linear_v",
    output="self_attn.linear_out",
    relative=Projected("self_attn.linear_pos", "self_attn.pos_bias_u", "self_attn.pos_bias_v"),
    others=("self_attn.linear_pos",),
    query_bias="self_attn.pos_bias_u",
    loose=("self_attn.pos_bias_u", "self_attn.pos_bias_v"),
)
COHERE_ASR_DECODER, COHERE_ASR_CROSS = (
    CANARY_DECODER.but(
        name="cohere_asr",
        model_types=("cohere_asr",),
        tower=tower,
        prefixes=("transf_decoder.",),
        layer="_decoder.layers.{i}.",
        query=f"{module}.query_net",
        key=f"{module}.key_net",
        value=f"{module}.value_net",
        output=f"{module}.out_projection",
        norm=layer_norm(norm, eps=1e-5),
        inputs=Inputs(
            tokens="_embedding.token_embedding.weight",
            positions="_embedding.position_embedding.pos_enc",
            norm=layer_norm("_embedding.layer_norm", eps=1e-5),
        ),
        memory=memory,
    )
    for tower, module, norm, memory in (
        ("decoder", "first_sub_layer", "layer_norm_1", None),
        ("cross", "second_sub_layer", "layer_norm_2", Memory()),
    )
)

DIA_ENCODER = LLAMA.but(
    name="dia",
    model_types=("dia_encoder",),
    gguf=None,
    tower="encoder",
    prefixes=("model.encoder.", "encoder."),
    query="self_attention.q_proj",
    key="self_attention.k_proj",
    value="self_attention.v_proj",
    output="self_attention.o_proj",
    biases=biases(False, False),
    norm=rms_norm("pre_sa_norm"),
    inputs=Inputs(tokens="embedding.weight"),
    outputs=None,
    scale=unscaled,
    defaults={"norm_eps": 1e-5, "head_dim": 128, "max_position_embeddings": 1024},
)
DIA_DECODER = DIA_ENCODER.but(
    model_types=("dia_decoder",),
    tower="decoder",
    prefixes=("model.decoder.", "decoder."),
    inputs=Inputs(more="the tokens of several codebooks"),
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 3072},
)
DIA_CROSS = DIA_DECODER.but(
    tower="cross",
    query="cross_attention.q_proj",
    key="cross_attention.k_proj",
    value="cross_attention.v_proj",
    output="cross_attention.o_proj",
    norm=rms_norm("pre_ca_norm"),
    rope=None,
    memory=Memory(),
    head_dim=("cross_head_dim",),
    kv_heads=("cross_num_key_value_heads",),
    keys={"n_heads": ("cross_num_attention_heads",)},
)

SERIES = Inputs(more="windows of a series of numbers, and what is known of their time")
TIME_SERIES = tuple(
    row.but(name="time_series_transformer", model_types=("time_series_transformer",), prefixes=("model.", ""))
    .but(inputs=SERIES, variants=())
    for row in (BART_DECODER, BART_ENCODER, BART_CROSS)
)  # fmt: skip
PROBABLE = "queries chosen by a sample of their scores: what the others gather is the mean of all values"
INFORMER = tuple(
    row.but(name="informer", model_types=("informer",), closing=None)
    .but(variants=() if row.memory else (When("attention_type", "prob", refused=PROBABLE),))
    .but(defaults={"attention_type": "prob"})
    for row in TIME_SERIES
)  # fmt: skip

CROSSING = {
    "gguf": None,
    "tower": "cross",
    "query": "crossattention.self.query",
    "key": "crossattention.self.key",
    "value": "crossattention.self.value",
    "output": "crossattention.output.dense",
    "beside": ("crossattention.output.LayerNorm",),
    "memory": Memory(),
}
BERT_CROSS = tuple(
    row.but(model_types=types, **CROSSING)
    for row, types in ((BERT, ("bert",)), (ROBERTA, ROBERTA.model_types), (BERT_GENERATION, ("bert-generation",)))
)
GPT2_CROSS = GPT2.but(
    gguf=None,
    tower="cross",
    layout=conv1d_crossing,
    transposed=("q_attn", *GPT2.transposed),
    query="crossattention.q_attn",
    key="crossattention.c_attn",
    value="crossattention.c_attn",
    output="crossattention.c_proj",
    norm=layer_norm("ln_cross_attn"),
    memory=Memory(),
    outputs=None,
)

TRANSLATING: tuple[Family, ...] = (
    SEAMLESS_DECODER, SEAMLESS_ENCODER, SEAMLESS_CROSS, UNIT_ENCODER, UNIT_DECODER, UNIT_CROSS, UNIT_DECODER_2,
    *PP_FORMULANET, CANARY_DECODER, CANARY_CROSS, COHERE_ASR_DECODER, COHERE_ASR_ENCODER, COHERE_ASR_CROSS,
    DIA_DECODER, DIA_ENCODER, DIA_CROSS, *TIME_SERIES, *INFORMER, *BERT_CROSS, GPT2_CROSS,
)  # fmt: skip
