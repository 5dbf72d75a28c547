"""Files next to the weights: code and modules of sentence-transformers decide, templates do not.

Of a repository on the Hub small files are fetched: code where config.json names it, and settings of
modules. GGUF files and adapters stand alone.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor
from weightscope.checkpoint.config import MAX_BYTES, Config, parse_json, read_small
from weightscope.checkpoint.formats import LONE
from weightscope.checkpoint.gguf import GgufFile
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.opening import MODULES, existing, locate, resolved
from weightscope.checkpoint.storage import COMMIT, LocalFile, OpenFile
from weightscope.core.errors import CheckpointError, one_line
from weightscope.model.model import Model, TensorsOnly

TEMPLATE = "chat_template.jinja"
LIBRARY = "sentence_transformers."  # where modules are that need no code of their own
CODE = "auto_map"  # the key of a config that names classes of code next to it
# not `\s*`, whose time grows with the square of the number of empty lines
IMPORTED = re.compile(
    r"^[ \t\f]*(?:from[ \t\f]+\.(\w+)[ \t\f]+import|import[ \t\f]+\.(\w+))",
    re.ASCII | re.MULTILINE,
)
# Files that decide how a model is used, not what its weights compute.
NAMED = (
    "generation_config.json",
    TEMPLATE,
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# keys that say who wrote a file
WRITERS = ("transformers_version", "__version__", "_from_model_config")
# settings of a module that newer versions write out, and what older ones leave to the default
ADDED = {"include_prompt": True}
MODES = re.compile(r"pooling_mode_(?!mean_tokens$)\w+", re.ASCII)  # off where they are left out
# modules that config.json and one file of weights describe whole
PLAIN = {"Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout"}
LOADING = "sentence_bert_config.json"
OF_TEXTS = {"max_seq_length", "do_lower_case"}  # its keys that only concern texts
PICKLED_LONE = "pytorch_model.bin"
SETTINGS = "config.json"
MOST_MODULES, MOST_CODE, LONGEST_PATH = 20, 100, 200


class FileDifference(NamedTuple):
    """A file that differs, or what of it does."""

    file: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file} {self.detail}"


class Companions(NamedTuple):
    """Differences of the files next to two checkpoints, and their further modules."""

    deciding: tuple[FileDifference, ...] = ()
    named: tuple[FileDifference, ...] = ()
    modules: tuple[TensorsOnly, TensorsOnly] | None = None  # None where these are not at hand


class _SentenceModule(NamedTuple):
    """A module of sentence-transformers, or of code next to the weights."""

    type: str
    path: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.type.rpartition(".")[2]

    @property
    def is_own(self) -> bool:
        """True if its class is in code next to the weights, as of jina-embeddings-v3."""
        return "." in self.type and not self.type.startswith(LIBRARY)

    @property
    def label(self) -> str:
        """The class, with its file if that is next to the weights."""
        return self.type if self.is_own else self.kind


def compare_companions(a: Model | TensorsOnly, b: Model | TensorsOnly) -> Companions:
    """Compare the files next to two checkpoints, by whether they decide what is computed."""
    places = [*map(_place_of, (a.checkpoint, b.checkpoint))]
    if None in places:
        return Companions()
    x, y = (place for place in places if place is not None)
    decides, named, modules = _differences(x, y)
    return Companions((*decides, *_unread(x, y)), tuple(named), modules)


def _differences(
    x: "_Place", y: "_Place"
) -> tuple[list[FileDifference], list[FileDifference], tuple[TensorsOnly, TensorsOnly] | None]:
    """Differences that decide, differences that do not, and the further modules."""
    decides, named = [*_code(x, y)], [*_named(x, y)]
    of_a, of_b = x.modules, y.modules
    if not of_a or not of_b:
        if of_a != of_b:
            only = "A" if of_a else "B"
            named.append(
                FileDifference(
                    MODULES, f"is only in {only}: its pooling and other modules were not compared"
                )
            )
        return decides, named, None
    labels = [[module.label for module in modules] for modules in (of_a, of_b)]
    if labels[0] != labels[1]:
        named_by = [", ".join(each) for each in labels]
        decides.append(FileDifference(MODULES, f"names {named_by[0]} in A, {named_by[1]} in B"))
        return decides, named, None
    seen = {difference.file for difference in decides}
    behind = _code_behind(MODULES, _own_classes(of_a), x, y)
    decides += [each for each in behind if each.file not in seen]
    decides += [*_loading(x, y), *_settings(x, y), *_others(x, y), *_folders(x, y)]
    is_here = isinstance(x.where, Path) and isinstance(y.where, Path)
    unread = {*x.pickled, *y.pickled}
    return decides, named, (x.tensors(unread), y.tensors(unread)) if is_here else None


def _unread(x: "_Place", y: "_Place") -> Iterator[FileDifference]:
    """Files that are there and cannot be read: nothing shows that they are the same."""
    for name, why in (x.unread | y.unread).items():
        if name not in NAMED:
            yield FileDifference(name, f"was not compared ({why})")


def file_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """SHA-256 of the chat template, of code, and of what decides of modules around the model.

    Raises
    ------
    CheckpointError
        Code that config.json names is there and cannot be read.
    """
    texts: dict[str, bytes] = {}
    template: Any = None
    first = next(iter(checkpoint.files), None)
    if isinstance(first, GgufFile):
        template = first.config.get("tokenizer.chat_template")
    elif place := _place_of(checkpoint):
        texts = dict(_of_modules(place)) | _code_of(place, checkpoint.config.get(CODE))
        if why := next(iter(place.unread.values()), ""):
            raise CheckpointError(f"has code that cannot be read ({why})", file=checkpoint.name)
        template = (place.json("tokenizer_config.json") or {}).get("chat_template")
        if stored := place.read(TEMPLATE):
            template = stored.decode(errors="replace")
    if isinstance(template, str):
        texts[TEMPLATE] = template.encode(errors="replace")
    return {name: sha256(text).hexdigest() for name, text in texts.items()}


class _Place:
    """A folder, or a repository on the Hub, by its small files."""

    def __init__(self, checkpoint: Checkpoint, where: Path | Repository) -> None:
        self.checkpoint, self.where = checkpoint, where
        self.unread: dict[str, str] = {}  # files that are there, and why they cannot be read

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none, or where it cannot be read."""
        with self._noting(name):
            path = self.path(name)
            return None if path is None else read_small(path, MAX_BYTES)
        return None

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.unread[name] = one_line(error)

    def path(self, name: str) -> Path | None:
        """The path of a small file on this machine, fetched if need be."""
        if isinstance(self.where, Path):
            path = self.where / name
            return path if path.is_file() else None
        return self.where.cached(name) or self.where.file(name, MAX_BYTES)

    def json(self, name: str) -> dict[str, Any] | None:
        """A small JSON object; None where there is none."""
        text = self.read(name)
        with self._noting(name):
            return None if text is None else parse_json(text, file=name)
        return None

    @cached_property
    def modules(self) -> tuple[_SentenceModule, ...]:
        """The modules of sentence-transformers, in order; empty where the place has none."""
        if isinstance(self.where, Repository) and MODULES not in self.checkpoint.weight_files.names:
            return ()
        text = self.read(MODULES)
        listed: Any = []
        if text:
            with self._noting(MODULES):
                listed = parse_json(b'{"modules":' + text + b"}", file=MODULES)["modules"]
        entries = listed if isinstance(listed, list) else []
        modules = [entry for entry in entries if isinstance(entry, dict)][:MOST_MODULES]
        if len(modules) < len(entries):
            self.unread[MODULES] = f"{len(entries)} entries, of which {len(modules)} were read"
        return tuple(
            _SentenceModule(str(entry.get("type")), str(entry.get("path") or ""))
            for entry in modules
        )

    def inner(self) -> Iterator[tuple[str, str]]:
        """Name (such as 1_Pooling) and folder of each module but the transformer."""
        for index, module in enumerate(self.modules):
            if module.kind != "Transformer" and self._is_inner(module.path):
                yield f"{index}_{module.kind}", module.path

    def _is_inner(self, path: str) -> bool:
        """True for a folder of its own in this place."""
        place = PurePosixPath(path)
        is_inner = ".." not in place.parts and not place.is_absolute()
        if path and not (is_inner and len(path) <= LONGEST_PATH):
            self.unread[f"{MODULES}: {path[:40]}"] = "is no folder next to the weights"
            return False
        return bool(path)

    def folders(self) -> Iterator[str]:
        """Folders of modules that are compared file by file: of other kinds, or not read."""
        for module in self.modules:
            is_plain = module.kind in PLAIN and not module.is_own
            if module.kind == "Transformer" and module.path and isinstance(self.where, Path):
                is_plain = (self.where / module.path).resolve() == self.checkpoint.folder.resolve()
            if not is_plain and self._is_inner(module.path):
                yield module.path

    def digests(self, path: str) -> dict[str, str]:
        """SHA-256 of every file in a module's folder; empty where they are not all at hand."""
        folder = self.where / path if isinstance(self.where, Path) else None
        files = [] if folder is None else [*islice(folder.rglob("*"), MOST_CODE + 1)]
        if folder is None or len(files) > MOST_CODE:
            self.unread[path] = "its files are not at hand, or too many"
            return {}
        digests = {}
        for file in sorted(file for file in files if file.is_file()):
            stored = OpenFile(file)
            stored.read_digest()
            digests[file.relative_to(folder).as_posix()] = stored.sha256
        return digests

    @property
    def pickled(self) -> Iterator[str]:
        """Names of modules whose weights are on this machine, and not in safetensors."""
        for called, path in self.inner():
            folder = self.where / path if isinstance(self.where, Path) else None
            if folder and (folder / PICKLED_LONE).is_file() and not (folder / LONE).is_file():
                yield called

    def tensors(self, unread: Collection[str]) -> TensorsOnly:
        """The tensors of all modules but the transformer, those in safetensors on this machine.

        `unread`: names of modules that have no such file on one side.
        """
        tensors: dict[str, StoredTensor] = {}
        files = []
        for called, path in self.inner():
            if not isinstance(self.where, Path) or called in unread:
                continue
            if not (self.where / path / LONE).is_file():
                continue
            file = LocalFile(self.where / path / LONE)
            files.append(file)
            named = {f"{called}/{name}": entry for name, entry in file.tensors.items()}
            tensors |= {name: StoredTensor(name, entry, file) for name, entry in named.items()}
        folder = self.where if isinstance(self.where, Path) else Path()
        return TensorsOnly(
            Checkpoint(folder, files, tensors, Config({}, SETTINGS), str(self.where)), ""
        )


def _place_of(checkpoint: Checkpoint) -> _Place | None:
    """The folder of a checkpoint's other files; None of one that stands alone."""
    given, is_adapted = resolved(checkpoint.given), bool(checkpoint.note)
    if is_adapted or not checkpoint.files or checkpoint.is_gguf:
        return None
    path = existing(given) if given else checkpoint.folder
    if path is None and given:
        where = locate(given)
        if isinstance(where, Repository) and COMMIT.fullmatch(checkpoint.folder.name):
            where = replace(where, revision=checkpoint.folder.name)
        return _Place(checkpoint, where)
    if path is None or not path.is_dir():
        path = checkpoint.folder
    return _Place(checkpoint, path)


# Code


def _code(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Differences of the code that config.json names."""
    maps = [place.checkpoint.config.get(CODE) for place in (x, y)]
    if not any(maps):
        return
    if maps[0] != maps[1]:
        how = "differs" if all(maps) else f"is only in {'A' if maps[0] else 'B'}"
        yield FileDifference(
            f"{CODE} in config.json", f"{how}, and the code that it names was not read"
        )
        return
    yield from _code_behind(CODE, maps[0], x, y)


def _code_behind(key: str, classes: object, x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Files of code that differ, of those behind the classes that a key or a file names."""
    sides = [_code_of(place, classes) for place in (x, y)]
    for name in sorted({*sides[0], *sides[1]}):
        if sides[0].get(name) != sides[1].get(name):
            yield FileDifference(
                name, f"differs{_only(sides[0].get(name), sides[1].get(name))}: code behind {key}"
            )


def _code_of(place: _Place, classes: object) -> dict[str, bytes]:
    """Text of each file of code that names of classes lead to, and of those that these import."""
    named = classes.values() if isinstance(classes, Mapping) else ()
    flat = [name for each in named for name in (each if isinstance(each, list) else [each])]
    left = [name.rpartition("--")[2].partition(".")[0] for name in flat if isinstance(name, str)]
    texts: dict[str, bytes] = {}
    seen: set[str] = set()
    while left:
        name = f"{left.pop()}.py"
        if name in seen or not re.fullmatch(r"\w{1,200}\.py", name, re.ASCII):
            continue
        if len(seen) >= MOST_CODE:  # each name is a request to the Hub
            place.unread[name] = f"more than {MOST_CODE} files are named; no more are read"
            break
        seen.add(name)
        text = place.read(name)
        if text is not None:
            texts[name] = text
            code = text.replace(b"\r", b"\n").decode(errors="replace")
            left += dict.fromkeys(each[1] or each[2] for each in IMPORTED.finditer(code))
    return texts


# Modules of sentence-transformers


def _own_classes(modules: Sequence[_SentenceModule]) -> dict[str, str]:
    """Classes of modules whose code is next to the weights, as `auto_map` names its own."""
    return {module.type: module.type for module in modules if module.is_own}


def _of_modules(place: _Place) -> Iterator[tuple[str, bytes]]:
    """The list of modules, and the code, the settings and a digest of the weights of each."""
    modules = place.modules
    if modules:
        yield MODULES, ", ".join(module.label for module in modules).encode()
    yield from _code_of(place, _own_classes(modules)).items()
    if modules and (loading := _of_loading(place)):
        yield LOADING, json.dumps(loading, sort_keys=True).encode()
    for path in place.folders():
        yield f"{path}/", json.dumps(place.digests(path), sort_keys=True).encode()
    for _, path in place.inner():
        settings = _stated(place.json(f"{path}/{SETTINGS}") or {})
        yield f"{path}/{SETTINGS}", json.dumps(settings, sort_keys=True).encode()
        name, _, digest = _digest(place, path)
        if name:
            yield f"{path}/{name}", digest.encode()


def _settings(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Differences of the settings of modules, such as pooling."""
    for (_, path_a), (_, path_b) in zip(x.inner(), y.inner(), strict=True):
        sides = [place.json(f"{path}/{SETTINGS}") for place, path in ((x, path_a), (y, path_b))]
        stated = [None if each is None else _stated(each) for each in sides]
        if stated[0] != stated[1]:
            detail = _only(*sides) or f" ({_first_key(stated[0] or {}, stated[1] or {})})"
            yield FileDifference(f"{path_b}/{SETTINGS}", f"differs{detail}")


def _stated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that newer versions write out and older ones leave to the default."""
    return {key: value for key, value in settings.items() if not _is_default(key, value)}


def _is_default(key: str, value: Any) -> bool:
    if key in ADDED:
        return value is ADDED[key]
    return value is None or (value is False and MODES.fullmatch(key) is not None)


def _loading(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """A difference in how the transformer is loaded, such as another number of layers."""
    a, b = map(_of_loading, (x, y))
    if a != b:
        yield FileDifference(LOADING, f"differs ({_first_key(a, b)})")


def _of_loading(place: _Place) -> dict[str, Any]:
    """Settings of the transformer, without lengths and case of texts."""
    settings = (place.json(LOADING) if _may_have(place, LOADING) else None) or {}
    return {key: value for key, value in settings.items() if key not in OF_TEXTS}


def _folders(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Folders of modules that are compared file by file."""
    for path in dict.fromkeys((*x.folders(), *y.folders())):
        if x.digests(path) != y.digests(path):
            yield FileDifference(f"{path}/", "holds other files")


def _first_key(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first key in which two objects differ, with both values."""
    key = next(key for key in (*a, *b) if a.get(key) != b.get(key))
    values = (json.dumps(each.get(key, False))[:40] for each in (a, b))
    return "{}: {} in A, {} in B".format(key, *values)


def _others(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Modules with different files of weights that are not safetensors on this machine."""
    for (_, path_a), (_, path_b) in zip(x.inner(), y.inner(), strict=True):
        sides = [_digest(x, path_a), _digest(y, path_b)]
        compared = all(name == LONE and is_here for name, is_here, _ in sides)
        if not compared and sides[0][2] != sides[1][2]:
            yield FileDifference(
                f"weights of {path_b}", "are not the same file, and were not compared"
            )


def _digest(place: _Place, path: str) -> tuple[str, bool, str]:
    """The name of the file of a module's weights, whether it is on this machine, and its digest."""
    for name in (LONE, PICKLED_LONE):
        file = f"{path}/{name}"
        if isinstance(place.where, Repository):
            if (
                file in place.checkpoint.weight_files.names
                and (on_server := place.where.on_server(file)) is not None
            ):
                return name, False, on_server.etag
        elif (place.where / file).is_file():
            stored = OpenFile(place.where / file)
            stored.read_digest()
            return name, True, stored.sha256
    return "", False, ""


# Files that are only named


def _named(x: _Place, y: _Place) -> Iterator[FileDifference]:
    """Files that differ and decide only how a model is used; the Hub's only if listed."""
    for name in NAMED:
        sides = [place.read(name) if _may_have(place, name) else None for place in (x, y)]
        if sides[0] == sides[1]:
            continue
        objects = [place.json(name) for place, text in zip((x, y), sides, strict=True) if text]
        kept = [
            {key: value for key, value in settings.items() if key not in WRITERS}
            for settings in objects
            if settings is not None
        ]
        if len(kept) == 2 and kept[0] == kept[1]:
            continue
        yield FileDifference(name, f"differs{_only(*sides)}")


def _may_have(place: _Place, name: str) -> bool:
    return isinstance(place.where, Path) or name in place.checkpoint.weight_files.names


def _only(a: object, b: object) -> str:
    """The checkpoint that has a file, where the other lacks it."""
    if (a is None) == (b is None):
        return ""
    return " (only in A)" if b is None else " (only in B)"
