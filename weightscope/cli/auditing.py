"""The commands audit, compare and reference."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightscope.cli import options
from weightscope.cli.command import command, in_options
from weightscope.cli.terminal import (
    FAILED,
    end_with,
    folder_for,
    headline,
    is_quiet,
    print_json,
    print_tables,
    say_page,
    show,
    write_sarif,
    write_text,
)
from weightscope.core.errors import CheckpointError, counted

if TYPE_CHECKING:
    from weightscope.core.files import OutputFolder
    from weightscope.model.sources import Source


def _checked(
    context: click.Context, parameter: click.Parameter, limits: tuple[str, ...]
) -> tuple[str, ...]:
    """Check that --fail-on names a severity or a kind of finding before anything is read."""
    if limits:
        from weightscope.report.findings import checked_limits

        checked_limits(limits)
    return limits


fail_on_option = click.option(
    "--fail-on",
    multiple=True,
    callback=_checked,
    metavar="error|warning|note|KIND",
    shell_complete=options.complete_limit,
    help="Exit with status 3 if there is a finding of this severity or worse, or of this kind; "
    "may be repeated. Findings are about attention, norms, biases and embeddings; with --all about "
    "every tensor.",
)
ALL = "all"  # --tower all: every stack


@command(
    "Spectra of every head, and findings: what stands out.",
    [
        "weightscope audit embedded --out audit/",
        "weightscope audit model/ --out audit/ --layers 0-3 --resume",
        "weightscope audit model/ --out audit/ --all --fail-on error --quiet",
    ],
)
@options.with_source
@options.tokenizer
@options.page_folder
@click.option(
    "--layers", help="Layers to audit, such as 0-3 or 0,5,7-9; default: every attention layer."
)
@click.option(
    "--deltas",
    default="0,1",
    show_default=True,
    help="Distances i - j at which a rotary W_QK is measured.",
)
@options.number("--window", "Number of distances over which a rotary W_QK is averaged.", 64)
@options.number(
    "--directions", "Singular directions of each map to project onto the tokens.", least=0
)
@options.flag("--all", "Also read every tensor of the file, attention or not.", "all_tensors")
@options.flag(
    "--exact",
    "With --all: all singular values of matrices whose smaller side is above 2048 too; "
    "default: a sketch.",
)
@options.file_to_read(
    "--reference",
    "Reference to compare with (see `weightscope reference`); default: the one that ships with "
    "weightscope.",
)
@click.option(
    "--sinks",
    is_flag=True,
    default=None,
    help="Measure attention to the first token, however large the feed-forward networks on the way "
    "are; default: where they are local and at most 2 GB.",
)
@click.option(
    "--clip",
    type=click.FloatRange(0, min_open=True),
    help="Largest logit that QK-Clip allows, such as 100: heads.csv gets the smallest factor of "
    "each head's scores.",
)
@options.flag("--resume", "Continue an interrupted audit; keep a finished one.")
@fail_on_option
@click.option(
    "--baseline",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of an earlier audit: with --fail-on, only findings that are new or worse fail.",
)
@options.file_to_read(
    "--accept",
    "File of findings that were judged, which do not fail: rows copied from findings.csv, or "
    "findings.json.",
)
@options.sarif
@options.json
@options.device
@options.with_engine
def audit_command(
    named: Any,
    source: str,
    out: Path | None,
    layers: str | None,
    deltas: str,
    reference: Path | None,
    resume: bool,
    fail_on: tuple[str, ...],
    baseline: Path | None,
    accept: Path | None,
    sarif: Path | None,
    as_json: bool,
    engine: Any,
    **more: Any,
) -> None:
    """Measure the spectra of every head's W_QK and value-output map and report what stands out.

    SOURCE may be a text file (.txt) that lists one source per line: each is audited into its own
    folder within --out, with a summary of all. If one fails, it is reported and the rest continue.
    --tower all does the same for every stack of a checkpoint.

    With --fail-on, the exit status is 3 if a finding is that severe; the results are still written.
    Findings in --baseline or --accept stay in the results, are marked as known, and do not fail. Of
    a list, the baseline of each checkpoint is the folder of the same name within --baseline.
    """
    from weightscope.core.files import scratch_folder
    from weightscope.heads.audit.audit import AuditOptions
    from weightscope.heads.audit.batch import Job, audit_all
    from weightscope.model.sources import is_list, read_list

    if out is None and resume:
        raise click.UsageError("--resume continues what is in --out, which is missing")
    if baseline is not None and out is not None and baseline.resolve() == out.resolve():
        problem = "the audit would overwrite its own baseline"
        raise click.UsageError(f"--baseline and --out are one folder; {problem}")
    files = {"reference": reference, "baseline": baseline, "accept": accept}
    more |= {name: None if path is None else path.absolute() for name, path in files.items()}
    measured = AuditOptions(
        layers=None if layers is None else options.whole_numbers(layers, "--layers"),
        deltas=options.whole_numbers(deltas, "--deltas"),
        **more,
    )
    lines = read_list(Path(source)) if is_list(source) else [source]
    sources = [named(line) for line in lines]
    if is_list(source) or sources[0].tower == ALL:
        if out is None:
            raise click.UsageError("several audits need --out, a folder for all")
        named_stacks = _by_stack(sources)
        _audit_list(*named_stacks, out, measured, engine, resume, fail_on, sarif, as_json)
        return
    with nullcontext(out) if out else scratch_folder() as folder:
        job = Job(sources[0], folder, has_page=out is not None)
        (outcome,) = audit_all([job], measured, engine, resume, lambda job, line: _say(line))
    if outcome.error is not None:
        raise outcome.error
    if sarif is not None:
        write_sarif(sarif, outcome.result)
    if as_json:
        print_json(outcome.result)
    else:
        kept = "is up to date: an earlier run wrote it with the same weights and options"
        text = outcome.text or f"{job.out / 'report.html'} {kept}"
        show(text) if out is None else headline(text)
        say_page(out)
    _gate(_failures(outcome.findings_that_fail(fail_on), fail_on))


def _failures(findings: Sequence[dict[str, Any]], limits: Sequence[str]) -> str:
    """The findings that fail a gate, in one line; empty if none does."""
    from weightscope.core.errors import counted, printable

    if not findings:
        return ""
    first = findings[0]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    finding = f"{first['title']}: {first['text'].removesuffix('.')}{more}"
    return printable(f"{counted(len(findings), 'finding')} of {' or '.join(limits)}: {finding}")


def _gate(*problems: str) -> None:
    """Exit with one line and status 3 if there is a problem."""
    if problem := "; ".join(filter(None, problems)):
        _say(problem)
        sys.exit(FAILED)


def _say(line: str) -> None:
    """Print to stderr without breaking a progress bar."""
    from weightscope.core.progress import bar_class

    with bar_class().external_write_mode(sys.stderr):
        click.echo(f"weightscope: {in_options(line)}", err=True)


def _by_stack(sources: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The sources and the names of their folders; with --tower all, one for each stack."""
    from weightscope.core.errors import CheckpointError
    from weightscope.model.sources import folder_names

    named_stacks: list[tuple[Any, str]] = []
    names = folder_names([source.source for source in sources])
    for source, name in zip(sources, names, strict=True):
        try:
            stacks = source.of_stacks() if source.tower == ALL else {"": source}
        except CheckpointError:  # the summary reports it when it is opened again
            stacks = {"": source}
        before = name if len(sources) > 1 else ""
        for stack, opened in stacks.items():
            named_stacks.append((opened, "-".join(filter(None, (before, stack))) or name))
    return [source for source, _ in named_stacks], [name for _, name in named_stacks]


def _audit_list(
    sources: Sequence[Any],
    names: Sequence[str],
    out: Path,
    measured: Any,
    engine: Any,
    resume: bool,
    fail_on: tuple[str, ...],
    sarif: Path | None,
    as_json: bool,
) -> None:
    """Print one line per source as it ends; exit with status 2 if any failed."""
    from weightscope.checkpoint.provenance import Provenance
    from weightscope.core.errors import counted
    from weightscope.core.progress import bar_class
    from weightscope.heads.audit.batch import audit_list

    failed = 0
    stopped: list[str] = []
    results: list[dict[str, Any]] = []
    for outcome in audit_list(sources, out, measured, engine, resume, _say, names):
        name, row = outcome.job.out.name, outcome.summary
        if failures := _failures(outcome.findings_that_fail(fail_on), fail_on):
            stopped.append(f"{name}: {failures}")
        if as_json or sarif:
            result = outcome.result or Provenance().envelope(outcome.problem)
            summary = {key: value for key, value in result.items() if key != "heads"}
            about: dict[str, Any] = {"name": name, "source": outcome.job.source.given}
            about["error"] = outcome.problem or None
            results.append({**about, **summary, "folder": name})
        if row is None:
            failed += 1
            _say(f"{name}: {outcome.problem.removeprefix(f'{name}: ')}")
        elif not as_json:
            sizes = f"{counted(row['layers'], 'layer')} of {counted(row['heads'], 'head')}"
            with bar_class().external_write_mode():
                headline(f"{name}: {row['family']}, {sizes}, {counted(row['findings'], 'finding')}")
    results.sort(key=lambda result: names.index(result["folder"]))
    if sarif is not None:
        write_sarif(sarif, *results)
    if as_json:
        print_json(results)
    else:
        click.echo(out / "summary.html")
    if failed:
        sys.exit(2)
    if stopped:
        more = f"; and {len(stopped) - 1} more of {len(sources)} checkpoints"
        _gate(stopped[0] + (more if len(stopped) > 1 else ""))


@command(
    "How far every head moved between checkpoints.",
    [
        "weightscope compare base/ tuned/ --out moved/",
        "weightscope compare step-1/ step-2/ step-3/ --out run/",
        "weightscope compare base/ adapter/ --out moved/ --fail-on warning",
    ],
)
@click.argument("sources", nargs=-1, required=True, shell_complete=options.complete_source)
@options.page_folder
@options.family
@options.tower
@click.option(
    "--base", help="Base model of the LoRA adapters among SOURCES; default: the first checkpoint."
)
@options.families
@options.digest
@options.flag("--across-families", "Also compare heads of different families.")
@options.flag("--all", "Also compare every tensor of the files, attention or not.", "all_tensors")
@click.option(
    "--max-change",
    type=click.FloatRange(0),
    help="Exit with status 3 if W_QK, W_VO, a bias, a norm, an embedding or the unembedding "
    "changed by more than this fraction of its norm, or if the config decides another computation; "
    "with --all, any tensor.",
)
@fail_on_option
@options.sarif
@options.json
def compare_command(
    sources: tuple[str, ...],
    out: Path | None,
    base: str | None,
    across_families: bool,
    all_tensors: bool,
    max_change: float | None,
    fail_on: tuple[str, ...],
    sarif: Path | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Measure how every head moved from one checkpoint to the next, in the order given.

    With --max-change or --fail-on, the exit status is 3 if a limit is exceeded; the results are
    still written.
    """
    from weightscope.checkpoint.adapters.diffusion import is_adapter
    from weightscope.core.errors import printable
    from weightscope.model.sources import Source
    from weightscope.pairs.changes.settings import first_sentence
    from weightscope.pairs.compare.compare import Comparison, compare

    if len(sources) < 2:
        raise click.UsageError("compare needs at least two checkpoints")
    into = folder_for(Comparison, out)
    adapters = {source for source in sources if is_adapter(source)}
    if base is not None and not adapters:
        raise click.UsageError("--base is for LoRA adapters; none of these sources is one")
    base = base or (sources[0] if sources[0] not in adapters else None)
    bases = dict.fromkeys(adapters, base)
    named = [Source(source, base=bases.get(source), **how) for source in sources]
    try:
        models = [options.opened_among(source) for source in named]
    except CheckpointError:
        needs_heads = as_json or sarif or fail_on or max_change is not None
        if all_tensors and not needs_heads and _tensors_alone(named, into):
            return
        raise
    choices: dict[str, Any] = {"across_families": across_families, "all_tensors": all_tensors}
    with into as folder:
        comparison = compare(*models, labels=sources, **choices)
        if folder is not None:
            comparison.write_files(folder)
    if sarif is not None:
        write_sarif(sarif, comparison.as_json())
    end_with(comparison, out, as_json)
    what, farthest = comparison.farthest
    moved = ""
    if max_change is not None and not farthest <= max_change:  # also True for NaN
        largest = f"the largest change, of {printable(what)}, is {farthest:.3g}"
        moved = f"{largest}, over --max-change {max_change:g}"
        if farthest != farthest:  # NaN
            moved = f"{printable(what)} contains NaN or infinity; --max-change {max_change:g} fails"
    config = first_sentence(comparison.settings).removesuffix(".") if max_change is not None else ""
    config = f"{config}; --max-change {max_change:g} fails" if config else ""
    failing = comparison.findings.that_fail(fail_on)
    _gate(config, moved, _failures(failing.as_json(), fail_on))


def _tensors_alone(
    named: Sequence["Source"], into: AbstractContextManager["OutputFolder | None"]
) -> bool:
    """Compare the tensors of the first and the last checkpoint if heads of one are not read.

    Return True if that is so. Gates, --sarif and --json are about heads: with them such checkpoints
    are refused.
    """
    from weightscope.core.errors import printable
    from weightscope.model.model import Model
    from weightscope.pairs.changes.all_tensors import compare_tensors

    a, b = (source.open_tensors() for source in (named[0], named[-1]))
    refusals = dict.fromkeys(opened.refusal for opened in (a, b) if not isinstance(opened, Model))
    if not refusals:
        return False
    with into as folder:
        changes = compare_tensors(a, b)
        if folder is not None:
            changes.write(folder)
    reasons = [printable(f"Heads are not compared: {refusal}") for refusal in refusals]
    show(changes.lead, *reasons, changes.moved_most(10))
    return True


@command(
    "How measures are distributed over checkpoints, for audit.",
    ["weightscope reference checkpoints.txt --out reference.npz"],
)
@click.argument("listed", metavar="LIST", type=options.FILE)
@options.flag(
    "--all", "Record every matrix too, for the percentiles of audit --all.", "all_tensors"
)
@options.file_to_write(
    "--out",
    "-o",
    required=True,
    help="REF.npz to write; REF.csv, written next to it, lists the checkpoints it is made from.",
)
@options.json
def reference_command(listed: Path, all_tensors: bool, out: Path, as_json: bool) -> None:
    """Record how each measure is distributed over the heads of the checkpoints in LIST, for `audit
    --reference`.

    LIST is a text file with one source per line, or a .csv with the column source and, optionally,
    name, licence, origin and sha256.
    """
    from weightscope.heads.audit.batch import make_reference

    reference = make_reference(listed, all_tensors)
    reference.save(out)
    write_text(reference.table.csv(), out.with_suffix(".csv"))
    if as_json:
        lead = f"{out}: {counted(len(reference.table), 'checkpoint')}."
        print_tables(lead, (), audited=reference.table)
        return
    if not is_quiet():
        show(reference.table.select("name", "family", "layers", "heads", "d_model", "licence"))
    click.echo(out)
