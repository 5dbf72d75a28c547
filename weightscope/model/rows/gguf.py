"""A GGUF or MLX file as the checkpoint that it was converted from, the conversion undone."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import (
    Checkpoint,
    DerivedTensor,
    StoredTensor,
    Tensor,
    WholeTensor,
)
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf import GgufTensor
from weightscope.checkpoint.packings.packed import renamed
from weightscope.checkpoint.storage import Storage
from weightscope.core.errors import CheckpointError
from weightscope.model.config.dialects import GIVEN
from weightscope.model.config.rope import Rope
from weightscope.model.layers.layouts import grouped, latent
from weightscope.model.rows import mixers
from weightscope.model.rows.cells import Gguf
from weightscope.model.rows.family import Family

# Inverses of the changes to matrices in ggml's format: functions of an array and of head counts.

# (stored values, query heads, key-value heads) -> values
Undo = Callable[..., np.ndarray]


def queries_in_halves(rows: np.ndarray, n_heads: int, *_: int) -> np.ndarray:
    """Rows of queries from ggml's 0, r/2, 1, r/2 + 1 ... in a head, as it rotates neighbours."""
    pairs = rows.reshape(n_heads, len(rows) // (2 * n_heads), 2, *rows.shape[1:])  # (H, r/2, 2, in)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def keys_in_halves(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Rows of keys likewise."""
    return queries_in_halves(rows, n_kv_heads)


def turned(w: np.ndarray, *_: int) -> np.ndarray:
    """GPT-2's weights, (in, out), from ggml's (out, in)."""
    return w.T


def in_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Rows of all queries, all keys, all values -> groups of queries with their key and value."""
    r = len(rows) // (n_heads + 2 * n_kv_heads)
    q, k, v = np.split(rows, [n_heads * r, (n_heads + n_kv_heads) * r])
    # (G, heads r, in)
    groups = [part.reshape(n_kv_heads, -1, *rows.shape[1:]) for part in (q, k, v)]
    return np.concatenate(groups, axis=1).reshape(rows.shape)


def less_one(gamma: np.ndarray, *_: int) -> np.ndarray:
    """w of a norm with gain 1 + w, which is stored as 1 + w."""
    return gamma - np.float32(1)


def channels_second(kernel: np.ndarray, *_: int) -> np.ndarray:
    """PyTorch's kernels of convolutions (out, in, ...) from mlx's (out, ..., in)."""
    return np.moveaxis(kernel, -1, 1)


def one_channel(kernels: np.ndarray, *_: int) -> np.ndarray:
    """Convolutions of single channels with their axis of one channel: (d, k) -> (d, 1, k)."""
    return kernels[:, None]


def one_channel_of_four(kernels: np.ndarray, *_: int) -> np.ndarray:
    """Kimi's convolutions, which ggml has with four axes: (1, d, 1, k) -> (d, 1, k)."""
    return kernels.reshape(-1, 1, kernels.shape[-1])


def flat(values: np.ndarray, *_: int) -> np.ndarray:
    """Vectors that are stored as columns, or in groups."""
    return values.reshape(-1)


def logarithm(decay: np.ndarray, *_: int) -> np.ndarray:
    """State spaces' log(-A) from ggml's A, to the last digit of exp; Mamba 2's (H,) is a column."""
    decay = decay[:, 0] if decay.shape[1:] == (1,) else decay
    with np.errstate(all="ignore"):  # a broken file's are NaN
        return np.log(-decay.astype(np.float64)).astype(np.float32)


# Inverses for mixers' tensors, by ggml's names.
UNDONE: dict[str, Undo] = {
    "shortconv.conv": one_channel,
    "ssm_conv1d": one_channel,
    **{f"ssm_conv1d_{letter}": one_channel_of_four for letter in "qkv"},
    "ssm_a": logarithm,
    "ssm_d": flat,
    "ssm_norm": flat,
}
# Least number of axes; 1 for others.
AXES: dict[Undo, int] = {turned: 2, one_channel: 2, one_channel_of_four: 4, flat: 2}
# Shape of the stored values -> shape; the same for others.
SHAPES: dict[Undo, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    turned: lambda shape: shape[::-1],
    one_channel: lambda shape: (shape[0], 1, *shape[1:]),
    one_channel_of_four: lambda shape: (prod(shape[:-1]), 1, shape[-1]),
    flat: lambda shape: (prod(shape),),
    channels_second: lambda shape: (shape[0], shape[-1], *shape[1:-1]),
    logarithm: lambda shape: shape[:1] if shape[1:] == (1,) else shape,
}

OF_ROWS: tuple[Undo, ...] = (queries_in_halves, keys_in_halves, in_groups)  # rows stay whole


# Values of config.json without a key of their own in a GGUF file, by architecture.

OF_27_BILLION = (46, 62)  # layers of the largest Gemma 2 and Gemma 3


def gemma_scalar(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """query_pre_attn_scalar, as llama.cpp has it: the head's width, but d / H in the largest."""
    own_keys = keys.inside("own")
    heads, d = own_keys.size("attention.head_count"), own_keys.size("embedding_length")
    head_dim = own_keys.size("attention.key_length", default=d // heads)
    scalar = d / heads if own_keys.get("block_count") in OF_27_BILLION else head_dim
    values = {"query_pre_attn_scalar": scalar}
    if (softcap := own_keys.get("attn_logit_softcapping")) is not None:
        values["attn_logit_softcapping"] = softcap
    return values


def stablelm_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The network's place; norms of queries and keys, stored in another way, are refused."""
    if "attn_q_norm.weight" in names:
        raise CheckpointError(
            "has norms of queries and keys, which are not read of this architecture", file=keys.file
        )
    return neox_config(keys, names)


def neox_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The network's place: use_parallel_residual."""
    return {"use_parallel_residual": keys.inside("own").get("use_parallel_residual")}


def granite_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Multipliers of scores and embeddings."""
    own_keys = keys.inside("own")
    scales = {
        "attention_multiplier": own_keys.get("attention.scale"),
        "embedding_multiplier": own_keys.get("embedding_scale"),
    }
    return {key: shortest(scale) for key, scale in scales.items() if isinstance(scale, float)}


def minicpm_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Scales of branches and logits, as config.json has them."""
    own_keys = keys.inside("own")
    layers, d = own_keys.size("block_count"), own_keys.size("embedding_length")
    return {
        "scale_depth": shortest(own_keys.number("residual_scale") * sqrt(layers)),
        "dim_model_base": shortest(d / own_keys.number("logit_scale", smallest=1e-6)),
    }


def ministral_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Weights of YaRN's temperature, and attention's temperature by position; none is 0."""
    own_keys = keys.inside("own")
    weight, beta = (own_keys.get(key, 0.0) for key in (LOG_MULTIPLIER, TEMPERATURE))
    scaling = own_keys.get("rope.scaling.type")
    if beta and scaling != "yarn":
        problem = "has a temperature of attention and no YaRN, which is not read"
        raise CheckpointError(problem, file=keys.file)
    if scaling in (None, "none"):  # transformers' class scales where a config says nothing
        return {"rope_scaling": {"rope_type": "default"}}
    weights = {"mscale_all_dim": weight, "llama_4_scaling_beta": beta}
    return {"rope_weights": {"mscale": 1.0, **{key: shortest(x) for key, x in weights.items()}}}


def step_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Rotations by type: layers that see everything turn half of each head."""
    own_keys = keys.inside("own")
    if not isinstance(own_keys.get(f"attention.{WINDOWS}"), list):
        raise CheckpointError("has no list of layers with a window", file=keys.file)
    full, local = (shortest(own_keys.get(f"rope.freq_base{end}")) for end in ("", "_swa"))
    kinds = {
        "full_attention": (full, 0.5),
        "sliding_attention": (full if local is None else local, 1.0),
    }
    return {
        "query_pre_attn_scalar": own_keys.size("attention.key_length"),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
            for kind, (base, share) in kinds.items()
        },
    }


def gemma4_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Sizes of heads by type of layer, and whether layers that see everything have no values."""
    own_keys = keys.inside("own")
    if ROPE_FACTORS[0] not in names:
        problem = f"has no {ROPE_FACTORS[0]}, which says how much of a head turns"
        raise CheckpointError(problem, file=keys.file)
    head_dim, turning = (
        own_keys.size(f"{key}_swa") for key in ("attention.key_length", "rope.dimension_count")
    )
    windows, groups, widths = (
        own_keys.get(key)
        for key in (f"attention.{WINDOWS}", "attention.head_count_kv", "feed_forward_length")
    )
    if not isinstance(windows, list) or head_dim != turning:
        problem = "has no list of layers with a window, or turns a part of their heads"
        raise CheckpointError(problem, file=keys.file)
    full = [i for i, window in enumerate(windows) if not window]
    sizes = {i: {"head_dim": own_keys.size("attention.key_length")} for i in full}
    values: dict[str, Any] = {"head_dim": head_dim}
    if isinstance(groups, list) and len(groups) == len(windows) and any(windows):
        sizes = {i: {**size, "num_key_value_heads": groups[i]} for i, size in sizes.items()}
        values["num_key_value_heads"] = groups[windows.index(True)]
    borrowed = [
        i
        for i in full
        if f"blk.{i}.attn_k.weight" in names and f"blk.{i}.attn_v.weight" not in names
    ]
    values |= {
        "per_layer_config": {str(i): size for i, size in sizes.items()},
        "attention_k_eq_v": bool(borrowed),
    }
    if isinstance(widths, list) and widths:
        values |= {"intermediate_size": min(widths), "use_double_wide_mlp": len({*widths}) > 1}
    return values


def t5_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The farthest distance with a bias of its own: no key has it, llama.cpp takes 128."""
    later = re.compile(r"(enc|dec)\.blk\.[1-9]\d*\.attn_rel_b\.weight", re.ASCII)
    if any(map(later.fullmatch, names)):
        problem = "has biases by distance in every layer, as UMT5; such files are not read"
        raise CheckpointError(problem, file=keys.file)
    return {"relative_attention_max_distance": 128}


def delta_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The width of a value head of linear layers."""
    own_keys = keys.inside("own")
    if own_keys.get("ssm.inner_size") is None:
        return {}
    width, heads = own_keys.size("ssm.inner_size"), own_keys.size("ssm.time_step_rank")
    return {"linear_value_head_dim": width // heads}


def mamba2_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Heads of Mamba 2 and their width."""
    own_keys = keys.inside("own")
    heads = own_keys.size("ssm.time_step_rank")
    names_of_heads = ("num_heads", "num_attention_heads", "num_key_value_heads")
    head_dim = own_keys.size("ssm.inner_size") // heads
    return {**dict.fromkeys(names_of_heads, heads), "head_dim": head_dim}


def nemotron_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The pattern of Nemotron-H's layers, by which layers have keys and which a network."""
    own_keys = keys.inside("own")
    network = "E" if own_keys.get("expert_count") else "-"
    attends, widths = (
        own_keys.get(key) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    if not (isinstance(attends, list) and isinstance(widths, list) and len(attends) == len(widths)):
        problem = "has no lists of key-value heads and of networks' widths by layer"
        raise CheckpointError(problem, file=keys.file)
    kinds = zip(attends, widths, strict=True)
    letters = ("*" if heads else network if width else "M" for heads, width in kinds)
    values: dict[str, Any] = {"hybrid_override_pattern": "".join(letters)}
    if network == "E":  # their width is the experts'
        values["intermediate_size"] = None
    return values


# Falcon-H1's multipliers in a file whose weights have them.
MULTIPLIERS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "lm_head_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "key_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        ),
        1.0,
    ),
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
}


def without_multipliers(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """None that is not 1: Falcon-H1's converter multiplies the weights."""
    return {**MULTIPLIERS}


def lfm2_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The network's width, which needs no further adjustment."""
    return {"block_auto_adjust_ff_dim": False}


def falcon_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Falcon's layout, which no key names: the norms and the number of key-value heads tell."""
    kv_heads, two = keys.inside("own").get("attention.head_count_kv"), "attn_norm_2.weight" in names
    # the feed-forward width is ffn_hidden_size here
    width: dict[str, Any] = {"intermediate_size": None}
    if not two and kv_heads in (None, 1):
        return {**width, "new_decoder_architecture": False, "multi_query": True}
    return {
        **width,
        "new_decoder_architecture": True,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 1 + two,
    }


def mpt_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """The bound of queries, keys and values."""
    return {"attn_config": {"clip_qkv": shortest(keys.inside("own").get("attention.clamp_kqv"))}}


def latent_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Widths of the parts of heads made of latents; ggml sees one key-value head, the latent."""
    own_keys = keys.inside("own")
    rotating = own_keys.size("rope.dimension_count")
    weights: dict[str, Any] = {"mscale_all_dim": 0.0}
    if (multiplier := own_keys.get(LOG_MULTIPLIER)) is not None:
        weights = dict.fromkeys(("mscale", "mscale_all_dim"), shortest(10 * multiplier))
    return {
        "num_key_value_heads": own_keys.size("attention.head_count"),
        "head_dim": rotating,
        "qk_rope_head_dim": rotating,
        "qk_nope_head_dim": own_keys.size("attention.key_length_mla") - rotating,
        "v_head_dim": own_keys.size("attention.value_length_mla"),
        "rope_weights": weights,
    }


def indexed_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """Keys of latents, and of layers that choose keys; the others see what was chosen before."""
    values = latent_config(keys, names)
    if isinstance(chooses := keys.inside("own").get(INDEXERS), list):
        values["indexer_types"] = ["full" if each else "shared" for each in chooses]
    return values


def glm4_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """No values, but a file with sections of positions is refused: its rows are reordered."""
    if keys.inside("own").get("rope.dimension_sections") is not None:
        raise CheckpointError(
            "has rows of queries and keys in another order, as GLM 4V; that is not read",
            file=keys.file,
        )
    return {}


def bert_config(keys: Config, names: Collection[str]) -> dict[str, Any]:
    """No values, but other encoders called bert are refused: their position rows differ."""
    if keys.get("tokenizer.ggml.model") != "bert":
        raise CheckpointError(
            "is an encoder with other tokens than BERT's; such files are not read", file=keys.file
        )
    return {}


INDEXERS = "attention.indexer.types"
LOG_MULTIPLIER, TEMPERATURE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
# Keys that these take values from; nothing more of them is to compare.
READ_BY: dict[Callable[..., Any], tuple[str, ...]] = {
    latent_config: (LOG_MULTIPLIER,),
    indexed_config: (LOG_MULTIPLIER, INDEXERS),
    ministral_config: (LOG_MULTIPLIER, TEMPERATURE),
    step_config: ("moe_every_n_layers",),  # llama.cpp does not read it
    gemma4_config: tuple(
        f"{key}_swa"
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    ),
}


# A file of mlx-lm as the checkpoint that it was converted from.

# Types -> norms that mlx-lm counts from 1, transformers from 0 (models/*.py, sanitize).
COUNTED_BY_MLX = {
    r"qwen3_next|qwen3_5(_moe)?(_text)?": (
        r".*((input|post_attention)_layernorm|model\.norm|q_norm|k_norm)"
    ),
    r"step3p5": r".*norm[^.]*",
}


# Parts that mlx-lm splits kv_b_proj into.
KEYS_BY_MLX, VALUES_BY_MLX = "embed_q", "unembed_out"
# Convolutions by their names: mlx has their channels last, PyTorch second.
OF_CONVOLUTION = re.compile(
    r"(.*\.)?(\w*conv\w*|patch_embed\w*(\.proj(ection)?)?)\.weight", re.ASCII
)


def as_before_mlx(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of mlx-lm or mlx-vlm with transformers' norms and layout of convolutions."""
    kind = checkpoint.config.get("model_type")
    norms = next(
        (norms for types, norms in COUNTED_BY_MLX.items() if re.fullmatch(types, str(kind))), ""
    )
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.items():
        if norms and re.fullmatch(rf"{norms}\.weight", name) and len(stored.shape) == 1:
            tensors[name] = RestoredTensor(stored, less_one, 1, 1)
        elif len(stored.shape) > 2 and OF_CONVOLUTION.fullmatch(name):
            tensors[name] = RestoredTensor(stored, channels_second, 1, 1)
    restored = checkpoint.with_tensors(tensors) if tensors else checkpoint
    return _with_latents_joined(restored)


def _with_latents_joined(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with maps out of latents in one tensor; mlx-lm has two, by heads."""
    tensors = dict(checkpoint)
    for name in [name for name in checkpoint if name.endswith(f".{KEYS_BY_MLX}.weight")]:
        stem = name.removesuffix(f"{KEYS_BY_MLX}.weight")
        values = tensors.pop(f"{stem}{VALUES_BY_MLX}.weight", None)
        if values is not None:
            full = f"{stem}kv_b_proj.weight"
            tensors[full] = OutOfLatent(renamed(tensors.pop(name), full), values)
    if len(tensors) == len(checkpoint):
        return checkpoint
    joined = Checkpoint(
        checkpoint.folder, checkpoint.files, tensors, checkpoint.config, checkpoint.name
    )
    joined.weight_files = checkpoint.weight_files
    return joined


# A GGUF file as the checkpoint that it was converted from, the conversion undone.
#
# Names become Hugging Face's again, and the file's keys a config. Rows of Q and K go back to their
# places: ggml rotates neighbouring coordinates, Hugging Face the two halves of a head.

# Parts that the converter splits kv_b_proj into.
KEYS_OF_LATENT, VALUES_OF_LATENT = "k_b_proj", "v_b_proj"

# The role of each module (`Family.roles`) by ggml's name for it, whatever the architecture.
ROLES = {
    "token_embd": "tokens",
    "position_embd": "positions",
    "token_types": "types",
    "token_embd_norm": "norm.inputs",
    "output_norm": "norm.outputs",
    "output": "unembedding",
    "attn_norm": "norm.before",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "q+k+v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output_norm": "norm.after_attention",
    "post_attention_norm": "norm.attention_output",
    "ffn_norm": "norm.mlp",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "norm.mlp_output",
    "layer_output_norm": "norm.after",
}
# Modules of latent attention by ggml's names: the last parts of their names.
OF_LATENTS = {
    "attn_q": "q_proj",
    "attn_q_a": "q_a_proj",
    "attn_q_b": "q_b_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": KEYS_OF_LATENT,
    "attn_v_b": VALUES_OF_LATENT,
}
# Meaning in config.json -> key after the architecture's name.
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
# Values of rope_scaling by the key after "rope.scaling.".
SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    },
}
WINDOWS = "sliding_window_pattern"
EPSILONS = ("layer_norm_epsilon", "norm_epsilon", "norm_eps")  # further names of it in rows
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
MOST_FACTORS = 4096
STILL = 1e29  # factors from here on stop a pair of dimensions; llama.cpp writes 1e30
FULL = "full_attention"
# Llama 3's parameters of scaled rotations, the same in every model; only the factor differs.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
LEAST_SHARE = 0.01  # share of a pair's scaling, from which the original length of texts follows


def as_published(checkpoint: Checkpoint, families: Callable[[], Sequence[Family]]) -> Checkpoint:
    """The checkpoint under Hugging Face's names and in Hugging Face's order."""
    file = checkpoint.config.file
    row, gguf = _row_of(checkpoint.config, families())
    present = {name.split(".", 2)[2] for name in checkpoint if name.startswith("blk.")}
    present |= {*checkpoint}
    config = {"model_type": row.types[0], **_config(checkpoint.config, row, gguf, present)}
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    if gguf.roles:  # they depend on the config
        row = row.configured({**row.config.defaults, **config})
    modules = modules_of(row, gguf)
    undone = _undone(row, gguf)
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.items():
        if name in ROPE_FACTORS:
            continue
        module, full = _of_stack(name, row, gguf.whole) or _published_name(name, row, modules)
        if full in tensors:
            raise CheckpointError("has two tensors that mean the same", file=file, tensor=name)
        named = _renamed(stored, full)
        undo = undone.get(module)
        if undo in (less_one, one_channel) and full.endswith(".bias"):
            undo = None
        if undo is None or len(stored.shape) < AXES.get(undo, 1):
            tensors[full] = named
        else:
            tensors[full] = RestoredTensor(named, undo, *heads)
    if row.heads.layout is latent:
        _join_latents(tensors, row, file)
    _restore_mixers(tensors, row, gguf, Config(config, file))
    tensors |= _scalars(checkpoint, row, gguf, Config(config, file).size("num_hidden_layers"))
    config |= _factors(checkpoint, Config(config, file))
    tokens = tensors.get(row.prefixes[0] + row.inputs.tokens)
    config["vocab_size"] = tokens.shape[0] if tokens is not None and tokens.shape else None
    config["tie_word_embeddings"] = "output.weight" not in present
    published = Checkpoint(
        checkpoint.folder, checkpoint.files, tensors, Config(config, file), checkpoint.name
    )
    published.weight_files = checkpoint.weight_files
    return published


def _row_of(keys: Config, families: Sequence[Family]) -> tuple[Family, Gguf]:
    """The row that reads an architecture's files; of several, the one with most `given` keys."""
    named = keys.get("general.architecture")

    def is_there(key: str) -> bool:
        name, _, value = key.partition("=")
        stored = keys.get(name) if keys.get(name) is not None else keys.get(f"{named}.{name}")
        return stored == value if value else stored not in (None, 0)

    rows = [(row, row.gguf) for row in families if row.gguf is not None]
    fitting = [
        (row, gguf)
        for row, gguf in rows
        if named in gguf.architecture and all(map(is_there, gguf.given))
    ]
    if not fitting:
        known = ", ".join(dict.fromkeys(name for _, gguf in rows for name in gguf.architecture))
        raise CheckpointError(
            f"is of architecture '{str(named)[:40]}'; read are {known}", file=keys.file
        )
    return max(fitting, key=lambda pair: len(pair[1].given))


def modules_of(row: Family, gguf: Gguf) -> dict[str, str]:
    """The row's modules by ggml's names."""
    fused = row.roles.get("gate+up")
    roles = {**({"gate": fused, "up": fused} if fused else {}), **row.roles}
    for role, names in row.also.items():
        # module stored as it was, and not an expert's
        if role not in roles and names and not {" ", "{"} & {*names[0]}:
            roles[role] = names[0]
    named = {
        name: module
        for name, role in {**ROLES, **gguf.roles}.items()
        if (module := roles.get(role))
    }
    if row.heads.layout is latent:
        attention = row.heads.k.rpartition(".")[0]
        named |= {name: f"{attention}.{last}" for name, last in OF_LATENTS.items()}
    return {**named, **mixers.named_by_ggml(row.mixer), **gguf.modules}


def _undone(row: Family, gguf: Gguf) -> dict[str, Undo]:
    """Functions that restore the weights of some modules."""
    heads, mlp, qk_norm = row.heads, row.mlp, row.scores.qk_norm
    undone: dict[str, Undo] = {}
    if heads.layout is grouped:
        undone[heads.q] = in_groups
    if gguf.halves:
        undone |= {heads.q: queries_in_halves, heads.k: keys_in_halves}
    for module in (*heads.projections, *((mlp.up, mlp.gate, mlp.down) if mlp else ())):
        if module.rpartition(".")[2] in heads.transposed:
            undone[module] = turned
    norms = [row.norms.before, row.outputs and row.outputs.norm]
    norms += [mlp.norm, mlp.attention_norm, mlp.output_norm] if mlp else []
    undone |= {norm.module: less_one for norm in norms if norm and norm.offset}
    if qk_norm and qk_norm.offset:
        undone |= {qk_norm.query: less_one, qk_norm.key: less_one}
    by_ggml = mixers.named_by_ggml(row.mixer)
    return undone | {by_ggml[name]: undo for name, undo in UNDONE.items() if name in by_ggml}


def _of_stack(name: str, row: Family, names: Mapping[str, str]) -> tuple[str, str] | None:
    """`enc.blk.3.attn_q.weight` -> encoder.block.3.layer.0.SelfAttention.q.weight."""
    parts = re.fullmatch(r"((?:\w+\.)*?)(?:(\d{1,7})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if not parts or not (known := names.get(f"{parts[1]}{'{i}.' if parts[2] else ''}{parts[3]}")):
        return None
    return "", f"{row.prefixes[0]}{known.format(i=parts[2] and int(parts[2]))}.{parts[4]}"


def _published_name(name: str, row: Family, modules: Mapping[str, str]) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> its module in the row and its full name; unknown names as they are.

    A q/k-norm that the row does not name is put into the attention module, where it is refused.
    """
    parts = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+(?:\.\w+)?)\.(weight|bias)", name, re.ASCII)
    if not parts:
        parts = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+(?:\.scale)?)()", name, re.ASCII)
    if not parts:
        return "", name
    stem = row.prefixes[0] + (row.layer.format(i=int(parts[1])) if parts[1] else "")
    if tensor := modules.get(f"{parts[2]}.{parts[3]}".rstrip(".")):
        return tensor, stem + tensor
    module = modules.get(parts[2], "")
    if not module and parts[1] and ROLES.get(parts[2]) in ("q_norm", "k_norm"):
        module = f"{row.heads.out.rpartition('.')[0]}.{parts[2]}"
    if not module:
        return "", name
    if parts[2] == "output" and not parts[1]:  # as `Outputs.tokens` says
        stem = ""
    return module, f"{stem}{module}.{parts[3]}"


def _config(keys: Config, row: Family, gguf: Gguf, present: set[str]) -> dict[str, Any]:
    """Values of config.json."""
    start = f"{keys.get('general.architecture')}."
    own_keys = {
        key.removeprefix(start): value for key, value in keys.items() if key.startswith(start)
    }
    named = {**KEYS, **gguf.keys}
    values = {
        meaning: shortest(own_keys[key])
        for meaning, key in named.items()
        if own_keys.get(key) is not None
    }
    if row.refused:  # its head counts are 0
        values |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1)
    # further layers, which predict the tokens after the next
    if own_keys.get("nextn_predict_layers"):
        predicting = Config(own_keys, keys.file).size("nextn_predict_layers")
        values["num_hidden_layers"] = (
            Config(values, keys.file).size("num_hidden_layers") - predicting
        )
    values |= _by_layer(Config(values, keys.file), own_keys, row, gguf)
    config = Config(values, keys.file)
    if (first := keys.get("tokenizer.ggml.bos_token_id")) is not None:
        values["bos_token_id"] = first
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads if row.heads.kv_heads != 1 else 1)
    values["num_key_value_heads"] = kv_heads
    head_dim = config.size("head_dim", default=config.size("hidden_size") // heads)
    if "head_dim" in row.config.defaults:
        values["head_dim"] = head_dim
    theta_key = row.rope.theta_key if isinstance(row.rope, Rope) else ""
    if theta_key not in ("", "rope_theta") and "rope_theta" in values:
        values[theta_key] = values.pop("rope_theta")
    scaling = str(own_keys.get("rope.scaling.type") or "none")
    if scaling in SCALINGS:
        values["rope_scaling"] = {"rope_type": scaling}
        for name, key in SCALINGS[scaling].items():
            if (value := own_keys.get(f"rope.scaling.{key}")) is not None:
                values["rope_scaling"][name] = shortest(value)
    elif scaling not in ("none", "longrope"):
        raise CheckpointError(
            f"scales its rotations by '{scaling[:40]}', which is not read", file=keys.file
        )
    if isinstance(sections := own_keys.get("rope.dimension_sections"), list):
        values["rope_scaling"] = {
            "rope_type": "default",
            **values.get("rope_scaling", {}),
            "mrope_section": sections[:3],
        }
    turning = Config(own_keys, keys.file).size(
        "rope.dimension_count", default=head_dim, largest=head_dim
    )
    _by_type(values, row, gguf, own_keys)
    if isinstance(row.rope, Rope) and row.rope.dims_key:
        values[row.rope.dims_key] = turning
    elif turning != head_dim and row.rope is not None:
        if not isinstance(row.rope, Rope) or row.rope.fraction is None:
            raise CheckpointError(
                "rotates a part of each head alone, which is not read", file=keys.file
            )
        values[row.rope.fraction_key] = turning / head_dim
    elif isinstance(row.rope, Rope) and row.rope.fraction is not None:
        values[row.rope.fraction_key] = 1.0
    if own_keys.get("expert_count") and not gguf.experts:
        raise CheckpointError(
            "has experts; mixtures under this architecture are not read", file=keys.file
        )
    stored = {
        row.heads.bias.q: ("attn_q.bias", "attn_qkv.bias"),
        row.heads.bias.out: ("attn_output.bias",),
    }
    values |= {
        key: bool(present & {*names})
        for key, names in reversed(stored.items())
        if isinstance(key, str)
    }
    if (eps := values.get("layer_norm_eps")) is not None:
        values |= {key: eps for key in EPSILONS if key in row.config.defaults}
    values |= gguf.config(Config({**keys, "own": own_keys}, keys.file), present)
    if (weights := values.pop("rope_weights", {})) and "rope_scaling" in values:
        values["rope_scaling"] |= weights
    return values


def _join_latents(tensors: dict[str, Tensor], row: Family, file: object) -> None:
    """Join keys and values of a latent, which the converter splits, into one matrix."""
    attention, _, last = row.heads.v.rpartition(".")
    for name in [name for name in tensors if name.endswith(f"{attention}.{KEYS_OF_LATENT}.weight")]:
        stem = name.removesuffix(f"{KEYS_OF_LATENT}.weight")
        keys, values = tensors.pop(name), tensors.pop(f"{stem}{VALUES_OF_LATENT}.weight", None)
        if values is None:
            raise CheckpointError("has keys of a latent, but no values", file=file, tensor=name)
        full = f"{stem}{last}.weight"
        tensors[full] = OutOfLatent(_renamed(keys, full), values)


def _restore_mixers(tensors: dict[str, Tensor], row: Family, gguf: Gguf, config: Config) -> None:
    """Put value heads of linear layers in order, and join what Qwen3-Next has in one tensor."""
    orders = mixers.tiled(config) if gguf.tiled else {}
    modules = mixers.roles_of(row.mixer)
    stem = re.escape(row.prefixes[0] + row.layer).replace(r"\{i\}", r"\d{1,7}")
    layer = re.compile(f"{stem}(.*)", re.ASCII)
    for name in [*tensors]:
        inner = layer.fullmatch(name)
        module = inner[1].removesuffix(".weight") if inner else ""
        role = modules.get(module, "").removeprefix(mixers.OF_MIXER)
        if (order := orders.get(role)) and order.divides(tensors[name].shape):
            stored = tensors[name]
            if role == "A_log" and isinstance(stored, RestoredTensor):  # the logarithm is last
                ordered = RestoredTensor(stored.stored, order, 1, 1)
                tensors[name] = replace(stored, stored=ordered)
            else:
                tensors[name] = RestoredTensor(stored, order, 1, 1)
        gates = f"{name.removesuffix('qkv.weight')}z.weight"
        is_split = f"{name.removesuffix('qkv.weight')}ba.weight" in tensors
        if role == "qkv" and is_split and gates in tensors:
            n_keys = config.size("linear_num_key_heads")
            full = f"{name.removesuffix('.weight')}z.weight"
            rows = _renamed(tensors.pop(name), full)
            tensors[full] = mixers.JoinedGates(rows, tensors.pop(gates), n_keys)


def _renamed(stored: Tensor, name: str) -> Tensor:
    return replace(stored, name=name) if isinstance(stored, GgufTensor) else stored


def _by_layer(
    config: Config, own_keys: Mapping[str, Any], row: Family, gguf: Gguf
) -> dict[str, Any]:
    """Values that a file has for each layer: sizes of heads, and layers' types."""
    values: dict[str, Any] = {}
    by_layer: dict[str, dict[str, int]] = {}
    n_layers = config.size("num_hidden_layers")
    pattern = own_keys.get(f"attention.{WINDOWS}")
    windows = pattern[:n_layers] if isinstance(pattern, list) else []
    listed = {
        name: each[:n_layers]
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        if isinstance(each := config.get(name), list)
    }
    for name, each in listed.items():
        sizes = [size for size in each if type(size) is int and size > 0]
        if len({*sizes}) != 1 and name != "intermediate_size":
            # rows whose order depends on the number of heads are restored for one number
            if gguf.halves or row.heads.layout is grouped or 0 in each or len(sizes) != n_layers:
                raise config.error(name, "the same in every layer")
            base = each[windows.index(False)] if False in windows else each[0]
            for i, size in enumerate(each):
                if size != base:
                    by_layer.setdefault(str(i), {})[name] = size
            sizes = [base]
        values[name] = max(sizes, default=0)
        if name == "num_key_value_heads" and 0 in each:
            values["layer_types"] = [
                "full_attention" if size else "linear_attention" for size in each
            ]
    if isinstance(recurrent := own_keys.get("attention.recurrent_layers"), list):
        values["layer_types"] = [
            "linear_attention" if is_linear else "full_attention"
            for is_linear in recurrent[:n_layers]
        ]
    if by_layer:
        values["per_layer_config"] = by_layer
    if windows:
        values["layer_types"] = ["sliding_attention" if window else FULL for window in windows]
    return values


def _by_type(values: dict[str, Any], row: Family, gguf: Gguf, own_keys: Mapping[str, Any]) -> None:
    """Give every type of layers its rotation, where bases differ and the row has no key for it."""
    local = own_keys.get("rope.freq_base_swa")
    if "rope.freq_base_swa" in gguf.keys.values() or not isinstance(row.rope, Rope):
        return
    as_global = row.rope.local is not None and row.rope.local[0] == "rope_theta"
    has_windows = "sliding_attention" in values.get("layer_types", ())
    if as_global or (local is not None and not row.rope.local and has_windows):
        base, scaling = values.pop("rope_theta", None), values.pop("rope_scaling", {})
        local = base if local is None else shortest(local)
        values["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": base, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }


def _factors(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """Scaling of rotations stored in tensors: Llama 3's, and Phi-3's two lists of factors."""
    factors, *both = (checkpoint.get(name) for name in ROPE_FACTORS)
    if factors is not None:
        by_type = config.get(GIVEN)
        if not isinstance(by_type, Mapping) or FULL not in by_type:
            return {"rope_scaling": _llama3_scaling(factors.read().reshape(-1), config)}
        # factors of layers that see everything; the others turn as they are
        scaled = _of_full_layers(factors.read().reshape(-1), Config(by_type[FULL], config.file))
        return {GIVEN: {**by_type, FULL: {**by_type[FULL], **scaled}}}
    lists = {}
    for name, tensor in zip(("short_factor", "long_factor"), both, strict=True):
        if tensor is None:
            return {}
        if np.prod(tensor.shape) > MOST_FACTORS:
            wanted = "a factor for each pair of a head's dimensions was expected"
            raise tensor.refuse(f"has shape {tensor.shape}; {wanted}")
        lists[name] = tensor.read().reshape(-1).tolist()
    key = f"{checkpoint.config.get('general.architecture')}.rope.scaling.original_context_length"
    original = checkpoint.config.get(key) or config.get("max_position_embeddings")
    return {
        "rope_scaling": {"rope_type": "longrope", **lists},
        "original_max_position_embeddings": original,
    }


def _of_full_layers(factors: np.ndarray, given: Config) -> dict[str, Any]:
    """Rotation of layers that see everything, where the others have one of their own."""
    turning = factors < STILL
    if turning.all():
        share = given.number("partial_rotary_factor", default=1.0, largest=1.0)
        return _llama3_scaling(factors[: int(len(factors) * share)], given)
    n = int(turning.sum())
    if not (factors[:n] == 1).all():
        raise CheckpointError(
            "scales some pairs of a head and leaves others as they are", file=given.file
        )
    return {"rope_type": "proportional", "partial_rotary_factor": n / len(factors)}


def shortest(value: Any) -> Any:
    """A float32 as its shortest decimal: 1e-05 where the file has 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _scalars(checkpoint: Checkpoint, row: Family, gguf: Gguf, n_layers: int) -> dict[str, Tensor]:
    """Tensors of one value, which the header lists for every layer."""
    tensors: dict[str, Tensor] = {}
    for key, module in gguf.scalars.items():
        listed = checkpoint.config.get(key)
        listed = [listed] * n_layers if type(listed) is float else listed
        if not isinstance(listed, list) or [*map(type, listed)] != [float] * n_layers:
            raise checkpoint.config.error(key, f"a list of {n_layers} numbers, one for each layer")
        name, _, is_vector = module.partition(" as ")
        for index, value in enumerate(listed):
            full = f"{row.prefixes[0]}{row.layer.format(i=index)}{name}"
            tensors[full] = HeaderTensor(
                full, checkpoint.files[0], value, (1,) if is_vector else ()
            )
    return tensors


def _llama3_scaling(stored: np.ndarray, config: Config) -> dict[str, Any]:
    """Llama 3's parameters of scaled rotations, from the file's factors, which check them.

    Most models were trained on texts of 8192; else a pair that is scaled in part shows the length.
    """
    factors = stored.astype(np.float64)
    theta = config.number("rope_theta", default=10000.0, smallest=1.001)
    factor = float(factors.max(initial=1.0))
    if not len(factors) or factors.min() <= 0:
        raise CheckpointError(
            "scales its rotations by factors that are not above 0", file=config.file
        )
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    # unscaled part of each pair
    share = (1 / factors - 1 / factor) / max(1 - 1 / factor, 1e-9)
    in_part = (share > LEAST_SHARE) & (share < 1 - LEAST_SHARE)
    implied = wavelengths[in_part] * (LOW + share[in_part] * (HIGH - LOW))
    for original in (ORIGINAL, *map(int, np.rint(implied[np.isfinite(implied)][:1]))):
        smooth = np.clip((original / wavelengths - LOW) / (HIGH - LOW), 0, 1)
        if np.allclose(1 / factors, (1 - smooth) / factor + smooth, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    # other bounds: a factor for each pair
    lists = dict.fromkeys(("short_factor", "long_factor"), factors.tolist())
    return {"rope_type": "longrope", **lists, "attention_factor": 1.0}


@dataclass(frozen=True)
class RestoredTensor(DerivedTensor, WholeTensor):
    """A tensor as it was before the conversion."""

    undo: Undo
    n_heads: int
    n_kv_heads: int

    def __post_init__(self) -> None:
        divided: dict[Undo, int] = {
            queries_in_halves: 2 * self.n_heads,
            keys_in_halves: 2 * self.n_kv_heads,
            in_groups: self.n_heads + 2 * self.n_kv_heads,
        }
        parts = divided.get(self.undo, 1)
        if self.stored.shape[0] % parts or (parts > 1 and 0 in self.stored.shape):
            counts = f"{self.n_heads} heads of {self.n_kv_heads} keys and values"
            raise self.stored.refuse(f"has shape {self.stored.shape}, which {counts} do not divide")

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES[self.undo](self.stored.shape) if self.undo in SHAPES else self.stored.shape

    def ends(self) -> tuple[Tensor, Tensor, int | tuple[float, ...]] | None:
        ends = None if self.undo is logarithm else self.stored.ends()  # it would swap them
        if ends is None:
            return None
        first, last = (
            end if self.undo in OF_ROWS else Repeated(end, self.stored.shape) for end in ends[:2]
        )
        return replace(self, stored=first), replace(self, stored=last), ends[2]

    def read(self) -> np.ndarray:
        return np.ascontiguousarray(self.undo(self.stored.read(), self.n_heads, self.n_kv_heads))

    @property
    def _pieces(self) -> int:
        """Number of pieces of rows that are undone one by one; 0 where all rows are mixed."""
        pieces: dict[Undo, int] = {
            queries_in_halves: self.n_heads,
            keys_in_halves: self.n_kv_heads,
            less_one: self.shape[0],
            one_channel: self.shape[0],
        }
        return pieces.get(self.undo, 0)

    @property
    def piece(self) -> int:
        return self.shape[0] // self._pieces if self._pieces else 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        if not self._pieces:
            return super().rows(start, stop)
        self.check_rows(start, stop)
        r = self.shape[0] // self._pieces
        first, last = start // r, -(-stop // r)
        if first >= last:
            return self.stored.rows(start, stop)
        pieces = self.undo(self.stored.rows(first * r, last * r), last - first, last - first)
        return np.ascontiguousarray(pieces[start - first * r : stop - first * r])

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        return Tensor.blocks(self, n_rows) if self._pieces else super().blocks(n_rows)


@dataclass(frozen=True)
class HeaderTensor(WholeTensor):
    """A tensor of one value from the header."""

    name: str
    file: Storage
    value: float
    sizes: tuple[int, ...]
    noted: set[str] | None = field(default=None, compare=False)
    dtype = "F32"
    parts = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, noted=noted)

    def read(self) -> np.ndarray:
        return self.check_finite(np.full(self.shape, self.value, np.float32))


@dataclass(frozen=True)
class Repeated(DerivedTensor, WholeTensor):
    """Values that neighbours share, once for each."""

    full: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.full

    def read(self) -> np.ndarray:
        return np.repeat(self.stored.read(), self.full[-1] // self.stored.shape[-1], axis=-1)


@dataclass(frozen=True)
class OutOfLatent(DerivedTensor, WholeTensor):
    """Maps from the latent to keys and values; ggml has them apart, the keys transposed."""

    stored: Tensor  # (H, latent, k)
    values: Tensor  # (H, v, latent)

    def __post_init__(self) -> None:
        shape, of_values = self.stored.shape, self.values.shape
        if len(shape) != 3 or shape[:2] != of_values[::2]:
            problem = f"has shape {shape}, which {of_values} of '{self.values.name}' do not fit"
            wanted = "(heads, latent, k) and (heads, v, latent) were expected"
            raise self.stored.refuse(f"{problem}; {wanted}")

    @property
    def shape(self) -> tuple[int, ...]:
        (heads, rank, k), (_, v, _) = self.stored.shape, self.values.shape
        return heads * (k + v), rank

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.stored.parts, *self.values.parts)

    def unchecked(self, noted: set[str]) -> Tensor:
        stored, values = self.stored.unchecked(noted), self.values.unchecked(noted)
        return replace(self, stored=stored, values=values)

    def read(self) -> np.ndarray:
        # (H, k + v, latent)
        both = np.concatenate([self.stored.read().swapaxes(1, 2), self.values.read()], axis=1)
        return both.reshape(self.shape)
