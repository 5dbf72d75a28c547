"""A reference made from a list of checkpoints: each is opened, measured, and identified by a digest of its weights."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from weightscope.audit.audit import AuditOptions, measure_task
from weightscope.audit.measure import MeasuredHeads
from weightscope.audit.reference import Known, Reference
from weightscope.errors import CheckpointError, printable
from weightscope.files import regular_file
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.run_identity import weights_digest, weights_size
from weightscope.sources import Source, folder_names, read_list

COLUMNS = tuple(field.name for field in fields(Known))
MEASURED = AuditOptions(deltas=(0,), directions=0)  # a reference has no measures of rotated maps


def read_checkpoints(path: Path) -> list[dict[str, str]]:
    """One dictionary per checkpoint of a list: a .csv with a column `source`, or a text file of sources."""
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
            expected = f"source and any of {', '.join(COLUMNS)} are expected"
            raise CheckpointError(f"has the columns {printable(', '.join(columns))}; {expected}", file=path)
    sources = [row["source"] for row in rows]
    if not all(sources) or not sources or len(set(sources)) < len(sources):
        raise CheckpointError("must name at least one checkpoint, each once, without empty lines", file=path)
    return [
        {"name": name} | {key: value for key, value in row.items() if value}
        for name, row in zip(folder_names(sources), rows, strict=True)
    ]


def make_reference(path: Path) -> Reference:
    """The reference of the checkpoints in a list."""
    return Reference.of(list(_measured(read_checkpoints(path))))


def _measured(rows: Sequence[dict[str, str]]) -> Iterator[tuple[Known, MeasuredHeads]]:
    models = [
        Source.named(row["source"]).open() for row in rows
    ]  # so that a missing one is noticed before the first is measured
    digests: dict[str, str] = {}
    with bar(what="layers", unit="layer", total=sum(len(model.attention_layers) for model in models)) as layers:
        for row, model in zip(rows, models, strict=True):
            known = _known(row, model)
            if known.sha256 in digests:
                same = f"{known.name} and {digests[known.sha256]}"
                raise CheckpointError(f"{same} have the same weights, which may be listed only once")
            digests[known.sha256] = known.name
            measured = {}
            for index in model.attention_layers:
                measured[index] = measure_task(lambda model=model: model, index, MEASURED)  # type: ignore[misc]
                layers.update()
            yield known, MeasuredHeads(measured, model.config.d_model)


def _known(row: dict[str, str], model: Model) -> Known:
    """What a reference records of a checkpoint; its weights must have the digest in the list, if that has one."""
    digest = weights_digest(model)
    if row.get("sha256", digest) != digest:
        problem = f"has weights with SHA-256 {digest}; the list says {row['sha256'][:64]}"
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
