"""Adapters of kohya, LyCORIS and diffusers: one .safetensors file without settings.

| tool | module | parts |
| --- | --- | --- |
| kohya | `lora_te_`, `lora_te1_`, `lora_te2_`, `lora_unet_` | lora_down, lora_up, alpha |
| LyCORIS | the same, or `lycoris_` | lora_down, lora_up, lokr_w1 ..., dora_scale, alpha |
| diffusers | `text_encoder[_2].`, `unet.`, `transformer.` | lora_A, lora_B, lora_magnitude_vector |

kohya and LyCORIS write dots as underscores. The scale is alpha / r, and 1 without an alpha. One
file may change several models: the base's changes are read, the others' are named. Every part of
other adapters (LoHa, OFT, convolutions ...) is refused by its name.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weightscope.checkpoint.adapters.lora import (
    LONGEST_MODULE,
    LowRank,
    Magnitude,
    WeightChange,
    factor_pair,
    kronecker,
)
from weightscope.checkpoint.checkpoint import StoredTensor
from weightscope.checkpoint.formats import SAFETENSORS
from weightscope.checkpoint.opening import adapter_in, existing
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError, naming

OF_DIFFUSERS = "pytorch_lora_weights.safetensors"
WHOLE = {"I64": "<i8", "I32": "<i4"}  # alphas that are no floats, which diffusers writes
SETTINGS = "lora_adapter_metadata"  # the key of PEFT's settings in diffusers' header
FLAT = re.compile(
    r"(?P<model>lora_te[12]?|lora_unet|lora_transformer|lycoris)_(?P<module>[^.]+)\.(?P<part>.+)"
)
DOTTED = re.compile(
    r"(?P<model>text_encoder(?:_[23])?|unet|transformer)\."
    r"(?P<module>.+?)\.(?P<part>lora_.+|lora\..+|lokr_.+|alpha)"
)
LOKR = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
PARTS = {  # names of the parts in all tools
    "lora_down.weight": "A", "lora_up.weight": "B", "lora_A.weight": "A", "lora_B.weight": "B",
    "alpha": "alpha", "lora.down.weight": "A", "lora.up.weight": "B",
    "lora_linear_layer.down.weight": "A", "lora_linear_layer.up.weight": "B",
    "lora_magnitude_vector": "lengths", "lora_magnitude_vector.weight": "lengths",
    "dora_scale": "lengths", **{f"lokr_{part}": part for part in LOKR},
}  # fmt: skip
KNOWN = (
    "lora_down, lora_up, lora_A, lora_B, lokr_w1, lokr_w2, dora_scale, lora_magnitude_vector "
    "and alpha"
)


def adapter_file(source: str | Path) -> Path | None:
    """The file of a kohya, LyCORIS or diffusers adapter that a local source names; else None."""
    path = existing(source)
    if path is not None and path.is_dir():
        path = path / OF_DIFFUSERS
    if path is None or path.suffix != SAFETENSORS or not path.is_file():
        return None
    return path if any(_named(name) for name in LocalFile(path).tensors) else None


def is_adapter(source: str | Path) -> bool:
    """True if a local source, one of a command's, is an adapter, of whatever tool."""
    with naming(source):
        return adapter_in(source) is not None or adapter_file(source) is not None


def _named(name: str) -> re.Match[str] | None:
    """Model, module and part that a tensor's name in such an adapter gives."""
    return (FLAT.fullmatch(name) or DOTTED.fullmatch(name)) if len(name) <= LONGEST_MODULE else None


@dataclass(frozen=True)
class AdapterOfFile:
    """The header of such a file; no tensor is read but the scales."""

    path: Path
    base: tuple[str, ...]  # names of the base's tensors

    @property
    def folder(self) -> Path:
        """Place of the adapter, which is called by its file's name."""
        return self.path if self.path.name != OF_DIFFUSERS else self.path.parent

    @cached_property
    def file(self) -> LocalFile:
        return LocalFile(self.path)

    @cached_property
    def replaced(self) -> dict[str, StoredTensor]:
        """Nothing: such adapters replace no tensor."""
        return {}

    @cached_property
    def models(self) -> dict[str, dict[str, dict[str, StoredTensor]]]:
        """The parts of each module of each model that the file changes."""
        models: dict[str, dict[str, dict[str, StoredTensor]]] = {}
        for name, entry in self.file.tensors.items():
            tensor, match = StoredTensor(name, entry, self.file), _named(name)
            part = match and PARTS.get(match["part"])
            if match is None or part is None:
                raise tensor.refuse(f"is not a supported part of an adapter; supported are {KNOWN}")
            models.setdefault(match["model"], {}).setdefault(match["module"], {})[part] = tensor
        return models

    @cached_property
    def model(self) -> str:
        """The model among them that the base is."""
        fitting = [
            name for name, modules in self.models.items() if all(map(self.names.get, modules))
        ]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            problem = f"changes {' and '.join(fitting)}, and the base could be either"
            raise CheckpointError(problem, file=self.path)
        modules = next(iter(self.models.values()), {})
        missing = next((module for module in modules if module not in self.names), "nothing")
        problem = f"changes {', '.join(self.models)}, and '{missing}' is not in the base"
        raise CheckpointError(f"{problem}; is it the model it was made for?", file=self.path)

    @cached_property
    def names(self) -> dict[str, str]:
        """The base's modules by their names in such a file; ambiguous ones are left out."""
        modules: dict[str, str] = {}
        ambiguous: set[str] = set()
        for name in self.base:
            module = name.removesuffix(".weight")
            if module == name:
                continue
            # Names without some of the base's prefixes, and with those that a base may lack.
            shorter = (module.split(".", cut)[-1] for cut in range(module.count(".") + 1))
            longer = (prefix + module for prefix in ("text_model.", "model.", "transformer."))
            for form in (*shorter, *longer):
                for called in (form, form.replace(".", "_")):
                    if modules.setdefault(called, module) != module:
                        ambiguous.add(called)
        return {called: module for called, module in modules.items() if called not in ambiguous}

    @property
    def others(self) -> list[str]:
        """The models that the file changes too, which the base is not."""
        return [name for name in self.models if name != self.model]

    @cached_property
    def changes(self) -> dict[str, WeightChange]:
        """The change to each module's weight, by the module's name."""
        return {module: self._change(parts) for module, parts in self.models[self.model].items()}

    @cached_property
    def magnitudes(self) -> dict[str, Magnitude]:
        """The lengths that DoRA gives the outputs of a module, or LyCORIS its inputs."""
        magnitudes = {}
        for module, parts in self.models[self.model].items():
            if lengths := parts.get("lengths"):
                magnitudes[module] = Magnitude(lengths, of_inputs=lengths.shape[:1] == (1,))
        return magnitudes

    def renamed(self, base: Iterable[str]) -> Callable[[str], str]:
        """Map the file's names to the base's."""
        return lambda name: f"{self.names[name.removesuffix('.weight')]}.weight"

    def _change(self, parts: Mapping[str, StoredTensor]) -> WeightChange:
        factors = {part: parts[part] for part in parts if part not in ("alpha", "lengths")}
        if not factors:
            lone = next(iter(parts.values()))
            raise lone.refuse("belongs to no lora_down and lora_up, and to no lokr_w1")
        if "A" in factors or "B" in factors:
            a, b = factor_pair(factors)
            if a.shape[0] != b.shape[1]:
                raise a.refuse(f"has shape {a.shape}, its counterpart {b.shape}")
            return LowRank(a, b, self._alpha(parts, a.shape[0]) / a.shape[0])
        rank = next((factors[part].shape[-1] for part in ("w1_a", "w2_a") if part in factors), None)
        # LyCORIS does not scale two whole factors.
        return kronecker(factors, 1.0 if not rank else self._alpha(parts, rank) / rank)

    def _alpha(self, parts: Mapping[str, StoredTensor], rank: int) -> float:
        """The alpha of a module; its rank where none is said."""
        if "alpha" in parts:
            tensor = parts["alpha"]
            if tensor.dtype in WHOLE:
                value = tensor.raw().view(WHOLE[tensor.dtype])
            else:
                value = tensor.read().reshape(-1)
            if len(value) != 1 or not 1e-9 <= float(value[0]) <= 1e6:
                raise parts["alpha"].refuse("is no alpha: a single positive number was expected")
            return float(value[0])
        settings = self._settings
        given = settings.get(f"{self.model}.lora_alpha", rank)
        unread = ("alpha_pattern", "rank_pattern", "use_rslora")
        if any(settings.get(f"{self.model}.{key}") for key in unread):
            problem = f"has settings in {SETTINGS} that are not read: patterns or use_rslora"
            raise CheckpointError(problem, file=self.path)
        if not isinstance(given, int | float) or not 1e-9 <= given <= 1e6:
            raise CheckpointError(f"{SETTINGS} says lora_alpha {str(given)[:40]}", file=self.path)
        return float(given)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """PEFT's settings in diffusers' header, by the model's name and theirs."""
        text = self.file.metadata.get(SETTINGS, "{}")
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise CheckpointError(f"{SETTINGS} in its header is no JSON object", file=self.path)
        return settings
