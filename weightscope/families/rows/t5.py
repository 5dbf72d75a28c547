"""T5 and its line: encoder, decoder and cross-attention, unscaled, with a bias by distance instead of positions."""

from dataclasses import dataclass

from weightscope.attention.position_bias import Buckets
from weightscope.families.cells import Inputs, Memory, rms_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, When
from weightscope.families.layouts import separate
from weightscope.families.rows.gpt import unscaled
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
        Its module in a layer.
    """

    layer: str
    causal: bool = False
    own: bool = False
    table: str = TABLE

    def __call__(self, tensors: LayerTensors, config: ModelConfig, layer: int) -> Buckets:
        """The term of one layer."""
        n_buckets, furthest = (config.size(f"relative_attention_{of}") for of in ("num_buckets", "max_distance"))
        if n_buckets < 4 or furthest <= n_buckets:
            raise config.error("relative_attention_num_buckets", "4 or more, and less than the largest distance")
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
    tower="decoder",
    layer=DECODER,
    additive=Distances(DECODER, causal=True),
    shared=(f"{DECODER.format(i=0)}{TABLE}.weight",),
    keys=DECODER_LAYERS,
)

T5_CROSS = T5_ENCODER.but(
    model_types=(*T5_ENCODER.model_types, "umt5", "longt5"),
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

LOCAL = "LocalSelfAttention"
LONGT5_ENCODER = T5_ENCODER.but(
    name="longt5",
    model_types=("longt5",),
    query=f"{LOCAL}.q",
    key=f"{LOCAL}.k",
    value=f"{LOCAL}.v",
    output=f"{LOCAL}.o",
    additive=Distances(ENCODER, table=f"{LOCAL}.relative_attention_bias"),
    shared=(f"{ENCODER.format(i=0)}{LOCAL}.relative_attention_bias.weight",),
    variants=(
        When(
            "encoder_attention_type", "transient-global", refused="keys that sum up blocks of tokens (transient-global)"
        ),
    ),
    defaults={"encoder_attention_type": "local"},
)
LONGT5_DECODER = T5_DECODER.but(name="longt5", model_types=("longt5",))

T5_LINE = (
    T5_DECODER, T5_ENCODER, T5_CROSS, UMT5_DECODER, UMT5_ENCODER, LONGT5_DECODER, LONGT5_ENCODER,
)  # fmt: skip
