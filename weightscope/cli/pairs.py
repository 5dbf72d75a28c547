"""The commands same and learned."""

import sys
from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import FAILED, UNDECIDED, folder_for, hand_over, write_sarif
from weightscope.pairs.same import DIFFERENT, UP_TO
from weightscope.pairs.same import UNDECIDED as UNDECIDED_VERDICT


@command(
    "Is this still the same model? Every tensor, config, tokenizer.",
    [
        "weightscope same original/ converted.gguf",
        "weightscope same original/ exported/ --up-to rounding --out same/",
        "weightscope same org/model org/model-mlx-4bit --json",
    ],
)
@click.argument("a", metavar="A", shell_complete=options.complete_source)
@click.argument("b", metavar="B", shell_complete=options.complete_source)
@click.option(
    "--up-to",
    type=click.Choice([*UP_TO]),
    default="function",
    show_default=True,
    metavar="VERDICT",
    help="Weakest verdict that passes: values, rounding, quantisation or function.",
)
@click.option(
    "--fail-on",
    type=click.Choice([DIFFERENT, UNDECIDED_VERDICT]),
    default=UNDECIDED_VERDICT,
    show_default=True,
    help="different: an undecided answer passes too.",
)
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="SHARE",
    help="Read this share of the values only, for a first look.",
)
@click.option(
    "--base",
    help="Base model of A or B where that is a LoRA adapter, if its config does not name it.",
)
@options.file_to_read("--key", "Public key in PEM that an identity (.id.json) must be signed by.")
@options.page_folder
@options.tower
@options.families
@options.digest
@options.sarif
@options.json
def same_command(
    a: str,
    b: str,
    up_to: str,
    fail_on: str,
    sample: float,
    base: str | None,
    key: Path | None,
    out: Path | None,
    sarif: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Find out whether B holds the model that A holds, and what was done to each tensor that
    differs.

    Verdicts, from strong to weak: same bytes, same values, rounded, quantised, same function;
    different; undecided. Exit status 0 up to --up-to, 3 beyond it, 4 if undecided, 2 if a
    checkpoint cannot be read. A or B may be what `weightscope id --out FILE.id.json` wrote.
    """
    from weightscope.checkpoint.adapters.diffusion import is_adapter
    from weightscope.model.sources import Source
    from weightscope.pairs.identity.identity import check_signed, is_identity
    from weightscope.pairs.same.same import Same, same

    if key is not None:
        for each in filter(is_identity, (a, b)):
            check_signed(Path(each), key)
    if base is not None and not any(map(is_adapter, (a, b))):
        raise click.UsageError("--base is the base of a LoRA adapter, and neither A nor B is one")
    into = folder_for(Same, out)

    def opened(named: str) -> Any:
        if is_identity(named):
            return named
        source = Source.named(named, base=base if is_adapter(named) else None, **how)
        return options.opened_among(source, tensors_suffice=True)

    result = same(opened(a), opened(b), sample=sample, progress=True)
    hand_over(result, into, as_json)
    if sarif is not None:
        write_sarif(sarif, result.as_json() | {"findings": result.findings_beyond(up_to)})
    if result.verdict == UNDECIDED_VERDICT:
        sys.exit(UNDECIDED if fail_on == UNDECIDED_VERDICT else 0)
    if not result.holds(up_to):
        sys.exit(FAILED)


@command(
    "What was trained into it: how, where, and which words.",
    [
        "weightscope learned base/ tuned/ --out learned/",
        "weightscope learned base/ adapter-a/ adapter-b/ --json",
    ],
)
@click.argument("a", metavar="BASE", shell_complete=options.complete_source)
@click.argument(
    "tuned",
    nargs=-1,
    required=True,
    metavar="TUNED [TUNED ...]",
    shell_complete=options.complete_source,
)
@options.flag("--exact", "Look for intruder dimensions in matrices of any size (minutes each).")
@options.page_folder
@options.tower
@options.families
@options.digest
@options.json
def learned_command(
    a: str, tuned: tuple[str, ...], exact: bool, out: Path | None, as_json: bool, **how: Any
) -> None:
    """Compare tunes with their BASE: directions, intruder dimensions, words, and how each was
    trained.

    TUNED is a checkpoint of BASE's shapes, or a LoRA adapter for it. Of several, the page also says
    which collide.
    """
    from weightscope.checkpoint.adapters.diffusion import is_adapter
    from weightscope.model.sources import Source
    from weightscope.pairs.learned.learned import Learned, learned

    into = folder_for(Learned, out)
    tunes = [Source.named(each, base=a if is_adapter(each) else None, **how) for each in tuned]
    sources = [Source.named(a, **how), *tunes]
    models = [options.opened_among(source, tensors_suffice=True) for source in sources]
    result = learned(*models, exact=exact, progress=True)
    hand_over(result, into, as_json)
