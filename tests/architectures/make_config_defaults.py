"""Write what a config.json may leave out, of every key: the defaults of transformers' classes.

    python -m tests.architectures.make_config_defaults

For every model_type that a row reads, and of the parts of wrappers: {key: {value as JSON: model_types}}, without nulls,
and without keys that have no effect on what is computed. "derived" has the keys whose value follows from other keys
where it is left out, "names" the other names of keys, each with the one that the class stores it under.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.architectures import FAMILIES
from weightscope.architectures.computed import FILE, NO_EFFECT
from weightscope.architectures.config import KEYS, class_says

LARGER = {"n_layers": 2, "d_model": 4, "n_heads": 2}  # times the default


def written(config: Any) -> dict[str, Any]:
    """What it would save, parts left out."""
    values = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if not isinstance(value, Mapping) or "__float__" in value}


def derived(make: Any, usual: Mapping[str, Any]) -> set[str]:
    """The keys that become others where sizes do."""
    read_keys: set[str] = set()
    for meaning, times in LARGER.items():
        for key in KEYS[meaning]:
            if type(usual.get(key)) is int:
                with suppress(Exception):
                    made = written(make(**{key: times * usual[key]}))
                    read_keys |= {name for name in usual if name != key and made.get(name) != usual[name]}
    with suppress(Exception):  # and where half-tied or sharded settings are others
        made = written(make(tie_word_embeddings=not usual["tie_word_embeddings"]))
        read_keys |= {name for name in usual if name != "tie_word_embeddings" and made.get(name) != usual[name]}
    return read_keys


def tables() -> dict[str, Any]:
    """What the file holds."""
    kinds = {kind for row in FAMILIES for kind in row.types}
    kinds |= {inner for kind in kinds for inner in class_says(kind, "parts").values()}
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    of_others: dict[str, list[str]] = defaultdict(list)
    names: dict[str, dict[str, str]] = {}
    for kind in sorted(kinds & {*CONFIG_MAPPING}):
        make = CONFIG_MAPPING[kind]
        try:
            usual = written(make())
        except Exception as error:
            print(f"{kind}: {' '.join(str(error).split())[:100]}")
            continue
        following = derived(make, usual)
        for key in sorted(usual):
            if key in following:
                of_others[key].append(kind)
            elif usual[key] is not None and not NO_EFFECT.fullmatch(key) and key != "model_type":
                values[key][json.dumps(usual[key])].append(kind)
        if make.attribute_map:
            names[kind] = dict(make.attribute_map)
    joined = {key: {value: " ".join(kinds) for value, kinds in sorted(these.items())} for key, these in values.items()}
    follow = {key: " ".join(kinds) for key, kinds in sorted(of_others.items())}
    return {"values": dict(sorted(joined.items())), "derived": follow, "names": names}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    parts = []
    for title, table in tables().items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        parts.append(f"{json.dumps(title)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
