"""Train the checkpoint that ships inside weightscope, from a folder of plain text.

    python -m analyses.toys.train_embedded --corpus BOOKS/ --out weightscope/embedded

A GPT-2 of two layers, eight heads, width 256 and context 256 over a byte-level BPE of 8,000 tokens: small enough to
ship, large enough that the first attention layer learns what the papers measure. One run writes everything that the
analysis needs: weights (float16 safetensors), config, tokenizer, and training.json with the seed, the steps, the loss
and the files of the corpus. `weightscope bigrams` then counts the same folder.
"""

import hashlib
import json
import math
import time
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from weightscope.core.files import Folder
from weightscope.model.text.tokenizer import END_OF_TEXT

CONTEXT = 256
MICRO_BATCH = 8  # windows whose logits are in memory at once: 1.5 times as fast as 32, which do not fit in the cache
# Share of forward passes without position embeddings, so that a head has to find a token's partner by its identity.
POSITION_DROPOUT = 0.1
POSITION_SCALE = 0.04  # of position embeddings at the start; of token embeddings it is 0.02
HELD_OUT = 0.01  # of every book, its end; gives the reported loss
# Share of windows whose second half repeats a passage of the first, at the start and from the middle of training on:
# without them induction heads form only after far more text than a few books have.
REPEATED = (1.0, 0.4)
SHORTEST_REPEAT = 32  # tokens of a repeated passage, at least


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenisation, so that a word's later pieces carry no leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split(documents: list[np.ndarray], end_of_text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two token streams, training and held out; every document begins with the end-of-text token."""
    streams: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for tokens in documents:
        cut = int(len(tokens) * (1 - HELD_OUT))
        for stream, part in zip(streams, (tokens[:cut], tokens[cut:]), strict=True):
            stream += [np.array([end_of_text]), part]
    train, held_out = (torch.from_numpy(np.concatenate(parts).astype(np.int64)) for parts in streams)
    return train, held_out


def with_repeats(windows: torch.Tensor, done: float) -> torch.Tensor:
    """The windows, REPEATED of them with a passage of their first half copied into the second."""
    half = windows.shape[1] // 2
    first, last = REPEATED
    share = max(last, first - 2 * done * (first - last))
    for index in torch.nonzero(torch.rand(len(windows)) < share).flatten().tolist():
        row = windows[index]
        length = int(torch.randint(SHORTEST_REPEAT, half, ()))
        source = int(torch.randint(0, half - length + 1, ()))
        target = int(torch.randint(half, windows.shape[1] - length + 1, ()))
        row[target : target + length] = row[source : source + length].clone()
    return windows


def loss_on(model: GPT2LMHeadModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats; windows is (batch, CONTEXT + 1)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(windows[:, :-1], use_cache=False).logits  # (batch, CONTEXT, vocab)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Sines and cosines of position (positions, width), from which heads of the previous token form sooner."""
    rates = 2 * (2 * positions / math.pi) ** (-torch.arange(0, width, 2) / width)  # waves of 3 to 500 positions
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class PositionDropout:
    """Drops the position embeddings of a whole forward pass with probability POSITION_DROPOUT."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        self.model = model
        model.transformer.wpe.register_forward_hook(self._scaled)

    def _scaled(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
        dropped = self.model.training and torch.rand(()) < POSITION_DROPOUT
        return torch.zeros_like(rows) if dropped else rows


@torch.no_grad()
def repeat_losses(model: GPT2LMHeadModel, stream: torch.Tensor) -> tuple[float, float]:
    """The loss over held-out passages of half a context, and over the same passages read again."""
    half = CONTEXT // 2
    passages = stream[: len(stream) // half * half].reshape(-1, half)[:MICRO_BATCH]
    model.eval()
    logits = model(torch.cat([passages, passages], dim=1), use_cache=False).logits[:, :-1]
    model.train()
    targets = torch.cat([passages, passages], dim=1)[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return float(losses[:, : half - 1].mean()), float(losses[:, half:].mean())


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, stream: torch.Tensor) -> float:
    """The loss over the held-out stream, in windows that do not overlap."""
    count = (len(stream) - 1) // CONTEXT
    windows = stream[: count * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)  # (count, CONTEXT + 1)
    model.eval()
    losses = [loss_on(model, chunk) * len(chunk) for chunk in windows.split(MICRO_BATCH)]
    model.train()
    return float(sum(losses) / count)


def optimiser_of(model: GPT2LMHeadModel, rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on biases and norms."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up over 2 % of the run, then a cosine to a hundredth."""
    warm = max(1, steps // 50)
    if step < warm:
        return (step + 1) / warm
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def write(model: GPT2LMHeadModel, out: Path, record: dict) -> None:
    """Write the weights in float16 under Hugging Face's names, without the tied unembedding."""
    weights = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    files = Folder(out)
    files.json("training.json", record)
    files.text("config.json", config_text(model) + "\n")
    files.bytes("model.safetensors", save(weights, metadata={"format": "pt"}))


def config_text(model: GPT2LMHeadModel) -> str:
    """config.json, with only the keys that a reader of the checkpoint needs."""
    kept = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "layer_norm_epsilon", "activation_function")
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    config |= {key: getattr(model.config, key) for key in kept}
    return json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0, "dtype": "float16"}, indent=1)


@click.command()
@click.option("--corpus", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=2400, show_default=True)
@click.option("--batch", default=32, show_default=True, help="Windows of 256 tokens a step.")
@click.option("--rate", default=3e-3, show_default=True, help="Peak learning rate.")
@click.option("--vocab", default=8000, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=192, show_default=True)
@click.option("--heads", default=6, show_default=True, help="Heads of a layer.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--every", default=250, show_default=True, help="Steps between two evaluations of the held-out loss.")
def main(
    corpus: Path,
    out: Path,
    steps: int,
    batch: int,
    rate: float,
    vocab: int,
    layers: int,
    width: int,
    heads: int,
    seed: int,
    every: int,
) -> None:
    """Train the embedded checkpoint on every .txt file under CORPUS."""
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(corpus.rglob("*.txt"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    tokenizer = train_tokenizer(texts, vocab)
    Folder(out).text("tokenizer.json", tokenizer.to_str())
    documents = [np.array(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    train, held_out = split(documents, end_of_text)
    click.echo(f"{len(files)} files, {len(train):,} training tokens, {len(held_out):,} held out")

    config = GPT2Config(
        vocab_size=vocab, n_positions=CONTEXT, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end_of_text, eos_token_id=end_of_text,
    )  # fmt: skip
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    model.transformer.wpe.weight.data = sinusoids(CONTEXT, width) * POSITION_SCALE
    for block in model.transformer.h:  # GPT-2's 0.02 is for wider models: queries and keys hardly learn from it
        for matrix in (block.attn.c_attn, block.attn.c_proj):
            torch.nn.init.normal_(matrix.weight, std=width**-0.5)
    PositionDropout(model)
    model.train()
    optimiser = optimiser_of(model, rate)
    record = {
        "seed": seed, "steps": steps, "tokens_per_step": batch * CONTEXT, "peak_learning_rate": rate,
        "optimiser": "AdamW, betas 0.9 0.95, weight decay 0.1 on matrices, gradient norm clipped at 1",
        "position_dropout": POSITION_DROPOUT, "precision": "bfloat16 autocast on CPU", "torch": torch.__version__,
        "training_tokens": len(train), "held_out_tokens": len(held_out), "held_out_loss": [],
        "repeats": REPEATED, "repeats_loss": [],
        "corpus": [{"file": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files],
    }  # fmt: skip

    started = time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * schedule(step, steps)
        starts = torch.randint(len(train) - CONTEXT - 1, (batch,))
        windows = torch.stack([train[s : s + CONTEXT + 1] for s in starts])  # (batch, CONTEXT + 1)
        windows = with_repeats(windows, step / steps)
        optimiser.zero_grad(set_to_none=True)
        for chunk in windows.split(MICRO_BATCH):
            loss = loss_on(model, chunk)
            (loss * len(chunk) / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            rate_now = (step + 1) * batch * CONTEXT / (time.perf_counter() - started)
            repeats = repeat_losses(model, held_out)
            record["repeats_loss"].append([step + 1, *(round(each, 4) for each in repeats)])
            record["held_out_loss"].append([step + 1, round(held_out_loss(model, held_out), 4)])
            click.echo(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  held out {record['held_out_loss'][-1][1]:.3f}"
                f"  repeats {repeats[0]:.2f} {repeats[1]:.2f}"
                f"  {rate_now:,.0f} tokens/s"
            )
            write(model, out, record)


if __name__ == "__main__":
    main()
