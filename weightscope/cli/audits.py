"""All heads of a checkpoint, of many, and of one against another: audit, compare."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from weightscope.cli import completing
from weightscope.cli.command import in_options
from weightscope.cli.options import (
    device_option,
    families_option,
    opened_model,
    out_option,
    tokenizer_option,
    whole_numbers,
    with_engine,
    with_source,
    writable,
)
from weightscope.cli.terminal import headline, is_quiet, show


def _checked(context: click.Context, parameter: click.Parameter, limits: tuple[str, ...]) -> tuple[str, ...]:
    """What a gate fails on, once it is known that there are such findings, before anything is read."""
    if limits:
        from weightscope.audits.findings import checked_limits

        checked_limits(limits)
    return limits


fail_on_option = click.option(
    "--fail-on", multiple=True, callback=_checked, metavar="error|warning|note|KIND",
    shell_complete=completing.limits,
    help="End with status 3 where a finding is as grave as this, or of this kind; may be repeated.",
)  # fmt: skip
ALL = "all"  # as --tower: every stack
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")


@click.command("audit")
@with_source
@tokenizer_option
@out_option
@click.option("--layers", help="Only these, as in 0-3 or 0,5,7-9; all that have attention by default.")
@click.option("--deltas", default="0,1", show_default=True, help="Distances i - j at which a rotated W_QK is measured.")
@click.option(
    "--window", type=click.IntRange(1), default=64, show_default=True,
    help="Distances over which a rotated W_QK is averaged.",
)  # fmt: skip
@click.option("--directions", type=click.IntRange(0), help="Singular directions a map to read through the tokens.")
@click.option("--all", "all_tensors", is_flag=True, help="Read every tensor of the file too, attention or not.")
@click.option(
    "--reference", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What numbers are compared with (see `weightscope reference`); by default what comes with the package.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with an audit that was interrupted; keep one that is finished.")
@fail_on_option
@json_option
@device_option
@with_engine
def audit_command(
    named: Any,
    source: str,
    out: Path,
    layers: str | None,
    deltas: str,
    window: int,
    directions: int | None,
    all_tensors: bool,
    reference: Path | None,
    resume: bool,
    fail_on: tuple[str, ...],
    as_json: bool,
    device: str,
    engine: Any,
) -> None:
    """Spectra of every head's W_QK and value-output map, what stands out in them, as tables and a page.

    SOURCE may be a text file (.txt) with a source a line: each is audited into a folder of its own within --out, beside
    a summary of all. One that fails is reported, and the others finish. --tower all does the same with every stack of a
    checkpoint.

    With --fail-on the status is 3 where a finding is as grave as that; the results are written all the same.
    """
    from weightscope.audits.audit import AuditOptions
    from weightscope.audits.many import Job, audit_all
    from weightscope.sources import is_list, read_list

    chosen = None if layers is None else whole_numbers(layers, "--layers")
    compared = None if reference is None else str(reference.absolute())
    options = AuditOptions(chosen, whole_numbers(deltas, "--deltas"), window, directions, device, all_tensors, compared)
    named_sources = [named(line) for line in read_list(Path(source))] if is_list(source) else [named(source)]
    if is_list(source) or named_sources[0].tower == ALL:
        _audit_list(*_by_stack(named_sources), out, options, engine, resume, fail_on, as_json)
        return
    (outcome,) = audit_all([Job(named_sources[0], out)], options, engine, resume, lambda job, line: _say(line))
    if outcome.error is not None:
        raise outcome.error
    if as_json:
        _print_json(outcome.result)
    else:
        page = out / "report.html"
        headline(outcome.text or f"{page} is kept: an earlier run made it with these weights and options")
        click.echo(page)
    _gate(_told(outcome.findings_that_fail(fail_on), fail_on))


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, allow_nan=False))


def _told(findings: Sequence[dict[str, Any]], limits: Sequence[str]) -> str:
    """What a gate does not let through, in a line; nothing where it lets all through."""
    from weightscope.errors import counted, printable

    if not findings:
        return ""
    first = findings[0]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    said = f"{first['title']}: {first['text'].removesuffix('.')}{more}"
    return printable(f"{counted(len(findings), 'finding')} of {' or '.join(limits)}: {said}")


def _gate(*problems: str) -> None:
    """End with a line and status 3 where there is a problem; what was found is written by then."""
    if told := "; ".join(filter(None, problems)):
        _say(told)
        sys.exit(3)


def _say(line: str) -> None:
    """On stderr, between bars."""
    from tqdm import tqdm

    with tqdm.external_write_mode(sys.stderr):
        click.echo(f"weightscope: {in_options(line)}", err=True)


def _by_stack(sources: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The sources and their folders' names; with --tower all each of a source's stacks for it."""
    from weightscope.errors import CheckpointError
    from weightscope.sources import folder_names

    found: list[tuple[Any, str]] = []
    for source, name in zip(sources, folder_names([source.source for source in sources]), strict=True):
        try:
            stacks = source.of_stacks() if source.tower == ALL else {"": source}
        except CheckpointError:  # opening it again says so in the summary
            stacks = {"": source}
        before = name if len(sources) > 1 else ""
        found += [(one, "-".join(filter(None, (before, stack))) or name) for stack, one in stacks.items()]
    return [one for one, _ in found], [name for _, name in found]


def _audit_list(
    sources: Sequence[Any],
    names: Sequence[str],
    out: Path,
    options: Any,
    engine: Any,
    resume: bool,
    fail_on: tuple[str, ...],
    as_json: bool,
) -> None:
    """A line for each as it ends; status 2 if any failed."""
    from tqdm import tqdm

    from weightscope.audits.many import audit_list
    from weightscope.errors import counted

    failed = 0
    stopped: list[str] = []
    results: list[dict[str, Any]] = []
    for outcome in audit_list(sources, out, options, engine, resume, _say, names):
        name, row = outcome.job.out.name, outcome.summary
        if told := _told(outcome.findings_that_fail(fail_on), fail_on):
            stopped.append(f"{name}: {told}")
        if as_json:
            own = {key: value for key, value in (outcome.result or {}).items() if key != "heads"}  # in its own folder
            about = {"name": name, "source": outcome.job.source.source, "error": outcome.problem or None}
            results.append({**about, **own, "folder": name})
        if row is None:
            failed += 1
            _say(outcome.problem if outcome.problem.startswith(f"{name}: ") else f"{name}: {outcome.problem}")
        elif not as_json:
            sizes = f"{counted(row['layers'], 'layer')} of {counted(row['heads'], 'head')}"
            with tqdm.external_write_mode():
                headline(f"{name}: {row['family']}, {sizes}, {counted(row['findings'], 'finding')}")
    if as_json:
        _print_json(sorted(results, key=lambda result: names.index(result["folder"])))
    else:
        click.echo(out / "summary.html")
    if failed:
        sys.exit(2)
    if stopped:
        more = f"; and {len(stopped) - 1} more of {len(sources)} checkpoints" if len(stopped) > 1 else ""
        _gate(f"{stopped[0]}{more}")


@click.command("compare")
@click.argument("sources", nargs=-1, required=True, shell_complete=completing.sources)
@out_option
@click.option(
    "--family",
    shell_complete=completing.families,
    help="Read the checkpoints as this family, whatever their configs say.",
)
@click.option(
    "--tower",
    shell_complete=completing.towers,
    help="Which stack, where there are several: text, vision, encoder, decoder, cross ...",
)
@click.option("--base", help="What LoRA adapters among them change; the first of the checkpoints if not given.")
@families_option
@click.option("--across-families", is_flag=True, help="Compare heads of different families too.")
@click.option("--all", "all_tensors", is_flag=True, help="Compare every tensor of the files too, attention or not.")
@click.option(
    "--max-change", type=click.FloatRange(0),
    help="End with status 3 where W_QK or W_VO of a head changed by more than this share of itself.",
)  # fmt: skip
@fail_on_option
@json_option
def compare_command(
    sources: tuple[str, ...],
    out: Path,
    family: str | None,
    tower: str | None,
    base: str | None,
    families: str | None,
    across_families: bool,
    all_tensors: bool,
    max_change: float | None,
    fail_on: tuple[str, ...],
    as_json: bool,
) -> None:
    """How every head moves from A to B, or along a run of checkpoints in the order given.

    With --max-change or --fail-on the status is 3 where they do not hold; the results are written all the same.
    """
    from weightscope.audits.compare import RESULTS, compare
    from weightscope.checkpoint.adapter import adapter_in
    from weightscope.folder import OutputFolder
    from weightscope.sources import Source

    if len(sources) < 2:
        raise click.UsageError("compare needs two checkpoints or more")
    folder = OutputFolder(out, names=RESULTS)
    folder.refuse_foreign()
    adapters = {source for source in sources if adapter_in(source)}
    if base is not None and not adapters:
        raise click.UsageError("--base goes with a LoRA adapter; none of these is one")
    base = base or (sources[0] if sources[0] not in adapters else None)
    of_adapters = dict.fromkeys(adapters, base)
    models = [opened_model(Source(one, None, family, tower, None, of_adapters.get(one), families)) for one in sources]
    with folder:
        comparison = compare(*models, labels=sources, across_families=across_families, all_tensors=all_tensors)
        comparison.write_files(folder)
    if as_json:
        _print_json(comparison.as_json())
    else:
        if not is_quiet():
            show(*comparison.printed())
        click.echo(out / "report.html")
    farthest = comparison.largest_change()
    moved = ""
    if max_change is not None and not farthest <= max_change:  # NaN is no change that is known to be small
        moved = f"the largest change of a head is {farthest:.3g}, over --max-change {max_change:g}"
        if farthest != farthest:
            moved = f"a head is not finite, so that no change of it is within --max-change {max_change:g}"
    failing = comparison.findings.that_fail(fail_on)
    _gate(moved, _told(failing.as_json(), fail_on))


@click.command("reference")
@click.argument("listed", metavar="LIST", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), required=True, callback=writable,
    help="REF.npz to write; REF.csv, which says of what it is made, goes beside it.",
)  # fmt: skip
def reference_command(listed: Path, out: Path) -> None:
    """How measures are distributed over the heads of the checkpoints in LIST, for `audit --reference`.

    LIST is a text file with a source a line, or a .csv with the column source and, as far as known, name, licence,
    origin and sha256.
    """
    from weightscope.audits.reference_list import make_reference
    from weightscope.writing import new_file

    reference = make_reference(listed)
    reference.save(out)
    with new_file(out.with_suffix(".csv")) as file:
        file.write(reference.table.csv().encode())
    if not is_quiet():
        show(reference.table.select("name", "family", "layers", "heads", "d_model", "licence"))
    click.echo(out)
