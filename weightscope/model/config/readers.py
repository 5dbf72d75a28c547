"""Four readers of a config.json: what each takes from it, and where they disagree.

transformers 5 takes what a model's row reads (`dialects`). transformers 4.57 does not read
`rope_parameters`. vLLM reads the file through transformers 5; the converter of llama.cpp through
4.57, and then looks for `rope_parameters` before `rope_scaling`. `readers.json` has 4.57's
defaults, how each reader's code gives layers a window, and the classes that the others have code
for; tests/model/rows/make_readers.py writes it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from weightscope.checkpoint.config import Config, read_json
from weightscope.core.errors import CheckpointError
from weightscope.model.config.computed import usual_values
from weightscope.model.config.config import ModelConfig, class_says
from weightscope.model.config.dialects import (
    FULL,
    GIVEN,
    SCALING,
    SLIDING,
    TRAINED,
    settings,
    writer_of,
)
from weightscope.model.config.effects import tables, values_by_type, word_sets
from weightscope.model.config.rope import Rope
from weightscope.model.rows.family import Family

FILE = Path(__file__).with_name("readers.json")
FOUR, FIVE, VLLM, LLAMA_CPP = "transformers 4.57", "transformers 5", "vLLM", "llama.cpp"
READERS = FOUR, FIVE, VLLM, LLAMA_CPP
TIE, SLIDES, GATE = "tie_word_embeddings", "sliding_window", "use_sliding_window"
EPS_KEYS = {
    "rms_norm": ("rms_norm_eps", "norm_eps"),
    "layer_norm": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
}
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
THETAS = ("global_rope_theta", "rope_theta", "rotary_emb_base")  # as llama.cpp's converter looks
LOCAL_THETAS = ("local_rope_theta", "swa_rope_theta", "rope_local_base_freq")
# Keys whose defaults and other names readers.json has.
TAKEN = (
    *(*THETAS, *LOCAL_THETAS, "partial_rotary_factor", "rotary_pct", SCALING, "head_dim"),
    *(*EPS_KEYS["rms_norm"], *EPS_KEYS["layer_norm"], TIE, SLIDES, GATE, *ACTIVATIONS),
)
SAME_SCALING = {"su": "longrope", "mrope": "default"}  # older name -> newer
NOT_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section")
LLAMA_CPP_BASE = 10000.0  # where a file of its own has none
WRITTEN = ("default", "linear", "yarn", "longrope", "llama3")  # kinds that its files may have
OWN = "own"  # what classes of its converter have rules of their own for
# How code chooses the layers with a window: by the config's list of types, or all of them.
BY_TYPE, ALL = "by type", "all"
UNKNOWN = "does not read this type"
ELSEWHERE = "reads towers beside a language model by code of its own"
LANGUAGE = ("", "text", "decoder")  # towers of a language model
OTHERWISE = "reads it by code of its own, which is not compared"
UNNAMED = "reads by class, and config.json names none"
SHOWN = 300  # characters of a value in a table or a sentence


class What(StrEnum):
    """Something that a reader takes."""

    BASE = "rotary base"
    SCALED = "rotary scaling"
    DETAILS = "scaling details"
    SHARE = "rotating share"
    HEAD = "head size"
    EPS = "norm eps"
    TIED = "tied embeddings"
    WINDOW = "sliding window"
    WINDOWED = "layers with a window"
    ACTIVATION = "activation"


ROTARY = (What.BASE, What.SCALED, What.DETAILS, What.SHARE)
UNSAID = (What.DETAILS, What.SHARE)  # rules of their own in the classes of llama.cpp's converter


class Place(NamedTuple):
    """Something that a reader takes, for layers of one kind if kinds differ."""

    what: What
    layers: str = ""

    def __str__(self) -> str:
        return f"{self.what}, {self.layers}" if self.layers else str(self.what)


class Takes(NamedTuple):
    """One reader's reading of a config.json."""

    reader: str
    # without what the reader's code decides, whatever the file says
    values: Mapping[Place, Any] = {}
    why: str = ""  # why it takes nothing
    keys: Mapping[Place, str] = {}  # where transformers 4.57 looks for each


class Disagreement(NamedTuple):
    """Something that readers take otherwise from the same file."""

    place: Place
    taken: Mapping[str, Any]  # reader -> its value
    advice: str

    @property
    def values(self) -> str:
        """Say in words what each reader takes."""
        groups: list[tuple[Any, list[str]]] = []
        for reader, value in self.taken.items():
            group = next((names for other, names in groups if _same(value, other)), None)
            if group is None:
                groups.append((value, group := []))
            group.append(reader)
        parts = (f"{shown(value)} ({', '.join(names)})" for value, names in groups)
        return f"{self.place} {', '.join(parts)}"


def taken(root: Config, part: Config, row: Family) -> list[Takes]:
    """Take a config as each of READERS does, for the model that a row reads, in their order.

    Parameters
    ----------
    root, part : Config
        All of config.json, and its part for this model.
    row : Family
    """
    try:
        as_five = Config({**root.raw, "transformers_version": "5"}, root.file)
        meant = settings(as_five, as_five if part.raw is root.raw else part, row)
        file = _File(root, part, meant.numbers, meant.family)
    except CheckpointError as error:
        return [Takes(reader, why=f"not compared: {error}") for reader in READERS]
    four, five = file.of_four(), file.of_five()
    if row.tower not in LANGUAGE:
        return [four, five, *(Takes(reader, why=ELSEWHERE) for reader in (VLLM, LLAMA_CPP))]
    return [four, five, file.of_vllm(five), file.of_llama_cpp()]


def disagreements(readings: Sequence[Takes], root: Config) -> list[Disagreement]:
    """List what readers take otherwise, of those that take anything; root: all of config.json."""
    by_place: dict[Place, dict[str, Any]] = {}
    for reading in readings:
        for place, value in reading.values.items():
            by_place.setdefault(place, {})[reading.reader] = value
    keys, found = readings[0].keys, []
    for place, values in by_place.items():
        first, *others = values.values()
        if not all(_same(first, other) for other in others):
            advice = _advice(place.what, values, keys.get(place, ""), writer_of(root))
            found.append(Disagreement(place, values, advice))
    return found


def shown(value: Any) -> str:
    """A value in a table or a sentence."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.12g}" if isinstance(value, float) else str(value)[:SHOWN]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, int | float) and isinstance(y, int | float):
        with suppress(OverflowError):  # a whole number may be too large for a float
            return isclose(x, y)
    return bool(x == y)


def _advice(what: What, values: Mapping[str, Any], key: str, writer: int | None) -> str:
    """Advise what to write, so that all take what the file's writer meant."""
    if what in ROTARY and writer is not None and writer < 5:
        return f"{FIVE} looks for {GIVEN}: write it there too."
    if what is What.WINDOWED:
        return "Each reader chooses these layers by a rule of its own."
    if key and not {FOUR, FIVE} - values.keys() and not _same(values[FOUR], values[FIVE]):
        value = "it" if what in (What.SCALED, What.DETAILS) else shown(values[FIVE])
        return f"{FOUR} looks for {key}: write {value} there."
    return "Write it where each of them looks."


# transformers' classes, as far as readers.json describes them


@dataclass(frozen=True)
class _Class:
    """A model_type's class in one version of transformers."""

    values: Mapping[str, Any]  # of keys that a file leaves out
    names: Mapping[str, str]  # other names of keys, each with the one that they are stored under
    reads: frozenset[str]  # keys among these that the models' code reads
    windows: str  # how the models' code chooses layers with a window; empty where that is not known

    def take(self, part: Mapping[str, Any], key: str, default: Any = None) -> Any:
        """The value of a key: in the file, under another name there, or the class's own."""
        for name in (key, *(name for name, stored in self.names.items() if stored == key)):
            if name in part:
                return part[name]
        return self.values.get(key, default)

    def others(self, part: Mapping[str, Any]) -> dict[Place, Any]:
        """Window and activation, where the class has a key for them."""
        values = {}
        if SLIDES in self.values:
            is_used = GATE not in self.values or self.take(part, GATE) is True
            values[Place(What.WINDOW)] = (self.take(part, SLIDES) or None) if is_used else None
        key = next((key for key in ACTIVATIONS if key in self.reads and key in self.values), "")
        return values | (self.activation(part, key) if key else {})

    def activation(self, part: Mapping[str, Any], key: str) -> dict[Place, Any]:
        """The activation under a key."""
        value = self.take(part, key)
        return {Place(What.ACTIVATION): "silu" if value == "swish" else value}


@lru_cache(None)
def _tables() -> dict[str, Any]:
    """The sections of readers.json, with names as sets."""
    return word_sets(read_json(FILE))


@lru_cache(None)
def _class_of(kind: str, reader: str) -> _Class | None:
    """The class of a model_type in transformers 4.57 or 5; None where it has none."""
    table = _tables()[reader]
    reads = frozenset(key for key, kinds in table["reads"].items() if kind in kinds)
    windows = next((how for how, kinds in table["windows"].items() if kind in kinds), "")
    if reader == FIVE:
        known, unset = tables(), [key for key, kinds in tables()["unset"].items() if kind in kinds]
        values = {**dict.fromkeys(unset), **usual_values(kind)}
        return _Class(values, known["names"].get(kind, {}), reads, windows) if values else None
    values = values_by_type(table["values"], kind)
    names = {
        key: stored
        for key, by_stored in table["names"].items()
        for stored, kinds in by_stored.items()
        if kind in kinds
    }
    return _Class(values, names, reads, windows) if values else None


@dataclass(frozen=True)
class _File:
    """A config.json as readers go through it."""

    root: Config
    part: Config  # for the model
    numbers: ModelConfig  # as transformers 5 reads them
    family: Family

    @property
    def _kind(self) -> str:
        return str(self.part.get("model_type") or self.numbers.model_type)

    @property
    def _names(self) -> set[str]:
        """The classes that the file names."""
        named = self.root.get("architectures")
        return {str(name) for name in named} if isinstance(named, list) else set()

    def of_five(self) -> Takes:
        """transformers 5: as the row reads it."""
        made = _class_of(self._kind, FIVE)
        if made is None:
            return Takes(FIVE, why=UNKNOWN)
        values = self._turns(self.numbers.rope) | {Place(What.HEAD): self.numbers.head_dim}
        if self._eps_keys:
            values[Place(What.EPS)] = self.numbers.norm_eps
        if self.family.outputs is not None:
            values[Place(What.TIED)] = self._tied_by_five(made)
        values |= made.others(self.part)
        return Takes(FIVE, values | self._windowed(values, made.windows))

    def _windowed(self, values: Mapping[Place, Any], how: str) -> dict[Place, Any]:
        """Layers with a window, where the reader's code says how it chooses them."""
        if Place(What.WINDOW) not in values or not how:
            return {}
        types = self.numbers.layer_types
        if values[Place(What.WINDOW)] is None:
            chosen = [False] * len(types)
        elif how == ALL:
            chosen = [True] * len(types)
        elif how == BY_TYPE:
            chosen = [kind == SLIDING for kind in types]
        else:  # a period, whose first or last layer has none
            period, _, remainder = how.partition(" ")
            which = 0 if remainder == "first" else int(period) - 1
            chosen = [i % int(period) != which for i in range(len(types))]
        return {Place(What.WINDOWED): _ranges(chosen)}

    def _tied_by_five(self, made: _Class) -> bool:
        """True if the outermost class ties the embeddings; some look into their text's config."""
        if self.part.raw is self.root.raw:
            return made.take(self.part, TIE) is True
        wrapper, wrappers = str(self.root.get("model_type")), _tables()[FIVE]["wrappers"]
        tied = self.root.get(TIE, wrapper in wrappers["tied"]) is True
        looks_inside = wrapper in wrappers["of their text"]
        return tied or (looks_inside and made.take(self.part, TIE) is True)

    def of_four(self) -> Takes:
        """transformers 4.57: keys at the top and rope_scaling, with its own defaults."""
        made = _class_of(self._kind, FOUR)
        if made is None:
            return Takes(FOUR, why=UNKNOWN)
        values = self._turns({kind: self._turn_of_four(made, kind) for kind in self.numbers.rope})
        keys = self._keys_of_four(values)
        values[Place(What.HEAD)] = self.numbers.head_dim
        stored = class_says(self._kind, "names").get("head_dim", "head_dim")
        if self.family.heads.head_dim in ((), ("head_dim",)) and stored == "head_dim":
            given = made.take(self.part, "head_dim") if "head_dim" in made.reads else None
            values[Place(What.HEAD)] = given or self._even_share
        if key := next((key for key in self._eps_keys if key in made.values), ""):
            values[Place(What.EPS)], keys[Place(What.EPS)] = made.take(self.part, key), key
        if self.family.outputs is not None:
            values[Place(What.TIED)] = made.take(self.part, TIE, True) is True
        before = f"{self.family.part}." if self.part.raw is not self.root.raw else ""
        keys = {place: before + key for place, key in keys.items()}
        values |= made.others(self.part)
        return Takes(FOUR, values | self._windowed(values, made.windows), keys=keys)

    def _keys_of_four(self, turns: Mapping[Place, Any]) -> dict[Place, str]:
        """The older keys of what rotary parameters say, and of others that all classes share."""
        keys = {Place(What.HEAD): "head_dim", Place(What.TIED): TIE, Place(What.WINDOW): SLIDES}
        if not isinstance(rope := self.family.rope, Rope):
            return keys
        local = rope.local[0] if rope.local else rope.theta_key
        for place in turns:
            keys[place] = {
                What.BASE: local if place.layers == SLIDING else rope.theta_key,
                What.SHARE: rope.fraction_key,
            }.get(place.what, SCALING)
        return keys

    def of_vllm(self, five: Takes) -> Takes:
        """vLLM: through transformers 5, with activations of its own code."""
        table = _tables()[VLLM]
        if not self._names & table["classes"]:
            return Takes(VLLM, why=UNKNOWN if self._names else UNNAMED)
        activation = five.values.get(Place(What.ACTIVATION), "silu")
        if activation != "silu" and self._names & table["silu"]:
            return Takes(VLLM, why=f"refuses the activation {activation}: its code has silu alone")
        values = {
            place: value
            for place, value in five.values.items()
            if place.what not in (What.ACTIVATION, What.WINDOWED)
        }
        made = _class_of(self._kind, FIVE)
        if made is not None:
            # without a list of types its cache gives all layers the window
            is_unlisted = made.windows == ALL and self.family.config.listed not in self.part
            how = ALL if is_unlisted else self._of_names(table["layers"])
            values |= self._windowed(values, how)
            if key := self._of_names(table["activations"]):
                values |= made.activation(self.part, key)
        return Takes(VLLM, values, OTHERWISE if five.why == UNKNOWN else five.why)

    def _of_names(self, table: Mapping[str, frozenset[str]]) -> str:
        """The entry of a table that lists a class of the file; empty where none does."""
        return next((title for title, names in table.items() if self._names & names), "")

    def of_llama_cpp(self) -> Takes:
        """llama.cpp's converter: through transformers 4.57, or the bare file of an unknown type."""
        table = _tables()[LLAMA_CPP]
        if not self._names & table["classes"]:
            return Takes(LLAMA_CPP, why=UNKNOWN if self._names else UNNAMED)
        made = _class_of(self._kind, FOUR)
        given = {**(made.values if made else {}), **self.root.raw, **self.part.raw}
        values = self._turns(self._turns_of_llama_cpp(given))
        for place in [*values]:
            kind = str(values[place]).partition(" ")[0]
            is_unsaid = kind not in WRITTEN or place.layers == SLIDING
            if place.what in UNSAID or (place.what is What.SCALED and is_unsaid):
                del values[place]
        values[Place(What.HEAD)] = given.get("head_dim") or self._even_share
        keys = EPS_KEYS.get(self.numbers.norm, ()) if self._eps_keys else ()
        if key := next((key for key in keys if key in given), ""):
            values[Place(What.EPS)] = given[key]
        others = made.others(self.part) if made else {}
        if Place(What.WINDOW) in others and self._names & table["windows"]:
            values[Place(What.WINDOW)] = others[Place(What.WINDOW)]
            values |= self._windowed(values, self._of_names(table["layers"]))
        own = {what for what, names in table[OWN].items() if self._names & names}
        kept = {place: value for place, value in values.items() if place.what not in own}
        return Takes(LLAMA_CPP, kept)

    @property
    def _even_share(self) -> int:
        return self.numbers.d_model // self.numbers.n_heads

    @property
    def _eps_keys(self) -> tuple[str, ...]:
        """Keys of the norm's eps; none where the code has it."""
        norm = self.family.norms.before
        return self.family.size_keys["norm_eps"] if norm and norm.eps is None else ()

    # Rotation

    def _turns(self, by_kind: Mapping[str, Mapping[str, Any]]) -> dict[Place, Any]:
        """Rotary parameters in words, of each kind of layer where kinds may differ."""
        rope, values = self.family.rope, dict[Place, Any]()
        if not isinstance(rope, Rope) or not rope.theta_key:  # the code's own
            return values
        kinds = sorted(kind for kind, turn in self.numbers.rope.items() if turn.has("rope_theta"))
        alike = not rope.local and len({str(self.numbers.rope[kind].raw) for kind in kinds}) < 2
        for kind in kinds[:1] if alike else kinds:
            where = "" if alike else kind
            turn = by_kind.get(kind, {})
            if alike:
                turn = by_kind.get(FULL, turn)
            scaling = _plain(turn)
            if turn.get("rope_theta") is not None:
                values[Place(What.BASE, where)] = turn["rope_theta"]
            called = SAME_SCALING.get(_word(turn), _word(turn))
            values[Place(What.SCALED, where)] = called
            if called != "default":
                trained = turn.get(TRAINED) or self.part.get(TRAINED) or self.numbers.n_positions
                times = f" by {shown(scaling['factor'])}" if "factor" in scaling else ""
                values[Place(What.SCALED, where)] = called + times
                values[Place(What.DETAILS, where)] = _words({**scaling, TRAINED: trained})
            if rope.fraction is not None and not rope.dims_key:
                values[Place(What.SHARE, where)] = turn.get("partial_rotary_factor", 1.0)
        return values

    def _turn_of_four(self, made: _Class, kind: str) -> dict[str, Any]:
        """Rotary parameters of layers of one kind in transformers 4.57."""
        rope = self.family.rope
        if not isinstance(rope, Rope):
            return {}
        key = rope.local[0] if kind == SLIDING and rope.local else rope.theta_key
        is_scaled = rope.scaling and not (kind == SLIDING and rope.local and not rope.local_scaled)
        scaling = made.take(self.part, SCALING) if is_scaled else None
        return {
            **(scaling if isinstance(scaling, Mapping) else {}),
            "rope_theta": made.take(self.part, key) if key in made.values else None,
            "partial_rotary_factor": made.take(self.part, rope.fraction_key, 1.0),
        }

    def _turns_of_llama_cpp(self, given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Rotary parameters by kind of layer, as its converter looks for them."""
        found = given.get(GIVEN, given.get(SCALING))
        turns = dict(found) if isinstance(found, Mapping) else {}
        base, local = (
            next((given[key] for key in keys if key in given), None)
            for keys in (THETAS, LOCAL_THETAS)
        )
        if not {FULL, SLIDING} & turns.keys():
            turns.setdefault("rope_theta", LLAMA_CPP_BASE if base is None else base)
            turns[SLIDING] = {} if local is None else {"rope_theta": local}
        full, sliding = (
            entry if isinstance(entry := turns.get(kind), Mapping) else usual
            for kind, usual in ((FULL, turns), (SLIDING, {}))
        )
        return {**dict.fromkeys((*self.numbers.rope, FULL), full), SLIDING: sliding}


def _ranges(chosen: Sequence[bool]) -> str:
    """Layers that are chosen: "0-4, 6-10", "all" or "none"."""
    if all(chosen) or not any(chosen):
        return ALL if all(chosen) else "none"
    runs, start = [], 0
    for is_in, run in groupby(chosen):
        end = start + len([*run])
        if is_in:
            runs.append(str(start) if end == start + 1 else f"{start}-{end - 1}")
        start = end
    return ", ".join(runs)


def _word(turn: Mapping[str, Any]) -> str:
    """The kind of scaling."""
    return str(turn.get("rope_type", turn.get("type")) or "default")


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scaling, without its name."""
    return {key: value for key, value in turn.items() if key not in NOT_SCALING}


def _words(scaling: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(scaling.items()))
