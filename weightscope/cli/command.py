"""The commands' common ground: a line in the list, examples, signals, errors in one line."""

import errno
import logging
import os
import re
import shlex
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, NoReturn

import click

import weightscope
from weightscope.checkpoint.provenance import COMMAND, now
from weightscope.cli.terminal import quiet_option
from weightscope.core.errors import CheckpointError, one_line, printable
from weightscope.core.files import remove_unfinished
from weightscope.core.progress import progress_shown

# Signals: Ctrl-C, SIGTERM, or a closed terminal

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
NUMBERS = [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]
GRACE = 0.7  # seconds for cleaning up, after which the process exits wherever it is


class Ended(KeyboardInterrupt):
    """A signal asks the process to end; raised in the main thread, as Ctrl-C's is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals(advice: Callable[[], str]) -> Iterator[None]:
    """Turn a signal into one line and `SystemExit` with status 128 plus the signal's number.

    The block cleans up on the way out. A computing thread cannot be interrupted, nor the main
    thread inside a long library call, so after `GRACE` seconds the process exits wherever it is.
    """
    unsaid = Lock()

    def say(number: int) -> None:
        if unsaid.acquire(blocking=False):  # only the first caller prints
            by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            with suppress(OSError, ValueError, AttributeError):  # stderr is closed
                print(f"weightscope: interrupted{by}{advice()}", file=sys.stderr, flush=True)

    try:
        with _signals_raise(say) if current_thread() is main_thread() else nullcontext():
            yield
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        say(number)
        sys.exit(128 + number)


@contextmanager
def _signals_raise(say: Callable[[int], None]) -> Iterator[None]:
    """Raise `Ended` at the first signal, and start a thread that ends the process if that does not.

    A signal that the parent process set to be ignored, as nohup does, stays ignored.
    """

    def raise_once(number: int, frame: object) -> NoReturn:
        for ignored in handled:
            signal.signal(ignored, signal.SIG_IGN)
        raise Ended(number)

    not_ours = (signal.SIG_IGN, None)
    handled = [number for number in NUMBERS if signal.getsignal(number) not in not_ours]
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    Thread(target=_end_after_grace, args=(receiver, say), name="signals", daemon=True).start()
    before: dict[int, Any] = {number: signal.signal(number, raise_once) for number in handled}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            if signal.getsignal(number) is raise_once:  # else the process is ending
                signal.signal(number, handler)
        sender.close()


def ignore_signals() -> None:
    """Ignore signals from now on: a command has ended, and only the interpreter has to exit."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _end_after_grace(receiver: socket.socket, say: Callable[[int], None]) -> None:
    """Wait for a signal, which the wake-up socket reports; exit after `GRACE` seconds.

    Child processes end with this one; see `end_with_parent`.
    """
    with receiver:
        while received := receiver.recv(1):
            if received[0] in NUMBERS:
                time.sleep(GRACE)
                say(received[0])
                remove_unfinished()
                os._exit(128 + received[0])


# Errors: one line on stderr and a status.

# Former names of options.
RENAMED = {
    "--longest": "--length",
    "--sequences": "--inputs",
    "--sentences": "--inputs",
    "--sampled": "--sample",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing open files
ARGUMENT = re.compile(r"`(\w+)(?:='([^'`]+)')?`")


def in_options(message: str) -> str:
    """Rewrite arguments in a message as options: `tower='text'` becomes --tower text."""

    def option(match: re.Match[str]) -> str:
        value = f" {match[2]}" if match[2] else ""
        return f"--{match[1].replace('_', '-')}{value}"

    return ARGUMENT.sub(option, message)


@contextmanager
def libraries_silent() -> Iterator[None]:
    """Keep warnings of NumPy, Matplotlib and others off the terminal, unless Python runs with -W.

    Broken weights are reported by findings and by the command itself.
    """
    root, nowhere = logging.getLogger(), logging.NullHandler()
    root.addHandler(nowhere)  # without a handler, logging prints warnings itself
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(nowhere)


def refusal(error: OSError) -> str:
    """Describe an OSError; drop what is still buffered for stdout if its disk is full."""
    if error.filename is not None or error.errno not in FULL:
        return one_line(error)
    # Otherwise Python would try to flush the buffer again at exit.
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"cannot write to standard output ({error.strerror})"


def spell_out_unprintable() -> None:
    """Have stdout and stderr write \\u03c3 where their encoding (latin-1, cp1252) has no σ."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or not a stream of text
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def mixed_installation() -> str:
    """Advice if PyPI's other project of this name was installed into our folder; else empty."""
    packages = Path(__file__).parents[2]
    if next(packages.glob("weightscope-[0-9]*.dist-info"), None) is None:
        return ""
    again = "remove both packages with pip, then install weightscope-attention"
    return f"files of another project named weightscope are mixed into this installation; {again}"


class EndsInOneLine(click.Command):
    """A command that ends every error and interruption with one line."""

    def main(self, args: Any = None, *more: Any, **kwargs: Any) -> Any:
        spell_out_unprintable()
        if mixed := mixed_installation():
            click.echo(f"{self.name}: {mixed}", err=True)
        typed = sys.argv[1:] if args is None else [args] if isinstance(args, str) else [*args]
        before = COMMAND.set(printable(shlex.join([str(self.name), *typed])))
        try:
            now()  # refuses a date that is none before anything is computed
            with progress_shown(), libraries_silent():
                return super().main(args, *more, **kwargs)
        except CheckpointError as error:
            problem = in_options(str(error))
        except MemoryError as error:  # messages of NumPy and CuPy say how much was asked for
            reason = str(error).strip() or "the system refused an allocation"
            problem = f"not enough memory: {reason.splitlines()[0]}"
        except OSError as error:
            problem = refusal(error)
        finally:
            COMMAND.reset(before)
        click.echo(f"{self.name}: {problem}", err=True)
        sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        def advice() -> str:
            chosen: click.Command = getattr(self, "commands", {}).get(ctx.invoked_subcommand, self)
            resumes = any(option.name == "resume" for option in chosen.params)
            return "; run the same command with --resume to continue" if resumes else ""

        with ended_by_signals(advice):
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as error:
                if error.option_name not in RENAMED:
                    raise
                meant = f"{error.message} Did you mean '{RENAMED[error.option_name]}'?"
                raise click.UsageError(meant, error.ctx) from None


# Groups of commands in the help of `weightscope`.
GROUPS = {
    "Look at one checkpoint": (
        "inspect", "id", "card", "audit", "circuits", "neighbours", "detok", "bigrams", "positions",
        "rank",
    ),
    "Compare checkpoints": ("same", "compare", "learned", "lineage", "verify"),
    "Many checkpoints": ("atlas", "fingerprint", "reference"),
    "Run the model (PyTorch)": ("norms", "outliers", "sinks"),
    "Own architectures": ("families", "adopt", "draft"),
    "Files and shell": ("convert", "completion"),
}  # fmt: skip

# Names that people try first, and what to type instead.
SYNONYMS = {
    "check": "weightscope audit SOURCE, or weightscope inspect SOURCE --check",
    "compat": "weightscope same ORIGINAL COPY",
    "diff": "weightscope compare BASE TUNED, or weightscope same ORIGINAL COPY",
    "equal": "weightscope same ORIGINAL COPY",
    "heads": "weightscope audit SOURCE, or weightscope circuits SOURCE for what each head does",
    "info": "weightscope inspect SOURCE",
    "list": "weightscope inspect SOURCE --tensors",
    "scan": "weightscope audit SOURCE",
    "show": "weightscope inspect SOURCE",
    "spectra": "weightscope audit SOURCE",
    "svd": "weightscope audit SOURCE",
    "tensors": "weightscope inspect SOURCE --tensors",
    "validate": "weightscope audit SOURCE, or weightscope same ORIGINAL COPY",
}


WITH_H: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class Commands(EndsInOneLine, click.Group):
    """The commands in groups; adds --quiet and -h to each."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.context_settings.update(WITH_H)  # click keeps the help option of a command's first call
        super().add_command(quiet_option(cmd), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each group, then those that are in none."""
        grouped = {name for names in GROUPS.values() for name in names}
        width = max(map(len, self.commands), default=0)
        for title, names in {**GROUPS, "More": sorted({*self.commands} - grouped)}.items():
            commands = [self.commands[name] for name in names if name in self.commands]
            if commands:
                with formatter.section(title):
                    formatter.write_dl(
                        [(f"{each.name:{width}}", each.short_help or "") for each in commands]
                    )

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if meant := SYNONYMS.get(args[0]) if args[0] not in self.commands else None:
            ctx.fail(f"No such command '{args[0]}'. Did you mean: {meant}")
        return super().resolve_command(ctx, args)


@click.group("weightscope", cls=Commands, context_settings=WITH_H)
@click.version_option(weightscope.__version__, prog_name="weightscope")
def main() -> None:
    """Look inside a transformer checkpoint, and compare checkpoints, from their weights alone.

    SOURCE is a folder, a .safetensors or .gguf file, or a Hub id with optional @revision;
    `embedded` is a small GPT-2 that ships with weightscope.

    \b
    I want to ...
      see what a checkpoint is             weightscope inspect SOURCE
      see what stands out in its heads     weightscope audit SOURCE
      know what each head does             weightscope circuits SOURCE
      see which tokens its heads join      weightscope neighbours SOURCE " ship"
      know if a copy is the same model     weightscope same ORIGINAL COPY
      see how far training moved it        weightscope compare BASE TUNED
      see what was trained into it         weightscope learned BASE TUNED
      know where it comes from             weightscope lineage SUSPECT BASE
    """


def command(summary: str, examples: Sequence[str]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command of `weightscope`, called as the function is without `_command`.

    It gets its line in the list of commands and the examples that end its help.
    """

    def register(function: Callable[..., Any]) -> click.Command:
        made = click.command(short_help=summary, epilog=epilog_of(examples))(function)
        main.add_command(made)
        return made

    return register


def epilog_of(examples: Iterable[str]) -> str:
    """The examples as the end of a help text."""
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
