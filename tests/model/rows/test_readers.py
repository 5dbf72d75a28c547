"""What readers.py says of transformers 4.57 and 5 is what their AutoConfig takes from planted files."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.model.rows.readers_at_work import FILE, plants
from weightscope.checkpoint.config import Config
from weightscope.model.config.dialects import FULL, SLIDING
from weightscope.model.config.readers import (
    ACTIVATION,
    ACTIVATIONS,
    BASE,
    DETAILS,
    EPS,
    EPS_KEYS,
    FIVE,
    FOUR,
    HEAD,
    SCALED,
    SHARE,
    TIED,
    WINDOW,
    Takes,
    taken,
)
from weightscope.model.rows.table import FAMILIES

FACTS = json.loads(FILE.read_text(encoding="utf-8"))
LOCAL = ("rope_local_base_freq", "local_rope_theta")


def row_of(kind: str) -> Any:
    rows = [row for row in FAMILIES if kind in row.types]
    return next((row for row in rows if row.tower in ("text", "decoder", "")), rows[0])


def facts(version: str) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any] | None]]:
    """Type, plant, all that a version takes from a file of sizes alone, and from the planted file."""
    usual: dict[str, Any] = {}
    for kind, name, new in FACTS[version]:
        if name == "nothing":
            usual = new
        gone = (new or {}).get("gone", ())
        yield (
            kind,
            name,
            usual,
            None if new is None else {k: v for k, v in {**usual, **new}.items() if k not in gone and k != "gone"},
        )


def turn(version: str, usual: Mapping[str, Any], asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The rotary parameters that AutoConfig gives layers of a kind."""
    if version.startswith("5"):
        given = asked.get("rope_parameters") or {}
        return given.get(kind or FULL, given) or {}
    base = asked["global_rope_theta"] if "global_rope_theta" in usual else asked.get("rope_theta")
    scaling = asked.get("rope_scaling") or {}
    local = next((asked[key] for key in LOCAL if key in usual), None)
    if kind == SLIDING and local is not None:
        base, scaling = local, {}
    return {**scaling, "rope_theta": base, "partial_rotary_factor": asked.get("partial_rotary_factor", 1.0)}


def wrong(
    version: str, content: Mapping[str, Any], takes: Takes, usual: Mapping[str, Any], asked: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """What a reader is said to take and does not."""
    inner = content.get("text_config", content)
    for what, value in takes.values.items():
        name, _, kind = what.partition(", ")
        given = turn(version, usual, asked, kind)
        if name == BASE:
            truth = {given.get("rope_theta")}
        elif name == SCALED and version.startswith("4") and kind == SLIDING:
            continue  # modeling code has it, no config
        elif name == SCALED:
            word = given.get("rope_type", given.get("type", "default"))
            truth = {f"{word} by {given['factor']:g}" if "factor" in given and word != "default" else word}
        elif name == DETAILS:
            continue  # as in the file, under both versions
        elif name == SHARE:
            truth = {given.get("partial_rotary_factor", 1.0)}
        elif name == HEAD:
            if len(row_of(inner["model_type"]).heads.head_dim) > 1:
                continue  # of several keys
            even = [
                inner[a] // inner[b]
                for a in ("hidden_size", "n_embd", "d_model")
                if a in inner
                for b in ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
                if b in inner
            ]
            own = asked.get("head_dim") or (even or [None])[0]
            truth = {own} if "head_dim" in usual else {own, *even}  # any config keeps a key that no code reads
        elif name == EPS:
            truth = {asked[key] for keys in EPS_KEYS.values() for key in keys if key in asked}
        elif name == TIED:
            truth = {asked["tied"]}
        elif name == WINDOW:
            is_used = "use_sliding_window" not in usual or asked["use_sliding_window"]
            truth = {(asked.get("sliding_window") or None) if is_used else None}
        elif name == ACTIVATION:
            truth = {asked[key] for key in ACTIVATIONS if key in asked}
        if value not in truth:
            yield what, value, truth


def differences(version: str) -> tuple[int, int, list[Any]]:
    """Values compared, files that are not, and what differs."""
    reader, compared, left_out, found = FOUR if version.startswith("4") else FIVE, 0, 0, []
    contents = {}
    for kind, name, usual, asked in facts(version):
        if kind not in contents:
            contents[kind] = dict(plants(kind))
        content = contents[kind][name]
        root = Config({**content, "architectures": ["X"]}, "config.json")
        part = root.inside("text_config") if "text_config" in content else root
        takes = next(t for t in taken(root, part, row_of(part["model_type"])) if t.reader == reader)
        if takes.why or asked is None:
            left_out += 1
            continue
        compared += len(takes.values)
        found += [(kind, name, *each) for each in wrong(version, content, takes, usual, asked)]
    return compared, left_out, found


@pytest.mark.parametrize("version", FACTS)
def test_no_value_differs(version: str) -> None:
    compared, left_out, found = differences(version)
    assert not found
    assert (compared, left_out) == (0, 0)
