"""Sinks as biases: predict which heads sink, measure their updates, patch (sink-as-bias paper)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy.special import softmax

from weightscope.core.errors import CheckpointError
from weightscope.core.files import arrays_in, new_file, regular_file, without_objects
from weightscope.core.progress import bar
from weightscope.core.tables import Column, Table, column
from weightscope.heads.sinks.strength import sink_strength
from weightscope.heads.sinks.updates import (
    Decomposition,
    UpdateMeasures,
    layers_table,
    measure_updates,
    sink_update,
    updates_of,
)
from weightscope.model.layers.layer import Layer
from weightscope.model.metrics.auroc import weighted_auroc
from weightscope.model.metrics.spectra import spectral_gap
from weightscope.model.model import Model
from weightscope.model.run_identity import UNREADABLE, RunIdentity
from weightscope.model.text.sequences import (
    CHARACTERS_A_TOKEN,
    Framing,
    Texts,
    excerpts,
    token_windows,
)
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import (
    Activations,
    Intervention,
    Observer,
    Runner,
    Study,
    losses_under,
    open_runner,
)

SAMPLE = 255  # tokens after the first
SINKS_ABOVE = 0.3  # attention that the average query gives token 0, as in Gu et al. 2024


class Predictor(NamedTuple):
    """One number per head that may predict whether it sinks."""

    name: str
    meaning: str  # explanation for a reader
    sign: int = 1  # 1 where large numbers should mean a sink, -1 where small ones should


PREDICTORS = (
    Predictor("qk_gap", "sigma1 / sigma2 of W_QK (content form)"),
    Predictor("key_bias", "b_QK of the first token's embedding minus the mean of the others"),
    Predictor("score_margin", "score of the first token's embedding minus the mean of the others"),
    Predictor(
        "embedding_strength", "attention to the first token when the layer is given bare embeddings"
    ),
    Predictor("value_ratio", "|f(x_0)| / mean |f(x_j)| of embeddings, smallest first", -1),
    Predictor("layer", "layer index (a baseline that reads no weights)"),
)
READINGS = PREDICTORS[:-1]  # the predictors that read weights


def predict_sinks(model: Model, first: int, seed: int = 0) -> Table:
    """Compute every predictor for every head from the attention weights and the embeddings."""
    embeddings = model.embeddings
    n = SAMPLE if model.positions is None else min(SAMPLE, len(model.positions) - 1)
    following = np.random.default_rng(seed).integers(embeddings.n_tokens, size=n)
    x = embeddings.rows(np.array([first, *following]))
    x = x if model.positions is None else x + model.positions[: len(x)]
    indices = bar(model.attention_layers, "heads that may sink", "layer")
    layers = {index: predict_layer(model.layer(index), x) for index in indices}
    heads = [
        (index, head) for index, values in layers.items() for head in range(len(values["qk_gap"]))
    ]
    layer_of, head_of = zip(*heads, strict=True)
    columns = [Column("layer", layer_of), Column("head", head_of)]
    for name, meaning, _ in READINGS:
        values = np.concatenate([by_name[name] for by_name in layers.values()])
        columns.append(Column(name, values, meaning=meaning))
    return Table(columns)


def predict_layer(layer: Layer, x: np.ndarray) -> dict[str, np.ndarray]:
    """The predictors of one layer's heads: x (n, d) -> (n_heads,)."""
    heads, z = layer.heads, layer.normalised(x)
    causal = np.tri(len(x), dtype=bool)[1:]  # (n - 1, n) queries from 1 on
    scores = layer.scores(x)[:, 1:].astype(np.float64)  # (H, n - 1, n)
    context = causal.copy()
    context[:, 0] = False
    of_others = np.where(context, scores, 0).sum(axis=-1) / context.sum(axis=-1)
    masked = np.where(causal, scores, -np.inf)
    if layer.sinks is not None:  # a sink is an extra key that takes attention and writes nothing
        more = np.broadcast_to(layer.sinks[:, None, None], (*masked.shape[:2], 1))
        masked = np.concatenate((masked, more), axis=-1)
    norms = np.linalg.norm(layer.values(x), axis=-1)  # (H, n)
    first = z[0] - z[1:].mean(axis=0)  # (d,)
    return {
        "qk_gap": np.array([float(spectral_gap(head.qk.svdvals())) for head in heads]),
        "key_bias": np.array([head.scale * float(head.qk_bias @ first) for head in heads]),
        "score_margin": (scores[:, :, 0] - of_others).mean(axis=-1),
        "embedding_strength": sink_strength(softmax(masked, axis=-1))[:, 0],
        "value_ratio": norms[:, 0] / norms[:, 1:].mean(axis=-1),
    }


class PredictorRow(NamedTuple):
    """A predictor and how well it finds the heads that sink."""

    name: str = column()
    meaning: str = column(symbol="reading")
    auroc: float = column(symbol="AUROC")


def prediction_aurocs(predicted: Mapping[str, np.ndarray] | Table, strength: np.ndarray) -> Table:
    """AUROC of each predictor, (n,), for heads that sink, by their measured strength, (n,)."""
    sinks = np.flatnonzero(strength > SINKS_ABOVE)
    rows = []
    for name, meaning, sign in PREDICTORS:
        values, auroc = sign * np.asarray(predicted[name], float), np.nan
        if np.ptp(values) != 0:
            auroc = weighted_auroc(values, sinks, np.ones(len(sinks), np.int64))
        rows.append(PredictorRow(name, meaning, auroc))
    return Table.of(PredictorRow, rows)


# Static Sink Patching: replace the sink's update by a constant while a model runs (section 4).

EARLY = 0.3  # share of the layers; the middle ones are the rest
LATE = 0.3  # share of the layers
PATCHED, ABLATED, NONE = "SSP", "ablation", "none"
STARTS = (0, 1)  # eq. 7 as written, and with token 0's own update kept
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles

# A layer index and its u_sink (n, d) -> the replacement, (n, d) or (d,).
Replacement = Callable[[int, np.ndarray], np.ndarray]


def replacing_sink(replacement: Replacement, layers: Sequence[int], start: int = 0) -> Observer:
    """An observer that replaces attention's output y by y - u_sink + replacement (eq. 7).

    u_sink is measured in the running model, with the layers below already patched.
    """
    patched = frozenset(layers)

    def observer(seen: Activations) -> np.ndarray | None:
        if seen.layer.index not in patched:
            return None
        new = seen.output.copy()
        for output, (x, attention) in zip(new, seen.each(), strict=True):
            update = sink_update(seen.layer, attention, x).rows()
            output[start:] += (replacement(seen.layer.index, update) - update)[start:]
        return new

    return observer


def constant(mu: Mapping[int, np.ndarray]) -> Replacement:
    """mu_sink of each layer: Static Sink Patching."""
    return lambda layer, _: mu[layer]


def nothing(layer: int, update: np.ndarray) -> np.ndarray:
    """Zero: the ablation that the paper compares with."""
    return np.zeros_like(update)


def layer_ranges(layers: Sequence[int]) -> dict[str, list[int]]:
    """Early (30 %), middle (40 %) and late (30 %) layers, and all, without empty ranges."""
    early, late = round(EARLY * len(layers)), round(LATE * len(layers))
    ranges = {
        "early": list(layers[:early]),
        "middle": list(layers[early : len(layers) - late]),
        "late": list(layers[len(layers) - late :]),
        "all": list(layers),
    }
    return {name: chosen for name, chosen in ranges.items() if chosen}


def perplexity(losses: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """exp of the mean loss per token, all texts pooled: losses (..., n), tokens (..., n)."""
    return np.exp(losses.sum(axis=-1) / tokens.sum(axis=-1))


def change_interval(
    losses: np.ndarray, baseline: np.ndarray, tokens: np.ndarray, seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval over texts of a change in perplexity, from (n,) of each."""
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    changes = perplexity(losses[drawn], tokens[drawn]) - perplexity(baseline[drawn], tokens[drawn])
    low, high = np.percentile(changes, INTERVAL)
    return float(low), float(high)


def text_losses(
    runner: Runner,
    mu: Mapping[int, np.ndarray],
    texts: Sequence[np.ndarray],
    kept: "Kept | None" = None,
) -> Table:
    """Loss of each text in nats, plain and under every intervention in each range of layers.

    The sink's update is replaced by mu_sink, `mu` (d,) of each layer, or by nothing. With `kept`,
    texts that an earlier run has finished are not run again.
    """
    means = {layer: mean.astype(np.float32) for layer, mean in mu.items()}
    replacements = {PATCHED: constant(means), ABLATED: nothing}
    work = list(product(STARTS, layer_ranges(sorted(mu)).items(), replacements))
    interventions = [
        Intervention(chosen, replacing_sink(replacements[how], chosen, start))
        for start, (_, chosen), how in work
    ]
    kept, mus = kept or Kept(None, runner.model), np.stack(list(means.values()))
    by_text = []
    for text in bar(texts, "evaluated", "text"):

        def losses(text: np.ndarray = text) -> dict[str, np.ndarray]:
            return {"losses": losses_under(runner, [text], interventions)}

        by_text.append(kept.get({"text": text, "mu": mus}, losses)["losses"])
    names = [NONE, *(f"{name}_{how}_{start}" for start, (name, _), how in work)]
    columns = [
        Column("text", np.arange(len(texts))),
        Column("tokens", [len(text) - 1 for text in texts]),
        *map(Column, names, np.concatenate(by_text, axis=1)),
    ]
    return Table(columns)


class PatchingRow(NamedTuple):
    """Perplexity under an intervention in a range of layers, as a row of patching.csv."""

    layers: str = column()
    intervention: str = column()
    first_position: int = column(symbol="first position")
    perplexity: float = column()
    change: float = column(symbol="change in perplexity")
    change_low: float = column(symbol="from")
    change_high: float = column(symbol="to")


def patching_table(losses: Table) -> Table:
    """Perplexity in each range of layers under every intervention of `text_losses` (Table 1)."""
    plain, tokens = losses[NONE], losses["tokens"]
    baseline = float(perplexity(plain, tokens))
    rows = [PatchingRow(NONE, NONE, 0, baseline, 0.0, np.nan, np.nan)]
    for under in losses.columns[3:]:
        name, how, start = under.name.split("_")
        changed = float(perplexity(under.values, tokens))
        low, high = change_interval(under.values, plain, tokens)
        rows.append(PatchingRow(name, how, int(start), changed, changed - baseline, low, high))
    return Table.of(PatchingRow, rows)


# The experiments on one model

CHARACTERS = (1500, 2000)  # characters of a text that perplexity is measured on (section 4.1)
TOKENS_SHOWN = 256  # tokens in the picture (Fig. 5)


@dataclass(frozen=True)
class TextSizes:
    """Amounts of text to use."""

    texts: int  # texts to measure updates and average mu_sink
    tokens: int
    evaluated: int  # texts of 1,500 to 2,000 characters that perplexity is measured on

    @property
    def characters(self) -> int:
        """Rough number of characters needed: mu_sink and perplexity use alternate documents."""
        return 2 * (CHARACTERS_A_TOKEN * self.texts * self.tokens + CHARACTERS[1] * self.evaluated)

    def __str__(self) -> str:
        name = f" ({SIZE_NAMES[self]})" if self in SIZE_NAMES else ""
        return f"{self.texts} texts of {self.tokens} tokens, {self.evaluated} evaluated{name}"


DEFAULT = TextSizes(texts=12, tokens=512, evaluated=4)
THOROUGH = TextSizes(texts=40, tokens=512, evaluated=16)
PAPER = TextSizes(texts=100, tokens=512, evaluated=100)
SIZE_NAMES = {DEFAULT: "the default", THOROUGH: "the thorough size", PAPER: "the size of the paper"}


def sizes_of(*, thorough: bool, paper: bool) -> TextSizes:
    """The sizes that options ask for; the larger of two."""
    if paper:
        return PAPER
    return THOROUGH if thorough else DEFAULT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SinkBias(Study):
    """The result for one model with L attention layers of H heads."""

    FIGURE, PAGE = "figures:updates_figure", "page:write_bias_page"
    TABLES: ClassVar = {
        **{f"{name}.csv": attrgetter(name) for name in ("layers", "heads", "patching", "losses")},
        "mu_sink.npz": lambda bias: {
            "layers": bias.layers["layer"],
            "mu_sink": bias.updates.mu.astype(np.float32),
        },
    }

    stored: str  # dtype of the attention matrices in the file, such as "Q4_1" or "F16"
    biased: bool  # True if attention has b_Q, b_K, b_V or b_O
    first: str  # the token that every text begins with; empty where each begins with its own
    sizes: TextSizes  # sizes used: windows may be cut to the model's context, texts may run out
    updates: UpdateMeasures  # eqs 2-6
    losses: Table  # one row per text: its loss in nats as it is and under every intervention
    predicted: Table  # one row per head: its predictors, from the weights alone
    aurocs: Table  # one row per predictor: its AUROC for heads that sink
    pictured: Decomposition  # one layer's updates on one text (Fig. 5)
    layer_shown: int  # the layer pictured, whose heads sink most

    @property
    def lead(self) -> str:
        """One model's result in two sentences, and where the texts come from."""
        return f"{self.sentences} Texts: {self.source}."

    @property
    def sentences(self) -> str:
        """One model's result in two sentences."""
        spectral = np.median(self.layers["spectral_sink"])
        variance = np.median(self.layers["variance_sink_mu"])
        own_mean = np.median(self.layers["variance_sink"])
        everywhere, from_1 = map(self.changes, STARTS)
        ssp, ablated = everywhere["all", PATCHED], everywhere["all", ABLATED]
        ssp_from_1, ablated_from_1 = from_1["all", PATCHED], from_1["all", ABLATED]
        return (
            f"{self.model}, {self.sizes}: in the median layer one direction holds {spectral:.0%} "
            f"of what token 0 writes; a constant from other texts is off by {variance:.0%} of its "
            f"squared length, and its own mean by {own_mean:.0%} (R of eq. 6). Put in its place in "
            f"all layers, the constant moves perplexity from {self.baseline:.2f} by {ssp:+.2f}, "
            f"and nothing in its place by {ablated:+.2f}; with position 0 left as it is, by "
            f"{ssp_from_1:+.2f} and {ablated_from_1:+.2f}."
        )

    def changes(self, start: int) -> dict[tuple[str, str], float]:
        """Changes in perplexity by range of layers and intervention, from position `start` on."""
        table = self.patching.where(self.patching["first_position"] == start)
        keys = zip(table["layers"], table["intervention"], strict=True)
        return dict(zip(keys, table["change"].tolist(), strict=True))

    @property
    def about(self) -> str:
        layers, heads = self.updates.strength.shape
        return f"{self.model}: {layers} layers of {heads} heads, {self.sizes.texts} texts"

    def printed(self) -> list[str]:
        """The result in two sentences."""
        return [self.sentences]

    def shown(self) -> list[Table]:
        """Perplexities, and the updates of each layer."""
        return [self.patching, self.layers]

    @property
    def layers(self) -> Table:
        """One row per layer: eqs 3, 5 and 6."""
        return self.updates.layers

    @cached_property
    def heads(self) -> Table:
        """One row per head: how strongly it sinks, and every predictor."""
        layer, head, *readings = self.predicted.columns
        meaning = "attention that the average query from position 1 on gives token 0"
        strength = Column("strength", self.updates.strength.ravel(), meaning=meaning)
        return Table([layer, head, strength, *readings])

    @cached_property
    def patching(self) -> Table:
        """Table 1; its first row is the model as it is."""
        return patching_table(self.losses)

    @property
    def predicted_tokens(self) -> int:
        """Number of tokens that the perplexities average over."""
        return int(self.losses["tokens"].sum())

    @property
    def baseline(self) -> float:
        """Perplexity of the model as it is."""
        return float(self.patching["perplexity"][0])

    @property
    def stem(self) -> str:
        """The model's name as part of a file's."""
        name = re.sub(r"\.(gguf|safetensors)$", "", self.model)
        return re.sub(r"[^\w.-]+", "-", name).strip("-.").lower()


class Kept:
    """Finished results of runs on one model, in a folder, named for all that they depend on.

    A file appears complete under its name or not at all; one that cannot be read is computed anew.
    Without a folder nothing is kept.
    """

    def __init__(self, folder: Path | None, model: Model) -> None:
        self.folder = folder
        self._of = RunIdentity.of_model(model) if folder else None

    def get(
        self, given: Mapping[str, np.ndarray], compute: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, Any]:
        """Get the result of `compute` for these arrays, from an earlier run if one finished it."""
        if self.folder is None or self._of is None:
            return compute()
        digests = {}
        for name, array in given.items():
            digests[name] = sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        path = self.folder / f"{self._of.also(**digests).digest}.npz"
        try:
            with regular_file(path) as file:
                return arrays_in(file)
        except UNREADABLE:
            arrays = compute()
        with new_file(path) as new:
            np.savez(new, **without_objects(arrays))
        return arrays


def _updates(runner: Runner, measured: Sequence[np.ndarray], kept: Kept) -> UpdateMeasures:
    """Run `measure_updates`, unless an earlier run has finished it."""

    def measure() -> dict[str, np.ndarray]:
        updates = measure_updates(runner, measured)
        layers = {f"layers_{column.name}": column.values for column in updates.layers.columns}
        return {"mu": updates.mu, "strength": updates.strength} | layers

    arrays = kept.get({"texts": np.stack(measured)}, measure)
    table = layers_table({name.removeprefix("layers_"): values for name, values in arrays.items()})
    return UpdateMeasures(table, arrays["mu"], arrays["strength"])


def sink_bias(
    model: Model,
    texts: Texts,
    sizes: TextSizes,
    *,
    first: bool = True,
    device: str = "cpu",
    keep: Path | None = None,
) -> SinkBias:
    """Predict, measure, patch.

    mu_sink comes from every other document, perplexity from those between: they share none.
    Updates, and the losses of each text, are kept in the folder `keep` as soon as they are
    computed: an interrupted run goes on there.
    """
    framing = framing_of(model)
    begin = framing.special[0]
    if not first:
        framing = Framing(framing.tokenizer)
    longest = min(sizes.tokens, model.config.n_positions or sizes.tokens)
    measured = token_windows(framing, texts.texts[::2], sizes.texts, longest)
    passages = map(framing.begun, excerpts(texts.texts[1::2], sizes.evaluated, CHARACTERS))
    evaluated = [np.array(tokens)[: model.config.n_positions] for tokens in passages]
    if not measured or not evaluated:
        problem = (
            f"windows of {longest} tokens in every other document and texts of "
            f"{CHARACTERS[0]} characters or more"
        )
        raise CheckpointError(f"too little text: {problem} in those between are needed")

    runner = open_runner(model, language=True, device=device)
    kept = Kept(keep, model)
    updates = _updates(runner, measured, kept)
    predicted = predict_sinks(model, begin)  # only after the model is known to be causal
    layers = updates.layers["layer"].tolist()
    losses = text_losses(runner, dict(zip(layers, updates.mu, strict=True)), evaluated, kept)
    stored = model.attention_tensors(layers[0])
    # projections alone: the beta of a norm before does not count
    biases = tuple(f"{name}.bias" for name in model.family.heads.projections if name)
    layer_shown = layers[int(updates.strength.mean(axis=1).argmax())]
    return SinkBias.of(
        runner,
        model=name_of(model),
        source=texts.source,
        stored=stored_in(model, layers[0]),
        biased=any(tensor.name.endswith(biases) for tensor in stored),
        first=framing.tokenizer.text(begin) if first else "",
        sizes=TextSizes(len(measured), longest, len(evaluated)),
        updates=updates,
        losses=losses,
        predicted=predicted,
        aurocs=prediction_aurocs(predicted, updates.strength.ravel()),
        pictured=updates_of(runner, measured[0][:TOKENS_SHOWN], layer_shown),
        layer_shown=layer_shown,
    )


def name_of(model: Model) -> str:
    """The model's title, or for GGUF its file name, which says how it is quantised."""
    name = model.checkpoint.name
    return name if name.endswith(".gguf") else model.title


def stored_in(model: Model, layer: int) -> str:
    """The dtypes of the attention matrices in the file; quantised models have their own."""
    matrices = [tensor for tensor in model.attention_tensors(layer) if len(tensor.shape) > 1]
    return " and ".join(sorted({tensor.dtype for tensor in matrices}))
