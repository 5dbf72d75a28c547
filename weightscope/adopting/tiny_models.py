"""Tiny random models of an architecture: their sizes, how they are built and how they are initialised.

The sizes within one model differ from each other, so that no match is accidental. Code that comes with a checkpoint is
never run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Size:
    """Sizes of one tiny model."""

    heads: int  # H query heads in G groups, r wide
    groups: int
    head_dim: int
    free: int  # Width of the stream where a config says the heads' width itself; H r elsewhere
    ffn: int
    vocabulary: int
    length: int
    rope: int  # Widths of a latent head's parts, and of its latents
    nope: int
    value: int
    q_rank: int
    kv_rank: int
    window: int
    grid: int  # Patches along one side of an image


SIZES = (
    Size(4, 2, 24, 80, 56, 151, 17, 8, 12, 10, 14, 18, 4, 4),
    Size(6, 3, 32, 120, 88, 173, 23, 16, 20, 28, 26, 38, 6, 6),
    Size(8, 4, 32, 160, 96, 173, 23, 16, 20, 28, 26, 38, 4, 8),  # where six heads do not go
)


@dataclass(frozen=True)
class Plan:
    """How boldly sizes are set apart: not every architecture can be built with all of them different."""

    free_width: bool
    grouped: bool
    filled: bool = False  # sizes that a config leaves open are given
    own_heads: bool = False  # heads are as wide as the architecture's own: its code fixes the sections of rotations
    shrunk: bool = True


PLANS = (
    Plan(True, True), Plan(True, True, filled=True), Plan(False, True, filled=True), Plan(False, False, filled=True),
    Plan(True, True, filled=True, own_heads=True), Plan(False, False, filled=True, own_heads=True),
    Plan(False, False, shrunk=False),
)  # fmt: skip
LACKED: Mapping[
    str, Mapping[str, Any]
] = {  # by model_type or a key of the part: what a default config lacks and its model reads
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 28},
    "codec_nothink_id": {"spatial_merge_size": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGAZ": 9}},
    "emu3": {"vocabulary_map": {"<image>": 8, "<|visual token 000000|>": 9, "<|extra_200|>": 10}},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "kv_n_heads": {"rope_theta": 10000.0, "clip_qkv": 1.5},
    "qwen4_exp_text": {
        "eos_token_id": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "step3p5": {"sliding_window": 512},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 2,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
}
VIBEVOICE = tuple(f"vibevoice_acoustic_tokenizer{part}" for part in ("", "_encoder", "_decoder"))
# By model_type of a part: widths of convolutions, which divide one another, and so large by default that no model of
# them is a tiny one.
CONVOLVED: Mapping[str, Mapping[str, Any]] = {
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 16},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "chameleon_vqgan": {"base_channels": 32, "latent_channels": 32},
    "emu3_vqgan": {"base_channels": 32},
    "rt_detr": {"encoder_in_channels": [16, 24, 32]},
    "rt_detr_v2": {"encoder_in_channels": [16, 24, 32]},
    "rt_detr_resnet": {
        "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "out_features": ["stage2", "stage3", "stage4"],
    },
    "mimi": {"upsample_groups": 8, "codebook_dim": 256},
    "mimi_decoder": {"upsample_groups": 8, "codebook_dim": 256},
    **{kind: {"encoder_hidden_size": 12} for kind in ("neucodec", "xcodec2")},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 8},
    "muse_spark_audio": {"hidden_sizes": [16, 24, 32, 40]},
    **{kind: {"num_filters": 2} for kind in VIBEVOICE},
    "sam2_hiera_det_model": {"image_size": [128, 128]},
    "sam2_vision_model": {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "zamba2": {"hybrid_layer_ids": [1, 3]},
    "sam2_prompt_encoder": {"image_size": 128},
    "lw_detr_vit": {"num_windows": 4, "num_windows_side": 2},  # of several tokens each
}  # fmt: skip
# By model_type of a part: sizes that follow from others, of the part when it is shrunk.
TOGETHER: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
    "zamba": lambda v: {
        "attention_hidden_size": 2 * v["hidden_size"],
        "attention_head_dim": 2 * v["hidden_size"] // v["num_attention_heads"],
    },
    "zamba2": lambda v: {
        "attention_hidden_size": 2 * v["hidden_size"], "mamba_headdim": v["hidden_size"] // 4, "n_mamba_heads": 8,
        "attention_head_dim": 2 * v["hidden_size"] // v["num_attention_heads"], "mamba_ngroups": 1,
    },
    "videoprism_vision_model": lambda v: {"image_size": 72, "num_frames": 4},
    "tvp": lambda v: {"max_img_size": 64, "visual_prompt_size": 8},
    "depth_pro": lambda v: {
        "patch_size": v["image_model_config"]["image_size"], "image_size": 4 * v["image_model_config"]["image_size"],
        "fusion_hidden_size": 16, "intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [16, 16, 16],
    },
    "vjepa2": lambda v: {
        "pred_num_attention_heads": v["num_attention_heads"], "pred_hidden_size": v["hidden_size"], "crop_size": 64,
        "frames_per_clip": 4,
    },
    **dict.fromkeys(
        ("neucodec", "xcodec2"),
        lambda v: {
            "hidden_size": 32 * v["num_attention_heads"], "head_dim": 32,
            "num_key_value_heads": v["num_attention_heads"],
        },
    ),
    "blt": lambda v: {"encoder_hash_byte_group_vocab": 50},
    "fun_asr_nano": lambda v: {
        "adaptor_config": {
            **v["adaptor_config"], "hidden_size": v["text_config"]["hidden_size"],
            "intermediate_size": v["text_config"]["hidden_size"] // 4,
        }
    },
    "llama4_vision_model": lambda v: {"intermediate_size": 4 * v["hidden_size"]},
    "perceiver": lambda v: {
        "d_latents": 24 * v["num_self_attention_heads"], "num_self_attends_per_block": 2, "num_latents": 16,
    },
}  # fmt: skip
FILLED: Mapping[str, Any] = {
    "head_dim": 0, "num_key_value_heads": 0, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 28, "moe_intermediate_size": 28, "moe_topk": 2, "mask_token_id": 3,
    "attn_layer_indices": [1], "prediction_length": 4, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 0,
}  # fmt: skip

MOST_PARAMETERS = 140_000_000
HEADS = ("", "CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "PreTraining", "SpeechSeq2Seq", "CTC",
         "ObjectDetection", "MaskGeneration", "TextToWaveform", "MultimodalLM")  # fmt: skip

# model_types whose eager code misreads its mask: the other way round, so that it hides what a query may see, or as
# numbers, so that 1 is added to the scores of what it may see. Fused attention, which `from_pretrained` takes by
# default, does not; under watch that is done in steps.
MASK_MISREAD = (
    "nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "nemotron3_5_asr",
    "grounding-dino", "mm-grounding-dino",
)  # fmt: skip


def attention_of(kind: str) -> str | None:
    """The implementation of attention that a type is compared with; None: what transformers takes by default."""
    return None if kind in MASK_MISREAD else "eager"


def classes_of(config: Any) -> list[Any]:
    """Every class of transformers for models of a config: those that the auto classes list, in the order of `HEADS`.

    Parts of composites are in no such list; theirs are the classes of their module.
    """
    kind, classes = type(config), list[Any]()
    for mapping in _mappings():
        with suppress(Exception):  # a class that needs packages which are not there
            listed = mapping.get(kind, ())
            classes += listed if isinstance(listed, tuple | list) else [listed]
    if not classes:
        with suppress(ImportError):
            module = import_module(kind.__module__.replace(".configuration_", ".modeling_"))
            candidates = [each for each in vars(module).values() if getattr(each, "config_class", None) is kind]
            bases = {base for each in candidates for base in each.__mro__[1:] if "PreTrained" in base.__name__}
            classes = [each for each in candidates if each not in bases]
    parts = {type(part) for part in vars(config).values()}  # a class of a part's alone is no class of the whole
    return [each for each in dict.fromkeys(classes) if each.config_class not in parts]


@cache
def _mappings() -> list[Any]:
    """The classes of every auto class by config, those of `HEADS` first."""
    autos = [getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel", None) for head in HEADS]
    first = [auto._model_mapping for auto in autos if auto is not None]
    every = [each for each in vars(modeling_auto).values() if type(each) is type(first[0])]
    return list({id(each): each for each in (*first, *every)}.values())  # as dicts they are equal: all are lazy


def build(config: Any, seed: int, classes: Sequence[Any] = ()) -> Any:
    """A random model of a config, by the first of these classes that can be built, or of all that it has."""
    problem: Exception | None = None
    for kind in classes or classes_of(config):
        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
            if not 0 < count <= MOST_PARAMETERS:
                raise ValueError(f"{count} parameters are not a tiny model's")
            torch.manual_seed(seed)
            model = kind._from_config(config, attn_implementation=attention_of(config.model_type))
        except Exception as error:  # whatever transformers raises of a config that does not fit together
            problem = problem or error
            continue
        randomise(model, seed)
        return model.float().eval()
    raise ValueError(f"cannot be built: {first_line(problem)}" if problem else "no class of transformers builds it")


def parameters_of(config: Any) -> set[str]:
    """The names of all parameters of a config's model, which is not filled; none where it cannot be built."""
    for kind in classes_of(config):
        try:
            with torch.device("meta"):
                return {name for name, _ in kind._from_config(config).named_parameters()}
        except Exception:
            continue
    return set()


def first_line(error: BaseException) -> str:
    """An error in a line: what a validator found, where one wraps it."""
    if error.__cause__ is not None and "alidation" in type(error).__name__:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn anew: gains of norms about 1, biases about 0, matrices so that scores are about 1.

    Frozen ones are tables with a formula, and keep it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
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
