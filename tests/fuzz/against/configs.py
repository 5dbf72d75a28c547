"""config.json of many families, read by AutoConfig of the installed transformers too: the same sizes, eps, theta, tie.

A number is compared where AutoConfig has one of that meaning, which the sound config of the family shows: where both
take the same from it. `COMPARED` is how many these are, so that none gets lost. Without a number of key-value heads
weightscope takes the queries' number, where some classes have their own; that is not compared. AutoConfig judges
many keys that say nothing of attention, so that what it refuses alone is not listed.
"""

import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from tests.fuzz.against import READ, Reasons, outcome
from tests.fuzz.mutate import mutated_value
from tests.support.cases import CASES
from tests.support.tiny_models import FIXTURES
from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import KEYS
from weightscope.model.config.dialects import settings
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES

STRICTER: Reasons = {
    "a whole number from": "a size that is none",
    "a number from": "a number out of range",
    "do not divide into": "heads that do not divide",
    "does not divide into": "a width that heads do not divide",
    "write the number there": "a size under another family's name",
    "as its other name": "two names of one size that disagree",
    "the base that transformers reads": "two bases that disagree",
    "an object was expected": "rotary parameters that are no object",
    "as rope_parameters says": "two bases that disagree",
    "an entry for": "rotary parameters of some layer types",
    "one rotation for all layers": "rotary parameters by layer type where there is one",
    "takes its width from the model's": "a head's width that code ignores",
    "nothing scales the rotation": "a scaling that code ignores",
}
LAXER: Reasons = {"": "not listed"}
ATTRIBUTES = {
    "n_layers": "num_hidden_layers", "d_model": "hidden_size", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
}  # fmt: skip
COMPARED = 790
VALUES: tuple[Any, ...] = (
    1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 0, -1, 10**5, None, True, False, "8", 8.0, 2.5, [], [2, 2], {}, 1e-5,
    1e-6, 1e-12, 0.0, 1.0, 1e4, 5e5, 1e6, 10_000, float("nan"), float("inf"), "default",
)  # fmt: skip
ROTARY: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 2.0},
    {"rope_theta": 7e4},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4},
    {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
)
OTHERS = (
    "head_dim", "num_key_value_heads", "multi_query", "n_head_kv", "num_kv_heads", "rope_theta", "rotary_emb_base",
    "rope_parameters", "rope_scaling", "rope_local_base_freq", "tie_word_embeddings", "partial_rotary_factor",
    "new_decoder_architecture", "layer_types", "kv_channels", "attention_bias", "transformers_version",
)  # fmt: skip


@cache
def families() -> dict[str, tuple[dict[str, Any], Family]]:
    """By fixture, the config and the row that reads all of it; configs of wrappers are left out."""
    found = {}
    for case in CASES:
        config = json.loads((FIXTURES / case.name / "config.json").read_text())
        kind = config.get("model_type")
        rows = [row for row in FAMILIES.rows(frozenset({kind})) if row.tower == case.tower and kind in row.types]
        if rows and not (rows[0].part and rows[0].part.partition(".")[0] in config):
            found[case.name] = config, rows[0]
    return found


def mutant(rng: random.Random) -> bytes:
    """A family and its config with keys renamed to other families', dropped, or of other values."""
    name = rng.choice([*families()])
    config, row = families()[name]
    config = dict(config)
    known = [*{key for keys in (*row.size_keys.values(), *KEYS.values()) for key in keys} | {*OTHERS}]
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(sorted(known) + [each for each in sorted(known) if each in config] * 3)
        match rng.randrange(6):
            case 0:
                config.pop(key, None)
            case 1 if key in config:
                config[rng.choice(sorted(known))] = config.pop(key)
            case 2 if key.startswith("rope_"):
                config[key] = rng.choice(ROTARY)
            case _:
                config[key] = rng.choice(VALUES)
    if rng.random() < 0.05 and isinstance(other := mutated_value(config, rng, known), dict):
        config = {**other, "model_type": config["model_type"]}
    return json.dumps([name, config]).encode()


def meet(folder: Path, content: bytes) -> str:
    """Read it with both, and compare."""
    name, config = json.loads(content)
    _, row = families()[name]
    ours, theirs = ours_of(config, row), theirs_of(config, row, folder)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        known = [key for key in compared(name, folder) if None not in (ours.get(key), theirs.get(key))]
        wrong = {key: (ours[key], theirs[key]) for key in known if not _same(ours[key], theirs[key])}
        assert not wrong, f"{name}: {wrong}"
    messages = (each if isinstance(each, str) else READ for each in (ours, theirs))
    return outcome(*messages, STRICTER, LAXER)


def ours_of(config: Mapping[str, Any], row: Family) -> dict[str, Any] | str:
    """The numbers that a row reads, or why it refuses."""
    given = Config(config, "config.json")
    try:
        numbers = settings(given, given, row).numbers
    except CheckpointError as error:
        return str(error)
    thetas = {f"theta {kind}": turn.get("rope_theta") for kind, turn in numbers.rope.items()}
    return {name: getattr(numbers, name) for name in (*ATTRIBUTES, "norm_eps")} | thetas


def theirs_of(config: Mapping[str, Any], row: Family, folder: Path) -> dict[str, Any] | str:
    """The same of AutoConfig; None where it has no such attribute."""
    import transformers  # seconds, and only needed here

    (folder / "config.json").write_text(json.dumps(config))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:
        return f"AutoConfig: {error}"
    of_class = _usual(type(read))
    values = {
        name: _attribute(read, attribute) if attribute in of_class else None for name, attribute in ATTRIBUTES.items()
    }
    values["norm_eps"] = next((_attribute(read, key) for key in row.size_keys["norm_eps"] if key in of_class), None)
    turns = getattr(read, "rope_parameters", None) or {}
    for kind in ("full_attention", "sliding_attention"):
        turn = turns.get(kind) or turns
        values[f"theta {kind}"] = turn.get("rope_theta")
    if "head_dim" in row.heads.head_dim:  # code looks for one that its class need not have
        values["head_dim"] = _attribute(read, "head_dim")
    if values["head_dim"] is None and all(type(values[name]) is int for name in ("d_model", "n_heads")):
        values["head_dim"] = values["d_model"] // max(1, values["n_heads"])
    kv_heads = row.heads.kv_heads if isinstance(row.heads.kv_heads, tuple) else ()
    if values["n_kv_heads"] is None or not kv_heads:
        values["n_kv_heads"] = values["n_heads"]
    elif config.keys().isdisjoint(kv_heads):
        values["n_kv_heads"] = None  # not compared
    return values


@cache
def _usual(kind: type) -> set[str]:
    """Attributes of a class; a config keeps any other key, which no code reads."""
    usual = kind()
    return {*vars(usual), *usual.attribute_map, *dir(kind)}


def _attribute(config: Any, name: str) -> Any:
    with suppress(Exception):  # one that layers have for themselves
        return getattr(config, name)


@cache
def compared(name: str, folder: Path) -> list[str]:
    """Numbers that both take from the sound config, and take alike."""
    config, row = families()[name]
    ours, theirs = ours_of(config, row), theirs_of(config, row, folder)
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    return [key for key, value in ours.items() if value is not None and _same(value, theirs.get(key))]


def _same(x: Any, y: Any) -> bool:
    is_number = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (x, y))
    return isclose(x, y) if is_number else bool(x == y)


def all_compared(folder: Path) -> Iterator[tuple[str, str]]:
    """Fixture and number of everything that is compared."""
    for name in families():
        yield from ((name, key) for key in compared(name, folder))
