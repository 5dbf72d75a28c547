"""Command lines of README and docs/: complete ones in blocks of code, and parts that a sentence names."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click

from weightscope.cli import main

ROOT = Path(__file__).parents[2]
HELP = ROOT / "docs" / "commands.md"  # its examples come from --help
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").glob("*.md")} - {HELP})]
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^(?: {4}.*\n)+", re.MULTILINE)
PROMPT = re.compile(r"^\s*(?:\$ |- run: |run: )?weightscope (?=[a-z])(.*)$", re.MULTILINE)
IN_A_SENTENCE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


class Line(NamedTuple):
    """A command line, its page, and whether a person can type it as it is there."""

    page: str
    words: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def words_of(line: str) -> tuple[str, ...]:
    """What a shell hands to the command: without comment, pipe and redirection, and without what is left to choice."""
    words = shlex.split(re.sub(r"\[.*?\]", "", line).replace("...", ""), comments=True)
    ends = [words.index(word) for word in ("|", ">", ">>") if word in words]
    return tuple(word.lstrip("$") for word in words[: min(ends, default=None)])


def lines_of(page: Path) -> list[Line]:
    """All command lines of a page."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    blocks = [block[1] for block in FENCED.finditer(text)]
    prose = FENCED.sub("", text)
    blocks += INDENTED.findall(prose)
    lines = [Line(name, words_of(line), True) for block in blocks for line in PROMPT.findall(block)]
    for code in IN_A_SENTENCE.findall(INDENTED.sub("", prose)):
        begun = code.removeprefix("weightscope ")
        named = begun != code or (" --" in code and code.split()[0] in main.commands)
        if named and re.match("[a-z]", begun):
            lines.append(Line(name, words_of(begun.replace("\n", " ")), False))
    return lines


def check(line: Line) -> None:
    """Hold a line to the command line's own parser; nothing is read and nothing is run.

    Raises
    ------
    click.UsageError
        There is no such command, option, choice or number, or something is missing of a complete line.
    """
    name, *words = line.words
    _, command, _ = main.resolve_command(click.Context(main), [name])
    assert command is not None
    context = click.Context(command, info_name=name, **command.context_settings)
    if not line.complete and words and words[-1].startswith("-") and not _is_flag(command, words[-1]):
        words.append("1")  # a sentence names the option alone
    given, left, _ = command.make_parser(context).parse_args(words)
    if left:
        raise click.UsageError(f"too much: {shlex.join(left)}")
    for parameter in command.params:
        if parameter.name not in given or parameter.value_is_missing(given[parameter.name]):
            if line.complete and parameter.required:
                raise click.MissingParameter(ctx=context, param=parameter)
        elif not isinstance(parameter.type, click.Path):  # whether a file is there is not asked
            parameter.type_cast_value(context, given[parameter.name])


def _is_flag(command: click.Command, name: str) -> bool:
    return any(isinstance(option, click.Option) and option.is_flag and name in option.opts for option in command.params)
