"""Differences of two checkpoints besides weights: configs, tokenizers, generation configs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.checkpoint.config import parse_json, read_small
from weightscope.checkpoint.gguf import GgufFile
from weightscope.checkpoint.opening import LARGEST_SMALL_FILE, TOKENIZER_FILES
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.heads.tensors.tied_head import TIED, tie_holds
from weightscope.model.config.computed import Difference, differences, stated
from weightscope.model.config.effects import NONE, UNKNOWN
from weightscope.model.model import Model
from weightscope.report.findings import Finding, finding, listed

NAMED = 6  # keys in a sentence; all are in the JSON
SETTINGS = {
    "tokenizer_config.json": "tokenizer settings",
    "generation_config.json": "generation config",
}
TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENS = "vocab_size"
# keys of a generation config that generate nothing
WRITER = {"transformers_version", "_from_model_config"}


class SettingsChange(NamedTuple):
    """Differences of one checkpoint's config, tokenizer and generation config from another's."""

    label: str
    config: list[Difference]
    files: list[str]  # a sentence each
    resized: bool = False  # another number of tokens: the comparison of tensors tells the rows

    @property
    def deciding(self) -> list[Difference]:
        """The keys that decide what is computed, or may."""
        return [difference for difference in self.config if difference.effect != NONE]

    @property
    def sentence(self) -> str:
        """The keys that decide what is computed, in a sentence; empty where none differs."""
        if not self.deciding:
            return ""
        is_unknown = all(difference.effect == UNKNOWN for difference in self.deciding)
        which = "may decide" if is_unknown else "decides"
        named = listed([printable(difference) for difference in self.deciding], NAMED)
        return f"The config of {printable(self.label)} {which} another computation: {named}."

    @property
    def asides(self) -> list[str]:
        """Differences that decide nothing computed from the same tokens, a sentence each."""
        without_effect = [each for each in self.config if each.effect == NONE]
        idle = [
            each.named
            for each in without_effect
            if not (self.resized and _last(each.key) == TOKENS)
        ]
        named = listed([printable(key) for key in idle], NAMED)
        sentence = f"Config keys without effect on what is computed also differ: {named}."
        return [*([sentence] if idle else []), *self.files]

    @finding(
        "other_computation",
        "config that computes something else",
        severity="warning",
        rank=220,
        look_next="Check each key: with the same weights, another value gives other attention or "
        "other logits.",
    )
    def findings(self) -> Iterator[Finding]:
        """The difference in what is computed."""
        if self.deciding:
            yield Finding(
                kind="other_computation",
                text=self.sentence,
                measure="config_keys",
                number=len(self.deciding),
                usual=0.0,
            )

    def records(self) -> list[dict[str, Any]]:
        """One record for each key."""
        return [
            {
                "checkpoint": self.label,
                "config": each.key,
                "a": each.a,
                "b": each.b,
                "effect": each.effect,
            }
            for each in self.config
        ]


def settings_change(a: Model, b: Model, label: str) -> SettingsChange:
    """Compare the config and the files of `a` and `b`; `label` names `b`."""
    config = differences(stated(a.checkpoint, a.row), stated(b.checkpoint, b.row))
    if any(_last(each.key) == TIED for each in config) and all(map(tie_holds, (a, b))):
        config = [
            each._replace(effect=NONE) if _last(each.key) == TIED else each for each in config
        ]
    rows = [[tensor.shape[0] for tensor in model.ends.input_tensors[:1]] for model in (a, b)]
    return SettingsChange(label, config, list(_files(a, b)), rows[0] != rows[1])


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _files(a: Model, b: Model) -> Iterator[str]:
    """Sentences on how the files for tokens and generation differ."""
    first = [file for model in (a, b) for file in model.checkpoint.files[:1]]
    if all(isinstance(file, GgufFile) for file in first):
        configs = [file.config for file in first if isinstance(file, GgufFile)]
        keys = [{k: v for k, v in c.items() if k.startswith("tokenizer.")} for c in configs]
        changed = sorted(
            key for key in {*keys[0], *keys[1]} if keys[0].get(key) != keys[1].get(key)
        )
        template = "tokenizer.chat_template"
        if rest := [printable(key) for key in changed if key != template]:
            yield f"Tokenizer: {listed(rest, NAMED)} differ."
        if template in changed:
            yield "Chat template: it differs."
        return
    if not all(isinstance(file, LocalFile) for file in first):
        yield (
            "Tokenizer, chat template and generation config were not compared: not all are "
            "files on this machine."
        )
        return
    x, y = a.checkpoint.folder, b.checkpoint.folder
    if x == y:
        return
    for name in (name for name in TOKENIZER_FILES if name not in SETTINGS):
        if problem := _bytes(x, y, name):
            yield f"Tokenizer: {_vocabulary(x, y, name) or problem}."
    templates = [_bytes(x, y, name) for name in TEMPLATES]
    objects = {name: tuple(_object(folder / name) for folder in (x, y)) for name in SETTINGS}
    of_tokens = [values.pop("chat_template", None) for values in objects["tokenizer_config.json"]]
    if any(templates) or of_tokens[0] != of_tokens[1]:
        yield "Chat template: it differs."
    for name, what in SETTINGS.items():
        here = [(folder / name).is_file() for folder in (x, y)]
        old, new = objects[name]
        changed = sorted(key for key in {*old, *new} - WRITER if old.get(key) != new.get(key))
        if here[0] != here[1]:
            yield f"{what.capitalize()}: only one of the two has a {name}."
        elif changed:
            yield (
                f"{what.capitalize()}: {listed([printable(key) for key in changed], NAMED)} differ."
            )


def _bytes(x: Path, y: Path, name: str) -> str:
    """The difference of a file in two folders, in words; empty where there is none."""
    here = [(folder / name).is_file() for folder in (x, y)]
    if here[0] != here[1]:
        return f"only one of the two has a {name}"
    if not any(here):
        return ""
    try:
        old, new = (read_small(folder / name, LARGEST_SMALL_FILE) for folder in (x, y))
        return "" if old == new else f"{name} differs"
    except CheckpointError as error:
        return f"{name} was not compared ({printable(error)})"


def _vocabulary(x: Path, y: Path, name: str) -> str:
    """The number of tokens with another id in tokenizer.json, in words; empty for none."""
    if name != "tokenizer.json" or not all((folder / name).is_file() for folder in (x, y)):
        return ""
    old, new = (_object(folder / name).get("model") for folder in (x, y))
    old, new = (model.get("vocab") if isinstance(model, Mapping) else None for model in (old, new))
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)) or old == new:
        return ""
    changed = sum(old.get(token) != new.get(token) for token in {*old, *new})
    return f"vocabulary differs ({changed:,} of {counted(len({*old, *new}), 'token')})"


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty where there is none that can be read."""
    try:
        return parse_json(read_small(path, LARGEST_SMALL_FILE), file=path) if path.is_file() else {}
    except CheckpointError:  # `_bytes` has compared it, or it is the tokenizer's error
        return {}


def first_sentence(changes: Sequence[SettingsChange]) -> str:
    """The first sentence on a config that decides another computation; empty without one."""
    return next((change.sentence for change in changes if change.deciding), "")
