"""LoRA adapters as PEFT saves them: a checkpoint whose weights W are read as W + s B A.

s = alpha / r, or alpha / sqrt(r) with use_rslora (PEFT 0.21, tuners/lora/layer.py, get_delta_weight). Every tensor of
an adapter is used exactly or refused, and so is every setting whose effect on the weights is not known.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, DerivedTensor, StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import MAX_BYTES, Config, read_json
from weightscope.checkpoint.formats import ADAPTER, ADAPTER_WEIGHTS, LONE, PICKLE, TORCH_ADAPTER, how_to_convert
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.storage import LocalFile
from weightscope.errors import CheckpointError, counted

PREFIX = "base_model.model."  # of every name that PEFT saves
PART = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?")
# Settings that are read, and settings without effect on trained tensors.
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save",
    "base_model_name_or_path", "revision", "fan_in_fan_out", "init_lora_weights",
}  # fmt: skip
IDLE = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "target_modules", "exclude_modules", "lora_dropout",
    "layers_to_transform", "layers_pattern", "megatron_core", "eva_config", "runtime_config", "qalora_group_size",
}  # fmt: skip
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base's own weights too
EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT saves them whole where the vocabulary has grown
LARGEST_ADAPTER = 8 << 30  # bytes downloaded; rank 64 on every matrix of a 70B model has 3.3 GB
LONGEST_MODULE = 300  # characters of a module's name, or of a pattern for names
QUANTIFIER = re.compile(r"[*+?{]")
NESTED = re.compile(r"[*+?}]\s*\)*\s*[*+{]|\)[*+{]|\\\d")  # nested quantifiers, and back-references
STEPS = 10**10  # to match all patterns with all names, a name's length per quantifier: a few seconds
ROWS = 1024  # of a product computed at a time


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
    def shape(self) -> tuple[int, int]:
        """Shape of the weight as stored."""
        out, columns = self.b.shape[0], self.a.shape[1]
        return (columns, out) if self.transposed else (out, columns)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 (rows, r) and (r, columns), whose product is added to the weight as stored."""
        a, b = self.a.read().astype(np.float64), self.scale * self.b.read().astype(np.float64)
        return (a.T, b.T) if self.transposed else (b, a)


@dataclass(frozen=True)
class MergedTensor(DerivedTensor):
    """A base weight plus its change, summed in float64 and read as float32."""

    stored: Tensor  # of the base
    change: LowRank
    noted: set[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.stored.shape != self.change.shape:
            problem = f"is for a weight of shape {self.change.shape}; '{self.stored.name}' has {self.stored.shape}"
            raise self.change.a.refuse(problem)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (*self.stored.parts, *self.change.a.parts, *self.change.b.parts)

    def unchecked(self, noted: set[str]) -> Tensor:
        change = replace(self.change, a=self.change.a.unchecked(set()), b=self.change.b.unchecked(set()))
        return replace(self, stored=self.stored.unchecked(set()), change=change, noted=noted)

    def read(self) -> np.ndarray:
        return self._added(self.stored.read(), 0)

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._added(self.stored.rows(start, stop), start)

    def blocks(self, n_rows: int) -> Iterator[tuple[int, np.ndarray]]:
        for start, block in self.stored.blocks(n_rows):
            yield start, self._added(block, start)

    def _added(self, base: np.ndarray, first: int) -> np.ndarray:
        left, right = self.change.factors()
        total = np.empty(base.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            for start in range(0, len(base), ROWS):
                rows = slice(start, start + ROWS)
                total[rows] = base[rows] + left[first + start : first + start + ROWS][: len(base[rows])] @ right
        return self.check_finite(total, first)


@dataclass(frozen=True)
class ChangeTensor(DerivedTensor, WholeTensor):
    """The change to a weight alone, in float64; zeros for a weight without one."""

    stored: Tensor  # of the checkpoint with the adapter
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def dtype(self) -> str:
        return "F64"

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(set()), noted=noted)

    def read(self) -> np.ndarray:
        if not isinstance(self.stored, MergedTensor):
            return np.zeros(self.shape)
        left, right = self.stored.change.factors()
        return self.check_finite(left @ right)


# Adapters


def adapter_from(repository: Repository) -> Path | None:
    """The folder of the adapter in a repository on the Hub, downloaded; None if it is no adapter."""
    settings = repository.file(ADAPTER, MAX_BYTES)
    if settings is not None:
        replace(repository, revision=settings.parent.name).file(ADAPTER_WEIGHTS, LARGEST_ADAPTER)
    return settings and settings.parent


class AdapterFile(LocalFile):
    """The tensors of an adapter. Its identity includes the settings, which change what the tensors mean."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._settings = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()

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
    def changes(self) -> dict[str, LowRank]:
        """The change to each module's weight, by the module's name."""
        parts: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self._tensors.items():
            if match := PART.fullmatch(name):
                parts.setdefault(match["module"], {})[match["part"]] = tensor
        if not parts:
            raise CheckpointError("holds no lora_A and lora_B", file=self.file.path)
        return {module: self._change(module, factors) for module, factors in parts.items()}

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
                raise tensor.refuse(f"is not a supported part of a LoRA adapter; supported are {known}")
            replaced[plain] = tensor
        return replaced

    def _may_replace(self, module: str, kind: str) -> bool:
        listed = self.config.get("modules_to_save") or []
        saved = [*EMBEDDINGS, *(name for name in listed if isinstance(name, str))] if isinstance(listed, list) else []
        is_saved = any(f".{name}." in f".{module}." for name in saved)
        return "lora_" not in module + kind and (
            is_saved or module in self.changes or (kind == "bias" and self.config.get("bias") in ("all", "lora_only"))
        )

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        tensors = {}
        for name, entry in self.file.tensors.items():
            tensor = StoredTensor(name, entry, self.file)
            if not name.startswith(PREFIX) or len(name) > LONGEST_MODULE:
                raise tensor.refuse(f"is not a name that PEFT saves ({PREFIX}...)")
            tensors[name.removeprefix(PREFIX)] = tensor
        return tensors

    def _change(self, module: str, parts: Mapping[str, StoredTensor]) -> LowRank:
        """The factors of one module, checked against the settings."""
        if set(parts) != {"A", "B"}:
            (lone,) = parts.values()
            raise lone.refuse("has no counterpart; a LoRA has lora_A and lora_B of each module")
        a, b = parts["A"], parts["B"]
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise a.refuse(f"has shape {a.shape}: a LoRA of a convolution, which is not read")
        rank = self._of_module("rank_pattern", "r", module)
        if a.shape[0] != b.shape[1] or a.shape[0] != rank:
            raise a.refuse(f"has shape {a.shape}, its lora_B {b.shape}; {ADAPTER} says rank {rank:g}")
        alpha = self._of_module("alpha_pattern", "lora_alpha", module)
        scale = alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
        return LowRank(a, b, scale, transposed="lora_embedding_" in a.name)

    def _of_module(self, patterns: str, default: str, module: str) -> float:
        """A module's setting: by the first pattern that matches the end of its name, else the default setting."""
        for pattern, value in self._patterns[patterns]:
            if pattern.fullmatch(module):
                return value
        return self.config.number(default, default=8.0, smallest=1e-9, largest=1e6)

    @cached_property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], float]]]:
        """The compiled patterns of each setting with their values; patterns that could take long are refused."""
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
    if kind != "LORA":
        raise CheckpointError(f"is an adapter of peft_type '{str(kind)[:40]}'; read is LORA", file=path)
    if config.get("init_lora_weights") not in INITIAL:
        value = str(config.get("init_lora_weights"))[:40]
        problem = f"init_lora_weights is '{value}', which changes the base's weights too; it is not read"
        raise CheckpointError(f"{problem}: convert it to a plain LoRA with PEFT, or merge it", file=path)
    for name, value in config.items():
        if value and name not in READ | IDLE:
            problem = f"{name} is set, which is not read; merge the adapter with PEFT and open the merged model"
            raise CheckpointError(problem, file=path)
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
    """Whether a folder has a tokenizer's files."""
    return any(next(folder.glob(pattern), None) for pattern in ("tokenizer*", "vocab*"))


def naming(modules: Iterable[str], names: Iterable[str], file: object) -> Callable[[str], str]:
    """Turns an adapter's names into the base's, which may have a shorter or longer prefix."""
    wanted, in_base = [f"{module}.weight" for module in modules], set(names)
    for cut in range(min(name.count(".") for name in wanted)):
        short = [name.split(".", cut)[-1] for name in wanted]
        starts = [name.removesuffix(short[0]) for name in in_base if f".{name}".endswith(f".{short[0]}")]
        fitting = [start for start in starts if all(start + name in in_base for name in short)]
        if "" in fitting or len(fitting) == 1:
            start = "" if "" in fitting else fitting[0]
            return lambda name, cut=cut, start=start: start + name.split(".", cut)[-1]  # type: ignore[misc]
        if fitting:
            break
    missing = next((name for name in wanted if name not in in_base), wanted[0])
    problem = f"changes '{missing}', which the base does not have; is `base` the model it was made for?"
    raise CheckpointError(problem, file=file)


def with_adapter(base: Checkpoint, adapter: Adapter, transposed: Collection[str]) -> Checkpoint:
    """The base with the adapter; every tensor of the adapter is used or refused."""
    changes, path = adapter.changes, adapter.file.path
    rename, tensors = naming(changes, base, path), dict(base.items())
    for name, tensor in adapter.replaced.items():
        full = rename(name)
        before = tensors.get(full)
        resized = before is not None and len(tensor.shape) == 2 and tensor.shape[1:] == before.shape[1:]
        if before is not None and tensor.shape != before.shape and not resized:
            raise tensor.refuse(f"has shape {tensor.shape}, in the base {before.shape}")
        tensors[full] = replace(tensor, name=full)
    for module, change in changes.items():
        full = rename(f"{module}.weight")
        in_out = change.transposed or module.rpartition(".")[2] in transposed
        tensors[full] = MergedTensor(tensors[full], replace(change, transposed=in_out))
    folder = adapter.folder if has_tokenizer(adapter.folder) else base.folder
    base_name = base.folder.name if base.name == LONE else base.name
    files = [*base.files, adapter.file]
    merged = Checkpoint(folder, files, tensors, base.config, f"{adapter.folder.name} on {base_name}")
    ranks = ", ".join(map(str, sorted({change.rank for change in changes.values()})))
    replaced = f" and {counted(len(adapter.replaced), 'tensor')} of its own" if adapter.replaced else ""
    merged.weight_files, merged.given = base.weight_files, base.given
    merged.note = f"A LoRA of rank {ranks} on {counted(len(changes), 'weight')}{replaced} over {base_name}."
    return merged
