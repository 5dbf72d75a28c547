"""Write what a config.json may leave out, of every key: the defaults of transformers' classes.

    python -m tests.model.rows.make_config_defaults

For every model_type that a row reads, and of the parts of wrappers: {key: {value as JSON: model_types}}, without nulls,
and without keys that have no effect on what is computed. "derived" has the keys whose value follows from other keys
where it is left out, "names" the other names of keys, each with the one that the class stores it under, "unset" the
keys that the class takes without a default, "nulls" those whose null means their default, "unread" those that neither
the model's code nor its config's reads, "read" those that seem to have no effect and that the code reads all the same,
"heads" those that only heads for a task read.
"""

import ast
import inspect
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.model.config.config import KEYS, class_says
from weightscope.model.config.effects import FILE, HEAD, NO_EFFECT
from weightscope.model.rows.table import FAMILIES

LARGER = {"n_layers": 2, "d_model": 4, "n_heads": 2}  # times the default


TOKENS = re.compile(r"(bos|eos|pad|sep|cls|mask|decoder_start)_token_id")  # keys of tokens that code may look for
NOT_RUN = re.compile(r"generate|prepare_\w+|_get_decoder_start_token_id|build_\w+|dummy_inputs|get_nll|_pad_to_\w+")
OF_LABELS = re.compile(r".*(ForCTC|ForTDT|ForCausalLM|ForConditionalGeneration)")  # which read a pad to make a loss
BY_PREFIX = re.compile("t2u_|rope_")  # keys that code reads without their names


@lru_cache(None)
def parsed(path: Path) -> ast.Module:
    """The code of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


@lru_cache(None)
def words(tree: ast.AST) -> set[str]:
    """Every name that code uses, attributes and strings among them, docstrings and declared fields left out."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name | ast.arg) and id(node) not in fields:
            names.add(node.id if isinstance(node, ast.Name) else node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            names.add(node.value)
    return names


@lru_cache(None)
def config_reads(tree: ast.AST) -> set[str]:
    """The keys that code reads of something called config."""
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and "config" in ast.unparse(node.value):
            keys.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and node.args[1:]:
            key = getattr(node.args[1], "value", "")
            keys |= {str(key)} if "config" in ast.unparse(node.args[0]) else set()
    return keys


@lru_cache(None)
def read_by_all() -> set[str]:
    """The keys that code shared by all models reads."""
    root = Path(inspect.getfile(transformers)).parent
    shared = [path for pattern in ("model*.py", "mask*.py", "integrations/*.py") for path in root.glob(pattern)]
    return {key for path in shared for key in config_reads(parsed(path))}


def modules_of(make: Any) -> set[Path]:
    """The modules of a config's models: its folder's modules, and the modules they take classes from."""
    folder = Path(inspect.getfile(make)).parent
    modules = {*folder.glob("modeling_*.py")}
    for path in [*modules]:
        froms = (node for node in parsed(path).body if isinstance(node, ast.ImportFrom) and node.level == 2)
        places = [folder.parent.joinpath(*(node.module or "").split(".")).with_suffix(".py") for node in froms]
        modules |= {place for place in places if place.name.startswith("modeling_") and place.exists()}
    return modules


class Code:
    """What the code of a config's models reads of it."""

    def __init__(self, make: Any) -> None:
        own = parsed(Path(inspect.getfile(make)))
        self.names = make.attribute_map or {}
        self.words = {*read_by_all(), *words(own)}
        self.taken = {*taken(own)}  # without a field of that name
        self.tokens: set[str] = set()  # keys of tokens that it looks for
        self.of_heads: set[str] = set()  # likewise, of heads for some task alone
        classes = [node for path in modules_of(make) for node in parsed(path).body if isinstance(node, ast.ClassDef)]
        self.is_known = bool(classes)
        for path in modules_of(make):
            self.words |= words(parsed(path))
        heads = {node.name: node for node in classes if HEAD.fullmatch(node.name)}
        bodies = {node.name: words(node) for node in classes}
        while True:  # what other classes use is no head
            outside = set(words(own)).union(*(found for name, found in bodies.items() if name not in heads))
            if heads.keys().isdisjoint(outside):
                break
            heads = {name: node for name, node in heads.items() if name not in outside}
        for node in classes:
            self._look_into(node, node.name in heads)
        if {"create_causal_mask", "create_sliding_window_causal_mask"} & self.words:
            self.taken.add("is_causal")
        self.inside_heads = {word for word in self.words - outside - read_by_all() if not NO_EFFECT.fullmatch(word)}
        self.of_heads -= self.tokens

    def _look_into(self, outer: ast.ClassDef, is_head: bool) -> None:
        """Find the keys of tokens that a class looks for."""
        if any("GenericForSequenceClassification" in ast.unparse(base) for base in outer.bases):
            self.of_heads.add("pad_token_id")
        if "Position" in outer.name and "padding_idx" in words(outer):
            self.tokens.add("pad_token_id")
        functions = [node for node in outer.body if isinstance(node, ast.FunctionDef)]
        kept = {name: key for each in functions if each.name == "__init__" for name, key in kept_keys(each)}
        for inner in functions:
            asked = config_reads(inner)
            if inner.name != "__init__":
                asked = asked | {kept[name] for name in own_reads(inner) & {*kept}}
            keys = {key for key in (self.names.get(key, key) for key in asked) if TOKENS.fullmatch(key)}
            if inner.name == "__init__" or OF_LABELS.fullmatch(outer.name):
                keys -= {"pad_token_id", "decoder_start_token_id"}
            if not NOT_RUN.fullmatch(inner.name):
                (self.of_heads if is_head else self.tokens).update(keys)


def kept_keys(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The attributes that code keeps a key under, with the key: `self.padding_idx = config.pad_token_id`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            (target, *_), key = node.targets, node.value
            if ast.unparse(key.value) == "config" and ast.unparse(target).startswith("self."):
                yield ast.unparse(target).removeprefix("self."), key.attr


def own_reads(tree: ast.AST) -> set[str]:
    """The attributes of its own object that code reads."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    return {node.attr for node in nodes if ast.unparse(node.value) == "self"}


def taken(tree: ast.AST) -> Iterator[str]:
    """The keys that a config's class takes by name though it has no field for them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get", "kwargs.setdefault"):
            yield str(getattr(node.args[0], "value", ""))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "kwargs":
            yield str(getattr(node.slice, "value", ""))


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


def nulls(make: Any, usual: Mapping[str, Any]) -> Iterator[str]:
    """The keys that mean the default where they are null, whatever is on or off and however large the model is."""
    switches: list[dict[str, Any]] = [{key: not value} for key, value in usual.items() if isinstance(value, bool)]
    sizes = ((key, times) for meaning, times in LARGER.items() for key in KEYS[meaning])
    switches += [{key: times * usual[key]} for key, times in sizes if type(usual.get(key)) is int]
    for key in {*usual} - {"tie_word_embeddings"}:  # a null unties in transformers 4
        with suppress(Exception):
            if (
                usual[key] is not None
                and written(make(**{key: None})) == usual
                and all(
                    written(make(**{**switch, key: None})) == written(make(**switch))
                    for switch in switches
                    if key not in switch
                )
            ):
                yield key


def made() -> dict[str, Any]:
    """What the file holds."""
    kinds = {kind for row in FAMILIES for kind in row.types}
    kinds |= {inner for kind in kinds for inner in class_says(kind, "parts").values()}
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    of_others: dict[str, list[str]] = defaultdict(list)
    names: dict[str, dict[str, str]] = {}
    tables: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
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
        code = Code(make)
        seen = code.words | {stored for key, stored in make.attribute_map.items() if key in code.words}
        for key in sorted({*usual} - {"model_type"}):
            if usual[key] is None and not NO_EFFECT.fullmatch(key):
                tables["unset"][key].append(kind)
            if code.is_known and key not in seen and not NO_EFFECT.fullmatch(key) and not BY_PREFIX.match(key):
                tables["unread"][key].append(kind)
        default = {key for key in nulls(make, usual) if key not in following and not NO_EFFECT.fullmatch(key)}
        by_title = {"unset": code.taken - {*usual}, "read": code.tokens & {*usual}, "nulls": default - {"model_type"}}
        for title, keys in by_title.items():
            for key in keys:
                tables[title][key].append(kind)
        for key in (code.of_heads | code.inside_heads) & {*usual}:
            tables["heads"][key].append(kind)
    joined = {key: {value: " ".join(kinds) for value, kinds in sorted(these.items())} for key, these in values.items()}
    by_key = {
        title: {key: " ".join(kinds) for key, kinds in sorted(table.items())}
        for title, table in {"derived": of_others, **tables}.items()
    }
    return {"values": dict(sorted(joined.items())), "names": names, **by_key}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    parts = []
    for title, table in made().items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        parts.append(f"{json.dumps(title)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
