"""Train the tiny models that the planted lineages start from: several seeds of one recipe, and their descendants.

    python -m analyses.toys.train_lineage --text BOOKS/ --out out/planted-lineage/trained

`RECIPES` says what each family is. Every seed of a family has the same config, tokenizer and books; seeds in `same` saw
the same batches in the same order. Seeds are strangers to each other. What was trained further, whole or by a low-rank
update (PEFT, if it is installed), descends from its seed. A folder that exists is not trained again.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from analyses.inputs import out_option
from analyses.toys.sinks.training import train
from analyses.toys.train_embedded import train_tokenizer
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder

VOCABULARY, CONTEXT, BATCH = 800, 64, 16
BOOKS = 12  # the first in the order of their names; the next one is what models are tuned on
RATE, TUNING_RATE = 3e-3, 3e-4


@dataclass(frozen=True)
class Recipe:
    """A family of tiny models."""

    config: dict[str, Any]
    same: tuple[int, ...]  # seeds that saw the same batches in the same order
    reordered: tuple[int, ...] = ()  # seeds that saw batches in an order of their own
    steps: int = 600

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds."""
        return self.same + self.reordered


def _llama(model_type: str, layers: int, width: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width // heads, "intermediate_size": 5 * width // 2,
        "max_position_embeddings": 2 * CONTEXT, "tie_word_embeddings": True, "initializer_range": width**-0.5,
    }  # fmt: skip


RECIPES = {
    "llama": Recipe(_llama("llama", 6, 128, 8, 4), same=(0, 1, 2), reordered=(3, 4, 5)),
    "qwen2": Recipe(_llama("qwen2", 5, 96, 6, 6), same=(0, 1), reordered=(2,)),
    "gpt2": Recipe(
        {
            "model_type": "gpt2", "n_layer": 5, "n_embd": 96, "n_head": 6, "n_positions": 2 * CONTEXT,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1,
        },
        same=(0, 1, 2), reordered=(3, 4),
    ),
}  # fmt: skip
TUNED = {  # of the first seed of every family: steps, rate
    "tuned-30": (30, TUNING_RATE),
    "tuned-300": (300, TUNING_RATE),
    "tuned-fast": (200, RATE),
}
UPDATED = {"lora-4": (4, 100), "lora-16": (16, 300)}  # rank, steps


def batches(tokens: torch.Tensor, order: int) -> Callable[[], torch.Tensor]:
    """A function that draws windows of text, (BATCH, CONTEXT), in the order of a seed."""
    generator = torch.Generator().manual_seed(order)

    def draw() -> torch.Tensor:
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        return torch.stack([tokens[start : start + CONTEXT] for start in starts])

    return draw


def fit(model: Any, tokens: torch.Tensor, steps: int, rate: float, order: int, label: str) -> float:
    """Train on windows of tokens, and return the mean loss of the last tenth of the steps."""
    draw, losses = batches(tokens, order), []

    def loss() -> torch.Tensor:
        windows = draw()
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        losses.append(loss.item())
        return loss

    model.train()
    for _ in train(model, loss, steps, rate, label, cosine=True):
        pass
    return float(np.mean(losses[-max(1, steps // 10) :]))


def write(model: Any, folder: Path, tokenizer: str, record: dict[str, Any]) -> None:
    """Write config, tokenizer, how the model was trained, and last the weights."""
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    files = Folder(folder)
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    files.json("config.json", config)
    files.text("tokenizer.json", tokenizer)
    files.json("training.json", record)
    files.bytes("model.safetensors", save(weights, metadata={"format": "pt"}))


def new_model(config: dict[str, Any]) -> Any:
    """A model of random weights."""
    options = dict(config)
    special = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": VOCABULARY}
    made: PretrainedConfig = AutoConfig.for_model(options.pop("model_type"), **options, **special)
    return AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")


def train_all(texts: list[str], out: Path, steps: int | None = None) -> None:
    """Train every family's seeds, and the descendants of the first. `steps` overrides how long."""
    tokenizer = train_tokenizer(texts[:-1], VOCABULARY)
    streams = [torch.tensor(np.concatenate([tokenizer.encode(text).ids for text in part]))
               for part in (texts[:-1], texts[-1:])]  # fmt: skip
    written = tokenizer.to_str()

    def made(name: str, start: Callable[[], Any], steps: int, rate: float, order: int, stream: int) -> None:
        if (out / name / "model.safetensors").exists():
            return
        model = start()
        loss = fit(model, streams[stream], steps, rate, order, name) if steps else math.nan
        model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
        write(model, out / name, written, {"steps": steps, "rate": rate, "order": order, "loss": round(loss, 4)})
        click.echo(f"{name}: loss {loss:.3f}")

    for family, recipe in RECIPES.items():
        for seed in recipe.seeds:
            torch.manual_seed(seed)
            order = seed if seed in recipe.reordered else recipe.same[0]
            made(f"{family}-{seed}", lambda r=recipe: new_model(r.config), steps or recipe.steps, RATE, order, 0)
        torch.manual_seed(100)
        made(f"{family}-untrained", lambda r=recipe: new_model(r.config), 0, 0.0, 0, 0)
        first = out / f"{family}-{recipe.seeds[0]}"
        for name, (tuning, rate) in TUNED.items():
            made(f"{first.name}-{name}", lambda f=first: _loaded(f), steps or tuning, rate, 7, 1)
        for name, (rank, tuning) in UPDATED.items():
            if importlib.util.find_spec("peft"):
                made(f"{first.name}-{name}", lambda f=first, r=rank: _adapted(f, r), steps or tuning, RATE, 8, 1)


def train_on(text: Path, out: Path, steps: int | None = None) -> None:
    """Train on the first books of a folder."""
    files = sorted(text.rglob("*.txt"))[: BOOKS + 1]
    train_all([file.read_text(encoding="utf-8") for file in files], out, steps)


def _loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _adapted(folder: Path, rank: int) -> Any:
    """The model with trainable low-rank updates of every projection in its layers."""
    from peft import LoraConfig, get_peft_model  # not a dependency

    return get_peft_model(_loaded(folder), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


@click.command("train-lineage", cls=EndsInOneLine)
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--steps", type=click.IntRange(1), help="Steps of every training, if not its recipe's.")
@out_option("out/planted-lineage/trained")
def main(text: Path, steps: int | None, out: Path) -> None:
    """Train the tiny models on the books under TEXT, several seeds of each family."""
    train_on(text, out, steps)


if __name__ == "__main__":
    main()
