"""What a source names, as a checkpoint and the row that reads it; of a LoRA adapter its base with the change added."""

from pathlib import Path

from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.checkpoint.adapter import Adapter, adapter_from, adapter_in, has_tokenizer, open_adapter, with_adapter
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.jsontext import read_json
from weightscope.checkpoint.others import ADAPTER, NEEDS_ITS_BASE
from weightscope.checkpoint.source import existing, from_url, locate
from weightscope.embedded import resolved
from weightscope.errors import CheckpointError
from weightscope.families import Family, as_published, family_of, refuse_endless_embeddings


def open_source(
    source: str | Path,
    revision: str | None,
    family: str | None,
    tower: str | None,
    base: str | Path | None,
    families: str | Path | None,
) -> tuple[Checkpoint, Family, str, str]:
    """The checkpoint, its row, what was opened, and where its tokenizer is, if that is elsewhere.

    Parameters and errors as of `open_model`.
    """
    source = from_url(resolved(source))
    folder = adapter_in(source)
    if folder is None and base is not None and isinstance(where := locate(source, revision), Repository):
        folder, revision = adapter_from(where), None  # the revision was the adapter's; a base's stands in its own name
    if folder is not None:
        if base is None and not read_json(folder / ADAPTER).get("base_model_name_or_path"):
            raise CheckpointError(NEEDS_ITS_BASE, file=folder)
        adapter = open_adapter(folder)
        checkpoint = _base_of(adapter, revision) if base is None else _published(base, revision)
        row = family_of(checkpoint, family, tower, families)
        checkpoint, opened = with_adapter(checkpoint, adapter, row.transposed), str(folder)
        elsewhere = checkpoint.folder != folder and has_tokenizer(checkpoint.folder)
        tokenizer = str(adapter.base if base is None else base) if elsewhere else ""
    else:
        if base is not None:
            raise CheckpointError("is no LoRA adapter; only one of those has a `base`", file=source)
        checkpoint, tokenizer = _published(source, revision), ""
        row = family_of(checkpoint, family, tower, families)
        opened = f"{source}@{revision}" if revision and "@" not in str(source) else str(existing(source) or source)
    refuse_endless_embeddings(checkpoint, row)
    return checkpoint, row, opened, tokenizer


def _published(source: str | Path, revision: str | None) -> Checkpoint:
    return as_published(open_checkpoint(from_url(resolved(source)), revision))


def _base_of(adapter: Adapter, revision: str | None) -> Checkpoint:
    """The checkpoint that an adapter says it is made for."""
    named = adapter.config.get("revision")
    try:
        return _published(adapter.base, revision or (named if isinstance(named, str) else None))
    except CheckpointError as error:
        problem = f"is a LoRA adapter, and its base cannot be opened ({error}); say where it is with `base`"
        raise CheckpointError(problem, file=adapter.folder) from None
