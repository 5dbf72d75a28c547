"""Write the roles of what surrounds attention, as transformers' own models show them at work: networks.toml.

    python -m tests.architectures.make_networks [FOLDER]

A tiny random model of every model_type runs, and `roles_at_work` finds what each module does. A role is written where
every type that a row reads agrees. FOLDER keeps the tiny models for the next time.
"""

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import weightscope as ws
from tests.architectures.roles_at_work import logs, roles
from tests.census.record import read
from weightscope.adopting import trial
from weightscope.adopting.comparison import Stored
from weightscope.adopting.newcomers import OutOfTime, limited_time
from weightscope.architectures import FAMILIES, Family, stacks_of
from weightscope.architectures.names import ABOVE, Tensors, modules_of
from weightscope.architectures.table import NETWORKS, title
from weightscope.checkpoint import open_checkpoint
from weightscope.errors import CheckpointError
from weightscope.files import scratch_folder

WIDTH = 118
KINDS = ("norm", "expert", "shared_expert", "router")  # of roles that are written together; the others are networks

HEAD = """\
# What surrounds attention, by role, for the rows that do not say it themselves: feed-forward networks, norms, experts.
# Nothing is computed from it but names (names.py). Written by `python -m tests.architectures.make_networks`, which sees
# what each module does in transformers' own model at work; a role is here where all types that the row reads agree.
"""


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


def tiny(kind: str, folder: Path) -> Tiny:
    """A tiny model of a type, made there unless it is."""
    kept = folder / "model.pt"
    if not kept.exists():
        sizes: dict[int, Any] = {}
        observe = trial.observe

        def sized(model: Any, size: Any, *given: Any) -> Any:
            sizes[id(model)] = size
            return observe(model, size, *given)

        with limited_time(), torch.no_grad():
            trial.observe = sized
            try:
                model, _ = trial.at_work(CONFIG_MAPPING[kind](), *trial.TRIALS[0])
            finally:
                trial.observe = observe
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        try:
            torch.save((model, sizes[id(model)]), kept)
        except RuntimeError:  # a parametrised module, which torch does not save
            kept.unlink(missing_ok=True)
        return Tiny(model, sizes[id(model)], folder)
    model, size, *_ = torch.load(kept, weights_only=False)
    return Tiny(model, size, folder)


def shown(one: Tiny) -> Iterator[tuple[str, str, str]]:
    """Row, module within its layer and role, of every module whose role a tiny model shows."""
    tensors = one.opened()
    if tensors is None:
        return
    stored = Stored(one.model, one.folder)
    module_of = {name: parameter for parameter, names in stored.names.items() for name in names}
    held: dict[str, set[str]] = {"o": set(), "q": set()}
    for tensor in tensors:
        for letter, roles_of in (("o", {"o"}), ("q", {"q", "q_a", "kv_a"})):
            if {*tensor.role.split("+")} & roles_of and tensor.name in module_of:
                held[letter].add(module_of[tensor.name].rpartition(".")[0])
    found: dict[str, set[str]] = defaultdict(set)
    for events in logs(one.model, one.size, 1, 0)[0]:
        for module, role in roles(events, [*held["o"]], [*held["q"]]).items():
            found[module].add(role)
    stems = sorted(
        ((reader.family.memory is not None, reader, reader.prefix + reader.family.stored_name(reader.config, index))
         for reader in tensors.readers for index in range(reader.config.n_layers)),
        key=lambda place: place[0],
    )  # fmt: skip
    for name in tensors.checkpoint:
        module, role = name.rpartition(".")[0], found.get(module_of.get(name, "").rpartition(".")[0], set())
        for outer in ("", ABOVE):
            for _, reader, stem in stems:
                above = f"{stem.rstrip('.').rpartition('.')[0]}."
                if role and name.startswith(above if outer else stem):
                    inner = outer + module.removeprefix(above if outer else stem)
                    stated = {known.role for known in [_stated_by(reader.family).get(inner)] if known}
                    if stated and {each.partition(" as ")[0] for each in role} != stated:
                        print(f"{title(reader.family)}: {inner} is {' and '.join(role)}, and the row says {stated}")
                    elif not stated:
                        yield title(reader.family), inner, role.pop() if len(role) == 1 else ""
                    role = set()


def _stated_by(row: Family) -> dict[str, Any]:
    """What a row says itself of its modules: a row that is not of the table has no more."""
    return modules_of(replace(row, origin="alone"))[0]


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
            else:
                print(f"{row}: {module} is {' and '.join(sorted(all_roles))}")
    return {row: {role: tuple(names) for role, names in table.items()} for row, table in agreed.items()}


def text(rows: Mapping[str, Mapping[str, tuple[str, ...]]]) -> str:
    """The file."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for row, table in rows.items():
        parts: dict[str, list[str]] = defaultdict(list)
        for role, names in sorted(table.items(), key=lambda item: ("gate" not in item[0], item[0] == "down", item[0])):
            kind = role.partition(".")[0]
            listed = f'"{names[0]}"' if len(names) == 1 else "[" + ", ".join(f'"{name}"' for name in names) + "]"
            key = role if re.fullmatch(r"[A-Za-z0-9_-]+", role) else f'"{role}"'
            parts[kind if kind == "norm" else "experts" if kind in KINDS else ""].append(f"{key} = {listed}")
        for lines in parts.values():
            groups[tuple(lines)].append(row)
    blocks = [HEAD]
    for lines, named in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        blocks.append("\n".join(["[[network]]", *lines, *_listed(sorted(named))]) + "\n")
    return "\n".join(blocks)


def _listed(rows: Iterable[str]) -> Iterator[str]:
    """The rows of a stanza, on lines of the file's width."""
    names = [f'"{row}"' for row in rows]
    if len(line := f"rows = [{', '.join(names)}]") <= WIDTH:
        yield line
        return
    yield "rows = ["
    line = "   "
    for name in names:
        if len(line) + len(name) + 2 > WIDTH:
            yield line
            line = "   "
        line += f" {name},"
    yield line
    yield "]"


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
                    seen += shown(tiny(kind, kept / kind if kept else scratch))
            except (Exception, OutOfTime) as error:  # whatever transformers raises
                print(f"{kind}: {type(error).__name__}: {str(error)[:100]}")
    (FAMILIES.folder / NETWORKS).write_text(text(together(seen)), encoding="utf-8")


if __name__ == "__main__":
    main()
