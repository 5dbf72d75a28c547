"""Decoders before LLaMA's: of GPT's line, of OPT's, and the first that followed code and control codes."""

from weightscope.families.cells import Inputs, Outputs, biases, layer_norm, rms_norm
from weightscope.families.family import Family, When, default_scale
from weightscope.families.layouts import grouped, separate, stacked
from weightscope.families.odd_layouts import in_four_blocks
from weightscope.families.rows.bert_line import ROTARY_VALUES
from weightscope.families.rows.encoders import BERT
from weightscope.families.rows.gpt import GPT2, GPTJ, OPT
from weightscope.families.sinusoids import of_tensor2tensor, of_the_paper

OPENAI_GPT = GPT2.but(
    name="openai-gpt",
    model_types=("openai-gpt",),
    norm=None,
    closing=layer_norm("ln_2"),
    inputs=Inputs(tokens="tokens_embed.weight", positions="positions_embed.weight"),
    outputs=Outputs(None),
)

DECISION_TRANSFORMER = GPT2.but(
    name="decision_transformer", model_types=("decision_transformer",), inputs=Inputs(), outputs=None
)

GPT_BIGCODE = GPT2.but(
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    layout=stacked,
    transposed=(),
    kv_heads=1,
    variants=(When("multi_query", False, layout=grouped, kv_heads=()),),
    defaults={"multi_query": True},
)

CODEGEN = GPTJ.but(
    name="codegen",
    model_types=("codegen",),
    layout=in_four_blocks,
    query="attn.qkv_proj",
    key="attn.qkv_proj",
    value="attn.qkv_proj",
)

CTRL = GPT2.but(
    name="ctrl",
    model_types=("ctrl",),
    layout=separate,
    transposed=(),
    query="multi_head_attention.Wq",
    key="multi_head_attention.Wk",
    value="multi_head_attention.Wv",
    output="multi_head_attention.dense",
    norm=layer_norm("layernorm1", eps=1e-6),
    inputs=Inputs(tokens="w.weight", formula=of_the_paper, scale="sqrt"),
    outputs=None,
    defaults={"layer_norm_epsilon": 1e-6},
)

BIOGPT = OPT.but(
    name="biogpt",
    model_types=("biogpt",),
    prefixes=("biogpt.", ""),
    biases=biases(True, True),
    inputs__width="",
    inputs__before="",
    outputs=Outputs(layer_norm("layer_norm", eps=1e-5), tokens=("output_projection.weight",)),
    variants=(When("scale_embedding", True, inputs__scale="sqrt"),),
    defaults={"scale_embedding": True, "max_position_embeddings": 1024},
)

XGLM = BIOGPT.but(
    name="xglm",
    model_types=("xglm",),
    prefixes=("model.", ""),
    inputs__positions="",
    inputs__offset=0,
    inputs__formula=of_tensor2tensor,
    outputs=Outputs(layer_norm("layer_norm", eps=1e-5)),
    keys={"n_heads": ("attention_heads", "num_attention_heads")},
    defaults={"max_position_embeddings": 2048, "pad_token_id": 1},
)

CLVP_DECODER = GPT2.but(
    name="clvp_decoder",
    model_types=("clvp_decoder",),
    prefixes=("speech_decoder_model.model.decoder.", ""),
    layer="layers.{i}.",
    layout=separate,
    transposed=(),
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    biases=biases("use_attention_bias", True),
    norm=layer_norm("input_layernorm"),
    inputs=Inputs(),
    outputs=None,
    scale=default_scale,
    defaults={"use_attention_bias": True},
)

CLVP_ENCODER = CLVP_DECODER.but(
    name="clvp_encoder",
    model_types=("clvp_encoder",),
    prefixes=("",),
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    norm=rms_norm("input_rmsnorm"),
    inputs=Inputs(tokens="token_embedding.weight"),
    variants=(When("use_rotary_embedding", True, refused=ROTARY_VALUES),),
    defaults={"layer_norm_eps": 1e-5, "use_attention_bias": False, "use_rotary_embedding": True},
)

KOSMOS_TEXT = OPT.but(
    name="kosmos_2_text_model",
    model_types=("kosmos_2_text_model",),
    prefixes=("text_model.model.", "model."),
    biases=biases(True, True),
    norm=layer_norm("self_attn_layer_norm"),
    sub_norm=layer_norm("self_attn.inner_attn_ln"),
    inputs=Inputs(tokens="embed_tokens.weight", more="sinusoids counted from the first token that is no padding"),
    outputs=None,
    keys={"n_layers": ("layers",), "d_model": ("embed_dim",), "n_heads": ("attention_heads",)},
    variants=(),
    defaults={"layer_norm_eps": 1e-5},
)

KOSMOS_2_5_TEXT = KOSMOS_TEXT.but(name="kosmos_2_5_text_model", model_types=("kosmos_2_5_text_model",), sub_norm=None)

GIT = BERT.but(name="git", model_types=("git",), prefixes=("git.", ""), inputs__types="")

BLIP_TEXT = BERT.but(name="blip_text_model", model_types=("blip_text_model",), inputs__types="")

OLDER_DECODERS: tuple[Family, ...] = (
    OPENAI_GPT, DECISION_TRANSFORMER, GPT_BIGCODE, CODEGEN, CTRL, BIOGPT, XGLM, CLVP_DECODER, CLVP_ENCODER, KOSMOS_TEXT,
    KOSMOS_2_5_TEXT, GIT, BLIP_TEXT,
)  # fmt: skip
