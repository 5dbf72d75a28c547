"""Train the checkpoint that ships inside weightscope, from a folder of plain text, in four runs.

    python -m analyses.toys.train_embedded --corpus BOOKS/ --out weightscope/core/embedded

A GPT-2 of four layers, six heads, width 192 and context 256 over a byte-level BPE of 8,000 tokens: small enough to
ship, large enough that heads of the previous token and induction heads form. Trained plainly, a model of this size
has none after 20 million tokens. So windows repeat passages, and one run has windows of 64 tokens, at any position,
among which the previous token is found sooner. Each run goes on where the one before was stopped; RUNS has them all.

training.json has the seed, the runs, the losses and the files of the corpus.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from weightscope.core.files import Folder
from weightscope.model.text.tokenizer import END_OF_TEXT

CONTEXT = 256
STEP = 8192  # tokens
SEED = 0
MICRO_BATCH = 8  # windows whose logits are in memory at once: 1.5 times as fast as 32, which do not fit in the cache
HELD_OUT = 0.01  # of every book, its end; gives the reported loss


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


@dataclass(frozen=True)
class Run:
    """Options of one run.

    Attributes
    ----------
    steps, stopped : int
        The steps of the schedule of the learning rate, and those that were done.
    span : int
        Tokens of a window; 8,192 tokens are a step.
    rate : float
        Peak learning rate.
    repeats : tuple of float
        Share of windows whose second half repeats a passage of the first, at the start and from the middle on.
    shortest : int
        Tokens of such a passage, at least.
    without_positions : float
        Share of forward passes without position embeddings: heads have to find a token's partner by its identity.
    """

    steps: int
    stopped: int
    span: int
    rate: float
    repeats: tuple[float, float]
    shortest: int
    without_positions: float


RUNS = (
    Run(2400, 800, 256, 3e-3, (0.5, 0.5), 16, 0.25),
    Run(1200, 350, 256, 1e-3, (1.0, 0.4), 32, 0.0),
    Run(1200, 450, 64, 2e-3, (1.0, 0.4), 12, 0.0),
    Run(800, 800, 256, 2e-3, (0.4, 0.4), 16, 0.1),
)


def with_repeats(windows: torch.Tensor, run: Run, done: float) -> torch.Tensor:
    """The windows, some of them with a passage of their first half copied into the second."""
    half = windows.shape[1] // 2
    first, last = run.repeats
    share = max(last, first - 2 * done * (first - last))
    for index in torch.nonzero(torch.rand(len(windows)) < share).flatten().tolist():
        row = windows[index]
        length = int(torch.randint(run.shortest, half, ()))
        source = int(torch.randint(0, half - length + 1, ()))
        target = int(torch.randint(half, windows.shape[1] - length + 1, ()))
        row[target : target + length] = row[source : source + length].clone()
    return windows


def loss_on(model: GPT2LMHeadModel, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross-entropy in nats over windows (batch, span + 1), which begin anywhere in training."""
    span = windows.shape[1] - 1
    start = int(torch.randint(CONTEXT - span + 1, ())) if model.training else 0
    places = torch.arange(start, start + span)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(windows[:, :-1], position_ids=places, use_cache=False).logits  # (batch, span, vocab)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


class PositionDropout:
    """Drops the position embeddings of a whole forward pass with the probability `share`."""

    def __init__(self, model: GPT2LMHeadModel, share: float) -> None:
        self.model, self.share = model, share
        self.hook = model.transformer.wpe.register_forward_hook(self._scaled)

    def _scaled(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], rows: torch.Tensor) -> torch.Tensor:
        dropped = self.model.training and torch.rand(()) < self.share
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


def trained(model: GPT2LMHeadModel, run: Run, train: torch.Tensor) -> Iterator[int]:
    """Train, and yield the number of each step that is done."""
    torch.manual_seed(SEED)
    positions = PositionDropout(model, run.without_positions)
    optimiser = optimiser_of(model, run.rate)
    batch = STEP // run.span
    for step in range(run.stopped):
        for group in optimiser.param_groups:
            group["lr"] = run.rate * schedule(step, run.steps)
        starts = torch.randint(len(train) - run.span - 1, (batch,))
        windows = torch.stack([train[s : s + run.span + 1] for s in starts])  # (batch, span + 1)
        windows = with_repeats(windows, run, step / run.steps)
        optimiser.zero_grad(set_to_none=True)
        for chunk in windows.split(MICRO_BATCH * CONTEXT // run.span):
            (loss_on(model, chunk) * len(chunk) / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        yield step + 1
    positions.hook.remove()


@click.command()
@click.option("--corpus", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--vocab", default=8000, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--width", default=192, show_default=True)
@click.option("--heads", default=6, show_default=True, help="Heads of a layer.")
@click.option("--first", default=1, show_default=True, help="The run to begin with, from the model in OUT.")
@click.option("--every", default=50, show_default=True, help="Steps between two evaluations.")
def main(corpus: Path, out: Path, vocab: int, layers: int, width: int, heads: int, first: int, every: int) -> None:
    """Train the embedded checkpoint on every .txt file under CORPUS."""
    torch.manual_seed(SEED)
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
    record = {
        "seed": SEED, "tokens_per_step": STEP, "runs": [asdict(run) for run in RUNS],
        "optimiser": "AdamW, betas 0.9 0.95, weight decay 0.1 on matrices, gradient norm clipped at 1",
        "precision": "bfloat16 autocast on CPU; float16 between runs", "torch": torch.__version__,
        "training_tokens": len(train), "held_out_tokens": len(held_out),
        "losses": [],  # run, step, held out, and of held-out passages: read first and read again
        "corpus": [{"file": f.name, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()} for f in files],
    }  # fmt: skip
    if first > 1:
        record["losses"] = json.loads((out / "training.json").read_text())["losses"]
    for number, run in enumerate(RUNS[first - 1 :], first):
        if number > 1:
            stored = load_file(out / "model.safetensors")
            model.load_state_dict({name: values.float() for name, values in stored.items()}, strict=False)
            model.tie_weights()
        model.train()
        for step in trained(model, run, train):
            if step % every == 0 or step == run.stopped:
                losses = [round(loss, 4) for loss in (held_out_loss(model, held_out), *repeat_losses(model, held_out))]
                record["losses"].append([number, step, *losses])
                click.echo(f"run {number}, step {step} of {run.stopped}: held out {losses[0]}, again {losses[1:]}")
                write(model, out, record)


if __name__ == "__main__":
    main()
