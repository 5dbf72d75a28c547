"""Options of several commands: SOURCE and how to read it, --out, --device, the engine."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from weightscope.cli.command import command
from weightscope.cli.terminal import headline
from weightscope.core.errors import naming, printable
from weightscope.core.files import check_writable

SHELLS = ("bash", "zsh", "fish")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)  # one that is there


@command(
    "Print the shell completion script.",
    [
        "weightscope completion bash >> ~/.bashrc",
        "weightscope completion zsh >> ~/.zshrc",
        "weightscope completion fish > ~/.config/fish/completions/weightscope.fish",
    ],
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options, checkpoints, families and kinds
    of findings.

    Add it to the shell's start-up file, as below, and open a new shell.
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click supports all three shells"
    root = click.get_current_context().find_root().command
    click.echo(completion(root, {}, "weightscope", "_WEIGHTSCOPE_COMPLETE").source())


def complete_source(
    context: click.Context, parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Complete a folder or file, or `embedded`."""
    shipped = [CompletionItem("embedded")] if typed and "embedded".startswith(typed) else []
    return [*shipped, CompletionItem(typed, type="file")]


def completing(
    names: Callable[[], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Make a function that gives names complete what was typed."""

    def complete(context: click.Context, parameter: click.Parameter, typed: str) -> Any:
        return [CompletionItem(name) for name in names() if name.startswith(typed)]

    return complete


@completing
def complete_family() -> list[str]:
    """Names of families."""
    from weightscope.core.errors import CheckpointError
    from weightscope.model.rows.table import FAMILIES, known_rows

    try:
        rows: Iterable[Any] = known_rows()
    except CheckpointError:  # a file of the user's own is broken; a command says so, a prompt not
        rows = FAMILIES
    return sorted({row.name for row in rows})


@completing
def complete_limit() -> list[str]:
    """Severities and kinds of findings."""
    from weightscope.report.findings import SEVERITIES, finding_kinds

    return [*SEVERITIES, *finding_kinds()]


TOWERS = ("text", "vision", "audio", "encoder", "decoder", "cross", "all")  # usual names of stacks


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Check that results can be written and figures drawn before anything is computed."""
    if path is not None:
        check_settings_of_figures()
        is_file = isinstance(parameter.type, click.Path) and parameter.type.file_okay
        check_writable(path.parent if is_file else path)
    return path


def check_settings_of_figures() -> None:
    """Refuse a matplotlibrc that Matplotlib cannot read; the working directory's comes first."""
    from weightscope.checkpoint.config import MAX_BYTES, read_small
    from weightscope.core.errors import CheckpointError

    named, home = os.environ.get("MATPLOTLIBRC"), os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    folder = os.environ.get("MPLCONFIGDIR") or f"{home}/matplotlib"
    places = (Path(place).expanduser() for place in (".", named, folder) if place)
    files = (place / "matplotlibrc" if place.is_dir() else place for place in places)
    if file := next((file for file in files if file.exists() and not file.is_dir()), None):
        try:
            read_small(file, MAX_BYTES).decode()
        except UnicodeDecodeError:
            problem = "is not UTF-8, and Matplotlib reads it to draw figures; correct or remove it"
            raise CheckpointError(problem, file=file) from None


def number(
    name: str, help: str, default: int | None = None, least: int = 1, **more: Any
) -> Callable[[Any], Any]:
    """An option that is a whole number."""
    more |= {"type": click.IntRange(least), "default": default, "help": help}
    return click.option(name, show_default=default is not None, **more)


def flag(name: str, help: str, parameter: str | None = None) -> Callable[[Any], Any]:
    """An option without a value."""
    return click.option(*filter(None, (name, parameter)), is_flag=True, help=help)


def counts(help: str) -> Callable[[Any], Any]:
    """--counts, a file of bigram counts."""
    return click.option("--counts", type=click.Path(dir_okay=False, path_type=Path), help=help)


def file_to_read(name: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that names a file that is there."""
    return click.option(name, type=FILE, help=help, **more)


def file_to_write(*names: str, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that names a file that is written."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(*names, type=kind, callback=writable, help=help, **more)


def _usable(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """Check the device before anything is read; on a cluster each worker checks its own."""
    if device != "cpu" and context.params.get("engine") != "dask":
        from weightscope.core.compute.device import open_device

        open_device(device)
    return device


def _reachable(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """Check that PyTorch is installed and reaches the device before anything is read."""
    from weightscope.runner.loading import check_device

    check_device(device)
    return device


def device_option(check: Callable[..., str], use: str) -> Callable[[Any], Any]:
    """--device, checked before anything is read."""
    settings: dict[str, Any] = {"type": click.Choice(["cpu", "cuda"]), "default": "cpu"}
    return click.option("--device", show_default=True, callback=check, help=use, **settings)


device = device_option(_usable, "Device for the large matrix products.")
runner_device = device_option(_reachable, "Device for the model and the large matrix products.")
out = click.option(
    "--out",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    callback=writable,
    help="Folder for results.",
)
page_folder = click.option(
    "--out",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    callback=writable,
    help="Folder for report.html, tables and figures.",
)
csv = file_to_write("--csv", "csv_file", help="Also write the table to this file.")
layer = click.option("--layer", default=0, show_default=True, help="Layer to analyse.")
delta = click.option(
    "--delta",
    default=1,
    show_default=True,
    help="Distance i - j at which rotary heads compare tokens.",
)
text = click.option(
    "--text",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Text, folder of texts, JSON lines or Parquet; may be repeated. "
    "Default: the public-domain texts included.",
)
tokenizer = click.option(
    "--tokenizer", help="SOURCE of the tokenizer, if it is not in the checkpoint's folder."
)
token_id = click.option(
    "--token-id",
    "token_ids",
    type=click.IntRange(0),
    multiple=True,
    help="Token id; may be repeated.",
)
family = click.option(
    "--family",
    shell_complete=complete_family,
    help="Read the checkpoint as this family, whatever its config says.",
)
tower = click.option(
    "--tower",
    shell_complete=completing(lambda: TOWERS),
    help="Attention stack to read, if there are several: text, vision, encoder, decoder, cross ...",
)
families = click.option(
    "--families",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="File of architecture rows, as written by `weightscope adopt --save`.",
)
json = flag("--json", "Print the result as JSON and nothing else.", "as_json")
sarif = file_to_write(
    "--sarif",
    "sarif",
    help="Also write the findings to this file as SARIF 2.1.0, for code scanning.",
)
digest = flag("--digest", "Also read the files whole, for the SHA-256 of each.")


def digest_lines(source: Mapping[str, Any]) -> list[str]:
    """Digests of what was read, with --digest, as sha256sum writes them; see `source_of`."""
    context = click.get_current_context(silent=True)
    asked = context is not None and context.params.get("digest")
    return [f"{file['sha256']}  {file['name']}" for file in source["files"]] if asked else []


def say_digests(source: Mapping[str, Any]) -> None:
    """Print digests to stderr: for commands that write neither a page nor JSON."""
    for line in digest_lines(source):
        click.echo(line, err=True)


def opened_model(source: Any, *, tensors_suffice: bool = False) -> Any:
    """Open a Source; say if its row was adopted or never verified, or if none reads its heads."""
    model = source.open_tensors() if tensors_suffice else source.open()
    family = getattr(model, "family", None)
    if family is None:
        why = model.refusal.partition(";")[0]
        note = f"weightscope: only the tensors of {model.name} are compared: {why}"
        click.echo(printable(note), err=True)
    elif family.origin:
        note = f"weightscope: {model.name} is read as family {family.called}"
        click.echo(printable(note), err=True)
    return model


def opened_among(source: Any, *, tensors_suffice: bool = False) -> Any:
    """Open one of a command's several Sources, which an error names."""
    with naming(source.given or source.source):
        return opened_model(source, tensors_suffice=tensors_suffice)


def with_source(command: Callable[..., None]) -> Callable[..., None]:
    """Add SOURCE and the options on how to read it; the command gets a function text -> Source."""

    @click.argument("source", shell_complete=complete_source)
    @click.option("--revision", help="Branch, tag or commit on the Hub.")
    @family
    @tower
    @click.option(
        "--base", help="Base model of a LoRA adapter, if the adapter's config does not name it."
    )
    @families
    @digest
    @wraps(command)
    def named(source: str, digest: bool, **options: Any) -> None:
        from weightscope.model.sources import HOW, Source

        how = {name: options.pop(name, None) for name in HOW}
        if how["tokenizer"] is not None:  # fail before anything is computed
            from weightscope.model.text.tokenizer import Tokenizer

            Tokenizer.load(how["tokenizer"])
        command(lambda text: Source.named(text, digest=digest, **how), source, **options)

    return named


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """Add SOURCE; the command gets the opened model."""

    @with_source
    @wraps(command)
    def on_model(named: Any, source: str, **options: Any) -> None:
        command(opened_model(named(source)), **options)

    return on_model


def with_engine(command: Callable[..., None]) -> Callable[..., None]:
    """Add --engine, --scheduler and --jobs; the command gets the engine that runs its tasks."""

    @click.option(
        "--engine",
        type=click.Choice(["local", "dask"]),
        default="local",
        show_default=True,
        is_eager=True,  # --device depends on it
        help="Run on this machine or on a Dask cluster.",
    )
    @click.option("--scheduler", help="Dask scheduler: tcp://HOST:PORT, or the scheduler file.")
    @number("--jobs", "Number of processes on this machine; default: one, with a thread per core.")
    @wraps(command)
    def engaged(
        *arguments: Any, engine: str, scheduler: str | None, jobs: int | None, **options: Any
    ) -> None:
        from weightscope.core.engine import open_engine

        if engine == "dask" and jobs is not None:
            advice = "on a cluster, set the number of workers and threads there"
            raise click.UsageError(f"--jobs applies to the local engine; {advice}")
        if jobs is not None and options.get("device", "cpu") != "cpu":
            why = "a GPU is used by one process"
            raise click.UsageError(f"--jobs cannot be used with --device cuda: {why}")
        if engine == "local" and scheduler is not None:
            raise click.UsageError("--scheduler needs --engine dask")
        with open_engine(engine, scheduler, jobs) as opened:
            command(*arguments, engine=opened, **options)

    return engaged


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse 0,5,7-9 as (0, 5, 7, 8, 9): each number once, in the order given."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(-?\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part)
        if ends is None:
            problem = f"{printable(part)!r} is neither a whole number nor a range such as 0-3"
            raise click.BadParameter(problem, param_hint=option)
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not 0 <= last - first < 10**5:
            problem = f"the range {printable(part)} runs backwards or is too long"
            raise click.BadParameter(problem, param_hint=option)
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


def say_caveats(caveats: Sequence[str]) -> None:
    """Print what the numbers leave out."""
    for caveat in caveats:
        headline(f"not in these numbers: {caveat}")
