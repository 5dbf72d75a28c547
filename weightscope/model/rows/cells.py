"""The cells of a row: fields with an annotation, which says what fits, and a `doc`, the meaning.

A cell's name in a stanza is its path: `heads.q` is the field `q` of `Heads`. `family.Family` holds
the groups.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, Tensor
from weightscope.checkpoint.config import LARGEST, Config
from weightscope.core.compute.half import Weights
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import (
    LayerTypes,
    ModelConfig,
    OneOf,
    Within,
    all_full,
    listed_sizes,
    same_layer,
)
from weightscope.model.config.rope import GridRope, Rope
from weightscope.model.config.rules import always, default_scale
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Norm
from weightscope.model.layers.positions import Buckets, Slopes, WindowBias

# A checkpoint's tensors by the names a family's row uses, shapes checked as they are read.

LEGACY = {".weight": ".gamma", ".bias": ".beta"}  # names of a LayerNorm's in BERT-era files


@dataclass(frozen=True)
class LayerTensors:
    """The tensors under one prefix, for instance of one layer."""

    checkpoint: Checkpoint
    prefix: str  # prefix of every name asked for
    needed_by: str  # for errors: the family and the sizes that set the shapes
    # modules -> another prefix: keys that another layer makes
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
            raise CheckpointError(
                f"is missing; {self.needed_by} needs it", file=self.checkpoint.name, tensor=full
            )
        tensor = self.checkpoint[full]
        pairs = zip(shape, tensor.shape, strict=False)
        if len(tensor.shape) != len(shape) or any(w not in (None, n) for w, n in pairs):
            wanted = str(shape).replace("None", "any")
            problem = f"has shape {tensor.shape}; {self.needed_by} needs {wanted}"
            raise CheckpointError(problem, file=tensor.file.path, tensor=full)
        return tensor

    def read(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """The tensor as float32; errors as for `tensor` and for reading."""
        return self.tensor(name, shape).read()

    def weights(self, name: str, shape: tuple[int | None, ...]) -> Weights:
        """The tensor as float32, or as half precision if stored so; errors as for `read`."""
        return self.tensor(name, shape).weights()


# The cells: modules and tensors by name, and what a config says about both.

Names = tuple[str, ...]
Layout = Callable[[Any], Layer]  # makes a Layer of `layouts.StoredHeads`
Additive = Callable[[LayerTensors, ModelConfig, int], Slopes | Buckets | WindowBias]
Epsilon = Annotated[float, Within(0.0, 1.0)] | None


def cell(
    doc: str, default: Any = MISSING, *, make: Callable[[], Any] | None = None, **more: Any
) -> Any:
    """A field that is a cell: its meaning, and its default or a function that makes it."""
    given: dict[str, Any] = {"default": default} if make is None else {"default_factory": make}
    return field(**given, metadata={"doc": doc, **more})


@dataclass(frozen=True)
class StoredNorm:
    """A norm: the module of its gamma and beta, and its kind."""

    module: str  # empty where it has no parameters
    centred: bool  # LayerNorm centres, RMSNorm does not
    bias: bool = False  # it has a beta
    offset: float = 0.0  # gamma = offset + weight: 1 in Gemma
    eps: Epsilon = None  # where the architecture fixes it; None for the config's
    without: tuple[int, ...] = ()  # layers that have none
    gain: str = "weight"  # gamma's name within the module
    shift: str = "bias"  # beta's

    def unread(self, config: ModelConfig) -> Norm:
        """The norm without gamma and beta, for its sigma."""
        return Norm(self.centred, config.norm_eps if self.eps is None else self.eps)

    def read(self, tensors: LayerTensors, config: ModelConfig, width: int | None = None) -> Norm:
        """The norm of tokens of `width`, by default the model's; gamma 1, beta 0 if not stored."""
        d = width or config.d_model
        gamma, beta = np.ones(d, np.float32), np.zeros(d, np.float32)
        if self.module:
            gamma = np.float32(self.offset) + tensors.read(f"{self.module}.{self.gain}", (d,))
        if self.module and self.bias:
            beta = tensors.read(f"{self.module}.{self.shift}", (d,))
        return replace(self.unread(config), gamma=gamma, beta=beta)


@dataclass(frozen=True)
class QkNorm:
    """A norm of queries and keys: the modules of its gammas, and what shares a gamma.

    `scope`: one gamma of a head's width for all heads ("shared"); one a head in one tensor ("own");
    one a head in tensors of their own ("listed"); or one norm over all heads together ("joint").
    """

    query: str = "self_attn.q_norm"  # module; empty where the norm has no parameters
    key: str = "self_attn.k_norm"
    scope: Annotated[str, OneOf("shared", "own", "listed", "joint")] = "shared"
    centred: bool = False
    bias: bool = False
    offset: float = 0.0
    eps: Epsilon = None
    # True: it comes after rotation, which only an RMSNorm with one gamma for all heads may
    rotated: bool = False
    within: Callable[[ModelConfig, int], bool] = always  # True for layers that have it
    gain: str = "weight"
    shift: str = "bias"


@dataclass(frozen=True)
class Memory:
    """The second input of cross-attention, an encoder's output, as wide as the keys' tensor."""

    # a norm of it that belongs to the layer; the encoder's final norm does not
    norm: StoredNorm | None = None


@dataclass(frozen=True)
class Biases:
    """Biases of projections: true, false, or the config key that tells."""

    SHORT: ClassVar[Mapping[str, Names]] = {"": ("q", "k", "v", "out"), "qkv": ("q", "k", "v")}

    q: bool | str = False
    k: bool | str = False
    v: bool | str = False
    out: bool | str = False


@dataclass(frozen=True)
class Heads:
    """The projections."""

    # One cell for several: with braces for the parts in which they differ,
    # self_attn.{q,k,v,o}_proj.
    SHORT: ClassVar[Mapping[str, Names]] = {
        "modules": ("q", "k", "v", "out"),
        "qkv": ("q", "k", "v"),
    }

    layout: Layout = cell(
        "how heads lie in the projections: separate, stacked, grouped, latent ...", None
    )
    q: str = cell(
        "module of the queries; the same as of keys and values where one tensor holds all", ""
    )
    k: str = cell("module of the keys", "")
    v: str = cell("module of the values", "")
    out: str = cell("module of the output", "")
    others: Names = cell("further modules that the layout reads", ())
    loose: Names = cell("tensors of a layer that it reads and that belong to no module", ())
    shared: Names = cell("tensors of the model that every layer reads", ())
    ignored: Names = cell("modules within attention that heads are not computed from", ())
    transposed: Names = cell(
        "modules whose weights are stored as (in, out), by the last part of their names", ()
    )
    bias: Biases = cell(
        "true, false or the config key that says so; or { qkv = true, out = false }", Biases()
    )
    kv_heads: Annotated[int, Within(1, LARGEST)] | Names = cell(
        "config keys of the number of key-value heads, or that number; "
        "as many as query heads without any",
        (),
    )
    head_dim: Names = cell(
        "config keys that add up to a head's width; d / H unless all are there", ()
    )
    value_dim: Names = cell("config keys that add up to the width of a head's values", ())

    @property
    def projections(self) -> Names:
        """The modules of queries, keys, values and output."""
        return self.q, self.k, self.v, self.out


@dataclass(frozen=True)
class Norms:
    """Norms around attention: "rms:module", "layer:module" or { norm = "rms:module", ... }."""

    before: StoredNorm | None = cell(
        "the norm that feeds attention; false where it reads the stream as it is", None
    )
    after: StoredNorm | None = cell(
        "the norm that a layer's output has passed (post-norm models)", None
    )


@dataclass(frozen=True)
class RowInputs:
    """Input of the first layer."""

    tokens: str = cell("token embedding tensor; empty in a vision tower", "")
    positions: str = cell("learned position embedding tensor", "")
    formula: Callable[[ModelConfig], np.ndarray] | None = cell(
        "makes the rows of positions where no file stores them", None
    )
    offset: int | str = cell("row of position 0, or the config key of the row before it", 0)
    types: str = cell("token-type embedding tensor; its row 0 is added", "")
    width: str = cell(
        "config key of the embedding's width, where it may differ from the model's", ""
    )
    before: str = cell("projection to the model's width before the norm, where widths differ", "")
    after: str = cell("projection to the model's width after the norm, where widths differ", "")
    always_projected: bool = cell("`after` is there even where the widths are equal", False)
    norm: StoredNorm | None = cell("a norm of the sum", None)
    scale: str | float | None = cell(
        "factor on token rows, its config key, or sqrt for the root of the width", None
    )
    more: str = cell("what else enters the first layer, in words", "")
    leading: tuple[tuple[str, int | str], ...] = cell(
        "kinds of token before an image's patches: [[kind, number or config key]]", ()
    )


@dataclass(frozen=True)
class Outputs:
    """Logits from the output of the last layer, where they are a norm and one matrix."""

    norm: StoredNorm | None = cell("the final norm, under the prefix that layers have", None)
    tokens: Names = cell(
        "unembedding tensor, the first of these that is there", ("lm_head.weight",)
    )
    after: str = cell(
        "projection to the embedding's width before the unembedding, where widths differ", ""
    )


@dataclass(frozen=True)
class Positions:
    """Effects of positions on scores; a row has `rope` or `grid`."""

    rope: Rope | None = cell("rotary positions, and the dialect of their config keys", None)
    grid: GridRope | None = cell("rotation by row and column", None)
    bias: Additive | None = cell(
        "a term by distance: alibi, distances (T5's buckets), window_table ...", None
    )


@dataclass(frozen=True)
class Scores:
    """Scores from queries and keys."""

    scale: Callable[[ModelConfig, int], float] = cell(
        "what multiplies scores, 1 / sqrt(head_dim) unless it is named", default_scale
    )
    qk_norm: QkNorm | None = cell(
        "the norm of queries and keys; true for q_norm and k_norm, one gamma for all heads", None
    )


@dataclass(frozen=True)
class FeedForward:
    """A layer's feed-forward network and its norms; `circuits` follows tokens through it."""

    up: str = cell("module that leads to the hidden width", "")
    down: str = cell("module that leads back", "")
    gate: str = cell(
        "act(x gate) * (x up) enters `down`; "
        "`up` again where one tensor holds both, the gate first",
        "",
    )
    norm: StoredNorm | None = cell("the norm before them; false in post-norm models", None)
    after_attention: StoredNorm | None = cell(
        "of post-norm models: the norm between attention and the network", None
    )
    attention_norm: StoredNorm | None = cell(
        "the norm that attention's output passes before it joins the stream (Gemma 2)", None
    )
    output_norm: StoredNorm | None = cell(
        "the norm that the network's output passes before it joins the stream", None
    )
    activation: str = cell("where the config does not say it", "silu")
    activation_keys: Names = cell(
        "config keys that say it", ("hidden_act", "activation_function", "activation")
    )
    bias: bool | str = cell("the maps have one; or the config key that says so", False)
    transposed: bool = cell("weights are stored as (in, out)", False)
    causal: bool = cell("a token sees none that comes after it", True)
    known: bool = cell("false where the config asks for a layer that no cell describes", True)


@dataclass(frozen=True)
class FromConfig:
    """Names of things in config.json, and rules that follow from its values."""

    keys: Mapping[str, Names] = cell(
        'config keys of sizes where they are unusual: { n_layers = "depth" }', make=dict
    )
    defaults: Mapping[str, Any] = cell(
        "what config.json may leave out, if no class says it", make=dict
    )
    derived: Callable[[Config], Mapping[str, Any]] | None = cell(
        "values that follow from others: the sizes of one stage", None
    )
    sizes: Callable[[ModelConfig, int], Mapping[str, Any]] = cell(
        "values that differ in one layer", listed_sizes
    )
    listed: str = cell("config key of the list of the layers' types", "layer_types")
    layer_types: LayerTypes = cell(
        "the layers' types where the config does not list them", all_full
    )
    attention_types: Names = cell("types of layers that are attention; all unless it is named", ())
    stored_layer: Callable[[ModelConfig, int], int] = cell(
        "under which index a layer's tensors are", same_layer
    )
    attentions: int = cell("layers of attention in each layer of the model", 1)


def nothing_more(keys: Config, modules: Collection[str]) -> dict[str, Any]:
    """No values: every value of config.json is under one of the usual keys."""
    return {}


@dataclass(frozen=True)
class Gguf:
    """Differences of this architecture's GGUF files from other GGUF files."""

    architecture: Names = cell(
        "what GGUF files call this row; the row that says it reads such files", ()
    )
    given: Names = cell(
        "keys, or key=value, that tell its files from others of that architecture", ()
    )
    keys: Mapping[str, str] = cell(
        "keys of config.json by the GGUF file's, less the architecture's name", make=dict
    )
    roles: Mapping[str, str] = cell(
        "ggml's names of modules that have another role here than elsewhere", make=dict
    )
    modules: Mapping[str, str] = cell(
        "the row's modules, or tensors, by ggml's names, where no role says it", make=dict
    )
    whole: Mapping[str, str] = cell(
        "whole names of tensors by ggml's, {i} for the layer, where a file has several stacks",
        make=dict,
    )
    scalars: Mapping[str, str] = cell(
        "tensors of one value, by the header key that lists one value per layer; "
        '"as (1,)" of vectors',
        make=dict,
    )
    halves: bool = cell(
        "rows of queries and keys are reordered, since ggml rotates neighbours", False
    )
    tiled: bool = cell(
        "value heads of linear layers are reordered, since ggml repeats all key heads in turn",
        False,
    )
    config: Callable[[Config, Collection[str]], dict[str, Any]] = cell(
        "values of config.json that have no key of their own in a GGUF file", nothing_more
    )
    experts: bool = cell("feed-forward networks may be mixtures", False)


@dataclass(frozen=True)
class Images:
    """Preparation of photographs for a model that sees them."""

    processor: str  # transformers' image processor for checkpoints that name none
    # settings that differ from the processor's defaults
    settings: Mapping[str, Any] = field(default_factory=dict)
    any_size: bool = False  # the model takes images of other sizes than its config names
