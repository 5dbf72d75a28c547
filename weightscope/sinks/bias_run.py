"""The sink-as-bias paper's experiments on one model, and the tables they leave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.folder import write_csv, write_npz
from weightscope.model import Model
from weightscope.runner.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.sinks.bias import Decomposition, LayerMeasures, measure_updates, updates_of
from weightscope.sinks.patching import PatchingTable, patching_table
from weightscope.sinks.prediction import PREDICTORS, predict_sinks, prediction_aurocs
from weightscope.text.sequences import Framing, excerpts, token_windows
from weightscope.text.tokenizer import token_text

CHARACTERS = (1500, 2000)  # of a text that perplexity is measured on (section 4.1)
TOKENS_SHOWN = 256  # of the picture (Fig. 5)
MEASURES = (
    "ratio", "spectral_sink", "spectral_context", "spectral_others", "variance_sink", "variance_context",
    "variance_others", "norm_sink", "norm_others", "norm_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much text.

    Attributes
    ----------
    texts, tokens : int
        What updates are measured and mu_sink is averaged over; the paper takes 100 texts of 512 tokens.
    evaluated : int
        Texts of 1,500 to 2,000 characters that perplexity is measured on; the paper takes 100.
    """

    texts: int = 100
    tokens: int = 512
    evaluated: int = 100


@dataclass(frozen=True)
class SinkBias:
    """What was found of one model.

    Attributes
    ----------
    name : str
    biased : bool
        Its attention has biases: b_Q, b_K, b_V or b_O.
    first : str
        The token that every text begins with; empty where each begins with its own.
    sizes : Sizes
        What there was of it: windows may be cut to the model's context, texts may run out.
    layers : dict of int to LayerMeasures
        Eqs 2-6.
    patching : PatchingTable
        Table 1.
    predicted : dict of (n_layers, n_heads) arrays
        What the weights alone said, by predictor.
    aurocs : dict of float
        How well each predictor ranks the heads by whether they sink.
    shown : Decomposition
        One layer's updates on one text (Fig. 5).
    layer_shown : int
        The one whose heads sink most.
    """

    name: str
    biased: bool
    first: str
    sizes: Sizes
    layers: dict[int, LayerMeasures]
    patching: PatchingTable
    predicted: Mapping[str, np.ndarray]
    aurocs: Mapping[str, float]
    shown: Decomposition
    layer_shown: int

    @property
    def strength(self) -> np.ndarray:
        """(n_layers, n_heads): attention that the average query gives token 0."""
        return np.stack([measures.strength for measures in self.layers.values()])


def sink_bias(model: Model, texts: Sequence[str], sizes: Sizes, *, first: bool = True, device: str = "cpu") -> SinkBias:
    """Predict, measure, patch.

    mu_sink comes from every other document, perplexity from those between: they share none.

    Parameters
    ----------
    model : Model
        Of a causal language model.
    texts : sequence of str
        Documents, two or more.
    sizes : Sizes
    first : bool
        Every text begins with the model's first token; otherwise with whatever it begins with.

    Raises
    ------
    CheckpointError
        There is too little text, or the model is not causal or cannot be run.
    """
    framing = framing_of(model)
    begin = framing.special[0]
    if not first:
        framing = Framing(framing.tokenizer)
    longest = min(sizes.tokens, model.config.n_positions or sizes.tokens)
    measured = token_windows(framing, texts[::2], sizes.texts, longest)
    passages = excerpts(texts[1::2], sizes.evaluated, CHARACTERS)
    evaluated = [np.array(framing.begun(passage))[: model.config.n_positions] for passage in passages]
    if not measured or not evaluated:
        problem = f"windows of {longest} tokens in every other document and texts of {CHARACTERS[0]} characters or more"
        raise CheckpointError(f"too little text: {problem} in those between are needed")

    runner = open_runner(model, language=True, device=device)
    layers = measure_updates(runner, measured)
    predicted = predict_sinks(model, begin)  # now that the model is known to be causal
    table = patching_table(runner, {index: found.mu for index, found in layers.items()}, evaluated)
    layer = max(layers, key=lambda index: float(layers[index].strength.mean()))
    return SinkBias(
        name=model.name,
        biased=has_biases(model, min(layers)),
        first=token_text(framing.tokenizer, begin) if first else "",
        sizes=Sizes(len(measured), longest, len(evaluated)),
        layers=layers,
        patching=table,
        predicted=predicted,
        aurocs=prediction_aurocs(predicted, np.stack([found.strength for found in layers.values()])),
        shown=updates_of(runner, measured[0][:TOKENS_SHOWN], layer),
        layer_shown=layer,
    )


def write_sink_bias(found: SinkBias, out: Path) -> None:
    """Write layers.csv, heads.csv, patching.csv and mu_sink.npz.

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """
    rows = [[index, *(getattr(layer, name) for name in MEASURES)] for index, layer in found.layers.items()]
    write_csv(out / "layers.csv", ("layer", *MEASURES), rows)
    names = [each.name for each in PREDICTORS if each.name != "layer"]
    heads = [
        [index, head, strength, *(float(found.predicted[name][at, head]) for name in names)]
        for at, (index, layer) in enumerate(found.layers.items())
        for head, strength in enumerate(layer.strength)
    ]
    write_csv(out / "heads.csv", ("layer", "head", "strength", *names), heads)
    base = found.patching.baseline
    patched = [(r.layers, r.intervention, r.start, r.perplexity, r.change, *r.interval) for r in found.patching.rows]
    header = ("layers", "intervention", "first_position", "perplexity", "change", "change_low", "change_high")
    write_csv(out / "patching.csv", header, [("none", "none", 0, base, 0.0, np.nan, np.nan), *patched])
    mu = np.stack([layer.mu for layer in found.layers.values()]).astype(np.float32)
    write_npz(out / "mu_sink.npz", layers=np.array(list(found.layers)), mu_sink=mu)


def has_biases(model: Model, layer: int) -> bool:
    """Whether attention's projections have biases of their own; the beta of a norm before them is none."""
    family = model.family
    modules = tuple(f"{name}.bias" for name in (family.query, family.key, family.value, family.output) if name)
    return any(tensor.name.endswith(modules) for tensor in model.attention_tensors(layer))
