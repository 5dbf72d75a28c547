"""Write what configs may leave out because transformers' classes have it by default.

    python -m tests.model.rows.make_defaults

Of every model_type that the installed transformers knows: the sizes of its default config, the model_type of each part
of it, by the keys that lead there, and the values of the keys that its rows read and config.json may leave out. Which
keys these are stays as the file has it; of a type that it has not, all that its rows name and that are no sizes. Then
which of the names that sizes have its class knows, each with the one it stores them under, and its rotary parameters
where a config has none.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.model.config.config import FILE, KEYS
from weightscope.model.rows.stanzas import stanza_of
from weightscope.model.rows.table import FAMILIES

MEANINGS = ("n_layers", "d_model", "n_heads")


def size_keys() -> set[str]:
    """The config keys that a row reads a size from."""
    rows = [row.config.keys.get(meaning, ()) for row in FAMILIES for meaning in MEANINGS]
    heads = [keys for row in FAMILIES for keys in (row.heads.kv_heads, row.heads.head_dim) if isinstance(keys, tuple)]
    return {key for keys in (*(KEYS[meaning] for meaning in MEANINGS), *rows, *heads) for key in keys}


def inner(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The keys that lead to each part of a config, with dots between them, and its model_type."""
    for key, part in config.items():
        if isinstance(part, Mapping):
            here = f"{path}.{key}" if path else key
            if isinstance(part.get("model_type"), str) and part["model_type"]:
                yield here, part["model_type"]
            yield from inner(part, here)


def sizes(make: Any, keys: set[str]) -> dict[str, int]:
    """The sizes of a default config that are the class's, not made of its other sizes: those stay in a larger one."""
    config = make().to_dict()
    larger = {
        key: config[key] * times
        for meaning, times in (("d_model", 4), ("n_heads", 2))
        for key in KEYS[meaning]
        if type(config.get(key)) is int
    }
    try:
        number = make(**larger).to_dict()
    except Exception:  # its sizes hang together; those that are not made of others are known all the same
        number = {}
    kept = (key for key in sorted(keys & config.keys()) if key in larger or number.get(key) == config[key])
    return {key: config[key] for key in kept if type(config[key]) is int}


def value_keys(model_type: str, known: Mapping[str, Any]) -> set[str]:
    """The keys whose defaults the rows of a type rely on."""
    if model_type in known:
        return set(known[model_type].get("values", ())) - {"rope_parameters"}
    sizes = {key for keys in KEYS.values() for key in keys}
    rows = [row for row in FAMILIES if model_type in row.types]
    return {word for row in rows for word in re.findall(r"\w+", stanza_of(row))} - sizes - {"rope_parameters"}


def values(model_type: str, keys: set[str]) -> dict[str, Any]:
    """What a default config has under these keys, and the epsilon of its norms, if it has one."""
    config = CONFIG_MAPPING[model_type]().to_dict()
    epsilons = config.keys() & KEYS["norm_eps"]
    keys = keys | epsilons if len(epsilons) == 1 else keys
    return {key: config[key] for key in sorted(keys & config.keys())}


def names(make: Any, keys: set[str]) -> dict[str, str]:
    """The names of sizes that a class knows, each with the one that it stores the size under; "" makes another size."""
    usual = make().to_dict()
    known_names = {key: key for key in sorted(keys & usual.keys())} | dict(type(make()).attribute_map)
    for key in sorted(keys - known_names.keys()):  # what only the constructor knows: older names
        for number in (7, 96):
            with suppress(Exception):
                made = make(**{key: number}).to_dict()
                changed = [name for name in known_names if name in usual and usual[name] != made.get(name)]
                if changed:
                    known_names[key] = next((name for name in changed if made.get(name) == number), "")
    return {key: stored for key, stored in known_names.items() if key in keys or stored in keys}


def rotary(make: Any) -> dict[str, Any]:
    """The rotary parameters that a class gives a config without any, before bases and shares at the top are taken."""
    given = getattr(make(), "rope_parameters", None) or {}
    nested = any(isinstance(value, Mapping) for value in given.values())
    here = {"": dict(given)} if not nested else {name: value and dict(value) for name, value in given.items()}
    tops = {"rope_theta": 37.0, "rotary_emb_base": 37.0, "partial_rotary_factor": 0.125, "rotary_pct": 0.125}
    for (top, number), key in zip(tops.items(), ("rope_theta",) * 2 + ("partial_rotary_factor",) * 2, strict=True):
        with suppress(Exception):
            made = make(**{top: number}).rope_parameters
            for name, entry in here.items():
                if entry and (made[name] if nested else made).get(key) == number:
                    entry.pop(key, None)
    if nested:
        return here
    return {} if set(here[""]) <= {"rope_type"} and here[""].get("rope_type") in ("default", "axial") else here[""]


def own_parts(keys: set[str]) -> Iterator[tuple[str, Any]]:
    """What makes the parts of wrappers that no model_type's class makes so, by the wrapper's and the keys there."""
    for model_type, make in CONFIG_MAPPING.items():
        with suppress(Exception):
            usual_config = make()
            for path, part in vars(usual_config).items():
                if isinstance(part, transformers.PreTrainedConfig):
                    known = part.model_type in CONFIG_MAPPING and type(part) is CONFIG_MAPPING[part.model_type]
                    made = partial(_part, make, path, {"model_type": part.model_type} if part.model_type else {})
                    if not known or sizes(made, keys) != sizes(type(part), keys):
                        yield f"{model_type}.{path}", made


def _part(make: Any, path: str, given_values: Mapping[str, Any], **values: Any) -> Any:
    """One part of a wrapper whose config says these values of it."""
    return getattr(make(**{path: {**given_values, **values}}), path)


def defaults() -> dict[str, dict[str, Any]]:
    """What the file holds: {model_type: {"sizes": ..., "parts": ..., "values": ..., "names": ..., "rope": ...}}."""
    keys, known, known_names = size_keys(), json.loads(FILE.read_text(encoding="utf-8")), {}
    named = keys | {key for names in KEYS.values() for key in names}
    read = {kind for row in FAMILIES for kind in row.types}
    read |= {inner for kind in read for inner in known.get(kind, {}).get("parts", {}).values()}
    for model_type in CONFIG_MAPPING:
        try:
            here = {
                "sizes": sizes(CONFIG_MAPPING[model_type], keys),
                "parts": dict(inner(CONFIG_MAPPING[model_type]().to_dict())),
                "values": values(model_type, value_keys(model_type, known)),
                "names": names(CONFIG_MAPPING[model_type], named) if model_type in read else {},
                "rope": rotary(CONFIG_MAPPING[model_type]) if model_type in read else {},
            }
        except Exception as error:  # one that cannot be made without arguments, or without another library
            print(f"{model_type}: {' '.join(str(error).split())[:100]}")
            continue
        known_names[model_type] = {name: value for name, value in here.items() if value}
    nested = {f"{kind}.{row.part}" for row in FAMILIES for kind in row.types}
    for path, make in own_parts(keys):
        if path in nested:
            known_names[path] = {"sizes": sizes(make, keys), "names": names(make, named)}
    return {model_type: known_names[model_type] for model_type in sorted(known_names) if known_names[model_type]}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    lines = (f"{json.dumps(kind)}: {json.dumps(values)}" for kind, values in defaults().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
