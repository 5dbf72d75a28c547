"""Rules that rows name: scales of scores, types and sizes of layers, derived values of a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.model.config.config import ModelConfig, listed_sizes, stated
from weightscope.model.layers.rotation import yarn_temperature

# Scales of scores.


def default_scale(config: ModelConfig, layer: int) -> float:
    """1 / sqrt(d'), the usual scale of attention scores."""
    return float(config.head_dim**-0.5)


def gpt2_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d') or 1, as scale_attn_weights says; over the layer's number if configured."""
    scale = default_scale(config, layer) if config.get("scale_attn_weights") else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale


def unscaled(config: ModelConfig, layer: int) -> float:
    """1: GPT-Neo does not scale scores."""
    return 1.0


def mpt_scale(config: ModelConfig, layer: int) -> float:
    """attn_config.softmax_scale, or 1/sqrt(d')."""
    return config.inside("attn_config").number(
        "softmax_scale", default=default_scale(config, layer)
    )


def query_scalar(config: ModelConfig, layer: int) -> float:
    """Gemma 2 and 3: 1/sqrt(query_pre_attn_scalar), which need not be the head's width."""
    return float(config.number("query_pre_attn_scalar", smallest=1e-6) ** -0.5)


def multiplier(config: ModelConfig, layer: int) -> float:
    """Granite: attention_multiplier, as it is."""
    return config.number("attention_multiplier")


def deepseek_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d') times the square of YaRN's temperature where the scaling has mscale_all_dim."""
    scaling = config.rope[config.layer_types[layer]]
    weight = scaling.number("mscale_all_dim", default=0)
    if not weight or scaling["rope_type"] == "default":
        return default_scale(config, layer)
    return (
        default_scale(config, layer)
        * yarn_temperature(scaling.number("factor", smallest=1e-6), weight) ** 2
    )


def multiplier_if_any(config: ModelConfig, layer: int) -> float:
    """HyperCLOVA X: attention_multiplier, or the usual scale where there is none."""
    return config.number("attention_multiplier", default=default_scale(config, layer))


def factored(config: ModelConfig, layer: int) -> float:
    """Muse: qk_scale_factor multiplies normed queries."""
    return float(config.head_dim**-0.5) * config.number("qk_scale_factor")


def deberta_scale(config: ModelConfig, layer: int) -> float:
    """1/sqrt(d' times the number of terms): content, and each kind that pos_att_type names."""
    return float((config.head_dim * (1 + len(position_kinds(config)))) ** -0.5)


def deberta_v2_scale(config: ModelConfig, layer: int) -> float:
    """DeBERTa v2: 1/sqrt(d' times the number of terms), where only c2p and p2c count."""
    terms = 1 + len({"c2p", "p2c"} & {*position_kinds(config)})
    return float((config.head_dim * terms) ** -0.5)


def position_kinds(config: ModelConfig) -> list[str]:
    """The kinds of position terms: a list, or their names joined by "|"."""
    given = config.get("pos_att_type", [])
    kinds = [kind.strip() for kind in given.lower().split("|")] if isinstance(given, str) else given
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise config.error("pos_att_type", "a list of kinds of position terms")
    return kinds


def of_cosines(config: ModelConfig, layer: int) -> float:
    """1/r: queries and keys divided by their root mean squares are sqrt(r) long."""
    return 1 / config.head_dim


def of_doubled_heads(config: ModelConfig, layer: int) -> float:
    """1/sqrt(2 d'): queries and keys have as many dimensions for places as for content."""
    return float((2 * config.head_dim) ** -0.5)


def in_list(config: Config, key: str, index: int, wanted: str) -> Any:
    """The item of a layer or stage in the list under a config key, or refuse."""
    listed = config.get(key)
    if not isinstance(listed, list) or len(listed) <= index:
        raise config.error(key, wanted)
    return listed[index]


# Layers that have something that others lack, such as rotation or norms of queries and keys.


def always(config: ModelConfig, layer: int) -> bool:
    """Every layer."""
    return True


def sliding(config: ModelConfig, layer: int) -> bool:
    """Layers that see a window (Cohere 2, Trinity)."""
    return config.layer_types[layer] == "sliding_attention"


def windowed(config: ModelConfig, layer: int) -> bool:
    """Layers that see a window; none where the config has none, whatever the layers are called."""
    return sliding(config, layer) and config.has("sliding_window")


def windowed_if_any(config: ModelConfig, layer: int) -> bool:
    """Layers that see a window; all where the config has none (EXAONE 4)."""
    return sliding(config, layer) or not config.has("sliding_window")


def listed(config: ModelConfig, layer: int) -> bool:
    """Layers with 1 in no_rope_layers, or by no_rope_layer_interval."""
    return is_rotated(config, layer)


def is_rotated(config: Config, layer: int) -> bool:
    """True if no_rope_layers, or else the interval, says that a layer rotates."""
    given = config.get("no_rope_layers")
    if not given:
        return (layer + 1) % config.size("no_rope_layer_interval") != 0
    if not isinstance(given, list) or len(given) <= layer or given[layer] not in (0, 1):
        raise config.error("no_rope_layers", "a list with 0 or 1 for every layer")
    return bool(given[layer])


def with_parameters(config: ModelConfig, layer: int) -> bool:
    """Layers whose type has an entry in rope_parameters that is not null."""
    given = config.inside("rope_parameters")
    return given.get(config.layer_types[layer], given) is not None


def with_a_base(config: ModelConfig, layer: int) -> bool:
    """All layers where rope_parameters has a base, else none (OLMo Hybrid)."""
    return config.inside("rope_parameters").has("rope_theta")


def windowed_or_leading(config: ModelConfig, layer: int) -> bool:
    """Sliding layers, and dense ones in front unless those have their own pattern of windows."""
    kinds = config.get("mlp_layer_types")
    dense = isinstance(kinds, list) and kinds[layer : layer + 1] == ["dense"]
    return windowed(config, layer) or (
        dense and config.get("prefix_dense_sliding_window_pattern") == 1
    )


def with_base(config: ModelConfig, layer: int) -> bool:
    """Layers without a 0 in layer_rope_theta; all where there is no such list."""
    key = "layer_rope_theta"
    return config.get(key) is None or bool(
        in_list(config, key, layer, "a list with a number for every layer")
    )


# Types of layers.

CALLED = {"M": "mamba", "-": "mlp", "*": "full_attention", "E": "moe"}


@dataclass(frozen=True)
class ByPeriod:
    """Attention in layer i where i % period is offset, both keys of the config; mamba elsewhere."""

    period: str
    offset: str

    def __call__(self, config: Config, n_layers: int) -> tuple[str, ...]:
        period, offset = config.size(self.period), config.count(self.offset)
        return tuple("full_attention" if i % period == offset else "mamba" for i in range(n_layers))


@dataclass(frozen=True)
class AttentionIn:
    """Attention in the layers that the config lists under a key; another mixing elsewhere."""

    key: str

    def __call__(self, config: Config, n_layers: int) -> tuple[str, ...]:
        if not config.has(self.key):
            raise config.error("layer_types", f"a list with every layer's type, or '{self.key}',")
        attention = config.layers(self.key)
        return tuple(
            "full_attention" if i in attention else "linear_attention" for i in range(n_layers)
        )


def by_blocks(config: Config, n_layers: int) -> tuple[str, ...]:
    """Nemotron-H: a pattern of letters, where the config has no list of names."""
    pattern = config.get("hybrid_override_pattern")
    if (
        not isinstance(pattern, str)
        or len(pattern) < n_layers
        or any(letter not in CALLED for letter in pattern)
    ):
        raise config.error("hybrid_override_pattern", f"{n_layers} letters of {', '.join('M-*E')}")
    return tuple(CALLED[letter] for letter in pattern[:n_layers])


def kimi_layers(config: Config, n_layers: int) -> tuple[str, ...]:
    """Kimi Linear's published configs: numbers of attention layers, counted from 1."""
    attends = config.inside("linear_attn_config").get("full_attn_layers")
    if not isinstance(attends, list):
        return stated(config, n_layers)
    return tuple(
        "full_attention" if i + 1 in attends else "linear_attention" for i in range(n_layers)
    )


def in_alternation(config: Config, n_layers: int) -> tuple[str, ...]:
    """MiniMax: every other layer is attention, the first among them."""
    return tuple("linear_attention" if i % 2 else "full_attention" for i in range(n_layers))


def _is_windowed(config: Config) -> bool:
    """True if there is a window, and it is used."""
    return config.get("use_sliding_window") is True and config.has("sliding_window")


def fourth_from_last(config: Config, n_layers: int) -> tuple[str, ...]:
    """Muse: full attention in every fourth layer, counted back from the last."""
    whole = (n_layers - 1) % 4
    kinds = ("full_attention" if i % 4 == whole else "sliding_attention" for i in range(n_layers))
    return tuple(kinds)


def behind_dense(config: Config, n_layers: int) -> tuple[str, ...]:
    """Cohere 2 MoE: windows by one period in dense layers, by another in those after them."""
    dense = min(config.count("first_k_dense_replace"), n_layers)
    kinds: tuple[str, ...] = ()
    parts = (
        ("prefix_dense_sliding_window_pattern", 1, dense),
        ("sliding_window_pattern", 4, n_layers - dense),
    )
    for key, usual, count in parts:
        period = config.size(key, default=usual)
        is_whole = [(i + 1) % period == 0 for i in range(count)]
        kinds += tuple("full_attention" if whole else "sliding_attention" for whole in is_whole)
    return kinds


def from_max_window_layers(config: Config, n_layers: int) -> tuple[str, ...]:
    """Qwen 2 and 3: windows from layer max_window_layers on, where they are used."""
    first = config.count("max_window_layers") if _is_windowed(config) else n_layers
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(n_layers))


def before_max_window_layers(config: Config, n_layers: int) -> tuple[str, ...]:
    """Qwen2-MoE: windows in every other layer before max_window_layers, where they are used."""
    first = config.count("max_window_layers") if config.get("use_sliding_window") is True else 0
    return tuple(
        "full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(n_layers)
    )


def windows_if_used(config: Config, n_layers: int) -> tuple[str, ...]:
    """Qwen3-MoE: windows in all layers or in none."""
    return ("sliding_attention" if _is_windowed(config) else "full_attention",) * n_layers


def windows_if_any(config: Config, n_layers: int) -> tuple[str, ...]:
    """Ministral: windows in all layers or in none; no key turns them off."""
    return ("sliding_attention" if config.has("sliding_window") else "full_attention",) * n_layers


def windows_without_rotation(config: Config, n_layers: int) -> tuple[str, ...]:
    """SmolLM3: windows, where they are used, in the layers that do not rotate."""
    kinds = ("sliding_attention" if _is_windowed(config) else "full_attention", "full_attention")
    return tuple(kinds[is_rotated(config, i)] for i in range(n_layers))


def chunks_with_rotation(config: Config, n_layers: int) -> tuple[str, ...]:
    """Llama 4: the layers that rotate see a chunk of the text."""
    kinds = ("full_attention", "chunked_attention")
    return tuple(kinds[is_rotated(config, i)] for i in range(n_layers))


def in_turn(config: Config, n_layers: int) -> tuple[str, ...]:
    """RecurrentGemma: `block_types` again and again."""
    blocks = config.get("block_types")
    if not isinstance(blocks, list) or not blocks or not set(blocks) <= {"recurrent", "attention"}:
        raise config.error("block_types", "a list of recurrent and attention")
    kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
    return tuple(kinds[blocks[i % len(blocks)]] for i in range(n_layers))


def first_and_second(config: Config, n_layers: int) -> tuple[str, ...]:
    """LongCat: each layer attends twice."""
    return ("first", "second") * (n_layers // 2)


def mllama_layers(config: Config, n_layers: int) -> tuple[str, ...]:
    """Cross-attention, to the image alone, in the layers that the config lists."""
    crossing = config.get("cross_attention_layers")
    if not isinstance(crossing, list):
        raise config.error("cross_attention_layers", "a list of layers")
    return tuple("cross_attention" if i in crossing else "full_attention" for i in range(n_layers))


def positions_first(config: Config, n_layers: int) -> tuple[str, ...]:
    """Positions are added to content in the first layer only, unless the config keeps them."""
    kept = config.get("keep_query_pos") is True
    return tuple(
        "positions_added" if kept or i == 0 else "positions_beside" for i in range(n_layers)
    )


def one_level(config: Config, n_layers: int) -> tuple[str, ...]:
    """The encoder attends on one level of the image; others would be stacks of their own."""
    levels = config.get("encode_proj_layers")
    if not isinstance(levels, list) or len(levels) != 1:
        raise config.error(
            "encode_proj_layers", "a list of one level, the one on which the encoder attends"
        )
    return ("full_attention",) * n_layers


# Values of config keys that differ in a layer.


def own_heads(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Laguna: num_attention_heads_per_layer, where there is such a list."""
    key = "num_attention_heads_per_layer"
    if not config.has(key):
        return {}
    return {
        "num_attention_heads": in_list(
            config, key, layer, "a list with every layer's number of heads"
        )
    }


def twice_where_sliding(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """MiMo-V2: layers that see a window have twice the key-value heads."""
    if config.layer_types[layer] != "sliding_attention":
        return listed_sizes(config, layer)
    return {"num_key_value_heads": 2 * config.size("num_key_value_heads")}


def global_sizes(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Heads of layers that see everything: of `per_layer_config`, or of two keys in its stead."""
    if "per_layer_config" in config or config.layer_types[layer] != "full_attention":
        return listed_sizes(config, layer)
    sizes = {"head_dim": config.size("global_head_dim")}
    if config.has("num_global_key_value_heads") and config.get("attention_k_eq_v", True):
        sizes["num_key_value_heads"] = config.size("num_global_key_value_heads")
    return sizes


def groups_by_layer(config: ModelConfig, layer: int) -> Mapping[str, Any]:
    """Sapiens 2: key-value heads by layer, from a list, or as many as query heads at both ends."""
    key = "num_key_value_heads_per_layer"
    if config.has(key):
        return {
            "num_key_value_heads": in_list(config, key, layer, "a list with every layer's number")
        }
    first, last = (config.count(f"num_{end}_full_attention_layers") for end in ("first", "last"))
    is_full = layer < first or layer >= config.n_layers - last
    return {
        "num_key_value_heads": config.n_heads
        if is_full
        else config.size("num_key_value_attention_heads")
    }


# Values of config keys that follow from others.


DBRX_BASE = 10000.0


def heads_of_attn_config(config: Config) -> dict[str, object]:
    """DBRX's key-value heads, which published files have in `attn_config` alone.

    Its base of rotation is there too, but transformers 5 reads that at the top only. Where a file
    leaves it out there, the model that was trained and the one that transformers builds differ.
    """
    attention = config.inside("attn_config")
    base = attention.get("rope_theta")
    if (
        base not in (None, DBRX_BASE)
        and not config.has("rope_theta")
        and not config.has("rope_parameters")
    ):
        raise attention.error(
            "rope_theta",
            f"at the top of config.json, since transformers 5 takes {DBRX_BASE:g} else",
        )
    return {"num_key_value_heads": attention["kv_n_heads"]} if attention.has("kv_n_heads") else {}


def sizes_of_parts(config: Config) -> dict[str, object]:
    """Moondream's sizes, where the config's own config has any."""
    parts = config.inside("config")
    return {**parts.inside("text"), **parts.inside("vision")}


def part_that_turns(config: Config) -> dict[str, object]:
    """Sarvam 105B, Ling 3.0: head_dim, which is another width in their own files."""
    return {"head_dim": config["qk_rope_head_dim"]} if config.has("qk_rope_head_dim") else {}


def loops_of_losses(config: Config) -> dict[str, object]:
    """Nanbeige: passes over the layers; trained with a loss for each, it has one weight fewer."""
    weights = config.get("loop_loss_weights")
    return {"num_loops": len(weights) + 1} if isinstance(weights, list) and weights else {}


def heads_of_blocks(config: Config) -> dict[str, object]:
    """Nemotron NAS: key-value heads, the same in every layer that attends."""
    per_group = {block.count("n_heads_in_group") for block in _attending(config) if block}
    if len(per_group) != 1:
        raise config.error("block_configs", "one n_heads_in_group for all layers that attend")
    return {"num_key_value_heads": config.count("num_attention_heads") // min(per_group)}


def blocks_with_attention(config: Config, n_layers: int) -> tuple[str, ...]:
    """Nemotron NAS: layers whose attention neither is left out nor is one matrix."""
    kinds = ("full_attention" if block else "no_attention" for block in _attending(config))
    return tuple(kinds)[:n_layers]


def _attending(config: Config) -> list[Config | None]:
    """Attention's part of every block; None where there is none."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise config.error("block_configs", "a list with an object for each layer")
    parts = [Config(block, config.file).inside("attention") for block in blocks]
    return [None if p.get("no_op") or p.get("replace_with_linear") else p for p in parts]


@dataclass(frozen=True)
class OfHalf:
    """FastSpeech2's sizes of one half: from the object of that name, not from the top."""

    half: str

    def __call__(self, config: Config) -> Mapping[str, Any]:
        sizes = config.inside(f"{self.half}_config")
        keys = ("layers", "num_attention_heads", "normalize_before")
        return {f"{self.half}_{key}": sizes[key] for key in keys if key in sizes}


def heads_of_64(config: Config) -> Mapping[str, Any]:
    """The number of heads of 64 dimensions that make the width; the config does not count them."""
    return {"num_attention_heads": config.size("hidden_size") // 64}


def grouping_stages(config: Config) -> Mapping[str, Any]:
    """Stages as layers: those with tokens of groups end with attention to patches."""
    groups = config.layers("num_group_tokens")
    return {
        "num_hidden_layers": len(groups),
        "layer_types": ["cross_attention" if tokens else "none" for tokens in groups],
    }


def adjusted_width(config: Config) -> dict[str, object]:
    """LFM2: two thirds of the network's width, times a factor, up to a whole number of blocks."""
    if not config.get("block_auto_adjust_ff_dim"):
        return {}
    width = int(2 * config.size("intermediate_size") / 3)
    if config.has("block_ffn_dim_multiplier"):
        blocks = config.size("block_multiple_of", default=256)
        width = -(int(config.number("block_ffn_dim_multiplier") * width) // -blocks) * blocks
    return {"intermediate_size": width, "block_auto_adjust_ff_dim": False}


def half_the_heads(config: Config) -> dict[str, int]:
    """Heads of the encoder's attention to text: half as many as to the image."""
    return {"text_enhancer_heads": config.size("encoder_attention_heads") // 2}


def of_fusion(config: Config) -> dict[str, int]:
    """Half the encoder's heads, for image and text; they share half its feed-forward width."""
    heads = config.size("encoder_attention_heads") // 2
    return {
        "fusion_heads": heads,
        "fusion_head_dim": config.size("encoder_ffn_dim") // 2 // max(1, heads),
    }


@dataclass(frozen=True)
class Stage:
    """The sizes of one stage, by the lists that a config has of all."""

    index: int
    # config key of the layers of every stage; or how many this stage has
    layers: str | int = "depths"
    heads: str = "num_heads"  # likewise; empty where all stages have as many
    # key of the first stage's width, which then doubles, or of a list; empty where it is constant
    width: str = "embed_dim"
    # further keys -> keys of lists with each stage's value
    more: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, config: Config) -> Mapping[str, Any]:
        """Values of the keys that a model without stages has."""
        layers = self.layers if isinstance(self.layers, int) else self._own(config, self.layers)
        sizes = {"num_hidden_layers": layers} | {
            key: self._own(config, listed) for key, listed in self.more.items()
        }
        if self.heads:
            sizes["num_attention_heads"] = self._own(config, self.heads)
        if self.width:
            listed = isinstance(config.get(self.width), list)
            sizes["hidden_size"] = (
                self._own(config, self.width) if listed else config.size(self.width) << self.index
            )
        return sizes

    def _own(self, config: Config, key: str) -> int:
        wanted = f"a list with every stage's number, {self.index + 1} or more"
        return Config({key: in_list(config, key, self.index, wanted)}, config.file).size(key)


# The index under which a layer is stored.


def half(config: ModelConfig, layer: int) -> int:
    """Two layers of attention stand under each index."""
    return layer // 2


def shared_groups(config: ModelConfig, layer: int) -> int:
    """ALBERT: layers in num_hidden_groups runs, each run one set of tensors."""
    if config.size("inner_group_num") != 1:
        raise config.error("inner_group_num", "1 (one attention layer a group)")
    return layer * config.size("num_hidden_groups", largest=config.n_layers) // config.n_layers
