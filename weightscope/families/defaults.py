"""What the parts of a config may leave out because transformers' classes have it by default: sizes, and model_types.

Old files do leave it out (LLaVA 1.5 names no sizes of its text model). `defaults.json` is made of those classes.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from weightscope.checkpoint.jsontext import read_json

FILE = Path(__file__).with_name("defaults.json")


def sizes_of(model_type: object) -> dict[str, int]:
    """The sizes of an architecture's default config, under its own keys; empty for one that is not known."""
    return _of(model_type, "sizes")


def inner_types(model_type: object) -> dict[str, str]:
    """The model_types of the parts of a wrapper's default config, by the keys that lead there."""
    return _of(model_type, "parts")


def _of(model_type: object, what: str) -> dict[str, Any]:
    return _defaults().get(model_type, {}).get(what, {}) if isinstance(model_type, str) else {}


@lru_cache(None)
def _defaults() -> dict[str, Any]:
    return read_json(FILE)
