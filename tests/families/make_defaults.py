"""Write what configs may leave out because transformers' classes have it by default.

    python -m tests.families.make_defaults

Of every model_type that the installed transformers knows: the sizes of its default config, and the model_type of each
part of it, by the keys that lead there.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.families import FAMILIES
from weightscope.families.config import KEYS
from weightscope.families.defaults import FILE

MEANINGS = ("n_layers", "d_model", "n_heads")


def size_keys() -> set[str]:
    """The config keys that a row reads a size from."""
    rows = [row.keys.get(meaning, ()) for row in FAMILIES for meaning in MEANINGS]
    heads = [keys for row in FAMILIES for keys in (row.kv_heads, row.head_dim) if isinstance(keys, tuple)]
    return {key for keys in (*(KEYS[meaning] for meaning in MEANINGS), *rows, *heads) for key in keys}


def inner(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The keys that lead to each part of a config, with dots between them, and its model_type."""
    for key, part in config.items():
        if isinstance(part, Mapping):
            own = f"{path}.{key}" if path else key
            if isinstance(part.get("model_type"), str) and part["model_type"]:
                yield own, part["model_type"]
            yield from inner(part, own)


def sizes(model_type: str, keys: set[str]) -> dict[str, int]:
    """The sizes of a default config that are the class's, not made of its other sizes: those stay in a larger one."""
    make = CONFIG_MAPPING[model_type]
    config = make().to_dict()
    larger = {
        key: config[key] * times
        for meaning, times in (("d_model", 4), ("n_heads", 2))
        for key in KEYS[meaning]
        if type(config.get(key)) is int
    }
    try:
        other = make(**larger).to_dict()
    except ValueError:  # its sizes hang together; those that are not made of others are known all the same
        other = {}
    kept = (key for key in sorted(keys & config.keys()) if key in larger or other.get(key) == config[key])
    return {key: config[key] for key in kept if type(config[key]) is int}


def defaults() -> dict[str, dict[str, Any]]:
    """What the file holds: {model_type: {"sizes": ..., "parts": ...}}."""
    keys, found = size_keys(), {}
    for model_type in CONFIG_MAPPING:
        try:
            own = {"sizes": sizes(model_type, keys), "parts": dict(inner(CONFIG_MAPPING[model_type]().to_dict()))}
        except Exception as error:  # one that cannot be made without arguments, or without another library
            print(f"{model_type}: {' '.join(str(error).split())[:100]}")
            continue
        found[model_type] = {name: value for name, value in own.items() if value}
    return {model_type: found[model_type] for model_type in sorted(found) if found[model_type]}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    lines = (f"{json.dumps(kind)}: {json.dumps(values)}" for kind, values in defaults().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
