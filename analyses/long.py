"""Run all that takes hours, in pieces: `make long BOOKS=folder GPT2=folder ...`, or `python -m analyses.long --list`.

The census (every model type, planted deed and converter), properties of verdicts on every source of tests, every
drawing whose code has changed since it was kept, the oldest dependencies, and the other versions of Python at hand.
Killed and begun again it goes on where it was: a piece is done if it ended under the same code, and of the census each
test. `out/long/pieces.csv` has the time of each.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click

from analyses.figures import DRAWINGS, DRAWN, ROOT, is_stale
from analyses.made import CODE, RECORD, by_folder, digest_of, read_rows, record_in
from weightscope.core.tables import Table, column

OUT = ROOT / "out" / "long"
ENDED = OUT / "pieces.csv"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CASES = "4"  # of each source and group
ALL_PASSED = (0, 5)  # pytest's status; 5 without a test left
TESTS = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]


class Piece(NamedTuple):
    """A part of the whole, by its command."""

    name: str
    command: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()  # of the environment
    without: str = ""  # why it cannot run here


class Done(NamedTuple):
    """The end of a piece."""

    piece: str = column("Name.")
    code: str = column("Digest of all code.")
    date: str = column("The day on which it ended.")
    seconds: str = column("Its time.")
    status: str = column("Exit status of its command.")


def pieces(options: list[str], code: str) -> Iterator[Piece]:
    """All pieces, tests first."""
    passed = OUT / f"passed-{code}.txt"
    yield Piece("census", (*TESTS, "-p", "tests.support.resumed", "-m", "census"), (("RESUMED", str(passed)),))
    seed = str(int(code[:4], 16))  # other cases for other code
    yield Piece("properties", (sys.executable, "-m", "tests.properties", CASES, seed))
    given = {option.removeprefix("--"): Path() for option in options[::2]}
    for drawing in DRAWINGS:
        folder = DRAWN / drawing.folder
        is_drawn = (folder / RECORD).exists() and not record_in(folder).is_stale
        if is_stale(drawing.folder) and not is_drawn:
            command = (sys.executable, "-m", "analyses.figures", "--only", drawing.folder, *options)
            yield Piece(f"figures/{drawing.folder}", command, (), " and ".join(drawing.missing(given)))
    yield Piece("oldest dependencies", ("make", "oldest"))
    for version in PYTHONS:
        name = f"python{version}"
        if sys.version_info[:2] != tuple(map(int, version.split("."))):
            command = ("make", "test", f"VENV=out/long/{name}", f"PYTHON={name}")
            yield Piece(f"Python {version}", command, (), "" if shutil.which(name) else f"{name} on the path")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--list", "listed", is_flag=True, help="Run nothing; say what is left.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(listed: bool, options: tuple[str, ...]) -> None:
    """Run every piece that has not ended well under this code; OPTIONS go to analyses.figures."""
    files = [path for top in CODE for path in (ROOT / top).rglob("*.py")]
    code, ended = digest_of(by_folder(files)), read_rows(Done, ENDED)
    failed = False
    for piece in pieces([*options], code):
        last = ended.get(piece.name)
        if last and last.code == code and int(last.status) in ALL_PASSED:
            click.echo(f"{piece.name}: done on {last.date} in {last.seconds} s")
        elif piece.without or listed:
            click.echo(f"{piece.name}: left{f', it needs {piece.without}' * bool(piece.without)}")
        else:
            began = time.monotonic()
            click.echo(f"{piece.name}: begun")
            status = subprocess.run(piece.command, cwd=ROOT, env=os.environ | dict(piece.settings)).returncode
            seconds = f"{time.monotonic() - began:.0f}"
            ended[piece.name] = Done(piece.name, code, f"{datetime.now(UTC):%Y-%m-%d}", seconds, str(status))
            OUT.mkdir(parents=True, exist_ok=True)
            Table.of(Done, ended.values()).to_csv(ENDED)
            has_passed = status in ALL_PASSED
            click.echo(f"{piece.name}: {'passed' if has_passed else 'FAILED'} in {seconds} s")
            failed |= not has_passed
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
