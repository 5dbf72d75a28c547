"""What stands in a layer beside attention: its feed-forward network, and the norms around that; a row a family.

Only `circuitry` reads it, to see what becomes of a token on its way up without attention. Heads of families without a
row here are named by their wiring alone: mixtures of experts, and those in which what heads write is normed or scaled
before it joins the stream (Gemma 2 and 3, OLMo 2 and 3, GLM-4, Granite).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weightscope.families.cells import StoredNorm, layer_norm, rms_norm
from weightscope.families.config import ModelConfig
from weightscope.families.family import When


@dataclass(frozen=True)
class FeedForward:
    """One row.

    Attributes
    ----------
    up, down : str
        Modules of the two maps; with a gate, act(x gate) * (x up) is what `down` takes.
    norm : StoredNorm or None
        Before them; None in post-norm models.
    gate : str
        The same as `up` where one tensor holds both, the gate first.
    activation : str
        What the config may leave unsaid.
    activation_keys : tuple of str
        Config keys that say it; none where the code does not ask.
    bias : bool
        The maps have one.
    transposed : bool
        Weights are stored as (in, out), as GPT-2's are.
    parallel : bool
        The network reads what attention reads, the layer's input, not what attention has made of it.
    after_attention : StoredNorm or None
        Of post-norm models, between attention and the maps; the layer's own closing norm follows them.
    causal : bool
        A token sees none that comes after it.
    known : bool
        False where the config asks for a layer that no row can say.
    variants : tuple of When
        Applied in order. A key that the config does not hold means what the row says.
    """

    up: str
    down: str
    norm: StoredNorm | None
    gate: str = ""
    activation: str = "silu"
    activation_keys: tuple[str, ...] = ("hidden_act", "activation_function", "activation")
    bias: bool = False
    transposed: bool = False
    parallel: bool = False
    after_attention: StoredNorm | None = None
    causal: bool = True
    known: bool = True
    variants: tuple[When, ...] = ()


_LLAMA = FeedForward(
    up="mlp.up_proj", down="mlp.down_proj", gate="mlp.gate_proj",
    norm=rms_norm("post_attention_layernorm"), variants=(When("mlp_bias", True, bias=True),),
)  # fmt: skip
_GATE_AND_UP = FeedForward(
    up="mlp.gate_up_proj", gate="mlp.gate_up_proj", down="mlp.down_proj", norm=rms_norm("post_attention_layernorm")
)
_GPT2 = FeedForward(
    up="mlp.c_fc", down="mlp.c_proj", norm=layer_norm("ln_2"), activation="gelu_new", bias=True, transposed=True
)
_FOUR_H = FeedForward(
    up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", norm=layer_norm("post_attention_layernorm"),
    activation="gelu", bias=True,
)  # fmt: skip
_BERT = FeedForward(
    up="intermediate.dense", down="output.dense", norm=None, activation="gelu", bias=True, causal=False,
    after_attention=layer_norm("attention.output.LayerNorm"),
)  # fmt: skip
ROWS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    **dict.fromkeys(("phi3", "glm"), _GATE_AND_UP),
    **dict.fromkeys(("bert", "roberta", "electra"), _BERT),
    "gemma": replace(
        _LLAMA, norm=rms_norm("post_attention_layernorm", offset=1), activation="gelu_pytorch_tanh",
        variants=(When("hidden_act", "gelu", activation_keys=()),),  # its first configs say so and mean the other
    ),
    "olmo": replace(_LLAMA, norm=layer_norm("", eps=1e-5)),
    "stablelm": replace(
        _LLAMA, norm=layer_norm("post_attention_layernorm"),
        variants=(When("use_parallel_residual", True, parallel=True, norm=layer_norm("input_layernorm")),),
    ),
    "cohere": replace(_LLAMA, norm=layer_norm("input_layernorm", bias=False), parallel=True),
    "starcoder2": replace(
        _GPT2, norm=layer_norm("post_attention_layernorm"), activation="gelu_pytorch_tanh", transposed=False,
        variants=(When("use_bias", False, bias=False),),
    ),
    "phi": FeedForward(
        up="mlp.fc1", down="mlp.fc2", norm=layer_norm("input_layernorm"),
        activation="gelu_new", bias=True, parallel=True,
    ),
    "gpt2": _GPT2,
    "gpt_neo": replace(_GPT2, transposed=False),
    "gptj": FeedForward(
        up="mlp.fc_in", down="mlp.fc_out", norm=layer_norm("ln_1"), activation="gelu_new", bias=True, parallel=True
    ),
    "gpt_neox": replace(
        _FOUR_H, parallel=True, variants=(When("use_parallel_residual", False, parallel=False),)
    ),
    "opt": FeedForward(
        up="fc1", down="fc2", norm=layer_norm("final_layer_norm", eps=1e-5), activation="relu", bias=True,
        variants=(
            When("enable_bias", False, bias=False),
            When("layer_norm_elementwise_affine", False, norm=layer_norm("", eps=1e-5)),
            When(
                "do_layer_norm_before", False,
                norm=None, after_attention=layer_norm("self_attn_layer_norm", eps=1e-5),
            ),
        ),
    ),
    "bloom": replace(
        _FOUR_H, activation="gelu_new", activation_keys=(),
        variants=(When("apply_residual_connection_post_layernorm", True, known=False),),
    ),
    "mpt": FeedForward(
        up="ffn.up_proj", down="ffn.down_proj", norm=layer_norm("norm_2", bias=False),
        activation="gelu", activation_keys=(),
    ),
    "falcon": replace(
        _FOUR_H, norm=layer_norm("input_layernorm"), bias=False, parallel=True,
        variants=(
            When("bias", True, bias=True),
            When("new_decoder_architecture", True, norm=layer_norm("ln_mlp")),
            When("num_ln_in_parallel_attn", 1, norm=layer_norm("input_layernorm")),
            When("parallel_attn", False, parallel=False, norm=layer_norm("post_attention_layernorm")),
        ),
    ),
    "distilbert": replace(_BERT, up="ffn.lin1", down="ffn.lin2", after_attention=layer_norm("sa_layer_norm")),
    "mpnet": replace(_BERT, after_attention=layer_norm("attention.LayerNorm")),
}  # fmt: skip


def feed_forward_of(family: str, config: ModelConfig) -> FeedForward | None:
    """The row of a family as a config makes it; None where there is none."""
    row = ROWS.get(family)
    if row is None:
        return None
    for when in row.variants:
        if config.get(when.key) == when.value:
            row = replace(row, **when.cells)
    return row if row.known else None


def _gelu(x: np.ndarray) -> np.ndarray:
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def _gelu_new(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.clip(x, -80, None)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": _silu, "swish": _silu, "gelu": _gelu, "gelu_new": _gelu_new, "gelu_pytorch_tanh": _gelu_new,
    "relu": lambda x: np.maximum(x, 0),
}  # fmt: skip
