"""Adapters as PEFT saves them: a checkpoint whose weights W are read as W + dW.

A LoRA's dW is s B A, s = alpha / r, or alpha / sqrt(r) with use_rslora (PEFT 0.21,
tuners/lora/layer.py, get_delta_weight); a LoKr's is a Kronecker product. DoRA gives each output of
W + dW a length of its own. Every tensor of an adapter is used exactly or refused, and so is every
setting whose effect on the weights is not known. `mlx_lm` and `diffusion` read other tools' files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod, sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weightscope.checkpoint.checkpoint import (
    Checkpoint,
    DerivedTensor,
    StoredTensor,
    Tensor,
    WholeTensor,
)
from weightscope.checkpoint.config import MAX_BYTES, Config, read_json
from weightscope.checkpoint.formats import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    LONE,
    PICKLE,
    TORCH_ADAPTER,
    how_to_convert,
)
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError, counted

PREFIX = "base_model.model."  # start of every name that PEFT saves
PART = re.compile(
    r"(?P<module>.+)\.(?:lora_(?:embedding_)?|lokr_)"
    r"(?P<part>[AB]|magnitude_vector|w[12](?:_[ab])?|t2)(?:\.weight)?"
)
MAGNITUDE = "magnitude_vector"  # the part that DoRA adds
# Settings that are read, and settings without effect on trained tensors.
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias",
    "modules_to_save", "base_model_name_or_path", "revision", "fan_in_fan_out",
    "init_lora_weights", "use_dora", "alpha",
}  # fmt: skip
IDLE = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core",
    "eva_config", "runtime_config", "qalora_group_size", "rank_dropout", "module_dropout",
    "rank_dropout_scale", "decompose_both", "decompose_factor", "init_weights",
    "use_effective_conv2d",
}  # fmt: skip
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base's weights
EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT saves them whole where the vocabulary has grown
LARGEST_ADAPTER = 8 << 30  # bytes downloaded; rank 64 on every matrix of a 70B model has 3.3 GB
LONGEST_MODULE = 300  # characters of a module's name, or of a pattern for names
QUANTIFIER = re.compile(r"[*+?{]")
NESTED = re.compile(r"[*+?}]\s*\)*\s*[*+{]|\)[*+{]|\\\d")  # nested quantifiers, and back-references
STEPS = 10**10  # matching all patterns with all names: a few seconds
ROWS = 1024  # rows of a product computed at a time

Rows = Callable[[int, int], np.ndarray]  # float64 rows [start, stop) of a change, as stored


@dataclass(frozen=True)
class LowRank:
    """The change s B A to a weight, as its factors."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scale: float  # s
    transposed: bool = False  # the weight is stored as (in, out), as embeddings are

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that it is read from."""
        return self.a, self.b

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight as stored."""
        out, columns = self.b.shape[0], self.a.shape[1]
        return (columns, out) if self.transposed else (out, columns)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 (rows, r) and (r, columns), whose product is added to the weight as stored."""
        a, b = self.a.read().astype(np.float64), self.scale * self.b.read().astype(np.float64)
        return (a.T, b.T) if self.transposed else (b, a)

    def open(self) -> Rows:
        """Its rows; the factors are read once."""
        left, right = self.factors()
        return lambda start, stop: left[start:stop] @ right

    def unchecked(self) -> "LowRank":
        """A copy that reads NaN and infinity."""
        return replace(self, a=self.a.unchecked(set()), b=self.b.unchecked(set()))


@dataclass(frozen=True)
class Kronecker:
    """The change s W1 x W2 to a weight; each factor may itself be a product of two (LoKr)."""

    w1: tuple[Tensor, ...]  # one matrix, or two whose product it is
    w2: tuple[Tensor, ...]
    scale: float
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The largest rank that it can have."""

        def rank_of(factor: tuple[Tensor, ...]) -> int:
            return min(min(tensor.shape) for tensor in factor)

        return rank_of(self.w1) * rank_of(self.w2)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that it is read from."""
        return self.w1 + self.w2

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight as stored."""
        out = self.w1[0].shape[0] * self.w2[0].shape[0]
        columns = self.w1[-1].shape[1] * self.w2[-1].shape[1]
        return (columns, out) if self.transposed else (out, columns)

    def open(self) -> Rows:
        """Its rows; the factors are read once."""

        def matrix(factor: tuple[Tensor, ...]) -> np.ndarray:
            first, *second = (tensor.read().astype(np.float64) for tensor in factor)
            product = first @ second[0] if second else first
            return product.T if self.transposed else product

        w1, w2 = self.scale * matrix(self.w1), matrix(self.w2)

        def rows(start: int, stop: int) -> np.ndarray:
            rows_1, rows_2 = np.divmod(np.arange(start, min(stop, len(w1) * len(w2))), len(w2))
            return (w1[rows_1][:, :, None] * w2[rows_2][:, None, :]).reshape(len(rows_1), -1)

        return rows

    def unchecked(self) -> "Kronecker":
        """A copy that reads NaN and infinity."""
        w1 = tuple(tensor.unchecked(set()) for tensor in self.w1)
        w2 = tuple(tensor.unchecked(set()) for tensor in self.w2)
        return replace(self, w1=w1, w2=w2)


@dataclass(frozen=True)
class Magnitude:
    """The lengths that DoRA gives the outputs of W + dW; LyCORIS may give them to inputs."""

    lengths: Tensor
    of_inputs: bool = False


WeightChange = LowRank | Kronecker


@dataclass(frozen=True)
class MergedTensor(DerivedTensor):
    """A base weight plus its change, summed in float64 and read as float32."""

    stored: Tensor  # the base's
    change: WeightChange
    noted: set[str] | None = field(default=None, compare=False)
    magnitude: Magnitude | None = None

    def __post_init__(self) -> None:
        if self.stored.shape != self.change.shape:
            fault = f"is for a weight of shape {self.change.shape}"
            given = f"'{self.stored.name}' has {self.stored.shape}"
            raise self.change.tensors[0].refuse(f"{fault}; {given}")
        if self.magnitude and prod(self.magnitude.lengths.shape) != self.shape[self._axis]:
            lengths = self.magnitude.lengths
            given = f"'{self.stored.name}' has {self.shape}"
            raise lengths.refuse(f"has shape {lengths.shape}; {given}")

    @property
    def _axis(self) -> int:
        """The axis of the weight, as stored, along which the lengths lie."""
        assert self.magnitude is not None
        return int(self.magnitude.of_inputs != self.change.transposed)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        lengths = (self.magnitude.lengths,) if self.magnitude else ()
        tensors = (self.stored, *self.change.tensors, *lengths)
        return tuple(part for tensor in tensors for part in tensor.parts)

    def unchecked(self, noted: set[str]) -> Tensor:
        magnitude = self.magnitude
        if magnitude:
            magnitude = replace(magnitude, lengths=magnitude.lengths.unchecked(set()))
        change, stored = self.change.unchecked(), self.stored.unchecked(set())
        return replace(self, stored=stored, change=change, noted=noted, magnitude=magnitude)

    def read(self) -> np.ndarray:
        return self._added(self.stored.read(), 0)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._added(self.stored.rows(start, stop), start)

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        factors = self._of_columns()
        for start, block in self.stored.blocks(n_rows):
            yield start, self._added(block, start, factors)

    def _added(self, base: np.ndarray, first: int, factors: np.ndarray | None = None) -> np.ndarray:
        factors = self._of_columns() if factors is None else factors
        total = np.empty(base.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            for start, rows in self._sums(base, first):
                total[start : start + len(rows)] = self._scaled(rows, first + start, factors)
        return self.check_finite(total, first)

    def _sums(self, base: np.ndarray, first: int) -> Iterator[tuple[int, np.ndarray]]:
        """W + dW in float64, some rows at a time."""
        change = self.change.open()
        for start in range(0, len(base), ROWS):
            rows = base[start : start + ROWS]
            yield start, rows + change(first + start, first + start + len(rows))

    def _scaled(self, rows: np.ndarray, first: int, factors: np.ndarray) -> np.ndarray:
        """Rows of W + dW with the lengths that DoRA gives them."""
        if self.magnitude is None or self._axis == 1:
            return rows * factors if factors.size else rows
        lengths = self.magnitude.lengths.read().reshape(-1)[first : first + len(rows)]
        factor = lengths.astype(np.float64) / np.linalg.norm(rows, axis=1)
        return np.asarray(rows * factor[:, None])

    def _of_columns(self) -> np.ndarray:
        """DoRA's factor of each column of W + dW, if lengths belong to columns; else empty."""
        if self.magnitude is None or self._axis == 0:
            return np.zeros(0)
        squares = np.zeros(self.shape[1])
        for start, block in self.stored.blocks(ROWS):
            for _, rows in self._sums(block, start):
                squares += np.square(rows).sum(axis=0)
        lengths = self.magnitude.lengths.read().reshape(-1).astype(np.float64)
        return np.asarray(lengths / np.sqrt(squares))

    def delta(self) -> np.ndarray:
        """The change alone, in float64."""
        if self.magnitude is None:
            return self.change.open()(0, self.shape[0])
        base, factors = self.stored.read(), self._of_columns()
        parts = [self._scaled(rows, start, factors) for start, rows in self._sums(base, 0)]
        return np.asarray(np.concatenate(parts) - base)


@dataclass(frozen=True)
class ChangeTensor(DerivedTensor, WholeTensor):
    """The change to a weight alone, in float64; zeros for a weight without one."""

    stored: Tensor  # the checkpoint's with the adapter
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def dtype(self) -> str:
        return "F64"

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(set()), noted=noted)

    def read(self) -> np.ndarray:
        if not isinstance(self.stored, MergedTensor):
            return np.zeros(self.shape)
        return self.check_finite(self.stored.delta())


# Adapters


def adapter_from(repository: Repository) -> Path | None:
    """Download a Hub repository's adapter; its folder, or None if it is no adapter."""
    settings = repository.file(ADAPTER, MAX_BYTES)
    if settings is not None:
        replace(repository, revision=settings.parent.name).file(ADAPTER_WEIGHTS, LARGEST_ADAPTER)
    return settings and settings.parent


class AdapterFile(LocalFile):
    """The tensors of an adapter. Its identity includes the settings, which change meanings."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(path)
        text = json.dumps(dict(settings), sort_keys=True)
        self._settings = hashlib.sha256(text.encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"settings": self._settings}


@dataclass(frozen=True)
class Adapter:
    """An adapter's settings and header; no tensor is read."""

    folder: Path
    config: Config  # adapter_config.json
    file: AdapterFile

    @property
    def base(self) -> str:
        """The base model that its settings name; may be empty."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    @cached_property
    def changes(self) -> dict[str, WeightChange]:
        """The change to each module's weight, by the module's name."""
        if not self._factors:
            raise CheckpointError("holds no lora_A and lora_B", file=self.file.path)
        return {module: self._change(module, factors) for module, factors in self._factors.items()}

    @cached_property
    def magnitudes(self) -> dict[str, Magnitude]:
        """The lengths that DoRA gives the outputs of a module, by its name."""
        with_lengths = {m: parts for m, parts in self._factors.items() if MAGNITUDE in parts}
        return {module: Magnitude(parts[MAGNITUDE]) for module, parts in with_lengths.items()}

    @cached_property
    def _factors(self) -> dict[str, dict[str, StoredTensor]]:
        """The tensors of each changed module by their part."""
        parts: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self._tensors.items():
            if match := PART.fullmatch(name):
                parts.setdefault(match["module"], {})[match["part"]] = tensor
        return parts

    @property
    def others(self) -> tuple[str, ...]:
        """Nothing: PEFT's adapters change one model."""
        return ()

    def renamed(self, base: Iterable[str]) -> Callable[[str], str]:
        """Map the adapter's names to the base's."""
        return naming(self.changes, base, self.file.path)

    @cached_property
    def replaced(self) -> dict[str, StoredTensor]:
        """Tensors that replace tensors of the base, by name."""
        replaced = {}
        for name, tensor in self._tensors.items():
            if PART.fullmatch(name):
                continue
            plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            module, _, kind = plain.rpartition(".")
            if not self._may_replace(module, kind):
                known = "lora_A, lora_B, modules of modules_to_save and trained biases"
                problem = "is not a supported part of a LoRA adapter"
                raise tensor.refuse(f"{problem}; supported are {known}")
            replaced[plain] = tensor
        return replaced

    def _may_replace(self, module: str, kind: str) -> bool:
        if "lora_" in module + kind:
            return False
        listed = self.config.get("modules_to_save") or []
        saved = []
        if isinstance(listed, list):
            saved = [*EMBEDDINGS, *(name for name in listed if isinstance(name, str))]
        if any(f".{name}." in f".{module}." for name in saved) or module in self.changes:
            return True
        return kind == "bias" and self.config.get("bias") in ("all", "lora_only")

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        tensors = {}
        for name, entry in self.file.tensors.items():
            tensor = StoredTensor(name, entry, self.file)
            if not name.startswith(PREFIX) or len(name) > LONGEST_MODULE:
                raise tensor.refuse(f"is not a name that PEFT saves ({PREFIX}...)")
            tensors[name.removeprefix(PREFIX)] = tensor
        return tensors

    def _change(self, module: str, parts: Mapping[str, StoredTensor]) -> WeightChange:
        """The factors of one module, checked against the settings."""
        factors = {part: tensor for part, tensor in parts.items() if part != MAGNITUDE}
        magnitude, uses_dora = parts.get(MAGNITUDE), self.config.get("use_dora")
        if magnitude and not uses_dora:
            problem = "is not a supported part of a LoRA adapter"
            raise magnitude.refuse(f"{problem}: {ADAPTER} says nothing of DoRA")
        if uses_dora and (magnitude is None or "lora_embedding_" in magnitude.name):
            problem = "has no lora_magnitude_vector that is read"
            lone = next(iter(parts.values()))
            raise lone.refuse(f"{problem}, though {ADAPTER} says use_dora")
        if self.config.get("peft_type") == "LOKR":
            rank = self._of_module("rank_pattern", "r", module)
            return kronecker(factors, self._of_module("alpha_pattern", "alpha", module) / rank)
        a, b = factor_pair(factors)
        rank = self._of_module("rank_pattern", "r", module)
        if a.shape[0] != b.shape[1] or a.shape[0] != rank:
            shapes = f"has shape {a.shape}, its lora_B {b.shape}"
            raise a.refuse(f"{shapes}; {ADAPTER} says rank {rank:g}")
        alpha = self._of_module("alpha_pattern", "lora_alpha", module)
        scale = alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
        return LowRank(a, b, scale, transposed="lora_embedding_" in a.name)

    def _of_module(self, patterns: str, default: str, module: str) -> float:
        """A module's setting: by the first pattern for the end of its name, else the default."""
        for pattern, value in self._patterns[patterns]:
            if pattern.fullmatch(module):
                return value
        return self.config.number(default, default=8.0, smallest=1e-9, largest=1e6)

    @cached_property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], float]]]:
        """Compiled patterns of each setting with their values; slow patterns are refused."""
        longest, n_names = max(map(len, self._tensors), default=0), len(self._tensors)
        steps = 0
        patterns: dict[str, list[tuple[re.Pattern[str], float]]] = {}
        for setting in ("rank_pattern", "alpha_pattern"):
            listed = self.config.inside(setting)
            patterns[setting] = []
            for text in listed:
                steps += n_names * longest ** (len(QUANTIFIER.findall(text)) + 1)
                if steps > STEPS or len(text) > LONGEST_MODULE:
                    raise _unread(text, self.config)
                value = listed.number(text, smallest=1e-9, largest=1e6)
                patterns[setting].append((_compiled(text, self.config), value))
        return patterns


def factor_pair(parts: Mapping[str, StoredTensor]) -> tuple[StoredTensor, StoredTensor]:
    """A (r, in) and B (out, r) of a LoRA."""
    if set(parts) != {"A", "B"}:
        lone = next(iter(parts.values()))
        raise lone.refuse("has no counterpart; a LoRA has lora_A and lora_B of each module")
    a, b = parts["A"], parts["B"]
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise a.refuse(f"has shape {a.shape}: a LoRA of a convolution, which is not read")
    return a, b


def kronecker(parts: Mapping[str, StoredTensor], scale: float) -> Kronecker:
    """The change of a LoKr from lokr_w1, or lokr_w1_a and lokr_w1_b, and so for w2."""
    factors = []
    for name in ("w1", "w2"):
        tensors = tuple(parts[part] for part in (name, f"{name}_a", f"{name}_b") if part in parts)
        expected = 1 if name in parts else 2
        are_matrices = all(len(tensor.shape) == 2 for tensor in tensors)
        fits = are_matrices and len(tensors) == expected and "t2" not in parts
        if fits and expected == 2:
            fits = tensors[0].shape[1] == tensors[1].shape[0]
        if not fits:
            lone = next(iter(parts.values()))
            wanted = f"one matrix, or {name}_a and {name}_b that fit"
            problem = f"belongs to a LoKr whose {name} is not {wanted}"
            raise lone.refuse(f"{problem}; convolutions (t2) are not read")
        factors.append(tensors)
    return Kronecker(factors[0], factors[1], scale)


def _compiled(pattern: str, config: Config) -> re.Pattern[str]:
    """A pattern for the end of a name, from a dot or the name's start on."""
    try:
        if not NESTED.search(pattern):
            return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError):
        pass
    raise _unread(pattern, config)


def _unread(pattern: str, config: Config) -> CheckpointError:
    return CheckpointError(f"the pattern '{pattern[:40]}' for names is not read", file=config.file)


def open_adapter(folder: Path) -> Adapter:
    """Open an adapter: settings and header are read and checked, no tensor."""
    path = folder / ADAPTER
    config = Config(read_json(path), path)
    kind = config.get("peft_type")
    if kind not in ("LORA", "LOKR"):
        problem = f"is an adapter of peft_type '{str(kind)[:40]}'; read are LORA and LOKR"
        raise CheckpointError(problem, file=path)
    if config.get("init_lora_weights") not in INITIAL:
        value = str(config.get("init_lora_weights"))[:40]
        problem = f"init_lora_weights is '{value}', which changes the base's weights too"
        advice = "convert it to a plain LoRA with PEFT, or merge it"
        raise CheckpointError(f"{problem}; it is not read: {advice}", file=path)
    for name, value in config.items():
        if value and name not in READ | IDLE:
            advice = "merge the adapter with PEFT and open the merged model"
            raise CheckpointError(f"{name} is set, which is not read; {advice}", file=path)
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        raise config.error("bias", "none, all or lora_only")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = folder / TORCH_ADAPTER
        converted = f"; {PICKLE}{how_to_convert(pickled)}" if pickled.is_file() else ""
        raise CheckpointError(f"has no {ADAPTER_WEIGHTS} in its folder{converted}", file=path)
    adapter = Adapter(folder, config, AdapterFile(folder / ADAPTER_WEIGHTS, config))
    adapter.replaced  # noqa: B018 - checks every tensor
    return adapter


def has_tokenizer(folder: Path) -> bool:
    """True if a folder has a tokenizer's files."""
    return any(next(folder.glob(pattern), None) for pattern in ("tokenizer*", "vocab*"))


def _moved(name: str, cut: int, start: str) -> str:
    return start + name.split(".", cut)[-1]


def naming(modules: Iterable[str], names: Iterable[str], file: object) -> Callable[[str], str]:
    """Map an adapter's names to the base's, which may have a shorter or longer prefix."""
    wanted, in_base = [f"{module}.weight" for module in modules], set(names)
    for cut in range(min(name.count(".") for name in wanted)):
        short = [name.split(".", cut)[-1] for name in wanted]
        ending = [name for name in in_base if f".{name}".endswith(f".{short[0]}")]
        starts = [name.removesuffix(short[0]) for name in ending]
        fitting = [start for start in starts if all(start + name in in_base for name in short)]
        if "" in fitting or len(fitting) == 1:
            start = "" if "" in fitting else fitting[0]
            return partial(_moved, cut=cut, start=start)
        if fitting:
            break
    missing = next((name for name in wanted if name not in in_base), wanted[0])
    problem = f"changes '{missing}', which the base does not have"
    raise CheckpointError(f"{problem}; is `base` the model it was made for?", file=file)


class AnyAdapter(Protocol):
    """An adapter of any tool, its headers read."""

    @property
    def folder(self) -> Path: ...
    @property
    def file(self) -> LocalFile: ...
    @property
    def changes(self) -> Mapping[str, WeightChange]: ...
    @property
    def magnitudes(self) -> Mapping[str, Magnitude]: ...
    @property
    def replaced(self) -> Mapping[str, StoredTensor]: ...
    @property
    def others(self) -> Collection[str]: ...  # models that its file changes too
    def renamed(self, base: Iterable[str]) -> Callable[[str], str]: ...


def with_adapter(base: Checkpoint, adapter: AnyAdapter, transposed: Collection[str]) -> Checkpoint:
    """The base with the adapter; every tensor of the adapter is used or refused."""
    rename, tensors = adapter.renamed(base), dict(base.items())
    changes = adapter.changes
    for name, tensor in adapter.replaced.items():
        full = rename(name)
        before = tensors.get(full)
        if before is not None and tensor.shape != before.shape:
            is_resized = len(tensor.shape) == 2 and tensor.shape[1:] == before.shape[1:]
            if not is_resized:
                raise tensor.refuse(f"has shape {tensor.shape}, in the base {before.shape}")
        tensors[full] = replace(tensor, name=full)
    for module, change in changes.items():
        full = rename(f"{module}.weight")
        in_out = change.transposed or full.rpartition(".")[0].rpartition(".")[2] in transposed
        changed = replace(change, transposed=in_out)
        magnitude = adapter.magnitudes.get(module)
        tensors[full] = MergedTensor(tensors[full], changed, magnitude=magnitude)
    folder = adapter.folder if has_tokenizer(adapter.folder) else base.folder
    base_name = base.folder.name if base.name == LONE else base.name
    files, name = [*base.files, adapter.file], f"{adapter.folder.name} on {base_name}"
    merged = Checkpoint(folder, files, tensors, base.config, name)
    merged.weight_files, merged.given = base.weight_files, base.given
    merged.stored_names = base.stored_names
    ranks = ", ".join(map(str, sorted({change.rank for change in changes.values()})))
    types = {type(change) for change in changes.values()}
    kinds = {LowRank: "LoRA", Kronecker: "LoKr"}
    kind = " and ".join(name for type_, name in kinds.items() if type_ in types)
    kind += " with DoRA's lengths" if adapter.magnitudes else ""
    weights = counted(len(changes), "weight")
    if adapter.replaced:
        weights += f" and {counted(len(adapter.replaced), 'tensor')} of its own"
    merged.note = f"A {kind} of rank {ranks} on {weights} over {base_name}."
    if adapter.others:
        merged.note += f" Its file also changes {', '.join(adapter.others)}, which the base is not."
    return merged
