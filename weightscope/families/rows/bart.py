"""BART and its line, pre-norm or post-norm: encoder, decoder and cross-attention; Whisper and others that hear."""

from dataclasses import replace

from weightscope.families.cells import Biases, Inputs, Memory, biases, layer_norm
from weightscope.families.family import Family, When
from weightscope.families.layouts import separate
from weightscope.families.rope import Rope
from weightscope.families.rows.bert_line import BLOCK_SPARSE
from weightscope.families.rows.llama import LLAMA

BY_FORMULA = "positions by a formula"
OF_ENCODER = {"n_layers": ("encoder_layers",), "n_heads": ("encoder_attention_heads",)}
OF_DECODER = {"n_layers": ("decoder_layers",), "n_heads": ("decoder_attention_heads",)}

POST_NORM = ("bart", "plbart", "mvp")
SCALED = (When("scale_embedding", True, inputs__scale="sqrt"),)

BART_ENCODER = Family(
    name="bart",
    model_types=POST_NORM,
    tower="encoder",
    prefixes=("model.", ""),
    layer="encoder.layers.{i}.",
    layout=separate,
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    biases=biases(True, True),
    norm=None,
    closing=layer_norm("final_layer_norm", eps=1e-5),
    inputs=Inputs(
        tokens="shared.weight",
        positions="encoder.embed_positions.weight",
        offset=2,
        norm=layer_norm("encoder.layernorm_embedding", eps=1e-5),
    ),
    keys=OF_ENCODER,
    variants=SCALED,
)

BART_DECODER = BART_ENCODER.but(
    tower="decoder",
    layer="decoder.layers.{i}.",
    inputs__positions="decoder.embed_positions.weight",
    inputs__norm=layer_norm("decoder.layernorm_embedding", eps=1e-5),
    keys=OF_DECODER,
)

BART_CROSS = BART_DECODER.but(
    model_types=(*POST_NORM, "blenderbot-small", "marian", "fsmt", "led"),
    tower="cross",
    query="encoder_attn.q_proj",
    key="encoder_attn.k_proj",
    value="encoder_attn.v_proj",
    output="encoder_attn.out_proj",
    memory=Memory(),
)

BLENDERBOT_SMALL = tuple(
    row.but(name="blenderbot-small", model_types=("blenderbot-small",), inputs__offset=0)
    for row in (BART_DECODER, BART_ENCODER)
)
WITHOUT_ROWS = {"inputs__positions": "", "inputs__norm": None, "inputs__more": BY_FORMULA}
MARIAN = tuple(row.but(name="marian", model_types=("marian",), **WITHOUT_ROWS) for row in (BART_DECODER, BART_ENCODER))
FSMT = tuple(
    row.but(name="fsmt", model_types=("fsmt",), **WITHOUT_ROWS, inputs__tokens=f"{row.tower}.embed_tokens.weight")
    for row in (BART_DECODER, BART_ENCODER)
)
LED_DECODER = BART_DECODER.but(name="led", model_types=("led",))
LED_ENCODER = BART_ENCODER.but(
    name="led",
    model_types=("led",),
    query="self_attn.longformer_self_attn.query",
    key="self_attn.longformer_self_attn.key",
    value="self_attn.longformer_self_attn.value",
    output="self_attn.output",
    refused="attention in windows, with further queries, keys and values for tokens of global attention",
)
TROCR = BART_DECODER.but(
    name="trocr",
    model_types=("trocr",),
    prefixes=("model.", "", "decoder.model."),
    inputs__tokens="decoder.embed_tokens.weight",
)
TROCR_CROSS = BART_CROSS.but(
    name="trocr", model_types=("trocr",), prefixes=TROCR.prefixes, inputs__tokens="decoder.embed_tokens.weight"
)

PRE_NORM = layer_norm("self_attn_layer_norm", eps=1e-5)
CROSS_NORM = layer_norm("encoder_attn_layer_norm", eps=1e-5)
MBART_DECODER, MBART_ENCODER = (
    row.but(name="mbart", model_types=("mbart",), norm=PRE_NORM, closing=None) for row in (BART_DECODER, BART_ENCODER)
)
MBART_CROSS = BART_CROSS.but(
    name="mbart",
    model_types=("mbart", "pegasus", "blenderbot", "m2m_100"),
    norm=CROSS_NORM,
    closing=None,
)
BLENDERBOT = tuple(
    row.but(name="blenderbot", model_types=("blenderbot",), inputs__offset=0, inputs__norm=None)
    for row in (MBART_DECODER, MBART_ENCODER)
)
SINUSOIDAL = tuple(
    row.but(name="pegasus", model_types=("pegasus", "m2m_100", "nllb-moe"), **WITHOUT_ROWS)
    for row in (MBART_DECODER, MBART_ENCODER)
)
NLLB_MOE_CROSS = MBART_CROSS.but(
    name="pegasus",
    model_types=("nllb-moe",),
    query="cross_attention.q_proj",
    key="cross_attention.k_proj",
    value="cross_attention.v_proj",
    output="cross_attention.out_proj",
    norm=layer_norm("cross_attention_layer_norm", eps=1e-5),
)
PEGASUS_X = tuple(
    row.but(name="pegasus_x", model_types=("pegasus_x",), biases=biases(False, False), **WITHOUT_ROWS)
    for row in (MBART_DECODER, MBART_CROSS)
)
PEGASUS_X_ENCODER = MBART_ENCODER.but(
    name="pegasus_x",
    model_types=("pegasus_x",),
    biases=biases(False, False),
    **WITHOUT_ROWS,
    refused="attention within blocks of tokens, beside global tokens of its own that all of them see",
)
BIGBIRD_PEGASUS = tuple(
    row.but(name="bigbird_pegasus", model_types=("bigbird_pegasus",), biases=biases("use_bias", "use_bias"))
    .but(inputs__offset=0, inputs__norm=None, defaults={"use_bias": False})
    for row in (MBART_DECODER, MBART_CROSS)
)  # fmt: skip

BIGBIRD_PEGASUS_ENCODER = MBART_ENCODER.but(
    name="bigbird_pegasus",
    model_types=("bigbird_pegasus",),
    **{of: f"self_attn.self.{of}" for of in ("query", "key", "value")},
    output="self_attn.output",
    biases=BIGBIRD_PEGASUS[0].biases,
    inputs=replace(BIGBIRD_PEGASUS[0].inputs, positions="encoder.embed_positions.weight"),
    variants=(*SCALED, BLOCK_SPARSE),
    defaults=BIGBIRD_PEGASUS[0].defaults,
)

HEARS = Inputs(more="sound")
WHISPER_ENCODER = MBART_ENCODER.but(
    name="whisper",
    model_types=("whisper",),
    biases=Biases(True, False, True, True),
    inputs=HEARS,
    variants=(),
)
WHISPER_DECODER = MBART_DECODER.but(
    name="whisper",
    model_types=("whisper",),
    biases=WHISPER_ENCODER.biases,
    inputs=Inputs(tokens="decoder.embed_tokens.weight", positions="decoder.embed_positions.weight"),
)
WHISPER_CROSS = MBART_CROSS.but(
    name="whisper", model_types=("whisper",), biases=WHISPER_ENCODER.biases, inputs=WHISPER_DECODER.inputs
)
SPEECH_TO_TEXT = (
    MBART_DECODER.but(
        name="speech_to_text", model_types=("speech_to_text",), **WITHOUT_ROWS,
        inputs__tokens="decoder.embed_tokens.weight",
    ),
    MBART_ENCODER.but(name="speech_to_text", model_types=("speech_to_text",), inputs=HEARS, variants=()),
    MBART_CROSS.but(
        name="speech_to_text", model_types=("speech_to_text",), inputs__tokens="decoder.embed_tokens.weight"
    ),
)  # fmt: skip

MUSICGEN = MBART_DECODER.but(
    name="musicgen",
    model_types=("musicgen_decoder", "musicgen_melody_decoder"),
    prefixes=("decoder.model.", "model.", ""),
    biases=biases(False, False),
    inputs=Inputs(more="the tokens of several codebooks"),
    keys={"n_layers": ("num_hidden_layers",), "n_heads": ("num_attention_heads",)},
    variants=(),
)
MUSICGEN_CROSS = MUSICGEN.but(
    model_types=("musicgen_decoder",),
    tower="cross",
    query="encoder_attn.q_proj",
    key="encoder_attn.k_proj",
    value="encoder_attn.v_proj",
    output="encoder_attn.out_proj",
    norm=CROSS_NORM,
    memory=Memory(),
)

MOONSHINE_ENCODER = LLAMA.but(
    name="moonshine",
    model_types=("moonshine",),
    gguf=None,
    tower="encoder",
    prefixes=("model.", ""),
    layer="encoder.layers.{i}.",
    biases=biases("attention_bias", False),
    norm=layer_norm("input_layernorm", bias=False, eps=1e-5),
    inputs=HEARS,
    outputs=None,
    rope=Rope(interleaved=True, fraction=0.9, rounded=True),
    kv_heads=("encoder_num_key_value_heads",),
    keys={"n_layers": ("encoder_num_hidden_layers",), "n_heads": ("encoder_num_attention_heads",)},
    defaults={"max_position_embeddings": 512, "tie_word_embeddings": True},
)
MOONSHINE_DECODER = MOONSHINE_ENCODER.but(
    tower="decoder",
    layer="decoder.layers.{i}.",
    inputs=Inputs(tokens="decoder.embed_tokens.weight"),
    kv_heads=("decoder_num_key_value_heads",),
    keys={"n_layers": ("decoder_num_hidden_layers",), "n_heads": ("decoder_num_attention_heads",)},
)
MOONSHINE_CROSS = MOONSHINE_DECODER.but(
    tower="cross",
    query="encoder_attn.q_proj",
    key="encoder_attn.k_proj",
    value="encoder_attn.v_proj",
    output="encoder_attn.o_proj",
    norm=layer_norm("post_attention_layernorm", bias=False, eps=1e-5),
    memory=Memory(),
    rope=None,
)

BART_LINE = (
    BART_DECODER, BART_ENCODER, BART_CROSS, *BLENDERBOT_SMALL, *MARIAN, *FSMT, LED_DECODER, LED_ENCODER, TROCR,
    TROCR_CROSS, MBART_DECODER, MBART_ENCODER, MBART_CROSS, *BLENDERBOT, *SINUSOIDAL, NLLB_MOE_CROSS, *PEGASUS_X,
    PEGASUS_X_ENCODER, *BIGBIRD_PEGASUS, BIGBIRD_PEGASUS_ENCODER, WHISPER_DECODER, WHISPER_ENCODER, WHISPER_CROSS,
    *SPEECH_TO_TEXT, MUSICGEN, MUSICGEN_CROSS, MOONSHINE_DECODER, MOONSHINE_ENCODER, MOONSHINE_CROSS,
)  # fmt: skip
