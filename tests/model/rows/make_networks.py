"""Write the roles of what surrounds attention, as transformers' own models show them at work: networks.json.

    python -m tests.model.rows.make_networks [FOLDER]

A tiny random model of every model_type runs, and `roles_at_work` finds what each module does. A role is written where
every type that a row reads agrees. FOLDER keeps the tiny models for the next time.
"""

import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import weightscope as ws
from tests.census.record import read
from tests.model.rows.roles_at_work import SAMPLE, logs, roles
from weightscope.adopting import trial
from weightscope.adopting.comparison import _print_of
from weightscope.adopting.newcomers import OutOfTime, limited_time
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.core.files import scratch_folder
from weightscope.model.config.reading import stacks_of
from weightscope.model.rows.family import Family
from weightscope.model.rows.names import ABOVE, OF_MODEL, Tensors, modules_of
from weightscope.model.rows.table import FAMILIES, NETWORKS, title

OF_ATTENTION = {"q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "output_gate"}
FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Tiny:
    """A tiny model of transformers', and the checkpoint that it saved."""

    model: Any
    size: Any
    folder: Path

    def opened(self) -> Tensors | None:
        """Every tensor of the checkpoint; None where no stack of it is read."""
        for tower in (None, *self._towers()):
            with suppress(CheckpointError):
                return ws.open_model(self.folder, tower=tower).tensors
        return None

    def _towers(self) -> Iterable[str]:
        return [name for name, stack in stacks_of(open_checkpoint(self.folder)).items() if stack.reading is not None]


def tiny(kind: str, folder: Path, keep: bool = False) -> Tiny:
    """A tiny model of a type: the one that is kept in a folder, or else a new one, saved there."""
    kept = folder / "model.pt"
    if kept.exists():
        model, size, *_ = torch.load(kept, weights_only=False)
        return Tiny(model, size, folder)
    sizes: dict[int, Any] = {}
    observe = trial.observe

    def sized(model: Any, size: Any, *given: Any) -> Any:
        sizes[id(model)] = size
        return observe(model, size, *given)

    with patch.object(trial, "observe", sized):
        model, _ = trial.at_work(CONFIG_MAPPING[kind](), *trial.TRIALS[0])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if keep:
        try:
            torch.save((model, sizes[id(model)]), kept)
        except RuntimeError:  # a parametrised module, which torch does not save
            kept.unlink(missing_ok=True)
    return Tiny(model, sizes[id(model)], folder)


def shown(one: Tiny) -> Iterator[tuple[str, str, str]]:
    """Row, module or tensor within its layer or model, and role, of all that a tiny model shows; an empty role of what
    ran and does nothing that has one.
    """
    tensors = one.opened()
    if tensors is None:
        return
    parameter_of = _parameters(one, tensors)
    attention = {
        parameter_of[tensor.name].rpartition(".")[0]: tensor.role
        for tensor in tensors
        if tensor.name in parameter_of and {*tensor.role.split("+")} & OF_ATTENTION
    }
    roles_of: dict[str, set[str]] = defaultdict(set)
    for events in logs(one.model, one.size, 1, 0)[0]:
        for module, role in roles(events, attention).items():
            roles_of[module].add(role)
    files = _of_files(one, tensors, parameter_of, roles_of)
    stems = sorted(
        ((reader.family.memory is not None, reader, reader.prefix + reader.family.stored_name(reader.config, index))
         for reader in tensors.readers for index in range(reader.config.n_layers)),
        key=lambda place: place[0],
    )  # fmt: skip
    for name, (inner_name, role) in files.items():
        for row, inner in _places(name, inner_name, role, tensors.readers, stems):
            of_model = role.partition(" ")[0] in OF_MODEL
            stated = {known.role for known in [_stated_by(row, of_model).get(inner)] if known}
            if stated and not next(iter(stated)).startswith("attention."):
                if role and {role.partition(" as ")[0]} != stated:
                    print(f"{title(row)}: {inner} is {role}, and the row says {stated}")
            else:
                yield title(row), inner, role
            break


def _parameters(one: Tiny, tensors: Tensors) -> dict[str, str]:
    """The parameter that each tensor of the file is: of its name and values, or else of its values."""
    held = dict(one.model.named_parameters(remove_duplicate=False))
    arrays = {name: tensor for name, tensor in tensors.checkpoint.items() if tensor.shape and tensor.dtype in FLOATING}
    same = {
        name: name
        for name, tensor in arrays.items()
        if name in held and held[name].shape == tensor.shape
        and np.array_equal(tensor.read().reshape(-1)[:SAMPLE], held[name].detach().float().numpy().reshape(-1)[:SAMPLE])
    }  # fmt: skip
    prints: dict[object, str] = {}
    for name, parameter in held.items():
        if name not in same:
            prints.setdefault(_print_of(parameter.detach().float().numpy()), name)
    renamed = {
        name: prints.get(_print_of(np.asarray(arrays[name].read(), np.float32)), "") for name in arrays.keys() - same
    }
    return same | {name: parameter for name, parameter in renamed.items() if parameter}


def _of_files(
    one: Tiny, tensors: Tensors, parameter_of: Mapping[str, str], found: Mapping[str, set[str]]
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Of tensors' names in the file, the module or tensor and its role; slices of what is stacked in memory, too."""
    files: dict[str, tuple[str, str]] = {}
    buffers = {name for name, _ in one.model.named_buffers()}
    for name in tensors.checkpoint:
        parameter = parameter_of.get(name, name if name in buffers else "")
        of_tensor = parameter, name.removesuffix(".weight")
        for key, inner in ((parameter.rpartition(".")[0], name.rpartition(".")[0]), of_tensor):
            if key in found:
                files[name] = inner, next(iter(found[key])) if len(found[key]) == 1 else ""
    prints = {}
    held = dict(one.model.named_parameters())
    for path, all_roles in found.items():
        role = next(iter(all_roles))
        if path not in held or not role.startswith("expert.") or stored_names(path, parameter_of):
            continue
        if not prints:
            matrices = {name: tensor for name, tensor in tensors.checkpoint.items() if len(tensor.shape) == 2}
            prints = {_print_of(np.asarray(tensor.read(), np.float32)): name for name, tensor in matrices.items()
                      if tensor.dtype in FLOATING}  # fmt: skip
        role, _, how = role.removeprefix("expert.").partition(" as ")
        for stacked in held[path].detach().float():
            w = stacked.T if "(in, out)" in how else stacked
            parts = role.split("+")
            slices = [w] if len(parts) == 1 else [w[::2], w[1::2]] if "alternating" in how else w.chunk(2)
            for part, values in zip(parts, slices, strict=True):
                name = prints.get(_print_of(values.contiguous().numpy()), "")
                if name:
                    inner = re.sub(r"^(.*)\.\d+\.", r"\1.{e}.", name.removesuffix(".weight"))
                    files[name] = inner, f"expert.{part}"
    return files


def stored_names(path: str, parameter_of: Mapping[str, str]) -> bool:
    """Whether a parameter is in the file as it is in memory."""
    return path in parameter_of.values()


def _places(
    name: str, inner: str, role: str, readers: Iterable[Any], stems: Iterable[tuple[bool, Any, str]]
) -> Iterator[tuple[Family, str]]:  # fmt: skip
    """The row that names a tensor, and the name it has there."""
    for outer in ("", ABOVE):
        for _, reader, stem in stems:
            start = f"{stem.rstrip('.').rpartition('.')[0]}." if outer else stem
            if start != "." and name.startswith(start) and role.partition(" ")[0] not in OF_MODEL:
                yield reader.family, outer + inner.removeprefix(start)
    if role.partition(" ")[0] in OF_MODEL:
        above = {reader: (reader.prefix + reader.family.layer).partition("{i}")[0] for reader in readers}
        near = {
            reader: next((i for i, (a, b) in enumerate(zip(start, name, strict=False)) if a != b), len(start))
            for reader, start in above.items()
            if name.startswith(reader.prefix)
        }
        for reader in sorted(near, key=lambda reader: -near[reader]):
            yield reader.family, inner.removeprefix(reader.prefix)


def _stated_by(row: Family, of_model: bool) -> dict[str, Any]:
    """What a row says itself of its modules: a row that is not of the table has no more."""
    modules, patterns = modules_of(replace(row, origin="alone"), of_model=of_model)
    experts = {
        pattern.pattern.partition("(?:")[0].replace(r"(\d{1,6})", "{e}").replace("\\", ""): m for pattern, m in patterns
    }
    return modules | experts


def together(seen: Iterable[tuple[str, str, str]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Of every row the modules by role, those about which all that was seen agrees."""
    by_row: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row, module, role in seen:
        by_row[row][module].add(role)
    agreed: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row, modules in by_row.items():
        for module, all_roles in sorted(modules.items()):
            if len(all_roles) == 1 and (role := next(iter(all_roles))):
                role, _, how = role.partition(" as ")
                agreed[row][role].append(module + (f" as {how}" if how else ""))
            elif all_roles != {""}:
                print(f"{row}: {module} is {' and '.join(sorted(all_roles))}")
    return {row: {role: tuple(names) for role, names in table.items()} for row, table in agreed.items()}


def text(rows: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The file: one line per row."""
    lines = (f"{json.dumps(row)}: {json.dumps(dict(sorted(roles.items())))}" for row, roles in sorted(rows.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    seen: list[tuple[str, str, str]] = []
    for kind in sorted({row.type for row in read() if row.verdict == "exact"}):
        with scratch_folder() as scratch:
            try:
                with limited_time():
                    seen += shown(tiny(kind, kept / kind if kept else scratch, keep=kept is not None))
            except (Exception, OutOfTime) as error:  # whatever transformers raises
                print(f"{kind}: {type(error).__name__}: {str(error)[:100]}")
    (FAMILIES.folder / NETWORKS).write_text(text(together(seen)), encoding="utf-8")


if __name__ == "__main__":
    main()
