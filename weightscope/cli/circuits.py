"""What each head is, and which heads talk to each other."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import (
    device_option,
    opened_model,
    out_option,
    say_caveats,
    tokenizer_option,
    whole_numbers,
    with_engine,
    with_source,
)
from weightscope.cli.terminal import headline, is_quiet, show


@click.command("circuits")
@with_source
@tokenizer_option
@out_option
@click.option("--layers", help="Only these, as in 0-3 or 0,5,7-9; all that have attention by default.")
@click.option(
    "--top", type=click.IntRange(1), default=20, show_default=True, help="Edges of each kind, by either measure."
)
@click.option(
    "--counts", type=click.Path(dir_okay=False, path_type=Path),
    help="Bigram counts (see `weightscope bigrams`), for detokenization heads of the first layer.",
)  # fmt: skip
@click.option("--measure", is_flag=True, help="Run the model too, and say how well the names hold (PyTorch).")
@click.option(
    "--text", "texts", type=click.Path(exists=True, path_type=Path), multiple=True,
    help="Text that it is run on, a file or a folder; public-domain prose by default.",
)  # fmt: skip
@device_option
@with_engine
def circuits_command(
    named: Any,
    source: str,
    out: Path,
    layers: str | None,
    top: int,
    counts: Path | None,
    measure: bool,
    texts: tuple[Path, ...],
    device: str,
    engine: Any,
) -> None:
    """Name every head by what it does, and find which heads read what others write, as tables and a page."""
    from weightscope.circuitry.circuits import circuits
    from weightscope.folder import OutputFolder

    chosen = None if layers is None else whole_numbers(layers, "--layers")
    opened = named(source)
    model = opened_model(opened)
    on_worker = opened.as_seen(model).elsewhere if engine.elsewhere else None
    with OutputFolder(out) as folder:
        found = circuits(model, chosen, top, device, counts, engine, on_worker)
        if measure:
            from weightscope.circuitry.measured import measured

            found = measured(model, found, texts, device)
        found.write(folder)
    headline(found.lead)
    for role, heads in found.named.items():
        headline(f"{role}: {', '.join(heads)}")
    if found.accuracy is not None and not is_quiet():
        show(found.accuracy.table)
    say_caveats(found.caveats)
    click.echo(out / "report.html")
