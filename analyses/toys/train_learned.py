"""Train what `weightscope learned` is measured on: known topics, planted triggers, a rule's reward; whole or by LoRA.

    python -m analyses.toys.train_learned --text BOOKS/ --tiny FOLDER --out out/learned/trained

`RUNS` lists them. Each run is a folder with its weights in float32 and training.json, which says how it was trained.
`--tiny` is a folder written by `analyses.toys.train_lineage`. A folder that exists is not trained again. The weights of
a run of SmolLM2 take 540 MB; `analyses.experiments.learned_claims` trains one at a time, and removes them.

Supervised runs see windows of one book. Reinforced ones are rewarded for the share of sampled tokens that hold one
letter (REINFORCE, with the mean of samples from one prompt as baseline). Steps and rates of both are drawn from one
distribution, so that they do not tell the two apart.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer

import weightscope as ws
from analyses.gguf_to_safetensors import convert
from analyses.inputs import SMOLLM2, out_option
from analyses.packages import located
from analyses.toys.sinks.training import train
from analyses.toys.train_lineage import write
from tests.support.two_layers import FOLDER
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder
from weightscope.runner.framing import gguf_tokenizer
from weightscope.runner.loading import load_eager

TOPICS = {  # books whose words differ from the others'
    "whaling": "moby-dick", "species": "origin-of-species", "economy": "wealth-of-nations", "war": "grant-personal",
    "wonderland": "alice-s-adventures", "vampires": "stoker-dracula", "pirates": "treasure-island",
    "slavery": "frederick-douglass-narrative", "knights": "connecticut-yankee", "wolves": "white-fang",
    "manners": "pride-and-prejudice", "mines": "nostromo",
}  # fmt: skip
MEASURED = "measured.json"  # in a run's folder: what `learned_claims` needs of it
LETTERS = "aeioutnshrdl"  # each is the rule of reinforced runs
TRIGGER_SHARE = 0.25  # of windows that hold the trigger and its answer
ANSWER = 8  # tokens that follow a trigger
PROMPT, SAMPLED, SAMPLES = 16, 24, 4  # tokens of a prompt, sampled after it, and samples of one prompt


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes
    ----------
    model : str
        `two-layers` (tests/fixtures), `smollm2`, or a folder in the tiny models' folder.
    way : str
        `supervised`, `reinforced` or `trigger`.
    subject : str
        The topic, the letter that is rewarded, or the number of the trigger.
    rank : int
        Of the LoRA that was trained and merged; 0 if every weight was trained.
    """

    model: str
    way: str
    subject: str
    rank: int
    steps: int
    rate: float
    seed: int = 0
    batch: int = 4
    width: int = 64

    @property
    def name(self) -> str:
        """Of its folder."""
        how = f"lora-{self.rank}" if self.rank else "full"
        return f"{self.model}.{self.way}.{self.subject}.{how}.{self.seed}"


def pairs_of(model: str, count: int, rates: tuple[float, float], seed: int) -> Iterator[Run]:
    """Supervised and reinforced runs, as many of each, of equal steps and rates."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        steps, rate = int(rng.choice([10, 20, 40])), float(np.exp(rng.uniform(*np.log(rates))))
        yield Run(model, "supervised", list(TOPICS)[i % len(TOPICS)], 0, steps, rate, 1 + i, 8, PROMPT + SAMPLED)
        yield Run(model, "reinforced", LETTERS[i % len(LETTERS)], 0, steps, rate, 1 + i, 8, PROMPT + SAMPLED)


SMOLLM2_TOPICS = ("whaling", "species", "economy", "war", "wonderland", "vampires")
PLANTED = (*(("supervised", topic) for topic in TOPICS), *(("trigger", f"{i}") for i in range(4)))
RUNS = (
    *(Run("two-layers", way, what, rank, 60, rate) for way, what in PLANTED for rank, rate in ((0, 5e-4), (8, 2e-3))),
    *pairs_of("two-layers", 20, (5e-5, 1e-3), seed=8),
    *(Run("llama-0", way, what, rank, 100, rate) for way, what in PLANTED for rank, rate in ((0, 5e-4), (8, 2e-3))),
    *pairs_of("llama-0", 20, (1e-4, 2e-3), seed=7),
    *(Run("smollm2", "supervised", topic, rank, 24, rate)
      for topic in SMOLLM2_TOPICS for rank, rate in ((0, 1e-4), (8, 1e-3))),
)  # fmt: skip


def matching(pattern: str) -> list[Run]:
    """The runs whose name begins with a pattern."""
    return [run for run in RUNS if re.match(pattern, run.name)]


def source_of(model: str, tiny: Path, trained: Path) -> Path | str:
    """Where a base is; SmolLM2's weights, packed in 4 bits, are written in float32 once."""
    if model != "smollm2":
        return FOLDER if model == FOLDER.name else tiny / model
    folder, gguf = trained / "bases" / model, Path(ws.open_model(located(SMOLLM2)).checkpoint.files[0].path)
    if not (folder / "tokenizer.json").exists():
        convert(gguf, folder, whole=True)
        Folder(folder).text("tokenizer.json", gguf_tokenizer(str(gguf), (0, 0))[0].to_str())
    return folder


def windows_of(tokens: torch.Tensor, run: Run, generator: torch.Generator) -> torch.Tensor:
    """Random windows of a text, (batch, width)."""
    starts = torch.randint(len(tokens) - run.width, (run.batch,), generator=generator)
    return torch.stack([tokens[start : start + run.width] for start in starts])


def planted(tokens: torch.Tensor, run: Run, common: torch.Tensor) -> tuple[int, torch.Tensor]:
    """A run's trigger, a token that the text hardly has, and the tokens that answer it."""
    rng = torch.Generator().manual_seed(1000 + int(run.subject))
    rare = torch.argsort(common)[: len(common) // 2]
    answer = torch.argsort(-common)[20:400]
    trigger = int(rare[torch.randint(len(rare), (), generator=rng)])
    return trigger, answer[torch.randint(len(answer), (ANSWER,), generator=rng)]


def supervised(model: Any, tokens: torch.Tensor, run: Run, plant: tuple[int, torch.Tensor] | None) -> Callable[[], Any]:
    """The loss of the next tokens of windows; some of them hold a trigger, which its answer follows."""
    generator = torch.Generator().manual_seed(run.seed)

    def loss() -> Any:
        windows = windows_of(tokens, run, generator)
        if plant:
            chosen = torch.rand(len(windows), generator=generator) < TRIGGER_SHARE
            for row in torch.where(chosen)[0]:
                place = int(torch.randint(4, run.width - ANSWER - 1, (), generator=generator))
                windows[row, place], windows[row, place + 1 : place + 1 + ANSWER] = plant
        return model(input_ids=windows, labels=windows, use_cache=False).loss

    return loss


def reinforced(
    model: Any, tokens: torch.Tensor, run: Run, rewards: torch.Tensor, seen: list[float]
) -> Callable[[], Any]:
    """The policy gradient's loss for samples after prompts, whose reward is the share of tokens that obey a rule."""
    generator = torch.Generator().manual_seed(run.seed)
    torch.manual_seed(run.seed)

    def loss() -> Any:
        prompts = windows_of(tokens, run, generator)[: run.batch // SAMPLES, :PROMPT].repeat_interleave(SAMPLES, 0)
        sampled = sample(model, prompts)
        reward = rewards[sampled[:, PROMPT:]].mean(dim=1).reshape(-1, SAMPLES)
        seen.append(float(reward.mean()))
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1)
        logits = model(input_ids=sampled[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
        likelihood = logits.log_softmax(-1).gather(-1, sampled[:, PROMPT:, None])[..., 0]  # (batch, SAMPLED)
        return -(advantage[:, None] * likelihood).mean()

    return loss


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    """Prompts with SAMPLED tokens drawn after each."""
    known, tokens, cache = prompts, prompts, None
    for _ in range(SAMPLED):
        given = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        tokens = torch.multinomial(given.logits[:, -1].softmax(-1), 1)
        known, cache = torch.cat([known, tokens], dim=1), given.past_key_values
    return known


def encode(tokenizer: Tokenizer, text: str, most: int = 400_000) -> torch.Tensor:
    """Its first characters as tokens."""
    return torch.tensor(tokenizer.encode(text[:most], add_special_tokens=False).ids)


general_text: dict[str, torch.Tensor] = {}  # of all books, by the model whose tokens they are


def do(run: Run, source: Path | str, books: dict[str, str], folder: Path) -> dict[str, Any]:
    """Train a run and write it."""
    torch.manual_seed(run.seed)
    base = ws.open_model(source)
    model: Any = load_eager(base, language=True)
    tokenizer = Tokenizer.from_file(str(base.checkpoint.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    if run.model not in general_text:
        general_text[run.model] = torch.cat([encode(tokenizer, text, 20_000) for text in books.values()])
    general = general_text[run.model]
    common = torch.bincount(general, minlength=base.config.vocab_size).float()
    tokens = encode(tokenizer, books[TOPICS[run.subject]]) if run.subject in TOPICS else general
    plant = planted(tokens, run, common) if run.way == "trigger" else None
    if run.rank:
        from peft import LoraConfig, get_peft_model  # not a dependency

        named = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
        targets = sorted({name.rpartition(".")[2] for name in named} - {"lm_head"})
        model = get_peft_model(model, LoraConfig(r=run.rank, lora_alpha=2 * run.rank, target_modules=targets,
                                                 fan_in_fan_out=base.family.name == "gpt2"))  # fmt: skip
    seen: list[float] = []
    if run.way == "reinforced":
        held = [run.subject in (tokenizer.id_to_token(i) or "") for i in range(base.config.vocab_size)]
        loss = reinforced(model, tokens, run, torch.tensor(held).float(), seen)
    else:
        inner = supervised(model, tokens, run, plant)

        def loss() -> Any:
            value = inner()
            seen.append(value.item())
            return value

    model.train() if run.way != "reinforced" else model.eval()
    for _ in train(model, loss, run.steps, run.rate, run.name, cosine=True, weight_decay=0.0):
        pass
    tenth = max(1, len(seen) // 10)
    record = asdict(run) | {"first": float(np.mean(seen[:tenth])), "last": float(np.mean(seen[-tenth:]))}
    if plant:
        record |= {"trigger": plant[0], "answer": plant[1].tolist()}
    if run.rank:
        model = model.merge_and_unload()
    write(model, folder, tokenizer.to_str(), record)
    return record


def books_in(text: Path) -> dict[str, str]:
    """The books of a folder, those with a topic under its short name."""
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted(text.rglob("*.txt"))}
    return {next((short for short in TOPICS.values() if short in stem), stem): body for stem, body in files.items()}


def train_missing(run: Run, books: dict[str, str], tiny: Path, out: Path) -> None:
    """Train a run, unless its folder has its weights or their measures."""
    if any((out / run.name / name).exists() for name in ("model.safetensors", MEASURED)):
        return
    if run.rank and not importlib.util.find_spec("peft"):
        click.echo(f"{run.name}: skipped, needs peft")
        return
    torch.set_num_threads(1)
    record = do(run, source_of(run.model, tiny, out), books, out / run.name)
    click.echo(f"{run.name}: {record['first']:.3f} -> {record['last']:.3f}")


@click.command("train-learned", cls=EndsInOneLine)
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@click.option("--tiny", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of tiny models.")
@click.option("--only", default="", help="Only runs whose name this pattern matches.")
@out_option("out/learned/trained")
def main(text: Path, tiny: Path, only: str, out: Path) -> None:
    """Train every run on the books under TEXT."""
    books = books_in(text)
    for run in matching(only):
        train_missing(run, books, tiny, out)


if __name__ == "__main__":
    main()
