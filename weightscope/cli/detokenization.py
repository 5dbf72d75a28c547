"""The commands about the first layer: detok, neighbours, positions, and bigrams for detok."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from weightscope.checkpoint.provenance import source_of
from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import (
    end_with,
    folder_for,
    headline,
    is_quiet,
    print_json,
    print_tables,
    say_page,
    show,
    write_text,
)
from weightscope.core.errors import CheckpointError, counted

LONG = 600  # seconds; a longer run is announced


@command(
    "Bigram AUROC of each head, over the full vocabulary.",
    [
        "weightscope detok embedded --out detok/",
        "weightscope detok gpt2/ --counts counts.npz --out detok/",
        "weightscope detok gpt2/ --counts counts.npz --out detok/ --sample 2000",
    ],
)
@options.with_source
@options.counts(
    "Bigram counts (see `weightscope bigrams`); by default of the public-domain works that "
    "come with weightscope."
)
@options.page_folder
@options.json
@options.layer
@options.delta
@options.device
@options.number(
    "--sample",
    "Score N random current tokens, with 95 % confidence intervals; 2000 give +-0.01.",
    metavar="N",
)
@click.option(
    "--token", "tokens", multiple=True, help="Draw the ROC curves of this token; may be repeated."
)
@options.token_id
@options.tokenizer
@options.with_engine
def detok(
    named: Any,
    source: str,
    counts: Path | None,
    out: Path | None,
    as_json: bool,
    layer: int,
    delta: int,
    device: str,
    sample: int | None,
    tokens: tuple[str, ...],
    token_ids: tuple[int, ...],
    engine: Any,
) -> None:
    """Compute the bigram AUROC of every head over the full vocabulary."""
    from weightscope.heads.detok.first_layer import FirstLayer
    from weightscope.heads.detok.heads import (
        BigramAuroc,
        ScorerOnWorker,
        counts_for,
        draw_tokens,
        measure_heads,
        roc_curves,
        seconds_of_all,
    )

    opened = named(source)
    model = options.opened_model(opened)
    model.embeddings  # noqa: B018  refuse a checkpoint without tokens before counting
    first = FirstLayer(model, layer, delta, device)
    bigrams = counts_for(model, counts)
    names, ids, _ = _tokens(model, tokens, token_ids)
    chosen = dict(zip(names, ids, strict=True))
    _say_bare(first)
    first.attention  # noqa: B018  refuse a missing layer before a folder is made
    drawn = None if sample is None else draw_tokens(first, bigrams, sample)
    if drawn is None and device == "cpu" and not engine.elsewhere:
        seconds = seconds_of_all(first, bigrams)
        if seconds > LONG:
            took = f"the full vocabulary takes about {seconds / 60:.0f} minutes on this machine"
            advice = "--sample 2000 estimates each AUROC to +-0.01 sooner"
            click.echo(f"weightscope: {took}; {advice}", err=True)
    curves = roc_curves(first, bigrams, chosen)
    with folder_for(BigramAuroc, out) as files:
        on_worker = ScorerOnWorker.of(opened, first, counts)
        auroc = measure_heads(first, bigrams, engine, on_worker, drawn)
        if files is not None:
            auroc.write_report(files, curves)  # before tables, which then imply finished figures
            auroc.write_tables(files)
    end_with(auroc, out, as_json)


@command(
    "The previous tokens that each head scores highest.",
    [
        'weightscope neighbours embedded " ship"',
        "weightscope neighbours embedded --token-id 11 --head 3 --top 5",
    ],
)
@options.with_model
@click.argument("token", required=False)
@options.token_id
@options.tokenizer
@click.option("--head", "heads", type=int, multiple=True, help="Only this head; may be repeated.")
@options.number("--top", "Number of previous tokens per head.", 10)
@options.layer
@options.delta
@options.csv
@options.json
def neighbours(
    model: Any,
    token: str | None,
    token_ids: tuple[int, ...],
    heads: tuple[int, ...],
    top: int,
    layer: int,
    delta: int,
    csv_file: Path | None,
    as_json: bool,
) -> None:
    """List the previous tokens that each head scores highest for TOKEN (write " Jackson" for a
    token with a space).
    """
    from weightscope.core.tables import Table
    from weightscope.heads.detok.first_layer import FirstLayer, ranked

    if token is None and not token_ids:
        raise click.UsageError("give a TOKEN or --token-id")
    first = FirstLayer(model, layer, delta)
    model.embeddings  # noqa: B018  refuse a checkpoint without tokens before its tokenizer
    _, ids, tokenizer = _tokens(model, () if token is None else (token,), token_ids)
    for head in heads:
        first.attention.head(head)
    _say_bare(first)
    table = ranked(first, tokenizer, ids, top, heads or None)
    if csv_file is not None:
        write_text(table.csv(), csv_file)
    if as_json:
        asked = ", ".join(repr(each) for each in ([token] if token is not None else token_ids))
        lead = f"Previous tokens that heads of layer {layer} score highest before {asked}."
        print_tables(lead, [model.checkpoint], neighbours=table)
        return
    columns = {name: table.column(name) for name in ("head", "rank", "score", "token", "joined")}
    quoted = [*map(repr, columns["token"].values)]  # quotes show a leading space
    columns["token"] = replace(columns["token"], values=quoted)
    if first.bare:
        columns["score"] = replace(columns["score"], symbol="score of bare embeddings")
    show(Table([*columns.values()]))
    options.say_digests(source_of(model.checkpoint))
    options.say_caveats(first.attention.caveats)


@command(
    "How heads weigh positions, or distances if they rotate.",
    [
        "weightscope positions embedded --out positions/",
        "weightscope positions gpt2/ --out positions/ --query 500 --head 7",
        "weightscope positions gpt2/ --out positions/ --unscaled --spread 0.14",
        "weightscope positions llama/ --out positions/ --layer 16 --head 0",
    ],
)
@options.with_model
@options.page_folder
@click.option(
    "--query",
    type=int,
    help="Query position i; default: 500, or the last position of a shorter model.",
)
@options.flag("--unscaled", "Read no token embedding: --spread gives sigma, the file numerators.")
@click.option(
    "--spread",
    type=click.FloatRange(0, min_open=True),
    metavar="S",
    help="With --unscaled: standard deviation of a token's embedding over its dimensions; "
    "default 0.14.",
)
@click.option(
    "--layer", type=int, help="Draw this layer's scores by distance (no position embeddings)."
)
@click.option(
    "--head",
    "heads",
    type=int,
    multiple=True,
    help="Draw this head, of --layer or 0; may be repeated.",
)
@options.counts(
    "Bigram counts: how often tokens occur, where scores are averaged over tokens "
    "(no position embeddings)."
)
@options.tokenizer
@options.flag("--on-text", "Also run the model on text and draw Fig. 4 (needs PyTorch).")
@options.text
@options.json
@options.device
def positions(
    model: Any,
    out: Path | None,
    query: int | None,
    unscaled: bool,
    spread: float | None,
    layer: int | None,
    heads: tuple[int, ...],
    counts: Path | None,
    on_text: bool,
    text: tuple[Path, ...],
    as_json: bool,
    device: str,
) -> None:
    """Compute what position does to the scores of heads.

    With position embeddings: T^p and T^pp of every head of layer 0 at one query position, their
    trends, and the paper's Fig. 3. Where heads rotate or add a bias by distance instead: the mean
    score by distance of every head of every layer, its spread over tokens, and which wavelengths
    heads use.
    """
    from weightscope.heads.detok.first_layer import FirstLayer, position_terms
    from weightscope.heads.detok.on_text import run_on_texts
    from weightscope.heads.detok.page import position_section, text_section
    from weightscope.heads.detok.positions import SPREAD, PositionTerms
    from weightscope.model.text.sequences import read_texts
    from weightscope.report.pages.page import write_page

    if spread is not None and not (unscaled and math.isfinite(spread)):
        problem = "is for --unscaled" if not unscaled else f"{spread} is no standard deviation"
        raise click.UsageError(f"--spread {problem}")
    if unscaled and (on_text or text):
        raise click.UsageError("--unscaled cannot be combined with --on-text, which needs sigma")
    if model.positions is None:
        given = {
            "--query": query is not None,
            "--unscaled": unscaled,
            "--on-text": on_text or bool(text),
            "--device": device != "cpu",
        }
        misplaced = [option for option, is_given in given.items() if is_given]
        _kernels(model, out, as_json, layer, heads, counts, misplaced)
        return
    if counts is not None or layer is not None:
        option = "--layer" if counts is None else "--counts"
        problem = f"{option} is for models without position embeddings"
        raise click.UsageError(f"{problem}; {model.family.name} has them")
    first = FirstLayer(model, device=device)
    for head in heads:
        first.attention.head(head)
    if not unscaled:
        try:
            model.embeddings  # noqa: B018  sigma needs token embeddings
        except CheckpointError as error:
            advice = "sigma needs one. `weightscope positions --unscaled` works without"
            raise CheckpointError(f"{error}; {advice}") from None
    into = folder_for(PositionTerms, out)
    terms = position_terms(first, query, unscaled, SPREAD if spread is None else spread)
    check = run_on_texts(first, read_texts(text), terms.query) if on_text or text else None
    with into as files:
        if files is not None:
            sections = [position_section(files, terms, heads, model.name)]
            terms.write_tables(files)
            if check is not None:
                check.write_tables(files)
                sections.append(text_section(files, check, terms))
            title = f"Position terms of layer 0 of {model.title}"
            about = {"model": model.title, "provenance": terms.provenance}
            write_page(files, "report.html", title, terms.lead, sections, **about)
    if as_json:
        print_json(terms.as_json())
        return
    for caution in terms.cautions:
        click.echo(f"weightscope: {caution}", err=True)
    headline(terms.headline)
    if not is_quiet():
        show(terms.heads.select("head", "t_p_slope", "t_pp_period", "near_mass"))
    say_page(out)


def _kernels(
    model: Any,
    out: Path | None,
    as_json: bool,
    layer: int | None,
    heads: Sequence[int],
    counts: Path | None,
    misplaced: Sequence[str],
) -> None:
    """Write the scores by distance of a model without position embeddings."""
    from weightscope.heads.circuits.stream import frequent_inputs
    from weightscope.heads.detok.kernels import PositionKernels, position_kernels

    if misplaced:
        why = f"scores by distance need no {misplaced[0]}"
        problem = f"{model.family.name} has no position embedding, and {why}; leave it out"
        raise CheckpointError(problem, file=model.checkpoint.name)
    drawn: list[int] = []
    if layer is not None or heads:
        chosen = model.layer(layer or 0)
        drawn = [chosen.head(head).index for head in heads] or [head.index for head in chosen.heads]
    into = folder_for(PositionKernels, out)
    kernels = position_kernels(model, counts, frequent_inputs(model))
    rows = [kernels.row(layer or 0, head) for head in drawn]
    with into as files:
        if files is not None:
            kernels.write_report(files, rows)
            kernels.write_tables(files)
    for caution in kernels.cautions:
        click.echo(f"weightscope: {caution}", err=True)
    end_with(kernels, out, as_json)


def _tokens(
    model: Any, texts: Sequence[str], ids: Sequence[int]
) -> tuple[list[str], list[int], Any]:
    """Names and ids of tokens given as text or ids, and the tokenizer, which ids do not need."""
    from weightscope.model.text.tokenizer import Tokenizer, token_names

    tokenizer: Any = None
    try:
        tokenizer = Tokenizer.load(model.tokenizer) if texts or ids else None
    except CheckpointError:
        if texts or model.tokenizer != model.source:
            raise
    known = [tokenizer.id_of(text) for text in texts] + list(ids)
    if known:
        model.embeddings.rows(known)  # raises if one is out of range
    return [*texts, *map(token_names(tokenizer), ids)], known, tokenizer


def _say_bare(first: Any) -> None:
    if first.heads and first.bare:  # first.heads refuses a missing layer
        click.echo(f"weightscope: {first.bare}", err=True)


@command(
    "Count the bigrams of a corpus, for detok.",
    ["weightscope bigrams books/ --tokenizer gpt2/ --out counts.npz"],
)
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--tokenizer",
    required=True,
    help="SOURCE of the tokenizer: a checkpoint, or a tokenizer's file.",
)
@options.file_to_write("--out", "-o", required=True, help="COUNTS.npz to write.")
@options.json
def bigrams(corpus: tuple[str, ...], tokenizer: str, out: Path, as_json: bool) -> None:
    """Count the bigrams of a corpus: files of text, JSON lines (.gz, .bz2, .zst) or Parquet, or
    folders of such files.
    """
    from weightscope.model.text.bigrams import count_bigrams
    from weightscope.model.text.tokenizer import Tokenizer

    counts = count_bigrams([Path(path) for path in corpus], Tokenizer.load(tokenizer))
    counts.save(out)
    sums = {"document": counts.documents, "token": counts.tokens, "pair": counts.pairs}
    lead = f"{out}: {', '.join(counted(count, what) for what, count in sums.items())}"
    if as_json:
        rows = [{"file": str(out)} | {f"{what}s": count for what, count in sums.items()}]
        print_tables(lead, (), counts=rows)
        return
    headline(lead)
