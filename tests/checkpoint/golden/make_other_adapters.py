"""Writes other_adapters/: adapters of PEFT (DoRA, LoKr), LyCORIS, diffusers and kohya, and what each tool merges.

Run it where peft 0.21.2, lycoris-lora 4.1.3 and diffusers 0.42.1 are installed (these made what is there):
    python -m tests.checkpoint.golden.make_other_adapters

Bases are the ones in adapters/, and a tiny CLIP text encoder. Of a merged model those tensors are kept that are not the
base's. intruders.json holds what PEFT's own `reduce_intruder_dimension` compares with its threshold, by module.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_kohya
from lycoris import LycorisNetwork, create_lycoris
from peft import LoKrConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.intruders import reduce_intruder_dimension
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CLIPTextConfig, CLIPTextModel

GOLDEN = Path(__file__).parent / "other_adapters"
BASES = Path(__file__).parent / "adapters"
PROJECTIONS = ["q_proj", "k_proj", "o_proj"]
CLIP = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 30,
        "max_position_embeddings": 16, "projection_dim": 16}  # fmt: skip
PEFT: dict[str, tuple[str, Any]] = {
    "peft-dora": ("llama", LoraConfig(r=3, lora_alpha=6, use_dora=True, target_modules=PROJECTIONS)),
    "peft-dora-gpt2": ("gpt2", LoraConfig(r=2, lora_alpha=4, use_dora=True, target_modules=["c_attn", "c_proj"],
                                          fan_in_fan_out=True)),
    "peft-lokr": ("llama", LoKrConfig(r=2, alpha=4, target_modules=PROJECTIONS)),
    "peft-lokr-both": ("llama", LoKrConfig(r=1, alpha=3, decompose_both=True, target_modules=PROJECTIONS)),
}  # fmt: skip
LYCORIS: dict[str, dict[str, Any]] = {
    "lycoris-locon": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2},
    "lycoris-dora": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2, "dora_wd": True},
    "lycoris-dora-in": {"algo": "lora", "linear_dim": 3, "linear_alpha": 2, "dora_wd": True, "wd_on_output": False},
    "lycoris-lokr": {"algo": "lokr", "linear_dim": 1, "linear_alpha": 3, "factor": 4},
    "lycoris-lokr-whole": {"algo": "lokr", "linear_dim": 1000, "linear_alpha": 3, "factor": 4},
}


def moved(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor], folder: Path) -> None:
    """Keep the tensors that differ from the base's."""
    kept = {key: w.contiguous() for key, w in after.items() if key in before and not torch.equal(w, before[key])}
    assert kept
    save_file(kept, folder / "merged.safetensors")
    print(folder.name, len(kept))


def drawn(model: torch.nn.Module) -> None:
    """Random values for everything that is trained; lengths stay positive."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
            if "magnitude" in name or "dora_scale" in name:
                parameter.data = parameter.data.abs() + 0.5


def base_of(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return AutoModelForCausalLM.from_pretrained(BASES / name / "base", dtype=torch.float32), load_file(
        BASES / name / "base" / "model.safetensors"
    )


def of_peft(name: str, base: str, settings: Any) -> None:
    model, before = base_of(base)
    adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = "nobody/has-this"
    drawn(adapted)
    adapted.save_pretrained(GOLDEN / name)
    (GOLDEN / name / "README.md").unlink(missing_ok=True)
    moved(adapted.merge_and_unload().state_dict(), before, GOLDEN / name)


def of_lycoris(name: str, settings: dict[str, Any]) -> None:
    model, before = base_of("llama")
    LycorisNetwork.apply_preset({"target_name": [f".*{module}" for module in PROJECTIONS], "target_module": []})
    network = create_lycoris(model, 1.0, **settings)
    network.apply_to()
    drawn(network)
    (GOLDEN / name).mkdir(parents=True, exist_ok=True)
    network.save_weights(str(GOLDEN / name / "adapter.safetensors"), torch.float32, {})
    network.eval()
    # What each layer computes, on the identity: LyCORIS 4.1.3 merges a LoKr with its scale twice, and trains it with
    # the scale once.
    with torch.no_grad():
        after = {f"{path}.weight": layer(torch.eye(layer.in_features)).T for path, layer in model.named_modules()
                 if path.rpartition(".")[2] in PROJECTIONS}  # fmt: skip
    moved(after, before, GOLDEN / name)


def of_text_encoder(name: str, write: Callable[[Any, dict[str, torch.Tensor], Path], None]) -> None:
    torch.manual_seed(0)
    base = GOLDEN / "clip-base"
    if not base.exists():
        made = CLIPTextModel(CLIPTextConfig(**CLIP))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        made.save_pretrained(base)
    model = CLIPTextModel.from_pretrained(base)
    settings = LoraConfig(r=2, lora_alpha=2 if name == "kohya" else 5, target_modules=["q_proj", "v_proj", "fc1"])
    adapted = get_peft_model(model, settings)
    drawn(adapted)
    (GOLDEN / name).mkdir(parents=True, exist_ok=True)
    layers = {key.removeprefix("base_model.model."): w for key, w in get_peft_model_state_dict(adapted).items()}
    write(settings, layers, GOLDEN / name)
    moved(adapted.merge_and_unload().state_dict(), load_file(base / "model.safetensors"), GOLDEN / name)


def by_diffusers(settings: Any, layers: dict[str, torch.Tensor], folder: Path) -> None:
    unet = {"down_blocks.0.attentions.0.to_q.lora_A.weight": torch.ones(2, 4),
            "down_blocks.0.attentions.0.to_q.lora_B.weight": torch.ones(4, 2)}  # fmt: skip
    StableDiffusionPipeline.save_lora_weights(
        folder, unet_lora_layers=unet, text_encoder_lora_layers=layers,
        text_encoder_lora_adapter_metadata={"r": settings.r, "lora_alpha": settings.lora_alpha},
    )  # fmt: skip


def by_kohya(settings: Any, layers: dict[str, torch.Tensor], folder: Path) -> None:
    kohya = convert_state_dict_to_kohya({f"text_encoder.{key}": w for key, w in layers.items()})
    save_file(kohya, folder / "adapter.safetensors")


class Seen:
    """A threshold that remembers what is compared with it."""

    def __init__(self) -> None:
        self.cosines: list[list[float]] = []

    def __gt__(self, cosines: torch.Tensor) -> torch.Tensor:
        self.cosines.append(cosines.tolist())
        return cosines < 0.5


def intruders() -> None:
    """On float64 weights, so that PEFT's own rounding does not show."""
    found = {}
    for name in ("llama", "gpt2"):
        from peft import PeftModel

        model, _ = base_of(name)
        adapted = PeftModel.from_pretrained(model, BASES / name / "adapter").double()
        seen, said = Seen(), []
        reduce_intruder_dimension(adapted, threshold_epsilon=seen, logging_sink=said.append)
        modules = [line.split(":")[0].removeprefix("base_model.model.") for line in said if ":" in line]
        found[name] = dict(zip(modules, seen.cosines, strict=True))
    (GOLDEN / "intruders.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    torch.manual_seed(0)
    GOLDEN.mkdir(exist_ok=True)
    intruders()
    for name, (base, settings) in PEFT.items():
        of_peft(name, base, settings)
    for name, options in LYCORIS.items():
        of_lycoris(name, options)
    of_text_encoder("diffusers", by_diffusers)
    of_text_encoder("kohya", by_kohya)


if __name__ == "__main__":
    main()
