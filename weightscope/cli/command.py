"""How a command ends when it cannot do what it was asked, or no longer should: one line on stderr and a status."""

import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from weightscope.cli.examples import with_examples
from weightscope.cli.signals import ended_by_signals
from weightscope.cli.terminal import quiet_option
from weightscope.errors import CheckpointError, printable
from weightscope.progress import progress_shown

# Names of options that were others once: one meaning has one name over all commands.
RENAMED = {"--longest": "--length", "--sequences": "--inputs", "--sentences": "--inputs", "--sampled": "--sample"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of files that are open
ARGUMENT = re.compile(r"`(\w+)(?:='([^'`]+)')?`")


def in_options(message: str) -> str:
    """What the library says of an argument as a command says it: `tower='text'` is --tower text."""
    return ARGUMENT.sub(lambda m: f"--{m[1].replace('_', '-')}" + (f" {m[2]}" if m[2] else ""), message)


@contextmanager
def libraries_silent() -> Iterator[None]:
    """Nothing that NumPy, Matplotlib and the like warn of reaches the terminal, unless Python was told to (-W).

    What a person should know of broken weights, findings and lines of the command itself say.
    """
    root, nowhere = logging.getLogger(), logging.NullHandler()
    root.addHandler(nowhere)  # where nobody listens, logging prints warnings itself
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(nowhere)


def refusal(error: OSError) -> str:
    """What the system would not do: print, where the disk behind the output is full, or what a library asked of it."""
    if error.filename is not None or error.errno not in FULL:
        return printable(" ".join(str(error).split()))
    with suppress(OSError, ValueError, AttributeError):  # what is left in the buffer would be written again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"what it prints cannot be written ({error.strerror})"


class EndsInOneLine(click.Command):
    """A command that says in one line what is wrong with its input, what ran out, or that it was interrupted."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with progress_shown(), libraries_silent():
                return super().main(*args, **kwargs)
        except CheckpointError as error:
            problem = in_options(str(error))
        except MemoryError as error:  # NumPy's and CuPy's say how much was asked for
            problem = f"not enough memory: {(str(error).strip() or 'the system gave no more').splitlines()[0]}"
        except OSError as error:
            problem = refusal(error)
        click.echo(f"{self.name}: {problem}", err=True)
        sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        def advice() -> str:
            chosen: click.Command = getattr(self, "commands", {}).get(ctx.invoked_subcommand, self)
            resumes = any(option.name == "resume" for option in chosen.params)
            return "; the same command with --resume goes on" if resumes else ""

        with ended_by_signals(advice):
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as error:
                if error.option_name not in RENAMED:
                    raise
                meant = f"{error.message} Did you mean '{RENAMED[error.option_name]}'?"
                raise click.UsageError(meant, error.ctx) from None


class Commands(EndsInOneLine, click.Group):
    """Several of them, each with --quiet, with a line that says what it gives and costs, and with examples."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        super().add_command(with_examples(quiet_option(cmd)), name)
