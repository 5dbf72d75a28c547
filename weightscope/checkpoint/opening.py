"""Open what SOURCE names: a folder, a file, an installed package, or a repository on the Hub.

Headers and config are read and checked. From the Hub, small files are downloaded, and no weights.

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

from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor, Tensor, WeightFiles
from weightscope.checkpoint.config import MAX_BYTES, Config, parse_json, read_json, read_small
from weightscope.checkpoint.consolidated import are_parts, check_numbers, joined
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
from weightscope.checkpoint.packings import PARTS, SETTINGS, dequantised
from weightscope.checkpoint.packings.modelopt import KEY, SETTINGS_FILE, settings_of
from weightscope.checkpoint.storage import LocalFile, OpenFile, Storage
from weightscope.core.embedded import FOLDER
from weightscope.core.errors import CheckpointError, printable

# Files of a tokenizer, the most informative first; the list in a GGUF file is the last resort.
TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model", "tokenizer_config.json"),
)
TOKENIZER_FILES = (  # all that say something of one
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
EMBEDDED = "embedded"  # the checkpoint that comes with weightscope
OF_MLX = "adapters.safetensors"  # an adapter's file from mlx-lm
MODULES = "modules.json"  # sentence-transformers' file
PARAMS = "params.json"  # Meta's and Mistral's own config
EXPLICIT = "transformers_weights"  # the key of config.json
# Names that a help text has in place of a checkpoint.
PLACEHOLDERS = ("SOURCE", "SUSPECT", "BASE", "TUNED", "ORIGINAL", "COPY", "CHECKPOINT", "MODEL")
LOADED = (LONE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # transformers' order
MOST_ENTRIES = 1000  # entries of a folder that are looked into, and of each subfolder
MAX_TENSORS = 250_000  # tensors of all shards, empty ones too; the largest published have 150,000
MAX_SHARDS = 1000  # each is held open; the largest published have 200
LARGEST_SMALL_FILE = 100_000_000  # bytes; the tokenizer.json of 256,000 tokens has a third of it
LARGEST_SHARD = 100_000_000_000  # bytes; published ones have up to 50 GB
REVISION = re.compile(r"(?!.*(\.\.|//))[\w][\w.+/-]*[\w+-]|\w")  # branch, tag or commit of git
# Addresses of the Hub, as copied from a browser. A file's name after the revision is ignored.
HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)"
    r"(?P<kind>(?:datasets|spaces)/)?(?P<id>[^/?#]+(?:/[^/?#]+)?)/?"
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
    """Open what transformers loads of a folder; else its lone .safetensors or .gguf file."""
    names, config = names_in(folder), config_of(folder)
    loaded = weights_named(config, names, folder / "config.json")
    if not loaded.endswith(SAFETENSORS) and (file := lone_gguf(folder)) is not None:
        checkpoint = _open_file(file)
        parts = tuple(part.path.name for part in checkpoint.files)
        checkpoint.weight_files = WeightFiles(file.name, parts, loaded, names)
        return checkpoint
    weight_map = _parse_index(folder / loaded) if loaded.endswith(OF_INDEX) else {}
    listed = sorted({*weight_map.values()})
    for shard in listed:
        if shard not in names:
            problem = f"names {shard}, which is not in the folder"
            raise CheckpointError(problem, file=folder / loaded)
    shards = tuple(listed) or (loaded,)
    if not loaded.endswith((SAFETENSORS, OF_INDEX)):
        refuse_pipeline(folder)
        shards = _without_index(names, where=folder)
    name = name or (shards[0] if len(shards) == 1 else folder.name)
    files = (LocalFile(folder / shard) for shard in shards)
    weight_files = WeightFiles(loaded if listed else shards[0], shards, loaded, names)
    return _of_safetensors(folder, config, files, name, weight_map, weight_files)


def _open_file(path: Path) -> Checkpoint:
    if path.name in (ADAPTER_WEIGHTS, OF_MLX):
        raise CheckpointError(NEEDS_ITS_BASE, file=path)
    if path.suffix == ".gguf":
        parts = open_parts(path)
        tensors: dict[str, Tensor] = {}
        for part in parts:
            for name, entry in part.tensors.items():
                tensors[name] = GgufTensor(name, entry, part)
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
    """Put files together to a checkpoint, opened one by one; they must agree with the index."""
    stored: dict[str, StoredTensor] = {}
    files, count, stale = [], 0, dict[str, list[str]]()
    assigned = weight_map or {}
    in_parts = weight_files is not None and are_parts(weight_files.shards) and not assigned
    for file in opened:
        files.append(file)
        count += len(file.tensors)
        if count > MAX_TENSORS:
            problem = f"has over {count - 1} tensors; at most {MAX_TENSORS} are read"
            raise CheckpointError(problem, file=where or folder)
        for tensor, entry in () if in_parts else file.tensors.items():
            if tensor in stored:
                first = stored[tensor].file.path.name
                if assigned.get(tensor) != file.path.name:
                    problem = f"is also in {first}"
                    if tensor in assigned:  # transformers takes the last file by name
                        taken = f"transformers takes {file.path.name}'s"
                        problem += f"; the index has it there, and {taken}"
                    raise CheckpointError(problem, file=file.path, tensor=tensor)
                stale.setdefault(first, []).append(tensor)
            stored[tensor] = StoredTensor(tensor, entry, file)
    for tensor, shard in assigned.items():
        if tensor not in stored or stored[tensor].file.path.name != shard:
            problem = f"is not in {shard}, where the index has it"
            raise CheckpointError(problem, file=INDEX, tensor=tensor)
    text = config.get("text_config")
    levels = (config, text if isinstance(text, dict) else {})
    has_settings = any(key in level for key in SETTINGS for level in levels)
    quantised = has_settings or any(tensor.endswith(PARTS) for tensor in stored)
    tensors = dequantised(stored, config) if quantised else stored
    if in_parts:
        tensors = joined(files)
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


# From a source to a place


def locate(source: str | Path, revision: str | None = None) -> Path | Repository:
    """The path or repository that `source` names; an existing path wins."""
    source = resolved(source)
    path = existing(source)
    if path is not None and (path / MODULES).is_file():
        path = _transformer_in(path)
    if path is not None:
        if revision is not None:
            problem = f"is on this machine; a revision ({revision}) is one of the Hub's"
            raise CheckpointError(problem, file=path)
        return path
    if str(source) in PLACEHOLDERS:
        advice = "'embedded' is one that is always there"
        raise CheckpointError(f"{source} stands for a folder, a file or a Hub id; {advice}")
    name, _, tag = str(source).partition("@")
    if tag and revision not in (None, tag):
        problem = f"{printable(source)} says revision {tag}, and {revision} is asked for"
        raise CheckpointError(problem)
    if not _may_be_hub_id(name):
        raise CheckpointError(f"no such file or folder: {source}")
    wanted = revision or tag or "main"
    if not REVISION.fullmatch(wanted):
        raise CheckpointError(f"no revision of {name} can be called '{wanted[:80]}'")
    return Repository(name, wanted)


def existing(source: str | Path) -> Path | None:
    """The existing file or folder that `source` names, as an absolute path; else None."""
    path = Path(source)
    try:
        path = path.expanduser().absolute()
        return path if str(source) and path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # too long, not permitted, no such user
        raise CheckpointError(f"cannot be read ({error})", file=path) from None


def adapter_in(source: str | Path) -> Path | None:
    """The folder of the adapter that a local source names; None if it is no adapter."""
    path = existing(source)
    if path is None:
        return None
    if path.name in (ADAPTER_WEIGHTS, OF_MLX) and (path.parent / ADAPTER).is_file():
        path = path.parent
    if not (path / ADAPTER).is_file() or any(path.glob("model*.safetensors")):
        return None
    return None if (path / INDEX).is_file() else path


def resolved(source: str | Path) -> str | Path:
    """Replace "embedded" by its folder, and an address on the Hub by `id@revision`."""
    if source == EMBEDDED and not Path(source).exists():  # a file or folder of that name wins
        return FOLDER
    if not (match := HUB_URL.fullmatch(str(source))):
        return source
    name, revision = match["id"], match["revision"]
    if match["kind"]:
        kind = match["kind"].removesuffix("/")
        raise CheckpointError(f"{printable(source)} is among the Hub's {kind}, not its models")
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
    """The transformer's folder in a sentence-transformers model; `folder` if it has weights."""
    index = folder / MODULES
    if any(folder.glob("*.safetensors")):
        return folder
    text = read_small(index, MAX_BYTES)
    listed = parse_json(b'{"modules":' + text + b"}", file=index)["modules"]
    modules = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    classes = [str(module.get("type")) for module in modules]
    transformers = (
        module.get("path")
        for module, name in zip(modules, classes, strict=True)
        if name.endswith(".Transformer")
    )
    path = next(transformers, None)
    if path is None:
        named = ", ".join(name.rpartition(".")[2][:40] for name in classes) or "none"
        problem = f"names no Transformer among the modules of sentence-transformers ({named})"
        raise CheckpointError(problem, file=index)
    inside = PurePosixPath(path) if isinstance(path, str) else None
    if inside is None or inside.is_absolute() or ".." in inside.parts:
        problem = f"has its transformer outside its folder: '{str(path)[:200]}'"
        raise CheckpointError(problem, file=index)
    return folder / path


# The files of a folder


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files, and of the safetensors files in its subfolders."""
    names, inner = [], list[str]()
    try:
        for number, path in enumerate(sorted(folder.iterdir())):
            names.append(path.name)
            if number < MOST_ENTRIES and path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # somebody else's folder
                    files = sorted(file.name for file in islice(path.iterdir(), MOST_ENTRIES))
                    inner += [f"{path.name}/{name}" for name in files if name.endswith(SAFETENSORS)]
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=folder) from None
    return names + inner


def weights_named(config: Mapping[str, Any], names: Collection[str], file: object) -> str:
    """The file or index that transformers loads of files with these names; empty if none.

    Raises
    ------
    CheckpointError
        config.json names a file that is not there, or that cannot be read.
    """
    explicit = config.get(EXPLICIT)
    if explicit is None:
        return next((name for name in LOADED if name in names), "")
    is_weights = isinstance(explicit, str) and explicit.endswith((SAFETENSORS, OF_INDEX))
    if not is_weights or not explicit.isprintable() or "/" in explicit or "\\" in explicit:
        problem = f"'{EXPLICIT}' is {printable(str(explicit)[:80])}"
        wanted = "a .safetensors file of the folder was expected"
        raise CheckpointError(f"{problem}; {wanted}", file=file)
    if explicit not in names:
        raise CheckpointError(f"'{EXPLICIT}' names {explicit}, which is not there", file=file)
    return str(explicit)


def lone_gguf(folder: Path) -> Path | None:
    """The .gguf file (or first part) of a folder with one and no .safetensors file; else None."""
    try:
        weights = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", SAFETENSORS))
    except OSError:  # opening reports it
        return None
    is_one = len(weights) == 1 or (bool(weights) and of_one_split(weights))
    return weights[0] if is_one and weights[0].suffix == ".gguf" else None


def _parse_index(path: Path) -> dict[str, str]:
    """The file of each tensor; all files must be in the index's own folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("weight_map is not a map from tensor names to file names", file=path)
    if not weight_map:
        raise CheckpointError("weight_map is empty", file=path)
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        problem = f"names {len(shards)} files; at most {MAX_SHARDS} are opened"
        raise CheckpointError(problem, file=path)
    for name in shards:
        if "/" in name or "\\" in name or name in {"", ".", ".."}:
            raise CheckpointError(f"points outside its folder: '{name[:200]}'", file=path)
        if not name.endswith(".safetensors") or not name.isprintable():
            problem = f"names '{name[:200]}', which is not a .safetensors file"
            raise CheckpointError(problem, file=path)
    return weight_map


def _without_index(names: list[str], *, where: object) -> tuple[str, ...]:
    """The only .safetensors file of a folder or repository without an index, or Meta's parts."""
    if LONE in names:
        return (LONE,)
    if reason := kind_of_folder(names):
        raise CheckpointError(reason, file=where)
    shards = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if are_parts(shards):
        check_numbers(shards, where)
    if len(shards) == 1 or are_parts(shards):
        return tuple(sorted(shards))
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
        if name:
            problem += f"; {name}: {format_is}" if len(present) > 1 else f": {format_is}"
    elif weights and not weights[0].endswith(PICKLED):
        problem += f": {BY_SUFFIX[PurePath(weights[0]).suffix]}"
    elif weights:
        name, _, revision = str(where).partition("@")
        wanted = f"{name} --revision {revision}" if revision else name
        convert = f"hf download {wanted} --local-dir FOLDER && weightscope inspect FOLDER"
        problem += f": {PICKLE}; a copy of yours can be converted: {convert}"
    raise CheckpointError(problem, file=where)


# The files of a repository


def cached_snapshot(repository: Repository) -> Path | None:
    """A repository's folder in the Hub's cache, if the weights to load are complete there."""
    paths = map(repository.cached, ("config.json", LONE, INDEX))
    folder = next((path.parent for path in paths if path is not None), None)
    if folder is None:
        return None
    present = (name for name in (LONE, INDEX) if (folder / name).is_file())
    named = config_of(folder).get(EXPLICIT) or next(present, "")
    if not isinstance(named, str) or not (folder / named).is_file() or not named:
        return None
    shards = _parse_index(folder / named).values() if named.endswith(OF_INDEX) else (named,)
    return folder if all((folder / shard).is_file() for shard in {*shards}) else None


def downloaded(repository: Repository) -> Path:
    """A repository's folder with weights and config in the Hub's cache, after any download."""
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
    folder = cached[0].parent if cached[0] and all(cached) else None
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
    """Get `_small_files` and the files of the repository's most informative tokenizer."""
    folder = _small_files(repository, names, LARGEST_SMALL_FILE)
    for files in TOKENIZERS:
        pinned = replace(repository, revision=folder.name) if folder else repository
        folder = _small_files(pinned, files, LARGEST_SMALL_FILE) or folder
        if folder and all((folder / name).is_file() for name in files):
            break
    return folder


def _small_files(repository: Repository, names: Sequence[str], limit: int) -> Path | None:
    """The cache's folder of a repository's small files, of one commit; None if it has none."""
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
    """A repository at its commit, the folder of its small files, and its weight files.

    The folder is named for the commit of the small files; everything else must be of the same
    commit. It is None where the repository has no small files, and the map from tensors to files
    is empty where there is no index.
    """
    folder = _small_files(repository, (INDEX, "config.json"), MAX_BYTES)
    pinned = replace(repository, revision=folder.name) if folder else repository
    try:
        names = pinned.file_names()
    except CheckpointError:  # a mirror without a list of files, or a fault that will come again
        usual = (LONE, INDEX, "config.json")
        names = [name for name in usual if pinned.on_server(name) is not None]
    if folder is None and PARAMS in names:
        params = pinned.file(PARAMS, MAX_BYTES)
        if params is not None:
            folder = params.parent
            pinned = replace(repository, revision=folder.name)
    config = Config({}, "config.json") if folder is None else config_of(folder)
    if SETTINGS_FILE in names and config.keys().isdisjoint(SETTINGS):
        pinned.file(SETTINGS_FILE, MAX_BYTES)
    loaded = weights_named(config, names, config.file)
    weight_map: dict[str, str] = {}
    if loaded.endswith(OF_INDEX):
        index = folder and folder / loaded
        if index is None or not index.is_file():
            index = pinned.file(loaded, MAX_BYTES)
        if index is None:
            raise CheckpointError(f"the repository has no {loaded}", file=repository)
        weight_map = _parse_index(index)

    def is_near(name: str) -> bool:
        return "/" not in name or (name.count("/") == 1 and name.endswith(SAFETENSORS))

    shards = tuple(sorted({*weight_map.values()})) or (loaded,)
    if not loaded.endswith((SAFETENSORS, OF_INDEX)):
        shards = _without_index(names, where=repository)
    read = loaded if weight_map else shards[0]
    return pinned, folder, weight_map, WeightFiles(read, shards, loaded, [*filter(is_near, names)])


def _open_repository(repository: Repository) -> Checkpoint:
    """Open a repository's checkpoint by the headers of its files."""
    pinned, folder, weight_map, weight_files = _remote_weights(repository)
    config = Config({}, Path(repository.id, "config.json")) if folder is None else config_of(folder)
    names: dict[str, list[str]] = {shard: [] for shard in weight_files.shards}
    for tensor, shard in weight_map.items():
        names[shard].append(tensor)
    ahead = Ahead()
    with ThreadPoolExecutor(min(CONNECTIONS, len(names))) as pool:
        files = pool.map(lambda shard: _open_shard(pinned, shard, names[shard], ahead), names)
        place, name = folder or Path(repository.id), str(repository)
        return _of_safetensors(place, config, files, name, weight_map, weight_files, repository)


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
