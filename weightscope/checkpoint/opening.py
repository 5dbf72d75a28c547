"""Open whatever a source names: a folder, a file, or an id on the Hub."""

from pathlib import Path

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.folder import HOW_TO_CONVERT, INDEX, PICKLED, check_index, config_of, shards_of
from weightscope.checkpoint.local import LocalFile
from weightscope.checkpoint.source import resolve_folder
from weightscope.errors import CheckpointError


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: headers and config are read and checked, no tensor data.

    Parameters
    ----------
    source : str or Path
        A folder with model.safetensors or shards and their index, a .safetensors file, or a Hub id with optional
        `@revision`.
    revision : str, optional
        Branch, tag or commit on the Hub.

    Raises
    ------
    CheckpointError
        Anything that is not there or not right.
    """
    path = resolve_folder(source, revision)
    if path.is_dir():
        return _open_folder(path)
    return _open_file(path)


def _open_folder(folder: Path) -> Checkpoint:
    shards, weight_map = shards_of(folder)
    files = [LocalFile(shard) for shard in shards]
    check_index(weight_map, {name: file.path.name for file in files for name in file.tensors}, file=folder / INDEX)
    return Checkpoint(folder, files, config_of(folder), shards[0].name if len(shards) == 1 else folder.name)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLED:
        raise CheckpointError(HOW_TO_CONVERT, file=path)
    if path.suffix != ".safetensors":
        raise CheckpointError("is not a .safetensors file", file=path)
    return Checkpoint(path.parent, [LocalFile(path)], config_of(path.parent), path.name)
