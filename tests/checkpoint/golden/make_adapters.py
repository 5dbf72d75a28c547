"""Writes adapters/: LoRA adapters as PEFT saves them, and what its merge_and_unload makes of their bases.

Run it where PEFT is installed (0.21.2 made what is there): python -m tests.checkpoint.golden.make_adapters

Each case is a tiny random model, an adapter's settings, and random factors; of the merged model those tensors are kept
that are not the base's.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = Path(__file__).parent / "adapters"

GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": 30}
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16,
         "intermediate_size": 24, "vocab_size": 30, "max_position_embeddings": 16}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 3, "lora_alpha": 6}),
    "llama": ("llama", LLAMA, {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 4, "lora_alpha": 5, "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"^model.layers.0.*k_proj": 9},
        "modules_to_save": ["lm_head"],
    }),
    "qwen2": ("qwen2", LLAMA, {"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 2, "bias": "lora_only"}),
    "embeddings": ("llama", LLAMA | {"tie_word_embeddings": False}, {
        "target_modules": ["embed_tokens", "q_proj"], "r": 2, "lora_alpha": 4, "lora_dropout": 0.1,
    }),
}  # fmt: skip


def main() -> None:
    for name, (model_type, sizes, settings) in CASES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        folder = GOLDEN / name
        model.save_pretrained(folder / "base")
        adapted = get_peft_model(model, LoraConfig(**settings))
        adapted.peft_config["default"].base_model_name_or_path = "nobody/has-this"
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(folder / "adapter")
        for extra in ("adapter/README.md", "base/generation_config.json"):
            (folder / extra).unlink(missing_ok=True)
        merged = adapted.merge_and_unload()
        with tempfile.TemporaryDirectory() as written:
            merged.save_pretrained(written)
            after, before = load_file(Path(written) / "model.safetensors"), load_file(folder / "base/model.safetensors")
        moved = {key: w for key, w in after.items() if key not in before or not torch.equal(w, before[key])}
        save_file(moved, folder / "merged.safetensors")
        print(name, len(moved))


if __name__ == "__main__":
    main()
