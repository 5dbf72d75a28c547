"""Freeze what every command writes, and compare two such folders: `python -m tests.frozen OUT`, `--compare A B`.

Every command of weightscope runs in this process over a GPT-2 of two layers and the fixtures of tests/model/rows.
OUT then holds two folders: `data` has each CSV, NPZ and JSON file, the numbers of the public Python names and each exit
status; `wording` has what was printed. Times, paths and versions are replaced, pages and pictures are left out.

`--compare` wants arrays and numbers equal to the last bit. Sentences may be rewritten, so the fields of WORDING and all
printed text are listed apart, those in which a number changed before the rest. The exit status is 1 if data differ.

Only the command line and public names are used: modules can be moved between two runs.
"""

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))  # before NumPy
os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", COLUMNS="120", TERM="dumb")

import argparse
import csv
import difflib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.two_layers import FOLDER

REPOSITORY = Path(__file__).parents[1]
FIXTURES = REPOSITORY / "tests" / "model" / "rows" / "fixtures"
TOWERS = {
    "t5_encoder": "encoder", "t5_decoder": "decoder", "clip_text": "text", "clip_vision": "vision",
    "siglip_text": "text", "siglip_vision": "vision",
}  # fmt: skip
# These cover the mechanisms: every command that reads weights runs over these.
MECHANISMS = (
    "gpt2", "llama", "gemma2", "gemma3", "deepseek_v3", "bert", "t5_decoder", "gpt_oss", "diffllama", "swin", "mpt",
    "qwen3_next", "falcon_one_norm", "clip_text", "deberta_v2", "stablelm_qk_norm", "codegen", "albert",
)  # fmt: skip
WORDS = 24  # the vocabulary of every fixture

# Fields that hold sentences, labels of figures, or names of internal objects.
WORDING = {
    "text", "title", "look_next", "lead", "notes", "caveats", "coverage", "note", "detail", "error", "problem",
    "panel", "series", "x name", "y name", "special", "about", "repr",
}  # fmt: skip
LEFT_OUT = {"versions", "drawn_with"}  # keys of JSON files
BAR = re.compile(r"\d+%\||\d+(it|run|sequence|head)s?/s")
NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
SPEED = re.compile(r"[\d.]+ [kMG]?B/s|.*\bto go\n")  # of this machine at that hour
TIME = re.compile(r"\b\d+(?:\.\d+)? ?(?:ms|s|seconds?|minutes?)\b|\b\d{4}-\d\d-\d\d(?:[T ][\d:.]+Z?)?")


def main() -> None:
    parser = argparse.ArgumentParser("tests.frozen", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="OUT", help="folder to write; with --compare two of them"
    )
    parser.add_argument("--compare", action="store_true", help="list every difference between two folders")
    parser.add_argument("--only", default="", help="run only cases whose name matches this regular expression")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="folder of the fixtures")
    arguments = parser.parse_args()
    if arguments.compare:
        sys.exit(compare(*arguments.folders))
    freeze(arguments.folders[0].absolute(), arguments.fixtures.absolute(), re.compile(arguments.only))


# ---------------------------------------------------------------------------------------------------------------- run


def freeze(out: Path, fixtures: Path, chosen: re.Pattern[str]) -> None:
    """Run all cases and store what they write under `out`, which is made anew."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if out.exists() and not (out / "wording").is_dir():
        sys.exit(f"{out} is not a folder of frozen outputs")
    shutil.rmtree(out, ignore_errors=True)
    statuses: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        os.environ.update(
            HOME=str(work / "home"), XDG_CONFIG_HOME=str(work / "home"), XDG_CACHE_HOME=str(work / "home")
        )
        os.chdir(work)
        names = write_sources(work, fixtures)
        took: list[tuple[float, str]] = []
        with (
            patch.object(Figure, "savefig", save_nothing),
            patch.object(ConstrainedLayoutEngine, "execute", lambda engine, figure: None),
            patch.object(os, "fsync", lambda descriptor: None),
        ):
            for name, arguments in cases(names):
                if chosen.search(name):
                    start = time.process_time()
                    statuses[name] = run(name, arguments, out, work)
                    took.append((time.process_time() - start, name))
            if chosen.search("api"):
                for name in names:
                    statuses |= python_names(name, out, work)
        os.chdir(REPOSITORY)
    write_json(out / "data" / "status.json", statuses)
    slowest = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in sorted(took, reverse=True)[:6])
    print(f"{len(statuses)} cases, {time.process_time():.0f} s of processor time (most: {slowest})")


def save_nothing(figure: Any, file: Any, *arguments: Any, format: str = "png", **options: Any) -> None:
    """Stand in for Figure.savefig: figures are put together and not drawn."""
    if hasattr(file, "write"):
        file.write(b"<svg/>" if format == "svg" else b"")


def write_sources(work: Path, fixtures: Path) -> list[str]:
    """Copy the fixtures, some with a tokenizer, changed or broken; write a corpus and lists; return their names."""
    import tokenizers

    shutil.copytree(fixtures, work / "fixtures")
    shutil.copytree(FOLDER, work / "two-layers")
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rng = np.random.default_rng(0)

    def copy(fixture: str, name: str, change: Callable[[dict[str, np.ndarray]], Any] | None = None) -> None:
        folder = work / name
        folder.mkdir()
        shutil.copy(fixtures / fixture / "config.json", folder)
        weights = load_file(fixtures / fixture / "model.safetensors")
        if change:
            change(weights)
        save_file(weights, folder / "model.safetensors")
        tokenizer.save(str(folder / "tokenizer.json"))

    def move(weights: dict[str, np.ndarray]) -> None:
        for name, values in weights.items():
            if values.dtype.kind == "f":
                weights[name] = (values + 0.01 * rng.standard_normal(values.shape)).astype(values.dtype)

    def break_some(weights: dict[str, np.ndarray]) -> None:
        matrices = [name for name, values in weights.items() if values.ndim == 2]
        for number, name in enumerate(matrices):
            values = weights[name] = weights[name].copy()
            match number % 5:
                case 0:
                    values[0, 0] = np.nan
                case 1:
                    values[1] = 0
                case 2:
                    values *= 1e30
                case 3:
                    values[:, 2] = 50
                case 4:
                    values[2] = np.inf

    for name in MECHANISMS:
        copy(name, name)
        copy(name, f"{name}-moved", move)
    for name in ("gpt2", "llama", "bert", "gemma3"):
        copy(name, f"{name}-broken", break_some)
    text = [" ".join(f"w{index}" for index in line) for line in rng.integers(0, WORDS, (30, 40))]
    (work / "corpus.txt").write_text("\n\n".join(text))
    (work / "sources.txt").write_text("gpt2\nllama\nbert-broken\nnowhere\n")
    (work / "reference.txt").write_text("two-layers\ngpt2\nllama\n")
    for path in work.rglob("*"):
        os.utime(path, (1e9, 1e9))  # manifests keep when a source was changed
    return sorted(path.name for path in (work / "fixtures").iterdir() if path.is_dir())


def cases(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each case and its arguments; `OUT` is replaced by a folder of its own."""

    def case(name: str, line: str, *options: str) -> tuple[str, list[str]]:
        return name, [*line.split(), *options]

    yield case("families", "families --csv OUT/families.csv")
    yield case("completion", "completion bash")
    yield case("bigrams", "bigrams corpus.txt --tokenizer gpt2 --out OUT/counts.npz")
    yield case("bigrams-kept", "bigrams corpus.txt --tokenizer gpt2 --out counts.npz")  # for detok and circuits
    yield from two_layer_cases(case)
    for name in names:
        tower = ["--tower", TOWERS[name]] if name in TOWERS else []
        yield case(f"inspect/{name}", f"inspect fixtures/{name}", *tower)
        yield case(f"audit/{name}", f"audit fixtures/{name} --json --out OUT", *tower)
    for name in MECHANISMS:
        tower = ["--tower", TOWERS[name]] if name in TOWERS else []
        yield case(f"audit-all/{name}", f"audit {name} --all --directions 2 --deltas 0,1,3 --out OUT", *tower)
        yield case(f"inspect-check/{name}", f"inspect {name} --check", *tower)
        yield case(f"circuits/{name}", f"circuits {name} --counts counts.npz --out OUT", *tower)
        yield case(f"compare/{name}", f"compare {name} {name}-moved --all --out OUT", *tower)
        yield case(f"detok/{name}", f"detok {name} --counts counts.npz --token w5 --out OUT", *tower)
        yield case(f"detok-sample/{name}", f"detok {name} --counts counts.npz --sample 9 --layer 1 --out OUT", *tower)
        yield case(f"neighbours/{name}", f"neighbours {name} w5 --top 3 --csv OUT/neighbours.csv", *tower)
        yield case(f"positions/{name}", f"positions {name} --out OUT", *tower)
        yield case(f"positions-unscaled/{name}", f"positions {name} --unscaled --head 1 --out OUT", *tower)
    for name in ("gpt2", "llama", "bert", "gemma3"):
        yield case(f"audit-broken/{name}", f"audit {name}-broken --all --fail-on error --out OUT")
        yield case(f"compare-broken/{name}", f"compare {name} {name}-broken --json --max-change 0.1 --out OUT")
        yield case(f"circuits-broken/{name}", f"circuits {name}-broken --out OUT")
        yield case(f"inspect-broken/{name}", f"inspect {name}-broken --check")
    yield case("audit-list", "audit sources.txt --out OUT")
    yield case("audit-list-json", "audit sources.txt --json --fail-on warning --out OUT")
    yield case("audit-stacks", "audit fixtures/clip_text --tower all --out OUT")
    yield case("compare-run", "compare gpt2 gpt2-moved gpt2-broken --json --out OUT")
    yield case("compare-families", "compare llama gemma2 --across-families --out OUT")
    yield case("reference", "reference reference.txt --out OUT/reference.npz")
    yield case("reference-kept", "reference reference.txt --out reference.npz")
    yield case("audit-reference", "audit llama --reference reference.npz --out OUT")
    yield case("audit-layers", "audit llama --layers 1 --window 5 --jobs 2 --out OUT")
    yield case("refused/nowhere", "audit nowhere --out OUT")
    yield case("refused/tower", "audit gpt2 --tower vision --out OUT")
    yield case("refused/family", "inspect gpt2 --family nothing")
    yield case("refused/as-another-family", "inspect gpt2 --family llama")
    yield case("refused/token", "neighbours two-layers zzzzzz")
    yield case("refused/layer", "detok two-layers --layer 7 --out OUT")
    yield case("refused/kind", "audit gpt2 --fail-on nothing --out OUT")
    yield case("refused/option", "audit gpt2 --sequences 3 --out OUT")
    yield case("refused/shapes", "compare gpt2 llama --out OUT")


def two_layer_cases(case: Callable[..., tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Every command over a GPT-2 of two layers, the studies that run the model too."""
    yield case("two-layers/inspect", "inspect two-layers")
    yield case("two-layers/inspect-check", "inspect two-layers --check")
    yield case("two-layers/audit", "audit two-layers --out OUT")
    yield case("two-layers/audit-all", "audit two-layers --all --directions 3 --out OUT")
    yield case("two-layers/audit-json", "audit two-layers --json --fail-on note --out OUT")
    yield case("two-layers/compare", "compare two-layers two-layers --all --out OUT")
    yield case("two-layers/circuits", "circuits two-layers --out OUT")
    yield case("two-layers/neighbours", "neighbours two-layers --token-id 262 --top 5 --csv OUT/neighbours.csv")
    yield case("two-layers/neighbours-layer", "neighbours two-layers --token-id 11 --layer 1 --csv OUT/neighbours.csv")
    yield case("two-layers/detok", "detok two-layers --out OUT --sample 200")
    yield case("two-layers/positions", "positions two-layers --out OUT")
    yield case("two-layers/positions-text", "positions two-layers --on-text --out OUT")
    yield case("two-layers/circuits-measure", "circuits two-layers --measure --out OUT")
    yield case("two-layers/norms", "norms two-layers --inputs 8 --out OUT")
    yield case("two-layers/outliers", "outliers two-layers --inputs 8 --sample 4 --out OUT")
    study = "sinks two-layers --length 64 --out OUT"
    yield case("two-layers/sinks-bias", f"{study} --question bias --inputs 2 --evaluated 1")
    yield case("two-layers/sinks-kind", f"{study} --question kind --inputs 4")


def run(name: str, arguments: list[str], out: Path, work: Path) -> str:
    """Run one command, store its files and its output, and return its exit status."""
    from click.testing import CliRunner

    from weightscope.cli import main as weightscope

    results = work / "results"
    shutil.rmtree(results, ignore_errors=True)
    if "OUT" not in arguments:
        results.mkdir()
    outcome = CliRunner().invoke(weightscope, [part.replace("OUT", "results") for part in arguments])
    data, wording = out / "data" / name, out / "wording" / name
    wording.mkdir(parents=True, exist_ok=True)
    tidy = tidier(work)
    printed = outcome.stdout
    if ("--json" in arguments and outcome.exit_code in (0, 3)) or printed.startswith(("{", "[{")):
        write_json(data / "stdout.json", plain(json.loads(printed), tidy))
        printed = ""
    (wording / "stdout.txt").write_text(tidy(printed))
    (wording / "stderr.txt").write_text(tidy(without_bars(outcome.stderr)))
    for file in sorted(path for path in results.rglob("*") if path.is_file()) if results.is_dir() else ():
        store(file, data / file.relative_to(results), tidy)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        return f"{outcome.exit_code} {type(outcome.exception).__name__}"
    return str(outcome.exit_code)


def store(file: Path, target: Path, tidy: Callable[[str], str]) -> None:
    """Keep a file of results, without what differs from run to run."""
    if file.suffix not in (".csv", ".npz", ".json"):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        target.write_text(tidy(file.read_text()))
    elif file.suffix == ".npz":
        with np.load(file) as arrays:
            kept = {key: tidy_array(arrays[key], tidy) for key in arrays}
        np.savez_compressed(target, **kept)  # type: ignore[arg-type]
    else:
        value = json.loads(file.read_text())
        if file.name == "manifest.json":
            value["files"] = sorted(value["files"])
        write_json(target, plain(value, tidy))


def tidy_array(array: np.ndarray, tidy: Callable[[str], str]) -> np.ndarray:
    if array.dtype.kind != "U":
        return array
    return np.array([tidy(text) for text in array.ravel().tolist()], dtype=str).reshape(array.shape)


def tidier(work: Path) -> Callable[[str], str]:
    """A function that replaces paths, times and the version in a text."""
    from weightscope import __version__

    def tidy(text: str) -> str:
        for path, name in ((work, "WORK"), (REPOSITORY, "REPOSITORY"), (Path(sys.prefix), "PREFIX")):
            text = text.replace(str(path), name)
        return TIME.sub("TIME", text.replace(__version__, "VERSION"))

    return tidy


def plain(value: Any, tidy: Callable[[str], str]) -> Any:
    """A JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: plain(item, tidy) for key, item in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [plain(item, tidy) for item in value]
    return tidy(value) if isinstance(value, str) else value


def without_bars(text: str) -> str:
    segments = re.split(r"[\r\n]", re.sub("\x1b\\[[A-Z]", "", text))
    lines = (segment for segment in segments if segment.strip() and not BAR.search(segment))
    return "".join(f"{line}\n" for line in lines)


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def python_names(name: str, out: Path, work: Path) -> dict[str, str]:
    """What the public Python names say of every stack of a fixture: sizes, scores, values, outputs."""
    import weightscope as ws

    statuses = {}
    stacks = list(ws.open_model(f"fixtures/{name}", tower=TOWERS.get(name)).stacks)
    for stack in stacks:
        case = f"api/{name}/{stack or 'only'}"
        facts: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        try:
            describe(ws.open_model(f"fixtures/{name}", tower=stack or None), facts, arrays)
            statuses[case] = "ok"
        except ws.CheckpointError as error:
            statuses[case], facts["problem"] = "refused", str(error)
        write_json(out / "data" / case / "facts.json", plain(facts, tidier(work)))
        np.savez_compressed(out / "data" / case / "arrays.npz", **arrays)  # type: ignore[arg-type]
    return statuses


def describe(model: Any, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Fill in what a stack's public names say; one array a key."""
    sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim")
    facts |= {"family": model.family.name, **{key: getattr(model.config, key) for key in sizes}}
    facts["repr"] = repr(model.config.norm)
    rng = np.random.default_rng(0)
    for layer in model.layers:
        head = layer.heads[-1]
        key = f"layer{layer.index}"
        facts[key] = {"scale": head.scale, "kv_head": head.kv_head, "caveats": list(head.caveats)}
        for part in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "qk_bias", "vo_bias"):
            keep(arrays, facts, f"{key}.{part}", getattr, head, part)
        for part in ("output_bias", "sinks"):
            keep(arrays, facts, f"{key}.{part}", getattr, layer, part)
        x, memory = (rng.standard_normal((9, model.config.d_model)).astype(np.float32) for _ in range(2))
        keep(arrays, facts, f"{key}.scores", layer.scores, x)
        keep(arrays, facts, f"{key}.scores_memory", partial(layer.scores, memory=memory), x)
        keep(arrays, facts, f"{key}.values", layer.values, x)
        keep(arrays, facts, f"{key}.output", layer.output, np.full((model.config.n_heads, 9, 9), 1 / 9, np.float32), x)
    for part in ("tokens", "positions"):
        keep(arrays, facts, part, getattr, model.embeddings, part)


def keep(
    arrays: dict[str, np.ndarray], facts: dict[str, Any], key: str, compute: Callable[..., Any], *arguments: Any
) -> None:
    """Keep an array, or the kind of error that there is in its place."""
    try:
        value = compute(*arguments)
    except Exception as error:  # whatever it is, it has to stay the same
        facts[f"{key} raises"], facts.setdefault("problem", {})[key] = type(error).__name__, str(error)
        return
    if value is None:
        facts[f"{key} is"] = None
    else:
        arrays[key] = np.asarray(value)


# ------------------------------------------------------------------------------------------------------------ compare


Difference = tuple[str, str, str]  # section, file, what differs
DATA, NUMBERS, SENTENCES = "DATA", "NUMBERS IN WORDING", "WORDING"


def compare(a: Path, b: Path) -> int:
    """Print every difference between two folders, and return 1 if data differ."""
    sections: dict[str, list[tuple[str, str]]] = {DATA: [], NUMBERS: [], SENTENCES: []}
    for section, file, what in differences(a, b):
        sections[section].append((file, what))
    for section, lines in sections.items():
        print(f"{section}: {len(lines)} differences in {len({file for file, _ in lines})} files")
        for file, what in lines:
            print(f"  {file}: {what}")
    return 1 if sections[DATA] else 0


def differences(a: Path, b: Path) -> Iterator[Difference]:
    files = sorted({path.relative_to(folder) for folder in (a, b) for path in folder.rglob("*") if path.is_file()})
    for file in files:
        name = str(file)
        if not (a / file).exists() or not (b / file).exists():
            section = DATA if file.parts[0] == "data" else SENTENCES
            yield section, name, f"only in {a if (a / file).exists() else b}"
        elif file.parts[0] == "wording":
            yield from in_printed(name, *(SPEED.sub("", (folder / file).read_text()) for folder in (a, b)))
        elif file.suffix == ".npz":
            yield from in_arrays(name, a / file, b / file)
        elif file.suffix == ".csv":
            yield from in_csv(name, (a / file).read_text(), (b / file).read_text())
        else:
            first, second = (json.loads((folder / file).read_text()) for folder in (a, b))
            yield from in_json(name, "", first, second)


def in_sentence(file: str, where: str, a: str, b: str) -> Iterator[Difference]:
    if a != b:
        section = SENTENCES if NUMBER.findall(a) == NUMBER.findall(b) else NUMBERS
        yield section, file, f"{where}: {a!r} -> {b!r}"


def in_printed(file: str, a: str, b: str) -> Iterator[Difference]:
    """Changed lines of printed text; a line is paired with the one that replaces it."""
    first, second = a.splitlines(), b.splitlines()
    changes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    for tag, start, end, start_b, end_b in changes:
        if tag != "equal":
            before, after = "\n".join(first[start:end]), "\n".join(second[start_b:end_b])
            yield from in_sentence(file, f"line {start + 1}", before, after)


def in_json(file: str, where: str, a: Any, b: Any, wording: bool = False) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key not in a or key not in b:
                yield SENTENCES if wording else DATA, file, f"{where}.{key}: only in {'B' if key in b else 'A'}"
            else:
                yield from in_json(file, f"{where}.{key}", a[key], b[key], wording or key in WORDING)
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield SENTENCES if wording else DATA, file, f"{where}: {len(a)} -> {len(b)} items"
        for index, (first, second) in enumerate(zip(a, b, strict=False)):
            yield from in_json(file, f"{where}[{index}]", first, second, wording)
    elif type(a) is not type(b) or a != b:
        if wording and isinstance(a, str) and isinstance(b, str):
            yield from in_sentence(file, where, a, b)
        else:
            yield DATA, file, f"{where}: {a!r} -> {b!r}"


def in_csv(file: str, a: str, b: str) -> Iterator[Difference]:
    first, second = (list(csv.reader(text.splitlines(keepends=True))) for text in (a, b))
    header = first[0] if first else []
    if header != (second[0] if second else []):
        yield DATA, file, f"columns: {header} -> {second[0] if second else []}"
        return
    if len(first) != len(second):
        yield DATA, file, f"rows: {len(first) - 1} -> {len(second) - 1}"
    if file.endswith("families.csv") and first != second:  # one row an architecture: by name, wherever it is listed
        families = [[(row[0], row[2]) for row in rows[1:]] for rows in (first, second)]
        if families[0] != families[1]:
            gone, new = (sorted(set(families[i]) - set(families[1 - i])) for i in (0, 1))
            yield DATA, file, f"order of rows, or families: only in A {gone}, only in B {new}"
            shared = set(families[0]) & set(families[1])
            first, second = (
                [header, *sorted(row for row in rows[1:] if (row[0], row[2]) in shared)] for rows in (first, second)
            )
    for number, (row, other_row) in enumerate(zip(first[1:], second[1:], strict=False)):
        for column, cell, other_cell in zip(header, row, other_row, strict=True):
            if column in WORDING:
                yield from in_sentence(file, f"row {number} {column}", cell, other_cell)
            elif cell != other_cell:
                yield DATA, file, f"row {number} {column}: {cell} -> {other_cell}"


def in_arrays(file: str, a: Path, b: Path) -> Iterator[Difference]:
    with np.load(a) as first, np.load(b) as second:
        for key in sorted({*first, *second}):
            if key not in first or key not in second:
                yield DATA, file, f"{key}: only in {'B' if key in second else 'A'}"
                continue
            x, y = first[key], second[key]
            if x.dtype.kind == y.dtype.kind == "U" and x.shape == y.shape:
                changed = np.flatnonzero((x != y).ravel())
                for index in changed[:5]:
                    yield DATA, file, f"{key}[{index}]: {x.flat[index]!r} -> {y.flat[index]!r} ({len(changed)} in all)"
            elif x.dtype != y.dtype or x.shape != y.shape:
                yield DATA, file, f"{key}: {x.dtype}{x.shape} -> {y.dtype}{y.shape}"
            elif x.tobytes() != y.tobytes():
                yield DATA, file, f"{key}: {how_far(x, y)}"


def how_far(x: np.ndarray, y: np.ndarray) -> str:
    """The share of values that differ, and the largest difference as a share of the largest value."""
    changed = np.count_nonzero(~((x == y) | ((x != x) & (y != y))))
    if not changed or x.dtype.kind not in "fiu":
        return f"{changed} of {x.size} values differ, or signs of zeros and payloads of NaN"
    with np.errstate(all="ignore"):
        size = np.nanmax(np.abs(x.astype(np.float64))) or 1.0
        gap = np.nanmax(np.abs(x.astype(np.float64) - y.astype(np.float64))) / size
    return f"{changed} of {x.size} values differ, by up to {gap:.2g} of the largest"


if __name__ == "__main__":
    main()
