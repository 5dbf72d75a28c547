"""Names that a checkpoint's own class does not load: wrappers' segments, stacks elsewhere.

transformers loads by name. It draws tensors that a file lacks at random, with only a warning.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.packings.packed import renamed
from weightscope.core.errors import printable
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES, RECORD, lines, title

# Segments of names that wrappers of a module add -> the wrapper.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "checkpointing",
    "_forward_module": "Lightning",
}
DDP = "module"  # DistributedDataParallel's segment, also a module's name in some architectures
# First segments that head classes put before their base model's names, where a row lists none.
BASES = (
    "model",
    "transformer",
    "encoder",
    "decoder",
    "backbone",
    "vision_model",
    "vision_encoder",
    "text_model",
)
# Such segments that neither type nor row gives.
BASE_OF = {"timesfm": "decoder", "nemotron_h": "backbone", "gte": "new"}
# Segments that versions of transformers moved or dropped within names of towers.
MOVED = {
    "model",
    "transformer",
    "language_model",
    "vision_model",
    "text_model",
    "encoder",
    "thinker",
    "vit",
}


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under its names from before it was wrapped; itself if it was not."""
    segments, kind = {*WRAPPERS}, checkpoint.config.get("model_type")
    if isinstance(kind, str) and kind in _homes():
        segments.add(DDP)
    wrapped = {name for name in checkpoint if not segments.isdisjoint(name.split("."))}
    wrapped |= {name for name in checkpoint if name.startswith(f"{DDP}.")}
    if not wrapped:
        return checkpoint
    bare = {name: _bare(name, segments) if name in wrapped else name for name in checkpoint}
    if len({*bare.values()}) < len(bare) or not all(bare.values()):
        return checkpoint  # two would have one name
    tensors = {bare[name]: renamed(tensor, bare[name]) for name, tensor in checkpoint.items()}
    same = Checkpoint(
        checkpoint.folder, checkpoint.files, tensors, checkpoint.config, checkpoint.name
    )
    same.weight_files = checkpoint.weight_files
    same.stored_names = {bare[name]: name for name in wrapped}
    return same


def _bare(name: str, segments: Iterable[str]) -> str:
    kept = [part for part in name.split(".") if part not in segments]
    return ".".join(kept).removeprefix(f"{DDP}.")


def unloaded_names(checkpoint: Checkpoint, places: Iterable[tuple[Family, str]]) -> tuple[str, ...]:
    """Names in the file that the class of its config would not load.

    `places` are the rows of its stacks, each with its prefix in the file. For a class of the
    checkpoint's own, only wrappers are known.
    """
    kind, code = checkpoint.config.get("model_type"), checkpoint.config.get("auto_map")
    names = dict.fromkeys(checkpoint.stored_names)
    if code or checkpoint.is_gguf:
        places = ()
    for row, prefix in places:
        rows = FAMILIES.rows(frozenset({row.name}))
        known = next((known for known in rows if title(known) == title(row)), None)
        if known is None or row.origin:
            continue
        if not is_own_place(kind, known.but(layer=row.layer), prefix):
            names |= dict.fromkeys(checkpoint.names_under(prefix or row.layer.partition("{i}")[0]))
    return tuple(checkpoint.stored_names.get(name, name) for name in checkpoint if name in names)


def names_sentence(names: Sequence[str], total: int, whose: str = "Its") -> str:
    """A sentence on names that the own class does not load; empty where there are none."""
    if not names:
        return ""
    segments = [part for part in (*WRAPPERS, DDP) if any(part in name.split(".") for name in names)]
    wrappers = " and ".join({**WRAPPERS, DDP: "DistributedDataParallel"}[part] for part in segments)
    cause = advice = ""
    if wrappers:
        cause = f", as {wrappers} leaves them"
        advice = f"; take {' and '.join(f'{part}.' for part in segments)} out of the names"
    more = " ..." if len(names) > 1 else ""
    which = f"{len(names)} of {total} names ({printable(names[0])}{more})"
    return (
        f"{whose} own class would not load {which}{cause}: "
        f"transformers draws these tensors at random{advice}."
    )


def is_own_place(kind: object, row: Family, prefix: str) -> bool:
    """True if a model_type's class has a stack of a row under this prefix, as far as is known.

    Versions of transformers moved towers within wrappers: only words that no stack of the type has
    are refused there.
    """
    homes = _homes().get(str(kind), frozenset())
    before = f"{prefix}{row.layer}".partition("{i}")[0]
    inner = row.layer.partition("{i}")[0]
    if not any(home.endswith(inner) for home in homes):  # transformers has changed the names since
        return True
    places = {before}
    if str(kind).endswith("_text"):  # its wrapper saves it so
        places.add(before.replace("language_model.", ""))
    for place in places:
        for home in homes:
            # a base model's segment may be there twice
            extra = {*place.removesuffix(home).split(".")} - {""}
            if not place.endswith(home):
                continue
            if not extra or (len(extra) == 1 and _is_base(min(extra), str(kind), row)):
                return True
    in_towers = any(home != inner for home in homes)
    words = {word for home in homes for word in home.split(".")}
    return in_towers and {*before.split(".")} <= words | MOVED


def _is_base(segment: str, kind: str, row: Family) -> bool:
    """True if a class of this type may call its base model so."""
    bases = {prefix.removesuffix(".") for prefix in row.prefixes if prefix.count(".") == 1}
    bases |= {row.name.replace("-", "_"), BASE_OF.get(kind, "")}
    if "bert" in bases:
        bases.add("roberta")
    if row.tower or not any(row.prefixes):
        bases |= {*BASES}
    return segment in bases or (len(segment) > 2 and kind.replace("-", "_").startswith(segment))


@lru_cache(None)
def _homes() -> Mapping[str, frozenset[str]]:
    """Names before the index of a layer in each type's own classes."""
    homes: dict[str, set[str]] = {}
    for line in lines(RECORD):
        homes.setdefault(line["type"], set()).add(line["stack"].partition("{}")[0])
    return {kind: frozenset(places) for kind, places in homes.items()}
