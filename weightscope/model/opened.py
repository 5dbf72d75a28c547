"""A source, opened: its checkpoint under published names, and the adapter that changes it."""

from pathlib import Path
from typing import NamedTuple

from weightscope.checkpoint.adapters.lora import (
    AnyAdapter,
    adapter_from,
    has_tokenizer,
    open_adapter,
)
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import read_json
from weightscope.checkpoint.formats import ADAPTER, NEEDS_ITS_BASE
from weightscope.checkpoint.hub import Repository
from weightscope.checkpoint.opening import (
    adapter_in,
    at_revision,
    existing,
    locate,
    open_at,
    open_checkpoint,
    resolved,
)
from weightscope.core.errors import CheckpointError
from weightscope.model.config.reading import as_published


class Opened(NamedTuple):
    """An opened source; of an adapter, the base that it changes."""

    checkpoint: Checkpoint
    source: str = ""  # an absolute path, or a Hub id with its revision
    tokenizer: str = ""  # its place, if not `source`
    where: Path | Repository | None = None  # the file, folder or repository that `source` names
    adapter: AnyAdapter | None = None


def open_source(
    source: str | Path,
    revision: str | None = None,
    base: str | Path | None = None,
    tokenizer: str | None = None,
) -> Opened:
    """Open a folder, a file, a repository or an adapter; see `open_model`."""
    named = resolved(source)
    folder, base_revision = adapter_in(named), revision
    if folder is None and base is not None and (adapted := _adapted_by_a_file(source, base)):
        return adapted
    if folder is None:
        where = locate(named, revision)
        if base is None:
            checkpoint = as_published(open_at(where))
            checkpoint.given = at_revision(source, revision)
            place = at_revision(existing(named) or named, revision)
            return Opened(checkpoint, place, tokenizer or "", where)
        folder = adapter_from(where) if isinstance(where, Repository) else None
        base_revision = None  # the revision was the adapter's; a base's is in its own name
        if folder is None:
            raise CheckpointError("is not a LoRA adapter; only an adapter has a `base`", file=named)
    stated = read_json(folder / ADAPTER)
    names_base = stated.get("base_model_name_or_path") or stated.get("model")  # PEFT's, mlx-lm's
    if base is None and not names_base:
        raise CheckpointError(NEEDS_ITS_BASE, file=folder)
    from weightscope.checkpoint.adapters.mlx_lm import AdapterOfMlx, is_of_mlx

    adapter = AdapterOfMlx.open(folder) if is_of_mlx(folder) else open_adapter(folder)
    if base is not None:
        checkpoint = as_published(open_checkpoint(base, base_revision))
    else:
        trained_on = adapter.config.get("revision")
        trained_on = trained_on if isinstance(trained_on, str) else None
        try:
            checkpoint = as_published(open_checkpoint(adapter.base, base_revision or trained_on))
        except CheckpointError as error:
            problem = f"is a LoRA adapter, and its base cannot be opened ({error})"
            raise CheckpointError(f"{problem}; say where it is with `base`", file=folder) from None
    checkpoint.given = at_revision(source, revision)
    has_its_own = checkpoint.folder == folder or not has_tokenizer(checkpoint.folder)
    elsewhere = "" if has_its_own else str(base or adapter.base)
    return Opened(checkpoint, str(folder), tokenizer or elsewhere, folder, adapter)


def _adapted_by_a_file(source: str | Path, base: str | Path) -> Opened | None:
    """The base with an adapter of kohya, LyCORIS or diffusers; None where the source is none."""
    from weightscope.checkpoint.adapters.diffusion import AdapterOfFile, adapter_file

    file = adapter_file(source)
    if file is None:
        return None
    checkpoint = as_published(open_checkpoint(base))
    checkpoint.given = str(source)
    return Opened(checkpoint, str(file), str(base), file, AdapterOfFile(file, tuple(checkpoint)))
