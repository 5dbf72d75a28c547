"""Audits for tests to whom it is no matter how figures look."""

from pathlib import Path

from click.testing import Result

from tests.support.commands import run
from tests.support.figures import undrawn
from weightscope.core.files import HIDDEN


def audit_of(source: object, out: Path, *options: str) -> Result:
    """`weightscope audit` in this process, its figures undrawn."""
    with undrawn():
        return run("audit", source, "--out", out, *options)


def names_in(folder: Path) -> list[str]:
    """What a person sees of a folder of results."""
    return sorted(path.name for path in folder.iterdir() if path.name != HIDDEN)
