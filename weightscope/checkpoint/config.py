"""A config.json that nobody vouches for: its values are checked as they are read, and errors name the file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weightscope.errors import CheckpointError

LARGEST = 10**7  # no size in a config is near this; more is a broken or hostile file
Default = TypeVar("Default")


@dataclass(frozen=True, eq=False)
class Config(Mapping[str, Any]):
    """The values of a config, or of an object within one, and the file they are from.

    `config[key]` and `config.get(key)` give a value as it stands; the methods below give it checked. A key whose value
    is null counts as missing, as it does to transformers.

    Attributes
    ----------
    raw : mapping
    file : path-like
        Named in errors.

    Examples
    --------
    >>> config = Config({"n_head": 12, "n_embd": "many"}, "config.json")
    >>> config.size("num_attention_heads", "n_head")
    12
    >>> config.size("n_embd")
    Traceback (most recent call last):
    weightscope.errors.CheckpointError: config.json: 'n_embd' is many; a whole number from 1 to 10000000 was expected
    """

    raw: Mapping[str, Any] = field(repr=False)
    file: object

    def __getitem__(self, key: str) -> Any:
        return self.raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def error(self, key: str, wanted: str) -> CheckpointError:
        """What to raise when the value of `key` is not what was `wanted`."""
        return CheckpointError(f"'{key}' is {str(self.get(key))[:40]}; {wanted} was expected", file=self.file)

    def has(self, *keys: str) -> bool:
        """Whether one of `keys` has a value."""
        return any(self.get(key) is not None for key in keys)

    def _first(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.has(key)), keys[0])

    def size(self, *keys: str, default: int | None = None, largest: int = LARGEST) -> int:
        """A positive whole number under the first of `keys` that is there; `default` where none is.

        Raises
        ------
        CheckpointError
            It is something else, or none of them is there and there is no default.
        """
        if default is not None and not self.has(*keys):
            return default
        key = self._first(keys)
        value = self.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(key, f"a whole number from 1 to {largest}")
        return value

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is where `key` has no value."""
        return 0 if self.get(key) in (None, 0) else self.size(key)

    def number(
        self, *keys: str, default: float | None = None, smallest: float = 0.0, largest: float = 1e12
    ) -> float:  # fmt: skip
        """A finite number from `smallest` to `largest` under the first of `keys` that is there; else as `size`."""
        if default is not None and not self.has(*keys):
            return default
        key = self._first(keys)
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not smallest <= value <= largest:
            raise self.error(key, f"a number from {smallest:g} to {largest:g}")  # NaN fails both comparisons
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false, or the nearest thing to it in old files: 1 or 0."""
        value = self.get(key)
        if value not in (True, False):
            raise self.error(key, "true or false")
        return bool(value)

    def strings(self, key: str, count: int) -> tuple[str, ...]:
        """The first `count` of a list of strings."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) < count or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"a list of at least {count} names")
        return tuple(value[:count])

    def layers(self, key: str) -> list[int]:
        """The layers that a list names; none of them where `key` has no value."""
        value = self.get(key) or []
        if not isinstance(value, list):
            raise self.error(key, "a list of layers")
        return value

    def inside(self, key: str) -> "Config":
        """The object under `key`; empty where there is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Config(value or {}, self.file)
