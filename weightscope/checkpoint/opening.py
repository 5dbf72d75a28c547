"""Open what SOURCE names: a folder, a file, an installed package, or a repository on the Hub.

Headers and config are read and checked; of a repository on the Hub, small files are downloaded and
no weights.

transformers 5.23 takes the first of: what config.json names as transformers_weights,
model.safetensors, its index, pytorch_model.bin, its index (modeling_utils.py,
_get_resolved_checkpoint_files). No other name is looked for. With PEFT installed it adds an adapter
that lies next to them (integrations/peft.py, maybe_load_adapters).
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import unquote

from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor, WeightFiles
from weightscope.checkpoint.config import MAX_BYTES, Config, parse_json, read_json, read_small
from weightscope.checkpoint.formats import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    BY_SUFFIX,
    INDEX,
    LONE,
    NEEDS_ITS_BASE,
    OF_INDEX,
    PICKLE,
    PICKLED,
    SAFETENSORS,
    START,
    kind_of_folder,
    of_other_formats,
    refuse_other_format,
    refuse_pipeline,
)
from weightscope.checkpoint.gguf import GgufTensor, of_one_split, open_parts
from weightscope.checkpoint.hub import CONNECTIONS, Ahead, RemoteFile, Repository
from weightscope.checkpoint.packings.modelopt import KEY, SETTINGS_FILE, settings_of
from weightscope.checkpoint.quantised import PARTS, SETTINGS, dequantised
from weightscope.checkpoint.storage import LocalFile, OpenFile, Storage
from weightscope.core.embedded import FOLDER
from weightscope.core.errors import CheckpointError, printable

# Files that hold a tokenizer, the most informative first; the list in a GGUF file is the last
# resort.
TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
)
TOKENIZER_FILES = (  # all that say something of one
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
EMBEDDED = "embedded"  # the checkpoint that comes with weightscope
OF_MLX = "adapters.safetensors"  # an adapter's, as mlx-lm saves it
MODULES = "modules.json"  # of sentence-transformers
PARAMS = "params.json"  # of Meta's and Mistral's own files
EXPLICIT = "transformers_weights"  # the key of config.json
# what transformers looks for, in order
LOADED = (LONE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_ENTRIES = 1000  # of a folder that are looked into, and of each of them
# of all shards (empty tensors take no room in a file); the largest published have 150,000
MAX_TENSORS = 250_000
MAX_SHARDS = 1000  # each is held open; the largest published have 200
LARGEST_SMALL_FILE = 100_000_000  # bytes; the tokenizer.json of 256,000 tokens has a third of it
LARGEST_SHARD = 100_000_000_000  # bytes; published ones have up to 50 GB
# branch, tag or commit, as git names them
REVISION = re.compile(r"(?!.*(\.\.|//))[\w][\w.+/-]*[\w+-]|\w")
# A page of the Hub, as copied from a browser. What follows the revision names a file and is
# ignored.
HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?P<kind>(?:datasets|spaces)/)?(?P<id>[^/?#]+(?:/[^/?#]+)?)/?"
    r"(?:(?:tree|blob|resolve|commit)/(?P<revision>[^/?#]+)(?:/[^?#]*)?)?(?:[?#].*)?"
)


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: headers and config are read and checked, no tensor data."""
    return open_at(locate(source, revision))


def open_at(where: Path | Repository) -> Checkpoint:
    """Open the checkpoint at a place that `locate` found."""
    if isinstance(where, Repository):
        snapshot = cached_snapshot(where)
        return _open_repository(where) if snapshot is None else _open_folder(snapshot, str(where))
    return _open_folder(where) if where.is_dir() else _open_file(where)


def _open_folder(folder: Path, name: str = "") -> Checkpoint:
    """Open what transformers loads of a folder; where that is pickled, the one .safetensors or
    .gguf file.
    """
    names, config = names_in(folder), config_of(folder)
    loaded = weights_named(config, names, folder / "config.json")
    if not loaded.endswith(SAFETENSORS) and (file := lone_gguf(folder)) is not None:
        checkpoint = _open_file(file)
        parts = tuple(part.path.name for part in checkpoint.files)
        checkpoint.weight_files = WeightFiles(file.name, parts, loaded, names)
        return checkpoint
    weight_map = _parse_index(folder / loaded) if loaded.endswith(OF_INDEX) else {}
    if (
        missing := next(
            (shard for shard in sorted({*weight_map.values()}) if shard not in names), None
        )
    ) is not None:
        raise CheckpointError(f"names {missing}, which is not in the folder", file=folder / loaded)
    if not loaded.endswith((SAFETENSORS, OF_INDEX)):
        refuse_pipeline(folder)
    read = loaded if loaded.endswith((SAFETENSORS, OF_INDEX)) else _lone_shard(names, where=folder)
    shards = tuple(sorted({*weight_map.values()})) or (read,)
    name = name or (shards[0] if len(shards) == 1 else folder.name)
    files = map(LocalFile, (folder / shard for shard in shards))
    return _of_safetensors(
        folder, config, files, name, weight_map, WeightFiles(read, shards, loaded, names)
    )


def _open_file(path: Path) -> Checkpoint:
    if path.name in (ADAPTER_WEIGHTS, OF_MLX):
        raise CheckpointError(NEEDS_ITS_BASE, file=path)
    if path.suffix == ".gguf":
        parts = open_parts(path)
        tensors = {
            name: GgufTensor(name, entry, part)
            for part in parts
            for name, entry in part.tensors.items()
        }
        name = path.name if len(parts) == 1 else f"{parts[0].path.name} and {len(parts) - 1} more"
        return Checkpoint(path.parent, parts, tensors, parts[0].config, name)
    if path.suffix != SAFETENSORS:
        file = OpenFile(path)
        refuse_other_format(path, file.read(0, min(START, file.size)).tobytes(), file.size)
        raise CheckpointError("is neither a .safetensors nor a .gguf file", file=path)
    return _of_safetensors(path.parent, config_of(path.parent), [LocalFile(path)], path.name)


def _of_safetensors(
    folder: Path,
    config: Config,
    opened: Iterable[Storage],
    name: str,
    weight_map: Mapping[str, str] | None = None,
    weight_files: WeightFiles | None = None,
    where: object = None,
) -> Checkpoint:
    """The checkpoint of files that are opened one by one; they must agree with the index."""
    stored: dict[str, StoredTensor] = {}
    files, count, stale = [], 0, dict[str, list[str]]()
    assigned = weight_map or {}
    for file in opened:
        files.append(file)
        count += len(file.tensors)
        if count > MAX_TENSORS:
            raise CheckpointError(
                f"has over {count - 1} tensors; at most {MAX_TENSORS} are read",
                file=where or folder,
            )
        for tensor, entry in file.tensors.items():
            if tensor in stored:
                first = stored[tensor].file.path.name
                # the last by name, which transformers takes
                if assigned.get(tensor) != file.path.name:
                    why = f"; the index has it there, and transformers takes {file.path.name}'s" * (
                        tensor in assigned
                    )
                    raise CheckpointError(f"is also in {first}{why}", file=file.path, tensor=tensor)
                stale.setdefault(first, []).append(tensor)
            stored[tensor] = StoredTensor(tensor, entry, file)
    for tensor, shard in (weight_map or {}).items():
        if tensor not in stored or stored[tensor].file.path.name != shard:
            raise CheckpointError(
                f"is not in {shard}, where the index has it", file=INDEX, tensor=tensor
            )
    text = config.get("text_config")
    keys = {*config, *(text if isinstance(text, dict) else ())}
    quantised = not keys.isdisjoint(SETTINGS) or any(tensor.endswith(PARTS) for tensor in stored)
    tensors = dequantised(stored, config) if quantised else stored
    checkpoint = Checkpoint(folder, files, tensors, config, name)
    left = {name: tuple(names) for name, names in stale.items()}
    checkpoint.weight_files = replace(weight_files or WeightFiles(), stale=left)
    return checkpoint


def config_of(folder: Path) -> Config:
    """The config.json of a folder, else its params.json; empty where it has neither."""
    path = folder / "config.json"
    if not os.path.lexists(path) and os.path.lexists(folder / PARAMS):
        path = folder / PARAMS
    if not os.path.lexists(path):
        return Config({}, path)
    text = read_small(path, MAX_BYTES)
    values, stored = parse_json(text, file=path), [(path.name, len(text), sha256(text).hexdigest())]
    settings = folder / SETTINGS_FILE
    if os.path.lexists(settings) and values.keys().isdisjoint(SETTINGS):
        text = read_small(settings, MAX_BYTES)
        values |= {KEY: settings_of(parse_json(text, file=settings))}
        stored.append((settings.name, len(text), sha256(text).hexdigest()))
    return Config(values, path, stored=tuple(stored))


# What a source names


def locate(source: str | Path, revision: str | None = None) -> Path | Repository:
    """The path or repository that `source` names. An existing path wins over a repository of the
    same name.
    """
    source = resolved(source)
    path = existing(source)
    if path is not None and (path / MODULES).is_file():
        path = _transformer_in(path)
    if path is not None:
        if revision is not None:
            raise CheckpointError(
                f"is on this machine; a revision ({revision}) is one of the Hub's", file=path
            )
        return path
    name, _, tag = str(source).partition("@")
    if tag and revision not in (None, tag):
        raise CheckpointError(
            f"{printable(source)} says revision {tag}, and {revision} is asked for"
        )
    if not _may_be_hub_id(name):
        raise CheckpointError(f"no such file or folder: {source}")
    wanted = revision or tag or "main"
    if not REVISION.fullmatch(wanted):
        raise CheckpointError(f"no revision of {name} can be called '{wanted[:80]}'")
    return Repository(name, wanted)


def existing(source: str | Path) -> Path | None:
    """The existing file or folder that `source` names, as an absolute path; None if there is
    none.
    """
    path = Path(source)
    try:
        path = path.expanduser().absolute()
        return path if str(source) and path.exists() else None
    # too long, no permission, an unknown user, a null byte
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"cannot be read ({error})", file=path) from None


def adapter_in(source: str | Path) -> Path | None:
    """The folder of the adapter that a local source names; None if it is no adapter."""
    path = existing(source)
    if (
        path is not None
        and path.name in (ADAPTER_WEIGHTS, OF_MLX)
        and (path.parent / ADAPTER).is_file()
    ):
        path = path.parent
    if path is None or not (path / ADAPTER).is_file() or any(path.glob("model*.safetensors")):
        return None
    return None if (path / INDEX).is_file() else path


def resolved(source: str | Path) -> str | Path:
    """`source`, but the embedded checkpoint's folder for "embedded", and `id@revision` for an
    address on the Hub.
    """
    if source == EMBEDDED and not Path(source).exists():  # a file or folder of that name wins
        return FOLDER
    if not (match := HUB_URL.fullmatch(str(source))):
        return source
    name, revision = match["id"], match["revision"]
    if match["kind"]:
        raise CheckpointError(
            f"{printable(source)} is among the Hub's {match['kind'][:-1]}, not its models"
        )
    return f"{name}@{unquote(revision)}" if revision else name


def at_revision(source: str | Path, revision: str | None) -> str:
    """A source with the revision that was asked for, unless it names one itself."""
    return f"{source}@{revision}" if revision and "@" not in str(source) else str(source)


def _may_be_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.endswith((".safetensors", ".json", ".npz", ".gguf", ".bin", ".pt", ".pth"))


def _transformer_in(folder: Path) -> Path:
    """The transformer's folder in a sentence-transformers model; `folder` itself where it has
    weights.
    """
    index = folder / MODULES
    if any(folder.glob("*.safetensors")):
        return folder
    text = read_small(index, MAX_BYTES)
    modules = parse_json(b'{"modules":' + text + b"}", file=index)["modules"]
    modules = (
        [module for module in modules if isinstance(module, dict)]
        if isinstance(modules, list)
        else []
    )
    path = next(
        (m.get("path") for m in modules if str(m.get("type")).endswith(".Transformer")), None
    )
    if path is None:
        kinds = ", ".join(str(m.get("type")).rpartition(".")[2][:40] for m in modules) or "none"
        raise CheckpointError(
            f"names no Transformer among the modules of sentence-transformers ({kinds})", file=index
        )
    if (
        not isinstance(path, str)
        or PurePosixPath(path).is_absolute()
        or ".." in PurePosixPath(path).parts
    ):
        raise CheckpointError(
            f"has its transformer outside its folder: '{str(path)[:200]}'", file=index
        )
    return folder / path


# The files of a folder


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files, and of the safetensors files in its folders, as far as a
    person would look.
    """
    names, inner = [], list[str]()
    try:
        for number, path in enumerate(sorted(folder.iterdir())):
            names.append(path.name)
            if number < MOST_ENTRIES and path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # somebody else's folder
                    files = sorted(islice(path.iterdir(), MOST_ENTRIES))
                    inner += [
                        f"{path.name}/{file.name}"
                        for file in files
                        if file.name.endswith(SAFETENSORS)
                    ]
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=folder) from None
    return names + inner


def weights_named(config: Mapping[str, Any], names: Collection[str], file: object) -> str:
    """The file or index that transformers loads of files with these names; empty where it would
    find none.

    Raises
    ------
    CheckpointError
        config.json names a file that is not there, or that cannot be read.
    """
    explicit = config.get(EXPLICIT)
    if explicit is None:
        return next((name for name in LOADED if name in names), "")
    known = (
        isinstance(explicit, str)
        and explicit.endswith((SAFETENSORS, OF_INDEX))
        and explicit.isprintable()
    )
    if not known or "/" in explicit or "\\" in explicit:
        problem = f"'{EXPLICIT}' is {printable(str(explicit)[:80])}; a .safetensors file of the folder was expected"
        raise CheckpointError(problem, file=file)
    if explicit not in names:
        raise CheckpointError(f"'{EXPLICIT}' names {explicit}, which is not there", file=file)
    return str(explicit)


def lone_gguf(folder: Path) -> Path | None:
    """The .gguf file of a folder that has one, or its first part, and no .safetensors file; else
    None.
    """
    try:
        weights = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", SAFETENSORS))
    except OSError:  # opening reports it
        return None
    is_one = len(weights) == 1 or (bool(weights) and of_one_split(weights))
    return weights[0] if is_one and weights[0].suffix == ".gguf" else None


def _parse_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor; all files must be in the index's own folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("weight_map is not a map from tensor names to file names", file=path)
    if not weight_map:
        raise CheckpointError("weight_map is empty", file=path)
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise CheckpointError(
            f"names {len(shards)} files; at most {MAX_SHARDS} are opened", file=path
        )
    for name in shards:
        if "/" in name or "\\" in name or name in {"", ".", ".."}:
            raise CheckpointError(f"points outside its folder: '{name[:200]}'", file=path)
        if not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(
                f"names '{name[:200]}', which is not a .safetensors file", file=path
            )
    return weight_map


def _lone_shard(names: list[str], *, where: object) -> str:
    """The only .safetensors file of a folder or repository without an index."""
    if LONE in names:
        return LONE
    if reason := kind_of_folder(names):
        raise CheckpointError(reason, file=where)
    shards = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(shards) == 1:
        return shards[0]
    if shards:
        several = f"several .safetensors files ({', '.join(shards[:4])} ...)"
        problem = f"{several} and no {INDEX} to say which belong together"
        raise CheckpointError(problem, file=where)
    weights = [name for name in names if name.endswith((".gguf", *PICKLED, *BY_SUFFIX))]
    present = weights or names
    problem = f"no .safetensors file here; there is {', '.join(present[:4]) or 'nothing'}"
    problem += " ..." if len(present) > 4 else ""
    if any(name.endswith(".gguf") for name in weights):
        problem += ": a .gguf file must be on this machine and named itself"
    elif isinstance(where, Path):
        name, format_is = of_other_formats(where, names)
        problem += (
            f"; {name}: {format_is}"
            if name and len(present) > 1
            else f": {format_is}"
            if name
            else ""
        )
    elif weights:
        problem += f": {_of_suffix(weights[0], where)}"
    raise CheckpointError(problem, file=where)


def _of_suffix(name: str, repository: object) -> str:
    """What a file of a repository is by its name, and how to get one that is pickled converted."""
    if not name.endswith(PICKLED):
        return BY_SUFFIX[PurePath(name).suffix]
    name, _, revision = str(repository).partition("@")
    wanted = f"{name} --revision {revision}" if revision else name
    convert = f"hf download {wanted} --local-dir FOLDER && weightscope inspect FOLDER"
    return f"{PICKLE}; a copy of yours can be converted: {convert}"


# The files of a repository


def cached_snapshot(repository: Repository) -> Path | None:
    """The repository's folder in the Hub's cache, if the weights that transformers loads are
    complete there.
    """
    paths = [
        path for path in map(repository.cached, ("config.json", LONE, INDEX)) if path is not None
    ]
    if not paths:
        return None
    folder = paths[0].parent
    named = config_of(folder).get(EXPLICIT) or next(
        (n for n in (LONE, INDEX) if (folder / n).is_file()), ""
    )
    if not isinstance(named, str) or not (folder / named).is_file() or not named:
        return None
    shards = _parse_index(folder / named).values() if named.endswith(OF_INDEX) else (named,)
    return folder if all((folder / shard).is_file() for shard in {*shards}) else None


def downloaded(repository: Repository) -> Path:
    """The folder of a repository's weights and config in the Hub's cache; what is missing is
    downloaded.
    """
    snapshot = cached_snapshot(repository)
    if snapshot is not None:
        return snapshot
    pinned, folder, _, weight_files = _remote_weights(repository)
    if folder is None:
        raise CheckpointError("the repository has no config.json", file=repository)
    for shard in weight_files.shards:
        if pinned.file(shard, LARGEST_SHARD) is None:
            raise CheckpointError(f"the repository has no {shard}", file=repository)
    return folder


def resolve_folder(source: str | Path, revision: str | None = None) -> Path:
    """The local folder (or single file) with the config and tokenizer of what `source` names."""
    where = locate(source, revision)
    if isinstance(where, Path):
        return where
    small_files = ("config.json", "tokenizer_config.json", *chain(*TOKENIZERS))
    cached = [where.cached(name) for name in ("config.json", *TOKENIZERS[0])]
    folder = next((path.parent for path in cached if path), None) if all(cached) else None
    try:
        folder = folder or _with_tokenizer(where, small_files[:2])
    except CheckpointError:
        folder = next((path.parent for path in map(where.cached, small_files) if path), None)
        if folder is None:
            raise
    if folder is None:
        raise CheckpointError(f"{where}: the repository has none of {', '.join(small_files)}")
    return _transformer_in(folder) if (folder / MODULES).is_file() else folder


def _with_tokenizer(repository: Repository, names: Sequence[str]) -> Path | None:
    """As `_small_files`, with the files of the repository's most informative tokenizer."""
    folder = _small_files(repository, names, LARGEST_SMALL_FILE)
    for files in TOKENIZERS:
        pinned = replace(repository, revision=folder.name) if folder else repository
        folder = _small_files(pinned, files, LARGEST_SMALL_FILE) or folder
        if folder and all((folder / name).is_file() for name in files):
            break
    return folder


def _small_files(repository: Repository, names: Sequence[str], limit: int) -> Path | None:
    """The cache's folder of a repository's small files, all of the same commit; None if it has
    none.
    """
    folder = None
    for name in names:
        path = repository.file(name, limit)
        if path is not None and folder is None:
            folder = path.parent
            repository = replace(repository, revision=folder.name)
    return folder


def _remote_weights(
    repository: Repository,
) -> tuple[Repository, Path | None, dict[str, str], WeightFiles]:
    """A repository at its commit, the folder of its small files, the index's map, and which weights
    are read.

    The folder is named for the commit of the small files; everything else must be of the same
    commit. It is None where the repository has no small files, and the map is empty where there is
    no index.
    """
    folder = _small_files(repository, (INDEX, "config.json"), MAX_BYTES)
    pinned = replace(repository, revision=folder.name) if folder else repository
    try:
        names = pinned.file_names()
    # a mirror that has the files and no list of them, or a fault that the next request meets
    except CheckpointError:
        names = [
            name for name in (LONE, INDEX, "config.json") if pinned.on_server(name) is not None
        ]
    if (
        folder is None
        and PARAMS in names
        and (params := pinned.file(PARAMS, MAX_BYTES)) is not None
    ):
        folder = params.parent
        pinned = replace(repository, revision=folder.name)
    config = Config({}, "config.json") if folder is None else config_of(folder)
    if SETTINGS_FILE in names and config.keys().isdisjoint(SETTINGS):
        pinned.file(SETTINGS_FILE, MAX_BYTES)
    loaded = weights_named(config, names, config.file)
    weight_map: dict[str, str] = {}
    if loaded.endswith(OF_INDEX):
        index = (
            folder / loaded
            if folder and (folder / loaded).is_file()
            else pinned.file(loaded, MAX_BYTES)
        )
        if index is None:
            raise CheckpointError(f"the repository has no {loaded}", file=repository)
        weight_map = _parse_index(index)
    near = [
        name
        for name in names
        if "/" not in name or (name.count("/") == 1 and name.endswith(SAFETENSORS))
    ]
    read = (
        loaded if loaded.endswith((SAFETENSORS, OF_INDEX)) else _lone_shard(names, where=repository)
    )
    shards = tuple(sorted({*weight_map.values()})) or (read,)
    return pinned, folder, weight_map, WeightFiles(read, shards, loaded, near)


def _open_repository(repository: Repository) -> Checkpoint:
    """A repository's checkpoint by the headers of its files."""
    pinned, folder, weight_map, weight_files = _remote_weights(repository)
    config = Config({}, Path(repository.id, "config.json")) if folder is None else config_of(folder)
    names: dict[str, list[str]] = {shard: [] for shard in weight_files.shards}
    for tensor, shard in weight_map.items():
        names[shard].append(tensor)
    ahead = Ahead()
    with ThreadPoolExecutor(min(CONNECTIONS, len(names))) as pool:
        files = pool.map(lambda shard: _open_shard(pinned, shard, names[shard], ahead), names)
        place = folder or Path(repository.id)
        return _of_safetensors(
            place, config, files, str(repository), weight_map, weight_files, where=repository
        )


def _open_shard(
    repository: Repository, name: str, tensors: list[str], ahead: Ahead
) -> LocalFile | RemoteFile:
    """A shard from the Hub's cache, or else by its header."""
    cached = repository.cached(name)
    if cached is not None:
        return LocalFile(cached)
    source = repository.on_server(name)
    if source is None:
        raise CheckpointError(f"names {name}, which is not in the repository", file=INDEX)
    return RemoteFile(repository.id, source, ahead, tensors)
