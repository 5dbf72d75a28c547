"""The stored parts of a model's embeddings and unembedding, found and read as its row describes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import ModelConfig
from weightscope.model.embeddings import Embeddings, Unembedding
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.norms import Norm
from weightscope.model.rows.cells import LayerTensors, StoredNorm
from weightscope.model.rows.family import Family


def embedding_width(family: Family, config: ModelConfig) -> int:
    """Columns of the token embedding: the model's width, unless a projection follows."""
    return config.size(family.inputs.width, default=config.d_model)


def is_tied(family: Family, config: ModelConfig) -> bool:
    """True if the config says that the unembedding is the token embedding."""
    return family.outputs is not None and config.get("tie_word_embeddings", True) is True


@dataclass(frozen=True, eq=False)
class StoredEmbeddings:
    """The parts of embeddings and unembedding in one checkpoint; each is read when asked for.

    `Model` shows these parts under its own names and says what they are.
    """

    tensors: LayerTensors  # under the model's prefix
    family: Family  # as the config makes it
    config: ModelConfig

    @property
    def checkpoint(self) -> Checkpoint:
        return self.tensors.checkpoint

    @property
    def prefix(self) -> str:
        return self.tensors.prefix

    @cached_property
    def width(self) -> int:
        """Columns e of the token embedding."""
        return embedding_width(self.family, self.config)

    # Names and tensors, unread

    @cached_property
    def head_name(self) -> str:
        """The unembedding's name in the file, or ""."""
        outputs, also = self.family.outputs, self.family.also
        tokens = outputs.tokens if outputs else also.get("unembedding", ())
        ends = [i + 1 for i, character in enumerate(self.prefix) if character == "."]
        for end in (*reversed(ends), 0):
            for name in tokens:
                if self.prefix[:end] + name in self.checkpoint:
                    return self.prefix[:end] + name
        return ""

    @property
    def token_name(self) -> str:
        """The token embedding's name in the file; the unembedding's if only that is stored."""
        name = self.prefix + self.family.inputs.tokens
        if name not in self.checkpoint and is_tied(self.family, self.config):
            return self.head_name
        return name

    @property
    def input_tensors(self) -> list[Tensor]:
        """Rows, then norm and projections."""
        inputs, checkpoint = self.family.inputs, self.checkpoint
        names = [self.token_name]
        names += [self.prefix + name for name in (inputs.positions, inputs.types) if name]
        for module in (inputs.norm and inputs.norm.module, inputs.before, inputs.after):
            if module:
                names += checkpoint.names_under(f"{self.prefix}{module}.")
        return [checkpoint[name] for name in names if name in checkpoint]

    @property
    def output_tensors(self) -> dict[str, Tensor]:
        """Norm and projection by name, rows as "unembedding"."""
        inputs, outputs, checkpoint = self.family.inputs, self.family.outputs, self.checkpoint
        if outputs is None:
            return {}
        tensors: dict[str, Tensor] = {}
        for module in (outputs.norm and outputs.norm.module, outputs.after):
            if module:
                names = checkpoint.names_under(f"{self.prefix}{module}.")
                tensors |= {name: checkpoint[name] for name in names}
        rows = self.head_name or self.prefix + inputs.tokens
        if rows in checkpoint:
            tensors["unembedding"] = checkpoint[rows]
        return tensors

    # Around the embedding's rows

    @property
    def folded_norm(self) -> StoredNorm | None:
        """The embeddings' norm if layer 0 has none of its own and can absorb it."""
        return self.family.inputs.norm if self.family.norm_of(0) is None else None

    @property
    def first_norm(self) -> Norm | None:
        """The norm whose sigma divides the sum of token and position rows, its gains unread."""
        first = self.folded_norm or self.family.norm_of(0)
        return None if first is None else first.unread(self.config)

    @property
    def stream_norm(self) -> Norm | None:
        """The norm whose output enters layer 0 as the residual stream."""
        norm = self.family.inputs.norm if self.after is None else None
        return None if norm is None else norm.read(self.tensors, self.config)

    @property
    def scale(self) -> float:
        """The number that multiplies stored rows."""
        given = self.family.inputs.scale
        if isinstance(given, str):
            return self.config.d_model**0.5 if given == "sqrt" else self.config.number(given)
        return 1.0 if given is None else given

    @cached_property
    def before(self) -> np.ndarray | None:
        """(e, d) projection of embeddings to the model's width, before their norm."""
        name, d = self.family.inputs.before, self.config.d_model
        if not name or self.width == d:
            return None
        return self.tensors.read(name + ".weight", (d, self.width)).T

    @cached_property
    def after(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(e, d) projection and (d,) bias after the embeddings' norm."""
        inputs, d, e = self.family.inputs, self.config.d_model, self.width
        if not inputs.after or (e == d and not inputs.always_projected):
            return None
        weight = self.tensors.read(inputs.after + ".weight", (d, e)).T
        return weight, self.tensors.read(inputs.after + ".bias", (d,))

    # The parts, read

    @cached_property
    def positions(self) -> np.ndarray | None:
        """Position embeddings as they enter the model, learned or by a formula; None without."""
        inputs, d = self.family.inputs, self.config.d_model
        if not inputs.positions:
            return inputs.formula and inputs.formula(self.config)
        stored = self.checkpoint.get(self.prefix + inputs.positions)
        if stored is not None and len(stored.shape) == 3:  # with a leading axis of one, as in ViT
            return self.tensors.read(inputs.positions, (1, None, d))[0]
        offset = inputs.offset
        if not isinstance(offset, int):  # the id of a token that the first positions follow
            offset = self.config.count(offset) + 1
        if inputs.norm is None:  # a projection takes token rows alone
            return self.tensors.read(inputs.positions, (None, d))[offset:]
        rows = self.tensors.read(inputs.positions, (None, self.width))[offset:]
        return rows if self.before is None else rows @ self.before

    @cached_property
    def embeddings(self) -> Embeddings:
        """Token and position embeddings."""
        inputs, name = self.family.inputs, self.token_name
        if not inputs.tokens:
            problem = f"{self.family.name} has no token embedding: it sees images"
            raise CheckpointError(problem, file=self.checkpoint.name)
        if name not in self.checkpoint:
            prefixes = dict.fromkeys((self.prefix, *self.family.prefixes))
            names = ", ".join(prefix + inputs.tokens for prefix in prefixes)
            problem = f"no token embedding in this checkpoint (looked for {names})"
            raise CheckpointError(problem, file=self.checkpoint.name)
        before, shift, norm = self.before, None, None
        if inputs.types:
            shift = self.tensors.read(inputs.types, (None, self.width))[0]
            shift = shift if before is None else shift @ before
        try:
            positions, lacks = self.positions, ""
        except CheckpointError as error:  # tokens can be read without them
            positions, lacks = None, str(error)
        if inputs.norm is not None and self.folded_norm is None:
            norm = inputs.norm.read(self.tensors, self.config)
        rows = replace(self.tensors, prefix="").tensor(name, (None, self.width))
        return Embeddings(rows, positions, self.first_norm, self.scale, before, shift, norm, lacks)

    @property
    def unembedding(self) -> Unembedding:
        """The directions of the residual stream that make logits."""
        outputs, tensors, name = self.family.outputs, self.tensors, self.head_name
        if outputs is None:
            problem = f"{self.family.name} has no unembedding that is one matrix"
            raise CheckpointError(problem, file=self.checkpoint.name)
        if not name and not is_tied(self.family, self.config):
            looked_for = " and ".join(outputs.tokens)
            problem = f"no unembedding in this checkpoint (looked for {looked_for})"
            raise CheckpointError(problem, file=self.checkpoint.name)
        e, d, norm, lacks, after = self.width, self.config.d_model, None, "", None
        if (stored := outputs.norm) is not None:
            gain = f"{stored.module}.{stored.gain}"
            if stored.module and gain not in tensors:
                lacks = self.prefix + gain
            else:
                norm = stored.read(tensors, self.config)
        if outputs.after and e != d:
            after = tensors.read(outputs.after + ".weight", (e, d)).T
        if name:
            rows = replace(tensors, prefix="").tensor(name, (None, e))
        else:
            rows = self.embeddings.token_tensor
        return Unembedding(rows, norm, after, not name, lacks)

    # The stream that layer 0 sees

    def into_stream(self, rows: np.ndarray) -> np.ndarray:
        """Token embedding rows (n, e) as they enter the residual stream without a position."""
        if self.after is None:
            return rows
        w, b = self.after
        if self.folded_norm is not None:
            rows = self.folded_norm.read(self.tensors, self.config, self.width)(rows)
        return rows @ w + b

    def first_layer(self, layer: Layer) -> Layer:
        """Layer 0 as a function of e_t + p_p, divided by their sigma: what is between is folded."""
        norm, inputs = self.folded_norm, self.family.inputs
        if inputs.more:
            problem = f"layer 0 sees more than tokens and positions: {inputs.more}"
            raise CheckpointError(problem, file=self.checkpoint.name)
        if inputs.norm is not None and norm is None and self.positions is not None:
            problem = "has two norms between its embeddings and layer 0"
            advice = "its first layer has no bilinear form"
            raise CheckpointError(f"{problem}; {advice}", file=self.checkpoint.name)
        if self.after is not None:
            layer = layer.after(*self.after)
        if norm is None:
            return layer
        width = self.width if inputs.after else None
        return layer.after_norm(norm.read(self.tensors, self.config, width))
