"""The cells of a row: norms, biases, embeddings, logits, networks, formats; and a layer's tensors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weightscope.architectures.config import ModelConfig
from weightscope.attention.norms import Norm
from weightscope.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.config import Config
from weightscope.compute.half import Weights
from weightscope.errors import CheckpointError

# A checkpoint's tensors by the names a family's row uses, shapes checked as they are read.

# What BERT-era files call a LayerNorm's weight and bias.
LEGACY = {".weight": ".gamma", ".bias": ".beta"}


@dataclass(frozen=True)
class LayerTensors:
    """The tensors under one prefix, for instance those of one layer.

    Attributes
    ----------
    checkpoint : Checkpoint
    prefix : str
        Stands before every name asked for.
    needed_by : str
        Named in errors: the family and the sizes that set the shapes expected.
    lent : mapping of str
        Modules that stand under another prefix: those of keys and values that another layer makes.
    """

    checkpoint: Checkpoint
    prefix: str
    needed_by: str
    lent: Mapping[str, str] = field(default_factory=dict)

    def _full(self, name: str) -> str:
        return self.lent.get(name.rpartition(".")[0], self.prefix) + name

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.checkpoint

    def tensor(self, name: str, shape: tuple[int | None, ...]) -> Tensor:
        """The unread tensor; None in `shape` matches any size.

        Raises
        ------
        CheckpointError
            It is not there, or has another shape.
        """
        full = self._full(name)
        module, dot, kind = full.rpartition(".")
        legacy = module + LEGACY.get(dot + kind, dot + kind)
        full = legacy if full not in self.checkpoint and legacy in self.checkpoint else full
        if full not in self.checkpoint:
            raise CheckpointError(f"is missing; {self.needed_by} needs it", file=self.checkpoint.name, tensor=full)
        tensor = self.checkpoint[full]
        if len(tensor.shape) != len(shape) or any(w not in (None, n) for w, n in zip(shape, tensor.shape, strict=True)):
            wanted = str(shape).replace("None", "any")
            problem = f"has shape {tensor.shape}; {self.needed_by} needs {wanted}"
            raise CheckpointError(problem, file=tensor.file.path, tensor=full)
        return tensor

    def read(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """The tensor as float32; errors as for `tensor` and for reading."""
        return self.tensor(name, shape).read()

    def weights(self, name: str, shape: tuple[int | None, ...]) -> Weights:
        """The tensor as float32, or in half precision where it is stored so; errors as for `read`."""
        return self.tensor(name, shape).weights()


# Which layers of a model have something that others lack: rotation, norms of queries and keys.


def always(config: ModelConfig, layer: int) -> bool:
    """Every layer."""
    return True


def sliding(config: ModelConfig, layer: int) -> bool:
    """Those that see a window (Cohere 2, Trinity)."""
    return config.layer_types[layer] == "sliding_attention"


def windowed(config: ModelConfig, layer: int) -> bool:
    """Those that see a window; none where the config has none, whatever the layers are called."""
    return sliding(config, layer) and config.has("sliding_window")


def windowed_if_any(config: ModelConfig, layer: int) -> bool:
    """Those that see a window; all where the config has none (EXAONE 4)."""
    return sliding(config, layer) or not config.has("sliding_window")


def listed(config: ModelConfig, layer: int) -> bool:
    """Those that no_rope_layers has 1 for; without it all but every fourth, or whatever no_rope_layer_interval says."""
    given = config.get("no_rope_layers")
    if not given:
        return (layer + 1) % config.size("no_rope_layer_interval") != 0
    if not isinstance(given, list) or len(given) <= layer or given[layer] not in (0, 1):
        raise config.error("no_rope_layers", "a list with 0 or 1 for every layer")
    return bool(given[layer])


def with_parameters(config: ModelConfig, layer: int) -> bool:
    """Those whose type has an entry in rope_parameters that is not null."""
    given = config.inside("rope_parameters")
    return given.get(config.layer_types[layer], given) is not None


def with_a_base(config: ModelConfig, layer: int) -> bool:
    """All where rope_parameters has a base, else none (OLMo Hybrid)."""
    return config.inside("rope_parameters").has("rope_theta")


# What converting to ggml's format does to matrices, undone: functions of an array and of head counts.

Undo = Callable[[np.ndarray, int, int], np.ndarray]  # of stored values, query heads, key-value heads


def queries_in_halves(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Queries whose rows ggml has 0, r/2, 1, r/2 + 1 ... within a head, since it rotates neighbours."""
    pairs = rows.reshape(n_heads, len(rows) // (2 * n_heads), 2, *rows.shape[1:])  # (H, r/2, 2, in)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def keys_in_halves(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Keys likewise."""
    return queries_in_halves(rows, n_kv_heads, n_kv_heads)


def turned(w: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """GPT-2's weights are (in, out), ggml's (out, in)."""
    return w.T


def in_groups(rows: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """All queries, all keys, all values: back to groups of queries with the key and value that they share."""
    r = len(rows) // (n_heads + 2 * n_kv_heads)
    q, k, v = np.split(rows, [n_heads * r, (n_heads + n_kv_heads) * r])
    groups = [part.reshape(n_kv_heads, -1, *rows.shape[1:]) for part in (q, k, v)]  # (G, heads r, in)
    return np.concatenate(groups, axis=1).reshape(rows.shape)


def less_one(gamma: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Norms of gain 1 + w are stored as 1 + w."""
    return gamma - np.float32(1)


HALVES: dict[str, Undo] = {"self_attn.q_proj": queries_in_halves, "self_attn.k_proj": keys_in_halves}


# The cells of a row: where norms, biases, embeddings and logits of an architecture stand, and how.


@dataclass(frozen=True)
class StoredNorm:
    """A norm: the module of its gamma and beta, and its kind.

    Attributes
    ----------
    module : str
        Its name; empty where it has no parameters.
    centred : bool
        LayerNorm centres, RMSNorm does not.
    bias : bool
        It has a beta.
    offset : float
        gamma = offset + weight: 1 in Gemma.
    eps : float or None
        Where the architecture fixes it; None for the config's.
    without : tuple of int
        Layers that have none.
    gain, shift : str
        What its gamma and beta are called within the module.
    """

    module: str
    centred: bool
    bias: bool = False
    offset: float = 0.0
    eps: float | None = None
    without: tuple[int, ...] = ()
    gain: str = "weight"
    shift: str = "bias"

    def unread(self, config: ModelConfig) -> Norm:
        """The norm without gamma and beta, for its sigma."""
        return Norm(self.centred, config.norm_eps if self.eps is None else self.eps)

    def read(self, tensors: LayerTensors, config: ModelConfig, width: int | None = None) -> Norm:
        """The norm of tokens of `width`, the model's as a rule; gamma is 1 and beta 0 where there is no such tensor."""
        d = width or config.d_model
        gamma, beta = np.ones(d, np.float32), np.zeros(d, np.float32)
        if self.module:
            gamma = np.float32(self.offset) + tensors.read(f"{self.module}.{self.gain}", (d,))
        if self.module and self.bias:
            beta = tensors.read(f"{self.module}.{self.shift}", (d,))
        return replace(self.unread(config), gamma=gamma, beta=beta)


def layer_norm(
    module: str, *, bias: bool = True, eps: float | None = None, without: tuple[int, ...] = ()
) -> StoredNorm:  # fmt: skip
    """A LayerNorm; without parameters if `module` is empty."""
    return StoredNorm(module, centred=True, bias=bias, eps=eps, without=without)


def rms_norm(module: str, *, offset: float = 0.0, eps: float | None = None) -> StoredNorm:
    """An RMSNorm with gamma = offset + weight."""
    return StoredNorm(module, centred=False, offset=offset, eps=eps)


@dataclass(frozen=True)
class QkNorm:
    """Where the gammas of a norm of queries and keys stand, one module for each, and what they are shared by.

    Attributes
    ----------
    query, key : str
        Modules; empty where the norm has no parameters.
    scope : {"shared", "own", "listed", "joint"}
        One gamma of a head's width for all heads; one a head in one tensor; one a head in tensors of their own; or one
        norm over all heads together.
    centred, bias, offset, eps, gain, shift
        As of `StoredNorm`.
    rotated : bool
        It comes after rotation; otherwise before. Only an RMSNorm with one gamma for all heads may.
    within : function of (ModelConfig, layer index) -> bool
        Which layers have it.
    """

    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    scope: str = "shared"
    centred: bool = False
    bias: bool = False
    offset: float = 0.0
    eps: float | None = None
    rotated: bool = False
    within: Callable[[ModelConfig, int], bool] = always
    gain: str = "weight"
    shift: str = "bias"


@dataclass(frozen=True)
class Memory:
    """The second input of cross-attention: what an encoder hands over, of the width that the keys' tensor has.

    Attributes
    ----------
    norm : StoredNorm or None
        A norm of it that belongs to the layer. The encoder's own final norm is in what it hands over.
    """

    norm: StoredNorm | None = None


@dataclass(frozen=True)
class Biases:
    """Which projections have a bias: true, false, or the config key that says so."""

    query: bool | str = False
    key: bool | str = False
    value: bool | str = False
    output: bool | str = False


NO_BIASES = Biases()


def biases(qkv: bool | str, output: bool | str) -> Biases:
    """Query, key and value alike."""
    return Biases(qkv, qkv, qkv, output)


@dataclass(frozen=True)
class Inputs:
    """What enters the first layer.

    Attributes
    ----------
    tokens : str
        Token embedding tensor; empty in a vision tower.
    positions : str
        Learned position embedding tensor; empty where there is none.
    formula : function of ModelConfig, or None
        Gives the rows of positions, (n_positions, d), where no file stores them.
    positions_batched : bool
        It has a leading axis of one.
    offset : int or str
        Row of position 0; or the config key of the row before it.
    types : str
        Token-type embedding tensor; its row 0 is added to every token.
    width : str
        Config key of the embedding's width, where it may differ from the model's.
    before, after : str
        Projections to the model's width, before or after the norm; there only where the widths differ.
    always_projected : bool
        `after` is there even where the widths are equal.
    norm : StoredNorm or None
        A norm of the sum.
    scale : str, float or None
        Factor on token rows, or its config key; "sqrt" means the square root of the width.
    more : str
        What else enters the first layer, in words, where that is neither tokens nor positions nor one kind of token.
    """

    tokens: str = ""
    positions: str = ""
    formula: Callable[[ModelConfig], np.ndarray] | None = None
    positions_batched: bool = False
    offset: int | str = 0
    types: str = ""
    width: str = ""
    before: str = ""
    after: str = ""
    always_projected: bool = False
    norm: StoredNorm | None = None
    scale: str | float | None = None
    more: str = ""


@dataclass(frozen=True)
class Outputs:
    """How logits are made of what leaves the last layer, where that is a norm and one matrix.

    Attributes
    ----------
    norm : StoredNorm or None
        The final norm, its module named under the prefix that layers have.
    tokens : tuple of str
        Unembedding tensor, whichever of these there is, under that prefix or under the beginning of it.
    after : str
        Projection to the embedding's width, between norm and unembedding; there only where the widths differ.
    """

    norm: StoredNorm | None
    tokens: tuple[str, ...] = ("lm_head.weight",)
    after: str = ""


def nothing_more(keys: Config, modules: Collection[str]) -> dict[str, Any]:
    """Every value of config.json stands under one of the usual keys."""
    return {}


@dataclass(frozen=True)
class FeedForward:
    """A layer's feed-forward network, and the norms around it; `circuitry` follows tokens through it."""

    up: str
    down: str
    norm: StoredNorm | None  # before them; None in post-norm models
    gate: str = ""  # act(x gate) * (x up) enters `down`; the same as `up` where one tensor holds both, the gate first
    activation: str = "silu"  # where the config does not say it
    activation_keys: tuple[str, ...] = ("hidden_act", "activation_function", "activation")  # that say it
    bias: bool | str = False  # the maps have one; or the config key that says so
    transposed: bool = False  # weights are stored as (in, out), as GPT-2's are
    after_attention: StoredNorm | None = None  # of post-norm models, between attention and the maps
    attention_norm: StoredNorm | None = None  # of attention's output alone, before it joins the stream
    output_norm: StoredNorm | None = None  # of the network's output alone, before it joins the stream
    causal: bool = True  # a token sees none that comes after it
    known: bool = True  # False where the config asks for a layer that no cell describes


@dataclass(frozen=True)
class Gguf:
    """What converting an architecture to ggml's format does to its checkpoints.

    Attributes
    ----------
    architecture : str
        What such a file calls it.
    modules : dict of str
        ggml's names of modules, and theirs here; within a layer where ggml's name begins with `blk.3.`.
    undo : dict of function
        How the weights of some modules here become what they were.
    config : function of (a Config of the file's keys, ggml's names of the modules there are) -> dict
        What of config.json stands under a key of its own, or in no key at all.
    renamed : dict of dict
        Modules that are others where the file has a module of this name.
    experts : bool
        Feed-forward networks may be mixtures; attention is the same.
    """

    architecture: str
    modules: Mapping[str, str]
    undo: Mapping[str, Undo] = field(default_factory=dict)
    config: Callable[[Config, Collection[str]], dict[str, Any]] = nothing_more
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    experts: bool = False


@dataclass(frozen=True)
class Images:
    """How photographs are prepared for a model that sees them.

    Attributes
    ----------
    processor : str
        transformers' image processor for checkpoints that do not name theirs.
    settings : dict
        What the family's published checkpoints set otherwise than that processor does by default.
    any_size : bool
        The model takes images of other sizes than its config names.
    """

    processor: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    any_size: bool = False
