"""The commands lineage and fingerprint."""

from pathlib import Path
from typing import Any

import click

from weightscope.cli import options
from weightscope.cli.command import command
from weightscope.cli.terminal import end_with, headline

PROBE_KEY = options.file_to_read(
    "--probe-key", "Secret that fingerprints' probes are drawn from; compare with it only."
)


@command(
    "Find where a checkpoint comes from, and what was done to it. Reads each once.",
    [
        "weightscope lineage suspect/ base/ --out lineage/",
        "weightscope lineage suspect/ base/ tuned/ other/ --out lineage/ --json",
        "weightscope lineage suspect/ fingerprints/ --out lineage/",
    ],
    first=True,
)
@click.argument("suspect", shell_complete=options.complete_source)
@click.argument("bases", nargs=-1, required=True, metavar="BASE [BASE ...]", shell_complete=options.complete_source)
@options.out
@options.tower
@options.families
@options.digest
@click.option("--base", "adapted", help="Base model of SUSPECT, a LoRA adapter whose config does not name it.")
@PROBE_KEY
@click.option("--nonce", help="Draw the probes of an earlier result, whose lineage.json has its nonce.")
@options.json
def lineage_command(
    suspect: str, bases: tuple[str, ...], out: Path, tower: str | None, families: str | None, digest: bool,
    adapted: str | None, probe_key: Path | None, nonce: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Find out from the weights alone whether SUSPECT and a BASE share an origin, and how they differ.

    SUSPECT and BASE are checkpoints or fingerprint files (.wsf, see `weightscope fingerprint`). A BASE may also be a
    folder of fingerprint files; those most like the suspect are compared.
    """
    from weightscope.files import OutputFolder
    from weightscope.lineage.lineage import RESULTS, lineage
    from weightscope.lineage.sketches import is_fingerprint
    from weightscope.lineage.verdict import prints_in
    from weightscope.sources import Source

    def opened(source: str, base: str | None = None) -> Any:
        if is_fingerprint(source) or prints_in(source):
            return source
        return options.opened_model(Source.named(source, tower=tower, families=families, digest=digest, base=base))

    folder = OutputFolder(out, names=RESULTS)
    folder.refuse_foreign()
    models = [opened(suspect, adapted), *map(opened, bases)]  # fail on a wrong name before anything is read
    with folder:
        result = lineage(models[0], models[1:], probe_key=probe_key, nonce=nonce)
        result.write_files(folder)
    end_with(result, out, as_json)


@command(
    "Write what lineage needs to know about a checkpoint, without its weights.",
    [
        "weightscope fingerprint embedded --out embedded.wsf",
        "weightscope fingerprint LIST.txt --out fingerprints/ --jobs 2",
    ],
)
@options.with_source
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, callback=options.writable,
    help="Fingerprint file to write (.wsf); for a list of sources, the folder for their fingerprints.",
)  # fmt: skip
@PROBE_KEY
@options.with_engine
def fingerprint_command(named: Any, source: str, out: Path, probe_key: Path | None, engine: Any) -> None:
    """Write a fingerprint: what `weightscope lineage` needs to know about a checkpoint, without its weights.

    SOURCE may be a text file (.txt) that lists one source per line; the fingerprints then go into the folder --out.
    """
    from weightscope.errors import CheckpointError, counted
    from weightscope.lineage.probes import PUBLIC, keyed_probes
    from weightscope.lineage.sketches import SUFFIX, fingerprint
    from weightscope.lineage.verdict import make_prints
    from weightscope.sources import folder_names, is_list, read_list

    probes = keyed_probes(probe_key) if probe_key else PUBLIC
    if not is_list(source):
        if out.suffix != SUFFIX:
            raise click.BadParameter(
                f"{out} does not end in {SUFFIX}, the suffix of fingerprint files", param_hint="--out"
            )
        sketches = fingerprint(named(source).open(), probes)
        sketches.save(out)
        options.say_digests(sketches.read)
        headline(f"{sketches.name}: {counted(len(sketches.layer), 'head')}, {out.stat().st_size / 1e3:,.0f} kB")
        click.echo(out)
        return
    sources = read_list(Path(source))
    failed = 0
    for name, problem, read in make_prints(
        [named(each) for each in sources], folder_names(sources), out, engine, probes
    ):
        failed += bool(problem)
        options.say_digests(read)
        click.echo(f"weightscope: {name}: {problem}" if problem else out / f"{name}{SUFFIX}", err=bool(problem))
    if failed:
        raise CheckpointError(f"{counted(failed, 'source')} of {len(sources)} could not be read")
