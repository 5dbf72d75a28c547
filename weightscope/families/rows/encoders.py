"""Text encoders: BERT and its line, whose layers read an already normalised stream, and ModernBERT."""

from weightscope.attention.position_bias import Buckets
from weightscope.families import ggml
from weightscope.families.cells import Inputs, biases, layer_norm
from weightscope.families.config import Every, ModelConfig
from weightscope.families.family import Family, When
from weightscope.families.layouts import grouped_with_loose_biases, separate, stacked
from weightscope.families.relative import Disentangled
from weightscope.families.rope import Rope
from weightscope.families.tensors import LayerTensors

RELATIVE_BIAS = "encoder.relative_attention_bias.weight"  # MPNet's, one table for all layers


def deberta_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d' times the number of terms: content and each kind of position term).

    pos_att_type is a list of those kinds, or their names joined by "|".
    """
    given = config.get("pos_att_type") or []
    kinds = [kind for kind in given.split("|") if kind] if isinstance(given, str) else given
    if not isinstance(kinds, list):
        raise config.error("pos_att_type", "a list of kinds of position terms")
    return float((config.head_dim * (1 + len(kinds))) ** -0.5)


def shared_groups(config: ModelConfig, layer: int) -> int:
    """ALBERT: layers in num_hidden_groups runs, each run one set of tensors."""
    if config.size("inner_group_num") != 1:
        raise config.error("inner_group_num", "1 (one attention layer a group)")
    return layer * config.size("num_hidden_groups", largest=config.n_layers) // config.n_layers


MPNET_BUCKETS = 32  # those that its code asks for, however many the table has


def relative_buckets(tensors: LayerTensors, config: ModelConfig, layer: int) -> Buckets:
    """MPNet's relative bias, one table for all layers."""
    n_buckets = config.size("relative_attention_num_buckets")
    if n_buckets < MPNET_BUCKETS:
        raise config.error("relative_attention_num_buckets", f"{MPNET_BUCKETS} or more: so many are asked for")
    table = tensors.read(RELATIVE_BIAS, (n_buckets, config.n_heads))
    return Buckets(table[:MPNET_BUCKETS])


BERT = Family(
    name="bert",
    model_types=("bert", "dpr", "splinter", "visual_bert"),
    gguf=ggml.BERT,
    prefixes=("bert.", ""),
    layer="encoder.layer.{i}.",
    layout=separate,
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    biases=biases(True, True),
    norm=None,
    closing=layer_norm("output.LayerNorm"),
    beside=("attention.output.LayerNorm",),
    inputs=Inputs(
        tokens="embeddings.word_embeddings.weight",
        positions="embeddings.position_embeddings.weight",
        types="embeddings.token_type_embeddings.weight",
        norm=layer_norm("embeddings.LayerNorm"),
    ),
    defaults={"layer_norm_eps": 1e-12},
)

ROBERTA = BERT.but(
    name="roberta",
    model_types=("roberta", "xlm-roberta", "camembert", "data2vec-text"),
    prefixes=("roberta.", ""),
    inputs__offset="pad_token_id",
    defaults={"pad_token_id": 1},
)

ELECTRA = BERT.but(
    name="electra",
    model_types=("electra",),
    prefixes=("electra.", ""),
    inputs__width="embedding_size",
    inputs__after="embeddings_project",
    defaults={"embedding_size": 128},
)

DISTILBERT = BERT.but(
    name="distilbert",
    model_types=("distilbert",),
    prefixes=("distilbert.", ""),
    layer="transformer.layer.{i}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    inputs__types="",
    closing=layer_norm("output_layer_norm"),
    inputs__norm=layer_norm("embeddings.LayerNorm", eps=1e-12),
)

DEBERTA = BERT.but(
    name="deberta",
    model_types=("deberta",),
    prefixes=("deberta.", ""),
    layout=grouped_with_loose_biases,
    loose=("attention.self.q_bias", "attention.self.v_bias"),
    beside=(
        *BERT.beside, "attention.self.pos_proj", "attention.self.pos_q_proj",
        "attention.self.pos_key_proj", "attention.self.pos_query_proj",
    ),
    query="attention.self.in_proj",
    key="attention.self.in_proj",
    value="attention.self.in_proj",
    biases=biases(False, True),
    inputs__width="embedding_size",
    inputs__before="embeddings.embed_proj",
    scale=deberta_scale,
    variants=(
        When("type_vocab_size", 0, inputs__types=""),
        When("position_biased_input", False, inputs__positions=""),
        When(
            "relative_attention", True,
            relative=Disentangled(
                "encoder.rel_embeddings", "attention.self.pos_proj", "attention.self.pos_q_proj", key_bias=False
            ),
            others=("attention.self.pos_proj", "attention.self.pos_q_proj"),
            shared=("encoder.rel_embeddings.weight",),
        ),
        When("talking_head", True, refused="talking_head: its heads are mixed before and after the softmax"),
    ),
    defaults={
        "layer_norm_eps": 1e-7, "type_vocab_size": 0, "position_biased_input": True, "relative_attention": False
    },
)  # fmt: skip

DEBERTA_V2 = DEBERTA.but(
    name="deberta-v2",
    model_types=("deberta-v2",),
    layout=separate,
    loose=(),
    query="attention.self.query_proj",
    key="attention.self.key_proj",
    value="attention.self.value_proj",
    biases=biases(True, True),
    head_dim=("attention_head_size",),
    variants=(
        *DEBERTA.variants[:2],
        When(
            "relative_attention", True,
            relative=Disentangled(
                "encoder.rel_embeddings", "attention.self.pos_key_proj", "attention.self.pos_query_proj",
                shared=("attention.self.key_proj", "attention.self.query_proj"),
            ),
            others=("attention.self.pos_key_proj", "attention.self.pos_query_proj"),
            shared=("encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.LayerNorm.bias"),
        ),
    ),
)  # fmt: skip

MPNET = BERT.but(
    name="mpnet",
    model_types=("mpnet",),
    prefixes=("mpnet.", ""),
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    inputs__types="",
    inputs__offset=2,
    additive=relative_buckets,
    shared=(RELATIVE_BIAS,),
    defaults={"relative_attention_num_buckets": 32},
)

ALBERT = BERT.but(
    name="albert",
    model_types=("albert",),
    prefixes=("albert.", ""),
    layer="encoder.albert_layer_groups.{i}.albert_layers.0.",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    output="attention.dense",
    closing=layer_norm("full_layer_layer_norm"),
    beside=("attention.LayerNorm",),
    inputs__width="embedding_size",
    inputs__after="encoder.embedding_hidden_mapping_in",
    inputs__always_projected=True,
    stored_layer=shared_groups,
    defaults={"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1},
)

MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    prefixes=("model.", ""),
    layer="layers.{i}.",
    layout=stacked,
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.Wo",
    biases=biases("attention_bias", "attention_bias"),
    norm=layer_norm("attn_norm", bias=False, without=(0,)),
    inputs=Inputs(tokens="embeddings.tok_embeddings.weight", norm=layer_norm("embeddings.norm", bias=False)),
    rope=Rope(theta_key="global_rope_theta", theta=160000.0, local=("local_rope_theta", 10000.0)),
    layer_types=Every("global_attn_every_n_layers", 0, "full_attention", "sliding_attention"),
    variants=(
        When(
            "norm_bias", True, norm=layer_norm("attn_norm", without=(0,)), inputs__norm=layer_norm("embeddings.norm")
        ),
    ),
    defaults={"norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "global_attn_every_n_layers": 3},
)  # fmt: skip

ENCODERS = (BERT, ROBERTA, ELECTRA, DISTILBERT, DEBERTA, DEBERTA_V2, MPNET, ALBERT, MODERNBERT)
