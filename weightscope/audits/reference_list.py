"""A reference made of a list of checkpoints: each opened, measured, and known by the digest of its weights."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from weightscope.audits.audit import AuditOptions, measure_task
from weightscope.audits.measures import MeasuredHeads
from weightscope.audits.reference import Known, Reference
from weightscope.errors import CheckpointError, printable
from weightscope.fingerprint import weights_digest, weights_size
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.regular import regular_file
from weightscope.sources import Source, folder_names, read_list

COLUMNS = tuple(field.name for field in fields(Known))
MEASURED = AuditOptions(deltas=(0,), directions=0)  # a reference has the measures of the stored maps, no rotated ones


def read_checkpoints(path: Path) -> list[dict[str, str]]:
    """The checkpoints of a list, by column: a .csv with a column `source`, else a text file with a source a line.

    Raises
    ------
    CheckpointError
        The list cannot be read, names nothing, names a source twice, or has columns that mean nothing here.
    """
    if path.suffix.lower() != ".csv":
        rows = [{"source": source} for source in read_list(path)]
    else:
        try:
            with io.TextIOWrapper(regular_file(path), encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                columns = list(reader.fieldnames or [])
                rows = [{name: value or "" for name, value in row.items() if name in COLUMNS} for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CheckpointError(f"cannot be read as a list of checkpoints ({error})", file=path) from None
        if "source" not in columns or set(columns) - set(COLUMNS):
            problem = (
                f"has the columns {printable(', '.join(columns))}; source and any of {', '.join(COLUMNS)} are expected"
            )
            raise CheckpointError(problem, file=path)
    sources = [row["source"] for row in rows]
    if not all(sources) or not sources or len(set(sources)) < len(sources):
        raise CheckpointError(
            "should name one checkpoint or more, each once, and has an empty line or a repeat", file=path
        )
    return [
        {"name": name} | {key: value for key, value in row.items() if value}
        for name, row in zip(folder_names(sources), rows, strict=True)
    ]


def make_reference(path: Path) -> Reference:
    """Measure every checkpoint of a list.

    Raises
    ------
    CheckpointError
        One cannot be opened or measured, has other weights than the list says, or is there twice.
    """
    return Reference.of(list(_measured(read_checkpoints(path))))


def _measured(rows: Sequence[dict[str, str]]) -> Iterator[tuple[Known, MeasuredHeads]]:
    models = [Source.named(row["source"]).open() for row in rows]  # all are there before the first is measured
    digests: dict[str, str] = {}
    with bar(what="layers", unit="layer", total=sum(len(model.attention_layers) for model in models)) as layers:
        for row, model in zip(rows, models, strict=True):
            known = _known(row, model)
            if known.sha256 in digests:
                raise CheckpointError(
                    f"{known.name} and {digests[known.sha256]} are the same weights, which count once"
                )
            digests[known.sha256] = known.name
            measured = {}
            for index in model.attention_layers:
                measured[index] = measure_task(lambda model=model: model, index, MEASURED)  # type: ignore[misc]
                layers.update()
            yield known, MeasuredHeads(measured, model.config.d_model)


def _known(row: dict[str, str], model: Model) -> Known:
    """What is known of a checkpoint; the list's digest of its weights is held to."""
    digest = weights_digest(model)
    if row.get("sha256", digest) != digest:
        problem = f"has weights of SHA-256 {digest}; {row['sha256'][:64]} is in the list"
        raise CheckpointError(problem, file=model.checkpoint.name)
    return Known(
        name=row["name"],
        source=row["source"],
        licence=row.get("licence", ""),
        origin=row.get("origin", ""),
        sha256=digest,
        size=weights_size(model),
        family=model.family.name,
        layers=len(model.attention_layers),
        heads=model.config.n_heads,
        d_model=model.config.d_model,
    )
