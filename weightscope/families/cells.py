"""The cells of a row: where norms, biases, embeddings and logits of an architecture stand, and how."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weightscope.attention.norms import Norm
from weightscope.checkpoint.config import Config
from weightscope.families.config import ModelConfig
from weightscope.families.ggml_order import Undo
from weightscope.families.tensors import LayerTensors
from weightscope.families.within import always


@dataclass(frozen=True)
class StoredNorm:
    """Where a norm's gamma and beta stand in a file, and what kind of norm it is.

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
    """

    module: str
    centred: bool
    bias: bool = False
    offset: float = 0.0
    eps: float | None = None
    without: tuple[int, ...] = ()

    def unread(self, config: ModelConfig) -> Norm:
        """The norm without gamma and beta, for its sigma."""
        return Norm(self.centred, config.norm_eps if self.eps is None else self.eps)

    def read(self, tensors: LayerTensors, config: ModelConfig, width: int | None = None) -> Norm:
        """The norm of tokens of `width`, the model's as a rule; gamma is 1 and beta 0 where there is no such tensor."""
        d = width or config.d_model
        gamma, beta = np.ones(d, np.float32), np.zeros(d, np.float32)
        if self.module:
            gamma = np.float32(self.offset) + tensors.read(self.module + ".weight", (d,))
        if self.module and self.bias:
            beta = tensors.read(self.module + ".bias", (d,))
        return replace(self.unread(config), gamma=gamma, beta=beta)


def layer_norm(
    module: str, *, bias: bool = True, eps: float | None = None, without: tuple[int, ...] = ()
) -> StoredNorm:  # fmt: skip
    """A LayerNorm; an empty `module` stands for one without parameters."""
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
    centred, bias, offset, eps
        As of `StoredNorm`.
    rotated : bool
        It comes after rotation; otherwise before. Only an RMSNorm with one gamma for all heads may.
    within : function of (ModelConfig, layer index) -> bool
        Which layers have it.
    log_scales : str
        Tensor (H, 1, 1) of logarithms of what multiplies each head's scores then; empty where there is none.
    largest_scale : float
        The bound of those factors.
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
    log_scales: str = ""
    largest_scale: float = 100.0


@dataclass(frozen=True)
class Gate:
    """Where the gate of what heads have gathered stands: a Linear of the query token, an output a dimension or a head.

    Attributes
    ----------
    module : str
    bias : bool or str
        It has one; or the config key that says so.
    of_heads : str
        Tensor of a further bias, one a head; empty where there is none.
    kind : str
        One of `attention.gathered.GATES`.
    """

    module: str
    bias: bool | str = False
    of_heads: str = ""
    kind: str = "sigmoid"


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
        Token-type embedding tensor, of which row 0 is added to every token.
    width : str
        Config key of the embedding's width, where it may differ from the model's.
    before, after : str
        Projections to the model's width, before or after the norm; there only where the widths differ.
    always_projected : bool
        `after` is there even where the widths are equal.
    norm : StoredNorm or None
        A norm of the sum.
    scale : str, float or None
        Factor on token rows, or its config key; "sqrt" stands for the square root of the width.
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
    config: Callable[[Config, Collection[str]], dict[str, Any]] = lambda keys, modules: {}
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
