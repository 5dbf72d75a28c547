"""The detokenization analysis of a model's first attention layer, end to end (papers: "Detokenization from weights").

    python -m analyses.recipes.gpt2_detok --model gpt2 --out out/gpt2-detok

Computes what the paper reports: the AUROC of every head (Table 2), ROC curves (Fig. 2), the previous tokens that heads
look for (Tables 1 and 3), and the position terms (Fig. 3), or the AUROC by distance of heads that rotate. With PyTorch
(the extra `runner`) it also runs the layer on text (section 5, Fig. 4). Bigrams come from --counts, else from --text,
else from the first shards of OpenWebText, or of Japanese Wikipedia for rinna/japanese-gpt-1b, the authors' other model.
If the Hub cannot be reached, it analyses the GPT-2 of two layers in this checkout.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from analyses.inputs import first_available, out_option
from analyses.recipes import detok_tables
from analyses.recipes.detok_tables import neighbour_section, printed_ranks, single_tokens
from tests.support.two_layers import FOLDER, TWO_LAYERS
from weightscope import CheckpointError
from weightscope.cli import options
from weightscope.cli.command import EndsInOneLine
from weightscope.core.files import OutputFolder
from weightscope.core.formulas import plain
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import FirstLayer, position_terms, ranked
from weightscope.heads.detok.heads import counts_for, measure_heads, roc_curves
from weightscope.heads.detok.on_text import TextCheck, run_on_texts
from weightscope.heads.detok.page import (
    RINNA,
    auroc_sections,
    is_of_paper,
    position_section,
    present,
    published,
    text_section,
)
from weightscope.model.text.bigrams import count_bigrams, openwebtext_counts
from weightscope.model.text.sequences import Texts, openwebtext, read_texts
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.report.pages.page import Filed, Section, write_page

WIKIPEDIA = ("wikimedia/wikipedia", "20231101.ja/")
TOKENS = ("ibility", "ement", "riety", "iamond", "ishop", "'t")


@click.command("gpt2-detok", cls=EndsInOneLine)
@click.option("--model", "source", default="gpt2", show_default=True, help="Folder, .safetensors file or Hub id.")
@click.option("--counts", "counts_file", type=click.Path(dir_okay=False, path_type=Path), help="Bigram counts to use.")
@click.option("--shards", default=2, show_default=True, type=click.IntRange(1), help="Shards of the corpus to count.")
@options.text
@out_option("out/gpt2-detok")
@options.device
def main(source: str, counts_file: Path | None, shards: int, text: tuple[Path, ...], out: Path, device: str) -> None:
    """Run the analysis and write tables, figures and report.html into OUT."""
    # load
    model = first_available([source, TWO_LAYERS] if source == "gpt2" else [source])
    try:
        model.embeddings  # noqa: B018  refuse a checkpoint without token embeddings before looking for a tokenizer
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; `weightscope positions --unscaled` draws Figs 3 and 4, left, without"
        ) from None
    small = model.checkpoint.folder == FOLDER
    name = "a GPT-2 of two layers" if small else model.name.removesuffix(".gguf")
    first, tokenizer = FirstLayer(model, device=device), Tokenizer.load(model.source)
    is_paper, n_heads = is_of_paper(model.name), len(first.heads)
    if counts_file is None and not small:
        corpus = WIKIPEDIA if published(model.name) is RINNA else ()
        counted = count_bigrams(text, tokenizer) if text else openwebtext_counts(tokenizer, shards, *corpus)
    counts = counts_for(model, counts_file or (None if small else counted))
    if small or is_paper:
        known = single_tokens(tokenizer, TOKENS if small else detok_tables.TOKENS)
        tokens = {text: token for text, token in known.items() if len(counts.row(token)[0])}
    else:
        tokens = detok_tables.word_endings(tokenizer, counts)
    texts = texts_to_run_on(text, counted=counts_file is None and not small)

    # compute
    auroc = measure_heads(first, counts)
    curves = roc_curves(first, counts, dict(list(tokens.items())[:2]))
    heads = present(detok_tables.HEADS_OF_TABLES, n_heads) if is_paper else auroc.ranked["head"][:3]
    ids, matrix = list(tokens.values()), counts.matrix(model.embeddings.n_tokens)
    previous = ranked(first, tokenizer, ids, top=detok_tables.TOP if is_paper else 5, heads=heads)
    previous = {"neighbours.csv": detok_tables.with_counts(previous, ids, matrix)}
    if is_paper:
        previous["printed.csv"] = printed_ranks(first, tokenizer)
    elif not small:
        heads = auroc.heads.sort("auroc_specific", descending=True)["head"][:3]
        specific = ranked(first, tokenizer, ids, 5, heads, less=detok_tables.shared_scores(first, matrix))
        previous["specific.csv"] = detok_tables.with_counts(specific, ids, matrix)
    rotated = detok_tables.by_distance(first, counts) if first.attention.rotation is not None else None
    terms = None if model.positions is None else position_terms(first)
    drawn = [] if terms is None else list(dict.fromkeys([int(auroc.ranked["head"][0]), terms.nearest_head()]))
    if is_paper:
        drawn = present([detok_tables.HEAD_OF_FIG_3, *drawn], n_heads)
    check = None if terms is None else check_or_reason(first, texts, terms.query)

    # write and draw
    with OutputFolder(out) as files:
        sections = [*auroc_sections(files, auroc, curves), neighbour_section(previous, list(tokens))]
        auroc.write_tables(files)
        files.table("baseline.csv", Table([Column(name, [value]) for name, value in auroc.controls.items()]))
        for file, table in previous.items():
            files.table(file, table)
        if rotated is not None:
            files.table("distances.csv", rotated)
            sections.append(Section("At which distance", parts=[Filed(rotated, "distances.csv")]))
        if terms is not None:
            terms.write_tables(files)
            sections.append(position_section(files, terms, drawn, model.name))
        if isinstance(check, TextCheck):
            check.write_tables(files)
            sections.append(text_section(files, check, terms, drawn))
        elif check is not None:
            sections.append(Section("What happens on text", f"Fig. 4 (section 5) was not drawn: {check}."))
        title = f"Detokenization in the first attention layer of {name}"
        write_page(
            files, "report.html", title, auroc.lead, sections, model=name, provenance=auroc.provenance,
            numbers=auroc.controls,
        )  # fmt: skip
    click.echo(auroc)
    click.echo(f"report: {out / 'report.html'}")


def texts_to_run_on(paths: Sequence[Path], *, counted: bool) -> Texts:
    """TEXT; else documents of OpenWebText where its shards were counted; else what comes with weightscope."""
    if counted and not paths:
        with suppress(CheckpointError):  # counts may be of an earlier run, and the Hub out of reach by now
            return read_texts(openwebtext(1))
    return read_texts(paths)


def check_or_reason(first: FirstLayer, texts: Texts, query: int) -> TextCheck | str:
    """Section 5; or, printed too, why the model cannot be run on these texts and what to do."""
    try:
        return run_on_texts(first, texts, query)
    except CheckpointError as error:
        click.echo(f"skipped the run on text: {error}")
        return plain(str(error))


if __name__ == "__main__":
    main()
