"""Rows derived from a tiny model itself: names, shapes and the config's keys, whatever they are called elsewhere.

What names and shapes cannot tell (kinds of norm, rotation, scale) is left at its plainest; `searching` finds it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from weightscope.adoption.anatomy import Anatomy, Roles
from weightscope.adoption.tiny import parameters_of
from weightscope.adoption.trial import Tiny
from weightscope.attention.gathered import GATES
from weightscope.families.cells import Biases, Gate, Inputs, Memory, QkNorm, StoredNorm
from weightscope.families.config import KEYS
from weightscope.families.family import Family
from weightscope.families.layouts import conv1d_fused, packed, separate
from weightscope.families.nesting import prefixes_of
from weightscope.families.rope import Rope

MOST_FLAGS = 6  # of a config that are turned over
WORDS = {
    "n_layers": "layer|block|depth", "d_model": "hidden|emb|model|dim|width|channel|units", "n_heads": "head",
    "kv_heads": "kv|key_value|group", "head_dim": "dim|size|kv|channel|head", "value_dim": "v|value", "norm_eps": "eps",
}  # fmt: skip


class Derived:
    """What both tiny models show of one stack.

    Parameters
    ----------
    tinies : sequence of Tiny
    stack : str
    """

    def __init__(self, tinies: Sequence[Tiny], stack: str) -> None:
        self.each = [Anatomy(tiny, stack) for tiny in tinies]
        self.first, self.stack = self.each[0], stack
        self.flags = _flags(self.first)
        self._left_out: dict[str, Any] = {}
        # In a post-norm layer what enters cross-attention has come out of a norm, and is the stream.
        ahead = bool(self.first.one.before) and self.first.is_norm(self.first.one.before[0])
        self.before = self.first.one.norm if ahead else ""

    def key(self, meaning: str, number: Callable[[Anatomy], float | None], known: Sequence[str] = ()) -> str:
        """The config's key of a number: it has the number's value in both models, and a name that fits; or none."""
        parts = [each.config for each in self.each]
        numbers = [number(each) for each in self.each]
        if None in numbers:
            return ""
        fitting = [key for key in parts[0] if key in known or re.search(WORDS[meaning], key)]
        for part, own in zip(parts, numbers, strict=True):
            fitting = [key for key in fitting if type(part.get(key)) is type(own) and part[key] == own]
        fitting.sort(key=lambda key: (-len(self.here & {*key.split("_")}), key not in known))
        return fitting[0] if fitting else ""

    def size_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Config keys of sizes that the usual keys do not give."""
        wanted: dict[str, Callable[[Anatomy], float | None]] = {
            "n_layers": lambda each: max(each.indices(), default=0) + 1,
            "d_model": lambda each: each.d_model,
            "n_heads": lambda each: each.n_heads,
            "norm_eps": lambda each: each.eps(self.before) if self.before else None,
        }
        found = {}
        for meaning, number in wanted.items():
            usual = next((key for key in KEYS[meaning] if self.first.config.get(key) is not None), "")
            right = all(each.config.get(usual) == number(each) for each in self.each)
            own = self.key(meaning, number, KEYS[meaning])
            if own and own != usual and (not right or self.here & {*own.split("_")}):
                found[meaning] = (own,)
        return found

    @property
    def here(self) -> set[str]:
        """What the stack is called that keys may be called too."""
        return {*re.split(r"[._]", self.stack)} & {"encoder", "decoder", "text", "vision", "audio"}

    def norm(self, path: str) -> list[StoredNorm | None]:
        """What a norm may be: one that centres, one that does not, one whose gains count from 1."""
        if not path:
            return [None]
        usual = next((key for key in KEYS["norm_eps"] if self.first.config.get(key) is not None), "")
        eps = self.first.eps(path)
        drives = all(each.config.get(usual) == each.eps(path) for each in self.each)
        fixed = None if eps is None or drives or "norm_eps" in self.size_keys() else eps
        bias, module = self.first.has_bias(path), self.first.relative(path)
        without = tuple(i for i, one in sorted(self.first.indices().items()) if not one.norm and path == self.before)
        kinds = ((True, 0.0), (True, 1.0)) if bias else ((True, 0.0), (False, 0.0), (False, 1.0), (True, 1.0))
        kinds = kinds if module else kinds[:2]
        several = (fixed,) if eps is not None else (1e-5, 1e-6, 1e-8, 1e-12)  # the code has it where nobody sees it
        return [
            StoredNorm(module, centred, bias, offset, one, without) for one in several for centred, offset in kinds
        ]  # fmt: skip

    def qk_norms(self) -> list[QkNorm | None]:
        """What norms of queries and keys may be."""
        paths = self.first.inner_norms
        named = [[path for path in paths if re.search(rf"(^|[._]){of}", path.removeprefix(self.first.one.module))]
                 for of in "qk"]  # fmt: skip
        chosen = [found[0] for found in named if found] if all(named) else (paths * 2)[:2]
        if not chosen:
            return [None]
        query, key = (self.first.relative(path) for path in chosen)
        listed = ".norms." in query
        if listed:
            query, key = (module.rpartition(".norms.")[0] for module in (query, key))
        bias, eps = self.first.has_bias(chosen[0]), self.first.eps(chosen[0])
        drives = any(eps in (each.get(key) for key in KEYS["norm_eps"]) for each in [self.first.config])
        scopes = ("listed",) if listed else self._scopes(chosen[0])
        return [
            QkNorm(query, key, scope, centred, bias, offset, None if drives else eps, rotated)
            for rotated in (False, True) for scope in scopes
            for centred, offset in ((False, 0.0), (True, 0.0), (False, 1.0))
        ]  # fmt: skip

    def _scopes(self, path: str) -> tuple[str, ...]:
        """What a norm of queries is shared by, as the shape of its gains says."""
        weight = getattr(self.first.module(path), "weight", None)
        if weight is None:
            return ("shared", "joint")
        matrices = (each for path in self.first.matrices[:1] if (each := self.first.shape(path)))
        whole = any(weight.numel() in (out, out // 3) for out, _ in matrices)
        return ("own",) if weight.ndim > 1 else ("joint",) if whole else ("shared",)

    def gates(self, roles: Roles) -> list[Gate | None]:
        """What a matrix beside the three may be."""
        left = [path for path in self.first.matrices if path not in roles]
        if len(left) != 1:
            return [None]
        return [Gate(self.first.relative(left[0]), self.first.has_bias(left[0]), kind=kind) for kind in GATES]

    def bias(self, path: str) -> bool | str:
        """Whether a module has a bias, or the flag that says so."""
        return self.flags.get(path) or self.first.has_bias(path)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the row is called, which model_type it is of, and where its part of the config is."""
        part, whole = (config.get("model_type") for config in (self.first.config, self.first.tiny.checkpoint.config))
        own = isinstance(part, str) and part != whole
        kind = str(part if own else whole)
        nested = "" if own else self.first.part
        return {"name": kind, "model_types": (kind,), "nested": nested, "tower": self._tower()}

    def rows(self, fused: Sequence[Any]) -> Iterator[Family]:
        """Every row that names and shapes allow, the likeliest first.

        Parameters
        ----------
        fused : sequence of layouts
            Of one tensor for queries, keys and values.
        """
        first = self.first
        if not first.output or not (first.matrices or first.packed) or not first.stems:
            return
        for roles in first.roles() if not first.packed else [("", "", "")]:
            modules = [first.relative(path) for path in roles] if not first.packed else [self._packed()] * 3
            if not all(modules):
                continue
            layouts = [packed] if first.packed else [separate] if roles[0] != roles[2] or roles[0] != roles[1] else (
                [conv1d_fused] if first.transposed else fused
            )  # fmt: skip
            for layout in layouts:
                for gate in self.gates(roles):
                    yield self._row(roles, modules, layout, gate)

    def _packed(self) -> str:
        """torch's own attention: what its one tensor's name begins with."""
        stored = self.first.stored(f"{self.first.one.module}.in_proj_weight")
        return stored.removeprefix(self.first.stems[self.first.one.layer]).removesuffix("_weight")

    def _row(
        self, roles: Roles, modules: Sequence[str], layout: Any, gate: Gate | None
    ) -> Family:  # fmt: skip
        first, keys = self.first, self.size_keys()
        whole = not first.packed
        last = self.bias(first.output)
        query, key, value = (self.bias(path) if whole else True for path in roles)
        sub_norm = self.norm(first.gathered_norm)[0] if first.gathered_norm else None
        row = Family(
            **self.identity,
            prefixes=("",),
            layer="",
            layout=layout,
            query=modules[0],
            key=modules[1],
            value=modules[2],
            output=first.relative(first.output),
            inputs=Inputs(),
            norm=self.norm(self.before)[0],
            memory=Memory() if first.cross else None,
            gate=gate,
            beside=self._beside(),
            sub_norm=sub_norm,
            biases=Biases(query, key, value, last),
            qk_norm=self.qk_norms()[0],
            rope=Rope() if any(re.search("rope|rotary", key) for key in first.config) else None,
            transposed=tuple({name.rpartition(".")[2] for name in (*modules, first.relative(first.output))})
            if first.transposed else (),
            kv_heads=self._kv_heads(roles) if whole else (),
            head_dim=self._wide("head_dim", _head_dim(roles)) if whole else (),
            value_dim=self._wide("value_dim", _value_dim(roles)) if whole and layout is separate else (),
            keys=keys,
        )  # fmt: skip
        row = self._placed(row)
        named = {key for meaning in ("norm_eps", "n_positions") for key in row.size_keys[meaning]}
        named |= {
            key for cell in (row.kv_heads, row.head_dim, row.value_dim) if isinstance(cell, tuple) for key in cell
        }
        named |= {flag for flag in (query, key, value, last) if isinstance(flag, str)}
        known = {key: self.left_out(key) for key in sorted(named) if key in first.config}
        return row.but(defaults={key: value for key, value in known.items() if value is not None})

    def left_out(self, key: str) -> Any:
        """What the architecture takes where the config lacks a key; None where that depends on others."""
        if key not in self._left_out:
            self._left_out[key] = self._without(key)
        return self._left_out[key]

    def _without(self, key: str) -> Any:
        kind = type(self.first.owner.config)
        found = [kind().to_dict().get(key)]  # of its own sizes, as d / H need not be the same in all three
        for each in self.each:
            config = each.owner.config
            values = {name: value for name, value in config.to_dict().items() if name != key}
            try:
                found.append(kind.from_dict(values).to_dict().get(key))
            except Exception:  # whatever transformers raises of what is missing
                return None
        plain = isinstance(found[0], bool | int | float | str)  # dialects write objects, and one hides another's keys
        return found[0] if plain and found[0] == found[1] == found[2] else None

    def _placed(self, row: Family) -> Family:
        """The row with its layer's name: as short as it is without being another stack's too."""
        template = self.first.template
        at = template.index("{i}")
        for start in range(max(0, at - 1), -1, -1):
            prefix, layer = (".".join(parts) + "." * bool(parts) for parts in (template[:start], template[start:]))
            tokens = self.first.tokens()
            inputs = Inputs(tokens=tokens.removeprefix(prefix)) if tokens.startswith(prefix) else Inputs()
            row = row.but(prefixes=(prefix,), layer=layer, inputs=inputs)
            if prefixes_of(self.first.tiny.checkpoint, row) == [prefix]:
                break
        return row

    def _tower(self) -> str:
        """What the stack is called where the model has others."""
        if len(self.first.tiny.stacks) == 1:
            return ""
        if self.first.cross:
            return "cross"
        words = re.split(r"[._]", self.stack)
        known = (word for word in ("vision", "audio", "text", "encoder", "decoder") if word in words)
        return next(known, "decoder" if self.first.one.kind == "causal" else "encoder")

    def _beside(self) -> tuple[str, ...]:
        """Norms of what attention gives: modules after its output."""
        after = self.first.one.after
        norms = [path for path in after[after.index(self.first.output) + 1 :] if self.first.is_norm(path)]
        inside = self.first.one.module.rpartition(".")[0] + "."
        own = [path for path in norms if path.startswith(inside) and self.first.output.startswith(inside)]
        outer = {name for path in own if (name := self.first.relative(path)).count(".")}
        return tuple(sorted(outer))

    def _kv_heads(self, roles: Roles) -> int | tuple[str, ...]:
        """Key-value heads: as many as heads, one, or so many as a key says."""

        def count(each: Anatomy) -> int | None:
            out, wide = _out(each, roles[1]), _head_dim(roles)(each)
            if out is None or not wide:
                return None
            return out // wide if roles[0] != roles[1] else (out // wide - each.n_heads) // 2

        counts = [count(each) for each in self.each]
        if counts == [each.n_heads for each in self.each]:
            return ()
        key = self.key("kv_heads", count, ("num_key_value_heads",))
        return (key,) if key else 1 if counts == [1, 1] else ()

    def _wide(self, meaning: str, number: Callable[[Anatomy], int | None]) -> tuple[str, ...]:
        """The key of a width that is not the usual one."""
        if meaning == "value_dim":
            usual = [self.first.shape(self.first.output)]
            if not usual[0]:
                return ()
        plain = [each.d_model / each.n_heads for each in self.each]
        if meaning == "head_dim" and [number(each) for each in self.each] == plain:
            return tuple(key for key in ("head_dim",) if key in self.first.config)
        key = self.key(meaning, number, ("head_dim",) if meaning == "head_dim" else ("v_head_dim",))
        return (key,) if key else ()


def _out(each: Anatomy, path: str) -> int | None:
    found = each.shape(path) if path else None
    return found[0] if found else None


def _head_dim(roles: Roles) -> Callable[[Anatomy], int | None]:
    """A head's width: what makes queries gives one a head; of one tensor, that of what the output takes."""

    def number(each: Anatomy) -> int | None:
        if roles[0] != roles[1]:
            out = _out(each, roles[0])
            return None if out is None else out // each.n_heads
        taken = each.shape(each.output)
        return None if taken is None else taken[1] // each.n_heads

    return number


def _value_dim(roles: Roles) -> Callable[[Anatomy], int | None]:
    """The width of a head's values where it is not that of its queries."""

    def number(each: Anatomy) -> int | None:
        taken, wide = each.shape(each.output), _head_dim(roles)(each)
        return None if taken is None or taken[1] // each.n_heads == wide else taken[1] // each.n_heads

    return number


def _flags(anatomy: Anatomy) -> dict[str, str]:
    """Modules that have a bias if a flag of the config says so, and that flag: each is turned over and looked at."""
    config, part = anatomy.tiny.model.config, anatomy.part
    flags = [key for key, value in anatomy.config.items() if isinstance(value, bool) and "bias" in key][:MOST_FLAGS]
    usual = parameters_of(config)
    found: dict[str, str] = {}
    for flag in flags:
        changed = config.to_dict()
        inner = changed
        for key in filter(None, part.split(".")):
            inner = inner[key]
        if flag not in inner:
            continue
        inner[flag] = not inner[flag]
        differs = parameters_of(type(config).from_dict(changed)) ^ usual
        found |= {name.removesuffix(".bias"): flag for name in differs if name.endswith(".bias")}
    return found
