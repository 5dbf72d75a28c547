"""The role of every tensor of a checkpoint as its one name, in any container and layout.

| role | meaning |
| --- | --- |
| q, k, v, o | projections of attention; fused ones: `q+k+v`, `k+v`, `q+output_gate` |
| q_a, q_b, kv_a, kv_b, q_a_norm, kv_a_norm | DeepSeek's latents: to one, out of it, its norm |
| q_norm, k_norm | norms of queries and keys; `q_norm.3` of head 3 if each head has its own tensor |
| gate, up, down | the feed-forward network; `gate+up` where one tensor holds both |
| router, router.correction | the choice of experts |
| expert.gate, expert.up, expert.down | an expert; without an index where one tensor stacks all |
| router.scale, router.expert_scale | of what the router reads; of each expert's output |
| norm.experts, norm.experts_output, norm.network_output | of experts beside a plain network |
| per_layer.tokens, .inputs, .gate, .projection, .norm | what each layer has of a token (Gemma 4) |
| shared_expert.gate, .up, .down, .router | the expert that every token passes |
| first.gate, first.up, first.down, norm.first | the network before attention (conformers) |
| norm.before, norm.after | before attention; after a layer in post-norm models |
| norm.mlp, norm.after_attention | before the network; the same in post-norm models |
| norm.attention_output, norm.mlp_output | of attention's or the network's output |
| norm.mlp_inner, mlp_scale | of the network's hidden units; LayerScale of its output |
| norm.inputs, norm.outputs, norm.memory | of embeddings; before the unembedding; of a memory |
| tokens, positions, types, class, registers, patches, mask | inputs of the first layer |
| relative_positions | a table of biases by distance |
| unembedding | the language-model head |
| pooler | the map of the first token, or of the pooled ones, after the layers |
| inputs.projection, outputs.projection | between the embedding's width and the model's |
| outputs.exit | of a looped model: whether a token leaves after a pass |
| mixer.in, mixer.out | into and out of a mixer without a softmax (Mamba, DeltaNet, convolution) |
| mixer.q, .k, .v, .qkv, .qkvz | what a linear layer's state is read and written along, its gate z |
| mixer.gate, .gate_a, .gate_b | the output's gate (z); by way of a latent |
| mixer.beta, .alpha, .ba, .alpha_a, .alpha_b | strength of writing, decay (alpha); both in one |
| mixer.conv, .q_conv, .k_conv, .v_conv | causal convolutions, (channels, 1, taps) |
| mixer.A_log, .dt_bias, .D | log of -A, bias of steps, skip (Mamba, DeltaNet, KDA) |
| mixer.x, .dt, .dt_norm, .B_norm, .C_norm | Mamba 1: to steps, B and C; from steps; norms of each |
| mixer.norm | of the mixer's output, gated or not |
| projector.norm, projector.up, projector.down | from a tower's width to the text model's |
| indexer.q, .k, .k_norm, .weights | the choice of the keys that a query sees |
| streams.attention.mix, .base, .scale | residual streams mixed (hyper-connections) |
| the name of a step, as sinks or layer_scale | a rare mechanism; see docs/rows.md |

`.bias` follows the role of a bias or a norm's beta. A norm that feeds attention and the network is
norm.before.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, Tensor, WholeTensor
from weightscope.checkpoint.gguf import GgufTensor
from weightscope.checkpoint.packings.packed import DequantisedTensor
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.tables import Table
from weightscope.model.config.config import ModelConfig
from weightscope.model.config.dialects import in_layer
from weightscope.model.config.rope import Rope
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.layouts import (
    StoredHeads,
    by_dimension_and_head,
    gated,
    separate,
)
from weightscope.model.layers.maps import Affine
from weightscope.model.rows import mixers
from weightscope.model.rows.cells import LEGACY, LayerTensors, StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.gguf import (
    ROLES,
    RestoredTensor,
    keys_in_halves,
    less_one,
    queries_in_halves,
)
from weightscope.model.rows.original import PartTensor
from weightscope.model.rows.table import FAMILIES, title

# Roles that are named within the model; all others within a layer.
OF_MODEL = (
    "tokens",
    "positions",
    "types",
    "class",
    "registers",
    "patches",
    "projector.up",
    "projector.down",
    "mask",
    "unembedding",
    "norm.inputs",
    "norm.outputs",
    "inputs.projection",
    "outputs.projection",
    "pooler",
    "per_layer.tokens",
    "per_layer.inputs",
    "per_layer.inputs_norm",
    "streams.outputs.mix",
    "streams.outputs.base",
    "streams.outputs.scale",
)
# Modules of an indexer, in every architecture that has one.
OF_INDEXER = {
    "wq_b": "indexer.q",
    "wk": "indexer.k",
    "k_norm": "indexer.k_norm",
    "weights_proj": "indexer.weights",
}
# Modules outside all stacks, by the end of their names: projectors above all. Wrappers have no row.
OF_WRAPPERS = {
    "projector": (
        "multi_modal_projector",
        "multi_modal_projector.linear",
        "modality_projection.proj",
        "perceive.mlp",
        "patch_merger.merging_layer",
    ),
    "projector.norm": (
        "multi_modal_projector.layer_norm",
        "mlp1.0",
        "mm_projector.pre_norm",
        "merger.norm",
        "merger.ln_q",
        "perceive.before_rms",
        "vision_projection.norm",
    ),
    "projector.up": (
        "multi_modal_projector.linear_1",
        "vision_projection.linear_1",
        "mm_projector.0",
        "mm_projector.in_proj",
        "mlp1.1",
        "merger.linear_fc1",
        "merger.mlp.0",
        "img_projection.0",
        "proj_mlp.fc1",
    ),
    "projector.down": (
        "multi_modal_projector.linear_2",
        "vision_projection.linear_2",
        "mm_projector.2",
        "mm_projector.out_proj",
        "mlp1.3",
        "merger.linear_fc2",
        "merger.mlp.2",
        "img_projection.2",
        "proj_mlp.fc2",
    ),
    "projector.norm.outputs": ("perceive.after_rms",),
    "projector.convolution": ("perceive.proj.0",),
    "projector.reduction": ("perceive.proj.2",),
    "projector.begin": ("perceive.image_begin",),
    "projector.newline": ("image_newline", "sub_GN"),
    "projector.separator": ("glb_GN", "perceive.image_sep"),
    "projector.end": ("perceive.image_end",),
    "inputs.projection": ("pre_projection",),
    "outputs.projection": ("post_projection",),
    "outputs.exit": ("early_exit_gate",),
}
OF_WRAPPERS |= {
    f"region.{kind}.{role}": (f"region.{prefix}_{end}",)
    for kind, prefix in (("coordinate", "coord"), ("size", "size"))
    for role, end in (
        ("features", "features"),
        ("encoder", "encoder"),
        ("decoder", "decoder"),
        ("decoder.up", "decoder.fc1"),
        ("decoder.down", "decoder.fc2"),
    )
}  # Moondream's coordinates and sizes of a box
_ENDS = {end: role for role, ends in OF_WRAPPERS.items() for end in ends}
_DEEP = re.compile(r"deepstack_merger_list\.(\d{1,6})\.", re.ASCII)
# Modules of latent attention, by the last part of their names, in every architecture that has it.
OF_LATENTS = {
    "q_proj": "q",
    "q_a_proj": "q_a",
    "q_b_proj": "q_b",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_b_proj": "kv_b",
    "q_a_layernorm": "q_a_norm",
    "kv_a_layernorm": "kv_a_norm",
}
# ggml's names of a mixture's tensors, which keep these names: one tensor holds all experts there.
OF_GGUF = {
    "ffn_gate_inp": "router",
    "exp_probs_b": "router.correction",
    "ffn_gate_exps": "expert.gate",
    "ffn_up_exps": "expert.up",
    "ffn_down_exps": "expert.down",
    "ffn_gate_up_exps": "expert.gate+up",
    "ffn_gate_shexp": "shared_expert.gate",
    "ffn_up_shexp": "shared_expert.up",
    "ffn_down_shexp": "shared_expert.down",
    "ffn_gate_inp_shexp": "shared_expert.router",
}
# MLX's modules of a mixture's experts, in or next to transformers' own: one tensor holds them all.
OF_MLX = ("switch_mlp", "experts", "experts.switch_glu")
MIXTURE = "block_sparse_moe."  # Mixtral's published name of what is `mlp.` in transformers 5
# Norms that may have other widths than the model's.
OF_ANY_WIDTH = ("norm.inputs", "norm.outputs", "norm.mlp_inner")
TRANSPOSED, ALTERNATING, FROM_ZERO = "(in, out)", "alternating", "counted from 0"
HOW = (TRANSPOSED, ALTERNATING, FROM_ZERO)  # words after "as" in a cell `also`
ABOVE = "../"  # prefix of a module of `also` one level above the row's layer
UNNAMED = "no row names it"
OF_EXPERT = re.compile(r"(.*)expert (\d{1,6}) (.+)", re.ASCII)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file under its role, or one of several that the file fuses."""

    name: str  # in the checkpoint
    role: str  # the name again where no row knows it
    stack: str | None  # name of its attention stack
    layer: int | None
    expert: int | None  # None where one tensor holds all experts
    shape: tuple[int, ...]  # shape of `array()`
    stored: str  # storage in the file, in words
    tensor: Tensor = field(repr=False, compare=False)  # the file's
    # changes by `array`, equal for tensors that are stored alike; None for a part of a tensor
    undone: tuple[object, ...] | None = field(repr=False, compare=False)
    read: "Read" = field(repr=False, compare=False)
    # True: an expert, unchanged from the file's tensor
    is_slice: bool = field(default=False, repr=False, compare=False)

    @property
    def has_role(self) -> bool:
        """True if a row names it."""
        return self.role != self.name

    @property
    def experts(self) -> "tuple[NamedTensor, ...]":
        """Experts that one tensor of the file stacks, each read alone; empty if it stacks none."""
        if self.expert is not None or not self.role.startswith("expert.") or len(self.shape) < 2:
            return ()
        return tuple(map(self.of_expert, range(self.shape[0])))

    def of_expert(self, index: int) -> "NamedTensor":
        """One of the experts that this tensor stacks."""
        how = f"{self.stored}, one tensor for all experts".removeprefix(", ")
        read = lambda expert: self.read(index)  # noqa: E731
        return replace(
            self,
            expert=index,
            shape=self.shape[1:],
            stored=how,
            undone=None,
            read=read,
            is_slice=self.undone == (),
        )

    def as_stored(self) -> Tensor:
        """The tensor of the file, or the part of it."""
        return ConvertedTensor(self.tensor, self) if self.undone is None else self.tensor

    def in_convention(self) -> Tensor:
        """The tensor in the convention of `array`: the stored one where nothing changes."""
        return self.tensor if self.undone == () else ConvertedTensor(self.tensor, self)

    def array(self) -> np.ndarray:
        """The tensor as float32 in one convention, in any container.

        Matrices have a row for each output, queries and keys the order that transformers rotates;
        gains of norms multiply.

        Raises
        ------
        CheckpointError
            The tensor is broken, or its shape does not fit the config.
        """
        return np.asarray(self.read(None), np.float32, order="C")

    def as_json(self) -> dict[str, Any]:
        """Its names, shape and storage."""
        keys = ("name", "role", "stack", "layer", "expert", "shape", "stored")
        return {key: getattr(self, key) for key in keys} | {"shape": [*self.shape]}


Read = Callable[[int | None], np.ndarray]  # the array, of one expert or of all


@dataclass(frozen=True)
class ConvertedTensor(DerivedTensor, WholeTensor):
    """A tensor of the file in the convention of `NamedTensor.array`."""

    named: NamedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.named.shape

    def read(self) -> np.ndarray:
        return self.named.array()

    def ends(self) -> tuple[Tensor, Tensor, int | tuple[float, ...]] | None:
        expert = self.named.expert
        if expert is None or not self.named.is_slice or (ends := self.stored.ends()) is None:
            return None

        def of_expert(end: Tensor) -> ConvertedTensor:
            read = partial(_expert, end, expert)
            named = replace(self.named, read=read, is_slice=False, shape=end.shape[1:])
            return ConvertedTensor(end, named)

        return of_expert(ends[0]), of_expert(ends[1]), ends[2]

    def unchecked(self, noted: set[str]) -> Tensor:
        """Itself, as unchecked as the checkpoint that it is read from."""
        return self


def _expert(stacked: Tensor, expert: int, _: int | None) -> np.ndarray:
    """One expert of a tensor that stacks all."""
    return stacked.rows(expert, expert + 1)[0]


class Tensors:
    """Every tensor of a checkpoint under its role, one `NamedTensor` for each in the file.

    A key is a role with its place, or a tensor's name in the file: "layer 3 up", "layer 3 q" (of a
    fused tensor too), "layer 3 expert 5 gate", "layer 0 norm.before", "tokens"; of another stack
    "vision layer 3 up". Nothing is read before `array()`.

    Parameters
    ----------
    checkpoint : Checkpoint
    stacks : mapping of str to (Family, ModelConfig, str)
        The row as configured, the numbers and the prefix of each stack, the model's own first.

    Raises
    ------
    CheckpointError
        There is no tensor of that key; the message names near ones.

    Examples
    --------
    >>> import weightscope as ws
    >>> tensors = ws.open_model("embedded").tensors
    >>> tensors["layer 1 q"].array().shape, tensors["layer 1 q"].stored
    ((192, 192), 'transposed (in, out), fused q+k+v')
    >>> [tensor.role for tensor in tensors][:3]
    ['q+k+v.bias', 'q+k+v', 'o.bias']
    """

    def __init__(
        self, checkpoint: Checkpoint, stacks: Mapping[str, tuple[Family, ModelConfig, str]]
    ) -> None:
        self.checkpoint, self.own = checkpoint, next(iter(stacks), None)
        self.readers = [_Reader(checkpoint, name, *stack) for name, stack in stacks.items()]

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Tensors({len(self.rows)} tensors, {self._unnamed} of them without a role)"

    @property
    def _unnamed(self) -> int:
        return sum(not tensor.has_role for tensor in self.rows)

    @cached_property
    def rows(self) -> tuple[NamedTensor, ...]:
        """One for each tensor of the file, in its order; those without a role are last."""
        named: dict[str, NamedTensor] = {}
        for reader in self.readers:
            for tensor in reader.named():
                named.setdefault(tensor.name, tensor)
        left = [
            _of_wrapper(tensor) for name, tensor in self.checkpoint.items() if name not in named
        ]
        left.sort(key=lambda tensor: not tensor.has_role)
        return (*(named[name] for name in self.checkpoint if name in named), *left)

    @cached_property
    def of_mixers(self) -> dict[int, dict[str, NamedTensor]]:
        """The tensors of layers without a softmax and of the norm before them, by layer and role.

        Roles are without "mixer."; of the model's own stack.
        """
        layers: dict[int, dict[str, NamedTensor]] = {}
        for tensor in self.rows:
            is_theirs = tensor.role.startswith((mixers.OF_MIXER, *mixers.NORMS))
            if tensor.stack == self.own and tensor.layer is not None and is_theirs:
                role = tensor.role.removeprefix(mixers.OF_MIXER)
                layers.setdefault(tensor.layer, {})[role] = tensor
        own = {layer: roles for layer, roles in layers.items() if {*roles} - {*mixers.NORMS}}
        return dict(sorted(own.items()))

    @cached_property
    def _by_label(self) -> dict[str, NamedTensor]:
        """Tensors and parts of fused ones by label; by label and name if that is taken."""
        labelled: dict[str, NamedTensor] = {}
        for tensor in self.rows:
            for part in (tensor, *self.parts(tensor)):
                label = self.label(part)
                labelled[label if label not in labelled else f"{label} {part.name}"] = part
        return labelled

    def label(self, tensor: NamedTensor) -> str:
        """A tensor's key here: its role and its place."""
        role = tensor.role if tensor.expert is None else tensor.role.removeprefix("expert.")
        stack = f"{tensor.stack} " if tensor.stack not in (None, self.own) else ""
        layer = "" if tensor.layer is None else f"layer {tensor.layer} "
        return f"{stack}{layer}{'' if tensor.expert is None else f'expert {tensor.expert} '}{role}"

    @property
    def roles(self) -> dict[str, str]:
        """Roles of tensors by their names in the file; another stack's follow its name."""
        return {tensor.name: self.known_as(tensor) for tensor in self.rows if tensor.has_role}

    def known_as(self, tensor: NamedTensor) -> str:
        """The role of a tensor or a part of one; another stack's follows its name."""
        return tensor.role if tensor.stack in (None, self.own) else f"{tensor.stack} {tensor.role}"

    def read_through(self, replaced: Mapping[str, Tensor]) -> None:
        """Read arrays from these tensors, by name, and others from the checkpoint from now on."""
        for reader in self.readers:
            reader.values = self.checkpoint.with_tensors(replaced)

    @property
    def lead(self) -> str:
        """Numbers of tensors, and of tensors with a role, in a sentence."""
        unnamed, rest = self._unnamed, ""
        if unnamed:
            rest = f"; {unnamed} have only the name in the file, since no row names them"
        return f"{counted(len(self.rows), 'tensor')}, {len(self.rows) - unnamed} with a role{rest}."

    @cached_property
    def table(self) -> Table:
        """One row per tensor, as text where it is a shape."""
        shown = ("name", "role", "stack", "layer", "expert", "shape", "stored")
        rows = [[_shown(getattr(tensor, name)) for name in shown] for tensor in self.as_in_file]
        return Table.of_rows(["tensor", *shown[1:]], rows)

    def as_json(self) -> list[dict[str, Any]]:
        """One object per tensor."""
        return [tensor.as_json() for tensor in self.as_in_file]

    @property
    def as_in_file(self) -> list[NamedTensor]:
        """One for each tensor, under its name in the file."""
        stored = self.checkpoint.stored_names
        return [replace(each, name=stored.get(each.name, each.name)) for each in self.rows]

    @property
    def labels(self) -> tuple[str, ...]:
        """Every role with its place, with parts of fused tensors, without experts in one tensor."""
        return tuple(self._by_label)

    def parts(self, tensor: NamedTensor) -> tuple[NamedTensor, ...]:
        """The tensors that one tensor of the file fuses; empty where it fuses none."""
        reader = next((reader for reader in self.readers if reader.stack == tensor.stack), None)
        if reader is None or "+" not in tensor.role or not tensor.has_role:
            return ()
        return reader.parts(tensor)

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and bool(self[key])
        except CheckpointError:
            return False

    def __getitem__(self, key: str | int) -> NamedTensor:
        if isinstance(key, int):
            return self.rows[key]
        if (tensor := self._by_label.get(" ".join(key.split()))) is not None:
            return tensor
        for tensor in self.rows:
            if tensor.name == key:
                return tensor
        if match := OF_EXPERT.fullmatch(key):
            stacked = self._by_label.get(f"{match[1]}expert.{match[3]}")
            if stacked is not None and len(stacked.shape) > 1 and int(match[2]) < stacked.shape[0]:
                return stacked.of_expert(int(match[2]))
        near = get_close_matches(key, [*self._by_label, *self.checkpoint], n=3)
        known = near or [*self._by_label][:3]
        raise CheckpointError(
            f"has no tensor '{key}'; {'near' if near else 'there'} are {', '.join(known)}",
            file=self.checkpoint.name,
        )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return "" if value is None else printable(value)


class _RowModule(NamedTuple):
    """A module in a row."""

    role: str
    how: tuple[str, ...] = ()  # words in HOW
    norm: StoredNorm | None = None
    has_any: bool = False  # its tensors may have any name


Patterns = list[tuple[re.Pattern[str], _RowModule]]  # names of experts' tensors


def _stated(also: Mapping[str, Sequence[str]]) -> dict[str, _RowModule]:
    """Modules and tensors in a cell `also`, by their names."""
    modules: dict[str, _RowModule] = {}
    for role, names in also.items():
        for stated in names:
            name, _, how = stated.partition(" as ")
            modules[name] = _RowModule(role, tuple(word for word in HOW if word in how))
    return modules


class _Stored(NamedTuple):
    """A tensor of the file, as a row has it."""

    tensor: Tensor
    role: str
    how: tuple[str, ...]  # words in HOW
    norm: StoredNorm | None
    layer: int | None
    config: ModelConfig
    row: Family

    @property
    def plain(self) -> str:
        """Its role, or the role of the matrix that it is the bias of."""
        return self.role.removesuffix(".bias")

    @property
    def is_bias(self) -> bool:
        return self.role != self.plain

    @property
    def is_gain(self) -> bool:
        return "norm" in self.role and not self.is_bias

    @property
    def offset(self) -> float:
        """The number that the gains of a norm are counted from."""
        return self.norm.offset if self.norm else FROM_ZERO in self.how

    @property
    def is_split(self) -> bool:
        """True if the row's layout splits it into projections."""
        letters = self.plain.split("+")
        if self.layer is None or not {*letters} & {"q", "k", "v", "o"}:
            return False
        is_fused = len(letters) > 1 and self.row.heads.layout is not separate
        return is_fused or len(self.tensor.shape) == 3


class _Reader:
    """The tensors of one stack: their roles, and their arrays."""

    def __init__(
        self, checkpoint: Checkpoint, stack: str, family: Family, config: ModelConfig, prefix: str
    ) -> None:
        self.checkpoint, self.stack, self.prefix = checkpoint, stack, prefix
        self.family, self.config = family, config
        self.values = checkpoint  # source of arrays; see `Tensors.read_through`
        self._last: tuple[int, Layer] | None = None
        self._fused: tuple[tuple[str, int | None], np.ndarray] | None = None

    # Roles of tensors.

    def named(self) -> Iterator[NamedTensor]:
        """Every tensor that the row names, layers that share tensors once."""
        yield from self._of_model()
        if isinstance(next(iter(self.checkpoint.values()), None), GgufTensor | RestoredTensor):
            yield from self._of_gguf()
        seen: dict[str, list[int]] = {}
        for index in range(self.config.n_layers):
            stem = self.prefix + self.family.stored_name(self.config, index)
            seen.setdefault(stem, []).append(index)
        for stem, layers in seen.items():
            shared = f"shared by layers {', '.join(map(str, layers))}" if len(layers) > 1 else ""
            config, row = in_layer(self.config, self.family, layers[0])
            kinds = self.family.config.attention_types
            attends = not kinds or config.layer_types[layers[0]] in kinds
            modules, patterns = modules_of(row, attends=attends)
            for name in self.checkpoint.names_under(stem):
                if matched := _match(name.removeprefix(stem), modules, patterns):
                    yield self._tensor(name, *matched, layers[0], config, row, shared)
            above = f"{stem.rstrip('.').rpartition('.')[0]}."
            for module in (module for module in modules if module.startswith(ABOVE)):
                for name in self.checkpoint.names_under(above + module.removeprefix(ABOVE) + "."):
                    if matched := _match(ABOVE + name.removeprefix(above), modules, patterns):
                        yield self._tensor(name, *matched, layers[0], config, row, shared)

    @property
    def is_tied(self) -> bool:
        """True if logits are made by the rows of the token embedding, as the config says."""
        return self.config.tied and self.family.outputs is not None

    def _of_model(self) -> Iterator[NamedTensor]:
        row, checkpoint = self.family, self.checkpoint
        modules, patterns = modules_of(row, of_model=True)
        for module in modules:
            for name in (self.prefix + module, *checkpoint.names_under(f"{self.prefix}{module}.")):
                matched = _match(name.removeprefix(self.prefix), modules, patterns)
                if name in checkpoint and matched:
                    is_tied = self.is_tied and matched[0].role == "tokens"
                    tied = "also the unembedding (tied)" if is_tied else ""
                    yield self._tensor(name, *matched, None, self.config, row, tied)
        ends = [i + 1 for i, letter in enumerate(self.prefix) if letter == "."]
        heads = row.outputs.tokens if row.outputs else row.also.get("unembedding", ())
        names = [self.prefix[:end] + name for end in (*ends, 0) for name in heads]
        names += [name.removesuffix(".weight") + ".bias" for name in names]
        for name in dict.fromkeys(names):
            if name in checkpoint:
                role = "unembedding.bias" if name.endswith(".bias") else "unembedding"
                tied = "tied to the tokens" if self.is_tied and role == "unembedding" else ""
                yield self._tensor(name, _RowModule(role), None, None, self.config, row, tied)

    def _of_gguf(self) -> Iterator[NamedTensor]:
        """Tensors that keep ggml's names because the row has no module for them."""
        known = {**ROLES, **OF_GGUF, **(self.family.gguf.roles if self.family.gguf else {})}
        for name in self.checkpoint:
            parts = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+)(?:\.(weight|bias))?", name, re.ASCII)
            role = known.get(parts[2]) if parts else None
            if parts is None or role is None:
                continue
            if not parts[1]:
                if role in OF_MODEL:
                    at = None, self.config, self.family
                    yield self._tensor(name, _RowModule(role), None, *at, "")
            elif (index := int(parts[1])) < self.config.n_layers:
                role += ".bias" if parts[3] == "bias" and role != "router.correction" else ""
                config, row = in_layer(self.config, self.family, index)
                yield self._tensor(name, _RowModule(role), None, index, config, row, "")

    def _tensor(
        self,
        name: str,
        module: _RowModule,
        expert: int | None,
        layer: int | None,
        config: ModelConfig,
        row: Family,
        shared: str,
    ) -> NamedTensor:
        tensor, role = self.checkpoint[name], module.role
        shape, words = tensor.shape, [*packed_as(tensor)]
        at = _Stored(tensor, role, module.how, module.norm, layer, config, row)
        if self._is_transposed(module, name, row) and len(shape) > 1:
            at = at._replace(how=(*module.how, TRANSPOSED))
            words.append(f"transposed {TRANSPOSED}")
        of_network = role.startswith(("gate", "expert", "shared"))
        if "+" in role and row.heads.layout is separate and not of_network:
            words.append(f"one matrix as {' and '.join(at.plain.split('+'))}")
        elif "+" in role:
            words.append(f"fused {at.plain}")
            if ALTERNATING in at.how:
                words.append("rows alternating")
        words += _rotary(role, tensor, config, row, layer)
        if at.is_gain:
            is_restored = isinstance(tensor, RestoredTensor) and tensor.undo is less_one
            words.append(f"gain counted from {1 if is_restored or not at.offset else 0}")
        words += [shared] if shared else []
        undone: list[object] = []
        if at.is_split:
            heads = config.n_heads, config.n_kv_heads, config.head_dim
            undone.append((row.heads.layout.__name__, *heads))
        if TRANSPOSED in at.how and len(shape) > 1:
            undone.append(TRANSPOSED)
            shape = (*shape[:-2], shape[-1], shape[-2])
        if ALTERNATING in at.how:
            undone.append(ALTERNATING)
        if at.is_gain and at.offset:  # 1 + w may have lost digits of w
            undone.append((float(at.offset), isinstance(tensor, RestoredTensor)))
        if role in ("q", "k", "v", "o") and len(shape) == 3:  # a matrix, which the file has not
            wide = config.n_heads * config.head_dim
            shape = (config.d_model, wide) if role == "o" else (wide, config.d_model)
        read, stored = partial(self._array, at, shape), ", ".join(words)
        return NamedTensor(
            name, role, self.stack, layer, expert, shape, stored, tensor, tuple(undone), read
        )

    @staticmethod
    def _is_transposed(module: _RowModule, name: str, row: Family) -> bool:
        role, last = module.role, name.rpartition(".")[0].rpartition(".")[2]
        if TRANSPOSED in module.how:
            return True
        if role in ("gate", "up", "down", "gate+up"):
            return row.mlp is not None and row.mlp.transposed
        return bool({*role.split("+")} & {"q", "k", "v", "o"}) and last in row.heads.transposed

    # Arrays.

    def _array(self, at: _Stored, shape: tuple[int, ...], expert: int | None) -> np.ndarray:
        """A whole tensor, or one of the experts that it stacks, in one convention."""
        if at.layer is not None and at.is_split:
            letters = at.plain.split("+")
            return np.concatenate(
                [self._projection(at.layer, each, at.is_bias) for each in letters]
            )
        self._check(at, shape)
        stored = self.values[at.tensor.name]
        array = stored.read() if expert is None else stored.rows(expert, expert + 1)[0]
        if TRANSPOSED in at.how and array.ndim > 1:
            array = array.swapaxes(-1, -2)
        if ALTERNATING in at.how:
            axis = -1 if at.is_bias or array.ndim < 2 else -2
            rows = np.moveaxis(array, axis, 0)
            array = np.moveaxis(np.concatenate([rows[::2], rows[1::2]]), 0, axis)
        return array + np.float32(at.offset) if at.is_gain else array

    @staticmethod
    def _check(at: _Stored, shape: tuple[int, ...]) -> None:
        """Refuse a shape that the role cannot have with this config."""
        plain, config, row, d = at.plain, at.config, at.row, at.config.d_model
        wanted = ""
        if at.is_bias or (plain.startswith("norm.") and not plain.endswith("memory")):
            wanted = "" if 1 <= len(shape) <= 2 else "one axis or two"
            if not at.is_bias and shape != (d,) and plain not in OF_ANY_WIDTH:
                wanted = f"({d},)"
        elif plain in ("q", "k", "v", "gate", "up", "gate+up"):
            n_kv = config.n_kv_heads
            rows = {"q": config.n_heads, "k": n_kv, "v": n_kv, "gate+up": 2}.get(plain, 1)
            inner = None if row.memory is not None and plain in ("k", "v") else d
            if len(shape) != 2 or shape[0] % rows or (inner and shape[1] != inner):
                wanted = f"(a multiple of {rows}, {inner or 'any'})"
        elif plain in ("o", "down") and (len(shape) != 2 or shape[0] != d):
            wanted = f"({d}, any)"
        elif plain.startswith("expert."):
            inner = shape[-2 if plain.endswith("down") else -1] if len(shape) in (2, 3) else 0
            if inner != d or (plain.endswith("gate+up") and shape[-2] % 2):
                wanted = f"{d} as the width"
        if wanted:
            role_of = f"the role {at.role} of {row.name} with width {d}"
            raise at.tensor.refuse(f"has shape {shape}; {role_of} needs {wanted}")

    def parts(self, fused: NamedTensor) -> tuple[NamedTensor, ...]:
        """The tensors that one tensor of the file fuses."""
        plain, bias = fused.role.removesuffix(".bias"), ".bias" * fused.role.endswith(".bias")
        kind, dot, rest = plain.rpartition(".")
        roles, parts = rest.split("+"), []
        shape: tuple[int, ...]
        for i, role in enumerate(roles):
            if role in ("gate", "up"):
                axis, shape = len(fused.shape) - (1 if bias else 2), ()
                if axis >= 0:
                    half = fused.shape[axis] // 2
                    shape = (*fused.shape[:axis], half, *fused.shape[axis + 1 :])
                read: Read = partial(self._half, fused, i, -1 if bias else -2)
            elif fused.layer is not None:
                rows, d = self._rows(role, fused.layer), self.config.d_model
                inner = d if self.family.memory is None or not fused.shape else fused.shape[-1]
                shape = (rows,) if bias else ((d, rows) if role == "o" else (rows, inner))
                read = partial(self._part, fused.layer, role, bool(bias))
            else:
                continue
            part = replace(fused, role=f"{kind}{dot}{role}{bias}", shape=shape, undone=None)
            parts.append(replace(part, read=read))
        return tuple(parts)

    def _half(self, fused: NamedTensor, index: int, axis: int, expert: int | None) -> np.ndarray:
        """Gate or up of a tensor, or expert, with both; the last one read is kept for the other."""
        key = fused.name, expert if fused.expert is None else fused.expert
        if self._fused is None or self._fused[0] != key:
            self._fused = key, fused.read(expert)
        array = self._fused[1]
        if array.ndim < -axis or array.shape[axis] % 2:
            raise CheckpointError(
                f"has shape {fused.shape}, which {fused.role} does not halve", tensor=fused.name
            )
        return np.split(array, 2, axis)[index]

    def _part(self, layer: int, role: str, bias: bool, expert: None) -> np.ndarray:
        return self._projection(layer, role, bias)

    def _rows(self, role: str, layer: int) -> int:
        config, _ = in_layer(self.config, self.family, layer)
        return (config.n_kv_heads if role in ("k", "v") else config.n_heads) * config.head_dim

    def _projection(self, index: int, role: str, bias: bool) -> np.ndarray:
        """One of the maps that the row's layout splits, (out, in), or its bias."""
        config, family = in_layer(self.config, self.family, index)
        if self._last is None or self._last[0] != index:
            needed_by = f"{family.name} with width {config.d_model} and {config.n_heads} heads"
            source = family.keys_of(config, index)
            stem, maker = (self.prefix + family.stored_name(config, i) for i in (index, source))
            lent = dict.fromkeys(family.of_keys, maker) if maker != stem else {}
            tensors = LayerTensors(self.values, stem, needed_by, lent)
            stored = StoredHeads(tensors, family, config)
            self._last = index, family.heads.layout(stored)
        layer = self._last[1]
        if role == "o":
            if bias:
                return layer.output_bias
            w_o = np.asarray(layer.w_o)  # (H, r, d)
            return w_o.reshape(-1, w_o.shape[-1]).T
        affine = {"q": layer.q, "k": layer.k, "v": layer.v, "output_gate": layer.gate}[role]
        if not isinstance(affine, Affine):
            raise CheckpointError(
                f"has no matrix of {role}: it comes out of a latent", file=self.checkpoint.name
            )
        if bias:
            return affine.b.reshape(-1)
        return affine.w.transpose(0, 2, 1).reshape(-1, affine.shape[1])


def modules_of(
    row: Family, *, of_model: bool = False, attends: bool = True
) -> tuple[dict[str, _RowModule], Patterns]:
    """Modules and tensors that a row names in a layer or in the model; patterns of experts.

    attends: the layer has attention, whose names a mixer of other layers may have too.
    """
    modules: dict[str, _RowModule] = {}
    patterns: Patterns = []
    norms, qk_norm = row.stored_norms, row.scores.qk_norm
    for role, name in row.roles.items():
        if (role in OF_MODEL) == of_model:
            norm = norms.get(role)
            if qk_norm and role in ("q_norm", "k_norm"):
                cells = {part.name for part in fields(StoredNorm)}
                cells &= {part.name for part in fields(qk_norm)}
                norm = StoredNorm(name, **{cell: getattr(qk_norm, cell) for cell in cells})
            role = "q+output_gate" if role == "q" and row.heads.layout is gated else role
            modules.setdefault(name, _RowModule(role, (), norm))
    if of_model:
        for projection in (row.inputs.before, row.inputs.after):
            if projection:
                modules[projection] = _RowModule("inputs.projection")
        if row.outputs and row.outputs.after:
            modules[row.outputs.after] = _RowModule("outputs.projection")
        for step in row.steps:
            shared = step.reads().shared
            modules |= {name: _RowModule(_of_step(step.name, name, shared)) for name in shared}
    else:
        _add_attention(row, modules)
        for name, role in mixers.roles_of(row.mixer).items():
            if not (attends and name in modules):
                modules[name] = _RowModule(role)
    stated = _stated(row.also)
    named = {name for name, module in modules.items() if not module.role.startswith("attention.")}
    surrounding = {name: module for name, module in network_of(row).items() if name not in named}
    for name, module in {**surrounding, **stated}.items():
        if (module.role in OF_MODEL) != of_model:
            continue
        if module.role.startswith("expert."):
            for stacked, of_part in _stacked_experts(name):
                modules.setdefault(stacked, of_part)
        if "{e}" in name:
            pattern = re.escape(name).replace(re.escape("{e}"), r"(\d{1,6})")
            patterns.append((re.compile(pattern + r"(?:\.(weight|bias))?", re.ASCII), module))
        else:
            modules[name] = module
            if name.startswith(MIXTURE):
                modules.setdefault(f"mlp.{name.removeprefix(MIXTURE)}", module)
    return modules, patterns


def network_of(row: Family) -> dict[str, _RowModule]:
    """Modules in `networks.json` of a table's row; norms only where the config leaves them so."""
    modules = {} if row.origin else _stated(FAMILIES.networks.get(title(row), {}))
    usual = row
    if row.when:
        usual = next((known for known in FAMILIES if title(known) == title(row)), row)
    pairs = ((row.norms.before, usual.norms.before), (row.norms.after, usual.norms.after))
    if all((norm is None) == (known is None) for norm, known in pairs):
        return modules
    named = modules.items()
    return {name: module for name, module in named if not module.role.startswith("norm.")}


def _stacked_experts(name: str) -> Iterator[tuple[str, _RowModule]]:
    """Stacked tensors of experts that published files have one by one: (n_experts, out, in).

    MLX stacks each part; transformers 5 has gate and up in one tensor in memory.
    """
    parent = name[: name.index("experts")] if "experts" in name else name[: name.rfind(".") + 1]
    for stack in OF_MLX:
        for part in ("gate", "up", "down"):
            for kind, end in (("weight", ""), ("bias", ".bias")):
                yield f"{parent}{stack}.{part}_proj.{kind}", _RowModule(f"expert.{part}{end}")
    if "{e}" in name:
        for place in dict.fromkeys((parent, "mlp.")):
            for part, module in (("gate+up", "gate_up"), ("up", "up"), ("down", "down")):
                yield f"{place}experts.{module}_proj", _RowModule(f"expert.{part}")


def _add_attention(row: Family, modules: dict[str, _RowModule]) -> None:
    """Add names that a row's layout and steps read besides projections and norms."""
    heads = row.heads
    if heads.layout.__name__.startswith("latent"):
        for module in (*heads.projections[:3], *heads.others):
            last = module.rpartition(".")[2]
            if last in OF_LATENTS:
                modules[module] = _RowModule(OF_LATENTS[last])
    if heads.layout is by_dimension_and_head:
        modules.pop(heads.q, None)
        modules |= {f"{heads.q}.{letter}": _RowModule(letter) for letter in "qkvo"}
    if heads.layout.__name__ == "packed":
        role = modules.pop(heads.q).role
        modules |= {
            f"{heads.q}_weight": _RowModule(role),
            f"{heads.q}_bias": _RowModule(f"{role}.bias"),
        }
    for name in heads.loose:
        last = name.rpartition(".")[2]
        role = {"q_bias": "q.bias", "v_bias": "v.bias"}.get(last, f"attention.{last}")
        modules.setdefault(name, _RowModule(role))
    for module in (*heads.others, *(name for name in heads.ignored if name)):
        modules.setdefault(module, _RowModule(f"attention.{module.rpartition('.')[2]}"))
    for step in row.steps:
        reads = step.reads()
        for module in reads.ignored:  # an indexer's
            inner = {f"{module}.{name}": _RowModule(role) for name, role in OF_INDEXER.items()}
            modules.update({**inner, **modules})
        names = (*reads.modules, *reads.tensors)
        for name in names:
            if name and name not in modules:
                modules[name] = _RowModule(_of_step(step.name, name, names), has_any=True)


def _of_step(step: str, name: str, names: tuple[str, ...]) -> str:
    """The role of a step's tensor: the step's name, with the tensor's last part among several."""
    if len([*filter(None, names)]) == 1:
        return step
    return f"{step}.{name.removesuffix('.weight').rpartition('.')[2]}"


def _match(
    rest: str, modules: Mapping[str, _RowModule], patterns: Patterns
) -> tuple[_RowModule, int | None] | None:
    """The module in a row of a tensor, by name in a layer or the model, and its expert."""
    if rest in modules:
        return modules[rest], None
    for pattern, expert in patterns:
        if match := pattern.fullmatch(rest):
            bias = ".bias" if match[2] == "bias" else ""
            return expert._replace(role=expert.role + bias), int(match[1])
    name, _, kind = rest.rpartition(".")
    module = modules.get(name)
    if module is None:
        listed = re.fullmatch(r"(.+)\.norms\.(\d{1,6})", name, re.ASCII)
        module = modules.get(listed[1]) if listed else None
        if module is None or listed is None or module.role not in ("q_norm", "k_norm"):
            return None
        module = module._replace(role=f"{module.role}.{listed[2]}")
    gain, shift = (module.norm.gain, module.norm.shift) if module.norm else ("weight", "bias")
    is_norm = "norm" in module.role
    if kind in (gain, LEGACY[".weight"][1:] if is_norm else gain):
        return module, None
    if kind in (shift, "bias", LEGACY[".bias"][1:] if is_norm else shift):
        return module._replace(role=f"{module.role}.bias"), None
    return (module, None) if module.has_any else None


# Storage of a tensor, in words.


def packed_as(tensor: Tensor) -> Iterator[str]:
    """The packing of a tensor that is not stored as floating-point numbers."""
    stored = tensor.stored if isinstance(tensor, RestoredTensor) else tensor
    if isinstance(tensor, PartTensor):
        yield "part of a fused tensor"
    if isinstance(stored, GgufTensor) and stored.dtype not in ("F32", "F16", "BF16", "F64"):
        yield f"packed {stored.dtype} (GGUF)"
    elif isinstance(stored, DequantisedTensor):
        yield f"packed {stored.dtype}"


def _rotary(
    role: str, tensor: Tensor, config: ModelConfig, row: Family, layer: int | None
) -> Iterator[str]:
    """The order of the pairs of queries and keys that rotate."""
    if layer is None or not {*role.removesuffix(".bias").split("+")} & {"q", "k"}:
        return
    if isinstance(tensor, RestoredTensor) and tensor.undo in (queries_in_halves, keys_in_halves):
        yield "rotary neighbours"
        return
    attends = config.layer_types[layer] in config.rope  # other mechanisms have queries and keys too
    rotation = row.rope.rotation(config, layer) if attends and isinstance(row.rope, Rope) else None
    if rotation is not None:
        yield f"rotary {'neighbours' if rotation.interleaved else 'halves'}"


def _of_wrapper(tensor: Tensor) -> NamedTensor:
    """A tensor that no row names: of a projector, or without a role."""
    module, _, kind = tensor.name.rpartition(".")
    is_module = kind in ("weight", "bias")
    plain = _DEEP.sub("merger.", module if is_module else tensor.name).split(".")
    ends = (".".join(plain[start:]) for start in range(len(plain)))
    role = next((_ENDS[end] for end in ends if end in _ENDS), "")
    if role and (deep := _DEEP.search(tensor.name)):
        role = role.replace("projector", f"projector.{deep[1]}")
    role += ".bias" if role and is_module and kind == "bias" else ""
    words = ", ".join((*packed_as(tensor), *([] if role else [UNNAMED])))
    return NamedTensor(
        name=tensor.name,
        role=role or tensor.name,
        stack=None,
        layer=None,
        expert=None,
        shape=tensor.shape,
        stored=words,
        tensor=tensor,
        undone=(),
        read=lambda expert: tensor.read(),
    )
