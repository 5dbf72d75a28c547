"""What several commands share: SOURCE, the engine, options of the first layer, numbers, caveats."""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from weightscope.cli.completing import families as family_names
from weightscope.cli.completing import sources, towers
from weightscope.cli.terminal import headline
from weightscope.errors import printable
from weightscope.writing import check_writable


def writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """A folder or file for results, once it is known that it can be written, before anything is computed."""
    if path is not None:
        check_writable(path.parent if isinstance(parameter.type, click.Path) and parameter.type.file_okay else path)
    return path


out_option = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, callback=writable,
    help="Folder for results.",
)  # fmt: skip
csv_option = click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), callback=writable,
    help="Write the table here too.",
)  # fmt: skip
layer_option = click.option("--layer", default=0, show_default=True, help="Layer whose heads are asked.")
delta_option = click.option(
    "--delta", default=1, show_default=True, help="Distance i - j at which tokens are compared under rotation."
)


def _usable(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """The device, once it is known to be there, before anything is read; a cluster's workers look for theirs."""
    if device != "cpu" and context.params.get("engine") != "dask":
        from weightscope.device import open_device

        open_device(device)
    return device


device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, callback=_usable,
    help="Where the heavy products are computed.",
)  # fmt: skip


def _reachable(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """The device, once it is known that PyTorch is installed and reaches it, before anything is read."""
    from weightscope.runner.loading import check_device

    check_device(device)
    return device


runner_device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, callback=_reachable,
    help="Where the model runs and the heavy products are computed.",
)  # fmt: skip
text_option = click.option(
    "--text", multiple=True, type=click.Path(path_type=Path),
    help="Text, folder of texts, JSON lines or Parquet; may be repeated. Without it: works in the public domain.",
)  # fmt: skip


tokenizer_option = click.option(
    "--tokenizer", help="SOURCE of the tokenizer that names tokens, if it is not with the checkpoint."
)
token_id_option = click.option(
    "--token-id", "token_ids", type=click.IntRange(0), multiple=True, help="A token by its id; may be repeated."
)


families_option = click.option(
    "--families", type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="A file of rows of architectures, as `weightscope adopt --save` writes them.",
)  # fmt: skip


def opened_model(source: Any) -> Any:
    """The model of a Source; where nobody vouches for the row that reads it, or a person adopted it, that is said."""
    model = source.open()
    if model.family.origin:
        click.echo(printable(f"weightscope: {model.name} is read as {model.family.called}"), err=True)
    return model


def with_source(command: Callable[..., None]) -> Callable[..., None]:
    """A command on SOURCE and how to read it, called with a function from one source to a Source, and the text.

    With `tokenizer_option` the Source knows that place too.
    """

    @click.argument("source", shell_complete=sources)
    @click.option("--revision", help="Branch, tag or commit on the Hub.")
    @click.option(
        "--family", shell_complete=family_names, help="Read the checkpoint as this family, whatever its config says."
    )
    @click.option(
        "--tower",
        shell_complete=towers,
        help="Which stack, where there are several: text, vision, encoder, decoder, cross ...",
    )
    @click.option("--base", help="Of a LoRA adapter the model that it changes, where its settings do not name it.")
    @families_option
    @wraps(command)
    def named(
        source: str,
        revision: str | None,
        family: str | None,
        tower: str | None,
        base: str | None,
        families: str | None,
        **options: Any,
    ) -> None:
        from weightscope.sources import Source

        tokenizer = options.pop("tokenizer", None)
        if tokenizer is not None:  # before anything is computed that it is wanted for
            from weightscope.text.tokenizer import load_tokenizer

            load_tokenizer(tokenizer)
        command(lambda text: Source.named(text, revision, family, tower, tokenizer, base, families), source, **options)

    return named


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command on SOURCE, called with the opened model instead."""

    @with_source
    @wraps(command)
    def on_model(named: Any, source: str, **options: Any) -> None:
        command(opened_model(named(source)), **options)

    return on_model


def with_engine(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose tasks may run in other processes or on a cluster, called with the engine to run them."""

    @click.option(
        "--engine", type=click.Choice(["local", "dask"]), default="local", show_default=True,
        is_eager=True,  # known before --device is looked at
        help="This machine, or a Dask cluster.",
    )  # fmt: skip
    @click.option("--scheduler", help="Dask's scheduler: tcp://HOST:PORT, or the file it wrote its address to.")
    @click.option(
        "--jobs", type=click.IntRange(1), help="Processes on this machine, instead of one with a thread a core."
    )
    @wraps(command)
    def engaged(*arguments: Any, engine: str, scheduler: str | None, jobs: int | None, **options: Any) -> None:
        from weightscope.engine import open_engine

        if engine == "dask" and jobs is not None:
            raise click.UsageError("--jobs is for one machine; on a cluster the workers' threads count")
        if jobs is not None and options.get("device", "cpu") != "cpu":
            raise click.UsageError("--jobs spreads work over cores; a device is used by one process")
        if engine == "local" and scheduler is not None:
            raise click.UsageError("--scheduler goes with --engine dask")
        with open_engine(engine, scheduler, jobs) as opened:
            command(*arguments, engine=opened, **options)

    return engaged


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """0,5,7-9 as (0, 5, 7, 8, 9): each once, in the order given."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(-?\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part)
        if ends is None:
            raise click.BadParameter(
                f"{printable(part)!r} is no whole number and no range such as 0-3", param_hint=option
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not 0 <= last - first < 10**5:
            raise click.BadParameter(f"the range {printable(part)} runs backwards or is absurd", param_hint=option)
        found += range(first, last + 1)
    return tuple(dict.fromkeys(found))


def say_caveats(caveats: Sequence[str]) -> None:
    for caveat in caveats:
        headline(f"not in these numbers: {caveat}")
