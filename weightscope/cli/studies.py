"""The commands circuits, norms, outliers and sinks."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import folder_for, headline, is_quiet, print_json, say_page, show


@command(
    "What each head does, and which heads read which.",
    [
        "weightscope circuits embedded --out circuits/",
        "weightscope circuits model/ --out circuits/ --layers 0-7 --top 50",
        "weightscope circuits model/ --out circuits/ --measure",
    ],
)
@options.with_source
@options.tokenizer
@options.page_folder
@click.option(
    "--layers", help="Layers to analyse, such as 0-3 or 0,5,7-9; default: every attention layer."
)
@options.number("--top", "Number of edges of each kind, by each measure.", 20)
@options.counts(
    "Bigram counts (see `weightscope bigrams`), to find detokenization heads in the first layer."
)
@click.option(
    "--reader",
    metavar="HEAD",
    help="A head such as 9.9: also write which singular component of every earlier head it reads "
    "most.",
)
@options.file_to_read(
    "--pairs", "CSV file of pairs, such as France,Paris: also write which heads map them."
)
@options.flag("--measure", "Also run the model and report how well the names hold (PyTorch).")
@click.option(
    "--text",
    "texts",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Text to run it on, a file or a folder; default: public-domain prose.",
)
@options.json
@options.device
@options.with_engine
def circuits_command(
    named: Any,
    source: str,
    out: Path | None,
    layers: str | None,
    top: int,
    counts: Path | None,
    reader: str | None,
    pairs: Path | None,
    measure: bool,
    texts: tuple[Path, ...],
    as_json: bool,
    device: str,
    engine: Any,
) -> None:
    """Name every head by what it does and find which heads read what earlier heads write."""
    from weightscope.heads.circuits.circuits import Circuits, circuits, read_by
    from weightscope.heads.circuits.names import GIVEN
    from weightscope.heads.circuits.relations import relation

    chosen = None if layers is None else options.whole_numbers(layers, "--layers")
    opened = named(source)
    model = options.opened_model(opened)
    on_worker = opened.as_seen(model).elsewhere if engine.elsewhere else None
    with folder_for(Circuits, out) as folder:
        tables = {}
        if reader is not None:
            tables["components.csv"] = read_by(model, reader)
        mapped = None if pairs is None else relation(model, pairs)
        if mapped is not None:
            tables["relations.csv"] = mapped.table
        result = circuits(model, chosen, top, device, counts, engine, on_worker)
        if measure:
            from weightscope.heads.circuits.measured import measured

            result = measured(model, result, texts, device)
        if folder is not None:
            result.write_files(folder)
            for name, table in tables.items():
                folder.table(name, table)
    if as_json:
        print_json(result.as_json())
        return
    headline(result.lead)
    if mapped is not None:
        headline(mapped.lead)
    for role, heads in result.named.items():
        often, scores = GIVEN[role].often, result.scores_of(role)
        scored = (f"{head} ({score})" for head, score in zip(heads, scores, strict=True))
        headline(f"{role}{often and f', {often}'}: {', '.join(scored)}")
    if result.accuracy is not None and not is_quiet():
        show(result.accuracy.table)
    if out is None and tables:
        show(*tables.values())
    options.say_caveats(result.caveats)
    say_page(out)


# Studies that run the model, with PyTorch.

length_option = options.number("--length", "Longest input, in tokens.", 128, least=8)

# Options that belong to one question about sinks.
QUESTION_OPTIONS = {
    "bias": ("evaluated", "thorough", "paper"),
    "kind": ("images", "seed", "causal"),
}


def finish(study: Any, out: Path, as_json: bool) -> None:
    """Write a study's tables, figures and report, print its lines and the path of the report."""
    study.write(out)
    if as_json:
        print_json(study.as_json())
        return
    for line in study.printed():
        headline(line)
    say_page(out)


@command(
    "What attention adds up, by kind of token.",
    [
        "weightscope norms embedded --out norms/",
        "weightscope norms bert/ --text books/ --inputs 100 --out norms/",
    ],
)
@options.with_model
@options.tokenizer
@options.out
@options.text
@options.number("--inputs", "Number of inputs (pairs of paragraphs).", 992)
@length_option
@options.number("--seed", "Random seed for the choice of texts, pairs and heads.", 0, least=0)
@options.json
@options.runner_device
def norms(
    model: Any,
    out: Path,
    text: tuple[Path, ...],
    inputs: int,
    length: int,
    seed: int,
    as_json: bool,
    device: str,
) -> None:
    """Norm-based analysis: the norms of alpha f(x) compared with alpha, by kind of token.

    Writes tables, figures and report.html to --out.
    """
    from weightscope.heads.norms.measure import study_norms
    from weightscope.model.text.sequences import read_texts

    finish(study_norms(model, read_texts(text), inputs, length, seed, device), out, as_json)


@command(
    "Outlier dimensions, and their share of scores.",
    [
        "weightscope outliers embedded --out outliers/",
        "weightscope outliers bert/ --inputs 200 --out outliers/",
    ],
)
@options.with_model
@options.tokenizer
@options.out
@options.text
@options.number("--inputs", "Number of inputs (sentences) for the means.", 1500)
@options.number("--sample", "Average eq. 7 over N random inputs.", 100, metavar="N")
@length_option
@options.number("--seed", "Random seed for the choice of sentences.", 0, least=0)
@options.json
@options.runner_device
def outliers(
    model: Any,
    out: Path,
    text: tuple[Path, ...],
    inputs: int,
    sample: int,
    length: int,
    seed: int,
    as_json: bool,
    device: str,
) -> None:
    """Find outlier dimensions of the residual stream and their share of attention scores, by kind
    of token.

    Writes tables, figures and report.html to --out. From STS-B's sts-*.csv, the first sentence of
    each pair is read.
    """
    from weightscope.heads.outliers.measure import study_outliers
    from weightscope.model.text.sequences import read_sentences

    sentences = read_sentences(text)
    study = study_outliers(model, sentences, inputs, sample, length, seed, device)
    finish(study, out, as_json)


@command(
    "Attention sinks: bias, no-op or broadcast.",
    [
        "weightscope sinks embedded --question bias --out sinks/",
        "weightscope sinks vit/ --question kind --images photos/ --out sinks/",
    ],
)
@options.with_model
@options.tokenizer
@click.option(
    "--question",
    type=click.Choice(["bias", "kind"]),
    required=True,
    help="bias: is the sink's update a constant? kind: is each sink a NOP or a broadcast?",
)
@options.out
@options.text
@click.option(
    "--images",
    type=click.Path(path_type=Path),
    help="kind: a folder of images, for a vision model.",
)
@options.number("--inputs", "Number of inputs, texts or images.  [default: bias 12, kind 64]")
@options.number("--length", "Longest input, in tokens.  [default: bias 512, kind 256]", least=2)
@options.number("--seed", "kind: random seed for crops and texts.  [default: 0]", least=0)
@options.number(
    "--causal",
    "kind: also change what each sink head writes, and measure perplexity on so many texts.",
    metavar="TEXTS",
)
@options.number("--evaluated", "bias: number of texts for perplexity.  [default: 4]")
@options.flag("--thorough", "bias: 40 texts, 16 of them evaluated.")
@options.flag("--paper", "bias: the paper's sizes, 100 texts of 512 tokens and 100 evaluated.")
@options.flag("--own-first", "Do not prepend a first token; each text begins with its own.")
@options.json
@options.runner_device
def sinks(model: Any, question: str, out: Path, as_json: bool, **options: Any) -> None:
    """Study attention sinks: whether their update is a constant bias, or what kind each sink is.

    Writes tables, figures and report.html to --out.
    """
    for name in QUESTION_OPTIONS["kind" if question == "bias" else "bias"]:
        if options.pop(name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} cannot be used with --question {question}")
    study = _bias(model, **options) if question == "bias" else _kind(model, **options)
    finish(study, out, as_json)


def _bias(
    model: Any,
    *,
    text: tuple[Path, ...],
    inputs: int | None,
    length: int | None,
    evaluated: int | None,
    thorough: bool,
    paper: bool,
    own_first: bool,
    device: str,
) -> Any:
    from weightscope.heads.sinks.bias import TextSizes, sink_bias, sizes_of
    from weightscope.model.text.sequences import read_texts

    usual = sizes_of(thorough=thorough, paper=paper)
    sizes = TextSizes(inputs or usual.texts, length or usual.tokens, evaluated or usual.evaluated)
    texts = read_texts(text, characters=sizes.characters)
    return sink_bias(model, texts, sizes, first=not own_first, device=device)


def _kind(
    model: Any,
    *,
    text: tuple[Path, ...],
    images: Path | None,
    inputs: int | None,
    length: int | None,
    seed: int | None,
    causal: int | None,
    own_first: bool,
    device: str,
) -> Any:
    from weightscope.heads.sinks.mechanisms import read_inputs, sink_mechanisms
    from weightscope.runner import open_runner

    length = length or 256
    how: dict[str, Any] = {"length": length, "seed": seed or 0, "own_first": own_first}
    chosen = read_inputs(model, text, images, n=inputs or 64, **how)
    if causal is None:
        return sink_mechanisms(open_runner(model, device=device), chosen)
    from weightscope.heads.sinks.causal import sinks_and_changes
    from weightscope.model.text.sequences import CHARACTERS_A_TOKEN, read_texts
    from weightscope.runner.framing import framing_of

    framing_of(model)  # refuses models of images
    texts = read_texts(text, characters=2 * CHARACTERS_A_TOKEN * causal * length)
    runner = open_runner(model, language=True, device=device)
    return sinks_and_changes(runner, chosen, texts, n=causal, **how)
