"""Encoders of BERT's line with embeddings of their own, a norm in another place, or positions that rotate."""

from weightscope.families.cells import Inputs, biases, layer_norm
from weightscope.families.family import Family, When
from weightscope.families.rope import Rope
from weightscope.families.rows.encoders import ALBERT, BERT, ELECTRA, ROBERTA
from weightscope.families.sinusoids import of_a_head

ROTARY_VALUES = "values that turn by their position too"

ERNIE = BERT.but(
    name="ernie",
    model_types=("ernie",),
    prefixes=("ernie.", ""),
    variants=(When("use_task_id", True, inputs__more="an embedding of the task"),),
    defaults={"use_task_id": False},
)

BERT_GENERATION = BERT.but(
    name="bert-generation",
    model_types=("bert-generation",),
    prefixes=("bert.", "encoder.", ""),
    inputs__types="",
)

BLOCK_SPARSE = When(
    "attention_type", "block_sparse",
    caveats=("sequences of many blocks attend sparsely: scores hold where they attend",),
)  # fmt: skip

BIG_BIRD = BERT.but(
    name="big_bird",
    model_types=("big_bird",),
    biases=biases("use_bias", True),
    variants=(
        When("rescale_embeddings", True, inputs__scale="sqrt"),
        BLOCK_SPARSE,
    ),
    defaults={"use_bias": True, "rescale_embeddings": False, "attention_type": "block_sparse"},
)

CANINE = BERT.but(
    name="canine",
    model_types=("canine",),
    gguf=None,
    tower="text",
    prefixes=("canine.", ""),
    inputs=Inputs(more="characters, attended to among themselves and put together by a strided convolution"),
)
CANINE_FIRST, CANINE_LAST = (
    CANINE.but(
        tower=tower,
        layer=f"{tower}_char_encoder.layer.{{i}}.",
        inputs=Inputs(more=more),
        keys={"n_layers": ("char_layers",)},
        caveats=caveats,
        defaults={"char_layers": 1},
    )
    for tower, more, caveats in (
        ("initial", "hashes of characters", ("characters see those of their own block of local_transformer_stride",)),
        ("final", "characters beside what they were put together to, through a convolution", ()),
    )
)

LAYOUTLM = BERT.but(name="layoutlm", model_types=("layoutlm",), inputs__more="where a token stands on its page")
TAPAS = BERT.but(
    name="tapas", model_types=("tapas",), inputs__types="", inputs__more="rows, columns and ranks of a table's cells"
)
ROC_BERT = BERT.but(
    name="roc_bert", model_types=("roc_bert",), inputs__more="the shape and the sound of Chinese characters"
)
MARKUPLM = ROBERTA.but(
    name="markuplm",
    model_types=("markuplm",),
    inputs__more="the path of a token's markup",
    defaults={"pad_token_id": 0},
)

REMBERT = ALBERT.but(
    name="rembert",
    model_types=("rembert",),
    prefixes=("rembert.", ""),
    layer=BERT.layer,
    query=BERT.query,
    key=BERT.key,
    value=BERT.value,
    output=BERT.output,
    beside=BERT.beside,
    closing=BERT.closing,
    stored_layer=BERT.stored_layer,
    inputs__width="input_embedding_size",
    defaults={"input_embedding_size": 256},
)

ROFORMER = ELECTRA.but(
    name="roformer",
    model_types=("roformer",),
    prefixes=("roformer.", ""),
    inputs__positions="",
    rope=Rope(interleaved=True),
    frozen={"encoder.embed_positions.weight": of_a_head},
    variants=(When("rotary_value", True, refused=f"rotary_value: {ROTARY_VALUES}"),),
    defaults={"embedding_size": None, "rotary_value": False},
)

IBERT = ROBERTA.but(
    name="ibert",
    model_types=("ibert",),
    prefixes=("ibert.", ""),
    beside=(  # with them the ranges that integers would stand for
        *BERT.beside,
        *(f"attention.output.{module}" for module in ("ln_input_act", "output_activation")),
        *(f"attention.self.{of}_activation" for of in ("query", "key", "value", "output")),
        "attention.self.softmax",
    ),
    variants=(When("quant_mode", True, refused="quant_mode: it computes in integers"),),
    defaults={"quant_mode": False},
)

# Its word queries; entities have others, which only pairs with one of them use.
LUKE = ROBERTA.but(
    name="luke",
    model_types=("luke",),
    prefixes=("luke.", ""),
    others=("attention.self.w2e_query", "attention.self.e2w_query", "attention.self.e2e_query"),
    variants=(
        When(
            "use_entity_aware_attention", True,
            caveats=("queries of their own where query or key is an entity: scores hold between words",),
        ),
    ),
    defaults={"use_entity_aware_attention": True},
)  # fmt: skip

XMOD = ROBERTA.but(
    name="xmod",
    model_types=("xmod",),
    closing=None,  # a language's adapter comes after it
    variants=(When("pre_norm", True, norm=layer_norm("attention.output.LayerNorm")),),
    defaults={"pre_norm": False},
)

XLM_ROBERTA_XL = ROBERTA.but(
    name="xlm-roberta-xl",
    model_types=("xlm-roberta-xl",),
    norm=layer_norm("attention.self_attn_layer_norm"),
    closing=None,
    inputs__norm=None,
    defaults={"layer_norm_eps": 1e-5},
)

ROBERTA_PRELAYERNORM = ROBERTA.but(
    name="roberta-prelayernorm",
    model_types=("roberta-prelayernorm",),
    prefixes=("roberta_prelayernorm.", ""),
    norm=layer_norm("attention.LayerNorm"),
    closing=None,
)

MEGATRON_BERT = BERT.but(
    name="megatron-bert",
    model_types=("megatron-bert",),
    norm=layer_norm("attention.ln"),
    closing=None,
    inputs__norm=None,
)

BERT_LINE: tuple[Family, ...] = (
    ERNIE, BERT_GENERATION, BIG_BIRD, CANINE, CANINE_FIRST, CANINE_LAST, LAYOUTLM, TAPAS, ROC_BERT, MARKUPLM, REMBERT,
    ROFORMER, IBERT, LUKE, XMOD, XLM_ROBERTA_XL, ROBERTA_PRELAYERNORM, MEGATRON_BERT,
)  # fmt: skip
