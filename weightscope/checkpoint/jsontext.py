"""JSON that nobody vouches for: bounded before it is parsed, because parsing is where the memory goes.

A byte of JSON can cost forty of Python objects, so what counts is not only how long the text is but how many objects,
lists and items it makes. The largest files published have some thousands of tensors, the largest indexes a hundred
thousand; the limits leave room above both and keep the worst text that passes under a second and 200 MB.
"""

import json
from pathlib import Path
from typing import Any

from weightscope.errors import CheckpointError
from weightscope.regular import regular_file

MAX_BYTES = 16_000_000
MAX_OBJECTS = 50_000  # a header has one for each tensor
MAX_LISTS = 100_000  # and two of these: shape and data_offsets
MAX_ITEMS = 500_000  # commas: some five for each tensor of a header, one for each of an index
MAX_DEPTH = 50
POINTER = b"version https://git-lfs.github.com/spec/"


def parse_json(text: bytes, *, file: object, what: str = "") -> dict[str, Any]:
    """The JSON object that `text` holds, no key standing twice.

    Parameters
    ----------
    text : bytes
    file : path-like
        Named in errors.
    what : str, optional
        What of the file the text is, for errors: "header ".

    Raises
    ------
    CheckpointError
        The text is over the limits, not UTF-8, not JSON, not an object, or has a key twice.
    """
    counts = (
        (len(text), MAX_BYTES, "bytes"),
        (text.count(b"{"), MAX_OBJECTS, "objects"),
        (text.count(b"["), MAX_LISTS, "lists"),
        (text.count(b","), MAX_ITEMS, "items"),
    )
    for found, limit, unit in counts:
        if found > limit:
            raise CheckpointError(f"{what}has {found} {unit}; at most {limit} are read", file=file)
    try:
        decoded = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{what}is not valid JSON ({error})", file=file) from None
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{what}is a JSON {type(decoded).__name__}; an object was expected", file=file)
    _refuse_deep_nesting(decoded, file, what)
    return decoded


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file such as config.json or an index.

    Raises
    ------
    CheckpointError
        The file is unreadable, not a regular file, or holds what `parse_json` refuses.
    """
    return parse_json(read_small(path, MAX_BYTES), file=path)


def read_small(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes."""
    with regular_file(path) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise CheckpointError(f"has more than {limit} bytes; no more are read", file=path)
    refuse_pointer(text, path)
    return text


def refuse_pointer(start: bytes, file: object) -> None:
    """Refuse what Git leaves in a clone in a large file's place."""
    if start.startswith(POINTER):
        size = next((line[5:] for line in start.splitlines() if line.startswith(b"size ")), b"?").decode(
            errors="replace"
        )
        problem = (
            f"is a Git LFS pointer that stands for a file of {size} bytes; `git lfs pull` in its folder fetches it"
        )
        raise CheckpointError(problem, file=file)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key '{twice[:100]}' stands twice")
    return unique


def _refuse_deep_nesting(decoded: dict[str, Any], file: object, what: str) -> None:
    """Level by level, so that depth costs no stack here; whoever prints or walks the values later is spared it."""
    level: list[Any] = [decoded]
    for _ in range(MAX_DEPTH):
        children = (value for node in level for value in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise CheckpointError(f"{what}nests deeper than {MAX_DEPTH} levels", file=file)
