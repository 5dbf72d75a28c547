"""The detokenization analysis of a model's first attention layer, end to end (papers: "Detokenization from weights").

    python -m analyses.gpt2_detok --model gpt2 --out figures/gpt2-detok

Loads the checkpoint and its bigram counts (counting OpenWebText's first shards when there are none), then computes what
the paper reports: the AUROC of every head (Table 2), ROC curves (Fig. 2), the previous tokens that heads look for
(Tables 1 and 3), and the position terms (Fig. 3); with PyTorch installed (the extra `runner`) also what the layer does
on text (section 5, Fig. 4). Where the Hub cannot be reached it runs on the checkpoint that comes
with weightscope, and says so.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
from tokenizers import Tokenizer

from analyses.inputs import device_option, documents, out_option
from weightscope import CheckpointError, open_model
from weightscope.cli.command import EndsInOneLine
from weightscope.detokenization.first_layer import FirstLayer
from weightscope.detokenization.heads import detokenize, roc_curves, write_detokenization
from weightscope.detokenization.neighbours import neighbours, write_neighbours
from weightscope.detokenization.on_text import EmpiricalCheck, empirical_check, write_empirical
from weightscope.detokenization.on_text_page import empirical_section
from weightscope.detokenization.page import detok_sections, neighbour_section
from weightscope.detokenization.position_page import position_sections
from weightscope.detokenization.positions import head_trends, position_terms, write_positions
from weightscope.device import open_device
from weightscope.embedded import COUNTS, FOLDER
from weightscope.folder import remove_earlier
from weightscope.model import Model
from weightscope.pages.page import write_page
from weightscope.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.text.bigrams import count_bigrams
from weightscope.text.counts import Counts, load_counts
from weightscope.text.inputs import openwebtext
from weightscope.text.sequences import token_windows
from weightscope.text.tokenizer import load_tokenizer, token_id, tokenizer_hash

PAPER_TOKENS = ("iens", " Jackson", "tarian", " Obama", " Korea", " chloride")  # Tables 1 and 3
EMBEDDED_TOKENS = ("ibility", "ement", "riety", "iamond", "ishop", "'t")
SHARDS = 2
TEXTS = 50  # of section 5
OPTIONAL_RESULTS = (  # position terms, and what happens on text
    r"(positions|contributions)\.npz|(trends|contributions)\.csv"
    r"|(positions-all-heads|contributions|(positions|empirical)-head-\d+)\.(png|svg)"
)


def open_or_embedded(source: str) -> tuple[Model, bool]:
    """The model asked for, or the embedded one where that is the Hub's gpt2 and the Hub cannot give it."""
    if source == "embedded":
        return open_model(FOLDER), True
    try:
        return open_model(source), False
    except CheckpointError as error:
        if source != "gpt2":
            raise
        click.echo(f"{error}: using the checkpoint that comes with weightscope instead")
        return open_model(FOLDER), True


def openwebtext_counts(tokenizer: Tokenizer) -> Counts:
    """Bigram counts of the first shards of OpenWebText by this tokenizer, counted once and kept under counts/."""
    cache = Path(f"counts/openwebtext-{tokenizer_hash(tokenizer)[:12]}.npz")
    if cache.exists():
        return load_counts(cache)
    try:
        files = openwebtext(SHARDS)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; give COUNTS= made by `weightscope bigrams`") from None
    counts = count_bigrams(files, tokenizer)
    counts.save(cache)
    return counts


def single_tokens(tokenizer: Tokenizer, counts: Counts, texts: Sequence[str]) -> dict[str, int]:
    """Ids, by their text, of those texts that are one token in this vocabulary and follow some token in the counts."""
    found = {}
    for text in texts:
        with suppress(CheckpointError):
            found[text] = token_id(tokenizer, text)
    return {text: token for text, token in found.items() if len(counts.row(token)[0])}


def on_text(first: FirstLayer, paths: Sequence[str], query: int) -> EmpiricalCheck | None:
    """Section 5, where the model can be run: texts prefixed with <|endoftext|> and cut at the last position."""
    texts = documents(paths)
    n_positions = len(first.model.embeddings.positions)
    try:
        runner = open_runner(first.model, device=first.device)
        windows = token_windows(framing_of(first.model), texts, TEXTS, n_positions)
        if not windows:
            raise CheckpointError(f"no text here has {n_positions} tokens; give longer ones with TEXT=")
        return empirical_check(first, runner, windows, query)
    except CheckpointError as error:
        click.echo(f"what the layer does on text is left out: {error}")
        return None


@click.command("gpt2-detok", cls=EndsInOneLine)
@click.option("--model", default="gpt2", show_default=True, help="Folder, .safetensors file or Hub id.")
@click.option("--counts", "counts_file", type=click.Path(dir_okay=False, path_type=Path), help="Bigram counts to use.")
@click.option("--text", multiple=True, help="Text files or folders for section 5; may be repeated.")
@out_option("figures/gpt2-detok")
@device_option
def main(model: str, counts_file: Path | None, text: tuple[str, ...], out: Path, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    run(model, counts_file, text, out, device)


def run(source: str, counts_file: Path | None, text: Sequence[str], out: Path, device: str) -> None:
    # load
    open_device(device)  # whether it is there shows before anything is read
    model, embedded = open_or_embedded(source)
    first, n_tokens = FirstLayer(model, device=device), model.embeddings.n_tokens
    tokenizer = load_tokenizer(model.source)
    if counts_file is not None:
        counts = load_counts(counts_file)
    else:
        counts = load_counts(COUNTS) if embedded else openwebtext_counts(tokenizer)
    counts.check(n_tokens, tokenizer_hash(tokenizer))
    tokens = single_tokens(tokenizer, counts, EMBEDDED_TOKENS if embedded else PAPER_TOKENS)

    # compute
    detokenization = detokenize(first, counts)
    curves = roc_curves(first, counts, dict(list(tokens.items())[:2]))
    best = [row.head for row in detokenization.table[:3]]
    found = [n for token in tokens.values() for n in neighbours(first, tokenizer, token, 5, best)]
    terms = None if model.positions is None else position_terms(first)
    trends = [] if terms is None else head_trends(terms)
    seen = None if terms is None else on_text(first, text, terms.query)

    # write and draw
    remove_earlier(out, OPTIONAL_RESULTS)
    write_detokenization(detokenization, out)
    write_neighbours(found, out / "neighbours.csv")
    lead, sections = detok_sections(detokenization, curves, counts, out)
    sections.append(neighbour_section(found, list(tokens)))
    if terms is not None:
        write_positions(terms, trends, out)
        sections += position_sections(terms, trends, out)
        if seen is not None:
            write_empirical(seen, out)
            nearest = max(trends, key=lambda trend: trend.near_mass).head
            sections.append(empirical_section(seen, terms.attention(), nearest, out))
    name = "the checkpoint that comes with weightscope" if embedded else model.name
    write_page(out, "report.html", f"Detokenization in the first attention layer of {name}", lead, sections)

    for row in detokenization.table:
        click.echo(f"head {row.head:2d}  AUROC {row.auroc:.3f}  (paper's mean {row.auroc_paper:.3f})")
    click.echo(f"report: {out / 'report.html'}")


if __name__ == "__main__":
    main()
