"""A checkpoint seen through its family: embeddings, layers and heads, read when asked for."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightscope.checkpoint.adapters.lora import with_adapter
from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.opening import adapter_in, open_checkpoint
from weightscope.core.errors import CheckpointError, counted, expected, printable, whole
from weightscope.core.results import ListsForUsers
from weightscope.model.config.reading import Reading, Stacks, decide, prefix_of, read_as
from weightscope.model.embeddings import Embeddings, Ends, Unembedding
from weightscope.model.layers.layer import Head, Layer, OnDemand
from weightscope.model.layers.maps import Norm
from weightscope.model.layers.read_layer import (
    attention_names,
    denied,
    denied_words,
    read_layer,
    rotation_of,
)
from weightscope.model.layers.rotation import Rotation
from weightscope.model.opened import Opened, open_source
from weightscope.model.rows.cells import LayerTensors
from weightscope.model.rows.family import Family
from weightscope.model.rows.own_names import names_sentence, unloaded_names
from weightscope.model.rows.table import FAMILIES

if TYPE_CHECKING:
    from weightscope.model.layers.mixer import Mixer
    from weightscope.model.rows.names import Tensors

__all__ = ["Embeddings", "Head", "Layer", "Model", "as_model", "open_model"]


def open_model(
    source: str | Path,
    revision: str | None = None,
    family: str | None = None,
    tower: str | None = None,
    tokenizer: str | None = None,
    base: str | Path | None = None,
    families: str | Path | None = None,
) -> "Model":
    """Open a checkpoint as a model. Headers and config are read, no tensor data.

    Parameters
    ----------
    source : str or Path
        A folder, a .safetensors file, or a Hub id with optional `@revision`; or "embedded", the
        checkpoint that comes with weightscope.
    revision : str, optional
        Branch, tag or commit on the Hub.
    family : str, optional
        Read the checkpoint as this family, whatever its config says.
    tower : str, optional
        One of `Model.stacks`: "text", "vision", "encoder", "decoder", "cross" ...; by default the
        one that is language.
    tokenizer : str, optional
        Where the tokenizer is, if not with the checkpoint; see `Tokenizer.find`.
    base : str or Path, optional
        Of a LoRA adapter the model that it changes; by default the one that its adapter_config.json
        names.
    families : path, optional
        A file of rows of architectures, as `weightscope adopt` saves them; they stand before those
        that come with weightscope. Those in the user's configuration folder are known without it,
        and stand behind.

    Raises
    ------
    CheckpointError
        The source is not there, is broken, or is of no known family; or it is an adapter that
        cannot be read exactly, or not one for this base.

    Examples
    --------
    >>> import weightscope as ws
    >>> ws.open_model("embedded")
    Model(gpt2: 4 layers of 6 heads, width 192)
    """
    if not isinstance(source, str | Path):
        raise expected(
            source, "source", "text or a path: a folder, a .safetensors or .gguf file, or a Hub id"
        )
    opened = open_source(source, revision, base, tokenizer)
    empty = empty_tensors(opened.checkpoint)
    try:
        reading = decide(opened.checkpoint, family, tower, families)
    except CheckpointError as error:  # it may lack the names or shapes of empty tensors
        raise (_empty(opened.checkpoint, empty) if empty else error) from None
    model = Model(opened, reading)
    if empty and any(tensor.has_role for tensor in model.tensors if tensor.name in empty):
        raise _empty(opened.checkpoint, empty)
    refuse_incomplete(model)
    return model


def empty_tensors(checkpoint: Checkpoint) -> list[str]:
    """The tensors of shape (0,), by name; a model may have none of something, such as registers."""
    return [name for name, tensor in checkpoint.items() if tensor.shape == (0,)]


def _empty(checkpoint: Checkpoint, names: list[str]) -> CheckpointError:
    """The error about tensors without elements that a model needs."""
    shape = checkpoint[names[0]].shape
    are = "is" if len(names) == 1 else "are"
    problem = (
        f"{counted(len(names), 'tensor')} {are} empty (shape {shape}), as of a sharded (ZeRO-3) "
        f"state that was not gathered; the first is {printable(names[0])}; gather the state when "
        "it is saved (zero_to_fp32.py, stage3_gather_16bit_weights_on_model_save)"
    )
    return CheckpointError(problem, file=checkpoint.name)


@dataclass(frozen=True, eq=False)
class TensorsOnly:
    """A checkpoint whose heads are not read: its tensors, under roles as far as its row knows them.

    Attributes
    ----------
    checkpoint : Checkpoint
    refusal : str
        Why its heads are not read.
    reading : Reading or None
        How the row reads it; None where no row does.
    """

    checkpoint: Checkpoint
    refusal: str
    reading: Reading | None = None

    @property
    def name(self) -> str:
        """The name that the user gave, else the checkpoint's."""
        return self.checkpoint.given or str(self.checkpoint.name)

    @property
    def unloaded(self) -> tuple[str, ...]:
        """Names in the file that the class of its config would not load: a wrapper's."""
        return unloaded_names(self.checkpoint, ())

    @cached_property
    def prefix(self) -> str:
        """The prefix of all tensor names, as far as the row knows it."""
        if self.reading is None:
            return ""
        row, names_under = self.reading.row, self.checkpoint.names_under
        first = row.layer.split("{i}")[0]
        return next((prefix for prefix in row.prefixes if names_under(prefix + first)), "")

    @cached_property
    def tensors(self) -> "Tensors":
        """Every tensor under its role; see `Model.tensors`."""
        from weightscope.model.rows.names import Tensors

        if self.reading is None:
            return Tensors(self.checkpoint, {})
        stack = self.reading.configured, self.reading.config, self.prefix
        tensors = Tensors(self.checkpoint, {self.reading.row.tower or "text": stack})
        try:
            len(tensors)
        except CheckpointError:  # the row asks for what this file lacks
            return Tensors(self.checkpoint, {})
        return tensors

    def unchecked(self) -> "TensorsOnly":
        """A copy that reads NaN and infinity too."""
        return replace(self, checkpoint=self.checkpoint.unchecked())


def open_tensors(
    source: str | Path,
    revision: str | None = None,
    family: str | None = None,
    tower: str | None = None,
    tokenizer: str | None = None,
    base: str | Path | None = None,
    families: str | Path | None = None,
) -> "Model | TensorsOnly":
    """Open a checkpoint for its tensors, even if its heads cannot be read; arguments of
    `open_model`.
    """
    try:
        return open_model(source, revision, family, tower, tokenizer, base, families)
    except CheckpointError as error:
        refusal = error
    # without its base's row, a change is added nowhere
    if base is not None or adapter_in(source) is not None:
        raise refusal
    try:
        checkpoint = open_source(source, revision, base, tokenizer).checkpoint
    except CheckpointError:  # a GGUF file of an architecture that no row reads keeps ggml's names
        checkpoint = open_checkpoint(source, revision)
    kind = checkpoint.config.get("model_type")
    family = str(kind) if family is None and kind in FAMILIES.unsupported else family
    with suppress(CheckpointError):
        return TensorsOnly(checkpoint, str(refusal), decide(checkpoint, family, tower, families))
    return TensorsOnly(checkpoint, str(refusal))


def as_model(model: "Model | str | Path") -> "Model":
    """The model itself, or the one that `open_model` opens by that name."""
    if isinstance(model, str | Path):
        return open_model(model)
    if not isinstance(model, Model):
        raise expected(
            model, "model", "a Model, or what `open_model` takes: a folder, a file or a Hub id"
        )
    return model


MOST_ROWS = 2**21  # rows of an embedding: twice the largest published vocabulary
PACKED = 8  # weights in one stored number, at most


def refuse_incomplete(model: "Model") -> None:
    """Refuse missing layers, and embeddings with more rows than any vocabulary.

    A file of holes has rows by the thousand million for nothing; norms are kept of every row.

    Raises
    ------
    CheckpointError
        Layers have no tensors, while others have; or an embedding or unembedding has too many rows.
    """
    checkpoint, config = model.checkpoint, model.config
    sizes = (
        size for file in checkpoint.files for entry in file.tensors.values() for size in entry.shape
    )
    is_huge = max(sizes, default=0) * PACKED > MOST_ROWS
    try:
        # "none" is a stage without attention
        storing = [i for i, kind in enumerate(config.layer_types) if kind != "none"]
        absent = [i for i in storing if not checkpoint.names_under(model.stem(i))]
        embeddings = model.ends.stored if is_huge else []
    except CheckpointError:  # nothing of this model is there: asking for a layer reports it
        return
    if absent and len(absent) < len(storing):
        has = config.n_layers - len(absent)
        layers = f"{absent[0]} to {absent[-1]}" if len(absent) > 1 else str(absent[0])
        problem = (
            f"has tensors of {has} layers, and config.json says {config.n_layers}: none of layer "
            f"{layers}; complete the file, or correct the number of layers"
        )
        raise CheckpointError(problem, file=checkpoint.name)
    for tensor in embeddings:
        if (rows := max(tensor.shape[:-1], default=0)) > MOST_ROWS:
            raise tensor.refuse(f"has {rows} rows; no vocabulary has more than {MOST_ROWS}")


class Model(ListsForUsers):
    """A checkpoint as a row of the table of architectures reads it.

    Examples
    --------
    >>> import weightscope as ws
    >>> model = ws.open_model("embedded")
    >>> model.name, model.attention_layers
    ('embedded', (0, 1, 2, 3))
    >>> model.layer(1).head(0).vo
    Factored(192 x 192, rank <= 32)
    """

    INTERNAL = frozenset((
        "attention_tensors", "borrowing_layers", "ends", "mixer_names", "names_note",
        "normed_layer", "of_row", "own_layers", "prefix", "reading", "rotations", "row",
        "sharing", "stem", "stream_norm", "title",
        "unchecked", "under", "unread", "weights_of", "where",
    ))  # fmt: skip
    called: str = ""  # its name, if it should have another than its place

    def __init__(self, opened: Opened, reading: Reading) -> None:
        row, checkpoint = reading.stated, opened.checkpoint
        if opened.adapter is not None:
            checkpoint = with_adapter(checkpoint, opened.adapter, row.heads.transposed)
        self.checkpoint, self.config = checkpoint, reading.config
        self.reading = reading  # row, part of config.json and prefix
        self.source = opened.source or str(checkpoint.folder)  # absolute path, or Hub id @ revision
        self.where = opened.where or checkpoint.folder  # file, folder or repository of `source`
        self.tokenizer = opened.tokenizer or self.source  # where its tokenizer is looked for
        if refused := reading.configured.refused:
            raise CheckpointError(f"{row.name} with {refused}", file=checkpoint.name)
        self._last: Layer | None = None

    @classmethod
    def of_row(cls, checkpoint: Checkpoint, row: Family) -> "Model":
        """The checkpoint as a row on trial reads it, wherever its tensors are."""
        return cls(Opened(checkpoint), read_as(checkpoint, row))

    @property
    def row(self) -> Family:
        """The row as the table has it."""
        return self.reading.row

    @property
    def family(self) -> Family:
        """The row as this checkpoint's config makes it."""
        return self.reading.family

    def __repr__(self) -> str:
        config = self.config
        sizes = f"{config.n_layers} layers of {config.n_heads} heads, width {config.d_model}"
        return f"Model({self.family.called}: {sizes})"

    @property
    def name(self) -> str:
        """Its name in titles: `called`, else the Hub id, or the folder's or file's name."""
        if self.called:
            return self.called
        path = Path(self.source).expanduser()
        return path.resolve().name if path.exists() else self.source

    @property
    def title(self) -> str:
        """Its name on a page, with the origin of a row that is not built in."""
        return f"{self.name} ({self.family.origin})" if self.family.origin else self.name

    def unchecked(self) -> "Model":
        """A fresh model of the same checkpoint that reads NaN and infinity too."""
        opened = Opened(self.checkpoint.unchecked(), self.source, self.tokenizer, self.where)
        return Model(opened, replace(self.reading, prefix=self.prefix))

    @cached_property
    def stacks(self) -> Stacks:
        """The checkpoint's attention models by name, this one included; `tower` opens another."""
        return Stacks(self.checkpoint, self.reading, self.prefix)

    @cached_property
    def prefix(self) -> str:
        """The prefix of all tensor names in this checkpoint."""
        known = self.reading.prefix
        return prefix_of(self.checkpoint, self.reading.configured) if known is None else known

    def under(self, inner: str = "") -> LayerTensors:
        """The checkpoint's tensors under the model's prefix and `inner`."""
        config = self.config
        needed_by = f"{self.family.name} with width {config.d_model} and {config.n_heads} heads"
        return LayerTensors(self.checkpoint, self.prefix + inner, needed_by)

    @property
    def tensors(self) -> "Tensors":
        """Every tensor under its role, of all stacks; nothing is read before `array()`.

        Examples
        --------
        >>> import weightscope as ws
        >>> model = ws.open_model("embedded")
        >>> model.tensors["layer 1 o"].array().shape
        (192, 192)
        """
        return self.stacks.tensors

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that are attention of one input; hybrid models have others."""
        return self.reading.settings.attention_layers

    @property
    def mixer_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a state or a convolution in place of a softmax, or next to it.

        See `mixer`.
        """
        with suppress(CheckpointError):  # a tensor that the row needs to name others is not there
            return tuple(self.tensors.of_mixers) if self.family.mixer else ()
        return ()

    @cached_property
    def own_layers(self) -> tuple[int, ...]:
        """Attention layers that do not share an earlier one's weights; in ALBERT there is one."""
        return distinct(self.attention_layers, self)

    @cached_property
    def sharing(self) -> str:
        """A sentence on layers that share one set of weights; empty if each has its own."""
        sets: dict[tuple[str, str], list[int]] = {}
        for index in self.attention_layers:
            sets.setdefault(self.weights_of(index), []).append(index)
        shared = [
            f"layers {', '.join(map(str, layers))} share one set of weights, which is read once, "
            f"as layer {layers[0]}"
            for layers in sets.values()
            if len(layers) > 1
        ]
        return f"{'; '.join(shared).capitalize()}." if shared else ""

    @cached_property
    def borrowing_layers(self) -> tuple[int, ...]:
        """Indices of further layers, which attend to an earlier layer's keys (`Layer.keys_of`)."""
        borrows = self.reading.settings.borrows
        return tuple(i for i in range(self.config.n_layers) if borrows(i))

    def layer(self, index: int) -> Layer:
        """One layer; its attention tensors are read here. The last one asked for is kept.

        Raises
        ------
        CheckpointError
            No such layer, or it is not attention, or its tensors are missing, misshapen or not
            finite.
        """
        index, config = whole(index, "layer"), self.config
        if not 0 <= index < config.n_layers:
            problem = f"no layer {index}: the model has {config.n_layers}"
            raise CheckpointError(problem, file=self.checkpoint.name)
        if index not in self.attention_layers and not self.reading.settings.borrows(index):
            attending, kind = ", ".join(map(str, self.attention_layers)), config.layer_types[index]
            source = self.family.keys_of(config, index)
            if source != index:
                kind += f" to keys and values that layer {source} has made of another stream"
            problem = f"layer {index} is {kind}, not attention; {attending} are"
            raise CheckpointError(problem, file=self.checkpoint.name)
        if self._last is None or self._last.index != index:
            self.checkpoint.prefetch(tensor.name for tensor in self.attention_tensors(index))
            self._last = None  # before the next is read
            self._last = read_layer(self.under(), self.family, self.config, index)
        return self._last

    def head(self, layer: int, head: int) -> Head:
        """One query head: `layer(layer).head(head)`."""
        return self.layer(layer).head(head)

    def mixer(self, index: int) -> "Mixer":
        """One of the `mixer_layers`: how long its state lasts, and the maps that write and read it.

        Raises
        ------
        CheckpointError
            The layer has none, or its tensors are missing, misshapen or not finite.

        Examples
        --------
        >>> import weightscope as ws
        >>> model = ws.open_model("nvidia/Nemotron-H-8B-Base-8K")  # doctest: +SKIP
        >>> model.mixer(0).time_scales  # tokens, one for each head  # doctest: +SKIP
        """
        from weightscope.model.layers.mixer import read_mixer

        index = whole(index, "layer")
        self.checkpoint.prefetch(self.mixer_names(index))
        return read_mixer(self.tensors, index)

    def mixer_names(self, index: int) -> list[str]:
        """Names of the tensors that `mixer(index)` reads; empty where it has none."""
        from weightscope.model.layers.mixer import names_read

        return names_read(self.tensors, index) if index in self.mixer_layers else []

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how the config was read, and on parts of attention that are not read."""
        names = []
        for i in self.attention_layers:
            row = self.family.in_layer(self.config.layer_types[i])
            stem = self.family.stored_name(self.config, i)
            names += denied(self.checkpoint, self.prefix + stem, row, self.config)
        notes = *self.config.notes, self.names_note, denied_words(names), self.unread, self.sharing
        return tuple(note for note in notes if note)

    @cached_property
    def unloaded(self) -> tuple[str, ...]:
        """Names in the file that the class of its config would not load: wrappers' or misplaced."""
        stacks = [stack for stack in self.stacks.values() if stack.reading is not None]
        places = [(stack.row, stack.prefix) for stack in stacks if stack.row is not None]
        return unloaded_names(self.checkpoint, places or [(self.family, self.prefix)])

    @property
    def names_note(self) -> str:
        """A sentence on `unloaded` names; empty if there are none."""
        return names_sentence(self.unloaded, len(self.checkpoint))

    @cached_property
    def unread(self) -> str:
        """A sentence on config keys that a row without proof does not read and that may matter."""
        if not self.family.origin.startswith("unproved"):
            return ""
        from weightscope.model.config.alike import unread_keys

        name, keys = self.family.name, unread_keys(self.checkpoint, self.reading)
        listed = ", ".join(map(printable, keys))
        problem = f"{name} does not read these keys of config.json, which may matter: {listed}"
        return problem if keys else ""

    @property
    def layers(self) -> OnDemand[Layer]:
        """The attention layers as a sequence; each is read on demand, and only the last is kept.

        Examples
        --------
        >>> import weightscope as ws
        >>> model = ws.open_model("embedded")
        >>> [layer.n_heads for layer in model.layers]
        [6, 6, 6, 6]
        >>> model.layers[-1]
        Layer(3: 6 heads of 32, width 192)
        """
        return OnDemand(self.attention_layers, self.layer, "attention layers")

    @cached_property
    def rotations(self) -> dict[int, Rotation | None]:
        """The rotation of each attention layer, by the config alone; None without one."""
        return {i: rotation_of(self.config, self.family, i) for i in self.attention_layers}

    def stem(self, index: int) -> str:
        """The prefix of a layer's tensor names."""
        return self.prefix + self.reading.configured.stored_name(self.config, index)

    def weights_of(self, index: int) -> tuple[str, str]:
        """A layer's place in the file and its kind: equal for layers that share their weights."""
        if not 0 <= index < self.config.n_layers:
            return str(index), ""  # reading it reports that there is no such layer
        return self.stem(index), self.config.layer_types[index]

    def attention_tensors(self, index: int) -> list[Tensor]:
        """The tensors of `layer(index)`, unread: projections, the norms around them, sinks.

        Raises
        ------
        CheckpointError
            Attention has tensors there that the row does not read.
        """
        names = attention_names(self.checkpoint, self.prefix, self.family, self.config, index)
        return [self.checkpoint[name] for name in names]

    @cached_property
    def ends(self) -> Ends:
        """The parts before and after the layers, as the checkpoint stores them."""
        return Ends(self.under(), self.family, self.config)

    @cached_property
    def first_layer(self) -> Layer:
        """The first attention layer as a function of e_t + p_p, divided by their sigma.

        For a pre-norm model that is layer 0. A norm between the embeddings and layer 0 (BERT), and
        a projection after it (ELECTRA, ALBERT), are folded into the layer's maps. If a pre-norm
        model also has such a norm (BLOOM), the rows that `embeddings` returns include it. All are
        exact.

        Raises
        ------
        CheckpointError
            Layer 0 is not attention, or sees more than tokens and positions, as cross-attention
            does; or position embeddings stand inside one of two norms, which does not fold.
        """
        return self.ends.first_layer(self.layer(0))

    def stream_norm(self, index: int) -> Norm | None:
        """The norm whose output enters a layer as the residual stream.

        In post-norm models the one that ends the layer before, and anywhere the one of the
        embeddings; None where the stream is not normalised, as in pre-norm models.
        """
        if index == 0:
            return self.ends.stream_norm
        norm, inner = self.family.norms.after, self.family.stored_name(self.config, index - 1)
        return None if norm is None else norm.read(self.under(inner), self.config)

    def normed_layer(self, index: int) -> Layer:
        """A layer on normalised inputs: without a norm of its own, the stream's last norm is folded
        in.

        The layer itself where there is neither, in cross-attention, or where the file lacks that
        norm.
        """
        layer = self.layer(index)
        if layer.norm is not None or layer.cross:
            return layer
        # broken weights are a finding
        with suppress(CheckpointError), np.errstate(invalid="ignore", over="ignore"):
            if index == 0 and self.ends.after is not None:
                return self.first_layer
            norm = self.stream_norm(index)
            return layer if norm is None else layer.after_norm(norm)
        return layer

    @property
    def embeddings(self) -> Embeddings:
        """Token and position embeddings.

        Raises
        ------
        CheckpointError
            The checkpoint has no token embedding.
        """
        return self.ends.embeddings

    @property
    def positions(self) -> np.ndarray | None:
        """Position embeddings as they enter the model, learned or by a formula; None without.

        Returns
        -------
        float32 array of shape (n_positions, d), or None
        """
        return self.ends.positions

    @cached_property
    def unembedding(self) -> Unembedding:
        """The directions of the residual stream that make logits.

        Raises
        ------
        CheckpointError
            The family has no logits of tokens or makes them in another way, or the checkpoint has
            no unembedding.
        """
        return self.ends.unembedding


def distinct(layers: Iterable[int], *models: Model) -> tuple[int, ...]:
    """The layers without those that share their weights with an earlier one in every model."""
    first: dict[tuple[tuple[str, str], ...], int] = {}
    for index in layers:
        first.setdefault(tuple(model.weights_of(index) for model in models), index)
    return tuple(first.values())


BLOCK_VALUES = 4 << 20  # values of a tensor read at a time


def overflow(
    model: Model, what: str, layer: int | None = None, *, anywhere: bool = False
) -> CheckpointError:
    """The error that `what` overflows, with the largest weight near it or anywhere."""
    near = model.ends.input_tensors + (model.attention_tensors(layer) if layer is not None else [])
    value, name = largest_weight(model.checkpoint.values() if anywhere else near)
    problem = (
        f"{what} overflows: its largest weight is {value:.3g}, in {name}; read that tensor again "
        "from its source"
    )
    return CheckpointError(problem, file=model.checkpoint.name)


def largest_weight(tensors: Iterable[Tensor]) -> tuple[float, str]:
    """The largest finite magnitude in these tensors and its tensor; (0, "") without weights."""
    largest = (0.0, "")
    for tensor in tensors:
        with suppress(CheckpointError):  # not weights
            for block in unchecked_blocks(tensor) if tensor.shape else ():
                magnitudes = np.where(np.isfinite(block), np.abs(block), 0)
                largest = max(largest, (float(magnitudes.max(initial=0)), tensor.name))
    return largest


def unchecked_blocks(tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor in blocks of rows, NaN and infinity included; a scalar as one block."""
    unchecked = tensor.unchecked(set())
    if tensor.shape:
        rows = max(1, BLOCK_VALUES // max(1, prod(tensor.shape[1:])))
        yield from (block for _, block in unchecked.blocks(rows))
    else:
        yield unchecked.read()
