"""One name for every tensor of a checkpoint: its role, whatever container and layout it is stored
in.

| role | what |
| --- | --- |
| q, k, v, o | projections of attention; `q+k+v`, `k+v`, `q+output_gate` where one tensor holds several |
| q_a, q_b, kv_a, kv_b, q_a_norm, kv_a_norm | DeepSeek's latents: to a latent, out of it, and its norm |
| q_norm, k_norm | norms of queries and keys; `q_norm.3` of head 3 where each head has a tensor of its own |
| gate, up, down | the feed-forward network; `gate+up` where one tensor holds both |
| router, router.correction | what chooses experts |
| expert.gate, expert.up, expert.down | an expert; without an index where one tensor stacks all |
| shared_expert.gate, .up, .down, .router | the expert that every token passes |
| first.gate, first.up, first.down, norm.first | the network before attention, where a layer has two (conformers) |
| norm.before, norm.after | before attention; of a layer's output in post-norm models |
| norm.mlp, norm.after_attention | before the network; between attention and the network in post-norm models |
| norm.attention_output, norm.mlp_output | of what attention or the network gives, before it joins the stream |
| norm.mlp_inner, mlp_scale | of the network's hidden units; LayerScale of its output |
| norm.inputs, norm.outputs, norm.memory | of embeddings; before the unembedding; of cross-attention's second input |
| tokens, positions, types, class, registers, patches, mask | what enters the first layer |
| relative_positions | a table of biases by distance |
| unembedding | the language-model head |
| pooler | the map of the first token, or of the pooled ones, after the layers |
| inputs.projection, outputs.projection | between the embedding's width and the model's |
| the name of a step, as sinks or layer_scale | a mechanism that few architectures have; see docs/rows.md |

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
from weightscope.model.config.numbers import in_layer
from weightscope.model.config.rope import Rope
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.layouts import by_dimension_and_head, gated, separate
from weightscope.model.layers.maps import Affine
from weightscope.model.rows.cells import LEGACY, LayerTensors, StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.gguf import (
    ROLES,
    RestoredTensor,
    keys_in_halves,
    less_one,
    queries_in_halves,
)
from weightscope.model.rows.original.spelling import PartTensor
from weightscope.model.rows.table import FAMILIES, title

# Roles that are named within the model; all others within a layer.
OF_MODEL = (
    "tokens", "positions", "types", "class", "registers", "patches", "mask", "unembedding", "norm.inputs",
    "norm.outputs", "inputs.projection", "outputs.projection", "pooler",
)  # fmt: skip
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
# ggml's names of what a mixture stores, which keep these names: all experts are in one tensor
# there.
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
# Modules in which MLX keeps a mixture's experts, in or next to transformers' own: one tensor holds
# them all.
OF_MLX = ("switch_mlp", "experts", "experts.switch_glu")
# norms of other widths than the model's
OF_ANY_WIDTH = ("norm.inputs", "norm.outputs", "norm.mlp_inner")
TRANSPOSED, ALTERNATING, FROM_ZERO = "(in, out)", "alternating", "counted from 0"
HOW = (TRANSPOSED, ALTERNATING, FROM_ZERO)  # what a cell of `also` may say after "as"
ABOVE = "../"  # before a module of `also` one level above the row's layer
UNNAMED = "no row names it"
OF_EXPERT = re.compile(r"(.*)expert (\d{1,6}) (.+)", re.ASCII)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the file under its role, or one of several that the file fuses."""

    name: str  # in the checkpoint
    role: str  # the name again where no row knows it
    stack: str | None  # of the attention stack that it belongs to
    layer: int | None
    expert: int | None  # None where one tensor holds all experts
    shape: tuple[int, ...]  # of `array()`
    stored: str  # how the file has it, in words
    tensor: Tensor = field(repr=False, compare=False)  # of the file
    # What `array` changes: tensors that agree in it are stored alike. None for a part of a tensor
    # of the file.
    undone: tuple[object, ...] | None = field(repr=False, compare=False)
    read: "Read" = field(repr=False, compare=False)
    # an expert, as it lies in the file's tensor
    is_slice: bool = field(default=False, repr=False, compare=False)

    @property
    def has_role(self) -> bool:
        """Whether a row names it."""
        return self.role != self.name

    @property
    def experts(self) -> "tuple[NamedTensor, ...]":
        """The experts that one tensor of the file stacks, each read alone; empty where it stacks
        none.
        """
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
        """The tensor of the file; of a part of one, that part."""
        return ConvertedTensor(self.tensor, self) if self.undone is None else self.tensor

    def in_convention(self) -> Tensor:
        """The tensor in the convention of `array`: the stored one where nothing changes."""
        return self.tensor if self.undone == () else ConvertedTensor(self.tensor, self)

    def array(self) -> np.ndarray:
        """The tensor as float32 in one convention, whatever the container.

        Matrices have a row for each output, queries and keys the order that transformers rotates;
        gains of norms are what multiplies.

        Raises
        ------
        CheckpointError
            The tensor is broken, or its shape does not fit the config.
        """
        return np.asarray(self.read(None), np.float32, order="C")

    def as_json(self) -> dict[str, Any]:
        """Its names, shape and how it is stored."""
        keys = ("name", "role", "stack", "layer", "expert", "shape", "stored")
        return {
            key: list(value) if key == "shape" else value
            for key in keys
            for value in [getattr(self, key)]
        }


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
        first, last = (
            ConvertedTensor(
                end,
                replace(
                    self.named,
                    read=partial(_expert, end, expert),
                    is_slice=False,
                    shape=end.shape[1:],
                ),
            )
            for end in ends[:2]
        )
        return first, last, ends[2]

    def unchecked(self, noted: set[str]) -> Tensor:
        """Itself: it is as unchecked as the checkpoint that it is read from."""
        return self


def _expert(stacked: Tensor, expert: int, _: int | None) -> np.ndarray:
    """One expert of a tensor that stacks all."""
    return stacked.rows(expert, expert + 1)[0]


class Tensors:
    """Every tensor of a checkpoint under its role: iteration gives one `NamedTensor` for each
    tensor of the file.

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
    ((256, 256), 'transposed (in, out), fused q+k+v')
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
        unnamed = sum(tensor.role == tensor.name for tensor in self.rows)
        return f"Tensors({len(self.rows)} tensors, {unnamed} of them without a role)"

    @cached_property
    def rows(self) -> tuple[NamedTensor, ...]:
        """One for each tensor of the file, in its order; those that no row names are last."""
        named: dict[str, NamedTensor] = {}
        for reader in self.readers:
            for tensor in reader.named():
                named.setdefault(tensor.name, tensor)
        left = [_unnamed(tensor) for name, tensor in self.checkpoint.items() if name not in named]
        return (*(named[name] for name in self.checkpoint if name in named), *left)

    @cached_property
    def _by_label(self) -> dict[str, NamedTensor]:
        """Every tensor and every part of a fused one by its label, or by its name where two have
        the same.
        """
        labelled: dict[str, NamedTensor] = {}
        for tensor in self.rows:
            for part in (tensor, *self.parts(tensor)):
                label = self.label(part)
                labelled[label if label not in labelled else f"{label} {part.name}"] = part
        return labelled

    def label(self, tensor: NamedTensor) -> str:
        """What this tensor is called here: its role and its place."""
        role = tensor.role if tensor.expert is None else tensor.role.removeprefix("expert.")
        stack = f"{tensor.stack} " if tensor.stack not in (None, self.own) else ""
        layer = "" if tensor.layer is None else f"layer {tensor.layer} "
        return f"{stack}{layer}{'' if tensor.expert is None else f'expert {tensor.expert} '}{role}"

    @property
    def roles(self) -> dict[str, str]:
        """The role of each tensor that has one, by its name in the file; of another stack after
        that one's name.
        """
        return {tensor.name: self.known_as(tensor) for tensor in self.rows if tensor.has_role}

    def known_as(self, tensor: NamedTensor) -> str:
        """The role of a tensor, or of a part of one; of another stack after that one's name."""
        return tensor.role if tensor.stack in (None, self.own) else f"{tensor.stack} {tensor.role}"

    def read_through(self, replaced: Mapping[str, Tensor]) -> None:
        """From now on arrays are read from these tensors, by name, and from the checkpoint's where
        there is none.
        """
        for reader in self.readers:
            reader.values = self.checkpoint.with_tensors(replaced)

    @property
    def lead(self) -> str:
        """How many tensors there are, and how many have a role, in a sentence."""
        unnamed = sum(tensor.role == tensor.name for tensor in self.rows)
        rest = (
            f"; {unnamed} have only the name in the file, since no row names them"
            if unnamed
            else ""
        )
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
        """One for each tensor, under the name that it has in the file."""
        stored = self.checkpoint.stored_names
        return [
            replace(each, name=stored[each.name]) if each.name in stored else each
            for each in self.rows
        ]

    @property
    def labels(self) -> tuple[str, ...]:
        """Every role with its place, parts of fused tensors included; experts that one tensor
        stacks are not listed.
        """
        return tuple(self._by_label)

    def parts(self, tensor: NamedTensor) -> tuple[NamedTensor, ...]:
        """The tensors that one tensor of the file fuses; empty where it fuses none."""
        reader = next((reader for reader in self.readers if reader.stack == tensor.stack), None)
        return (
            reader.parts(tensor)
            if reader and "+" in tensor.role and tensor.role != tensor.name
            else ()
        )

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
        if (
            tensor := next((tensor for tensor in self.rows if tensor.name == key), None)
        ) is not None:
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


class _Module(NamedTuple):
    """What a row says of a module."""

    role: str
    how: tuple[str, ...] = ()  # of HOW
    norm: StoredNorm | None = None
    has_any: bool = False  # whatever its tensors are called


Patterns = list[tuple[re.Pattern[str], _Module]]  # of the names of experts' tensors


def _stated(also: Mapping[str, Sequence[str]]) -> dict[str, _Module]:
    """What a cell `also` says of modules and tensors, by their names."""
    modules: dict[str, _Module] = {}
    for role, names in also.items():
        for stated in names:
            name, _, how = stated.partition(" as ")
            modules[name] = _Module(role, tuple(word for word in HOW if word in how))
    return modules


class _Reader:
    """The tensors of one stack: their roles, and their arrays."""

    def __init__(
        self, checkpoint: Checkpoint, stack: str, family: Family, config: ModelConfig, prefix: str
    ) -> None:
        self.checkpoint, self.stack, self.family, self.config, self.prefix = (
            checkpoint,
            stack,
            family,
            config,
            prefix,
        )
        self.values = checkpoint  # arrays are made of it; see `Tensors.read_through`
        self._last: tuple[int, Layer] | None = None
        self._fused: tuple[tuple[str, int | None], np.ndarray] | None = None

    # Which tensor has which role.

    def named(self) -> Iterator[NamedTensor]:
        """Every tensor that the row names, layers that share tensors once."""
        yield from self._of_model()
        if isinstance(next(iter(self.checkpoint.values()), None), GgufTensor | RestoredTensor):
            yield from self._of_gguf()
        seen: dict[str, list[int]] = {}
        for index in range(self.config.n_layers):
            seen.setdefault(self.prefix + self.family.stored_name(self.config, index), []).append(
                index
            )
        for stem, layers in seen.items():
            shared = f"shared by layers {', '.join(map(str, layers))}" if len(layers) > 1 else ""
            config, row = in_layer(self.config, self.family, layers[0])
            modules, patterns = modules_of(row)
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
        """Whether logits are made by the rows of the token embedding, as the config says."""
        return (
            self.family.outputs is not None and self.config.get("tie_word_embeddings", True) is True
        )

    def _of_model(self) -> Iterator[NamedTensor]:
        row, checkpoint = self.family, self.checkpoint
        modules, patterns = modules_of(row, of_model=True)
        for module in modules:
            for name in (self.prefix + module, *checkpoint.names_under(f"{self.prefix}{module}.")):
                if name in checkpoint and (
                    matched := _match(name.removeprefix(self.prefix), modules, patterns)
                ):
                    tied = (
                        "also the unembedding (tied)"
                        if self.is_tied and matched[0].role == "tokens"
                        else ""
                    )
                    yield self._tensor(name, *matched, None, self.config, row, tied)
        ends = [i + 1 for i, letter in enumerate(self.prefix) if letter == "."]
        heads = row.outputs.tokens if row.outputs else row.also.get("unembedding", ())
        names = [self.prefix[:end] + name for end in (*ends, 0) for name in heads]
        for name in dict.fromkeys(
            (*names, *(name.removesuffix(".weight") + ".bias" for name in names))
        ):
            if name in checkpoint:
                role = "unembedding.bias" if name.endswith(".bias") else "unembedding"
                tied = "tied to the tokens" if self.is_tied and role == "unembedding" else ""
                yield self._tensor(name, _Module(role), None, None, self.config, row, tied)

    def _of_gguf(self) -> Iterator[NamedTensor]:
        """What keeps ggml's name because the row has no module of it."""
        known = {**ROLES, **OF_GGUF, **(self.family.gguf.roles if self.family.gguf else {})}
        for name in self.checkpoint:
            parts = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+)(?:\.(weight|bias))?", name, re.ASCII)
            role = known.get(parts[2]) if parts else None
            if parts and role in OF_MODEL and not parts[1]:
                yield self._tensor(name, _Module(role), None, None, self.config, self.family, "")
                continue
            role = role if parts and parts[1] else None
            if parts and role and int(parts[1]) < self.config.n_layers:
                index = int(parts[1])
                role += ".bias" if parts[3] == "bias" and role != "router.correction" else ""
                config, row = in_layer(self.config, self.family, index)
                yield self._tensor(name, _Module(role), None, index, config, row, "")

    def _tensor(
        self,
        name: str,
        module: _Module,
        expert: int | None,
        layer: int | None,
        config: ModelConfig,
        row: Family,
        shared: str,
    ) -> NamedTensor:
        tensor, how = self.checkpoint[name], module.how
        role = module.role
        words = [*packed_as(tensor)]
        if self._is_transposed(module, name, row) and len(tensor.shape) > 1:
            how = (*how, TRANSPOSED)
            words.append(f"transposed {TRANSPOSED}")
        if (
            "+" in role
            and row.heads.layout is separate
            and not role.startswith(("gate", "expert", "shared"))
        ):
            words.append(f"one matrix as {' and '.join(role.removesuffix('.bias').split('+'))}")
        elif "+" in role:
            words.append(
                f"fused {role.removesuffix('.bias')}{', rows alternating' if ALTERNATING in how else ''}"
            )
        words += [*_rotary(role, tensor, config, row, layer)]
        if ("norm" in role) and not role.endswith(".bias"):
            offset = module.norm.offset if module.norm else FROM_ZERO in how
            offset = offset and not (isinstance(tensor, RestoredTensor) and tensor.undo is less_one)
            words.append(f"gain counted from {0 if offset else 1}")
        words += [shared] if shared else []
        shape = tensor.shape
        if TRANSPOSED in how and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if (joined := self._joined(role, tensor, config, row)) is not None:
            shape = joined
        read = partial(self._array, tensor, role, how, module.norm, layer, config, row, shape)
        undone = tuple(self._undone(tensor, role, how, module.norm, layer, config, row))
        return NamedTensor(
            name, role, self.stack, layer, expert, shape, ", ".join(words), tensor, undone, read
        )

    @staticmethod
    def _undone(
        tensor: Tensor,
        role: str,
        how: tuple[str, ...],
        norm: StoredNorm | None,
        layer: int | None,
        config: ModelConfig,
        row: Family,
    ) -> Iterator[object]:
        """What `_array` changes of a stored tensor, and what that depends on."""
        plain = role.removesuffix(".bias")
        if layer is not None and _is_split(plain, tensor.shape, row):
            yield row.heads.layout.__name__, config.n_heads, config.n_kv_heads, config.head_dim
        if TRANSPOSED in how and len(tensor.shape) > 1:
            yield TRANSPOSED
        if ALTERNATING in how:
            yield ALTERNATING
        if (
            "norm" in plain
            and role == plain
            and (offset := norm.offset if norm else FROM_ZERO in how)
        ):
            # 1 + w may have lost digits of w
            yield float(offset), isinstance(tensor, RestoredTensor)

    @staticmethod
    def _is_transposed(module: _Module, name: str, row: Family) -> bool:
        role, last = module.role, name.rpartition(".")[0].rpartition(".")[2]
        if TRANSPOSED in module.how:
            return True
        if role in ("gate", "up", "down", "gate+up"):
            return row.mlp is not None and row.mlp.transposed
        return bool({*role.split("+")} & {"q", "k", "v", "o"}) and last in row.heads.transposed

    @staticmethod
    def _joined(
        role: str, tensor: Tensor, config: ModelConfig, row: Family
    ) -> tuple[int, ...] | None:
        """The shape of a projection as a matrix where the file has no matrix."""
        if role in ("q", "k", "v", "o") and len(tensor.shape) == 3:
            wide = config.n_heads * config.head_dim
            return (config.d_model, wide) if role == "o" else (wide, config.d_model)
        return None

    # Arrays.

    def _array(
        self,
        tensor: Tensor,
        role: str,
        how: tuple[str, ...],
        norm: StoredNorm | None,
        layer: int | None,
        config: ModelConfig,
        row: Family,
        shape: tuple[int, ...],
        expert: int | None,
    ) -> np.ndarray:
        """A whole tensor, or one of the experts that it stacks, in the one convention."""
        plain = role.removesuffix(".bias")
        if layer is not None and _is_split(plain, tensor.shape, row):
            parts = [self._projection(layer, each, role != plain) for each in plain.split("+")]
            return np.concatenate(parts)
        self._check(tensor, role, shape, config, row)
        stored = self.values[tensor.name]
        array = stored.read() if expert is None else stored.rows(expert, expert + 1)[0]
        if TRANSPOSED in how and array.ndim > 1:
            array = array.swapaxes(-1, -2)
        if ALTERNATING in how:
            axis = -1 if role != plain or array.ndim < 2 else -2
            array = np.concatenate([_take(array, slice(i, None, 2), axis) for i in (0, 1)], axis)
        if "norm" in plain and role == plain:
            array = array + np.float32(norm.offset if norm else FROM_ZERO in how)
        return array

    def _check(
        self, tensor: Tensor, role: str, shape: tuple[int, ...], config: ModelConfig, row: Family
    ) -> None:
        """Refuse a shape that the role cannot have with this config."""
        plain, d = role.removesuffix(".bias"), config.d_model
        wanted = ""
        if role != plain or (plain.startswith("norm.") and not plain.endswith("memory")):
            wanted = "" if 1 <= len(shape) <= 2 else "one axis or two"
            if role == plain and shape != (d,) and plain not in OF_ANY_WIDTH:
                wanted = f"({d},)"
        elif plain in ("q", "k", "v", "gate", "up", "gate+up"):
            rows = {
                "q": config.n_heads,
                "k": config.n_kv_heads,
                "v": config.n_kv_heads,
                "gate+up": 2,
            }.get(plain, 1)
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
            raise tensor.refuse(
                f"has shape {shape}; the role {role} of {row.name} with width {d} needs {wanted}"
            )

    def parts(self, fused: NamedTensor) -> tuple[NamedTensor, ...]:
        """The tensors that one tensor of the file fuses."""
        plain, bias = fused.role.removesuffix(".bias"), ".bias" * fused.role.endswith(".bias")
        kind, dot, rest = plain.rpartition(".")
        roles, parts = rest.split("+"), []
        for i, role in enumerate(roles):
            if role in ("gate", "up"):
                axis = len(fused.shape) - (1 if bias else 2)
                shape = (
                    (*fused.shape[:axis], fused.shape[axis] // 2, *fused.shape[axis + 1 :])
                    if axis >= 0
                    else ()
                )
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
        """Gate or up of a tensor, or of an expert, that has both; the last one read is kept for the
        other half.
        """
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
            stem, maker = (
                self.prefix + family.stored_name(config, i)
                for i in (index, family.keys_of(config, index))
            )
            lent = dict.fromkeys(family.of_keys, maker) if maker != stem else {}
            layout = family.heads.layout(
                LayerTensors(self.values, stem, needed_by, lent), family, config
            )
            self._last = index, layout
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


def _is_split(plain: str, shape: tuple[int, ...], row: Family) -> bool:
    """Whether the row's layout says where the projections are in a tensor of the file."""
    letters = plain.split("+")
    if not {*letters} & {"q", "k", "v", "o"}:
        return False
    return len(shape) == 3 or (len(letters) > 1 and row.heads.layout is not separate)


def modules_of(row: Family, *, of_model: bool = False) -> tuple[dict[str, _Module], Patterns]:
    """What a row names within a layer, or within the model: modules and tensors, and patterns of
    experts.
    """
    modules: dict[str, _Module] = {}
    patterns: Patterns = []
    norms, qk_norm = row.stored_norms, row.scores.qk_norm
    for role, name in row.roles.items():
        if (role in OF_MODEL) == of_model:
            norm = norms.get(role)
            if qk_norm and role in ("q_norm", "k_norm"):
                cells = {part.name for part in fields(StoredNorm)} & {
                    part.name for part in fields(qk_norm)
                }
                norm = StoredNorm(name, **{cell: getattr(qk_norm, cell) for cell in cells})
            role = "q+output_gate" if role == "q" and row.heads.layout is gated else role
            modules.setdefault(name, _Module(role, (), norm))
    if of_model:
        projections = (
            row.inputs.before,
            row.inputs.after,
            row.outputs.after if row.outputs else "",
        )
        roles = ("inputs.projection", "inputs.projection", "outputs.projection")
        modules |= {
            module: _Module(role) for role, module in zip(roles, projections, strict=True) if module
        }
        for step in row.steps:
            modules |= {
                name: _Module(_of_step(step.name, name, step.reads().shared))
                for name in step.reads().shared
            }
    else:
        _add_attention(row, modules)
    stated = _stated(row.also)
    named = {name for name, module in modules.items() if not module.role.startswith("attention.")}
    surrounding = {name: module for name, module in network_of(row).items() if name not in named}
    for name, module in {**surrounding, **stated}.items():
        if (module.role in OF_MODEL) != of_model:
            continue
        if module.role.startswith("expert."):
            for stacked, of_part in _stacked_by_mlx(name):
                modules.setdefault(stacked, of_part)
        if "{e}" in name:
            pattern = re.escape(name).replace(re.escape("{e}"), r"(\d{1,6})")
            patterns.append((re.compile(pattern + r"(?:\.(weight|bias))?", re.ASCII), module))
        else:
            modules[name] = module
    return modules, patterns


def network_of(row: Family) -> dict[str, _Module]:
    """What `networks.json` says of a row of the table; norms only where the config leaves them as
    the row has them.
    """
    modules = {} if row.origin else _stated(FAMILIES.networks.get(title(row), {}))
    usual = (
        next((known for known in FAMILIES if title(known) == title(row)), row) if row.when else row
    )
    if (row.norms.before is None, row.norms.after is None) != (
        usual.norms.before is None,
        usual.norms.after is None,
    ):
        return {
            name: module for name, module in modules.items() if not module.role.startswith("norm.")
        }
    return modules


def _stacked_by_mlx(name: str) -> Iterator[tuple[str, _Module]]:
    """The tensors in which MLX stacks the experts that are named so in transformers: (n_experts,
    out, in).
    """
    parent = name[: name.index("experts")] if "experts" in name else name[: name.rfind(".") + 1]
    for stack in OF_MLX:
        for part in ("gate", "up", "down"):
            for kind, end in (("weight", ""), ("bias", ".bias")):
                yield f"{parent}{stack}.{part}_proj.{kind}", _Module(f"expert.{part}{end}")


def _add_attention(row: Family, modules: dict[str, _Module]) -> None:
    """What a row's layout and steps read besides projections and norms."""
    heads = row.heads
    if heads.layout.__name__.startswith("latent"):
        for module in (*heads.projections[:3], *heads.others):
            last = module.rpartition(".")[2]
            if last in OF_LATENTS:
                modules[module] = _Module(OF_LATENTS[last])
    if heads.layout is by_dimension_and_head:
        modules.pop(heads.q, None)
        modules |= {f"{heads.q}.{letter}": _Module(letter) for letter in "qkvo"}
    if heads.layout.__name__ == "packed":
        role = modules.pop(heads.q).role
        modules |= {f"{heads.q}_weight": _Module(role), f"{heads.q}_bias": _Module(f"{role}.bias")}
    for name in heads.loose:
        last = name.rpartition(".")[2]
        if name not in modules:
            modules[name] = _Module(
                {"q_bias": "q.bias", "v_bias": "v.bias"}.get(last, f"attention.{last}")
            )
    for module in (*heads.others, *(name for name in heads.ignored if name)):
        modules.setdefault(module, _Module(f"attention.{module.rpartition('.')[2]}"))
    for step in row.steps:
        reads = step.reads()
        names = (*reads.modules, *reads.tensors)
        for name in names:
            if name and name not in modules:
                modules[name] = _Module(_of_step(step.name, name, names), has_any=True)


def _of_step(step: str, name: str, names: tuple[str, ...]) -> str:
    """The role of what a step reads: its name, and the last part of the tensor's where it reads
    several.
    """
    return (
        step
        if len([*filter(None, names)]) == 1
        else f"{step}.{name.removesuffix('.weight').rpartition('.')[2]}"
    )


def _match(
    rest: str, modules: Mapping[str, _Module], patterns: Patterns
) -> tuple[_Module, int | None] | None:
    """What a row says of a tensor, by its name within a layer or the model, and which expert's it
    is.
    """
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


# How a tensor is stored, in words.


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
    """In which order queries and keys have the pairs that rotate."""
    if layer is None or not {*role.removesuffix(".bias").split("+")} & {"q", "k"}:
        return
    if isinstance(tensor, RestoredTensor) and tensor.undo in (queries_in_halves, keys_in_halves):
        yield "rotary neighbours"
        return
    attends = config.layer_types[layer] in config.rope  # other mechanisms have queries and keys too
    rotation = row.rope.rotation(config, layer) if attends and isinstance(row.rope, Rope) else None
    if rotation is not None:
        yield f"rotary {'neighbours' if rotation.interleaved else 'halves'}"


def _unnamed(tensor: Tensor) -> NamedTensor:
    words = ", ".join((*packed_as(tensor), UNNAMED))
    return NamedTensor(
        tensor.name,
        tensor.name,
        None,
        None,
        None,
        tensor.shape,
        words,
        tensor,
        (),
        lambda expert: tensor.read(),
    )


def _take(array: np.ndarray, rows: slice, axis: int) -> np.ndarray:
    return array[..., rows] if axis == -1 else array[..., rows, :]
