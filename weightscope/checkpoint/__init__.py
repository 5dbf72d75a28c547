"""Bytes to tensors: safetensors read straight into NumPy. Knows nothing of attention."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightscope.checkpoint.local import LocalFile
from weightscope.checkpoint.source import resolve_folder
from weightscope.checkpoint.tensor import Tensor
from weightscope.errors import CheckpointError

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "resolve_folder"]

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 50_000_000


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, and its config; nothing is read until a tensor is.

    Parameters
    ----------
    folder : Path
        Where config.json and the tokenizer are looked for.
    files : list of LocalFile
        The shards.
    config : dict
        config.json as it stands, or empty where there is none.
    """

    def __init__(self, folder: Path, files: list[LocalFile], config: dict[str, Any]) -> None:
        self.folder, self.files, self.config = folder, files, config
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            for name, entry in file.tensors.items():
                if name in self._tensors:
                    other = self._tensors[name].file.path.name
                    raise CheckpointError(f"also stands in {other}", file=file.path, tensor=name)
                self._tensors[name] = Tensor(name, entry, file)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def name(self) -> str:
        """How to call the checkpoint in messages: its file's or folder's name."""
        return self.files[0].path.name if len(self.files) == 1 else self.folder.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())


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
    if path.is_file() and path.suffix != ".safetensors":
        raise CheckpointError("is not a .safetensors file; convert it with transformers' save_pretrained", file=path)
    folder = path if path.is_dir() else path.parent
    indexed = path.is_dir() and (folder / INDEX).exists()
    weight_map = _weight_map(folder / INDEX) if indexed else {}
    shards = [folder / name for name in sorted(set(weight_map.values()))] or (
        _lone(folder) if path.is_dir() else [path]
    )
    checkpoint = Checkpoint(folder, [LocalFile(shard) for shard in shards], _config(folder))
    for name, file_name in weight_map.items():
        if name not in checkpoint or checkpoint[name].file.path.name != file_name:
            raise CheckpointError(f"is not in {file_name}, where the index has it", file=folder / INDEX, tensor=name)
    return checkpoint


def _lone(folder: Path) -> list[Path]:
    """The one file of a folder without an index: model.safetensors, or the only .safetensors there is."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found[:4])
        raise CheckpointError(
            f"several .safetensors files ({names} ...) and no {INDEX} to say which belong together", file=folder
        )
    others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx"})
    what = f"; it has {', '.join(others[:4])}, which weightscope does not open" if others else ""
    raise CheckpointError(f"no .safetensors file in this folder{what}", file=folder)


def _weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor, as the index says; every file named lies in the index's own folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("weight_map is not a map from tensor names to file names", file=index)
    if not weight_map:
        raise CheckpointError("weight_map is empty", file=index)
    for name in set(weight_map.values()):
        if Path(name).name != name or name in {".", ".."}:
            raise CheckpointError(f"points outside its folder: {name!r}", file=index)
        if not (index.parent / name).is_file():
            raise CheckpointError(f"names {name}, which is not in the folder", file=index)
    return weight_map


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that nobody vouches for.

    Raises
    ------
    CheckpointError
        The file is unreadable, larger than 50 MB, not UTF-8, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read", file=path)
        decoded = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=path) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON ({error})", file=path) from None
    if not isinstance(decoded, dict):
        raise CheckpointError(f"is a JSON {type(decoded).__name__}; an object was expected", file=path)
    return decoded
