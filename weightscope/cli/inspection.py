"""The commands inspect, families, adopt and draft: what a checkpoint is, and how to read it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from weightscope.checkpoint.provenance import source_of
from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import (
    Listed,
    headline,
    is_quiet,
    print_json,
    print_tables,
    show,
    write_text,
)
from weightscope.core.errors import CheckpointError, counted, printable, printable_lines, sized

if TYPE_CHECKING:
    from weightscope.checkpoint.checkpoint import Checkpoint
    from weightscope.core.tables import Table
    from weightscope.model.model import Model
    from weightscope.model.sources import Source


@command(
    "List the supported architectures.",
    ["weightscope families", "weightscope families --csv rows.csv"],
)
@options.csv
@options.flag(
    "--new",
    "Try the architectures of the installed transformers that the census does not cover (PyTorch).",
)
@options.families
@options.json
def families_command(csv_file: Path | None, new: bool, families: str | None, as_json: bool) -> None:
    """List the supported architectures: row, model_types, stack, and special features.

    The last line says how many of the attention stacks in transformers are read exactly. --new
    tries the architectures of the installed transformers that were not counted, each on tiny random
    models.
    """
    from weightscope.model.rows.table import families_table, standing

    if new:  # one line for every attention stack of every type that the census does not cover
        if as_json:
            raise click.UsageError("--new prints lines as it goes; leave --json out")
        from weightscope.runner.loading import import_torch

        import_torch()
        from weightscope.adopting.adopt import PROOF
        from weightscope.adopting.newcomers import newcomers, verdicts

        kinds = newcomers()
        if not kinds:
            click.echo(f"the census covers every model_type of {PROOF}")
        for line in chain.from_iterable(map(verdicts, kinds)):
            click.echo(line)
        return
    table = families_table(families)
    if csv_file is not None:
        write_text(table.csv(), csv_file)
    if as_json:
        print_tables(standing(), (), families=table)
        return
    show(table)
    headline(standing())


@command(
    "Find and prove a row for an unknown architecture (PyTorch).",
    [
        "weightscope adopt model/",
        "weightscope adopt model/ --save",
        "weightscope adopt model/ --with training.model:Zephyrine --out row.toml",
    ],
)
@options.with_source
@options.flag("--save", "Save the rows where every command finds them.")
@options.file_to_write("--out", "-o", help="Save the rows in this file; --families FILE reads it.")
@click.option(
    "--with",
    "code",
    metavar="MODULE:CLASS",
    help="Verify against this torch.nn.Module of your own, in a child process.",
)
@click.option(
    "--attention",
    metavar="PATTERN",
    help="With --with: modules that attend, such as 'blocks.*.mixer'.",
)
@options.json
def adopt_command(
    named: Any,
    source: str,
    save: bool,
    out: Path | None,
    code: str | None,
    attention: str | None,
    as_json: bool,
) -> None:
    """Work out how to read an unknown architecture, and verify it (needs PyTorch).

    Tiny random models are built from the checkpoint's config with transformers' own class, or with
    --with by a class of your own. A row is accepted if its attention and outputs match the eager
    model to 1e-5 at two sizes and at near and far distances, and if it fits the checkpoint's
    tensors. Then every layer of the checkpoint runs with its own weights, one at a time, and is
    compared too; where that is not possible, the row is called unproved at its own size. Code that
    ships with a checkpoint is never run.
    """
    if attention and not code:
        raise click.UsageError("--attention needs --with")
    from weightscope.runner.loading import import_torch

    import_torch()
    from weightscope.adopting.adopt import adopt, answer_of
    from weightscope.adopting.user_class import adopted_with

    opened = named(source)
    checkpoint = opened.checkpoint()
    if code is not None:
        unread = replace(opened, digest=False)
        answer = adopted_with(unread, code, attention or "", shows=not is_quiet())
    else:
        answer = answer_of(adopt(checkpoint), checkpoint)
    _say_adopted(answer, checkpoint, as_json)
    files = [_saved(answer)] if save else []
    if out is not None:
        write_text(answer["file"], out)
        files.append(out)
    if not as_json:
        for file in files:
            click.echo(file)


def _say_adopted(answer: Mapping[str, Any], checkpoint: "Checkpoint", as_json: bool) -> None:
    """Print adopted rows, their proof, and tensors left unread."""
    options.say_digests(source_of(checkpoint))
    rows, proof = answer["stanzas"], answer["proof"]
    these = f"these {len(rows)} rows" if len(rows) > 1 else "this row"
    which = f"proved against {proof}"
    if answer["unproved"]:
        which = f"unproved at its own size (tiny models of {proof})"
    lead = f"{printable(answer['name'])} is read by {these}, {which}"
    if as_json:
        refused = [{"stack": stack, "why": why} for stack, why in answer["refused"].items()]
        unproved = [{"stack": stack, "why": why} for stack, why in answer["unproved"].items()]
        stanzas = [{"row": row} for row in rows]
        print_tables(f"{lead}.", [checkpoint], rows=stanzas, unproved=unproved, refused=refused)
        return
    click.echo(f"{lead}:")
    for row in rows:
        click.echo(printable_lines(row.removesuffix("\n")))
    for stack, why in answer["unproved"].items():
        click.echo(printable(f"not run at its own size: {stack}: {why}"))
    for stack, why in answer["refused"].items():
        click.echo(printable(f"not read: {stack}: {why}"))


def _saved(answer: Mapping[str, Any]) -> Path:
    """Write adopted rows where every command finds them; return the file."""
    from weightscope.model.rows.table import own_folder

    name = answer["model_type"]
    if not name.replace("-", "_").replace(".", "_").isidentifier():
        raise CheckpointError(f"'{name}' cannot be the name of a file")
    file = own_folder() / f"{name}.toml"
    write_text(answer["file"], file)
    return file


@command(
    "Draft a row from the names of tensors.",
    ["weightscope draft model/", "weightscope draft model/ --out row.toml"],
)
@options.with_source
@options.file_to_write(
    "--out", "-o", help="Write the draft to this file; --families FILE reads it."
)
@options.json
def draft_command(named: Any, source: str, out: Path | None, as_json: bool) -> None:
    """Draft a row for an unknown architecture from the names and shapes of its tensors. Reads one
    layer.

    Cells that names and shapes do not decide are left open, as comments that list the choices.
    Nothing is compared: results that are read with a draft say that they are unproved.
    """
    from weightscope.adopting.draft import drafted

    checkpoint = named(source).checkpoint()
    text = drafted(checkpoint)
    if out is not None:
        write_text(text, out)
    if as_json:
        print_tables(f"A draft of a row for {checkpoint.name}.", [checkpoint], rows=[{"row": text}])
        return
    options.say_digests(source_of(checkpoint))
    click.echo(text, nl=False) if out is None else click.echo(out)


@command(
    "Family, shapes and tensors. Reads headers only.",
    [
        "weightscope inspect openai-community/gpt2",
        "weightscope inspect embedded",
        "weightscope inspect model/ --check",
        "weightscope inspect model.gguf --tensors --json",
        "weightscope inspect model/ --readers",
    ],
)
@options.with_source
@options.flag(
    "--check", "Read every tensor once and report what stands out; works for any architecture."
)
@options.flag("--tensors", "List every tensor of the file with its role. Headers only.", "by_role")
@options.flag(
    "--readers",
    "Show what transformers 4.57 and 5, vLLM and llama.cpp take from config.json.",
)
@options.json
def inspect(
    named: Any, source: str, check: bool, by_role: bool, readers: bool, as_json: bool
) -> None:
    """Show family, shapes, dtypes, and the bytes an audit would read.

    --tensors lists one line per tensor: its role, stack, layer and expert, its shape, and how the
    file stores it. Tensors that no row names keep their name as role, and come last.

    --readers shows what four readers take from config.json, such as the base of rotation, and where
    they disagree.
    """
    if readers and (check or by_role):
        raise click.UsageError("--readers is a table of its own; leave --check and --tensors out")
    if check and by_role:
        raise click.UsageError("--check and --tensors are two lists; ask for one")
    if check and as_json:
        advice = "`weightscope audit SOURCE --all --json` prints findings"
        raise click.UsageError(f"--json lists tensors; {advice}")
    if readers:
        _show_readers(named(source).open(), as_json)
        return
    if by_role or as_json:
        from weightscope.checkpoint.provenance import Provenance

        opened = named(source).open_tensors()
        tensors = opened.tensors
        lead = printable(f"{tensors.lead} {getattr(opened, 'refusal', '')}".rstrip())
        if as_json:
            envelope = Provenance.of(tensors.checkpoint).envelope(lead)
            print_json(envelope | {"tensors": tensors.as_json()})
            return
        options.say_digests(source_of(tensors.checkpoint))
        headline(lead)
        show(tensors.table)
        return
    show(*(checked(named(source)) if check else describe(named(source).open())))


def _show_readers(model: "Model", as_json: bool) -> None:
    """Print what each reader takes from config.json, and where they disagree."""
    from weightscope.core.tables import Table
    from weightscope.heads.tensors.config_readers import (
        disagreement_line,
        taken_by_readers,
    )
    from weightscope.model.config.readers import READERS, disagreements, shown

    readings = taken_by_readers(model, first_look=True)
    found = disagreements(readings, model.checkpoint.config)
    takers = [each.reader for each in readings if each.values]
    lead = "Readers of config.json agree on what they take from it."
    if found:
        lead = disagreement_line(found)
    elif len(takers) < 2:
        who = f"only {takers[0]}" if takers else "no reader"
        lead = f"Nothing to compare: {who} is known to take something from this config.json."
    if as_json:
        rows = [
            {"what": str(place), "reader": reading.reader, "value": value}
            for reading in readings
            for place, value in reading.values.items()
        ]
        unread = [{"reader": each.reader, "why": each.why} for each in readings if each.why]
        differing = [{"what": str(each.place), "advice": each.advice} for each in found]
        tables = {"readers": rows, "unread": unread, "disagreements": differing}
        print_tables(lead, [model.checkpoint], **tables)
        return
    options.say_digests(source_of(model.checkpoint))
    headline(lead)
    in_order = sorted(readings, key=lambda each: -len(each.values))  # the longest first
    places = dict.fromkeys(place for reading in in_order for place in reading.values)
    table = [
        (str(place), *(printable(shown(each.values.get(place, ""))) for each in readings))
        for place in places
    ]
    show(Table.of_rows(["what", *READERS], table))
    for each in readings:
        if each.why:
            click.echo(printable(f"{each.reader}: {each.why}"))


def checked(source: "Source") -> Iterator["str | Table"]:
    """Yield the contents of the file by role, and its findings; needs no known family."""
    from weightscope.heads.tensors.findings import tensor_findings
    from weightscope.heads.tensors.measure import read_everything
    from weightscope.report.findings import Findings

    opened = source.open_tensors()
    checkpoint, roles = opened.checkpoint, opened.tensors.roles
    yield from _stored(checkpoint)
    began = perf_counter()
    everything = read_everything(checkpoint, roles)
    seconds = perf_counter() - began
    findings = Findings(tensor_findings(everything, padding=checkpoint.config.get("pad_token_id")))
    n_bytes = everything.nbytes
    rate = f"{sized(n_bytes)} in {seconds:.2f} s, {sized(int(n_bytes / seconds))}/s"
    yield f"{everything.lead} {findings.headline} ({rate})"
    yield everything.roles
    yield from map(str, findings)


def _stored(checkpoint: "Checkpoint") -> Iterator[str]:
    from weightscope.model.model import empty_tensors

    dtypes = Counter(tensor.dtype for tensor in checkpoint.values())
    stored = f"{len(checkpoint)} tensors, {sized(checkpoint.nbytes)}"
    yield f"checkpoint  {printable(checkpoint.name)}: {stored}"
    yield f"dtypes      {', '.join(f'{count} {dtype}' for dtype, count in dtypes.most_common())}"
    if empty := empty_tensors(checkpoint):
        count = counted(len(empty), "tensor")
        yield f"empty       {count} without elements, the first {printable(empty[0])}"
    for number, line in enumerate(options.digest_lines(source_of(checkpoint))):
        yield f"{'' if number else 'SHA-256':<11} {line}"
    if checkpoint.weight_files.sentence:
        yield f"other files {checkpoint.weight_files.sentence}"


def describe(model: "Model") -> Iterator[str | Listed]:
    """Family, sizes, dtypes, embeddings, bytes, and the tensors of the first attention layer."""
    from weightscope.heads.tensors.tied_head import overwritten_head

    checkpoint, config, family = model.checkpoint, model.config, model.family
    yield from _stored(checkpoint)
    yield f"family      {family.name} (model_type {printable(config.model_type)})"
    if family.origin:
        yield f"            {printable(family.origin)}"
    yield f"layers      {config.n_layers}, width {config.d_model}"
    borrowing = model.borrowing_layers
    if borrowing:
        layers = ", ".join(map(str, borrowing))
        yield f"            reusing keys and values of an earlier layer: {layers}"
    without = [i for i in range(config.n_layers) if i not in (*model.attention_layers, *borrowing)]
    if without:
        yield f"            without attention: {', '.join(map(str, without))}"
    heads = f"{config.n_heads} heads x {config.head_dim} dims"
    yield f"heads       {heads}, {config.n_kv_heads} KV heads"
    yield f"tokens      {_embedding(model, family.inputs.tokens)}"
    positions = _embedding(model, family.inputs.positions)
    if not family.inputs.positions and config.rope:
        positions = "rotary: queries and keys turn by position, and nothing is stored"
    elif not family.inputs.positions and family.positions.bias:
        positions = "a bias on scores"
    yield f"positions   {positions}"
    if model.stacks.others:
        yield from _stacks(model)
    notes = filter(None, (*model.notes, overwritten_head(model, first_look=True)))
    for number, note in enumerate(notes):
        yield f"{'' if number else 'note':<11} {printable(note)}"
    if model.attention_layers:
        yield from _budget(model)
        yield _first_tensors(model)


def _stacks(model: "Model") -> Iterator[str]:
    """One line for every attention stack in the file."""
    for number, stack in enumerate(model.stacks.values()):
        family = stack.family
        if not stack.refusal:
            sizes = f"{stack.n_layers} layers x {stack.n_heads} heads, {family and family.name}"
            what = f"{sizes} ({printable(stack.model_type)})"
        elif model.stacks.is_read(stack):
            what = f"read as {model.family.name}"
        else:
            what = f"not read: {printable(stack.refusal)}"
        what += ", unproved" if family and family.origin.startswith("unproved") else ""
        where = ", ".join(filter(None, (printable(stack.prefix) + "*", printable(stack.part))))
        yield f"{'' if number else 'stacks':<11} {printable(stack.name)}: {what}; {where}"


def _budget(model: "Model") -> Iterator[str]:
    """Bytes that an audit reads, in all and of the first layer, and bytes to be fetched."""
    checkpoint, layers = model.checkpoint, model.attention_layers
    names = {i: [tensor.name for tensor in model.attention_tensors(i)] for i in layers}
    everything = set(chain(*names.values()))  # ALBERT's layers share tensors
    everything |= {tensor.name for tensor in model.ends.input_tensors}
    for index in model.mixer_layers:
        everything |= {*model.mixer_names(index)}
    modules = model.family.heads.projections[:2]
    ends = [f".{module}{end}" for module in modules for end in (".", "_weight", "_bias")]
    first_layer = set(names[layers[0]])
    for label, chosen in (("audit reads", everything), (f"layer {layers[0]:<5}", first_layer)):
        of_qk = {name for name in chosen if any(end in f".{name}" for end in ends)}
        total, qk = checkpoint.bytes_to_read(chosen), checkpoint.bytes_to_read(of_qk)
        if not qk:
            model.layer(layers[0])  # says what of it is missing
        share = f", {sized(qk)} of it queries and keys" if qk else ""
        yield f"{label} {sized(total)} of {sized(checkpoint.nbytes)}{share}"
    if checkpoint.bytes_fetched or checkpoint.bytes_to_fetch(everything):
        headers, rest = checkpoint.bytes_fetched, checkpoint.bytes_to_fetch(everything)
        audit = f"an audit fetches {sized(rest)}"
        yield f"network     {sized(headers)} fetched for the headers; {audit}"


def _first_tensors(model: "Model") -> Listed:
    """Names, dtypes and shapes of the tensors of the first attention layer."""
    from weightscope.core.tables import Table

    tensors = model.attention_tensors(model.attention_layers[0])
    stored = model.checkpoint.stored_names
    rows = []
    for tensor in tensors:
        name = printable(stored.get(tensor.name, tensor.name))
        rows.append((name, tensor.dtype, str(tensor.shape)))
    lines = "\n".join(f"  {'  '.join(row)}" for row in rows)
    return Listed(Table.of_rows(["tensor", "dtype", "shape"], rows), lines)


def _embedding(model: "Model", name: str) -> str:
    if not name:
        return "none in this family"
    full = model.prefix + name
    if full not in model.checkpoint:
        return f"not in this checkpoint (looked for {full})"
    tensor, name = model.checkpoint[full], model.checkpoint.stored_names.get(full, full)
    return f"{printable(name)}  {tensor.dtype}  {tensor.shape}"
