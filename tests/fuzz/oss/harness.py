"""What the harnesses share: an input is read or refused in a CheckpointError; a warning or anything else is a fault."""

import importlib
import json
import random
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

from tests.fuzz.mutate import mutated_bytes, mutated_value
from weightscope.core.errors import CheckpointError

Meet = Callable[[Path, bytes], object]  # a folder, and an input
HARNESSES = ("headers", "gguf", "rows", "claims")
BETWEEN = b"\x1e"  # the files of an input: neither JSON nor TOML has this byte
FOLDER = Path(__file__).parent


def fuzz(meet: Meet, *packages: str) -> None:
    """Fuzz until libFuzzer's arguments say to stop, or an input fails, guided by what these packages run."""
    atheris = importlib.import_module("atheris")
    for function in functions(packages):
        atheris.instrument_func(function)

    def changed(content: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(content, max_size))
        return mutant(content, rng)[:max_size]

    with tempfile.TemporaryDirectory() as folder:
        atheris.Setup(sys.argv, lambda content: meet_one(meet, Path(folder), content), custom_mutator=changed)
        atheris.Fuzz()


def functions(packages: tuple[str, ...]) -> Iterator[FunctionType]:
    """Functions and methods of modules that are loaded. To instrument on import would take all of weightscope."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(packages)]
    for module in modules:
        owned = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
        classes = [each for each in owned if isinstance(each, type)]
        for each in (*owned, *(method for kind in classes for method in vars(kind).values())):
            for attribute in ("__func__", "__wrapped__", "fget", "func"):  # of methods of classes, caches, properties
                each = getattr(each, attribute, None) or each
            if isinstance(each, FunctionType):
                yield each


def meet_one(meet: Meet, folder: Path, content: bytes) -> None:
    """Meet an input, and allow a CheckpointError of one printable line."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            meet(folder, content)
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 2500


def mutant(content: bytes, rng: random.Random) -> bytes:
    """An input with one of its files changed: a value if it is JSON, else bytes."""
    files = content.split(BETWEEN)
    place = rng.randrange(len(files))
    try:
        files[place] = json.dumps(mutated_value(json.loads(files[place]), rng)).encode()
    except (ValueError, RecursionError):
        files[place] = mutated_bytes(files[place], rng, rng.choice(files))
    return BETWEEN.join(files)


def corpus_file(name: str) -> Path:
    """The kept corpus of a harness, named as OSS-Fuzz looks for it."""
    return FOLDER / f"fuzz_{name}_seed_corpus.zip"


def corpus(name: str) -> list[bytes]:
    """The inputs of the kept corpus."""
    with zipfile.ZipFile(corpus_file(name)) as file:
        return [file.read(each) for each in file.namelist()]
