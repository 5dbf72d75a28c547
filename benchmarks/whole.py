"""What people run on whole models, copies, cold files and next to other tools, which takes half an hour.

    python -m benchmarks.whole --gpt2 FOLDER --ggml xllamacpp.abi3.so --peer-python VENV/bin/python

FOLDER has GPT-2's attention; the shared library has ggml's quantiser; VENV has transformer-lens 4.3.0, weightwatcher
0.7.7 and gguf. Without them, the rows that need them are left out. `--only` runs the rows whose group and name contain
its words, and keeps the others of an earlier run of the same commit. Every row's ratio is to a floor measured in turn
with it. Writes whole.json; `python -m benchmarks.publish out/bench/whole.json` keeps it.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

import weightscope as ws
from benchmarks import auroc, checkpoints, engines, ggml, matrices, peers, same
from benchmarks.audit import FLOORS, costs
from benchmarks.commands import Cost, command_cost, forget, inner_cost, plain_read, python_cost, timed
from benchmarks.results import Bench, Measured, before_row, duration, load, table, this_machine
from benchmarks.streamed import served
from benchmarks.synthetic import LARGEST, SEVEN, SEVENTY, Sizes, write
from weightscope.core.errors import CheckpointError

ATTENTION = replace(SEVEN, inner=0)  # and the embeddings
MOVED = 0.05  # of the norm of the weights: what a model was trained further by
GRAM = next(iter(FLOORS))
READ, COLD = "reading the files", "reading the files from the disk"
PYTHON = "starting Python and importing NumPy"
PEOPLE, SAME, COLDLY, TOOLS, PARTS = "task", "original and copy", "from the disk", "other tools", "part"
ENGINES = "a list of four checkpoints"
SPARE = 2.0  # GB left on the disk
VERSION = "import importlib.metadata as m; print(m.version('{}'))"
DENSE_HEADS = 8  # whose dense maps are decomposed


class Task(NamedTuple):
    """A row: its work and its floor in turn, so many rounds; `ready` makes what both read."""

    group: str
    name: str
    work: Callable[[], Cost]
    floor: Callable[[], Cost] | None = None
    to: str = ""
    rounds: int = 1
    ready: Callable[[], object] = str
    note: Callable[[], str] = str
    rates: Callable[[], str] = str

    def measured(self) -> list[Measured]:
        """The row."""
        self.ready()
        began, runs, floors = before_row(), list[Cost](), list[Cost]()
        for _ in range(self.rounds):
            floors += [self.floor()] if self.floor else []
            runs.append(self.work())
        return [Measured.of(self.name, runs, floors, self.to, self.note(), group=self.group,
                            rates=self.rates(), **began)]  # fmt: skip


class Rows(NamedTuple):
    """Rows that are measured together."""

    group: str
    name: str
    measure: Callable[[], list[Measured]]
    ready: Callable[[], object] = str

    def measured(self) -> list[Measured]:
        """The rows."""
        self.ready()
        return [replace(each, group=self.group) for each in self.measure()]


@dataclass(frozen=True)
class Given:
    """What the rows are measured with."""

    out: Path
    gpt2: Path | None = None
    ggml: Path | None = None
    peer: str = ""
    tiny: bool = False  # a thousandth of the sizes, to try the rows
    rounds: int = 3
    top: Path = field(default_factory=Path)  # emptied after each set of rows

    def sizes(self, sizes: Sizes) -> Sizes:
        """The sizes of a model, or of a tiny one."""
        small = {"layers": 2, "width": 256, "heads": 4, "head_dim": 64, "kv_heads": 4, "inner": 512 * bool(sizes.inner)}
        return replace(sizes, vocabulary=min(sizes.vocabulary, 300), **small) if self.tiny else sizes

    def model(self, name: str, sizes: Sizes, **more: float) -> Callable[[], Path]:
        """The folder of a model, written at the first call."""
        sizes = self.sizes(sizes)

        @cache
        def made() -> Path:
            free, needed = shutil.disk_usage(self.top).free / 1e9, engines.gigabytes(sizes)
            if free < needed + SPARE:
                raise CheckpointError(f"{needed:.0f} GB are needed on the disk, and {free:.0f} are free")
            return write(self.top / name, sizes, spectra=True, **more)  # type: ignore[arg-type]

        return made

    def run(self, command: str, *sources: Callable[[], object]) -> Callable[[], Cost]:
        """The cost of a command on models."""

        def work() -> Cost:
            out = self.top / ("out.wsf" if command == "fingerprint" else "out")
            written = [] if command.startswith(("inspect", "same")) else ["--out", out]
            try:
                return command_cost(*command.split(), *(str(source()) for source in sources), *written)
            finally:
                shutil.rmtree(out, ignore_errors=True)

        return work


def gram(model: Callable[[], object]) -> Callable[[], Cost]:
    """The floor of an audit."""
    return lambda: costs(str(model()), 1, [GRAM])[GRAM][0]


def starts(given: Given) -> Iterator[Task]:
    """Commands that take less than two seconds."""
    rounds = 2 if given.tiny else 7
    for name, arguments in (
        ("`--help`", ("-m", "weightscope", "--help")),
        ("`import weightscope`", ("-c", "import weightscope")),
        ("`inspect embedded`", ("-m", "weightscope", "inspect", "embedded")),
        ("`neighbours embedded ibility`", ("-m", "weightscope", "neighbours", "embedded", "ibility")),
    ):
        yield Task(PEOPLE, name, lambda given=arguments: python_cost(*given), lambda: python_cost("-c", "import numpy"),
                   PYTHON, rounds)  # fmt: skip


def audits(given: Given) -> Iterator[Task]:
    """Audits of attention."""
    if given.gpt2 is not None:
        gpt2 = given.gpt2.__fspath__
        yield Task(PEOPLE, "`audit` of GPT-2's attention, with figures and page", given.run("audit", gpt2), gram(gpt2),
                   GRAM, given.rounds)  # fmt: skip
    seven = given.model("seven", ATTENTION)
    for command in ("audit", "audit --directions 0", "audit --directions 2", "fingerprint"):
        yield Task(PEOPLE, f"`{command}` of a 7B's attention, 32,000 tokens", given.run(command, seven), gram(seven),
                   GRAM, ready=seven)  # fmt: skip


def audits_of_shapes(given: Given) -> Iterator[Task]:
    """Audits of other shapes."""
    for name, sizes in (
        ("a 7B's attention, 64 tokens", replace(ATTENTION, vocabulary=64)),
        ("1,000 layers of 4 heads", Sizes(layers=1000, inner=64)),
        ("2 layers of a 405B's attention", replace(LARGEST, layers=2, vocabulary=64, inner=0)),
    ):
        model = given.model(name[:5].strip(), sizes)
        yield Task(PEOPLE, f"`audit` of {name}", given.run("audit", model), gram(model), GRAM, ready=model)
    for layers in (8, 80):
        sizes = given.sizes(replace(SEVENTY, layers=layers))

        def streamed(of: Callable[[Callable[[], object]], Callable[[], Cost]], top: str, sizes: Sizes = sizes) -> Cost:
            with served(sizes, given.top / top) as name:
                return of(lambda: name)()

        if layers == 8 or given.rounds > 3:  # the whole takes ten minutes
            yield Task(PEOPLE, f"`audit` of {layers} layers of a 70B, streamed from a local server",
                       partial(streamed, partial(given.run, "audit"), "work"), partial(streamed, gram, "floor"),
                       GRAM)  # fmt: skip


def pairs(given: Given) -> Iterator[Task]:
    """A whole 7B in a file of 13 GB, and another."""
    a, b = given.model("a", SEVEN), given.model("b", SEVEN, moved=MOVED)
    everything = "reading, Gram products and eigenvalues of every matrix"
    yield Task(PEOPLE, "`audit --all` of a whole 7B, 13 GB", given.run("audit --all", a),
               lambda: matrices.floor_of(a(), given.sizes(SEVEN)), everything, ready=a,
               note=lambda: "floor from one matrix of each shape")  # fmt: skip
    both = (a, b)
    for name in ("lineage", "learned"):
        yield Task(PEOPLE, f"`{name}` of two 7B, 27 GB", given.run(name, *both),
                   lambda: plain_read(*(same.stored(each()) for each in both)), READ,
                   ready=lambda: [each() for each in both])  # fmt: skip


def by_engine(given: Given) -> Iterator[Task]:
    """A list of checkpoints in processes, and on Dask's workers."""
    sizes = given.sizes(replace(ATTENTION, layers=4, vocabulary=2000))
    models = [given.model(f"model{i}", sizes) for i in range(4)]

    def listed() -> Path:
        path = given.top / "list.txt"
        path.write_text("".join(f"{made()}\n" for made in models))
        return path

    def dask(workers: int) -> Callable[[], Cost]:
        return lambda: engines.by_dask(workers, lambda command: given.run(command, listed)())

    alone, one = "one process, a thread a core", "one of Dask's workers"
    for name, work, floor, to in (
        ("two processes (`--jobs 2`)", given.run("audit --jobs 2", listed), given.run("audit", listed), alone),
        ("two of Dask's workers", dask(2), given.run("audit", listed), alone),
        ("two of Dask's workers, next to one", dask(2), dask(1), one),
    ):
        yield Task(ENGINES, name, work, floor, to, ready=listed)


def bigrams(given: Given) -> Iterator[Rows]:
    """AUROC over a vocabulary."""
    sizes = {"vocabulary": 5000} if given.tiny else {}
    yield Rows(PEOPLE, "AUROC", lambda: auroc.measure(2, 1, **sizes))


def copies(given: Given) -> Iterator[Task]:
    """`same` on layers of a 7B."""
    sizes = given.sizes(replace(SEVEN, layers=2))
    for name, x, y in same.sides(given.top, sizes, given.ggml):
        yield copy(name, x, y, given.rounds)


def copy(name: str, x: same.Made, y: same.Made, rounds: int) -> Task:
    """A row of `same`, without starting and importing."""
    told = dict[str, Any]()

    def files() -> list[Path]:
        return [same.stored(x()), same.stored(y())]

    def work() -> Cost:
        cost, more = inner_cost("-c", same.RUN, x(), y())
        told.update(more)
        return cost

    def note() -> str:
        return f"{told['verdict']}; {gigabytes(files()) / told['process']:.2g} GB per CPU second, imports included"

    return Task(SAME, name, work, lambda: plain_read(*files()), READ, rounds, files, note)


def gigabytes(files: Sequence[Path]) -> float:
    return sum(each.stat().st_size for each in files) / 1e9


def cold(given: Given) -> Iterator[Task]:
    """Commands on files that have to come from the disk."""
    a = given.model("a", replace(ATTENTION, layers=20))
    b = cache(lambda: Path(shutil.copytree(a(), given.top / "b")))
    for command, sources in (("audit", (a,)), ("same", (a, b)), ("inspect --check", (a,))):
        yield cold_task(command, given.run(command, *sources), lambda s=sources: [same.stored(made()) for made in s])


def cold_task(command: str, run: Callable[[], Cost], files: Callable[[], list[Path]]) -> Task:
    """A row of a command whose files are dropped from the cache before, as before the plain read."""
    rates: list[str] = []

    def of(reading: Callable[[], Cost]) -> Cost:
        forget(*files())
        cost = reading()
        rates.append(f"{gigabytes(files()) / cost.wall:.2g}")
        return cost

    return Task(COLDLY, f"`{command}` of a 7B's attention, 20 layers", lambda: of(run),
                lambda: of(lambda: plain_read(*files())), COLD, ready=files,
                rates=lambda: f"{rates[1]} GB/s of the file, plain read {rates[0]}")  # fmt: skip


def other_tools(given: Given) -> Iterator[Task | Rows]:
    """Other tools on the same files, each next to the same done here; times are without starting and importing."""
    peer = cache(lambda tool: f"{tool} {versions(given.peer)[tool]}")

    def ours(what: str, source: Path) -> Callable[[], Cost]:
        return lambda: inner_cost("-m", "benchmarks.peers", what, source)[0]

    def theirs(tool: str, source: Path) -> Callable[[], Cost]:
        return lambda: fastest(given.peer, tool, source)[0]

    file = checkpoints.gguf_file()
    if given.peer:
        yield Task(TOOLS, f"SmolLM2-135M's GGUF file to float32: {peer('gguf')}", theirs("gguf", file),
                   ours("our gguf", file), "weightscope", given.rounds)  # fmt: skip
    for name in ([checkpoints.GPT2] if given.gpt2 else []) + [checkpoints.SMOLLM2]:
        folder, of_heads = given.out / name, f"{name}, singular values of every head"
        ready, spectra = lambda: checkpoints.make(given.gpt2, given.out), ours("our spectra", folder)
        yield Task(TOOLS, f"{of_heads}: weightscope", spectra, gram(folder.__fspath__), GRAM, given.rounds, ready)
        yield Task(TOOLS, f"{of_heads}: numpy.linalg on dense maps", lambda folder=folder: dense(folder), spectra,
                   "weightscope", 1, ready, lambda: f"from {DENSE_HEADS} heads")  # fmt: skip
        if given.peer:
            yield Task(TOOLS, f"{of_heads}: {peer('transformer-lens')}", theirs("transformer-lens", folder), spectra,
                       "weightscope", 1, ready, lambda: "float32, singular vectors too")  # fmt: skip
            title = f"{name}, spectra and power laws of every matrix"
            yield Rows(TOOLS, title, lambda folder=folder, title=title: power_laws(folder, title, given, peer), ready)


def fastest(python: str, tool: str, source: Path) -> tuple[Cost, dict[str, Any]]:
    """Another tool with one thread, which is often faster on small matrices, or with all."""
    tries = [{"OMP_NUM_THREADS": "1"}, {}]
    runs = [inner_cost(peers.__file__, tool, source, python=python, **threads) for threads in tries]
    return min(runs, key=lambda run: run[0].wall)


def dense(folder: Path) -> Cost:
    """Singular values of W_QK and W_VO of every head as dense matrices, from a few of the middle layer."""
    model = ws.open_model(folder)
    layers = model.attention_layers
    heads = model.layer(layers[len(layers) // 2]).heads[:DENSE_HEADS]
    pairs = [(np.asarray(w.left, float), np.asarray(w.right, float)) for head in heads for w in (head.qk, head.vo)]
    spent = timed(lambda: [np.linalg.svd(left @ right.T, compute_uv=False) for left, right in pairs])
    return spent.times(len(layers) * model.config.n_heads / len(heads))


def power_laws(folder: Path, title: str, given: Given, peer: Callable[[str], str]) -> list[Measured]:
    """Every matrix here and by WeightWatcher, which gets the same arrays; how many exponents agree."""
    began = before_row()
    cost, told = inner_cost("-m", "benchmarks.peers", "our matrices", folder)
    ours = told["alpha"]
    tensors = ws.open_model(folder).tensors
    np.savez(given.top / "arrays.npz", **{name: tensors[name].array() for name in ours})
    their_cost, their_told = fastest(given.peer, "weightwatcher", given.top / "arrays.npz")
    theirs = their_told["alpha"]
    close = sum(abs(ours[name] - alpha) <= matrices.SAME_ALPHA for name, alpha in theirs.items())
    note = f"{close} of {len(theirs)} exponents within 10⁻³ of ours"
    return [
        Measured.of(f"{title}: weightscope", [cost], note=f"{len(ours)} matrices", **began),
        Measured.of(f"{title}: {peer('weightwatcher')}", [their_cost], [cost], "weightscope", note, **began),
    ]


@cache
def versions(python: str) -> dict[str, str]:
    """Versions of the other tools."""
    tools = ("transformer-lens", "weightwatcher", "gguf")
    run = [subprocess.run([python, "-c", VERSION.format(tool)], capture_output=True, text=True) for tool in tools]
    return {tool: done.stdout.strip() for tool, done in zip(tools, run, strict=True)}


def parts(given: Given) -> Iterator[Rows]:
    """Parts of commands: types of ggml, and every singular value of whole matrices."""
    yield Rows(PARTS, "ggml's types", lambda: ggml.measure(1 if given.tiny else 64))
    sizes = given.sizes(replace(SEVEN, layers=1, vocabulary=8))
    yield Rows(PARTS, "matrices, exact", lambda: [matrices.exact(write(given.top / "one", sizes, spectra=True))])


SETS: tuple[Callable[[Given], Iterator[Task | Rows]], ...] = (
    starts, audits, audits_of_shapes, by_engine, bigrams, copies, cold, other_tools, parts, pairs,
)  # fmt: skip


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out/bench", help="Results.")
@click.option("--only", default="", help="Only rows whose group and name contain this.")
@click.option("--gpt2", type=click.Path(exists=True, path_type=Path), help="A folder with GPT-2's attention.")
@click.option("--ggml", "library", type=click.Path(exists=True, path_type=Path), help="A shared library with ggml.")
@click.option("--peer-python", default="", help="An interpreter with the other tools.")
@click.option("--rounds", default=3, show_default=True, help="Of short rows; with more than 3 a whole 70B is streamed.")
@click.option("--tiny", is_flag=True, hidden=True)
def main(
    out: Path, only: str, gpt2: Path | None, library: Path | None, peer_python: str, rounds: int, tiny: bool
) -> None:
    """Run the rows, print each, and write whole.json after each, so that an interrupted run keeps its results."""
    out.mkdir(parents=True, exist_ok=True)
    given, began = Given(out, gpt2, library, peer_python, tiny, rounds), time.perf_counter()
    bench, failed = Bench(this_machine(), limits={"load": before_row()["load"]}), []
    kept = load(out / "whole.json") if (out / "whole.json").exists() else bench
    if only and kept.machine != bench.machine:
        raise click.ClickException(f"{out / 'whole.json'} is of another commit, day or machine; move it away first")
    bench = kept if only else bench
    for rows in SETS:
        with tempfile.TemporaryDirectory() as top:
            for task in rows(replace(given, top=Path(top))):
                if only not in f"{task.group}: {task.name}":
                    continue
                try:
                    measured = task.measured()
                except Exception as error:
                    failed.append(f"{task.name}: {error}")
                    click.echo(f"FAILED {failed[-1]}", err=True)
                    continue
                bench = bench.with_rows(measured)
                bench.save(out / "whole.json")
                lines = table(task.group, measured).splitlines()[2:]
                click.echo("\n".join(f"{time.perf_counter() - began:4.0f} s {line}" for line in lines))
    click.echo(f"{out / 'whole.json'}, in {duration(time.perf_counter() - began)}")
    if failed:
        raise click.ClickException("; ".join(failed))


if __name__ == "__main__":
    main()
