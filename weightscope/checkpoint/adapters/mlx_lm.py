"""Adapters of mlx-lm: adapters.safetensors with lora_a (in, r), lora_b (r, out), DoRA's m (out,).

W is read as W + scale (lora_a lora_b)', the scale as it stands (mlx_lm 0.32, tuner/lora.py,
LoRALinear.fuse).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from weightscope.checkpoint.adapters.lora import (
    LONGEST_MODULE,
    AdapterFile,
    LowRank,
    Magnitude,
    naming,
)
from weightscope.checkpoint.checkpoint import DerivedTensor, StoredTensor, Tensor, WholeTensor
from weightscope.checkpoint.config import Config, read_json
from weightscope.checkpoint.formats import ADAPTER
from weightscope.core.errors import CheckpointError

WEIGHTS = "adapters.safetensors"
KIND = "fine_tune_type"  # the key of the settings that PEFT's do not have
PARTS = ("lora_a", "lora_b", "m")


def is_of_mlx(folder: Path) -> bool:
    """True if a folder is an adapter of mlx-lm."""
    return (folder / WEIGHTS).is_file() and "peft_type" not in read_json(folder / ADAPTER)


@dataclass(frozen=True)
class Turned(DerivedTensor, WholeTensor):
    """A matrix, transposed."""

    stored: Tensor
    noted: set[str] | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def unchecked(self, noted: set[str]) -> Tensor:
        return replace(self, stored=self.stored.unchecked(set()), noted=noted)

    def read(self) -> np.ndarray:
        return self.stored.read().T


@dataclass(frozen=True)
class AdapterOfMlx:
    """The settings and header of an adapter; no tensor is read."""

    folder: Path
    config: Config  # adapter_config.json
    file: AdapterFile

    @classmethod
    def open(cls, folder: Path) -> "AdapterOfMlx":
        """Open an adapter: settings and header are read and checked."""
        config = Config(read_json(folder / ADAPTER), folder / ADAPTER)
        kind = config.get(KIND, "lora")
        if kind not in ("lora", "dora"):
            problem = f"is an adapter of mlx-lm with {KIND} '{str(kind)[:40]}'"
            advice = "lora and dora are read: merge it with `mlx_lm.fuse`"
            raise CheckpointError(f"{problem}; {advice}", file=config.file)
        adapter = cls(folder, config, AdapterFile(folder / WEIGHTS, config))
        adapter.changes  # noqa: B018 - checks every tensor
        return adapter

    @property
    def base(self) -> str:
        """The base model that its settings name; may be empty."""
        name = self.config.get("model")
        return name if isinstance(name, str) else ""

    @cached_property
    def modules(self) -> dict[str, dict[str, StoredTensor]]:
        """The parts of each changed module."""
        modules: dict[str, dict[str, StoredTensor]] = {}
        for name, entry in self.file.tensors.items():
            tensor, (module, _, part) = StoredTensor(name, entry, self.file), name.rpartition(".")
            if part not in PARTS or not module or len(name) > LONGEST_MODULE:
                problem = "is not a supported part of an adapter of mlx-lm"
                raise tensor.refuse(f"{problem}; supported are {', '.join(PARTS)}")
            modules.setdefault(module, {})[part] = tensor
        if not modules:
            raise CheckpointError("holds no lora_a and lora_b", file=self.file.path)
        return modules

    @cached_property
    def changes(self) -> dict[str, LowRank]:
        """The change to each module's weight, by the module's name."""
        return {module: self._change(parts) for module, parts in self.modules.items()}

    @cached_property
    def magnitudes(self) -> dict[str, Magnitude]:
        """The lengths that DoRA gives the outputs of a module."""
        with_lengths = {m: parts for m, parts in self.modules.items() if "m" in parts}
        return {module: Magnitude(parts["m"]) for module, parts in with_lengths.items()}

    replaced: dict[str, StoredTensor] = field(default_factory=dict)  # no tensor of the base
    others: tuple[str, ...] = ()  # it changes one model

    def renamed(self, base: Iterable[str]) -> Callable[[str], str]:
        """Map the adapter's names to the base's."""
        return naming(self.changes, base, self.file.path)

    def _change(self, parts: dict[str, StoredTensor]) -> LowRank:
        first = next(iter(parts.values()))
        if not {"lora_a", "lora_b"} <= {*parts}:
            needed = "an adapter has lora_a and lora_b of each module"
            raise first.refuse(f"has no counterpart; {needed}")
        has_lengths = "m" in parts
        if has_lengths != (self.config.get(KIND) == "dora"):
            have = "have" if has_lengths else "lack"
            raise first.refuse(f"and its module {have} an m of DoRA, against {KIND}")
        a, b = parts["lora_a"], parts["lora_b"]
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
            raise a.refuse(
                f"has shape {a.shape}, its lora_b {b.shape}: "
                "a LoRA of experts, or of no Linear, is not read"
            )
        scale = self.config.inside("lora_parameters").number("scale", smallest=1e-9, largest=1e6)
        return LowRank(Turned(a), Turned(b), scale)
