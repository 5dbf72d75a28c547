"""How the work of every command grows with what a checkpoint has: counted at n, 2n and 4n, because times differ.

No function's steps or elements may grow faster than in proportion; `FASTER` lists exceptions and their reasons.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.synthetic import Sizes
from tests.support.commands import run, studies
from tests.support.figures import undrawn
from tests.support.work import Count, counted_work, exponent
from weightscope.cli import main
from weightscope.core.compute import cores
from weightscope.pairs.lineage import matching, probes

pytestmark = pytest.mark.check

Weights = dict[str, np.ndarray]
Checkpoint = tuple[Sizes, Weights]
PROPORTIONAL = 1.2
LISTED = 1.1  # a function of `FASTER` that grows no faster does not belong there
STEP = 4.5  # what hardly runs at n and 2n, or does not, begins at a size: no loop grows so
FEWEST = 1000  # steps or elements; less is the spelling of longer numbers and paths
FURTHER, SHARE = 10, 0.02  # a function is judged that would be this share of all work at so many times the largest size
BASE = Sizes(layers=2, width=72, heads=2, head_dim=16, kv_heads=2, vocabulary=96, inner=48)


def weights_of(sizes: Sizes, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    drawn = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in sizes.shapes}
    return {name: w + name.endswith("norm.weight") for name, w in drawn.items()}


def layers(n: int) -> Checkpoint:
    sizes = replace(BASE, layers=n)
    return sizes, weights_of(sizes)


def equal_layers(n: int) -> Checkpoint:
    sizes, weights = layers(n)
    return sizes, {
        name: weights[f"model.layers.0.{name.split('.', 3)[3]}"] if ".layers." in name else values
        for name, values in weights.items()
    }


def broken_layers(n: int) -> Checkpoint:
    """Each layer has a value that is not a number."""
    sizes, weights = layers(n)
    for i in range(n):
        weights[f"model.layers.{i}.self_attn.q_proj.weight"][0, 0] = np.nan
    return sizes, weights


def heads(n: int) -> Checkpoint:
    sizes = replace(BASE, heads=n, kv_heads=n)
    return sizes, weights_of(sizes)


def found_heads(n: int) -> Checkpoint:
    """One half of the heads are equal, the other half write nothing: a finding for each."""
    sizes, weights = heads(n)
    for name, values in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            values[:] = np.tile(values[: sizes.head_dim], (n, 1))
        elif name.endswith("o_proj.weight"):
            values[:] = np.tile(values[:, : sizes.head_dim], (1, n))
            values[:, n // 2 * sizes.head_dim :] = 0
    return sizes, weights


def rows(n: int) -> Checkpoint:
    """128 n tokens, and 64 n neurons a layer."""
    sizes = replace(BASE, vocabulary=128 * n, inner=64 * n)
    return sizes, weights_of(sizes)


def equal_rows(n: int) -> Checkpoint:
    sizes, weights = rows(n)
    for name, values in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "up_proj.weight", "gate_proj.weight")):
            values[:] = values[0]
        elif name.endswith("down_proj.weight"):
            values[:] = values[:, :1]
    return sizes, weights


def experts(n: int) -> Checkpoint:
    sizes = replace(BASE, inner=16, experts=n)
    return sizes, weights_of(sizes)


def tensors(n: int) -> Checkpoint:
    """16 n tensors that no row names, half of them equal."""
    more = {f"extra.{k}.weight": np.full((4, 4), max(0, k - 8 * n), np.float32) for k in range(16 * n)}
    return BASE, weights_of(BASE) | more


def width(n: int) -> Checkpoint:
    sizes = replace(BASE, width=36 * n)
    return sizes, weights_of(sizes)


GROWING: dict[Callable[[int], Checkpoint], int] = {  # and the first n
    layers: 4, equal_layers: 4, broken_layers: 4, heads: 8, found_heads: 8, rows: 4, equal_rows: 4, experts: 2,
    tensors: 4, width: 4,
}  # fmt: skip
DEEP = (layers, equal_layers)
NONCE = ("--nonce", "0" * 32)  # the same probes in each run; by some, more pairs of equal layers look alike
Arguments = Callable[[Path, Path, Path], list[Any]]
COMMANDS: dict[str, Arguments] = {
    "inspect": lambda a, b, out: ["inspect", a, "--tensors"],
    "inspect --check": lambda a, b, out: ["inspect", a, "--check"],
    "audit --all": lambda a, b, out: ["audit", a, "--all", "--out", out],
    "circuits": lambda a, b, out: ["circuits", a, "--out", out],
    "neighbours": lambda a, b, out: ["neighbours", a, "--token-id", 5],
    "positions": lambda a, b, out: ["positions", a, "--out", out],
    "rank": lambda a, b, out: ["rank", a],
    "same": lambda a, b, out: ["same", a, b],
    "id": lambda a, b, out: ["id", a],
    "compare": lambda a, b, out: ["compare", a, b, "--out", out],
    "learned": lambda a, b, out: ["learned", a, b, "--out", out],
    "lineage": lambda a, b, out: ["lineage", a, b, "--out", out, *NONCE],
    "fingerprint": lambda a, b, out: ["fingerprint", a, "--out", out.with_suffix(".wsf")],
    "draft": lambda a, b, out: ["draft", a],
}
IN_ALL = ("sources", "audit --all", "same")  # in `make check`; the others in the census
SLOW = ("same", "compare", "learned", "lineage")  # counted over half as many layers
ATTENTION = ("circuits", "positions", "neighbours", "fingerprint")  # read no other tensor
LEFT_OUT = {  # refused for a broken value; not read; or the same pass over tensors as of more layers
    "equal_layers": ("learned",),
    "broken_layers": (*ATTENTION, *SLOW),
    "heads": SLOW,
    "found_heads": ("learned",),
    "equal_rows": ("circuits", "positions", "fingerprint", "learned"),
    "experts": (*ATTENTION, "learned", "lineage"),
    "tensors": (*ATTENTION, "learned", "lineage"),
    "width": ("compare", "learned", "lineage"),
}
CONSTANT = {
    "families": "lists rows and reads no checkpoint",
    "completion": "prints a script",
    "adopt": "proves rows on tiny models, whose sizes are fixed; then each layer runs once, by itself",
    "verify": "runs what `lineage` runs",
    "card": "runs what `audit --all`, `id`, `same` and `lineage` run",
}


def texts(n: int, folder: Path) -> Path:
    """16 n paragraphs."""
    drawn = np.random.default_rng(0).integers(0, 96, (16 * n, 40))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text("\n\n".join(" ".join(f"w{i}" for i in line) for line in drawn))
    return folder / "corpus.txt"


def with_words(folder: Path, words: int) -> Path:
    """Write a tokenizer of words w0, w1 and so on."""
    import tokenizers

    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return folder


def written(folder: Path, sizes: Sizes, weights: Weights, seed: int | None = None) -> Path:
    """A checkpoint in a folder, its weights moved by random ones where a seed is given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(sizes.config | {"bos_token_id": 0}))
    if seed is not None:
        moves = weights_of(sizes, seed)
        weights = {name: w + np.float32(0.3) * moves[name] if name in moves else w for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def many(n: int, folder: Path) -> list[Path]:
    """n relatives of one small checkpoint."""
    sizes = replace(BASE, layers=1, inner=0)
    weights = weights_of(sizes)
    paths = [written(folder / f"c{k}", sizes, weights, seed=k + 1) for k in range(n)]
    (folder / "list.txt").write_text("".join(f"{path}\n" for path in paths))
    return paths


def of_list(*command: object) -> Callable[[int, Path], list[Any]]:
    return lambda n, folder: [command[0], many(n, folder)[0].parent / "list.txt", *command[1:], folder / "out"]


def of_many(command: str) -> Callable[[int, Path], list[Any]]:
    more = NONCE if command == "lineage" else ()
    return lambda n, folder: [command, *many(n + 1, folder), "--out", folder / "out", *more]


def detok(checkpoint: Checkpoint, folder: Path) -> list[Any]:
    source = with_words(written(folder / "a", *checkpoint), checkpoint[0].vocabulary)
    counts = folder / "counts.npz"
    assert run("bigrams", texts(2, folder), "--tokenizer", source, "--out", counts).exit_code == 0
    return ["detok", source, "--counts", counts, "--out", folder / "out"]


def study(name: str) -> Callable[[int, Path], list[Any]]:
    def of_layers(n: int, folder: Path) -> list[Any]:
        source = with_words(written(folder / "a", *layers(n)), BASE.vocabulary)
        return studies(source, texts(2, folder), folder / "out")[name]

    return of_layers


def bigrams(n: int, folder: Path) -> list[Any]:
    return ["bigrams", texts(n, folder), "--tokenizer", with_words(folder, 96), "--out", folder / "counts.npz"]


def pickled(n: int, folder: Path) -> list[Any]:
    torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
    folder.mkdir(parents=True)
    torch.save({name: torch.from_numpy(w) for name, w in tensors(n)[1].items()}, folder / "model.bin")
    return ["convert", folder / "model.bin", "--out", folder / "out"]


def growing(command: str, grow: Callable[[int], Checkpoint]) -> Callable[[int, Path], list[Any]]:
    def arguments(n: int, folder: Path) -> list[Any]:
        sizes, weights = grow(n)
        a, b = written(folder / "a", sizes, weights), written(folder / "b", sizes, weights, seed=1)
        return COMMANDS[command](a, b, folder / "out")

    return arguments


class Case(NamedTuple):
    """A command, what grows, and the arguments at a size n."""

    command: str
    grows: str
    arguments: Callable[[int, Path], list[Any]]
    first: int = 2


CASES = [
    *(
        Case(command, grow.__name__, growing(command, grow), 2 if grow in DEEP and command in SLOW else first)
        for grow, first in GROWING.items()
        for command in COMMANDS
        if command not in LEFT_OUT.get(grow.__name__, ())
    ),
    Case("audit", "sources", of_list("audit", "--out")),
    Case("fingerprint", "sources", of_list("fingerprint", "--out")),
    Case("reference", "sources", of_list("reference", "--out")),
    Case("atlas", "sources", of_list("atlas", "--out")),
    *(Case(command, "sources", of_many(command)) for command in ("compare", "learned", "lineage")),
    Case("detok", "rows", lambda n, folder: detok(rows(n), folder)),
    Case("detok", "heads", lambda n, folder: detok(heads(n), folder), 4),
    *(Case(name, "layers", study(name)) for name in ("norms", "outliers", "sinks")),
    Case("bigrams", "texts", bigrams, 4),
    Case("convert", "tensors", pickled, 4),
]


class Faster(NamedTuple):
    """Functions that may do more, by what they are named."""

    command: str  # the patterns match whole
    grows: str
    function: str  # anywhere in file:name
    exponent: float
    why: str


FASTER = (
    Faster(
        "audit --all", "(equal_)?rows", "LogitBounds.of_tokens", 2, "all pairs of tokens in layer 0, up to ALL_PAIRS"
    ),
    Faster("circuits", "(equal_)?layers|(found_)?heads", "^heads/circuits/", 2, "pairs of heads"),
    Faster("compare", "(equal_)?layers|found_heads", "passes.py:pair_scores", 2, "pairs of heads"),
    Faster("learned", "sources", "printable|table.html|as_json", 2, "pairs of tunes that may collide"),
    Faster("same", "width", "basis_by_tokens", 3, "a basis of the stream: a decomposition of a square of its width"),
    Faster("same", "width", "^pairs/deeds/", 2.65, "groups of 16 to 256: more fit a longer row"),
)


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No figures, and blocks of one size on any machine."""
    monkeypatch.setattr(cores, "_share", 1)
    monkeypatch.setattr(matching, "EXAMINED", 16)  # more than small checkpoints have pairs
    with undrawn():
        yield


WARM: set[str] = set()


def counts_of(case: Case, n: int, folder: Path) -> dict[str, Count]:
    """What every function of a command does; its first run imports, so it is not counted."""
    arguments = case.arguments(n, folder)
    probes.signs.cache_clear()  # which depend on sizes
    with counted_work() as work:
        result = run(*arguments)
    assert result.exit_code in (0, 1, 3), (result.output, result.exception)
    return work.counts


def exponents(counts: list[dict[str, Count]]) -> dict[str, float]:
    """How the work of each function grows that will have a share of it."""
    powers: dict[str, float] = {}
    for kind in range(2):
        total = sum(count[kind] for count in counts[-1].values())
        for name in counts[-1]:
            of_sizes = [each.get(name, Count(0, 0))[kind] for each in counts]
            more, power = of_sizes[2] - of_sizes[1], exponent(*of_sizes)
            if of_sizes[0] and more > FEWEST and power < STEP and more / total * FURTHER ** (power - 1) > SHARE:
                powers[name] = max(powers.get(name, 0.0), power)
    return powers


@pytest.mark.parametrize("case", [
    case if case.grows in IN_ALL or case.command in IN_ALL else pytest.param(case, marks=pytest.mark.census)
    for case in CASES
], ids=lambda case: f"{case.command}-{case.grows}")  # fmt: skip
def test_work_grows_in_proportion(case: Case, tmp_path: Path) -> None:
    if case.command not in WARM:
        counts_of(case, 2, tmp_path / "warm")
        WARM.add(case.command)
    powers = exponents([counts_of(case, n * case.first, tmp_path / str(n)) for n in (1, 2, 4)])
    for row in FASTER:
        if search(f"^({row.command})$", case.command) and search(f"^({row.grows})$", case.grows):
            listed = [name for name in powers if search(row.function, name)]
            most = max((powers[name] for name in listed), default=0.0)
            assert LISTED < most < row.exponent + 0.15, f"{row} is {most:.2f}"
            powers = {name: power for name, power in powers.items() if name not in listed}
    assert not {name: round(power, 2) for name, power in powers.items() if power >= PROPORTIONAL}


def test_every_command_is_measured_or_does_not_grow() -> None:
    assert {case.command.split()[0] for case in CASES} | set(CONSTANT) == set(main.list_commands(None))
    assert {case.grows for case in CASES} >= {grow.__name__ for grow in GROWING}
