"""From a config and a row to the numbers of one model; from no known row to advice."""

from typing import Any

from weightscope.checkpoint import Checkpoint
from weightscope.checkpoint.config import Config
from weightscope.errors import CheckpointError
from weightscope.families.config import KEYS, MOST_LAYERS, ModelConfig
from weightscope.families.family import Family
from weightscope.families.nesting import SIZE_KEYS, USUAL, part_of, parts, prefixes_of

LANGUAGE = ("text", "decoder")  # what a model of several towers is opened by unless another is asked for
MOST_ROWS = 2**21  # of an embedding: twice those of the largest published vocabulary, as for ids of tokens


def refuse_endless_embeddings(checkpoint: Checkpoint, family: Family) -> None:
    """Refuse rows by the thousand million, which a file of holes has for nothing; norms are kept of every row.

    Raises
    ------
    CheckpointError
        An embedding or unembedding has more rows than any vocabulary and any context.
    """
    inputs, outputs = family.inputs, family.outputs
    names = (inputs.tokens, inputs.positions, inputs.types, *(outputs.tokens if outputs else ()))
    prefixes = (*family.prefixes, *prefixes_of(checkpoint, family))
    for name in (prefix + name for prefix in prefixes for name in names if name):
        rows = max(checkpoint[name].shape[:-1], default=0) if name in checkpoint else 0
        if rows > MOST_ROWS:
            raise checkpoint[name].refuse(f"has {rows} rows; no vocabulary has more than {MOST_ROWS}")


def own_part(checkpoint: Checkpoint, family: Family) -> Config:
    """The part of a config that describes this model, with the architecture's defaults for what it leaves out.

    A key that is there and null means null, as it does to transformers.
    """
    part, config = part_of(checkpoint, family), checkpoint.config
    inherited: dict[str, Any] = {}
    if part.raw is not config.raw:  # a wrapper's part: it may leave its sizes to the architecture, too
        inherited = dict(zip(SIZE_KEYS, USUAL.get(family.name, ()), strict=False))
        if config.get("tie_word_embeddings") is True:
            inherited["tie_word_embeddings"] = True
    values = {key: value for key, value in {**family.defaults, **inherited, **part}.items() if value is not None}
    return Config(values, config.file)


def read_config(config: Config, family: Family) -> ModelConfig:
    """Normalise the values of a config.

    Parameters
    ----------
    config : Config
        From `own_part`.
    family : Family
        As configured by it.

    Raises
    ------
    CheckpointError
        A size is missing, is not a positive integer, or is absurd; heads do not divide into groups, or the width into
        heads.
    """

    keys = {**KEYS, **family.keys}

    def optional(meaning: str) -> int | None:
        return config.size(*keys[meaning]) if config.has(*keys[meaning]) else None

    n_layers = config.size(*keys["n_layers"], largest=MOST_LAYERS)
    d_model, n_heads = config.size(*keys["d_model"]), config.size(*keys["n_heads"])
    kv_heads = family.kv_heads
    n_kv_heads = kv_heads if isinstance(kv_heads, int) else config.size(*kv_heads, default=n_heads)
    if n_heads % n_kv_heads:
        raise CheckpointError(f"{n_heads} heads do not divide into {n_kv_heads} key-value heads", file=config.file)
    if family.head_dim and all(config.has(key) for key in family.head_dim):
        head_dim = sum(config.size(key) for key in family.head_dim)
    elif d_model % n_heads:
        raise CheckpointError(f"width {d_model} does not divide into {n_heads} heads", file=config.file)
    else:
        head_dim = d_model // n_heads
    listed = "layer_types" in config
    layer_types = config.strings("layer_types", n_layers) if listed else family.layer_types(config, n_layers)
    norm, eps = family.norm, 0.0
    if norm is not None and norm.eps is not None:
        eps = norm.eps
    elif norm is not None or config.has(*keys["norm_eps"]):
        eps = config.number(*keys["norm_eps"], largest=1.0)
    return ModelConfig(
        raw=config.raw,
        file=config.file,
        model_type=str(config.get("model_type")),
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm="none" if norm is None else "layer_norm" if norm.centred else "rms_norm",
        norm_eps=eps,
        layer_types=layer_types,
        rope={kind: family.rope.parameters(config, kind) for kind in set(layer_types)} if family.rope else {},
        n_positions=optional("n_positions"),
        vocab_size=optional("vocab_size"),
    )


def choose_family(
    families: tuple[Family, ...], checkpoint: Checkpoint, name: str | None = None, tower: str | None = None
) -> Family:
    """The row that reads a checkpoint: the one asked for by name, else the one its config's model_type names.

    Parameters
    ----------
    families : tuple of Family
    checkpoint : Checkpoint
    name : str, optional
        A family's name or a model_type.
    tower : str, optional
        "text", "vision", "encoder", "decoder", "cross" ...; by default the one that is language.

    Raises
    ------
    CheckpointError
        No row reads it, or several do and `tower` does not say which. The message names the family whose tensor names
        are nearest, and how to try it.
    """
    wanted = checkpoint.config.get("model_type") if name is None else name
    rows = [row for row in families if wanted in row.model_types or (name is not None and name == row.name)]
    if not rows and name is not None:
        known = ", ".join(sorted({row.name for row in families}))
        raise CheckpointError(f"no family is called '{name}'; known are {known}")
    if not rows:
        rows = _within(families, checkpoint, tower)
        if len(rows) == 1:
            return rows[0]
        if rows:
            names = ", ".join(row.name for row in rows)
            raise CheckpointError(f"holds models of several families ({names}): say `family`", file=checkpoint.name)
    if not rows:
        found = f"unknown model_type '{wanted}'" if wanted is not None else "has no model_type"
        missing = wanted is None and not checkpoint.config
        raise CheckpointError(
            ("no config.json says which model_type this is" if missing else found) + _advice(families, checkpoint),
            file=checkpoint.config.file if wanted is None and not missing else checkpoint.name,
        )
    towers = sorted({row.tower for row in rows if row.tower})
    asked = tower or (next((language for language in LANGUAGE if language in towers), None) if len(rows) > 1 else None)
    # A language model in a wrapper (Gemma 3) may be called its text tower.
    fitting = [row for row in rows if asked in (None, row.tower) or (not row.tower and row.nested == f"{asked}_config")]
    if len(fitting) == 1:
        return fitting[0]
    if not towers:
        raise CheckpointError(f"{rows[0].name} is not a model of towers; leave `tower` out", file=checkpoint.name)
    if not fitting:
        problem = f"{rows[0].name} has no tower '{tower}'; it has {' and '.join(towers)}"
        raise CheckpointError(problem, file=checkpoint.name)
    choices = " or ".join(f"`tower='{tower}'`" for tower in towers)
    raise CheckpointError(f"{rows[0].name} has several towers: say {choices}", file=checkpoint.name)


def _within(families: tuple[Family, ...], checkpoint: Checkpoint, tower: str | None) -> list[Family]:
    """The rows whose model_type a part of a wrapper's config has and whose tensors there are.

    Unless a tower is asked for, those of models of tokens stand for a wrapper, and others only where there are none.
    """
    said = (part.get("model_type") for _, part in parts(checkpoint.config))
    kinds = {kind for kind in said if isinstance(kind, str)}
    rows = [row for row in families if kinds & {*row.model_types} and prefixes_of(checkpoint, row)]
    sees = [row for row in rows if not row.inputs.tokens]
    reads = [row for row in rows if row.inputs.tokens]
    by_tower = {"text": reads, "vision": sees, None: reads or sees}
    return by_tower.get(tower) or [row for row in rows if row.tower == tower]


def _advice(families: tuple[Family, ...], checkpoint: Checkpoint) -> str:
    """What to try instead: the family that has the most of its names, and the fewest missing, in the checkpoint."""
    family, balance, example = max((_likeness(row, checkpoint) for row in families), key=lambda found: found[1])
    if balance <= 0:
        return "; its tensors are named like no family that weightscope knows"
    tower = f" `tower='{family.tower}'`" if family.tower else ""
    return f"; its tensors ('{example}' ...) are named as in {family.name}: try `family='{family.name}'`{tower}"


def _likeness(family: Family, checkpoint: Checkpoint) -> tuple[Family, int, str]:
    """(family, names found less twice the names missing, one that was found)."""
    values = {**family.defaults, **checkpoint.config}
    family = family.configured(values)
    layer = family.layer.format(i=0)
    modules = [family.query, family.key, family.value, family.output, family.norm.module if family.norm else ""]
    names = {layer + module + ".weight" for module in modules if module} | {
        family.inputs.tokens,
        family.inputs.positions,
    }
    if family.qk_norm and family.qk_norm.scope != "listed":
        names |= {f"{layer}{module}.weight" for module in (family.qk_norm.query, family.qk_norm.key)}
    for role in ("query", "output"):
        bias = getattr(family.biases, role)
        if values.get(bias) if isinstance(bias, str) else bias:
            names.add(f"{layer}{getattr(family, role)}.bias")
    if family.sinks:
        names.add(layer + family.sinks)
    names.discard("")
    found = {
        p: sorted(p + name for name in names if p + name in checkpoint)
        for p in (*family.prefixes, *prefixes_of(checkpoint, family))
    }
    best = max(found.values(), key=len)
    return family, len(best) - 2 * (len(names) - len(best)), best[0] if best else ""
