"""The commands id and card."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import FAILED, headline, print_json, show, write_text


@command(
    "One identity for a model's values, whatever its files.",
    [
        "weightscope id model/",
        "weightscope id model/ --out model.id.json",
    ],
)
@options.with_source
@options.file_to_write(
    "--out", "-o", help="File for the digest of every tensor; its name ends in .id.json."
)
@options.file_to_read("--sign-key", "Private key in PEM to sign --out with (extra attest).")
@options.json
def id_command(
    named: Any, source: str, out: Path | None, sign_key: Path | None, as_json: bool
) -> None:
    """Print one line, wsid1 and a digest, that two files share if they hold the same values.

    Every tensor is read, under its role: names, shards, fused tensors, containers and dtypes do not
    count. With --out, the digests of all tensors, the config's settings and digests of the
    tokenizer are kept; `weightscope same FILE.id.json COPY` then needs no original.
    """
    from weightscope.pairs.identity.identity import SUFFIX, identity

    if out is not None and not out.name.endswith(SUFFIX):
        problem = f"{out} does not end in {SUFFIX}, the suffix of identities"
        raise click.BadParameter(problem, param_hint="--out")
    if sign_key is not None and out is None:
        raise click.UsageError("--sign-key needs --out")
    key = None
    if sign_key is not None:
        from weightscope.pairs.claims.verify import signatures

        key = signatures().signing_key(sign_key)
    result = identity(options.opened_among(named(source), tensors_suffice=True), progress=True)
    written = result.as_json()
    if out is not None:
        content = written if key is None else signatures().signed(result.statement(), key)
        write_text(json.dumps(content) + "\n", out)
    if as_json:
        print_json(written)
        return
    show(*result.printed())
    if out is None:
        headline("--out FILE.id.json keeps the digest of every tensor.")
    else:
        click.echo(out)


@command(
    "A card for a checkpoint: what is verified, what failed.",
    [
        "weightscope card model/",
        "weightscope card model/ --original model.id.json --base org/base --out model/README.md",
        "weightscope card model/ --original model.id.json --base org/base --check",
    ],
)
@click.argument("source", shell_complete=options.complete_source)
@options.tower
@options.families
@options.digest
@click.option("--base", help="The model that it was made from.")
@click.option("--original", help="The model that it is a copy of, or that model's .id.json.")
@options.file_to_write("--out", "-o", help="Model card (README.md) whose section is replaced.")
@options.flag(
    "--check",
    "Write nothing: exit with status 3 if the section in --out, or README.md, is another.",
)
@options.json
def card_command(
    source: str,
    base: str | None,
    original: str | None,
    out: Path | None,
    check: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Check a checkpoint before it is published: each item is verified, failed or not checked.

    Prints a section of a model card: a table, and YAML for programs. Every value is read, as
    `weightscope audit --all` does. Exit status 3 if an item failed.
    """
    from weightscope.checkpoint.config import MAX_BYTES, read_small
    from weightscope.core.errors import CheckpointError
    from weightscope.model.sources import Source
    from weightscope.pairs.card.card import (
        README,
        card,
        section_in,
        with_section,
        without_version,
    )

    model = options.opened_model(Source.named(source, **how))
    page = out or model.checkpoint.folder / README
    if out is not None and not check:
        _page_text(out)  # one that cannot be read is refused before anything is computed
    result = card(model, base, original, progress=True)
    if as_json:
        print_json(result.as_json())
    else:
        show(*(result.printed() if out or check else [result.section]))
    if check:
        text = read_small(page, MAX_BYTES).decode(errors="replace")
        stored = section_in(text)
        if stored is None or without_version(stored) != without_version(result.section):
            problem = "has no section by weightscope" if stored is None else "has another section"
            headline(CheckpointError(f"{problem}; --out writes it anew", file=page))
            sys.exit(FAILED)
    elif out is not None:
        write_text(with_section(_page_text(out), result.section), out)
        if not as_json:
            click.echo(out)
    if result.failed:
        sys.exit(FAILED)


def _page_text(page: Path) -> str:
    """The model card that a section goes into; empty without one."""
    from weightscope.checkpoint.config import MAX_BYTES, read_small
    from weightscope.core.errors import CheckpointError

    try:
        return read_small(page, MAX_BYTES).decode() if page.exists() else ""
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 ({error}), and its other text would be lost"
        raise CheckpointError(f"{problem}; write it as UTF-8 first", file=page) from None
