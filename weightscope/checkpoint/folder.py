"""A checkpoint's files in a folder on this machine."""

import os
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, TypeVar

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.jsontext import read_json
from weightscope.checkpoint.others import BY_SUFFIX, other_folder, refuse_pipeline
from weightscope.checkpoint.storage import Storage
from weightscope.errors import CheckpointError

Opened = TypeVar("Opened", bound=Storage)

INDEX = "model.safetensors.index.json"
LONE = "model.safetensors"
MAX_TENSORS = 250_000  # of all shards: empty ones take no room in a file; the largest published have 150,000
MAX_SHARDS = 1000  # the largest published have 200; each is held open


def opened(files: Iterable[Opened], where: object) -> list[Opened]:
    """The files of a checkpoint, refused as soon as those opened so far have too many tensors.

    Raises
    ------
    CheckpointError
        They have.
    """
    found: list[Opened] = []
    tensors = 0
    for file in files:
        found.append(file)
        tensors += len(file.tensors)
        if tensors > MAX_TENSORS:
            raise CheckpointError(f"has over {tensors - 1} tensors; at most {MAX_TENSORS} are read", file=where)
    return found


def shards_of(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The .safetensors files of a folder, and its index's map from tensors to files (empty without an index).

    Raises
    ------
    CheckpointError
        There are none, several without an index, or the index is not right.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=folder) from None
    if INDEX in names:
        weight_map = parse_index(read_json(folder / INDEX), file=folder / INDEX)
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        missing = next((shard.name for shard in shards if shard.name not in names), None)
        if missing is not None:
            raise CheckpointError(f"names {missing}, which is not in the folder", file=folder / INDEX)
        return shards, weight_map
    if LONE not in names:
        refuse_pipeline(folder)
    return [folder / lone_shard(names, where=folder)], {}


def lone_gguf(folder: Path) -> Path | None:
    """The one .gguf file of a folder that has no .safetensors file; None where there are others or none."""
    try:
        found = [path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors")]
    except OSError:  # whoever lists the shards says why
        return None
    return found[0] if len(found) == 1 and found[0].suffix == ".gguf" else None


def parse_index(index: dict[str, Any], *, file: object) -> dict[str, str]:
    """Which file holds which tensor; every file named lies in the index's own folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("weight_map is not a map from tensor names to file names", file=file)
    if not weight_map:
        raise CheckpointError("weight_map is empty", file=file)
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(f"names {len(shards)} files; at most {MAX_SHARDS} are opened", file=file)
    for name in shards:
        if "/" in name or "\\" in name or name in {"", ".", ".."}:
            raise CheckpointError(f"points outside its folder: '{name[:200]}'", file=file)
        if not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(f"names '{name[:200]}', which is no .safetensors file", file=file)
    return weight_map


def lone_shard(names: list[str], *, where: object) -> str:
    """The one .safetensors file among a folder's or repository's files, none of which is an index.

    Raises
    ------
    CheckpointError
        There is none, and the message says what there is; or there are several.
    """
    if LONE in names:
        return LONE
    if other := other_folder(names):
        raise CheckpointError(other, file=where)
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(found[:4])
        raise CheckpointError(
            f"several .safetensors files ({listed} ...) and no {INDEX} to say which belong together", file=where
        )
    others = [name for name in names if name.endswith((".gguf", *BY_SUFFIX))]
    problem = "no .safetensors file here"
    if others:
        problem += f"; there is {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}"
        if any(name.endswith(".gguf") for name in others):
            problem += ": a .gguf file is read when it is named itself, on this machine"
        else:
            problem += f": {BY_SUFFIX[PurePath(others[0]).suffix]}"
    else:
        problem += f"; there is {', '.join(names[:4]) or 'nothing'}{' ...' if len(names) > 4 else ''}"
    raise CheckpointError(problem, file=where)


def config_of(folder: Path) -> Config:
    """config.json, or nothing where there is none."""
    path = folder / "config.json"
    return Config(read_json(path) if os.path.lexists(path) else {}, path)
