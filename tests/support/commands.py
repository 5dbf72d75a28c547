"""Every command that reads weights, as a user types it, over the fixtures of tests/model/rows."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from tests.support.figures import undrawn
from tests.support.tiny_models import fixture
from weightscope.cli import main

WORDS = 24  # the vocabulary of every fixture
Weights = dict[str, np.ndarray]


def with_tokenizer(name: str, folder: Path, change: Callable[[Weights], None] | None = None) -> Path:
    """A fixture in a folder with a tokenizer of words, its weights changed first."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(fixture(name).folder / "config.json", folder)
    weights = load_file(fixture(name).folder / "model.safetensors")
    if change is not None:
        change(weights)
    save_file(weights, folder / "model.safetensors")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder


def read_english(folder: Path, word: str) -> None:
    """Let the folder's tokenizer take every word that does not begin with w for `word`, so that it can read English."""
    import tokenizers

    path = str(folder / "tokenizer.json")
    changed = tokenizers.Tokenizer.from_file(path)
    changed.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(r"(?<!\S)[^\sw]\S*"), word)
    changed.save(path)


def write_counts(folder: Path) -> Path:
    """Bigrams counted in a text of those words; `folder` has the tokenizer."""
    drawn = np.random.default_rng(0).integers(0, WORDS, (30, 40))
    (folder / "corpus.txt").write_text("\n\n".join(" ".join(f"w{i}" for i in line) for line in drawn))
    counts = folder / "counts.npz"
    result = run("bigrams", folder / "corpus.txt", "--tokenizer", folder, "--out", counts)
    assert result.exit_code == 0, result.output
    return counts


def commands(source: Path, counts: Path, out: Path, *options: str) -> dict[str, list[object]]:
    """Each command's arguments by a name for it."""
    return {
        "inspect": ["inspect", source, *options],
        "audit": ["audit", source, "--out", out / "audit", *options],
        "compare": ["compare", source, source, "--out", out / "compare", *options],
        "circuits": ["circuits", source, "--out", out / "circuits", *options],
        "detok": ["detok", source, "--counts", counts, "--out", out / "detok", *options],
        "neighbours": ["neighbours", source, "w5", "--top", "3", *options],
        "positions": ["positions", source, "--out", out / "positions", *options],
        "unscaled": ["positions", source, "--unscaled", "--out", out / "unscaled", *options],
    }


def studies(source: Path, text: Path, out: Path, *options: str) -> dict[str, list[object]]:
    """The arguments of the commands that run the model."""
    few = {
        "norms": ["norms", "--inputs", "2", "--length", "16"],
        "outliers": ["outliers", "--inputs", "4", "--sample", "2", "--length", "16"],
        "sinks": ["sinks", "--question", "kind", "--inputs", "2", "--length", "16"],
    }
    return {
        name: [*arguments, source, "--text", text, "--out", out / name, *options] for name, arguments in few.items()
    }


def run(*arguments: object, **options: Any) -> Result:
    """A command in this process; an exception is kept in the result unless `catch_exceptions` is false."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def run_undrawn(*arguments: object) -> Result:
    """A command that draws no figures; an exception is raised."""
    with undrawn():
        return run(*arguments, catch_exceptions=False)


def is_one_line(result: Result) -> bool:
    """It was refused as every bad input is: status 2, one line on stderr, nothing on stdout."""
    return result.exit_code == 2 and not result.stdout and result.stderr.count("\n") == 1
