"""T5 and its line: encoder, decoder and cross-attention, unscaled, with a bias by distance instead of positions."""

from dataclasses import dataclass

from weightscope.attention.position_bias import Buckets
from weightscope.families.cells import Inputs, Memory, rms_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family
from weightscope.families.layouts import separate
from weightscope.families.rows.gpt import unscaled
from weightscope.families.rows.llama import GEMMA2, GEMMA3
from weightscope.families.tensors import LayerTensors

TABLE = "SelfAttention.relative_attention_bias"


@dataclass(frozen=True)
class Distances:
    """T5's buckets of distances; the table is the first layer's or each layer's own.

    Attributes
    ----------
    layer : str
        A layer's name.
    causal : bool
    own : bool
    table : str
        The table's module within a layer.
    sizes : (str, str)
        Config keys of how many buckets there are, and from which distance on everything is in the last.
    """

    layer: str
    causal: bool = False
    own: bool = False
    table: str = TABLE
    sizes: tuple[str, str] = ("relative_attention_num_buckets", "relative_attention_max_distance")

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> Buckets:
        """The term of one layer."""
        n_buckets, furthest = (config.size(key) for key in self.sizes)
        if n_buckets < 4 or furthest <= n_buckets:
            raise config.error(self.sizes[0], "4 or more, and less than the largest distance")
        stem = self.layer.format(i=layer if self.own else 0)
        table = tensors.read(f"{stem}{self.table}.weight", (n_buckets, config.n_heads))
        return Buckets(table, furthest, causal=self.causal)


ENCODER, DECODER, CROSS = "encoder.block.{i}.layer.0.", "decoder.block.{i}.layer.0.", "decoder.block.{i}.layer.1."
DECODER_LAYERS = {"n_layers": ("num_decoder_layers", "num_layers")}

T5_ENCODER = Family(
    name="t5",
    model_types=("t5", "mt5", "switch_transformers", "pop2piano"),
    tower="encoder",
    prefixes=("", "transformer."),
    layer=ENCODER,
    layout=separate,
    query="SelfAttention.q",
    key="SelfAttention.k",
    value="SelfAttention.v",
    output="SelfAttention.o",
    norm=rms_norm("layer_norm"),
    inputs=Inputs(tokens="shared.weight"),
    scale=unscaled,
    additive=Distances(ENCODER),
    shared=(f"{ENCODER.format(i=0)}{TABLE}.weight",),
    head_dim=("d_kv",),
    defaults={
        "layer_norm_epsilon": 1e-6, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "d_kv": 64,
    },
)  # fmt: skip

T5_DECODER = T5_ENCODER.but(
    model_types=(*T5_ENCODER.model_types, "udop"),
    tower="decoder",
    layer=DECODER,
    additive=Distances(DECODER, causal=True),
    shared=(f"{DECODER.format(i=0)}{TABLE}.weight",),
    keys=DECODER_LAYERS,
)

T5_CROSS = T5_ENCODER.but(
    model_types=(*T5_DECODER.model_types, "umt5", "longt5"),
    tower="cross",
    layer=CROSS,
    query="EncDecAttention.q",
    key="EncDecAttention.k",
    value="EncDecAttention.v",
    output="EncDecAttention.o",
    memory=Memory(),
    additive=None,
    shared=(),
    keys=DECODER_LAYERS,
)

UMT5_ENCODER = T5_ENCODER.but(
    name="umt5", model_types=("umt5",), additive=Distances(ENCODER, own=True), others=(TABLE,), shared=()
)
UMT5_DECODER = T5_DECODER.but(
    name="umt5", model_types=("umt5",), additive=Distances(DECODER, causal=True, own=True), others=(TABLE,), shared=()
)

UDOP_ENCODER = T5_ENCODER.but(
    name="udop", model_types=("udop",), refused="biases by where tokens stand on their page, beside those by distance"
)

LONGT5_DECODER = T5_DECODER.but(name="longt5", model_types=("longt5",))
LONGT5_ENCODER, LONGT5_GLOBAL_ENCODER = (
    T5_ENCODER.but(
        name="longt5",
        model_types=("longt5",),
        **{of: f"{module}.{of[0]}" for of in ("query", "key", "value", "output")},
        additive=None,
        shared=(),
        refused=mechanism,
    )
    for module, mechanism in (
        ("LocalSelfAttention", "attention within blocks of tokens and their neighbours"),
        ("TransientGlobalSelfAttention", "attention to sums over blocks of tokens, with biases of their own"),
    )
)

OF_SELF, OF_MEMORY = "self_attention.attention", "encoder_decoder_attention.attention"
PIX2STRUCT = T5_DECODER.but(
    name="pix2struct",
    model_types=("pix2struct_text_model",),
    prefixes=("decoder.", ""),
    layer="layer.{i}.",
    **{of: f"{OF_SELF}.{of}" for of in ("query", "key", "value", "output")},
    norm=rms_norm("self_attention.layer_norm"),
    inputs=Inputs(tokens="embed_tokens.weight"),
    additive=Distances("layer.{i}.", causal=True, table=f"{OF_SELF}.relative_attention_bias"),
    shared=(f"layer.0.{OF_SELF}.relative_attention_bias.weight",),
    keys={},
)
PIX2STRUCT_CROSS = PIX2STRUCT.but(
    tower="cross",
    **{of: f"{OF_MEMORY}.{of}" for of in ("query", "key", "value", "output")},
    norm=rms_norm("encoder_decoder_attention.layer_norm"),
    memory=Memory(),
    additive=None,
    shared=(),
)

T5GEMMA_DECODER, T5GEMMA_ENCODER = (
    GEMMA2.but(
        name="t5gemma",
        model_types=("t5gemma",),
        gguf=None,
        tower=tower,
        nested=tower,
        prefixes=("model.", ""),
        layer=f"{tower}.layers.{{i}}.",
        norm=rms_norm("pre_self_attn_layernorm", offset=1),
        outputs=None,
        inputs__tokens=f"{tower}.embed_tokens.weight",
    )
    for tower in ("decoder", "encoder")
)
T5GEMMA_CROSS = T5GEMMA_DECODER.but(
    tower="cross",
    query="cross_attn.q_proj",
    key="cross_attn.k_proj",
    value="cross_attn.v_proj",
    output="cross_attn.o_proj",
    norm=rms_norm("pre_cross_attn_layernorm", offset=1),
    memory=Memory(),
    rope=None,
)

MERGED = "keys of the decoder and of the encoder in one softmax, scored by the same queries"
T5GEMMA2_DECODER = GEMMA3.but(
    name="t5gemma2",
    model_types=("t5gemma2_decoder",),
    gguf=None,
    nested="",
    tower="decoder",
    prefixes=("model.decoder.", "decoder."),
    norm=rms_norm("pre_self_attn_layernorm", offset=1),
    inputs=Inputs(more="tokens as the encoder embeds them"),
    outputs=None,
    refused=MERGED,
)
T5GEMMA2_ENCODER = T5GEMMA2_DECODER.but(
    model_types=("t5gemma2_text",),
    tower="encoder",
    prefixes=("model.encoder.", "encoder."),
    inputs=GEMMA3.inputs,
    refused="",
)

T5_LINE = (
    T5_DECODER, T5_ENCODER, T5_CROSS, UMT5_DECODER, UMT5_ENCODER, UDOP_ENCODER, LONGT5_DECODER, LONGT5_ENCODER,
    LONGT5_GLOBAL_ENCODER, PIX2STRUCT, PIX2STRUCT_CROSS, T5GEMMA_DECODER, T5GEMMA_ENCODER, T5GEMMA_CROSS,
    T5GEMMA2_DECODER, T5GEMMA2_ENCODER,
)  # fmt: skip
