"""Text and protein encoders with rotary positions, and those that predate the habit of BERT's names."""

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Inputs, QkNorm, biases, layer_norm
from weightscope.families.family import Family, When
from weightscope.families.layouts import separate, stacked
from weightscope.families.odd_layouts import by_dimension_and_head, grouped_convolutions
from weightscope.families.relative import of_xlnet
from weightscope.families.rope import Rope
from weightscope.families.rows.bert_line import XLM_ROBERTA_XL
from weightscope.families.rows.encoders import BERT
from weightscope.families.rows.llama import LLAMA

# token_dropout: where nothing is masked, rows are multiplied by the share of tokens that training left unmasked.
ESM = XLM_ROBERTA_XL.but(
    name="esm",
    model_types=("esm",),
    prefixes=("esm.", ""),
    norm=layer_norm("attention.LayerNorm"),
    inputs__types="",
    variants=(
        When("position_embedding_type", "rotary", rope=Rope(), inputs__positions=""),
        When("emb_layer_norm_before", True, inputs__norm=layer_norm("embeddings.layer_norm")),
        When("token_dropout", True, inputs__scale=1 - 0.15 * 0.8),
    ),
    defaults={"layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "pad_token_id": None},
)

ESMC = LLAMA.but(
    name="esmc",
    model_types=("esmc",),
    outputs=None,
    norm=layer_norm("input_layernorm", eps=1e-5),
    qk_norm=QkNorm(scope="joint", centred=True),
    caveats=("the layer's output is divided by sqrt(layers / 36) before it joins the residual stream",),
)

EUROBERT = LLAMA.but(
    name="eurobert",
    model_types=("eurobert",),
    outputs=None,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
)

ULTRABERT = EUROBERT.but(
    name="ultrabert",
    model_types=("ultrabert",),
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 2560000.0},
        },
    },
)  # fmt: skip

GTE = BERT.but(
    name="gte",
    model_types=("gte",),
    prefixes=("gte.", "new.", ""),
    layout=stacked,
    query="attention.qkv_proj",
    key="attention.qkv_proj",
    value="attention.qkv_proj",
    output="attention.o_proj",
    closing=layer_norm("mlp_ln"),
    inputs__positions="",
    rope=Rope(theta=160000.0),
    head_dim=("head_dim",),
    in_transformers={"layer": "layers.{i}.", "output": "self_attn.o_proj"},
    variants=(When("type_vocab_size", 0, inputs__types=""),),
    defaults={"type_vocab_size": 1},
)


def base_of_either_name(config: Config) -> dict[str, object]:
    """transformers takes `rope_theta` where a file has not Nomic's own name for it."""
    said = config.has("rope_theta") and not config.has("rotary_emb_base")
    return {"rotary_emb_base": config["rope_theta"]} if said else {}


NOMIC_BERT = Family(
    name="nomic_bert",
    model_types=("nomic_bert",),
    prefixes=("bert.", "nomic_bert.", ""),
    layer="encoder.layers.{i}.",
    layout=stacked,
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.out_proj",
    norm=None,
    closing=layer_norm("norm2"),
    inputs=Inputs(
        tokens="embeddings.word_embeddings.weight",
        types="embeddings.token_type_embeddings.weight",
        norm=layer_norm("emb_ln"),
    ),
    rope=Rope(theta_key="rotary_emb_base", theta=1000.0),
    derived=base_of_either_name,
    head_dim=("head_dim",),
    in_transformers={"layer": "layers.{i}.", "output": "self_attn.o_proj"},
    defaults={"layer_norm_eps": 1e-12},
)

JINA_V3 = NOMIC_BERT.but(
    name="jina_embeddings_v3",
    model_types=("jina_embeddings_v3",),
    prefixes=("roberta.", ""),
    query="mixer.Wqkv",
    key="mixer.Wqkv",
    value="mixer.Wqkv",
    output="mixer.out_proj",
    biases=biases(True, True),
    rope=Rope(theta_key="rotary_emb_base", theta=20000.0),
    defaults={"layer_norm_eps": 1e-5},
)

SQUEEZEBERT = BERT.but(
    name="squeezebert",
    model_types=("squeezebert",),
    prefixes=("transformer.", ""),
    layer="encoder.layers.{i}.",
    layout=grouped_convolutions,
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="post_attention.conv1d",
    closing=layer_norm("output.layernorm"),
    defaults={"q_groups": 4, "k_groups": 4, "v_groups": 4, "post_attention_groups": 1},
)

XLM = Family(
    name="xlm",
    model_types=("xlm", "flaubert"),
    prefixes=("transformer.", ""),
    layer="attentions.{i}.",
    layout=separate,
    query="q_lin",
    key="k_lin",
    value="v_lin",
    output="out_lin",
    biases=biases(True, True),
    norm=None,
    inputs=Inputs(
        tokens="embeddings.weight", positions="position_embeddings.weight", norm=layer_norm("layer_norm_emb")
    ),
    keys={"d_model": ("emb_dim",)},
    variants=(When("pre_norm", True, refused="pre_norm: its norms stand beside its layers"),),
    defaults={"layer_norm_eps": 1e-12, "pre_norm": False},
)

XLNET = Family(
    name="xlnet",
    model_types=("xlnet",),
    prefixes=("transformer.", ""),
    layer="layer.{i}.",
    layout=by_dimension_and_head,
    query="rel_attn",
    key="rel_attn",
    value="rel_attn",
    output="rel_attn",
    norm=None,
    closing=layer_norm("ff.layer_norm"),
    inputs=Inputs(tokens="word_embedding.weight"),
    relative=of_xlnet,
    query_bias="rel_attn.r_w_bias",
    head_dim=("d_head",),
    caveats=("segments: terms of a query and whether a key is of its segment, where segments are given",),
    defaults={"layer_norm_eps": 1e-12},
)

TEXT_ENCODERS = (XLNET, SQUEEZEBERT, XLM, ESM, ESMC, EUROBERT, ULTRABERT, GTE, NOMIC_BERT, JINA_V3)
