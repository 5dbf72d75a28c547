"""Every command line in README and docs/ parses, and those that need no more than weights are run, on tiny models."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.commands import read_english, run, with_tokenizer, write_counts
from tests.support.documented import IN_A_SENTENCE, PAGES, ROOT, Line, check, lines_of, words_of
from tests.support.figures import undrawn
from weightscope.cli import main
from weightscope.pairs.lineage.sketches import fingerprint

pytestmark = pytest.mark.docs

LINES = [line for page in PAGES for line in lines_of(page)]
COMPLETE = [line for line in LINES if line.complete]
# Options that sentences name and that are others' or a recipe's.
OTHERS = {"--help", "--against", "--host", "--interface", "--nworkers", "--shape", "--peer-python", "--list"}


def test_every_page_is_read() -> None:
    assert len(LINES) > 150 and len(COMPLETE) > 40
    assert {line.words[0] for line in COMPLETE} >= {"inspect", "audit", "compare", "circuits", "detok", "reference"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_command_lines_parse(page: Path) -> None:
    for line in lines_of(page):
        try:
            check(line)
        except click.UsageError as error:
            pytest.fail(f"{line}: {error.format_message()}")


@pytest.mark.parametrize(
    "line, problem",
    [
        ("audit SOURCE --ot out/", "No such option '--ot'"),
        ("audti SOURCE --out out/", "No such command 'audti'"),
        ("audit --out out/", "Missing argument 'SOURCE'"),
        ("fingerprint SOURCE", "Missing option '--out'"),
        ("sinks SOURCE --question what --out out/", "'what' is not one of"),
        ("audit SOURCE --out out/ --jobs many", "'many' is not a valid integer"),
        ("inspect SOURCE OTHER", "too much: OTHER"),
    ],
)
def test_a_line_that_is_wrong_is_found(line: str, problem: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        check(Line("page.md", words_of(line), True))
    assert problem in raised.value.format_message()


def test_options_that_sentences_name_are_there() -> None:
    known = {name for command in main.commands.values() for option in command.params for name in option.opts}
    for page in PAGES:
        for code in IN_A_SENTENCE.findall(page.read_text()):
            if option := re.match(r"--[a-z][a-z-]+", code):
                assert option[0] in known | OTHERS, f"{page.name}: {code}"


# What takes PyTorch, a cluster, a card, keys or other processes has tests of its own, and pages that name `embedded`
# are run as they are; here is what only reads weights.
ELSEWHERE = {
    "adopt", "draft", "row.toml", "newcomer", "norms", "outliers", "sinks", "QUANTISED.gguf", "embedded",
    "release", "issuer.pem", "issuer.pub", "--measure", "--on-text", "--engine", "--jobs", "--device", "--new",
}  # fmt: skip
# too large to run
REAL = {"gpt2", "all-MiniLM-L6-v2", "SmolLM2-135M-Instruct.Q4_1.gguf", "vit-fashion-mnist"}
TOKENS = {"owner/name": "step-1000", " Jackson": "w5"}  # of the tiny models' tokenizer
GOLDEN = ROOT / "tests" / "checkpoint" / "golden" / "adapters" / "llama"
FOLDERS = (
    "SOURCE", "A", "B", "out/checkpoint", "org/large-model",
    *(f"step-{n}" for n in (0, 1000, 10000, 143000)), *(f"org/model@step{n}" for n in (0, 1000, 143000)),
)  # fmt: skip
CHECKPOINTS = {*FOLDERS, "BASE", "TUNED", "SUSPECT", "CHECKPOINT", "RELEASE"}


def to_run() -> list[tuple[str, ...]]:
    """Each once, whatever it calls the checkpoint and wherever its results go."""
    kept: dict[tuple[str, ...], tuple[str, ...]] = {}
    for line in LINES:
        try:
            check(line._replace(complete=True))
        except click.UsageError:
            continue  # a sentence names a part of it
        if not ELSEWHERE & {*line.words} and REAL.isdisjoint(line.words):
            given = ["SOURCE" if word.rstrip("/") in CHECKPOINTS else word for word in line.words]
            kept.setdefault(tuple(re.sub(r"--out \S+", "", " ".join(given)).split()), line.words)
    return list(kept.values())


def test_command_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in one folder where each placeholder is a tiny checkpoint, a list, a corpus or counts."""
    pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    monkeypatch.chdir(tmp_path)
    made = with_tokenizer("gpt2", tmp_path / "SOURCE")
    read_english(made, "w7")  # `detok SOURCE` counts the packaged works
    for before, name in pairwise(FOLDERS):
        shutil.copytree(before, name)
        weights = load_file(f"{name}/model.safetensors")
        save_file({tensor: array * np.float32(1.01) for tensor, array in weights.items()}, f"{name}/model.safetensors")
    for name in ("BASE", "TUNED", "SUSPECT", "CHECKPOINT", "ORIGINAL", "RELEASE", "ADAPTER"):
        shutil.copytree(GOLDEN / ("adapter" if name == "ADAPTER" else "base"), name)
    Path("tests").symlink_to(ROOT / "tests")  # for lines that name a checkpoint of these
    Path("fingerprints").mkdir()
    fingerprint("BASE").save("fingerprints/base.wsf")
    assert run("id", "A", "--out", "A.id.json").exit_code == 0
    counts = write_counts(made)
    for name in ("C.npz", "COUNTS.npz"):
        shutil.copy(counts, name)
    shutil.copy(made / "corpus.txt", "CORPUS")
    for name in ("steps.txt", "LIST.txt"):
        Path(name).write_text("step-0\nstep-1000\n")
    Path("checkpoints.csv").write_text("source\nA\nB\n")
    Path("capitals.csv").write_text("".join(f"w{i},w{i + 10}\n" for i in range(6)))
    Path("accepted.csv").write_text("kind,layer\nlayer_off_trend,0\n")
    for name in ("earlier", "earlier-audit"):
        with undrawn():
            assert run("audit", "SOURCE", "--out", name, "--directions", "0").exit_code == 0
    ran = to_run()
    for words in ran:
        with undrawn():
            result = run(*(TOKENS.get(word, word) for word in words))
        outcome = f"weightscope {' '.join(words)}: {result.output} {result.exception!r}"
        may_stop = {"--fail-on", "--max-change"} & {*words} or words[0] == "same"
        statuses = {0, 4} if words[0] == "verify" else {0, 3} if may_stop else {0}
        assert result.exit_code in statuses, outcome
        if "--json" in words:
            json.loads(result.stdout)
        elif "--out" in words:
            assert Path(result.stdout.splitlines()[-1].partition(": ")[0]).exists(), outcome  # and of counts how many
    assert len(ran) > 20
