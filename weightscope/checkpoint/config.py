"""Untrusted JSON, size-checked before parsing, and the checked values of a config.json.

A byte of JSON can cost forty bytes of Python objects, so the limits count objects, lists and items
besides bytes. The largest published files have some thousands of tensors, the largest indexes a
hundred thousand; the worst text within the limits takes less than a second and 200 MB.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from weightscope.core.errors import CheckpointError
from weightscope.core.files import regular_file

MAX_BYTES = 16_000_000
MAX_OBJECTS = 50_000  # a header has one per tensor
MAX_LISTS = 100_000  # a header has two per tensor: shape and data_offsets
MAX_ITEMS = 500_000  # commas: about five per tensor of a header, one per tensor of an index
MAX_DEPTH = 50
LONGEST_KEY = 1_000  # characters of a key, such as a tensor's name, which messages and pages show
LARGEST = 10**7  # largest size in a config; no real one is near it
POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file such as config.json or an index."""
    return parse_json(read_small(path, MAX_BYTES), file=path)


def read_small(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(min(size, limit) + 1)  # memory is set aside before any byte is read
    if len(text) > limit:
        raise CheckpointError(f"has more than {limit} bytes; no more are read", file=path)
    refuse_pointer(text, path)
    return text


def refuse_pointer(start: bytes, file: object) -> None:
    """Refuse a Git LFS pointer, which a clone without LFS has in place of a large file."""
    if start.startswith(POINTER):
        sizes = (line[5:] for line in start.splitlines() if line.startswith(b"size "))
        size = next(sizes, b"?").decode(errors="replace")
        problem = f"is a Git LFS pointer to a file of {size} bytes"
        advice = "run `git lfs pull` in its folder to fetch it"
        raise CheckpointError(f"{problem}; {advice}", file=file)


def parse_json(text: bytes, *, file: object, what: str = "", times: int = 1) -> dict[str, Any]:
    """The JSON object in `text`, without duplicate keys; `what` begins the problem in errors.

    times: the usual limits, for a file with more entries than a header.
    """
    for count, limit, unit in (
        (len(text), MAX_BYTES, "bytes"),
        (text.count(b"{"), MAX_OBJECTS, "objects"),
        (text.count(b"["), MAX_LISTS, "lists"),
        (text.count(b","), MAX_ITEMS, "items"),
    ):
        if count > times * limit:
            problem = f"{what}has {count} {unit}; at most {times * limit} are read"
            raise CheckpointError(problem, file=file)

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"key '{duplicate[:100]}' appears twice")
        if (longest := max(map(len, unique), default=0)) > LONGEST_KEY:
            problem = f"{what}has a name of {longest} characters; at most {LONGEST_KEY} are read"
            raise CheckpointError(problem, file=file)
        return unique

    try:
        decoded = json.loads(text.decode("utf-8"), object_pairs_hook=checked)
    except (ValueError, RecursionError) as error:  # errors of Unicode and JSON are ValueErrors
        raise CheckpointError(f"{what}is not valid JSON ({error})", file=file) from None
    if not isinstance(decoded, dict):
        problem = f"{what}is a JSON {type(decoded).__name__}; an object was expected"
        raise CheckpointError(problem, file=file)
    # Code that walks the values recursively would run out of stack; this does not recurse.
    level: list[Any] = [decoded]
    for _ in range(MAX_DEPTH):
        children = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for child in chain(*children) if isinstance(child, dict | list)]
        if not level:
            return decoded
    raise CheckpointError(f"{what}nests deeper than {MAX_DEPTH} levels", file=file)


# Keys that say who wrote a config and how weights are stored, nothing of the architecture.
WRITERS = {
    "transformers_version", "_name_or_path", "dtype", "torch_dtype", "quantization_config",
    "quantization",
}  # fmt: skip
# Keys by which transformers would import a module, fetch a repository's code, or read other weights
# than these. None of them says what the model computes.
CODE = re.compile(
    r"_?(attn|experts)_implementation(_internal)?|auto_map|custom_pipelines|transformers_weights"
    r"|distributed_config|use_kernels?|kernel_config|_?name_or_path|_commit_hash"
    r"|use_pretrained_backbone"
)
QUANTISED_BY = ("backend", "tokenizer", "dataset")  # keys of quantization_config without effect
DEQUANTISED = ("fp8", "mxfp4")  # transformers decodes these itself if it may fetch no kernel


def without_code(values: Mapping[str, Any], file: object) -> dict[str, Any]:
    """A config for transformers, without keys by which it would run what a checkpoint names."""
    backbone = values.get("backbone")
    is_repository = isinstance(backbone, str) and re.search("[/:]", backbone)
    if is_repository and values.get("backbone_config") is None:
        problem = f"names another repository, '{str(backbone)[:100]}', as its backbone"
        raise CheckpointError(f"{problem}; a backbone_config was expected", file=file)
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if not CODE.fullmatch(key):
            kept[key] = _without_code_within(value, file)
    for key in ("quantization_config", "compression_config"):
        if isinstance(settings := kept.get(key), dict):
            settings = {name: value for name, value in settings.items() if name not in QUANTISED_BY}
            if settings.get("quant_method") in DEQUANTISED:
                settings["dequantize"] = True
            kept[key] = settings
    return kept


def _without_code_within(value: Any, file: object) -> Any:
    if isinstance(value, list):
        return [_without_code_within(item, file) for item in value]
    return without_code(value, file) if isinstance(value, Mapping) else value


def digest_of(values: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of a config's values, regardless of what wrote it."""
    kept = {key: value for key, value in values.items() if key not in WRITERS}
    return sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Config(Mapping[str, Any]):
    """The values of a config, or of an object within one, checked as they are read.

    `config[key]` and `config.get(key)` give the bare value; the methods below check it. As in
    transformers, a key with value null counts as missing.

    Examples
    --------
    >>> config = Config({"n_head": 12, "n_embd": "?"}, "config.json")
    >>> config.size("num_attention_heads", "n_head")
    12
    >>> config.size("n_embd")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    weightscope.core.errors.CheckpointError: config.json: 'n_embd' is ?; a whole number from ...
    """

    raw: Mapping[str, Any] = field(repr=False)
    file: object  # named in errors
    # Sentences on the reading that was taken, of several.
    notes: tuple[str, ...] = field(default=(), kw_only=True, repr=False)
    # Name, bytes and SHA-256 of each file that it was read from.
    stored: tuple[tuple[str, int, str], ...] = field(default=(), kw_only=True, repr=False)

    def __getitem__(self, key: str) -> Any:
        return self.raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def error(self, key: str, wanted: str) -> CheckpointError:
        """The error for a value of `key` that is not what was `wanted`."""
        problem = f"'{key}' is {str(self.get(key))[:40]}; {wanted} was expected"
        return CheckpointError(problem, file=self.file)

    def has(self, *keys: str) -> bool:
        """True if any of `keys` has a value."""
        return any(self.get(key) is not None for key in keys)

    def size(self, *keys: str, default: int | None = None, largest: int = LARGEST) -> int:
        """A positive whole number: of the first of `keys` with a value, else `default` or error."""
        key = next((key for key in keys if self.get(key) is not None), keys[0] if keys else "")
        value = self.get(key)
        if default is not None and value is None:
            return default
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(key, f"a whole number from 1 to {largest}")
        return value

    def count(self, key: str) -> int:
        """A whole number from 0; 0 where `key` has no value."""
        return 0 if self.get(key) in (None, 0) else self.size(key)

    def number(
        self, *keys: str, default: float | None = None, smallest: float = 0.0, largest: float = 1e12
    ) -> float:
        """A finite number from `smallest` to `largest`; keys and default as for `size`."""
        key = next((key for key in keys if self.get(key) is not None), keys[0] if keys else "")
        value = self.get(key)
        if default is not None and value is None:
            return default
        wanted = f"a number from {smallest:g} to {largest:g}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, wanted)
        if not smallest <= value <= largest:  # NaN fails both comparisons
            raise self.error(key, wanted)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; old files have 1 or 0."""
        value = self.get(key)
        if value not in (True, False):
            raise self.error(key, "true or false")
        return bool(value)

    def strings(self, key: str, count: int) -> tuple[str, ...]:
        """The first `count` of a list of strings."""
        value = self.get(key)
        names = value if isinstance(value, list) else None
        if names is None or len(names) < count or not all(isinstance(n, str) for n in names):
            raise self.error(key, f"a list of at least {count} names")
        return tuple(names[:count])

    def layers(self, key: str) -> list[int]:
        """A list of layer indices; empty where `key` has no value."""
        value = self.get(key) or []
        if not isinstance(value, list):
            raise self.error(key, "a list of layers")
        return value

    def inside(self, key: str) -> "Config":
        """The object under `key`; empty where it has no value."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Config(value or {}, self.file)
