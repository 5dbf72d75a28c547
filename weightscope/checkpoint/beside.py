"""Which weights of a folder transformers loads, and which lie beside them unread.

transformers 5.23 takes the first of: what config.json names as transformers_weights, model.safetensors, its index,
pytorch_model.bin, its index (modeling_utils.py, _get_resolved_checkpoint_files). No other name is looked for. With
PEFT installed it adds an adapter that lies beside them (integrations/peft.py, maybe_load_adapters).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from weightscope.checkpoint.local import ADAPTER, ADAPTER_WEIGHTS, INDEX, LONE
from weightscope.errors import CheckpointError, printable

EXPLICIT = "transformers_weights"  # the key of config.json
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SAFETENSORS = ".safetensors"
OF_INDEX = ".safetensors.index.json"
# An optimizer's state or training's arguments are no weights of a model.
WEIGHTS = re.compile(r".*\.(safetensors|gguf)|.*(model|consolidated)[^/]*\.(bin|pth?|ckpt|h5|msgpack|onnx)", re.ASCII)
MOST_ENTRIES = 1000  # of a folder that are looked into, and of each of them
NAMED = 4  # files in a sentence


@dataclass(frozen=True)
class Beside:
    """The weight files next to those that were read.

    Attributes
    ----------
    read : str
        What was read: a file, or an index.
    files : tuple of str
        Weight files that were not.
    loaded : str
        What transformers loads; empty where it would find nothing.
    added : str
        The adapter that it adds where PEFT is installed; empty without one.
    """

    read: str = ""
    files: tuple[str, ...] = ()
    loaded: str = ""
    added: str = ""

    @property
    def is_other(self) -> bool:
        """Whether transformers loads other weights than were read."""
        return bool(self.added) or self.loaded not in ("", self.read)

    @property
    def sentence(self) -> str:
        """What was read and what was not; empty where nothing lies beside it."""
        if not self.files:
            return ""
        names = ", ".join(map(printable, self.files[:NAMED]))
        more = f" and {len(self.files) - NAMED} more" if len(self.files) > NAMED else ""
        other = ", as transformers does"
        if self.added:
            other = f"; with PEFT installed, transformers adds {self.added} to it"
        elif self.loaded != self.read:
            other = f"; transformers {f'loads {printable(self.loaded)}' if self.loaded else 'would find no weights'}"
        return f"Weights were read from {printable(self.read)}{other}. Not read, in the same place: {names}{more}."

    @property
    def telling(self) -> tuple[str, ...]:
        """The files that could be taken for this model's weights: safetensors, and what transformers loads."""
        return tuple(name for name in self.files if name.endswith(SAFETENSORS) or name == self.loaded)


def weights_named(config: Mapping[str, Any], names: Collection[str], file: object) -> str:
    """The file or index that transformers loads of files with these names; empty where it would find none.

    Raises
    ------
    CheckpointError
        config.json names a file that is not there, or that cannot be read.
    """
    explicit = config.get(EXPLICIT)
    if explicit is not None:
        known = isinstance(explicit, str) and explicit.endswith((SAFETENSORS, OF_INDEX)) and explicit.isprintable()
        if not known or "/" in explicit or "\\" in explicit:
            problem = f"'{EXPLICIT}' is {printable(str(explicit)[:80])}; a .safetensors file of the folder was expected"
            raise CheckpointError(problem, file=file)
        if explicit not in names:
            raise CheckpointError(f"'{EXPLICIT}' names {explicit}, which is not there", file=file)
        return str(explicit)
    return next((name for name in (LONE, INDEX, *PICKLED) if name in names), "")


def beside(read: str, shards: Iterable[str], loaded: str, names: Collection[str]) -> Beside:
    """What lies beside the files that were read, of all `names` there; `loaded` is what transformers loads."""
    own = {read, *shards}
    files = {name for name in names if WEIGHTS.fullmatch(name)} | {loaded}
    has_adapter = {ADAPTER, ADAPTER_WEIGHTS, "config.json"} <= {*names}
    return Beside(read, tuple(sorted(files - own - {""}, key=_order)), loaded, ADAPTER_WEIGHTS if has_adapter else "")


def _order(name: str) -> tuple[int, int, str]:
    """Safetensors first, those of subfolders last."""
    return name.count("/"), not name.endswith(SAFETENSORS), name


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files, and of the safetensors files in its folders, as far as a person would look."""
    entries = sorted(folder.iterdir())
    names = [path.name for path in entries]
    for path in entries[:MOST_ENTRIES]:
        if path.is_dir() and not path.is_symlink():
            try:
                inner = sorted(islice(path.iterdir(), MOST_ENTRIES))
            except OSError:  # somebody else's
                continue
            names += [f"{path.name}/{file.name}" for file in inner if file.name.endswith(SAFETENSORS)]
    return names


def nearby(names: Iterable[str]) -> list[str]:
    """Of all files of a repository the names that `names_in` gives of a folder."""
    return [name for name in names if "/" not in name or (name.count("/") == 1 and name.endswith(SAFETENSORS))]
