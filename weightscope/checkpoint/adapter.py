"""A LoRA adapter as PEFT saves it: changes of low rank to another checkpoint's weights, each read exactly or refused.

W + s B A, with s = alpha / r, or alpha / sqrt(r) where use_rslora says so (PEFT 0.21, tuners/lora/layer.py,
get_delta_weight). What a setting would do to the weights otherwise is not guessed: it is refused by its name.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Any

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.checkpoint.folder import LONE
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.jsontext import MAX_BYTES, read_json
from weightscope.checkpoint.local import LocalFile
from weightscope.checkpoint.merged import LowRank, MergedTensor
from weightscope.checkpoint.others import ADAPTER, ADAPTER_WEIGHTS
from weightscope.checkpoint.source import existing
from weightscope.checkpoint.tensor import StoredTensor
from weightscope.errors import CheckpointError, counted

PREFIX = "base_model.model."  # before every name that PEFT saves
PART = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?")
# Settings that say what the tensors are, and those that do nothing to them once they are trained.
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save",
    "base_model_name_or_path", "revision", "fan_in_fan_out", "init_lora_weights",
}  # fmt: skip
IDLE = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "target_modules", "exclude_modules", "lora_dropout",
    "layers_to_transform", "layers_pattern", "megatron_core", "eva_config", "runtime_config", "qalora_group_size",
}  # fmt: skip
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base's own weights too
EMBEDDINGS = ("embed_tokens", "lm_head")  # which PEFT saves whole where the vocabulary has grown
LARGEST_ADAPTER = 8 << 30  # bytes of an adapter that are fetched; one of rank 64 on all of a 70B model has 3.3 GB
LONGEST_MODULE = 300  # characters of a module's name, or of a pattern for such names
QUANTIFIER = re.compile(r"[*+?{]")
NESTED = re.compile(r"[*+?}]\s*\)*\s*[*+{]|\)[*+{]|\\\d")  # and references to what was found before
STEPS = 10**10  # that matching all patterns with all names may take, a name's length for each quantifier; a few seconds


def adapter_in(source: str | Path) -> Path | None:
    """The folder of the adapter that a source on this machine is, or None where it is something else."""
    path = existing(source)
    if path is not None and path.name == ADAPTER_WEIGHTS:
        path = path.parent
    if path is None or not (path / ADAPTER).is_file() or any(path.glob("model*.safetensors")):
        return None
    return path


def adapter_from(repository: Repository) -> Path | None:
    """The folder of the adapter that a repository on the Hub is, its files brought here; None where it is none.

    Raises
    ------
    CheckpointError
        The Hub does not give them.
    """
    settings = repository.file(ADAPTER, MAX_BYTES)
    if settings is not None:
        replace(repository, revision=settings.parent.name).file(ADAPTER_WEIGHTS, LARGEST_ADAPTER)
    return settings and settings.parent


class AdapterFile(LocalFile):
    """The tensors of an adapter, which its settings make other weights of."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._settings = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """Name, size and time, and the settings."""
        return super().identity | {"settings": self._settings}


@dataclass(frozen=True)
class Adapter:
    """An adapter by its header and its settings; no tensor is read.

    Attributes
    ----------
    folder : Path
    config : Config
        adapter_config.json.
    file : AdapterFile
    """

    folder: Path
    config: Config
    file: AdapterFile

    @property
    def base(self) -> str:
        """What it says it is an adapter of."""
        named = self.config.get("base_model_name_or_path")
        return named if isinstance(named, str) else ""

    @cached_property
    def changes(self) -> dict[str, LowRank]:
        """The change to each module's weight, by the module's name."""
        parts: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self._tensors.items():
            if found := PART.fullmatch(name):
                parts.setdefault(found["module"], {})[found["part"]] = tensor
        if not parts:
            raise CheckpointError("holds no lora_A and lora_B", file=self.file.path)
        return {module: self._change(module, own) for module, own in parts.items()}

    @cached_property
    def replaced(self) -> dict[str, StoredTensor]:
        """Tensors that take the place of the base's, by their names."""
        found = {}
        for name, tensor in self._tensors.items():
            if PART.fullmatch(name):
                continue
            plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            module, _, kind = plain.rpartition(".")
            if not self._may_replace(module, kind):
                said = "neither lora_A nor lora_B, nor of modules_to_save, nor a bias that was trained"
                raise tensor.refuse(f"is no part of a LoRA that is read: {said}")
            found[plain] = tensor
        return found

    def _may_replace(self, module: str, kind: str) -> bool:
        saved = self.config.get("modules_to_save") or []
        whole = [*EMBEDDINGS, *(name for name in saved if isinstance(name, str))] if isinstance(saved, list) else []
        within = any(f".{module}.".endswith(f".{name}.") or f".{name}." in f".{module}." for name in whole)
        return "lora_" not in module + kind and (
            within or module in self.changes or (kind == "bias" and self.config.get("bias") in ("all", "lora_only"))
        )

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        found = {}
        for name, entry in self.file.tensors.items():
            tensor = StoredTensor(name, entry, self.file)
            if not name.startswith(PREFIX) or len(name) > LONGEST_MODULE:
                raise tensor.refuse(f"is not named as PEFT names what it saves ({PREFIX}...)")
            found[name.removeprefix(PREFIX)] = tensor
        return found

    def _change(self, module: str, parts: Mapping[str, StoredTensor]) -> LowRank:
        """The factors of one module, checked against the settings."""
        if set(parts) != {"A", "B"}:
            (lone,) = parts.values()
            raise lone.refuse("stands alone; a LoRA has lora_A and lora_B of each module")
        a, b = parts["A"], parts["B"]
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise a.refuse(f"has shape {a.shape}: a LoRA of a convolution, which is not read")
        rank = self._of_module("rank_pattern", "r", module)
        if a.shape[0] != b.shape[1] or a.shape[0] != rank:
            raise a.refuse(f"has shape {a.shape}, its lora_B {b.shape}; {ADAPTER} says rank {rank:g}")
        alpha = self._of_module("alpha_pattern", "lora_alpha", module)
        scale = alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)
        return LowRank(a, b, scale, embedding="lora_embedding_" in a.name)

    def _of_module(self, patterns: str, default: str, module: str) -> float:
        """A setting that the names of modules may change: by the first pattern that ends a module's name."""
        for pattern, value in self._patterns[patterns]:
            if pattern.fullmatch(module):
                return value
        return self.config.number(default, default=8.0, smallest=1e-9, largest=1e6)

    @cached_property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], float]]]:
        """The patterns for names of each setting, and its values for them; known to be matched in little time."""
        longest, n_names = max(map(len, self._tensors), default=0), len(self._tensors)
        steps = 0
        found: dict[str, list[tuple[re.Pattern[str], float]]] = {}
        for setting in ("rank_pattern", "alpha_pattern"):
            listed = self.config.inside(setting)
            found[setting] = []
            for text in listed:
                steps += n_names * longest ** (len(QUANTIFIER.findall(text)) + 1)
                if steps > STEPS or len(text) > LONGEST_MODULE:
                    raise _unread(text, self.config)
                value = listed.number(text, smallest=1e-9, largest=1e6)
                found[setting].append((_compiled(text, self.config), value))
        return found


def _compiled(pattern: str, config: Config) -> re.Pattern[str]:
    """A pattern for the end of a name, which begins where the name or a part of it does."""
    try:
        if not NESTED.search(pattern):
            return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError):
        pass
    raise _unread(pattern, config)


def _unread(pattern: str, config: Config) -> CheckpointError:
    return CheckpointError(f"the pattern '{pattern[:40]}' for names is not read", file=config.file)


def open_adapter(folder: Path) -> Adapter:
    """Open an adapter: settings and header are read and checked, no tensor.

    Raises
    ------
    CheckpointError
        It is not a LoRA, has a setting that changes weights in a way that is not read, or its tensors are not those
        of one.
    """
    path = folder / ADAPTER
    config = Config(read_json(path), path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"is an adapter of peft_type '{str(kind)[:40]}'; read is LORA", file=path)
    if config.get("init_lora_weights") not in INITIAL:
        found = str(config.get("init_lora_weights"))[:40]
        problem = f"init_lora_weights is '{found}', which changes the base's weights too; it is not read"
        raise CheckpointError(f"{problem}: convert it to a plain LoRA with PEFT, or merge it", file=path)
    for name, value in config.items():
        if value and name not in READ | IDLE:
            problem = f"{name} is set, which is not read; merge the adapter with PEFT and open what comes of it"
            raise CheckpointError(problem, file=path)
    if config.get("bias") not in (None, "none", "all", "lora_only"):
        raise config.error("bias", "none, all or lora_only")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        problem = f"has no {ADAPTER_WEIGHTS} beside it; pickled files are not opened: save it as safetensors"
        raise CheckpointError(problem, file=path)
    adapter = Adapter(folder, config, AdapterFile(folder / ADAPTER_WEIGHTS, config))
    adapter.replaced  # noqa: B018 - every tensor is looked at, or refused
    return adapter


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files that are a tokenizer's."""
    return any(next(folder.glob(pattern), None) for pattern in ("tokenizer*", "vocab*"))


def naming(modules: Iterable[str], names: Iterable[str], file: object) -> Callable[[str], str]:
    """How an adapter's names become the base's, whose files may leave out what comes first, or have more before it.

    Parameters
    ----------
    modules : iterable of str
        Modules that the adapter changes the weights of.
    names : iterable of str
        Tensors of the base.
    file : object
        Named in errors.

    Raises
    ------
    CheckpointError
        No one rule finds the weights of all of them, or several do.
    """
    wanted, there = [f"{module}.weight" for module in modules], set(names)
    for cut in range(min(name.count(".") for name in wanted)):
        short = [name.split(".", cut)[-1] for name in wanted]
        ends = [name.removesuffix(short[0]) for name in there if f".{name}".endswith(f".{short[0]}")]
        fitting = [start for start in ends if all(start + name in there for name in short)]
        if "" in fitting or len(fitting) == 1:
            start = "" if "" in fitting else fitting[0]
            return lambda name, cut=cut, start=start: start + name.split(".", cut)[-1]  # type: ignore[misc]
        if fitting:
            break
    missing = next((name for name in wanted if name not in there), wanted[0])
    problem = f"changes '{missing}', which the base does not have; is `base` the model it was made for?"
    raise CheckpointError(problem, file=file)


def with_adapter(base: Checkpoint, adapter: Adapter, transposed: Collection[str]) -> Checkpoint:
    """The base under the adapter; every tensor of the adapter is in it, or refused.

    Parameters
    ----------
    base : Checkpoint
    adapter : Adapter
    transposed : collection of str
        Last parts of the names of modules whose weights the base stores as (in, out). PEFT asks the module too, and
        sets fan_in_fan_out by it, whatever the settings say.

    Raises
    ------
    CheckpointError
        The adapter was not made for this base.
    """
    changes, path = adapter.changes, adapter.file.path
    rename, tensors = naming(changes, base, path), dict(base.items())
    for name, tensor in adapter.replaced.items():
        full = rename(name)
        there = tensors.get(full)
        resized = there is not None and len(tensor.shape) == 2 and tensor.shape[1:] == there.shape[1:]
        if there is not None and tensor.shape != there.shape and not resized:
            raise tensor.refuse(f"has shape {tensor.shape}, in the base {there.shape}")
        tensors[full] = replace(tensor, name=full)
    for module, change in changes.items():
        full = rename(f"{module}.weight")
        tensors[full] = MergedTensor(tensors[full], replace(change, transposed=module.rpartition(".")[2] in transposed))
    folder = adapter.folder if has_tokenizer(adapter.folder) else base.folder
    over = base.folder.name if base.name == LONE else base.name
    files = [*base.files, adapter.file]
    merged = Checkpoint(folder, files, tensors, base.config, f"{adapter.folder.name} on {over}")
    ranks = ", ".join(map(str, sorted({change.rank for change in changes.values()})))
    others = f" and {counted(len(adapter.replaced), 'tensor')} of its own" if adapter.replaced else ""
    merged.note = f"A LoRA of rank {ranks} on {counted(len(changes), 'weight')}{others} over {over}."
    return merged
