"""Open whatever a source names: a folder, a file, or a repository on the Hub."""

from pathlib import Path

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.folder import HOW_TO_CONVERT, INDEX, PICKLED, check_index, config_of, shards_of
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.local import LocalFile
from weightscope.checkpoint.source import cached_snapshot, locate, remote_shards
from weightscope.errors import CheckpointError


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: headers and config are read and checked, no tensor data.

    Parameters
    ----------
    source : str or Path
        A folder with model.safetensors or shards and their index, a .safetensors file, or a Hub id with optional
        `@revision`. What the Hub's local cache has complete is taken from there; of anything else on the Hub the
        headers are fetched now and tensors when they are read.
    revision : str, optional
        Branch, tag or commit on the Hub.

    Raises
    ------
    CheckpointError
        Anything that is not there or not right.
    """
    where = locate(source, revision)
    if isinstance(where, Repository):
        snapshot = cached_snapshot(where)
        return _open_folder(snapshot, str(where)) if snapshot else _open_repository(where)
    return _open_folder(where) if where.is_dir() else _open_file(where)


def _open_repository(repository: Repository) -> Checkpoint:
    files, weight_map, folder = remote_shards(repository)
    check_index(weight_map, {name: file.path.name for file in files for name in file.tensors}, file=INDEX)
    return Checkpoint(folder, files, config_of(folder), str(repository))


def _open_folder(folder: Path, name: str = "") -> Checkpoint:
    shards, weight_map = shards_of(folder)
    files = [LocalFile(shard) for shard in shards]
    check_index(weight_map, {name: file.path.name for file in files for name in file.tensors}, file=folder / INDEX)
    return Checkpoint(folder, files, config_of(folder), name or (shards[0] if len(shards) == 1 else folder).name)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLED:
        raise CheckpointError(HOW_TO_CONVERT, file=path)
    if path.suffix != ".safetensors":
        raise CheckpointError("is not a .safetensors file", file=path)
    return Checkpoint(path.parent, [LocalFile(path)], config_of(path.parent), path.name)
