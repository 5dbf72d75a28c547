"""The commands lineage, verify and fingerprint."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import (
    FAILED,
    UNDECIDED,
    end_with,
    folder_for,
    headline,
    print_json,
    print_tables,
    show,
    write_text,
)
from weightscope.core.errors import CheckpointError

FORMATS = ("cyclonedx", "spdx")

PROBE_KEY = options.file_to_read(
    "--probe-key", "Secret that fingerprints' probes are drawn from; compare with it only."
)


@command(
    "Where a checkpoint comes from, and what was done to it.",
    [
        "weightscope lineage suspect/ base/ --out lineage/",
        "weightscope lineage suspect/ base/ tuned/ other/ --out lineage/ --json",
        "weightscope lineage suspect/ fingerprints/ --out lineage/",
    ],
)
@click.argument("suspect", shell_complete=options.complete_source)
@click.argument(
    "bases",
    nargs=-1,
    required=True,
    metavar="BASE [BASE ...]",
    shell_complete=options.complete_source,
)
@options.page_folder
@options.tower
@options.families
@options.digest
@click.option(
    "--base", "adapted", help="Base model of SUSPECT, a LoRA adapter whose config does not name it."
)
@PROBE_KEY
@click.option(
    "--nonce", help="Draw the probes of an earlier result, whose lineage.json has its nonce."
)
@options.file_to_write(
    "--attest", help="Also write a claim that others can check with `weightscope verify`."
)
@options.file_to_read(
    "--sign-key", "Private key in PEM to sign the claim with (needs the extra attest)."
)
@click.option(
    "--sbom", type=click.Choice(FORMATS), help="Also write an SBOM of SUSPECT into --out."
)
@options.json
def lineage_command(
    suspect: str,
    bases: tuple[str, ...],
    out: Path | None,
    tower: str | None,
    families: str | None,
    digest: bool,
    adapted: str | None,
    probe_key: Path | None,
    nonce: str | None,
    attest: Path | None,
    sign_key: Path | None,
    sbom: str | None,
    as_json: bool,
) -> None:
    """Find out from the weights alone whether SUSPECT and a BASE share an origin, and how they
    differ.

    SUSPECT and BASE are checkpoints or fingerprint files (.wsf, see `weightscope fingerprint`). A
    BASE may also be a folder of fingerprint files; those most like the suspect are compared.
    --attest and --sbom read all files whole, for their digests.
    """
    from weightscope.model.sources import Source
    from weightscope.pairs.claims.claim import Options, statement
    from weightscope.pairs.claims.digests import refuse_nameless, refuse_several_folders
    from weightscope.pairs.claims.sbom import FILES, sbom_of
    from weightscope.pairs.claims.verify import signatures
    from weightscope.pairs.lineage.lineage import Lineage, lineage
    from weightscope.pairs.lineage.sketches import is_fingerprint
    from weightscope.pairs.lineage.verdict import prints_in

    digest = digest or attest is not None or sbom is not None
    if sign_key is not None and attest is None:
        raise click.UsageError("--sign-key needs --attest")
    if attest is not None or sbom is not None:
        if is_fingerprint(suspect):
            needed = "--attest and --sbom are about files, so the suspect's weights are needed"
            raise CheckpointError(f"is a fingerprint; {needed}", file=suspect)
        refuse_nameless((suspect, *bases))

    def opened(source: str, base: str | None = None) -> Any:
        if is_fingerprint(source) or prints_in(source):
            return source
        how = {"tower": tower, "families": families, "digest": digest}
        return options.opened_among(Source.named(source, base=base, **how))

    # A wrong key, folder or name ends the command before anything is read.
    key = sign_key and signatures().signing_key(sign_key)
    if sbom is not None and out is None:
        raise click.UsageError("--sbom writes into --out, which is missing")
    into = folder_for(Lineage, out, *([FILES[sbom]] if sbom else []))
    models = [opened(suspect, adapted), *map(opened, bases)]
    if attest is not None or sbom is not None:
        for model in models:
            if not is_fingerprint(model):
                refuse_several_folders(model)
    with into as folder:
        result = lineage(models[0], models[1:], probe_key=probe_key, nonce=nonce)
        if folder is not None:
            result.write_files(folder)
        if folder is not None and sbom is not None:
            folder.json(FILES[sbom], sbom_of(result, sbom))
    if attest is not None:
        claim = statement(result, Options(tower, file_digest(families)))
        signed = claim if key is None else signatures().signed(claim, key)
        write_text(json.dumps(signed, indent=1) + "\n", attest)
    end_with(result, out, as_json)


@command(
    "Traits of a checkpoint without its weights, for lineage.",
    [
        "weightscope fingerprint embedded --out embedded.wsf",
        "weightscope fingerprint LIST.txt --out fingerprints/ --jobs 2",
    ],
)
@options.with_source
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    callback=options.writable,
    help="Fingerprint file to write (.wsf); for a list of sources, the folder for their "
    "fingerprints.",
)
@PROBE_KEY
@options.json
@options.with_engine
def fingerprint_command(
    named: Any, source: str, out: Path, probe_key: Path | None, as_json: bool, engine: Any
) -> None:
    """Write a fingerprint: what `weightscope lineage` needs to know about a checkpoint, without its
    weights.

    SOURCE may be a text file (.txt) that lists one source per line; the fingerprints then go into
    the folder --out.
    """
    from weightscope.core.errors import counted
    from weightscope.model.sources import folder_names, is_list, read_list
    from weightscope.pairs.lineage.probes import PUBLIC, keyed_probes
    from weightscope.pairs.lineage.sketches import SUFFIX, fingerprint
    from weightscope.pairs.lineage.verdict import make_prints

    probes = keyed_probes(probe_key) if probe_key else PUBLIC
    if not is_list(source):
        if out.suffix != SUFFIX:
            problem = f"{out} does not end in {SUFFIX}, the suffix of fingerprint files"
            raise click.BadParameter(problem, param_hint="--out")
        model = named(source).open()
        sketches = fingerprint(model, probes)
        sketches.save(out)
        if as_json:
            row = {"name": sketches.name, "file": str(out), "heads": len(sketches.layer)}
            print_tables(f"{out} is written.", [model.checkpoint], fingerprints=[row])
            return
        options.say_digests(sketches.read)
        size = f"{out.stat().st_size / 1e3:,.0f} kB"
        headline(f"{sketches.name}: {counted(len(sketches.layer), 'head')}, {size}")
        click.echo(out)
        return
    sources = read_list(Path(source))
    failed, rows = 0, []
    opened = [named(each) for each in sources]
    for name, problem, read in make_prints(opened, folder_names(sources), out, engine, probes):
        options.say_digests(read)
        if problem:
            failed += 1
            click.echo(f"weightscope: {name}: {problem}", err=True)
        elif as_json:
            rows.append({"name": name, "file": str(out / f"{name}{SUFFIX}")})
        else:
            click.echo(out / f"{name}{SUFFIX}")
    if as_json:
        print_tables(f"{counted(len(rows), 'fingerprint')} in {out}.", (), fingerprints=rows)
    if failed:
        raise CheckpointError(f"{counted(failed, 'source')} of {len(sources)} could not be read")


@command(
    "Check a claim of lineage by computing it again.",
    [
        "weightscope verify claim.json suspect/ base/",
        "weightscope verify claim.json suspect/ base.wsf --key issuer.pub --json",
    ],
)
@click.argument("claim", type=options.FILE)
@click.argument("suspect", shell_complete=options.complete_source)
@click.argument(
    "bases",
    nargs=-1,
    required=True,
    metavar="BASE [BASE ...]",
    shell_complete=options.complete_source,
)
@options.file_to_read("--key", "Public key in PEM that the claim must be signed by.")
@options.families
@PROBE_KEY
@options.json
def verify_command(
    claim: Path,
    suspect: str,
    bases: tuple[str, ...],
    key: Path | None,
    families: str | None,
    probe_key: Path | None,
    as_json: bool,
) -> None:
    """Compute the lineage that CLAIM states again, from SUSPECT and every BASE, and compare each
    field.

    CLAIM is what `weightscope lineage --attest` wrote, signed or not. A BASE may be a fingerprint
    file (.wsf): then the claim is "indexed", not "verified by weights". Exit status 0 if it holds,
    3 if not, 4 if fingerprints cannot decide all that it says, 2 if something cannot be read.
    """
    from weightscope.model.sources import Source
    from weightscope.pairs.claims.digests import refuse_nameless
    from weightscope.pairs.claims.verify import read_claim, verify
    from weightscope.pairs.lineage.sketches import is_fingerprint

    made_with = read_claim(claim)[0].options
    refuse_nameless((suspect, *bases))

    def opened(source: str) -> Any:
        if is_fingerprint(source):
            return source
        tower = made_with.tower
        try:
            return options.opened_among(Source.named(source, tower=tower, families=families))
        except CheckpointError as error:
            note = f" (opened with --tower {tower}, as the claim says)" if tower else ""
            raise CheckpointError(f"{error}{note}") from None

    models = [opened(source) for source in (suspect, *bases)]
    given = made_with._replace(families=file_digest(families))
    result = verify(claim, models[0], models[1:], key=key, options=given, probe_key=probe_key)
    if as_json:
        print_json(result.as_json())
    else:
        show(*result.printed())
    if result.undecided:
        sys.exit(UNDECIDED)
    if not result.holds:
        sys.exit(FAILED)


def file_digest(file: str | None) -> str | None:
    """SHA-256 of a file of rows, by which claims name it."""
    from hashlib import sha256

    from weightscope.checkpoint.config import MAX_BYTES, read_small

    return file and sha256(read_small(Path(file), MAX_BYTES)).hexdigest()
