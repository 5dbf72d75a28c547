"""Fine-tune small models in ordinary ways, and measure how far `compare` finds that each one moved.

    python -m analyses.toys.train_tunes --text BOOKS/ --out out/figures/fine-tunes

`TUNES` lists them: models that ship with weightscope or with packages, and tiny ones that are trained here first, each
tuned on other text than the rest, with rates and numbers of steps that people use. A tune counts as healthy if the loss
on held-out text of its task fell. They are short, on a processor: a table of what happens, not a sample of what people
publish. fine-tunes.csv has one row per tune, percentiles.csv their distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tokenizers import Tokenizer

import weightscope as ws
from analyses.inputs import MINILM, out_option
from analyses.packages import located
from analyses.toys.sinks.training import train
from analyses.toys.train_embedded import train_tokenizer
from analyses.toys.train_lineage import BOOKS, RATE, RECIPES, VOCABULARY, fit, new_model, write
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.tables import Table
from weightscope.model.metrics.outliers import known_median
from weightscope.runner.loading import load_eager

HELD_OUT = 0.05  # of every text, its end
WINDOWS = 24  # of held-out text, on which the loss is measured
LABELS = 4  # books that a classifier tells apart
PERCENTILES = (0, 10, 50, 90, 100)
HEADER = ("model", "task", "steps", "rate", "loss_before", "loss_after", "median_head", "largest_head",
          "largest_change", "most")  # fmt: skip


@dataclass(frozen=True)
class Tune:
    """One fine-tune.

    Attributes
    ----------
    model : str
        A source, or the name of a family of `analyses.toys.train_lineage`, whose first seed is trained here.
    task : str
        `text`: next tokens of a book. `classifier`: which book a window is from, by a new head on the first token.
    steps, rate : int, float
    book : int
        Which book, or the first of those that are told apart.
    batch, width : int
        Windows of a step, and their tokens.
    """

    model: str
    task: str
    steps: int
    rate: float
    book: int
    batch: int = 8
    width: int = 64


TUNES = (
    *(Tune(TWO_LAYERS, "text", steps, rate, 13) for steps in (60, 300) for rate in (1e-5, 5e-5, 2e-4, 1e-3)),
    *(Tune(TWO_LAYERS, "text", 300, 2e-4, book) for book in (15, 20)),
    *(Tune(MINILM, "classifier", steps, rate, 13) for steps, rate in ((60, 2e-5), (60, 5e-5), (60, 1e-4), (200, 5e-5))),
    *(Tune(family, "text", steps, rate, 13, 16) for family in RECIPES for steps, rate in ((30, 3e-4), (300, 3e-4))),
)  # fmt: skip

Batch = tuple[torch.Tensor, torch.Tensor]  # windows of tokens (batch, width), and the book of each


def batches(books: list[torch.Tensor], tune: Tune, seed: int) -> Callable[[], Batch]:
    """A function that draws windows of the books, each as often."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Batch:
        labels = torch.randint(len(books), (tune.batch,), generator=generator)
        starts = [int(torch.randint(len(books[i]) - tune.width, (), generator=generator)) for i in labels.tolist()]
        pairs = zip(labels.tolist(), starts, strict=True)
        return torch.stack([books[i][start : start + tune.width] for i, start in pairs]), labels

    return draw


def loss_of(model: Any, head: torch.nn.Linear | None, batch: Batch) -> torch.Tensor:
    """Of the next tokens, or with a head of the books."""
    windows, labels = batch
    if head is None:
        return model(input_ids=windows, labels=windows, use_cache=False).loss
    return torch.nn.functional.cross_entropy(head(model(input_ids=windows).last_hidden_state[:, 0]), labels)


def tuned(base: Path | str, tune: Tune, texts: list[str], folder: Path) -> tuple[float, float]:
    """Write the fine-tune into a folder; its loss on held-out text before and after."""
    torch.manual_seed(0)
    source = ws.open_model(base)
    model: Any = load_eager(source, language=tune.task == "text")
    tokenizer = Tokenizer.from_file(str(source.checkpoint.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    count = LABELS if tune.task == "classifier" else 1
    encoded = [torch.tensor(tokenizer.encode(text[:400_000], add_special_tokens=False).ids)
               for text in texts[tune.book : tune.book + count]]  # fmt: skip
    cuts = [int(len(tokens) * (1 - HELD_OUT)) for tokens in encoded]
    draw = batches([tokens[:cut] for tokens, cut in zip(encoded, cuts, strict=True)], tune, 1)
    unseen = batches([tokens[cut:] for tokens, cut in zip(encoded, cuts, strict=True)], tune, 2)
    held_out = [unseen() for _ in range(WINDOWS // tune.batch)]
    head = torch.nn.Linear(source.config.d_model, LABELS) if tune.task == "classifier" else None

    @torch.no_grad()
    def loss() -> float:
        model.eval()
        return float(np.mean([loss_of(model, head, batch).item() for batch in held_out]))

    before = loss()
    model.train()
    trained = torch.nn.ModuleList([model] if head is None else [model, head])
    for _ in train(trained, lambda: loss_of(model, head, draw()), tune.steps, tune.rate, tune.model, cosine=True):
        pass
    model.save_pretrained(folder)
    return before, loss()


def small_seed(family: str, texts: list[str], folder: Path) -> None:
    """Train the first seed of a family of tiny models, as `analyses.toys.train_lineage` does."""
    recipe, torch_seed = RECIPES[family], RECIPES[family].seeds[0]
    tokenizer = train_tokenizer(texts[:BOOKS], VOCABULARY)
    tokens = torch.tensor(np.concatenate([tokenizer.encode(text).ids for text in texts[:BOOKS]]))
    torch.manual_seed(torch_seed)
    model = new_model(recipe.config)
    fit(model, tokens, recipe.steps, RATE, recipe.same[0], family)
    write(model, folder, tokenizer.to_str(), {"steps": recipe.steps, "rate": RATE})


def measure(tune: Tune, texts: list[str], bases: Path) -> tuple[Any, ...]:
    """The row of a tune."""
    base: Path | str = located(tune.model)
    if tune.model in RECIPES:
        base = bases / tune.model
        if not base.exists():
            small_seed(tune.model, texts, base)
    with scratch_folder() as folder:
        before, after = tuned(base, tune, texts, folder)
        comparison = ws.compare(base, folder, labels=["base", "tuned"])
    changes = [comparison.from_first[name][-1] for name in ("qk_change", "vo_change")]
    what, farthest = comparison.farthest
    largest = max(float(change.max()) for change in changes)
    middle = known_median(np.maximum(*changes))
    run = Path(tune.model).name, tune.task, tune.steps, tune.rate
    return *run, before, after, middle, largest, farthest, what


@click.command("fine-tunes", cls=EndsInOneLine)
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of .txt files.")
@out_option("out/figures/fine-tunes")
def main(text: Path, out: Path) -> None:
    """Train the fine-tunes on the books under TEXT, and write how far each one moved."""
    torch.set_num_threads(1)
    texts = [file.read_text(encoding="utf-8") for file in sorted(text.rglob("*.txt"))]
    rows = []
    with scratch_folder() as bases:
        for row in map(partial(measure, texts=texts, bases=bases), TUNES):
            rows.append(row)
            click.echo(", ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
            table = Table.of_rows(HEADER, rows)
            Folder(out).table("fine-tunes.csv", table)
    names = ("median_head", "largest_head", "largest_change")
    healthy = table["loss_after"] < table["loss_before"]
    percentiles = [(name, int(healthy.sum()), *np.percentile(table[name][healthy], PERCENTILES)) for name in names]
    header = ("number", "tunes", *(f"p{percentile}" for percentile in PERCENTILES))
    Folder(out).table("percentiles.csv", Table.of_rows(header, percentiles))


if __name__ == "__main__":
    main()
