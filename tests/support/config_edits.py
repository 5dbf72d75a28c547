"""Every key of a config with another value."""

from collections.abc import Iterator, Mapping
from typing import Any


def edits(value: Any) -> Iterator[Any]:
    """Other values for a key; ... leaves it out."""
    yield from (..., None)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value + 3, max(0, value - 1))
    elif isinstance(value, float):
        yield 2 * value + 0.1
    elif isinstance(value, str):
        yield from ("relu", "gelu", "absolute")
    elif isinstance(value, list):
        yield from (value[::-1], value[:1] * len(value))
    elif value is None:
        yield from (True, 3, 0.5)


def leaves(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a config with its value, by the keys that lead there."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def edited(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A config with another value for one key."""
    key, *rest = path
    if rest:
        return {**config, key: edited(config[key], tuple(rest), value)}
    return {name: each for name, each in config.items() if name != key} | ({} if value is ... else {key: value})
