"""The meaning of a config to a row, in any dialect of configs.

transformers standardises a config before it builds a model: `attribute_map` renames sizes, and
`convert_rope_params_to_dict` turns what older versions wrote of rotation into `rope_parameters`.
`settings` does the same. Where a config says two things at once, transformers' rule
decides and a note says so; without a rule the config is refused. Where versions of transformers
differ, the one that wrote the file decides; a file that does not name it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.config import KEYS, MOST_LAYERS, ModelConfig, class_says
from weightscope.model.config.rope import Rope
from weightscope.model.rows.family import Family

GIVEN, SCALING = "rope_parameters", "rope_scaling"
TRAINED = "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
NEEDED = {"n_layers", "d_model", "n_heads", "norm_eps"}  # sizes that change numbers
SIZES = {name for meaning in NEEDED for name in KEYS[meaning]}
LOOPED = (
    "passes after the first: the layers run {loops} times, and in a later pass heads of layer 0 "
    "read what heads of the last layer wrote; links from one pass to the next are not counted"
)


@dataclass(frozen=True)
class Settings:
    """A config's meaning to a row.

    Attributes
    ----------
    values : Config
        The config's values under the names of transformers 5, defaults filled in.
    family : Family
        The row as these values make it.
    """

    values: Config
    family: Family

    @cached_property
    def numbers(self) -> ModelConfig:
        """The normalised numbers."""
        config, keys, rules = self.values, self.family.size_keys, self.family.config
        listed = config.get(rules.listed)
        usual = len(listed) if isinstance(listed, list) else None
        n_layers = config.size(*keys["n_layers"], default=usual, largest=MOST_LAYERS)
        n_layers *= rules.attentions
        d_model = config.size(*keys["d_model"])
        n_heads, n_kv_heads, head_dim = head_sizes(config, self.family)
        if rules.listed in config:
            types = config.strings(rules.listed, n_layers)
        else:
            types = rules.layer_types(config, n_layers)
        norm, eps, norm_kind = self.family.norms.before, 0.0, "none"
        if norm is not None:
            norm_kind = "layer_norm" if norm.centred else "rms_norm"
        if norm is not None and norm.eps is not None:
            eps = norm.eps
        elif norm is not None or config.has(*keys["norm_eps"]):
            eps = config.number(*keys["norm_eps"], largest=1.0)
        rope = {}
        if self.family.rope:
            kinds = {kind for kind in types if self._is_attention(kind)}
            rope = {kind: self.family.rope.parameters(config, kind) for kind in kinds}

        def size_if_any(meaning: str) -> int | None:
            return config.size(*keys[meaning]) if config.has(*keys[meaning]) else None

        loops = config.size(*keys["loops"], default=1, largest=MOST_LAYERS)
        looped = (LOOPED.format(loops=loops),) if loops > 1 else ()
        return ModelConfig(
            raw=config.raw,
            file=config.file,
            notes=(*config.notes, *looped),
            model_type=str(config.get("model_type")),
            n_layers=n_layers,
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm=norm_kind,
            norm_eps=eps,
            layer_types=types,
            rope=rope,
            n_positions=size_if_any("n_positions"),
            vocab_size=size_if_any("vocab_size"),
            loops=loops,
        )

    def _is_attention(self, layer_type: str) -> bool:
        kinds = self.family.config.attention_types
        return not kinds or layer_type in kinds

    def attends(self, index: int) -> bool:
        """True if a layer attends to its own input; in hybrid models others do not."""
        if not self._is_attention(self.numbers.layer_types[index]):
            return False
        return self.family.keys_of(self.numbers, index) == index

    def borrows(self, index: int) -> bool:
        """True if a layer attends from its input to keys and values of an earlier layer."""
        source = self.family.keys_of(self.numbers, index)
        return source != index and self.attends(source)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to their own input."""
        return tuple(i for i in range(self.numbers.n_layers) if self.attends(i))


def settings(
    root: Config, part: Config, row: Family, kind: str = "", usual: Mapping[str, Any] | None = None
) -> Settings:
    """The meaning to a row of a part of a config, completed by the architecture's defaults.

    A key that is there and null means null, as it does to transformers. A size under one name
    leaves no default of another.

    Parameters
    ----------
    root, part : Config
        All of config.json, and its part for this model.
    row : Family
    kind : str, optional
        The model_type of another stack's section, which inherits nothing from the whole.
    usual : mapping, optional
        Values that the class of `kind` takes for keys left out.
    """
    inherited: dict[str, Any] = {}
    if not kind:
        kind = str(part.get("model_type") or root.get("model_type"))
        if part.raw is not root.raw:  # a wrapper's part may leave its sizes to the architecture
            kind, inherited = _of_wrapper(root, part, row)
    values = Config(_renamed(part, row, kind), part.file)
    stated = row.synonyms([key for key in values if values.has(key)])
    defaults = {**(usual or {}), **row.config.defaults, **inherited}
    defaults = {key: value for key, value in defaults.items() if key not in stated}
    merged = {key: value for key, value in {**defaults, **values}.items() if value is not None}
    completed = row.completed(merged, root.file)
    final = _standardised(part, completed.raw, row.configured(completed), kind, root)
    return Settings(final, row.configured(final))


def _of_wrapper(root: Config, part: Config, row: Family) -> tuple[str, dict[str, Any]]:
    """The class of a wrapper's part, and what the part inherits from it and the wrapper."""
    wrapper = root.get("model_type")
    inner, first = f"{wrapper}.{row.part}", row.types[0]  # a class that is the wrapper's own
    usual = part.get("model_type") or class_says(wrapper, "parts").get(row.part) or first
    sizes = class_says(inner, "sizes") or class_says(usual, "sizes") or class_says(first, "sizes")
    inherited = {"model_type": usual, **sizes}
    if root.get("tie_word_embeddings") is True:
        inherited["tie_word_embeddings"] = True
    return str(inner if class_says(inner, "names") else usual), inherited


# Number and width of heads: in a model, and in one of its layers.


def head_sizes(config: Config, family: Family) -> tuple[int, int, int]:
    """Query heads, key-value heads, and the width of a head's queries and keys."""
    keys, kv_heads = family.size_keys, family.heads.kv_heads
    d_model, n_heads = config.size(*keys["d_model"]), config.size(*keys["n_heads"])
    n_kv_heads = kv_heads if isinstance(kv_heads, int) else config.size(*kv_heads, default=n_heads)
    if n_heads % n_kv_heads:
        raise CheckpointError(
            f"{n_heads} heads do not divide into {n_kv_heads} key-value heads", file=config.file
        )
    if family.heads.head_dim and all(config.has(key) for key in family.heads.head_dim):
        head_dim = sum(config.count(key) for key in family.heads.head_dim)
    elif d_model % n_heads:
        raise CheckpointError(
            f"width {d_model} does not divide into {n_heads} heads", file=config.file
        )
    else:
        head_dim = d_model // n_heads
    return n_heads, n_kv_heads, head_dim


def in_layer(config: ModelConfig, family: Family, index: int) -> tuple[ModelConfig, Family]:
    """A model's numbers and row for one layer: heads and their widths may differ by layer."""
    row, sizes = family.in_layer(config.layer_types[index]), family.config.sizes(config, index)
    if row is family and not sizes:
        return config, family
    values = Config({**config.raw, **sizes}, config.file)
    n_heads, n_kv_heads, head_dim = head_sizes(values, row)
    return replace(
        config, raw=values.raw, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim
    ), row


# Dialects


def writer_of(config: Config) -> int | None:
    """The major version of transformers that wrote a config; None where it is not stated."""
    major = str(config.get("transformers_version") or "").partition(".")[0]
    return int(major) if major.isascii() and major.isdigit() and len(major) < 4 else None


# Sizes under several names.


def _renamed(part: Config, family: Family, kind: str) -> dict[str, Any]:
    """A config with its sizes under the names that the class of its model_type stores them by."""
    known, values = class_says(kind, "names"), dict(part)
    read = family.names
    for name, stored in known.items():
        value = values.get(name)
        if name != stored and value is not None:
            matters = not {name, stored}.isdisjoint(read | SIZES)
            if matters and part.get(stored, value) not in (None, value):
                raise part.error(name, f"{part[stored]}, as its other name '{stored}' says,")
            if not stored:
                raise part.error(name, f"nothing, as {kind} makes another number of it,")
            values[stored] = value
        elif name != stored and name in read and values.get(stored) is not None:
            values[name] = values[stored]
    for meaning, names in family.size_keys.items():
        stored_names = [name for name in names if name in known]
        strange = [name for name in names if stored_names and name not in known and name in values]
        stated = any(values.get(name) is not None for name in stored_names)
        defaults = family.config.defaults
        usual = next((defaults[name] for name in stored_names if name in defaults), None)
        for name in strange:
            value = values.pop(name)
            if value is not None and not stated and meaning in NEEDED and value != usual:
                missing = f"{kind} reads '{stored_names[0]}', which is missing"
                problem = f"'{name}' is {str(value)[:40]}, but {missing}; write the number there"
                raise CheckpointError(problem, file=part.file)
    return values


# Rotation.


def _standardised(
    part: Config, values: Mapping[str, Any], family: Family, kind: str, root: Config
) -> Config:
    """A config with its rotation in one form.

    part: The part of the file.
    values: The part without nulls, with the architecture's defaults.
    root: All of the file, which may state the version of transformers that wrote it.
    """
    config, rope = Config(values, part.file), family.rope
    if not isinstance(rope, Rope):
        if rope is not None and config.get(SCALING):
            raise config.error(SCALING, "none: nothing scales the rotation of this architecture")
        return config
    _refuse_unread_width(part, config, family, kind)
    emptied = SCALING in part and not part[SCALING]
    usual = class_says(kind, "rope") or class_says(family.types[0], "rope")
    free = not class_says(kind, "names")
    rotary = _Rotary(config, rope, usual, writer_of(root), free=free, emptied=emptied)
    made = {key: value for key, value in values.items() if key != SCALING}
    made[GIVEN] = rotary.standard()
    return replace(config, raw=made, notes=tuple(rotary.notes))


def _refuse_unread_width(part: Config, config: Config, family: Family, kind: str) -> None:
    """Refuse a head_dim that the rotation and the projections would read differently."""
    known, keys = class_says(kind, "names"), family.size_keys
    is_null = "head_dim" in part and not part.has("head_dim")
    if is_null and isinstance(family.rope, Rope) and family.rope.start_key:
        wanted = "a number, or no such key: its code would divide the model's width by its heads"
        raise part.error("head_dim", wanted)
    if not known or "head_dim" in known or "head_dim" in family.heads.head_dim:
        return
    if not config.has("head_dim"):
        return
    width = config.size(*keys["d_model"]) // config.size(*keys["n_heads"])
    if config["head_dim"] != width:
        wanted = f"{width}, or nothing, as {kind} takes its width from the model's,"
        raise config.error("head_dim", wanted)


@dataclass
class _Rotary:
    """A config's words for rotation, while they are put into one form."""

    values: Config  # with the row's defaults, without nulls
    rope: Rope
    usual: Mapping[str, Any]  # the class's values for a config without rotary parameters
    writer: int | None  # major version of the transformers that wrote the config
    free: bool  # the class is not known: parameters may be nested by layer type or not
    emptied: bool  # the config says that nothing is scaled, by null or {}
    notes: list[str] = field(default_factory=list)

    def standard(self) -> dict[str, Any]:
        """`rope_parameters`, flat or by layer type, with every base and kind written out."""
        given, scaling = self.values.inside(GIVEN), self.values.inside(SCALING)
        if scaling and not self.rope.scaling:
            raise self.values.error(SCALING, f"{GIVEN}, as this architecture does not read it,")
        if scaling.has("type") and scaling.get("rope_type", scaling["type"]) != scaling["type"]:
            # 4 takes this, 5 the other
            raise scaling.error("type", f"{scaling['rope_type']}, as 'rope_type' says,")
        if not self.rope.theta_key:  # the code's own base, whatever the config says
            return {"rope_theta": self.rope.theta}
        if self.rope.local:
            return self._merged(given, scaling)
        if GIVEN not in self.values:
            given = Config(self.usual, self.values.file)
        if _nested(self.usual) or ((self.free or self.rope.by_type) and _nested(given)):
            return self._by_type(given, scaling)
        return self._one(given, scaling)

    def _one(self, given: Config, scaling: Config) -> dict[str, Any]:
        """One rotation for all layers; rope_scaling replaces all of rope_parameters."""
        chosen = scaling or given
        if _nested(chosen):
            raise self.values.error(SCALING if scaling else GIVEN, "one rotation for all layers")
        top = self._top()
        made = self._complete(top, chosen)
        if scaling and given and GIVEN in self.values:
            rule = "what rope_parameters says; rope_scaling is read instead"
            self._say(made, self._complete(top, given), rule)
        elif scaling:  # transformers 4 took bases and shares from the top alone
            inner = {key: value for key, value in chosen.items() if key not in top}
            made = self._as_written("rope_theta in rope_scaling", self._complete(top, inner), made)
        elif self.emptied and GIVEN not in self.values:
            made = self._as_written("an empty rope_scaling", self._complete(top, {}), made)
        elif self.values.has(self.rope.theta_key):
            rule = f"what {self.rope.theta_key} says; rope_parameters is read instead"
            self._say(made, {**made, **top}, rule)
        # other code reads these
        for key in {"rope_theta", "rotary_emb_base"} - {self.rope.theta_key}:
            if self.values.has(key) and self.values[key] != made["rope_theta"]:
                raise self.values.error(
                    key, f"{made['rope_theta']}, the base that transformers reads,"
                )
        if made["rope_type"] != "default" and self.values.has(TRAINED):
            made[TRAINED] = self.values[TRAINED]
        return made

    def _by_type(self, given: Config, scaling: Config) -> dict[str, Any]:
        """A rotation for each layer type, null where it has none."""
        if scaling:
            raise self.values.error(SCALING, f"{GIVEN} with an entry for each layer type")
        self._refuse_flat(given)
        entries = {kind: entry for kind, entry in given.items() if isinstance(entry, Mapping)}
        names = {
            self.rope.theta_key: "rope_theta",
            self.rope.fraction_key: "partial_rotary_factor",
        }
        for key, inner in names.items():
            if self.values.has(key) and not all(inner in entry for entry in entries.values()):
                raise self.values.error(key, f"an '{inner}' for each layer type in {GIVEN}")
        made: dict[str, Any] = {}
        for kind, entry in given.items():
            if entry is None or kind in entries:
                made[kind] = None if entry is None else self._complete(self._top(), entry)
        return made

    def _merged(self, given: Config, scaling: Config) -> dict[str, Any]:
        """Full and sliding attention; rope_scaling joins the entry of the former, or of both."""
        self._refuse_flat(given)
        made: dict[str, Any] = {}
        for kind in (FULL, SLIDING):
            entry, key, base = given.inside(kind), self.rope.theta_key, self.rope.theta
            if kind == SLIDING and self.rope.local:
                key, base = self.rope.local
            scaled = scaling if kind == FULL or self.rope.local_scaled else {}
            before = {**self._top(), "rope_theta": self.values.get(key, base)}
            # transformers 5 has spent it on full attention
            taken = kind == SLIDING and key == self.rope.theta_key
            now = {**before, "rope_theta": base} if taken else before
            usual = {**entry, "rope_type": self._kind(entry)}
            inner = {key: value for key, value in scaled.items() if key != "rope_theta"}
            four = {**before, **usual, **inner, "rope_type": self._kind(scaled or entry)}
            made[kind] = self._as_written(
                f"the older words for {kind}", four, {**now, **usual, **scaled}
            )
        return made

    def _refuse_flat(self, given: Config) -> None:
        if given and not _nested(given):
            raise self.values.error(GIVEN, "an entry for each layer type")

    def _top(self) -> dict[str, Any]:
        """The base and share of a head at the top of the config, or the row's."""
        rope, values = self.rope, self.values
        share = values.get(rope.fraction_key, rope.fraction)
        if values.has(rope.width_key) and not values.has(rope.fraction_key):
            share = values.size(rope.width_key) / values.size("head_dim")
        top = {"rope_theta": values.get(rope.theta_key, rope.theta)}
        return top if share is None else {**top, "partial_rotary_factor": share}

    def _complete(self, top: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        return {**top, **chosen, "rope_type": self._kind(chosen)}

    def _kind(self, chosen: Mapping[str, Any]) -> Any:
        """The kind of scaling, by the newer word or else the older."""
        kinds = (chosen.get(word) for word in ("rope_type", "type"))
        kind = next((kind for kind in kinds if kind is not None), "default")
        return "yarn" if kind == "deepseek_yarn" else kind  # the name in Sarvam 105B's own config

    def _say(self, made: Mapping[str, Any], unread: Mapping[str, Any], rule: str) -> None:
        """Note which of two contradictory statements is read."""
        if _words(made) != _words(unread):
            self.notes.append(f"{_words(unread)}: {rule} ({_words(made)}), as in transformers")

    def _as_written(self, what: str, four: dict[str, Any], five: dict[str, Any]) -> dict[str, Any]:
        """Parameters as the writer's version of transformers reads them, where 4 and 5 differ."""
        if _words(four) == _words(five):
            return five
        readings = f"transformers 4 reads {_words(four)}, transformers 5 {_words(five)}"
        if self.writer is None:
            problem = "it has no transformers_version, so say which in rope_parameters"
            raise CheckpointError(f"has {what}: {readings}; {problem}", file=self.values.file)
        note = f"{what}: {readings}; version {self.writer} wrote the file, and it is read so"
        self.notes.append(note)
        return four if self.writer < 5 else five


def _nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _words(parameters: Mapping[str, Any]) -> str:
    """Rotary parameters in a line, without the older word for their kind."""
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    named = ("rope_type", "rope_theta", "type")
    more = (f"{key} {value}" for key, value in sorted(parameters.items()) if key not in named)
    return ", ".join((f"{kind} with base {base}", *more))[:300]
