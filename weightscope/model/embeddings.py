"""Embeddings into a model's first layer, and the unembedding that turns its output into logits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.core.errors import CheckpointError
from weightscope.core.results import ShowsShapes
from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Norm
from weightscope.model.rows.cells import LayerTensors, StoredNorm
from weightscope.model.rows.family import Family

BLOCK_BYTES = 16 << 20  # embedding rows are streamed in float32 blocks of about this size


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings(ShowsShapes):
    """Token and position embeddings as the first layer sees them.

    A token's row is what the file holds with everything done to it that does not depend on
    position: a scale (Gemma), the row of token type 0 added (BERT), a projection to the model's
    width (OPT), a norm where no position is added after the row is looked up (BLOOM). The sum of a
    token's row and a position's, divided by `sigma` of the two, is what the heads of
    `Model.first_layer` act on.
    """

    token_tensor: Tensor  # (vocab, e): as stored, unread
    positions: np.ndarray | None  # (n_positions, d): row p belongs to position p
    first_norm: Norm | None  # its sigma divides the sum of the rows
    scale: float = 1.0  # multiplies stored rows
    projection: np.ndarray | None = None  # (e, d): brings them to the model's width
    shift: np.ndarray | None = None  # (d,): added to every row
    norm: Norm | None = None  # a norm of the rows themselves
    lacks: str = ""  # why a model's positions are missing here; empty if none are

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.token_tensor.shape[0]

    @property
    def as_stored(self) -> bool:
        """Rows enter the model as the file holds them."""
        nothing_added = self.projection is None and self.shift is None and self.norm is None
        return self.scale == 1 and nothing_added

    def entering(self, rows: np.ndarray) -> np.ndarray:
        """Stored rows (..., e) as they enter the model, (..., d)."""
        if self.as_stored:
            return rows
        rows = rows * np.float32(self.scale)
        if self.projection is not None:
            rows = rows @ self.projection
        if self.shift is not None:
            rows = rows + self.shift
        return rows if self.norm is None else self.norm(rows)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token rows, float32 (vocab, d); a read-only view of the file where it holds them so."""
        return self.entering(self.token_tensor.read())

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Some tokens' rows, (...) ids -> float32 (..., d); no others are read unless all have
        been.

        Raises
        ------
        CheckpointError
            There is no such token.
        """
        tokens = ids_of(tokens, "tokens")
        ids, where = np.unique(tokens, return_inverse=True)
        if (wrong := outside(ids, self.n_tokens)) is not None:
            problem = f"no token {wrong}: the vocabulary has {self.n_tokens}"
            raise CheckpointError(problem, file=self.token_tensor.file.path)
        if "tokens" in self.__dict__:
            return self.tokens[tokens]
        if not self.token_tensor.piece:  # one row costs as much as all
            return self.entering(self.token_tensor.read()[ids])[where.reshape(tokens.shape)]
        runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1) if ids.size else []
        stored = [self.token_tensor.rows(int(run[0]), int(run[-1]) + 1) for run in runs]
        empty = np.empty((0, self.token_tensor.shape[1]), np.float32)
        return self.entering(np.concatenate([empty, *stored]))[where.reshape(tokens.shape)]

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Token rows [start, stop) in blocks of about 16 MB, each with its first row's index."""
        stop = stop or self.n_tokens
        n_rows = max(1, BLOCK_BYTES // (4 * self.token_tensor.shape[1]))
        if (start, stop) == (0, self.n_tokens):
            for first, rows in self.token_tensor.blocks(n_rows):
                yield first, self.entering(rows)
            return
        for first in range(start, stop, n_rows):
            rows = self.token_tensor.rows(first, min(first + n_rows, stop))
            yield first, self.entering(rows)

    def sigma(self, tokens: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """sigma(e_t + p_p), the first norm's divisor (detokenization paper, eq. 3); 1 without a
        norm.

        Parameters
        ----------
        tokens, positions : int arrays that broadcast against each other
            Token ids and positions; without positions, of the token rows alone.

        Returns
        -------
        float32 array of the broadcast shape

        Raises
        ------
        CheckpointError
            There is no such token or position, or the checkpoint lacks its position embedding.
        """
        rows = self.rows(tokens)  # (..., d)
        if positions is not None and self.lacks:
            raise CheckpointError(self.lacks)
        if positions is not None and self.positions is not None:
            positions, known = ids_of(positions, "positions"), len(self.positions)
            if (wrong := outside(positions, known)) is not None:
                problem = f"no position {wrong}: the model has {known}"
                raise CheckpointError(problem, file=self.token_tensor.file.path)
            rows = rows + self.positions[positions]
        if self.first_norm is None:
            return np.ones(rows.shape[:-1], rows.dtype)
        return self.first_norm.sigma(rows)


def ids_of(given: ArrayLike, what: str) -> np.ndarray:
    """Token ids or positions as an array of whole numbers, int64 if empty."""
    ids = np.asarray(given)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"{what} have dtype {ids.dtype}; expected whole numbers")
    return ids if ids.size else ids.astype(np.int64)


def outside(ids: np.ndarray, count: int | None) -> int | None:
    """An id below 0, else one not below `count` (None: no bound), else None."""
    if not ids.size:
        return None
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0:
        return lowest
    return highest if count is not None and highest >= count else None


@dataclass(frozen=True, eq=False, repr=False)
class Unembedding(ShowsShapes):
    """Every token's logit as a direction of the residual stream, the final norm folded in.

    logit_t(x) = x u_t' / sigma(x) + what does not depend on x, with u_t = w_t diag(gamma) (I -
    11'/d); an RMSNorm does not centre. So x u_t' is what a direction x adds to the logit of t, the
    scalar aside.
    """

    tensor: Tensor  # (vocab, e): as stored, unread
    norm: Norm | None  # the final norm; None where the family has none, or the checkpoint lacks it
    projection: np.ndarray | None = None  # (d, e): between the norm and the rows
    tied: bool = False  # the rows are the token embedding's
    lacks: str = ""  # tensor of the final norm that the checkpoint should have; empty if it has it

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.tensor.shape[0]

    @property
    def described(self) -> str:
        """The rows and the norm, in words."""
        also = ", the input embedding too" if self.tied else ""
        rows = f"the unembedding ({self.tensor.name}{also})"
        if self.lacks:
            return f"{rows} without the final norm, which is not in this checkpoint ({self.lacks})"
        return rows if self.norm is None else f"{rows}, the final norm folded in"

    def folded(self, rows: np.ndarray) -> np.ndarray:
        """u_t of stored rows, (n, e) -> (n, d)."""
        if self.projection is not None:
            rows = rows @ self.projection.T
        if self.norm is None:
            return rows
        scaled = rows * self.norm.gamma
        return scaled - scaled.mean(axis=1, keepdims=True) if self.norm.centred else scaled

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """u_t of some tokens, (n,) ids -> (n, d)."""
        return self.folded(np.concatenate([self.tensor.rows(int(t), int(t) + 1) for t in tokens]))

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """All u_t in blocks of about 16 MB, each with the index of its first token."""
        for first, rows in self.stored_blocks():
            yield first, self.folded(rows)

    def stored_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Rows as stored, (n, e), in blocks of about 16 MB."""
        return self.tensor.blocks(max(1, BLOCK_BYTES // (4 * self.tensor.shape[1])))

    def shifts(self, rows: np.ndarray) -> np.ndarray:
        """Logits that the bias of the final norm adds, by stored row: (n, e) -> (n,)."""
        if self.norm is None:
            return np.zeros(len(rows), rows.dtype)
        beta = self.norm.beta
        return rows @ (beta if self.projection is None else beta @ self.projection)


@dataclass(frozen=True, eq=False)
class Ends:
    """The embeddings and unembedding in one checkpoint; each part is read when asked for."""

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
        """Columns e of the token embedding: the model's width, unless a projection follows."""
        return self.config.size(self.family.inputs.width, default=self.config.d_model)

    @property
    def tied(self) -> bool:
        """True if the config says that the unembedding is the token embedding.

        A file that has both has the last word.
        """
        return self.family.outputs is not None and self.config.tied

    # Names and tensors, unread

    @cached_property
    def head_name(self) -> str:
        """The unembedding's name in the file, under as much of the prefix as it has, or ""."""
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
        if name not in self.checkpoint and self.tied:
            return self.head_name
        return name

    @property
    def input_tensors(self) -> list[Tensor]:
        """The tensors of embeddings and positions, unread: rows, then norm and projections."""
        inputs, checkpoint = self.family.inputs, self.checkpoint
        names = [self.token_name]
        names += [self.prefix + name for name in (inputs.positions, inputs.types) if name]
        for module in (inputs.norm and inputs.norm.module, inputs.before, inputs.after):
            if module:
                names += checkpoint.names_under(f"{self.prefix}{module}.")
        return [checkpoint[name] for name in names if name in checkpoint]

    @property
    def output_tensors(self) -> dict[str, Tensor]:
        """The tensors of the unembedding, unread: rows as "unembedding", others by name."""
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

    @property
    def stored(self) -> list[Tensor]:
        """Every tensor of both ends, unread."""
        return [*self.input_tensors, *self.output_tensors.values()]

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
        if not name and not self.tied:
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
        """Token embedding rows (n, e) as they enter the residual stream without a position, (n, d).

        They are the rows themselves, except where a norm and a projection stand between the
        embeddings and layer 0 (ELECTRA, ALBERT).
        """
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
