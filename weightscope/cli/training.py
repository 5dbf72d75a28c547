"""The command learned."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import folder_for, hand_over


@command(
    "Find out what was trained into a checkpoint: how, where, and which words it raised.",
    [
        "weightscope learned base/ tuned/ --out learned/",
        "weightscope learned base/ adapter-a/ adapter-b/ --json",
    ],
)
@click.argument("a", metavar="BASE", shell_complete=options.complete_source)
@click.argument("tuned", nargs=-1, required=True, metavar="TUNED [TUNED ...]", shell_complete=options.complete_source)
@click.option("--exact", is_flag=True, help="Look for intruder dimensions in matrices of any size (minutes each).")
@options.page_folder
@options.tower
@options.families
@options.digest
@options.json
def learned_command(a: str, tuned: tuple[str, ...], exact: bool, out: Path | None, as_json: bool, **how: Any) -> None:
    """Compare tunes with their BASE: directions, intruder dimensions, words, and how each was trained.

    TUNED is a checkpoint of BASE's shapes, or a LoRA adapter for it. Of several, the page also says which collide.
    """
    from weightscope.checkpoint.adapters import is_adapter
    from weightscope.learned.learned import Learned, learned
    from weightscope.sources import Source

    folder = folder_for(Learned, out)
    tunes = [Source.named(each, base=a if is_adapter(each) else None, **how) for each in tuned]
    models = [options.opened_model(source, tensors_suffice=True) for source in (Source.named(a, **how), *tunes)]
    result = learned(*models, exact=exact, progress=True)
    hand_over(result, folder, as_json)
