"""What weights alone tell of sinks, held to models that run: `figures/sinks-from-weights`.

    python -m analyses.experiments.sinks_from_weights --model SMOLLM2.gguf smollm2-135m-instruct.q4_1 sink-mechanisms/S

Each model is followed by two folders of figures/ with a heads.csv: in sink-bias, for the `strength` of heads on 100
texts of 512 tokens, and of another study, for what their strongest keys did. Writes

- aurocs.csv: how every reading of the weights ranks the heads that sink;
- ranks.csv: the effective rank of W_QK of sink heads, of others and of a random matrix, with AUROC; and the AUROC of
  chance, 95 % of 1,000 deals of the same labels to all heads, and of the same number to each layer's;
- massive.csv: the first token's massive activation;
- gains.csv: the gain of RMSNorm in its dimension over the median gain, in the layers before it and from it on; how many
  dimensions have a lower one (`lower`, a share), and how many are lower in this (medians over layers);
- kinds.csv: `sink_kind`, and what heads did when run, where either names a sink and it is the first token;
- tokens.csv: `sink_share`, and the attention to position 0 of texts when run, with special and ordinary tokens there.
"""

import re
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.study import auroc, rows_in, study, write
from weightscope.cli import options
from weightscope.core.files import Folder
from weightscope.core.tables import Column
from weightscope.heads.audit.measure import measure_layer
from weightscope.heads.circuits.names import SHORT, FirstTokenSinks, first_token_sinks, token_scores
from weightscope.heads.circuits.stream import follow_exactly, short_sequences
from weightscope.heads.sinks.bias import PREDICTORS, SINKS_ABOVE
from weightscope.heads.sinks.strength import sink_strength
from weightscope.model.metrics.sinks import NO_SINK, first_token_share
from weightscope.model.metrics.spectra import effective_rank
from weightscope.model.text.sequences import Framing, read_texts, token_windows
from weightscope.runner import Activations, open_runner
from weightscope.runner.framing import tokenizer_of

FIGURES = Path(__file__).parents[2] / "figures"
EVENT = 0.5  # a stricter line
DEALS = 1000
SPECIAL = re.compile(r"<\|?[a-z_]+\|?>|\[[a-z]+\]")  # near an end of the vocabulary
END = 300  # tokens
TOKENS, DRAWS = 12, 6  # tokens of each kind, and random continuations of each
TEXTS, LENGTH = 4, 32
TABLES = {
    "aurocs": ("line", "heads_with", "heads", "sink_share", "layer", "first_token",
               *(reading.name for reading in PREDICTORS[:-1])),
    "ranks": ("sinks", "heads_with", "heads", "size", "random", "of_sinks", "of_others", "auroc", "chance_low",
              "chance_high", "in_layer_low", "in_layer_high"),
    "massive": ("dimension", "layer", "value", "times_median", "written_by", "unit", "weight", "share"),
    "gains": ("norm", "layers", "gain", "lower", "dimensions_lower", "dimensions"),
    "kinds": ("layer", "head", "when_run", "ratio_out", "sink_share", "sink_kind"),
    "tokens": ("token", "kind", "sink_share", "when_run"),
}  # fmt: skip
Rows = list[list[Any]]


def massive_row(sinks: FirstTokenSinks) -> list[Any]:
    """The first token's massive activation, and the weight that writes most of it."""
    massive, weight = sinks.massive, sinks.super_weight
    if massive is None or weight is None:
        return [np.nan] * len(TABLES["massive"])
    return [massive.dimension, massive.layer, massive.value, massive.times_median,
            weight.layer, weight.unit, weight.weight, weight.share]  # fmt: skip


def gain_rows(model: ws.Model, sinks: FirstTokenSinks) -> Rows:
    """The gain of the norms before attention and before the feed-forward network in the massive dimension."""
    row, rows = model.family.mlp, []
    if sinks.massive is None or row is None or row.norm is None:
        return []
    stored = [model.under(model.family.stored_name(model.config, index)) for index in model.attention_layers]
    gains = {
        "attention": [model.layer(index).norm.gamma for index in model.attention_layers],
        "feed-forward": [row.norm.read(tensors, model.config).gamma for tensors in stored],
    }
    for norm, of_layers in gains.items():
        size = np.abs(np.stack(of_layers))  # (L, d)
        places = size.argsort(axis=1).argsort(axis=1) / (size.shape[1] - 1)
        relative = size[:, sinks.massive.dimension] / np.median(size, axis=1)
        for name, part in (("before", slice(sinks.massive.layer)), ("from it on", slice(sinks.massive.layer, None))):
            lower = np.median(places[part], axis=0)  # (d,)
            place = lower[sinks.massive.dimension]
            rows.append([norm, name, np.median(relative[part]), place, int((lower < place).sum()), len(lower)])
    return rows


def rank_row(label: str, rank: np.ndarray, sink: np.ndarray, model: ws.Model) -> list[Any]:
    """The effective rank (L, H) of sink heads, (L, H) bool, and of others, and how it ranks them."""
    r = model.layer(model.attention_layers[0]).q.of(0)[0].shape[-1]
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((model.config.d_model, r)))[1] for _ in range(2))
    random = float(effective_rank(np.linalg.svd(left @ right.T, compute_uv=False)))
    deals = [auroc(-rank.ravel(), rng.permutation(sink.ravel())) for _ in range(DEALS)]
    in_layer = [auroc(-rank.ravel(), rng.permuted(sink, axis=1).ravel()) for _ in range(DEALS)]
    chance = [end for dealt in (deals, in_layer) for end in np.percentile(dealt, (2.5, 97.5))]
    medians = [np.median(rank[chosen]) for chosen in (sink, ~sink)]
    return [label, sink.sum(), sink.size, r, random, *medians, auroc(-rank.ravel(), sink.ravel()), *chance]


def token_rows(model: ws.Model, documents: list[str]) -> Rows:
    """Attention to special tokens and to ordinary ones in the first place: by the weights, and when run."""
    tokenizer = tokenizer_of(model)
    ids = sorted(tokenizer.tokens)
    marked = [token for token in (*ids[:END], *ids[-END:]) if SPECIAL.fullmatch(tokenizer.tokens[token])][:TOKENS]
    drawn = np.random.default_rng(0).choice(ids[END:-END], TOKENS, replace=False)
    first = np.array([*marked, *drawn])  # (T,)

    def beginning(sequences: np.ndarray) -> np.ndarray:  # (n texts, n) -> (T n texts, n)
        begun = np.tile(sequences, (len(first), 1))
        begun[:, 0] = np.repeat(first, len(sequences))
        return begun

    short = beginning(short_sequences(model, SHORT, DRAWS)[-DRAWS:])
    shares = [
        [first_token_share(of_token)[:, None] for of_token in np.split(seen.attention, len(first))]
        for seen in follow_exactly(model, short, max(model.attention_layers))
    ]
    runner, texts = open_runner(model, language=True), token_windows(Framing(tokenizer), documents, TEXTS, LENGTH)
    run = np.zeros((len(first) * len(texts), len(model.attention_layers)))

    def observer(seen: Activations) -> None:
        place = model.attention_layers.index(seen.layer.index)
        run[seen.inputs, place] = sink_strength(seen.attention[:, :, 1:])[:, :, 0].mean(axis=1)

    runner.observe(list(beginning(np.stack(texts))), observer)
    by_weights, measured = np.mean(shares, axis=(0, 2, 3)), run.reshape(len(first), -1).mean(axis=1)
    return [
        [repr(tokenizer.tokens[token]), "special" if place < len(marked) else "ordinary", share, attention]
        for place, (token, share, attention) in enumerate(zip(first.tolist(), by_weights, measured, strict=True))
    ]


def rows_of(source: str, folder: str, ran_in: str, documents: list[str]) -> dict[str, Rows]:
    """A model's rows of each table."""
    heads, ran = (rows_in(FIGURES / name / "heads.csv") for name in (f"sink-bias/{folder}", ran_in))
    model = ws.open_model(source)
    sinks = first_token_sinks(model, model.attention_layers, asked=True)
    strength = np.array([float(head["strength"]) for head in heads])
    readings = {reading.name: reading.sign * np.array([float(head[reading.name]) for head in heads])
                for reading in PREDICTORS}  # fmt: skip
    readings |= {"sink_share": sinks.share.ravel()}
    readings["first_token"] = np.concatenate([scores["first_token"] for _, scores in token_scores(model)])
    aurocs = [
        [line, sum(strength > line), len(strength), *(auroc(readings[name], strength > line) for name in names)]
        for names in [TABLES["aurocs"][3:]]
        for line in (SINKS_ABOVE, EVENT)
    ]
    spectra = [measure_layer(model.layer(index), {})["qk_singular_values"] for index in model.attention_layers]
    rank = effective_rank(np.stack(spectra))  # (L, H)
    labels = {"events": np.array([head["mechanism"] != "" for head in ran]), f"above {EVENT}": strength > EVENT}
    ranks = [rank_row(label, rank, sink.reshape(rank.shape), model) for label, sink in labels.items()]
    kinds: Rows = [
        [int(head["layer"]), int(head["head"]), head["mechanism"], float(head["ratio_out"]), float(share), str(kind)]
        for head, share, kind in zip(ran, sinks.share.ravel(), sinks.kind.ravel(), strict=True)
        if head["kind"] == "first" and (head["mechanism"] or kind != NO_SINK)
    ]
    tables = (aurocs, ranks, [massive_row(sinks)], gain_rows(model, sinks), kinds, token_rows(model, documents))
    return {name: [[folder, *row] for row in rows] for name, rows in zip(TABLES, tables, strict=True)}


@study("sinks-from-weights")
@click.option(
    "--model", "models", multiple=True, nargs=3, required=True, help="Checkpoint, and two folders under figures/."
)
@options.text
def main(files: Folder, models: tuple[tuple[str, str, str], ...], text: tuple[Path, ...]) -> None:
    """Hold every reading of each model's weights against the model when it runs."""
    documents = read_texts(text).texts
    of_models = [rows_of(*model, documents) for model in models]
    for name, header in TABLES.items():
        columns = [Column(cell, format=".3f") for cell in ("model", *header)]
        write(files, name, columns, [row for tables in of_models for row in tables[name]], echo=name != "kinds")


if __name__ == "__main__":
    main()
