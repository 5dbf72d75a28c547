"""Facts about a tiny model's attention from the names, shapes and order of its modules.

`Derived.rows` makes the rows that these allow. Names and shapes do not tell the kind of norm,
rotation or scale: the plainest is taken, and `search` finds the right one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import permutations
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weightscope.adopting.config_keys import EPSILON, VARIED, inside, unnamed
from weightscope.adopting.hooks import Observed, is_norm
from weightscope.adopting.tiny_models import parameters_of
from weightscope.adopting.trial import Tiny
from weightscope.model.config.config import KEYS
from weightscope.model.config.reading import prefixes_of
from weightscope.model.config.rope import Rope
from weightscope.model.layers.gathered import GATES
from weightscope.model.layers.layouts import (
    conv1d_fused,
    keys_beside_values,
    keys_with_values,
    packed,
    separate,
)
from weightscope.model.layers.steps.gates import Gate
from weightscope.model.layers.steps.norms import SubNorm
from weightscope.model.rows.cells import (
    Biases,
    FromConfig,
    Heads,
    Memory,
    Norms,
    Positions,
    QkNorm,
    RowInputs,
    Scores,
    StoredNorm,
)
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import common_start

NAMED = {
    "query": r"(?:^|[._])(?:w?q|to_q|q_\w+|query\w*)$",
    "key": r"(?:^|[._])(?:w?k|to_k|k_\w+|key\w*)$",
    "value": r"(?:^|[._])(?:w?v|to_v|v_\w+|value\w*)$",
}
SHIFT = re.compile(r"bias|beta|shift|offset|^b$", re.ASCII)  # in names of what a norm adds
LEGACY_NAMES = {"gamma": "weight", "beta": "bias"}  # either name is read
# Candidates for a norm that does not show its eps: the config's, or a usual one.
HIDDEN_EPS = (None, 1e-5, 1e-6, 1e-8, 1e-12, float(torch.finfo(torch.float32).eps))
EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
JOINT = (keys_with_values, keys_beside_values)  # layouts of one tensor of keys and values
Roles = tuple[str, str, str]


class Anatomy:
    """The role of each module in one stack, from its shape, its name and the order of calls."""

    def __init__(self, tiny: Tiny, stack: str) -> None:
        self.tiny, self.calls = tiny, tiny.stacks[stack]
        self.call: Observed = next((call for call in self.calls if call.norm), self.calls[0])
        self.n_heads = self.call.attention.shape[0]
        self.d_model = self.call.streams[0].shape[-1]
        self.cross = self.call.kind == "cross"

    def module(self, path: str) -> torch.nn.Module:
        """A module by its path."""
        module: torch.nn.Module = self.tiny.model.get_submodule(path)
        return module

    def stored(self, path: str) -> str:
        """A parameter's name in the file; empty where no tensor of it is this one alone."""
        return next(iter(self.tiny.stored.names.get(path, [])), "")

    @cached_property
    def stems(self) -> dict[str, str]:
        """The prefix of the tensor names of every recorded layer."""
        keys = {}
        stored = [(name, names[0]) for name, names in self.tiny.stored.names.items() if names]
        for layer in dict.fromkeys(call.layer for call in self.calls):
            tensor_names = [first for name, first in stored if name.startswith(layer + ".")]
            if match := re.match(r"(.*\.)?\d+\.", common_start(tensor_names)):
                keys[layer] = match[0]
        return keys

    @cached_property
    def template(self) -> tuple[str, ...]:
        """The parts of a layer's name, "{i}" for its index: the number in which layers differ."""
        split = [stem.rstrip(".").split(".") for stem in self.stems.values()]
        numbers = [position for position, part in enumerate(split[0]) if part.isdigit()]

        def varies(position: int) -> bool:
            return len({parts[position] for parts in split if len(parts) > position}) > 1

        index = next(filter(varies, numbers), numbers[-1])
        return *split[0][:index], "{i}", *split[0][index + 1 :]

    def relative(self, path: str) -> str:
        """A module's name within its layer, as the file has it; empty if it has no tensor there."""
        stems = (stem for layer, stem in self.stems.items() if path.startswith(layer + "."))
        stem = next(stems, "")
        for name, _ in self.module(path).named_parameters(recurse=False):
            stored = self.stored(f"{path}.{name}")
            if stem and stored.startswith(stem):
                return stored[len(stem) :].rpartition(".")[0]
        return ""

    def indices(self) -> dict[int, Observed]:
        """Layers that were seen, by the index in their names."""
        layer_part = self.template.index("{i}")
        return {
            int(self.stems[call.layer].split(".")[layer_part]): call
            for call in self.calls
            if call.layer in self.stems
        }

    def shape(self, path: str) -> tuple[int, int] | None:
        """(out, in) of a module that is a matrix; None of any other."""
        module = self.module(path)
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Embedding) or self.is_norm(path):
            return None
        if weight is None or weight.ndim != 2:
            return None
        return tuple(reversed(weight.shape)) if isinstance(module, Conv1D) else tuple(weight.shape)

    def head_dim(self, roles: Roles) -> int | None:
        """A head's width, by the query matrix's output, or the output matrix's input if fused."""
        is_fused = roles[0] == roles[1]
        shape = self.shape(self.output if is_fused else roles[0])
        return None if shape is None else shape[1 if is_fused else 0] // self.n_heads

    def value_dim(self, roles: Roles) -> int | None:
        """The width of a head's values where its queries have another."""
        taken = self.shape(self.output)
        if taken is None:
            return None
        r_v = taken[1] // self.n_heads
        return None if r_v == self.head_dim(roles) else r_v

    def is_norm(self, path: str) -> bool:
        """True if a module's class is called a norm."""
        return is_norm(self.module(path))

    @cached_property
    def matrices(self) -> list[str]:
        """Modules that make queries, keys, values and more of attention's input, as they run."""
        before = [path for path in dict.fromkeys(self.call.before) if self.shape(path)]
        return _within(self.call, before) or before

    @cached_property
    def tables(self) -> list[str]:
        """Embeddings within attention, by their names within the layer: of distances, as a rule."""
        inside = (path for call in self.calls for path in _within(call, call.before))
        tables = (path for path in inside if isinstance(self.module(path), torch.nn.Embedding))
        return list(dict.fromkeys(map(self.relative, tables)))

    @cached_property
    def late(self) -> list[str]:
        """Matrices after the softmax: inside attention, or else all."""
        after = [path for path in dict.fromkeys(self.call.after) if self.shape(path)]
        return _within(self.call, after) or after[:1]

    @cached_property
    def output(self) -> str:
        """Path of the last of `late`; those before it gate it."""
        return next(reversed(self.late), "")

    @property
    def packed(self) -> bool:
        """True if attention is torch's own, of one tensor without a module."""
        return getattr(self.module(self.call.module), "in_proj_weight", None) is not None

    @property
    def transposed(self) -> bool:
        """True if matrices are stored as (in, out)."""
        return isinstance(self.module(self.output), Conv1D)

    def roles(self) -> Iterator[Roles]:
        """Matrices that may make queries, keys and values, by name or else in any order."""
        sure = {}
        for role, names in NAMED.items():
            paths = [path for path in self.matrices if re.search(names, path)]
            if len(paths) == 1:
                sure[role] = paths[0]
        if len(self.matrices) == 1:
            yield self.matrices[0], self.matrices[0], self.matrices[0]
        elif len(sure) == len(NAMED):
            yield sure["query"], sure["key"], sure["value"]
        elif len(self.matrices) == 2:  # values are keys before their norm, or share their tensor
            for query, key in permutations(self.matrices):
                if sure.get("query", query) == query and sure.get("key", key) == key:
                    yield query, key, key
        else:
            left = [path for path in self.matrices[:5] if path not in sure.values()]
            for order in permutations(left, max(0, len(NAMED) - len(sure))):
                rest = iter(order)
                yield tuple(sure.get(role) or next(rest) for role in NAMED)  # type: ignore[misc]

    @cached_property
    def inner_norms(self) -> list[str]:
        """Norms within attention, before its softmax, in the order they run."""
        inside = dict.fromkeys(_within(self.call, self.call.before))
        return [path for path in inside if path != self.call.norm and self.is_norm(path)]

    @property
    def first_inner_norm(self) -> str:
        """The first of `inner_norms`; empty if there are none."""
        return next(iter(self.inner_norms), "")

    @cached_property
    def gathered_norm(self) -> str:
        """A norm of what heads have gathered, before the output; empty where there is none."""
        before_output = self.call.after[: self.call.after.index(self.output)] if self.output else ()
        return next((path for path in before_output if self.is_norm(path)), "")

    def head_parameters(self) -> list[str]:
        """Tensors of attention itself with one number a head, by their names within the layer."""
        stem = self.stems.get(self.call.layer, "")
        parameters = self.module(self.call.module).named_parameters(recurse=False)
        names = [
            self.stored(f"{self.call.module}.{name}")
            for name, value in parameters
            if value.numel() == self.n_heads
        ]
        return [name.removeprefix(stem) for name in names if stem and name.startswith(stem)]

    def norm_parameters(self, path: str) -> dict[str, str]:
        """Stored names of a norm's parameters, as parts of its cell: gain, and shift if any."""
        names = [name for name, _ in self.module(path).named_parameters(recurse=False)]
        names.sort(key=lambda name: bool(SHIFT.search(name)))
        stored = (self.stored(f"{path}.{name}").rpartition(".")[2] for name in names[:2])
        known = (LEGACY_NAMES.get(name, name) for name in stored)
        return dict(zip(("gain", "shift"), known, strict=False))

    def has_bias(self, path: str) -> bool:
        """True if a module has a bias."""
        return getattr(self.module(path), "bias", None) is not None

    def eps(self, path: str) -> float | None:
        """The number that a norm adds under the root, if it shows it."""
        module = self.module(path)
        if isinstance(module, torch.nn.RMSNorm) and module.eps is None:
            return float(torch.finfo(torch.float32).eps)
        values = (getattr(module, name, None) for name in EPS)
        return next((float(value) for value in values if isinstance(value, float)), None)

    @cached_property
    def owner(self) -> Any:
        """The innermost model of transformers that the stack is in."""
        paths = self.call.module.split(".")
        outer = [
            self.tiny.model.get_submodule(".".join(paths[:n])) for n in range(len(paths), -1, -1)
        ]
        return next(module for module in outer if isinstance(module, PreTrainedModel))

    @cached_property
    def part(self) -> str:
        """The dotted keys of its part of the config; empty if it is the whole."""
        config_of_part = self.owner.config

        def search(config: Any, path: str) -> str | None:
            for key, value in vars(config).items():
                if hasattr(value, "to_dict"):
                    here = f"{path}.{key}" if path else key
                    if value is config_of_part or value.to_dict() == config_of_part.to_dict():
                        return here
                    if (inner := search(value, here)) is not None:
                        return inner
            return None

        config = self.tiny.model.config
        return "" if config_of_part is config else search(config, "") or ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its part of the config, as the file has it."""
        return dict(inside(self.tiny.checkpoint.config.raw, self.part))

    def tokens(self) -> str:
        """The table whose rows enter the first layer as they are; empty where none is."""
        rows = self.calls[0].streams[0]
        for path, module in self.tiny.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and module.weight.shape[1] == self.d_model:
                table = {row.tobytes() for row in module.weight.detach().float().numpy()}
                if all(row.astype(np.float32).tobytes() in table for row in rows):
                    return self.stored(path + ".weight")
        return ""


def _within(call: Observed, paths: Iterable[str]) -> list[str]:
    """Modules that are within attention."""
    return [path for path in paths if path.startswith(call.module + ".")]


MOST_FLAGS = 6  # flags of a config that are turned over
WORDS = {
    "n_layers": "layer|block|depth",
    "d_model": "hidden|emb|model|dim|width|channel|units",
    "n_heads": "head",
    "kv_heads": "kv|key_value|group",
    "head_dim": "dim|size|kv|channel|head",
    "value_dim": "v|value",
    "norm_eps": "eps",
}


class Derived:
    """Facts that the two tiny models of a stack have in common, as cells of a row."""

    def __init__(self, tinies: Sequence[Tiny], stack: str) -> None:
        self.each = [Anatomy(tiny, stack) for tiny in tinies]
        self.first, self.stack = self.each[0], stack
        self.flags = _flags(self.first)
        self.left_out = cache(self._left_out)
        # In a post-norm layer cross-attention takes a norm's output, which is the stream.
        ahead = bool(self.first.call.before) and self.first.is_norm(self.first.call.before[0])
        self.before = self.first.call.norm if ahead else ""

    def key(
        self, meaning: str, number: Callable[[Anatomy], float | None], known: Sequence[str] = ()
    ) -> str:
        """The config key with a number's value in both models and a fitting (or unclear) name; or
        "".
        """
        parts = [each.config for each in self.each]
        numbers = [number(each) for each in self.each]
        if None in numbers:
            return ""
        named = [key for key in parts[0] if key in known or re.search(WORDS[meaning], key)]

        def right(key: str) -> bool:
            pairs = [(part.get(key), number) for part, number in zip(parts, numbers, strict=True)]
            return all(type(value) is type(number) and value == number for value, number in pairs)

        fitting = [*filter(right, named)]
        if not fitting and 1 not in numbers:
            fitting = [*filter(right, self.unknown_numbers)]
        fitting.sort(key=lambda key: (-len(self.here & {*key.split("_")}), key not in known))
        return fitting[0] if fitting else ""

    @cached_property
    def unknown_numbers(self) -> list[str]:
        """The keys of numbers, in both models' configs, whose names do not say what they are."""
        first, *rest = (unnamed(each.config, VARIED, EPSILON) for each in self.each)
        return [key for key in first if all(key in numbers for numbers in rest)]

    def size_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Config keys of sizes that the usual keys do not give."""

        def eps(each: Anatomy) -> float | None:
            path = self.before or each.first_inner_norm
            return each.eps(path) if path else None

        wanted: dict[str, Callable[[Anatomy], float | None]] = {
            "n_layers": lambda each: max(each.indices(), default=0) + 1,
            "d_model": lambda each: each.d_model,
            "n_heads": lambda each: each.n_heads,
            "norm_eps": eps,
        }
        keys = {}
        for meaning, number in wanted.items():
            usual = self._usual_key(meaning)
            right = all(each.config.get(usual) == number(each) for each in self.each)
            fitting = self.key(meaning, number, KEYS[meaning])
            if fitting and fitting != usual and (not right or self.here & {*fitting.split("_")}):
                keys[meaning] = (fitting,)
        return keys

    def _usual_key(self, meaning: str) -> str:
        """The first usual key of a meaning that the config has; empty if it has none."""
        known = (key for key in KEYS[meaning] if self.first.config.get(key) is not None)
        return next(known, "")

    @property
    def here(self) -> set[str]:
        """Words of the stack's name that keys may also have."""
        return {*re.split(r"[._]", self.stack)} & {"encoder", "decoder", "text", "vision", "audio"}

    def norm(self, path: str) -> list[StoredNorm | None]:
        """Norms that a module may be: centring or not, gains that count from 0 or from 1."""
        if not path:
            return [None]
        usual = self._usual_key("norm_eps")
        eps = self.first.eps(path)
        drives = all(each.config.get(usual) == each.eps(path) for each in self.each)
        fixed = None if eps is None or drives or "norm_eps" in self.size_keys() else eps
        names, module = self.first.norm_parameters(path), self.first.relative(path)
        bias = "shift" in names
        without: tuple[int, ...] = ()
        if path == self.before:
            without = tuple(sorted(i for i, call in self.first.indices().items() if not call.norm))
        kinds = [(True, 0.0), (False, 0.0), (False, 1.0), (True, 1.0)]  # (centred, offset)
        if bias:
            kinds = [(True, 0.0), (True, 1.0)]
        kinds = kinds if module else kinds[:2]
        several = HIDDEN_EPS[1:] if eps is None else (fixed,)
        return [
            StoredNorm(module, centred, bias, offset, eps_value, without, **names)
            for eps_value in several
            for centred, offset in kinds
        ]

    def qk_norms(self) -> list[QkNorm | None]:
        """Norms of queries and keys that modules in attention may be."""
        paths = self.first.inner_norms
        if not paths:
            return [None]

        def named(letter: str) -> str:
            module, pattern = self.first.call.module, rf"(^|[._]){letter}"
            fitting = (path for path in paths if re.search(pattern, path.removeprefix(module)))
            return next(fitting, "")

        if named("q") and named("k"):
            return self._qk_norms([named("q"), named("k")])
        pairs = dict.fromkeys(permutations((paths * 2)[:2]))
        return [norm for pair in pairs for norm in self._qk_norms(pair)]

    def _qk_norms(self, chosen: Sequence[str]) -> list[QkNorm | None]:
        """Norms that two modules may be, the queries' and the keys'."""
        query, key = (self.first.relative(path) for path in chosen)
        listed = ".norms." in query
        if listed:
            query, key = (module.rpartition(".norms.")[0] for module in (query, key))
        names, eps = self.first.norm_parameters(chosen[0]), self.first.eps(chosen[0])
        keys = self.size_keys().get("norm_eps", KEYS["norm_eps"])

        def drives(name: str) -> bool:
            pairs = ((each.config.get(name), each.eps(each.first_inner_norm)) for each in self.each)
            return all(value == eps_of_norm for value, eps_of_norm in pairs)

        epsilons = HIDDEN_EPS if eps is None else (None if any(map(drives, keys)) else eps,)
        scopes = ("listed",) if listed else self._scopes(chosen[0])
        bias = "shift" in names
        return [
            QkNorm(query, key, scope, centred, bias, offset, known, rotated, **names)  # type: ignore[arg-type]
            for rotated in (False, True)
            for scope in scopes
            for known in epsilons
            for centred, offset in ((False, 0.0), (True, 0.0), (False, 1.0))
        ]

    def _scopes(self, path: str) -> tuple[str, ...]:
        """Scopes of a norm of queries, by the shape of its gains."""
        weight = next(self.first.module(path).parameters(recurse=False), None)
        if weight is None:
            return ("shared", "joint")
        matrices = (each for path in self.first.matrices[:1] if (each := self.first.shape(path)))
        joint = any(weight.numel() in (out, out // 3) for out, _ in matrices)
        if weight.ndim > 1:
            return ("own",)
        return ("joint",) if joint else ("shared",)

    def gates(self, roles: Roles) -> list[Gate | None]:
        """Gates that a fourth matrix may be."""
        left = [path for path in (*self.first.matrices, *self.first.late[:-1]) if path not in roles]
        if len(left) != 1:
            return [None]
        return [
            Gate(self.first.relative(left[0]), self.first.has_bias(left[0]), kind=kind)
            for kind in GATES
        ]

    def bias(self, path: str) -> bool | str:
        """True if a module has a bias, or the flag that sets it."""
        return self.flags.get(path) or self.first.has_bias(path)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The row's name, its model_type, its part of the config and its tower."""
        part = self.first.config.get("model_type")
        model = self.first.tiny.checkpoint.config.get("model_type")
        has_own_type = isinstance(part, str) and part != model
        kind = str(part if has_own_type else model)
        nested = "" if has_own_type else self.first.part
        return {"name": kind, "types": (kind,), "part": nested, "tower": self._tower()}

    def rows(self, fused: Sequence[Any]) -> Iterator[Family]:
        """Every row that names and shapes allow, most likely first."""
        first = self.first
        if not first.output or not (first.matrices or first.packed) or not first.stems:
            return
        for roles in first.roles() if not first.packed else [("", "", "")]:
            if first.packed:
                modules = [self._packed()] * 3
            else:
                modules = [first.relative(path) for path in roles]
            if not all(modules):
                continue
            if first.packed:
                layouts: Sequence[Any] = [packed]
            elif roles[0] == roles[1] == roles[2]:
                layouts = [conv1d_fused] if first.transposed else fused
            else:
                layouts = [separate, *JOINT] if roles[1] == roles[2] else [separate]
            for layout in layouts:
                for gate in self.gates(roles):
                    yield self._row(roles, modules, layout, gate)

    def _packed(self) -> str:
        """The beginning of the name of the one tensor of torch's attention."""
        stored = self.first.stored(f"{self.first.call.module}.in_proj_weight")
        return stored.removeprefix(self.first.stems[self.first.call.layer]).removesuffix("_weight")

    def _row(self, roles: Roles, modules: Sequence[str], layout: Any, gate: Gate | None) -> Family:
        first, keys = self.first, self.size_keys()
        has_modules = not first.packed
        may_differ = has_modules and layout is separate
        last = self.bias(first.output)
        query, key, value = (self.bias(path) if has_modules else True for path in roles)
        sub_norm = self.norm(first.gathered_norm)[0] if first.gathered_norm else None
        out = first.relative(first.output)
        matrices = {name.rpartition(".")[2] for name in (*modules, out)}
        kv_heads: int | tuple[str, ...] = ()
        head_dim: tuple[str, ...] = ()
        value_dim: tuple[str, ...] = ()
        if has_modules:
            kv_heads = self._kv_heads(roles, 2 if layout in JOINT else 1)
            head_dim = self._wide("head_dim", lambda each: each.head_dim(roles))
        if may_differ:
            value_dim = self._wide("value_dim", lambda each: each.value_dim(roles))
        heads = Heads(
            layout,
            q=modules[0],
            k=modules[1],
            v=modules[2],
            out=out,
            ignored=self._ignored(),
            transposed=tuple(sorted(matrices)) if first.transposed else (),
            bias=Biases(query, key, value, last),
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
        )
        turns = any(re.search("rope|rotary", name) for name in first.config)
        row = Family(
            **self.identity,
            heads=heads,
            norms=Norms(before=self.norm(self.before)[0]),
            memory=Memory() if first.cross else None,
            positions=Positions(Rope() if turns else None),
            scores=Scores(qk_norm=self.qk_norms()[0]),
            config=FromConfig(keys),
            steps=(*([gate] if gate else []), *([SubNorm(sub_norm)] if sub_norm else [])),
        )
        row = self._placed(row)
        named = {*row.size_keys["norm_eps"], *row.size_keys["n_positions"]}
        for cell in (kv_heads, head_dim, value_dim):
            named.update(cell if isinstance(cell, tuple) else ())
        named |= {flag for flag in (query, key, value, last) if isinstance(flag, str)}
        known = {name: self.left_out(name) for name in sorted(named) if name in first.config}
        defaults = {name: default for name, default in known.items() if default is not None}
        return row.but(config__defaults=defaults)

    def _left_out(self, key: str) -> Any:
        """The architecture's default for a config key; None if that depends on other keys."""
        kind = type(self.first.owner.config)
        values_without = [kind().to_dict().get(key)]  # at its own sizes, as d / H may differ
        for each in self.each:
            config = each.owner.config
            values = {name: value for name, value in config.to_dict().items() if name != key}
            try:
                values_without.append(kind.from_dict(values).to_dict().get(key))
            except Exception:  # whatever transformers raises of what is missing
                return None
        first, second, third = values_without
        # dialects write objects, and one hides another's keys
        plain = isinstance(first, bool | int | float | str)
        return first if plain and first == second == third else None

    def _placed(self, row: Family) -> Family:
        """The row with its layer's name, as short as it can be and no other stack's."""
        template = self.first.template
        layer_part = template.index("{i}")
        tokens = self.first.tokens()
        for start in range(max(0, layer_part - 1), -1, -1):
            prefix = "".join(f"{part}." for part in template[:start])
            layer = "".join(f"{part}." for part in template[start:])
            inputs = RowInputs()
            if tokens.startswith(prefix):
                inputs = RowInputs(tokens=tokens.removeprefix(prefix))
            row = row.but(prefixes=(prefix,), layer=layer, inputs=inputs)
            if prefixes_of(self.first.tiny.checkpoint, row) == [prefix]:
                break
        return row

    def _tower(self) -> str:
        """The stack's name where the model has others."""
        if len(self.first.tiny.stacks) == 1:
            return ""
        if self.first.cross:
            return "cross"
        words = re.split(r"[._]", self.stack)
        for tower in ("vision", "audio", "text", "encoder", "decoder"):
            if tower in words:
                return tower
        return "decoder" if self.first.call.kind == "causal" else "encoder"

    def _ignored(self) -> tuple[str, ...]:
        """Norms of what attention gives: modules after its output."""
        after, output = self.first.call.after, self.first.output
        inside = self.first.call.module.rpartition(".")[0] + "."
        if not output.startswith(inside):
            return ()
        later = [path for path in after[after.index(output) + 1 :] if path.startswith(inside)]
        names = {self.first.relative(path) for path in later if self.first.is_norm(path)}
        return tuple(sorted(name for name in names if "." in name))

    def _kv_heads(self, roles: Roles, made: int) -> int | tuple[str, ...]:
        """Key-value heads: all heads, one, or a key's number; `made` tensors share the matrix."""

        def count(each: Anatomy) -> int | None:
            shape, r = each.shape(roles[1]) if roles[1] else None, each.head_dim(roles)
            if shape is None or not r:
                return None
            if roles[0] != roles[1]:
                return shape[0] // (made * r)
            return (shape[0] // r - each.n_heads) // 2

        counts = [count(each) for each in self.each]
        if counts == [each.n_heads for each in self.each]:
            return ()
        if key := self.key("kv_heads", count, ("num_key_value_heads",)):
            return (key,)
        return 1 if counts == [1, 1] else ()

    def _wide(self, meaning: str, number: Callable[[Anatomy], int | None]) -> tuple[str, ...]:
        """The key of a width that is not the usual one."""
        if meaning == "value_dim" and not self.first.shape(self.first.output):
            return ()
        plain = [each.d_model / each.n_heads for each in self.each]
        if meaning == "head_dim" and [number(each) for each in self.each] == plain:
            return ("head_dim",) if "head_dim" in self.first.config else ()
        key = self.key(meaning, number, ("head_dim",) if meaning == "head_dim" else ("v_head_dim",))
        return (key,) if key else ()


def _flags(anatomy: Anatomy) -> dict[str, str]:
    """Flags that give modules a bias, by module: each is turned over, parameters compared."""
    config, part = anatomy.tiny.model.config, anatomy.part
    switches = [key for key, value in anatomy.config.items() if isinstance(value, bool)]
    flags = [key for key in switches if "bias" in key][:MOST_FLAGS]
    usual = parameters_of(config)
    flag_of: dict[str, str] = {}
    for flag in flags:
        changed = config.to_dict()
        inner = inside(changed, part)
        if flag not in inner:
            continue
        inner[flag] = not inner[flag]
        differs = parameters_of(type(config).from_dict(changed)) ^ usual
        flag_of |= {name.removesuffix(".bias"): flag for name in differs if name.endswith(".bias")}
    return flag_of
