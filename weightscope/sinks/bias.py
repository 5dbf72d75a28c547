"""Is an attention sink a bias? The sink-as-bias paper's experiments on one model: predict, measure, patch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightscope.errors import CheckpointError
from weightscope.folder import Files
from weightscope.model import Model
from weightscope.runner.runner import open_runner
from weightscope.runner.tokenizer import framing_of
from weightscope.sinks.inputs import CHARACTERS_A_TOKEN
from weightscope.sinks.patching import patching_table
from weightscope.sinks.prediction import predict_sinks, prediction_aurocs
from weightscope.sinks.updates import Decomposition, UpdateMeasures, measure_updates, updates_of
from weightscope.tables import Column, Table
from weightscope.text.sequences import Framing, excerpts, token_windows
from weightscope.text.tokenizer import token_text

CHARACTERS = (1500, 2000)  # of a text that perplexity is measured on (section 4.1)
TOKENS_SHOWN = 256  # of the picture (Fig. 5)


@dataclass(frozen=True)
class Sizes:
    """How much text.

    Attributes
    ----------
    texts, tokens : int
        What updates are measured and mu_sink is averaged over.
    evaluated : int
        Texts of 1,500 to 2,000 characters that perplexity is measured on.
    """

    texts: int
    tokens: int
    evaluated: int

    @property
    def characters(self) -> int:
        """About how much text that takes: mu_sink and perplexity see every other document each."""
        return 2 * (CHARACTERS_A_TOKEN * self.texts * self.tokens + CHARACTERS[1] * self.evaluated)

    def __str__(self) -> str:
        name = SIZE_NAMES.get(self, "as asked for")
        return f"{self.texts} texts of {self.tokens} tokens, {self.evaluated} evaluated ({name})"


DEFAULT = Sizes(texts=12, tokens=512, evaluated=4)
THOROUGH = Sizes(texts=40, tokens=512, evaluated=16)
PAPER = Sizes(texts=100, tokens=512, evaluated=100)
SIZE_NAMES = {DEFAULT: "the default", THOROUGH: "the thorough size", PAPER: "the size of the paper"}


def sizes_of(*, thorough: bool, paper: bool) -> Sizes:
    """What an option asks for; the larger of two."""
    return PAPER if paper else THOROUGH if thorough else DEFAULT


@dataclass(frozen=True, eq=False, repr=False)
class SinkBias:
    """What was found of one model, of L attention layers and H heads.

    Attributes
    ----------
    model : str
        Its name.
    stored : str
        What the file keeps its attention's matrices in, as "Q4_1" or "F16".
    biased : bool
        Its attention has biases: b_Q, b_K, b_V or b_O.
    first : str
        The token that every text begins with; empty where each begins with its own.
    sizes : Sizes
        What there was of it: windows may be cut to the model's context, texts may run out.
    updates : UpdateMeasures
        Eqs 2-6.
    patching : Table
        Table 1; its first row is the model as it is.
    predicted_tokens : int
        How many tokens perplexities are over.
    predicted : Table
        What the weights alone said of every head, by predictor.
    aurocs : Table
        How well each predictor ranks the heads by whether they sink.
    shown : Decomposition
        One layer's updates on one text (Fig. 5).
    layer_shown : int
        The one whose heads sink most.
    """

    model: str
    stored: str
    biased: bool
    first: str
    sizes: Sizes
    updates: UpdateMeasures
    patching: Table
    predicted_tokens: int
    predicted: Table
    aurocs: Table
    shown: Decomposition
    layer_shown: int

    @property
    def layers(self) -> Table:
        """A row a layer: eqs 3, 5 and 6."""
        return self.updates.layers

    @cached_property
    def heads(self) -> Table:
        """A row a head: how strongly it sinks, and what the weights said."""
        layer, head, *readings = self.predicted.columns
        meaning = "attention that the average query from position 1 on gives token 0"
        return Table([layer, head, Column("strength", self.updates.strength.ravel(), meaning=meaning), *readings])

    @property
    def baseline(self) -> float:
        """Perplexity of the model as it is."""
        return float(self.patching["perplexity"][0])

    @property
    def stem(self) -> str:
        """The model's name as part of a file's."""
        name = re.sub(r"\.(gguf|safetensors)$", "", self.model)
        return re.sub(r"[^\w.-]+", "-", name).strip("-.").lower()

    def write(self, files: Files) -> None:
        """Write layers.csv, heads.csv, patching.csv and mu_sink.npz."""
        for name in ("layers", "heads", "patching"):
            files.table(f"{name}.csv", getattr(self, name))
        files.npz("mu_sink.npz", layers=self.layers["layer"], mu_sink=self.updates.mu.astype(np.float32))

    def __repr__(self) -> str:
        layers, heads = self.updates.strength.shape
        return f"SinkBias({self.model}: {layers} layers of {heads} heads, {self.sizes.texts} texts)"


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
    device : {"cpu", "cuda"}
        Where the model runs.

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
    updates = measure_updates(runner, measured)
    predicted = predict_sinks(model, begin)  # now that the model is known to be causal
    layers = updates.layers["layer"].tolist()
    patching = patching_table(runner, dict(zip(layers, updates.mu, strict=True)), evaluated)
    layer_shown = layers[int(updates.strength.mean(axis=1).argmax())]
    return SinkBias(
        model=name_of(model),
        stored=stored_in(model, layers[0]),
        biased=has_biases(model, layers[0]),
        first=token_text(framing.tokenizer, begin) if first else "",
        sizes=Sizes(len(measured), longest, len(evaluated)),
        updates=updates,
        patching=patching,
        predicted_tokens=sum(len(text) - 1 for text in evaluated),
        predicted=predicted,
        aurocs=prediction_aurocs(predicted, updates.strength.ravel()),
        shown=updates_of(runner, measured[0][:TOKENS_SHOWN], layer_shown),
        layer_shown=layer_shown,
    )


def name_of(model: Model) -> str:
    """Its title, or its GGUF file's own name, which says what it is quantised to; a package's around it does not."""
    name = model.checkpoint.name
    return name if name.endswith(".gguf") else model.title


def stored_in(model: Model, layer: int) -> str:
    """The dtypes of its attention's matrices in the file: a quantised model is another than the one it was made of."""
    return " and ".join(sorted({tensor.dtype for tensor in model.attention_tensors(layer) if len(tensor.shape) > 1}))


def has_biases(model: Model, layer: int) -> bool:
    """Whether attention's projections have biases of their own; the beta of a norm before them is none."""
    family = model.family
    modules = tuple(f"{name}.bias" for name in (family.query, family.key, family.value, family.output) if name)
    return any(tensor.name.endswith(modules) for tensor in model.attention_tensors(layer))
