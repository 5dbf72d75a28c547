"""A stack of a tiny model taken apart: which of its modules do what, by the names that a file has for their tensors."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import permutations, takewhile
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weightscope.adoption.observed import Observed
from weightscope.adoption.trial import Tiny

NAMED = {"query": r"(?:^|[._])(?:w?q|to_q|q_\w+|query\w*)$", "key": r"(?:^|[._])(?:w?k|to_k|k_\w+|key\w*)$",
         "value": r"(?:^|[._])(?:w?v|to_v|v_\w+|value\w*)$"}  # fmt: skip
EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
Roles = tuple[str, str, str]


class Anatomy:
    """What the modules of one stack are: looked up in the model, told by shapes, names and the order they run in.

    Parameters
    ----------
    tiny : Tiny
    stack : str
        One of its stacks.
    """

    def __init__(self, tiny: Tiny, stack: str) -> None:
        self.tiny, self.members = tiny, tiny.stacks[stack]
        self.one: Observed = next((one for one in self.members if one.norm), self.members[0])
        self.n_heads = self.one.attention.shape[0]
        self.d_model = self.one.streams[0].shape[-1]
        self.cross = self.one.kind == "cross"

    def module(self, path: str) -> torch.nn.Module:
        """A module by its path."""
        found: torch.nn.Module = self.tiny.model.get_submodule(path)
        return found

    def stored(self, path: str) -> str:
        """A parameter's name in the file; empty where no tensor of it is this one alone."""
        return next(iter(self.tiny.stored.names.get(path, [])), "")

    @cached_property
    def stems(self) -> dict[str, str]:
        """Of every layer that was seen what stands before the names of its tensors."""
        found = {}
        for layer in dict.fromkeys(one.layer for one in self.members):
            own = [names[0] for name, names in self.tiny.stored.names.items() if name.startswith(layer + ".") and names]
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(own), max(own), strict=False)) if own else ()
            if match := re.match(r"(.*\.)?\d+\.", "".join(letter for letter, _ in shared)):
                found[layer] = match[0]
        return found

    @cached_property
    def template(self) -> tuple[str, ...]:
        """The parts of a layer's name, "{i}" for its index: the number in which layers differ, or the last."""
        split = [stem.rstrip(".").split(".") for stem in self.stems.values()]
        numbers = [at for at, part in enumerate(split[0]) if part.isdigit()]
        own = [at for at in numbers if len({parts[at] for parts in split if len(parts) > at}) > 1]
        index = (own or numbers)[0 if own else -1]
        return tuple("{i}" if at == index else part for at, part in enumerate(split[0]))

    def relative(self, path: str) -> str:
        """A module's name within its layer, as the file has it; empty where none of its tensors is there."""
        stem = next((stem for layer, stem in self.stems.items() if path.startswith(layer + ".")), "")
        for name, _ in self.module(path).named_parameters(recurse=False):
            stored = self.stored(f"{path}.{name}")
            if stem and stored.startswith(stem):
                return stored[len(stem) :].rpartition(".")[0]
        return ""

    def indices(self) -> dict[int, Observed]:
        """Layers that were seen, by the index in their names."""
        at = self.template.index("{i}")
        return {int(self.stems[one.layer].split(".")[at]): one for one in self.members if one.layer in self.stems}

    def shape(self, path: str) -> tuple[int, int] | None:
        """(out, in) of a module that is a matrix; None of any other."""
        module = self.module(path)
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Embedding) or weight is None or weight.ndim != 2 or self.is_norm(path):
            return None
        return tuple(reversed(weight.shape)) if isinstance(module, Conv1D) else tuple(weight.shape)

    def is_norm(self, path: str) -> bool:
        """Whether a module is a norm: by its class's name."""
        return "norm" in type(self.module(path)).__name__.lower()

    @cached_property
    def matrices(self) -> list[str]:
        """What makes queries, keys, values and whatever else attention makes of its input, in the order they run."""
        before = [path for path in dict.fromkeys(self.one.before) if self.shape(path)]
        inside = [path for path in before if path.startswith(self.one.module + ".")]
        return inside or before

    @cached_property
    def tables(self) -> list[str]:
        """Embeddings within attention, by their names within the layer: of distances, as a rule."""
        inside = [path for one in self.members for path in one.before if path.startswith(one.module + ".")]
        found = [path for path in inside if isinstance(self.module(path), torch.nn.Embedding)]
        return list(dict.fromkeys(self.relative(path) for path in found))

    @cached_property
    def output(self) -> str:
        """The first matrix after the softmax."""
        return next((path for path in self.one.after if self.shape(path)), "")

    @property
    def packed(self) -> bool:
        """Whether attention is torch's own, of one tensor without a module."""
        return getattr(self.module(self.one.module), "in_proj_weight", None) is not None

    @property
    def transposed(self) -> bool:
        """Whether matrices are stored as (in, out)."""
        return isinstance(self.module(self.output), Conv1D)

    def roles(self) -> Iterator[Roles]:
        """Which matrices may make queries, keys and values: as they are named, or else in any order."""
        named = {role: [path for path in self.matrices if re.search(names, path)] for role, names in NAMED.items()}
        sure = {role: found[0] for role, found in named.items() if len(found) == 1}
        if len(self.matrices) == 1 or len(sure) == len(NAMED):
            yield (self.matrices * 3)[:3] if len(self.matrices) == 1 else tuple(sure.values())  # type: ignore[misc]
        elif len(self.matrices) == 2 and {"query", "key"} <= sure.keys():  # values are keys before their norm
            yield sure["query"], sure["key"], sure["key"]
        else:
            left = [path for path in self.matrices[:5] if path not in sure.values()]
            for others in permutations(left, max(0, len(NAMED) - len(sure))):
                rest = iter(others)
                yield tuple(sure.get(role) or next(rest) for role in NAMED)  # type: ignore[misc]

    @cached_property
    def inner_norms(self) -> list[str]:
        """Norms within attention, before its softmax, in the order they run."""
        inside = [path for path in dict.fromkeys(self.one.before) if path.startswith(self.one.module + ".")]
        return [path for path in inside if self.is_norm(path) and path != self.one.norm]

    @cached_property
    def gathered_norm(self) -> str:
        """A norm of what heads have gathered, before the output; empty where there is none."""
        before_output = self.one.after[: self.one.after.index(self.output)] if self.output else ()
        return next((path for path in before_output if self.is_norm(path)), "")

    def head_parameters(self) -> list[str]:
        """Tensors of attention itself with one number a head, by their names within the layer."""
        stem = self.stems.get(self.one.layer, "")
        own = self.module(self.one.module).named_parameters(recurse=False)
        names = [self.stored(f"{self.one.module}.{name}") for name, value in own if value.numel() == self.n_heads]
        return [name.removeprefix(stem) for name in names if stem and name.startswith(stem)]

    def has_bias(self, path: str) -> bool:
        """Whether a module has a bias."""
        return getattr(self.module(path), "bias", None) is not None

    def eps(self, path: str) -> float | None:
        """What a norm adds under the root, where it says so."""
        module = self.module(path)
        found = (getattr(module, name, None) for name in EPS)
        return next((float(value) for value in found if isinstance(value, float)), None)

    @cached_property
    def owner(self) -> Any:
        """The innermost model of transformers that the stack is in."""
        paths = self.one.module.split(".")
        outer = [self.tiny.model.get_submodule(".".join(paths[:n])) for n in range(len(paths), -1, -1)]
        return next(module for module in outer if isinstance(module, PreTrainedModel))

    @cached_property
    def part(self) -> str:
        """The keys that lead to its part of the config, with dots between; empty where that is all of it."""
        own = self.owner.config

        def search(config: Any, path: str) -> str | None:
            for key, value in vars(config).items():
                if hasattr(value, "to_dict"):
                    here = f"{path}.{key}" if path else key
                    if value is own or value.to_dict() == own.to_dict():
                        return here
                    if (inner := search(value, here)) is not None:
                        return inner
            return None

        return "" if own is self.tiny.model.config else search(self.tiny.model.config, "") or ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """That part, as the file has it."""
        values: Any = self.tiny.checkpoint.config.raw
        for key in filter(None, self.part.split(".")):
            values = values[key]
        return dict(values)

    def tokens(self) -> str:
        """The table whose rows enter the first layer as they are; empty where none is."""
        rows = self.members[0].streams[0]
        for path, module in self.tiny.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and module.weight.shape[1] == self.d_model:
                table = {row.tobytes() for row in module.weight.detach().float().numpy()}
                if all(row.astype(np.float32).tobytes() in table for row in rows):
                    return self.stored(path + ".weight")
        return ""
