"""Completion in a shell: the script that it sources, and what SOURCE, families and kinds of findings may be."""

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the script by which SHELL completes commands, options, checkpoints, families and kinds of findings.

    Add it to what the shell reads when it starts, as below; it takes effect in the next one.
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows the three"
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "weightscope", "_WEIGHTSCOPE_COMPLETE").source())


def sources(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """A folder or file, or the checkpoint that comes with weightscope."""
    own = [CompletionItem("embedded")] if typed and "embedded".startswith(typed) else []
    return [*own, CompletionItem(typed, type="file")]


def families(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of the rows by which checkpoints are read."""
    from weightscope.families.own_rows import known_rows

    return [CompletionItem(name) for name in sorted({row.name for row in known_rows()}) if name.startswith(typed)]


def towers(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Stacks by their usual names."""
    names = ("text", "vision", "audio", "encoder", "decoder", "cross", "all")
    return [CompletionItem(name) for name in names if name.startswith(typed)]


def limits(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Severities and kinds of findings."""
    from weightscope.audits.kinds import KINDS, SEVERITIES

    return [CompletionItem(name) for name in (*SEVERITIES, *KINDS) if name.startswith(typed)]
