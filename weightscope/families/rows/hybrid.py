"""Decoders that mix tokens otherwise too, or in other layers: state spaces, convolutions, linear attention."""

from collections.abc import Callable

from weightscope.checkpoint.config import Config
from weightscope.families.cells import Biases, Inputs, Outputs, QkNorm, biases, rms_norm
from weightscope.families.family import When, default_scale
from weightscope.families.rope import Rope
from weightscope.families.rows.llama import DEEPSEEK_V3, GRANITE, LLAMA, OLMO2, OUTPUT_NORM
from weightscope.families.within import with_a_base

ATTENTION = ("full_attention", "sliding_attention")
CALLED = {"M": "mamba", "-": "mlp", "*": "full_attention", "E": "moe"}


def every(period: str, offset: str) -> Callable[[Config, int], tuple[str, ...]]:
    """Attention in layer i where i % period is offset, both keys of the config; mamba elsewhere."""

    def layer_types(config: Config, n_layers: int) -> tuple[str, ...]:
        of, at = config.size(period), config.count(offset)
        return tuple("full_attention" if i % of == at else "mamba" for i in range(n_layers))

    return layer_types


def listed(key: str) -> Callable[[Config, int], tuple[str, ...]]:
    """Attention in the layers that the config lists under a key; another mixing elsewhere."""

    def layer_types(config: Config, n_layers: int) -> tuple[str, ...]:
        attention = config.layers(key)
        return tuple("full_attention" if i in attention else "linear_attention" for i in range(n_layers))

    return layer_types


def by_blocks(config: Config, n_layers: int) -> tuple[str, ...]:
    """Nemotron-H: a pattern of letters, where the config has no list of names."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) < n_layers or any(letter not in CALLED for letter in pattern):
        raise config.error("hybrid_override_pattern", f"{n_layers} letters of {', '.join('M-*E')}")
    return tuple(CALLED[letter] for letter in pattern[:n_layers])


def in_alternation(config: Config, n_layers: int) -> tuple[str, ...]:
    """MiniMax: every other layer is attention, the first among them."""
    return tuple("linear_attention" if i % 2 else "full_attention" for i in range(n_layers))


def in_turn(config: Config, n_layers: int) -> tuple[str, ...]:
    """RecurrentGemma: `block_types` again and again."""
    blocks = config.get("block_types")
    if not isinstance(blocks, list) or not blocks or not set(blocks) <= {"recurrent", "attention"}:
        raise config.error("block_types", "a list of recurrent and attention")
    kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
    return tuple(kinds[blocks[i % len(blocks)]] for i in range(n_layers))


JAMBA = LLAMA.but(
    name="jamba",
    model_types=("jamba",),
    biases=Biases(),
    rope=None,
    layer_types=every("attn_layer_period", "attn_layer_offset"),
    attention_types=ATTENTION,
    outputs=Outputs(rms_norm("final_layernorm")),
    defaults={
        "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "max_position_embeddings": 262144
    },
)  # fmt: skip

BAMBA = LLAMA.but(
    name="bamba",
    model_types=("bamba",),
    rope=Rope(fraction=0.5),
    layer_types=listed("attn_layer_indices"),
    attention_types=ATTENTION,
    outputs=Outputs(rms_norm("final_layernorm")),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
)

FALCON_H1 = LLAMA.but(
    name="falcon_h1",
    model_types=("falcon_h1",),
    inputs__scale="embedding_multiplier",
    multipliers={"input": "attention_in_multiplier", "key": "key_multiplier"},
    outputs=Outputs(rms_norm("final_layernorm")),
    caveats=(
        "the layer's output is multiplied by attention_out_multiplier before it joins the residual stream, and a state "
        "space reads the same input beside it",
    ),
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "attention_in_multiplier": 1.0, "key_multiplier": 1.0, "embedding_multiplier": 1.0,
    },
)  # fmt: skip

NEMOTRON_H = LLAMA.but(
    name="nemotron_h",
    model_types=("nemotron_h",),
    prefixes=("backbone.", "model.", ""),
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    output="mixer.o_proj",
    biases=Biases(),
    norm=rms_norm("norm"),
    rope=None,
    listed="layers_block_type",
    layer_types=by_blocks,
    attention_types=("full_attention", "attention"),
    inputs=Inputs(tokens="embeddings.weight"),
    outputs=Outputs(rms_norm("norm_f")),
    defaults={
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 4096,
    },
)  # fmt: skip

GRANITE_HYBRID = GRANITE.but(
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    rope=None,
    variants=(When("position_embedding_type", "rope", rope=Rope()),),
    layer_types=listed("attn_layer_indices"),
    attention_types=(*ATTENTION, "attention"),
    defaults={"position_embedding_type": None},
)

LFM2 = LLAMA.but(
    name="lfm2",
    model_types=("lfm2",),
    output="self_attn.out_proj",
    biases=Biases(),
    norm=rms_norm("operator_norm"),
    qk_norm=QkNorm("self_attn.q_layernorm", "self_attn.k_layernorm"),
    rope=Rope(theta=1e6),
    layer_types=listed("full_attn_idxs"),
    attention_types=ATTENTION,
    outputs=Outputs(rms_norm("embedding_norm")),
    defaults={
        "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "norm_eps": 1e-5, "max_position_embeddings": 128000, "tie_word_embeddings": True,
    },
)  # fmt: skip

LFM2_MOE = LFM2.but(name="lfm2_moe", model_types=("lfm2_moe",), defaults={"hidden_size": 2048})

MINIMAX = LLAMA.but(
    name="minimax",
    model_types=("minimax",),
    biases=Biases(),
    rope=Rope(theta=1e6),
    layer_types=in_alternation,
    attention_types=ATTENTION,
    caveats=("the stream that the layer's output is added to is the normalised one, not the input",),
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    },
)  # fmt: skip

OLMO_HYBRID = OLMO2.but(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    attention_types=ATTENTION,
    caveats=(OUTPUT_NORM,),
    rope__rotates=with_a_base,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 65536},
)

RECURRENT_GEMMA = LLAMA.but(
    name="recurrent_gemma",
    model_types=("recurrent_gemma",),
    query="temporal_block.q_proj",
    key="temporal_block.k_proj",
    value="temporal_block.v_proj",
    output="temporal_block.o_proj",
    biases=biases("attention_bias", True),
    norm=rms_norm("temporal_pre_norm", offset=1),
    rope=Rope(fraction=0.5),
    layer_types=in_turn,
    attention_types=ATTENTION,
    inputs__scale="sqrt",
    outputs=Outputs(rms_norm("final_norm", offset=1)),
    defaults={"block_types": ["recurrent", "recurrent", "attention"], "tie_word_embeddings": True},
)

KIMI_LINEAR = DEEPSEEK_V3.but(
    name="kimi_linear",
    model_types=("kimi_linear",),
    rope=None,
    scale=default_scale,
    attention_types=ATTENTION,
    defaults={"q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_interleave": None, "max_position_embeddings": None},
)

GLM5_NEXT = KIMI_LINEAR.but(
    name="glm5_next",
    model_types=("glm5_next_text",),
    latent_eps=None,
    choosing=("self_attn.indexer",),
    beside=("self_attn.indexer",),
    attention_types=("full_attention", "indexed_attention"),
    caveats=(
        "layers read a mixture of several streams, and their output is spread over them (hyper-connections)",
        "an index chooses which keys a query sees (self_attn.indexer): scores are the model's where it sees",
    ),
    defaults={
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "max_position_embeddings": 1048576,
    },
)

HYBRID = (
    JAMBA, BAMBA, FALCON_H1, NEMOTRON_H, GRANITE_HYBRID, LFM2, LFM2_MOE, MINIMAX, OLMO_HYBRID, RECURRENT_GEMMA,
    KIMI_LINEAR, GLM5_NEXT,
)  # fmt: skip
