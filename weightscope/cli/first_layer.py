"""The first layer as a function of tokens and positions: detok, neighbours, positions; bigrams for it to be held to."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli.options import (
    delta_option,
    device_option,
    layer_option,
    out_option,
    say_caveats,
    with_engine,
    with_model,
    with_source,
    writable,
)
from weightscope.errors import CheckpointError, printable


@click.command()
@with_source
@click.option(
    "--counts", type=click.Path(dir_okay=False, path_type=Path), help="Bigram counts (see `weightscope bigrams`)."
)
@out_option
@layer_option
@delta_option
@device_option
@click.option("--token", "tokens", multiple=True, help="Draw this token's ROC curves; may be repeated.")
@with_engine
def detok(
    named: Any,
    source: str,
    counts: Path | None,
    out: Path,
    layer: int,
    delta: int,
    device: str,
    tokens: tuple[str, ...],
    engine: Any,
) -> None:
    """Bigram AUROC of every head over the full vocabulary, as tables, figures and a page."""
    from weightscope.detokenization.first_layer import FirstLayer
    from weightscope.detokenization.heads import RankingElsewhere, detokenize, roc_curves, write_detokenization
    from weightscope.detokenization.page import detok_sections
    from weightscope.embedded import COUNTS, FOLDER
    from weightscope.pages.page import write_page
    from weightscope.text.counts import load_counts
    from weightscope.text.tokenizer import token_id, tokenizer_hash

    whence = named(source)
    model = whence.open()
    if counts is None and model.checkpoint.folder != FOLDER:
        raise click.UsageError(
            "--counts is needed; `weightscope bigrams CORPUS --tokenizer SOURCE --out COUNTS.npz` makes them"
        )
    first, n_tokens = FirstLayer(model, layer, delta, device), model.embeddings.n_tokens
    bigrams = load_counts(counts or COUNTS)
    tokenizer = _tokenizer_if_any(model.source, needed=bool(tokens))
    bigrams.check(n_tokens, tokenizer and tokenizer_hash(tokenizer))
    chosen = {text: token_id(tokenizer, text) for text in tokens}
    found = detokenize(first, bigrams, engine, RankingElsewhere.of(whence, first, counts))
    curves = roc_curves(first, bigrams, chosen)
    write_detokenization(found, out)
    lead, sections = detok_sections(found, curves, bigrams, out)
    write_page(out, "report.html", f"Detokenization in layer {layer} of {model.name}", lead, sections)
    for row in found.table:
        click.echo(f"head {row.head:3d}  auroc {row.auroc:.3f}  auroc_paper {row.auroc_paper:.3f}")
    say_caveats(first.attention.caveats)
    click.echo(f"{out / 'report.html'}")


@click.command()
@with_model
@click.argument("token")
@click.option("--head", "heads", type=int, multiple=True, help="Only this head; may be repeated.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Previous tokens a head.")
@layer_option
@delta_option
@click.option(
    "--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), callback=writable,
    help="Write the table here too.",
)  # fmt: skip
def neighbours(
    model: Any, token: str, heads: tuple[int, ...], top: int, layer: int, delta: int, csv_file: Path | None
) -> None:
    """The previous tokens that each head scores highest for TOKEN (write " Jackson" for one that opens a word)."""
    from weightscope.detokenization.first_layer import FirstLayer
    from weightscope.detokenization.neighbours import neighbours as rank
    from weightscope.detokenization.neighbours import write_neighbours
    from weightscope.text.tokenizer import load_tokenizer, token_id

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
    say_caveats(first.attention.caveats)


@click.command()
@with_model
@out_option
@click.option("--query", type=int, help="The query position i; 500 by default, or the last of a shorter model.")
@click.option("--unscaled", is_flag=True, help="Bare numerators, no sigma: needs no token embedding.")
@click.option("--head", "heads", type=int, multiple=True, help="Draw Fig. 3 of this head; may be repeated.")
@device_option
def positions(model: Any, out: Path, query: int | None, unscaled: bool, heads: tuple[int, ...], device: str) -> None:
    """T^p and T^pp of every head at one query position, their trends, and Fig. 3 of the paper."""
    from weightscope.detokenization.first_layer import FirstLayer
    from weightscope.detokenization.position_page import position_sections
    from weightscope.detokenization.positions import head_trends, position_terms, write_positions

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


@click.command()
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help="SOURCE of the tokenizer: tokenizer.json, or vocab.json and merges.txt."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, callback=writable,
    help="COUNTS.npz to write.",
)  # fmt: skip
def bigrams(corpus: tuple[str, ...], tokenizer: str, out: Path) -> None:
    """Count the bigrams of a corpus: text, JSON lines (.gz, .zst) and Parquet files, or folders of them."""
    from weightscope.embedded import resolved
    from weightscope.text.bigrams import count_bigrams
    from weightscope.text.tokenizer import load_tokenizer

    counts = count_bigrams([Path(path) for path in corpus], load_tokenizer(resolved(tokenizer)))
    counts.save(out)
    click.echo(f"{out}: {counts.documents:,} documents, {counts.tokens:,} tokens, {counts.pairs:,} pairs")


def _tokenizer_if_any(source: str, needed: bool) -> Any:
    """The checkpoint's tokenizer, which shows whether counts are its own; None where it has none and none is needed."""
    from weightscope.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(source)
    except CheckpointError:
        if needed:
            raise
        return None
