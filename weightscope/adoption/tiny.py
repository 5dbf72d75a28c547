"""Tiny random models of any architecture that transformers has: its config shrunk by what its keys mean.

What is no size stays as it is: which norms, biases, scales, kinds of layers and rotations a model has is what is to be
looked at. Limits (windows, original contexts, buckets) shrink below the length of the texts, so that what is beyond
them is seen. Two sizes differ in every number, and no two sizes of one model are equal by accident.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

MOST_PARAMETERS = 50_000_000
MOST_LAYERS = 6
HEADS = ("", "CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "PreTraining", "SpeechSeq2Seq", "CTC",
         "ObjectDetection", "MaskGeneration", "TextToWaveform", "MultimodalLM")  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Sizes of one tiny model.

    Attributes
    ----------
    heads, groups, head_dim : int
        H query heads in G groups, r wide.
    free : int
        Width of the stream where a config says the heads' width itself; H r elsewhere.
    ffn, vocabulary, length : int
    rope, nope, value, q_rank, kv_rank : int
        Widths of a latent head's parts, and of its latents.
    window : int
    grid : int
        Patches along one side of an image.
    """

    heads: int
    groups: int
    head_dim: int
    free: int
    ffn: int
    vocabulary: int
    length: int
    rope: int
    nope: int
    value: int
    q_rank: int
    kv_rank: int
    window: int
    grid: int


SIZES = (
    Size(4, 2, 24, 80, 56, 151, 17, 8, 12, 10, 14, 18, 4, 4),
    Size(6, 3, 32, 112, 88, 173, 23, 16, 20, 28, 26, 38, 6, 6),
)


@dataclass(frozen=True)
class Plan:
    """How boldly sizes are set apart: not every architecture can be built with all of them different."""

    free_width: bool
    grouped: bool
    filled: bool = False  # sizes that a config leaves open are given
    own_heads: bool = False  # heads are as wide as the architecture's own: sections of rotations stand in its code
    shrunk: bool = True


PLANS = (
    Plan(True, True), Plan(True, True, filled=True), Plan(False, True, filled=True), Plan(False, False, filled=True),
    Plan(True, True, filled=True, own_heads=True), Plan(False, False, filled=True, own_heads=True),
    Plan(False, False, shrunk=False),
)  # fmt: skip
FILLED: Mapping[str, Any] = {
    "head_dim": 0, "num_key_value_heads": 0, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 28, "moe_intermediate_size": 28, "moe_topk": 2, "mask_token_id": 3,
    "attn_layer_indices": [1], "prediction_length": 4, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """One part of a config while it is shrunk: a part has its own heads, and what is beside it has its own."""

    values: Mapping[str, Any]
    size: Size
    plan: Plan

    @property
    def latent(self) -> bool:
        return bool(self.values.get("kv_lora_rank"))

    @property
    def width(self) -> int:
        heads = self.values.get("num_heads", self.values.get("num_attention_heads"))
        if "depths" in self.values and isinstance(heads, list):  # a pyramid: its width doubles with its heads
            return 8 * int(heads[0] if isinstance(heads[0], int) else 1)
        named = any(self.values.get(key) for key in ("head_dim", "kv_lora_rank", "d_kv", "kv_channels"))
        return (
            self.size.free
            if named and self.plan.free_width
            else self.size.heads * (self.own_head_dim if self.plan.own_heads else self.size.head_dim)
        )

    @property
    def own_head_dim(self) -> int:
        """A head's width as the architecture has it."""
        width = next((self.values[key] for key in ("hidden_size", "d_model", "n_embd") if key in self.values), None)
        heads = next((self.values[key] for key in ("num_attention_heads", "num_heads") if key in self.values), None)
        named = self.values.get("head_dim")
        return named or (width // heads if isinstance(width, int) and isinstance(heads, int) else 64)

    @property
    def groups(self) -> int:
        return self.size.groups if self.plan.grouped and not self.latent else self.size.heads

    @property
    def head_dim(self) -> int:
        """A head's width; of latent heads whichever of their widths the key stands for."""
        s, v = self.size, self.values
        if not self.latent:
            return self.own_head_dim if self.plan.own_heads else s.head_dim
        widths = {v.get("qk_rope_head_dim"): s.rope, v.get("v_head_dim"): s.value}
        if v.get("qk_rope_head_dim") and v.get("qk_nope_head_dim"):
            widths = {v["qk_rope_head_dim"] + v["qk_nope_head_dim"]: s.rope + s.nope} | widths
        return widths.get(v.get("head_dim"), s.rope + s.nope)

    @property
    def turning(self) -> int:
        """Pairs that a rotation turns."""
        rope = self.values.get("rope_parameters")
        rope = rope if isinstance(rope, Mapping) else {}
        share = rope.get("partial_rotary_factor") or self.values.get("partial_rotary_factor") or 1.0
        return int((self.size.rope if self.latent else self.head_dim * share) // 2)


# Meaning by name: the first pattern that fits a key wins. What fits none stays as it is.
INTEGERS: tuple[tuple[str, Callable[[_Part, int], int]], ...] = (
    (r"chunk_size_feed_forward|.*dropout.*|num_channels|in_channels|.*_token_ids?|.*_token_index|type_vocab_size"
     r"|.*conv_kernel.*|.*kernel_size|.*stride.*|num_labels|.*num_conv_pos_embedding_groups", lambda p, v: v),
    (r"qk_rope_head_dim", lambda p, v: p.size.rope),
    (r"qk_nope_head_dim", lambda p, v: p.size.nope),
    (r"qk_head_dim", lambda p, v: p.size.rope + p.size.nope),
    (r"v_head_dim", lambda p, v: p.size.value),
    (r"kv_lora_rank", lambda p, v: p.size.kv_rank),
    (r"q_lora_rank", lambda p, v: p.size.q_rank),
    (r"rotary_dim", lambda p, v: 2 * (p.head_dim // 4)),
    (r"index_head_dim", lambda p, v: p.size.head_dim),
    (r"index_topk", lambda p, v: p.size.window),
    (r"mamba_n_heads|mamba_num_heads", lambda p, v: 4),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", lambda p, v: p.width // 2),
    (r"mamba_d_ssm", lambda p, v: 2 * p.width),
    (r"mamba_d_state|ssm_state_size|mamba_state_dim|state_size", lambda p, v: 8),
    (r"mamba_dt_rank|time_step_rank", lambda p, v: 4),
    (r"linear_(key|value)_head_dim", lambda p, v: 8),
    (r"linear_num_key_heads", lambda p, v: 2),
    (r"linear_num_value_heads", lambda p, v: 4),
    (r"codebook_size", lambda p, v: min(v, 64)),
    (r".*vocab_size(_per_layer_input)?|.*vocabulary_size|n_tokens", lambda p, v: p.size.vocabulary),
    (r"hidden_size_per_layer_input", lambda p, v: 12),
    (r".*(head_dim|d_kv|d_head|kv_channels|head_size)", lambda p, v: p.head_dim),
    (r".*(num_key_value_heads|n_kv_heads|num_kv_heads|n_head_kv|num_query_groups)", lambda p, v: p.groups),
    (r"decoder_(num_)?(attention_)?heads|decoder_num_attention_heads", lambda p, v: p.size.heads // 2),
    (r".*(attention_heads|n_heads?|num_heads|nheads?|encoder_heads)", lambda p, v: p.size.heads),
    (r".*(num_layers|hidden_layers|n_layers?|depth|num_blocks)|(encoder|decoder|text|vision|speech_encoder)_layers"
     r"|.*_layers_(count|num)|t2u_(en|de)coder_layers|num_(en|de)coder_layers|(en|de)coder_num_hidden_layers",
     lambda p, v: _layers(p.values) if v > 1 else v),
    (r"num_kv_shared_layers", lambda p, v: min(v, _layers(p.values) // 2)),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_layers", lambda p, v: min(v, 1)),
    (r"max_window_layers", lambda p, v: 1),
    (r".*(interval|period|_pattern|global_attn_every_n_layers|every_n_layers|_step)", lambda p, v: min(v, 2)),
    (r".*(period_offset|layer_offset)", lambda p, v: min(v, 1)),
    (r"(moe|expert|shared_expert|moe_shared_expert)_?(intermediate|ffn|hidden)_(size|dim)|expert_dim",
     lambda p, v: p.size.ffn // 2),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|d_inner|n_inner|ffn_size|intermediate_dim|ff_dim"
     r"|feedforward_dim|dim_feedforward|intermediate_size_mlp|encoder_ffn_embed_dim|linear_units)",
     lambda p, v: p.size.ffn),
    (r"(num_|n_)?(routed_|local_)?experts|.*num_(local_|routed_)?experts|n_routed_experts|moe_num_experts",
     lambda p, v: min(v, 4)),
    (r".*(experts_per_tok(en)?|experts_top_k|moe_topk?|moe_top_?k|top_k_experts|num_selected_experts|moe_k)",
     lambda p, v: min(v, 2)),
    (r"n_group|num_expert_group", lambda p, v: min(v, 2)),
    (r"topk_group", lambda p, v: 1),
    (r"original_max_position_embeddings", lambda p, v: 8),
    (r"floor_scale|log_scaling_n_floor", lambda p, v: 4),
    (r"sliding_window.*|attention_chunk_size|local_attention|local_window|window_size|attention_window.*|local_window_size",
     lambda p, v: p.size.window),
    (r"relative_attention_num_buckets|num_buckets", lambda p, v: 8),
    (r"relative_attention_max_distance|max_distance|relative_max_distance", lambda p, v: 12),
    (r"max_source_positions", lambda p, v: 2 * p.size.length),
    (r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_target_positions|max_seq_length"
     r"|context_length|max_context_length)", lambda p, v: 64 if v >= 48 else v),
    (r"image_size|img_size|pretrain_image_size|input_size", lambda p, v: p.size.grid * _patch(p.values)),
    (r"mm_tokens_per_image|image_seq_len(gth)?", lambda p, v: 4),
    (r"num_mel_bins|n_mels|num_queries|num_query_tokens", lambda p, v: min(v, 16)),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|dim|model_dim|hidden_dim|hidden|embedding_size|proj_dim|projection_dim"
     r"|output_dim|embd?_size|projection_size|proj_size|channels|hidden_channels|input_dim|projector_dim)",
     lambda p, v: p.width if v >= 32 else v),
)  # fmt: skip
_INTEGERS = tuple((re.compile(pattern), meaning) for pattern, meaning in INTEGERS)
SPECIAL = re.compile(r".*(_token_id|_token_index|_index|_idx|_token)|(bos|eos|pad|sep|cls|mask|unk)_id", re.ASCII)
DERIVED = {"out_features", "out_indices", "stage_names", "_out_features", "_out_indices", "transformers_version",
           "architectures", "_name_or_path", "id2label", "label2id", "num_labels"}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
          "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
PERIODIC = re.compile(r".*(interval|period|pattern|cross_attention_layers|indexes|indices|_step)", re.ASCII)


def _patch(values: Mapping[str, Any]) -> int:
    patch = values.get("patch_size") or values.get("vision_patch_size") or 4
    return int(patch if isinstance(patch, int) else patch[-1])


def _by_layer(values: Mapping[str, Any]) -> list[str]:
    """The keys of lists that say something of every layer."""
    counts = {values.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth",
                                          "encoder_layers", "decoder_layers")}  # fmt: skip
    return [key for key, value in values.items() if isinstance(value, list) and len(value) > 2 and len(value) in counts]


def _kept(values: Mapping[str, Any]) -> list[int]:
    """Which layers stay: the first of every kind, at least two; twice as many where later layers read earlier ones'."""
    lists = [values[key] for key in _by_layer(values)]
    if not lists:
        return []
    kinds = [repr([one[i] if i < len(one) else None for one in lists]) for i in range(len(lists[0]))]
    first = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    first = first if len(first) > 1 else [0, 1]
    return first * 2 if len(first) <= MOST_LAYERS // 2 and len(set(kinds)) > 1 else first


def _layers(values: Mapping[str, Any]) -> int:
    """How many layers a part gets: its kinds, or so many that layers at intervals are among them."""
    if kept := _kept(values):
        return len(kept)
    periodic = any(value and PERIODIC.fullmatch(key) for key, value in values.items())
    return 4 if periodic else 2


def _list(key: str, values: list[Any], part: _Part) -> list[Any]:
    """A list shrunk: one of layers to the layers kept, others by their items' meaning."""
    kept = _kept(part.values)
    if key in _by_layer(part.values) and key != "depths":
        return [_value(key, values[i], part) for i in kept]
    if key in {"depths", "layers"}:
        return [min(value, 2) for value in values]
    if re.fullmatch(r".*(mrope_section|rope_section|axes_dim)", key):
        return _sections(values, part.turning)
    if key in {"long_factor", "short_factor"}:
        return [values[i * len(values) // part.turning] for i in range(part.turning)]
    if re.fullmatch(r".*(indexes|indices|_layers|_idxs|_layer_ids)", key) and all(type(v) is int for v in values):
        n = _layers(part.values)
        few = [v for v in values if v < n]
        return few if len(few) not in (0, n) else [n - 1]
    if values and all(type(value) is int for value in values) and re.fullmatch(r"conv_dim|attention_window", key):
        return [16 if key == "conv_dim" else 4] * (len(values) if key == "conv_dim" else 2)
    return [_shrunk(value, part) if isinstance(value, dict) else value for value in values]


def _sections(values: list[int], pairs: int) -> list[int]:
    """Sections of a rotation in the same proportions, in sum `pairs`, the last the larger."""
    total = sum(values)
    if not total:
        return values
    ends = [round(pairs * sum(values[: i + 1]) / total) for i in range(len(values))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


SCALED = re.compile(r"(.+_)?(head_dim|(num_)?(attention_)?heads|num_key_value_heads|kv_lora_rank|qk_nope_head_dim)")
BASES = ("head_dim", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim")


def _by_base(key: str, value: int, part: _Part) -> int | None:
    """A size of some layers in proportion to that of the others: heads of global layers that are twice as wide."""
    base = next((one for one in BASES if key.endswith(one.removeprefix("num_"))), "")
    usual = part.values.get(base)
    if (
        (key in part.values and key == base)
        or not isinstance(usual, int)
        or usual == value
        or (part.latent and key in part.values)
    ):
        return None
    if re.match("index|linear|mamba|decoder|encoder|vision|qk_|v_", key) and key in part.values:
        return None
    return max(1, _value(base, usual, part) * value // usual)


def _value(key: str, value: Any, part: _Part) -> Any:
    if isinstance(value, dict):
        if key in {"rope_parameters", "rope_scaling"}:
            return {k: _value(k, v, part) for k, v in value.items()}
        if key == "per_layer_config":
            kept = _kept(part.values)
            own = {new: value.get(f"{old:02}", value.get(str(old), value.get(old))) for new, old in enumerate(kept)}
            return {str(new): {k: _value(k, v, part) for k, v in one.items()} for new, one in own.items() if one}
        return _shrunk(value, part)
    if isinstance(value, list | tuple):
        return _list(key, list(value), part)
    if key == "partial_rotary_factor" and part.latent and value not in (None, 1.0):
        return part.size.rope / part.head_dim
    if value is None and part.plan.filled and key in FILLED:
        return _value(key, 1, part) if FILLED[key] == 0 and key != "pad_token_id" else FILLED[key]
    if isinstance(value, int) and not isinstance(value, bool):
        if SCALED.fullmatch(key) and (scaled := _by_base(key, value, part)) is not None:
            return scaled
        for pattern, meaning in _INTEGERS:
            if pattern.fullmatch(key):
                return meaning(part, value)
    return value


def _shrunk(values: Mapping[str, Any], outer: _Part) -> dict[str, Any]:
    if values.get("model_type") == "timm_backbone":
        return dict(RESNET)
    part = _Part(values, outer.size, outer.plan)
    return {key: _value(key, value, part) for key, value in values.items() if key not in DERIVED}


def _with_small_ids(values: Any, known: dict[str, int]) -> Any:
    """Ids of special tokens as small numbers, the same wherever the same key stands."""
    if isinstance(values, dict):
        return {
            key: _small(key, value, known) if SPECIAL.fullmatch(key) else _with_small_ids(value, known)
            for key, value in values.items()
        }
    return values


def _small(key: str, value: Any, known: dict[str, int]) -> Any:
    if isinstance(value, list) and value and type(value[0]) is int:
        return [_small(key, value[0], known)]
    if type(value) is int and value >= 0:
        return known.setdefault(key, {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(key, 3 + len(known)))
    return value


def tiny_config(config: Any, size: Size, plan: Plan = PLANS[0]) -> Any:
    """The config of a tiny model of the same architecture.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        A class's default, or a checkpoint's own.
    size : Size
    plan : Plan
    """
    values = config.to_dict()
    if plan.shrunk:
        values = _with_small_ids(_shrunk(values, _Part(values, size, plan)), {})
        text: dict[str, Any] = next(
            (values[key] for key in ("text_config", "llm_config", "language_config") if values.get(key)), {}
        )
        for part in values.values():
            if (
                isinstance(part, dict)
                and "out_hidden_size" in part
                and isinstance(text, dict)
                and "hidden_size" in text
            ):
                part["out_hidden_size"] = text["hidden_size"]
    else:
        values = {key: _few_layers(key, value) for key, value in values.items() if key not in DERIVED}
    values["use_cache"] = False
    return type(config).from_dict(values)


def _few_layers(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _few_layers(k, v) for k, v in value.items()}
    return (
        2
        if re.fullmatch(r"num_hidden_layers|encoder_layers|decoder_layers|num_layers", key) and type(value) is int
        else value
    )


def build(config: Any, seed: int) -> torch.nn.Module:
    """A random model of a config, by the bare class that transformers has for it, or else by one with a head.

    Raises
    ------
    ValueError
        No class of transformers builds it, or it is no tiny one.
    """
    problem: Exception | None = None
    for head in HEADS:
        auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel", None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        try:
            with torch.device("meta"):
                count = sum(one.numel() for one in auto.from_config(config).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count} parameters are not a tiny model's")
            torch.manual_seed(seed)
            model = auto.from_config(config, attn_implementation="eager")
        except Exception as error:  # whatever transformers raises of a config that does not fit together
            problem = problem or error
            continue
        randomise(model, seed)
        return model.float().eval()
    raise ValueError(f"cannot be built: {first_line(problem)}" if problem else "no class of transformers builds it")


def first_line(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn anew: gains of norms about 1, biases about 0, matrices so that scores are about 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                fan_in = (
                    parameter[0].numel() if parameter.ndim > 2 or "embed" not in name else parameter.shape[1] ** 0.5
                )
                parameter.copy_(1.2 * draw / fan_in**0.5)
            elif name.endswith(("weight", "gamma", "lambda1", "scale")):
                parameter.copy_(1 + 0.3 * draw)
            else:
                parameter.copy_(0.3 * draw)
