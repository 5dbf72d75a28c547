"""The config and the tokenizer, which decide the computation besides weights."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

from weightscope.checkpoint.storage import BITS
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.model.config.computed import Difference, Stated, as_written, differences, stated
from weightscope.model.config.effects import COMPUTATION, STORAGE, UNKNOWN
from weightscope.model.model import Model, TensorsOnly
from weightscope.model.rows.family import Family
from weightscope.model.text.tokenizer import Tokenizer

TIED = "tie_word_embeddings"
PACKING = "quantization_config"  # the usual key of how weights are packed
NOT_PACKED = "no weight is packed"
UNPACKED = {name for name in BITS if not name.startswith(("F8", "F6", "F4"))}
STEPS = ("normalizer", "pre_tokenizer", "decoder")


class ConfigDifferences(NamedTuple):
    """The keys in which two configs differ, by what they decide."""

    deciding: list[Difference]
    unknown: list[Difference]  # keys whose effect is not known
    idle: list[Difference]  # keys without effect on what is computed


def compare_settings(
    a: Model | TensorsOnly, b: Model | TensorsOnly, *, same_head: bool
) -> ConfigDifferences:
    """Keys in which two configs differ; the key of tied heads only if heads differ."""
    if why_incomparable(a, b):
        return ConfigDifferences([], [], [])
    both_read = isinstance(a, Model) and isinstance(b, Model)
    from_keys = a.checkpoint.is_gguf or b.checkpoint.is_gguf
    if (both_read or from_keys) and _row_of(a) and _row_of(b):
        differing = differences(settings_of(a), settings_of(b))
    else:
        differing = differences(as_written(a.checkpoint), as_written(b.checkpoint))
    by_kind = by_effect(differing, same_head=same_head)
    return with_packings(by_kind, *(_says_packed(each) for each in (a, b)))


def _says_packed(model: Model | TensorsOnly) -> bool:
    """True if the config says how weights are packed, and none is."""
    kinds = {tensor.dtype for tensor in model.checkpoint.values()}
    return kinds <= UNPACKED and has_packing(as_written(model.checkpoint))


def has_packing(settings: Stated) -> bool:
    """True if a config says how weights are packed."""
    return any(value and _is_packing(key) for key, value in settings.values.items())


def _is_packing(key: str) -> bool:
    return not STORAGE.isdisjoint(key.split("."))


def with_packings(by_kind: ConfigDifferences, in_a: bool, in_b: bool) -> ConfigDifferences:
    """With a key of unknown effect if one config alone packs weights that are not.

    Where weights are packed, its keys are how to read them; where none is, a loader may refuse the
    file or quantise it.
    """
    if in_a == in_b:
        return by_kind
    idle = [each for each in by_kind.idle if not _is_packing(each.key)]
    a, b = (NOT_PACKED if says else None for says in (in_a, in_b))
    says = Difference(PACKING, a, b, UNKNOWN)
    return ConfigDifferences(by_kind.deciding, [*by_kind.unknown, says], idle)


def settings_of(model: Model | TensorsOnly) -> Stated:
    """A config as its row reads it, or as it is written where no row does."""
    row = _row_of(model)
    return stated(model.checkpoint, row) if row else as_written(model.checkpoint)


def by_effect(differing: Sequence[Difference], *, same_head: bool) -> ConfigDifferences:
    """Differences of two configs by what they decide; of tied heads only if the heads differ."""
    differing = [
        each for each in differing if not (same_head and each.key.rpartition(".")[2] == TIED)
    ]
    kinds = {
        kind: [each for each in differing if each.effect == kind] for kind in (COMPUTATION, UNKNOWN)
    }
    rest = [each for each in differing if each.effect not in kinds]
    return ConfigDifferences(kinds[COMPUTATION], kinds[UNKNOWN], rest)


def why_incomparable(a: Model | TensorsOnly, b: Model | TensorsOnly) -> str:
    """Why nothing in a GGUF file that no row reads has a counterpart; empty if something may."""
    kept = [
        each.checkpoint.config.get("general.architecture") if each.checkpoint.is_gguf else None
        for each in (a, b)
    ]
    if kept[0] == kept[1]:
        return ""
    unread = next(each for each, named in zip((a, b), kept, strict=True) if named is not None)
    file = unread.checkpoint.files[0].path.name
    refusal = unread.refusal if isinstance(unread, TensorsOnly) else ""
    reason = refusal.partition(";")[0].removeprefix(f"{file}: ")
    return f"the meaning of {file}'s tensors is not known ({reason})"


def _row_of(model: Model | TensorsOnly) -> Family | None:
    """The row that reads a checkpoint, or its tensors."""
    if isinstance(model, Model):
        return model.row
    return model.reading.row if model.reading else None


class TokenizerVerdict(NamedTuple):
    """Knowledge of two tokenizers."""

    verdict: str  # "same", "different" or "not compared"
    lead: str


def compare_tokenizers(a: Model | TensorsOnly, b: Model | TensorsOnly) -> TokenizerVerdict:
    """Vocabulary, merges or other steps, and special tokens: weights do not show these."""
    if not isinstance(a, Model) or not isinstance(b, Model):
        return TokenizerVerdict(
            "not compared", "The tokenizers were not compared: no row reads one of the checkpoints."
        )
    pair = []
    for letter, model in (("A", a), ("B", b)):
        try:
            tokenizer = Tokenizer.at_hand(model)
        except CheckpointError as error:
            lead = f"The tokenizer of {letter} cannot be read: {printable(error)}."
            return TokenizerVerdict("not compared", lead)
        if tokenizer is None:
            problem = f"{letter} has none next to its weights"
            if why := Tokenizer.why_unreadable(model):
                problem = f"{letter}'s cannot be read ({printable(why)})"
            lead = f"The tokenizers were not compared: {problem}."
            return TokenizerVerdict("not compared", lead)
        pair.append(tokenizer)
    x, y = pair
    parts = []
    changed = sorted(
        index for index in {*x.tokens, *y.tokens} if x.tokens.get(index) != y.tokens.get(index)
    )
    if changed:
        first = changed[0]
        in_a, in_b = (printable(each.tokens.get(first, "nothing")) for each in pair)
        which = f"the first {first} ('{in_a}' in A, '{in_b}' in B)"
        parts.append(
            f"{counted(len(changed), 'id')} {'has' if len(changed) == 1 else 'have'} another "
            f"token, {which}"
        )
    special = [
        {each.tokens.get(index): added.special for index, added in each.added.items()}
        for each in pair
    ]
    if special[0] != special[1] and not changed:
        parts.append("other tokens are special")
    models = [each.facts.get("model_sha256") for each in pair]
    if None not in models and models[0] != models[1] and not changed:
        parts.append("the tokens are the same, merges or scores are not")
    steps = [
        name
        for name in STEPS
        if all(name in each.facts for each in pair) and x.facts[name] != y.facts[name]
    ]
    if steps:
        parts.append(
            f"the {' and '.join(steps)} {'differs' if len(steps) == 1 else 'differ'}".replace(
                "_", "-"
            )
        )
    if parts:
        return TokenizerVerdict("different", f"The tokenizers differ: {'; '.join(parts)}.")
    size = counted(len(x.tokens), "token")
    return TokenizerVerdict("same", f"The tokenizers have the same {size}.")


# Tokenizers by digests, where one of them is not at hand

PARTS = ("tokens", "special", "model", *STEPS)


def token_digests(model: Model | TensorsOnly) -> dict[str, str]:
    """SHA-256 of each part of a tokenizer by meaning, and its size; empty if none can be read."""
    tokenizer = None
    if isinstance(model, Model):
        with suppress(CheckpointError):
            tokenizer = Tokenizer.at_hand(model)
    if tokenizer is None:
        return {}
    special = sorted(each.content for each in tokenizer.added.values() if each.special)
    parts = {"size": str(len(tokenizer.tokens)), "tokens": tokenizer.hash}
    parts |= {"special": _meaning(special)} if tokenizer.added else {}
    model_digest = tokenizer.facts.get("model_sha256")
    if not model_digest:
        return parts  # a list of tokens
    return (
        parts | {"model": model_digest} | {name: _meaning(tokenizer.facts[name]) for name in STEPS}
    )


def _meaning(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


def compare_token_digests(x: Mapping[str, str], y: Mapping[str, str]) -> TokenizerVerdict:
    """Verdict from `token_digests` of two; parts that only one of them has are not compared."""
    for letter, parts in (("A", x), ("B", y)):
        if "tokens" not in parts:
            lead = f"The tokenizers were not compared: {letter} has none that was read."
            return TokenizerVerdict("not compared", lead)
    changed = [name for name in PARTS if name in x and name in y and x[name] != y[name]]
    if changed:
        named = " and ".join(changed).replace("_", "-")
        return TokenizerVerdict("different", f"The tokenizers differ: {named}.")
    size = counted(int(y["size"]), "token")
    return TokenizerVerdict("same", f"The tokenizers have the same {size}.")
