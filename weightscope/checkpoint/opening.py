"""Open whatever a source names: a folder, a file, or a repository on the Hub."""

from collections.abc import Sequence
from pathlib import Path

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.folder import INDEX, config_of, lone_gguf, opened, shards_of
from weightscope.checkpoint.gguf_file import GgufFile, GgufTensor
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.local import LocalFile, OpenFile
from weightscope.checkpoint.others import ADAPTER_WEIGHTS, NEEDS_ITS_BASE, START, refuse_other
from weightscope.checkpoint.quantised import dequantised
from weightscope.checkpoint.source import cached_snapshot, locate, remote_shards
from weightscope.checkpoint.storage import Storage
from weightscope.checkpoint.tensor import StoredTensor
from weightscope.errors import CheckpointError


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: headers and config are read and checked, no tensor data.

    Parameters
    ----------
    source : str or Path
        A folder with model.safetensors or shards and their index, a .safetensors or .gguf file, or a Hub id with
        optional `@revision`. What the Hub's local cache has complete is taken from there; of anything else on the
        Hub the headers are fetched now and tensors when they are read.
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
    return _of_safetensors(folder, files, weight_map, str(repository))


def _open_folder(folder: Path, name: str = "") -> Checkpoint:
    if (file := lone_gguf(folder)) is not None:
        return _open_file(file)
    shards, weight_map = shards_of(folder)
    files = opened(map(LocalFile, shards), folder)
    return _of_safetensors(folder, files, weight_map, name or (shards[0] if len(shards) == 1 else folder).name)


def _open_file(path: Path) -> Checkpoint:
    if path.name == ADAPTER_WEIGHTS:
        raise CheckpointError(NEEDS_ITS_BASE, file=path)
    if path.suffix == ".gguf":
        file = GgufFile(path)
        tensors = {name: GgufTensor(name, entry, file) for name, entry in file.tensors.items()}
        return Checkpoint(path.parent, [file], tensors, file.config, path.name)
    if path.suffix != ".safetensors":
        other = OpenFile(path)
        refuse_other(path, other.read(0, min(START, other.size)).tobytes(), other.size)
        raise CheckpointError("is neither a .safetensors nor a .gguf file", file=path)
    return _of_safetensors(path.parent, [LocalFile(path)], {}, path.name)


def _of_safetensors(folder: Path, files: Sequence[Storage], weight_map: dict[str, str], name: str) -> Checkpoint:
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor, entry in file.tensors.items():
            if tensor in stored:
                other = stored[tensor].file.path.name
                raise CheckpointError(f"also stands in {other}", file=file.path, tensor=tensor)
            stored[tensor] = StoredTensor(tensor, entry, file)
    for tensor, shard in weight_map.items():
        if tensor not in stored or stored[tensor].file.path.name != shard:
            raise CheckpointError(f"is not in {shard}, where the index has it", file=INDEX, tensor=tensor)
    config = config_of(folder)
    return Checkpoint(folder, files, dequantised(stored, config), config, name)
