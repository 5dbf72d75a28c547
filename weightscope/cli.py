"""The command line: parses, calls, reports. Everything heavy is imported by the command that needs it."""

import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from weightscope.errors import CheckpointError, printable

out_option = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for results."
)
layer_option = click.option("--layer", default=0, show_default=True, help="Layer whose heads are asked.")
delta_option = click.option(
    "--delta", default=1, show_default=True, help="Distance i - j at which tokens are compared under rotation."
)


def _usable(context: click.Context, parameter: click.Parameter, device: str) -> str:
    """The device, once it is known to be there: before anything is read."""
    if device != "cpu":
        from weightscope.backend import open_device

        open_device(device)
    return device


device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, callback=_usable,
    help="Where the heavy products are computed.",
)  # fmt: skip


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """A command on SOURCE and how to read it, called with the opened model instead."""

    @click.argument("source")
    @click.option("--revision", help="Branch, tag or commit on the Hub.")
    @click.option("--family", help="Read the checkpoint as this family, whatever its config says.")
    @click.option("--tower", type=click.Choice(["text", "vision"]), help="Which half of a two-tower model.")
    @wraps(command)
    def opened(source: str, revision: str | None, family: str | None, tower: str | None, **options: Any) -> None:
        from weightscope.model import open_model

        command(open_model(_resolved(source), revision=revision, family=family, tower=tower), **options)

    return opened


class Commands(click.Group):
    """A group whose commands end a bad input with one line on stderr and status 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CheckpointError as error:
            click.echo(f"weightscope: {error}", err=True)
            sys.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="weightscope")
def main() -> None:
    """What a transformer checkpoint's attention heads are, from the weights alone.

    SOURCE is a folder, a .safetensors file, or a Hub id with optional @revision; `embedded` is the small GPT-2 that
    comes with weightscope.
    """


@main.command()
@with_model
def inspect(model: Any) -> None:
    """Family, shapes, dtypes, and the bytes an audit would read."""
    from weightscope.jobs.inspect import describe

    for line in describe(model):
        click.echo(line)


@main.command()
@with_model
@click.option(
    "--counts", type=click.Path(dir_okay=False, path_type=Path), help="Bigram counts (see `weightscope bigrams`)."
)
@out_option
@layer_option
@delta_option
@device_option
@click.option("--token", "tokens", multiple=True, help="Draw this token's ROC curves; may be repeated.")
def detok(
    model: Any, counts: Path | None, out: Path, layer: int, delta: int, device: str, tokens: tuple[str, ...]
) -> None:
    """Bigram AUROC of every head over the full vocabulary, as tables, figures and a page."""
    from weightscope.counts import load_counts
    from weightscope.embedded import COUNTS, FOLDER
    from weightscope.jobs.detok import detokenize, roc_curves, write_detokenization
    from weightscope.jobs.first_layer import FirstLayer
    from weightscope.report.detok_report import detok_sections
    from weightscope.report.page import write_page
    from weightscope.tokenizer import token_id, tokenizer_hash

    if counts is None and model.checkpoint.folder != FOLDER:
        raise click.UsageError(
            "--counts is needed; `weightscope bigrams CORPUS --tokenizer SOURCE --out COUNTS.npz` makes them"
        )
    first, n_tokens = FirstLayer(model, layer, delta, device), model.embeddings.n_tokens
    bigrams = load_counts(counts or COUNTS)
    tokenizer = _tokenizer_if_any(model.source, needed=bool(tokens))
    bigrams.check(n_tokens, tokenizer and tokenizer_hash(tokenizer))
    chosen = {text: token_id(tokenizer, text) for text in tokens}
    found = detokenize(first, bigrams)
    curves = roc_curves(first, bigrams, chosen)
    write_detokenization(found, out)
    lead, sections = detok_sections(found, curves, bigrams, out)
    write_page(out / "report.html", f"Detokenization in layer {layer} of {model.name}", lead, sections)
    for row in found.table:
        click.echo(f"head {row.head:3d}  auroc {row.auroc:.3f}  auroc_paper {row.auroc_paper:.3f}")
    _say_caveats(first.attention.caveats)
    click.echo(f"{out / 'report.html'}")


@main.command("audit")
@with_model
@out_option
@click.option("--layers", help="Only these, as in 0-3 or 0,5,7-9; all that have attention by default.")
@click.option("--deltas", default="0,1", show_default=True, help="Distances i - j at which a rotated W_QK is measured.")
@click.option(
    "--window", type=click.IntRange(1), default=64, show_default=True,
    help="Distances over which a rotated W_QK is averaged.",
)  # fmt: skip
@click.option("--directions", type=click.IntRange(0), help="Singular directions a map to read through the tokens.")
@click.option("--resume", is_flag=True, help="Go on with an audit that was interrupted.")
@device_option
def audit_command(
    model: Any,
    out: Path,
    layers: str | None,
    deltas: str,
    window: int,
    directions: int | None,
    resume: bool,
    device: str,
) -> None:
    """Spectra of every head's W_QK and value-output map, what stands out in them, as tables and a page."""
    from weightscope.jobs.audit import AuditOptions, audit, finish, write_audit
    from weightscope.report.audit_report import summary, write_report

    chosen = None if layers is None else _whole_numbers(layers, "--layers")
    options = AuditOptions(chosen, _whole_numbers(deltas, "--deltas"), window, directions, device)
    results = audit(model, out, options, resume)
    write_audit(results, out)
    write_report(model, results, out)
    finish(out)
    for line in summary(model, results, out):
        click.echo(line)
    _say_caveats(results.heads.caveats)


@main.command("compare")
@click.argument("sources", nargs=-1, required=True)
@out_option
@click.option("--family", help="Read the checkpoints as this family, whatever their configs say.")
@click.option("--tower", type=click.Choice(["text", "vision"]), help="Which half of a two-tower model.")
def compare_command(sources: tuple[str, ...], out: Path, family: str | None, tower: str | None) -> None:
    """How every head moves from A to B, or along a run of checkpoints in the order given."""
    from weightscope.jobs.compare import compare, write_comparison
    from weightscope.model import open_model
    from weightscope.report.compare_report import summary, write_report

    if len(sources) < 2:
        raise click.UsageError("compare needs two checkpoints or more")
    found = compare([open_model(_resolved(source), family=family, tower=tower) for source in sources], sources)
    write_comparison(found, out)
    write_report(found, out)
    for line in summary(found, out):
        click.echo(line)
    _say_caveats(found.heads[0].caveats)


@main.command()
@with_model
@click.argument("token")
@click.option("--head", "heads", type=int, multiple=True, help="Only this head; may be repeated.")
@click.option("--top", default=10, show_default=True, help="Previous tokens a head.")
@layer_option
@delta_option
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here too.")
def neighbours(
    model: Any, token: str, heads: tuple[int, ...], top: int, layer: int, delta: int, csv_file: Path | None
) -> None:
    """The previous tokens that each head scores highest for TOKEN (write " Jackson" for one that opens a word)."""
    from weightscope.jobs.first_layer import FirstLayer
    from weightscope.jobs.neighbours import neighbours as rank
    from weightscope.jobs.neighbours import write_neighbours
    from weightscope.tokenizer import load_tokenizer, token_id

    first = FirstLayer(model, layer, delta)
    model.embeddings  # noqa: B018  a checkpoint without tokens is refused before a tokenizer is looked for
    tokenizer = load_tokenizer(model.source)
    for head in heads:
        first.attention.head(head)
    found = rank(first, tokenizer, token_id(tokenizer, token), top, list(heads) or None)
    if csv_file is not None:
        write_neighbours(found, csv_file)
    click.echo("head  rank      score  token             joined")
    for row in found:
        shown = printable(repr(row.token))
        click.echo(f"{row.head:4d}  {row.rank:4d}  {row.score:9.3f}  {shown:16s}  {printable(row.joined)}")
    _say_caveats(first.attention.caveats)


@main.command()
@with_model
@out_option
@click.option("--query", type=int, help="The query position i; 500 by default, or the last of a shorter model.")
@click.option("--unscaled", is_flag=True, help="Bare numerators, no sigma: needs no token embedding.")
@click.option("--head", "heads", type=int, multiple=True, help="Draw Fig. 3 of this head; may be repeated.")
@device_option
def positions(model: Any, out: Path, query: int | None, unscaled: bool, heads: tuple[int, ...], device: str) -> None:
    """T^p and T^pp of every head at one query position, their trends, and Fig. 3 of the paper."""
    from weightscope.jobs.first_layer import FirstLayer
    from weightscope.jobs.positions import head_trends, position_terms, write_positions
    from weightscope.report.position_report import position_sections

    first = FirstLayer(model, device=device)
    for head in heads:
        first.attention.head(head)
    terms = position_terms(first, query, unscaled)
    found = head_trends(terms)
    write_positions(terms, found, out)
    position_sections(terms, found, out, heads)
    if len(terms.undertrained):
        click.echo(f"undertrained positions, left out of the trends: {', '.join(map(str, terms.undertrained))}")
    click.echo("head  slope of T^p  period of T^pp  recency of the sum")
    for row in found:
        click.echo(f"{row.head:4d}  {row.t_p.slope:12.4g}  {row.t_pp.period:14.0f}  {row.recency:18.2f}")
    click.echo(f"{out}")


@main.command()
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help="SOURCE of the tokenizer: tokenizer.json, or vocab.json and merges.txt."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="COUNTS.npz to write.")
def bigrams(corpus: tuple[str, ...], tokenizer: str, out: Path) -> None:
    """Count the bigrams of a corpus: text, JSON lines (.gz, .zst) and Parquet files, or folders of them."""
    from weightscope.bigrams import count_bigrams
    from weightscope.tokenizer import load_tokenizer

    counts = count_bigrams([Path(path) for path in corpus], load_tokenizer(_resolved(tokenizer)))
    counts.save(out)
    click.echo(f"{out}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.pairs:,} pairs")


def _tokenizer_if_any(source: str, needed: bool) -> Any:
    """The checkpoint's tokenizer, which shows whether counts are its own; None where it has none and none is needed."""
    from weightscope.tokenizer import load_tokenizer

    try:
        return load_tokenizer(source)
    except CheckpointError:
        if needed:
            raise
        return None


def _whole_numbers(text: str, option: str) -> tuple[int, ...]:
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


def _say_caveats(caveats: Sequence[str]) -> None:
    for caveat in caveats:
        click.echo(f"not in these numbers: {caveat}")


def _resolved(source: str) -> str:
    """`embedded` is the checkpoint that comes with weightscope, unless a folder of that name stands here."""
    if source == "embedded" and not Path(source).exists():
        from weightscope.embedded import FOLDER

        return str(FOLDER)
    return source
