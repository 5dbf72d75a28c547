"""Convert tiny random models with llama.cpp's own converter: one folder for each type that transformers and it know.

    python -m tests.model.rows.llama_cpp CONVERTER OUT [TYPE ...]

CONVERTER is the folder of convert_hf_to_gguf.py. A folder OUT/TYPE has the checkpoint as transformers saves it and
model.gguf, or reason.txt, which says why there is none. The converter's choice of a tokenizer is replaced, since tiny
models have none; tensors and all other keys are its own.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.census.published import PUBLISHED as OF_REMOTE_CODE
from tests.census.published import Published, Spec, Whole
from tests.census.published import tiny as tiny_of_remote_code
from weightscope.adopting.config_keys import tiny_config
from weightscope.adopting.tiny_models import PLANS, SIZES, build, class_and_line, classes_of

# What no key of a GGUF file says, by type: tiny models have the values that llama.cpp takes for granted.
EVERY_FOURTH = ["sliding_attention"] * 3 + ["full_attention"]
FULL_FIRST = ["full_attention"] + ["sliding_attention"] * 3
EVERY_SIXTH = ["sliding_attention"] * 5 + ["full_attention"]
AMONG_LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"layer_types": EVERY_FOURTH, "num_hidden_layers": 4},
    "cohere2": {"layer_types": EVERY_FOURTH, "num_hidden_layers": 4},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "layer_types": EVERY_SIXTH, "num_hidden_layers": 6},
    "gemma3_text": {"query_pre_attn_scalar": 32, "layer_types": EVERY_SIXTH, "num_hidden_layers": 6},
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "minicpmv4_6"), AMONG_LINEAR),
    **{f"{kind}_text": AMONG_LINEAR for kind in ("qwen3_5", "qwen3_5_moe")},
    "bamba": {"attn_layer_indices": [1]},
    "mamba": {"intermediate_size": 384},  # twice as wide as the model
    "falcon_mamba": {"intermediate_size": 384},
    "falcon_h1": {
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.9,
        "embedding_multiplier": 5.656854,
        "key_multiplier": 0.3,
        "lm_head_multiplier": 0.0195,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.235,
        "mlp_multipliers": [0.8838, 0.0589],
        "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.31],
    },
    "nemotron_h": {
        "mamba_head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "apertus": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1.2e7,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "ernie4_5_moe": {"intermediate_size": 264},  # shared experts as wide as this over the number of key-value heads
    "falcon": {"ffn_hidden_size": 768},  # four times as wide as the model
    "mt5": {"relative_attention_max_distance": 128},
    "t5": {"relative_attention_max_distance": 128},
    "glm": {"rms_norm_eps": 1e-5},  # the converter writes this whatever config.json says
    "llama4": {"floor_scale": 8192, "attn_scale": 0.1},
    "llama4_text": {"floor_scale": 8192, "attn_scale": 0.1},
    "gemma4_text": {  # as 26B-A4B; "gemma4" is as E2B
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 44,
        "per_layer_config": {str(i): {"head_dim": 48, "num_key_value_heads": 2} for i in (1, 3)},
    },
    "gemma4_unified": {"per_layer_config": {str(i): {"head_dim": 48} for i in (1, 3)}},
    "gemma4": {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "per_layer_config": {str(i): {"head_dim": 48} for i in (1, 3)},
    },
    "ministral3": {"rope_parameters": YARN},
    "step3p7": {
        "layer_types": FULL_FIRST,
        "num_hidden_layers": 4,
        "num_sliding_attention_heads": 9,
        "query_pre_attn_scalar": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        "per_layer_config": {str(i): {"num_attention_heads": 9} for i in (1, 2, 3)},
    },
    "modernbert": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
}
# Keys that published config.json files have, that the converter needs, and that transformers no longer writes.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_ctx": 64}, "gpt-sw3": {"n_ctx": 64}, "gpt_neox": {"rotary_pct": 0.25}, "cohere2": {"rotary_pct": 1.0},
    "solar_open": {"partial_rotary_factor": 1.0}, "minimax_m2": {"rotary_dim": 32}, "falcon": {"num_kv_heads": 1},
    "exaone": {"activation_function": "silu"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2}, "falcon_h1": {"head_dim": 32},
    "gemma4_text": {"global_head_dim": 48, "num_global_key_value_heads": 2},
    "gemma4": {"global_head_dim": 48},
    "gemma4_unified": {"global_head_dim": 48, "moe_intermediate_size": None},
    "step3p7": {
        "num_attention_groups": 3, "attention_other_setting": {"num_attention_heads": 9, "num_attention_groups": 3},
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0], "moe_num_experts": 4, "moe_top_k": 2,
        "moe_layers_enum": "1,2,3", "norm_expert_weight": True,
    },
    "kimi_linear": {
        "linear_attn_config": {"full_attn_layers": [3, 6], "short_conv_kernel_size": 4, "head_dim": 16},
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
# Names that published files have and transformers no longer writes: a pattern and its replacement.
PUBLISHED_NAMES = {"kimi_linear": (r"block_sparse_moe\.((?:gate|up|down)_proj)", r"mlp.\1")}
# Types of remote code -> the class in their configs, and keys that published ones have besides.
REMOTE: Mapping[str, Mapping[str, Any]] = {
    "minicpm": {"architectures": ["MiniCPMForCausalLM"]},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "bailing_moe_v2": {
        "architectures": ["BailingMoeV2ForCausalLM"], "moe_intermediate_size": 16, "num_shared_experts": 1,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_experts_per_tok": 2,
    },
}  # fmt: skip
OF_WRAPPERS = dict.fromkeys(("ministral3", "mistral3"), "Ministral3Model")  # the class that their converter calls
AS_WIDE_AS_ITS_HEADS, UNGROUPED = PLANS[2], PLANS[3]
# The converter of these takes d / H for the width of a head, or as many keys as queries.
PLAN = {
    "glm": AS_WIDE_AS_ITS_HEADS,
    "cohere2": AS_WIDE_AS_ITS_HEADS,
    "nemotron": AS_WIDE_AS_ITS_HEADS,
    "phi": UNGROUPED,
}


def main(converter: str, out: str, *kinds: str) -> None:
    """Build and convert every type, or those named."""
    sys.path[:0] = [converter, str(Path(converter) / "gguf-py")]
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    from conversion import TEXT_MODEL_MAP

    torch.set_num_threads(1)
    made: list[tuple[str, Callable[[], Any]]] = [
        (kind, partial(tiny, kind, classes)) for kind, classes in known_to_both(TEXT_MODEL_MAP)
    ]
    made += [(each.kind, partial(of_remote_code, each)) for each in OF_REMOTE_CODE if each.kind in REMOTE]
    for kind, make in made:
        if not kinds or kind in kinds:
            folder = Path(out) / kind
            folder.mkdir(parents=True, exist_ok=True)
            try:
                make().save_pretrained(folder)
                if kind in PUBLISHED_NAMES:
                    file, spelling = folder / "model.safetensors", PUBLISHED_NAMES[kind]
                    save_file({re.sub(*spelling, name): array for name, array in load_file(file).items()}, file)
                convert(folder, kind)
            except Exception as error:  # whatever transformers or the converter raise
                (folder / "reason.txt").write_text(class_and_line(error))


def known_to_both(converted: Mapping[str, str]) -> Iterator[tuple[str, list[Any]]]:
    """Every model_type that has a class which the converter names, and its classes."""
    for kind in CONFIG_MAPPING:
        try:
            classes = [each for each in classes_of(CONFIG_MAPPING[kind]()) if each.__name__ in converted]
        except Exception:  # needs packages that are not there
            continue
        if classes:  # those with a language-model head first
            yield kind, sorted(classes, key=lambda each: not each.__name__.endswith("ForCausalLM"))


def tiny(kind: str, classes: Sequence[Any]) -> Any:
    """A tiny model of a type, by the first size and plan that it can be built with."""
    problem: Exception | None = None
    for size in (SIZES[1], SIZES[0], SIZES[2]):
        for plan in (PLAN[kind],) if kind in PLAN else PLANS:
            try:
                config = tiny_config(CONFIG_MAPPING[kind](), size, plan)
                part = getattr(config, "text_config", config)
                for key, value in ASSUMED.get(kind, {}).items():
                    if hasattr(part, key):
                        setattr(part, key, value)
                return build(config, 0, classes)
            except Exception as error:
                problem = problem or error
    raise ValueError(f"cannot be built: {problem}")


def of_remote_code(published: Published) -> Whole:
    """A tiny model that no class of transformers makes, with all of its experts."""
    model = tiny_of_remote_code(replace(published, more=partial(all_experts, published)), 1)
    model.values |= REMOTE[published.kind]
    return model


def all_experts(published: Published, specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
    """What a file has besides layers, with four experts for each one."""
    shapes = dict(published.more(specs))
    alone = {name: size for name, size in shapes.items() if ".experts.0." in name}
    more = {name.replace(".0.", f".{e}.", 1): size for name, size in alone.items() for e in range(1, 4)}
    return shapes | more


def convert(folder: Path, kind: str) -> None:
    """Write model.gguf, as convert_hf_to_gguf.py does with --outtype f32."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    values = json.loads((folder / "config.json").read_text())
    n_tokens = values.get("vocab_size") or values.get("text_config", {}).get("vocab_size") or 200
    vocabulary = {"model": {"vocab": {f"t{i}": i for i in range(n_tokens)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    loaded = ModelBase.load_hparams(folder, False) | PUBLISHED.get(kind, {})
    try:
        named = get_model_class(get_model_architecture(loaded, ModelType.TEXT))
        named = getattr(named, OF_WRAPPERS.get(kind, ""), named)
        tokenizer = "bert" if named.set_vocab.__qualname__.startswith("BertModel") else "gpt2"

        def set_vocab(model: Any) -> None:
            model.gguf_writer.add_tokenizer_model(tokenizer)
            model.gguf_writer.add_token_list([f"t{i}" for i in range(n_tokens)])

        replaced: dict[str, Any] = {"set_vocab": set_vocab, "model_arch": named.model_arch}
        if named.supports_mtp_export:
            replaced["no_mtp"] = True  # tiny models have no layers that predict further tokens
        model = type(named.__name__, (named,), replaced)
        with torch.inference_mode():
            model(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", hparams=loaded).write()
    except BaseException:
        (folder / "model.gguf").unlink(missing_ok=True)
        raise
    finally:
        (folder / "tokenizer.json").unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
