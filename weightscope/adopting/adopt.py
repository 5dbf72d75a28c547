"""Find, prove and guard the rows for an architecture that the table does not list."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from weightscope.adopting.comparison import Stored, stacks
from weightscope.adopting.config_keys import VARIED, inside, unnamed
from weightscope.adopting.full_size import at_full_size
from weightscope.adopting.search import Found, Search
from weightscope.adopting.shapes import Derived
from weightscope.adopting.tiny_models import class_and_line
from weightscope.adopting.trial import TRIALS, Tiny, at_work, nearness, proved, tiny_models
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import digest_of, without_code
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.core.errors import CheckpointError, first_line
from weightscope.core.files import scratch_folder
from weightscope.model.config.alike import numbers_read
from weightscope.model.config.config import KEYS
from weightscope.model.config.reading import WAYS, prefixes_of
from weightscope.model.config.rope import Rope
from weightscope.model.layers.read_layer import read_layer
from weightscope.model.layers.steps.scores import Clip, Softcap
from weightscope.model.model import Model
from weightscope.model.rows.cells import LayerTensors, RowInputs
from weightscope.model.rows.family import Family, Unless, When
from weightscope.model.rows.stanzas import ROOTS, file_of, row_changes, stanza_of, written
from weightscope.model.rows.table import FAMILIES

PROOF = f"transformers {transformers.__version__}"
BOUND = 1.5  # tried as a bound of scores, queries, keys or values
MOST = 16  # switches tried
NO_ATTENTION = re.compile(
    r"use_cache|tie_.*|return_dict|output_.*|torchscript|use_bfloat16|is_decoder"
    r"|is_encoder_decoder|.*dropout.*|add_cross_attention|gradient_checkpointing"
    r"|.*(router|aux_loss|cls|mask_token|pooling|spec_augment).*",
    re.ASCII,
)
# Words of a config that are no options, and eps, which differ in the second tiny model.
NO_OPTION = re.compile(
    r"model_type|.*dtype|.*_implementation|_?name_or_path|transformers_version|problem_type"
    r"|tokenizer_class|.*init.*|.*(eps|epsilon)"
    r"|.*(path|repo|language|loss|pooling|summary).*|.*_coef",
    re.ASCII,
)
ACTIVATION = re.compile(r"act(_|$)|activation|nonlinearity", re.ASCII)


def _proposals(search: Search, usual: Mapping[str, Any]) -> list[Family]:
    """Rows of the table whose modules the stack's layers have, fewest cells first.

    Only the layers count: cells for what comes before the first layer or after the last are
    dropped.
    """
    derived, checkpoint = search.derived, search.tinies[0].checkpoint
    stems, settings = derived.first.stems.values(), inside(usual, derived.first.part)
    fitting: dict[str, Family] = {}
    for row in search.rows:
        if _foreign(row, settings):
            continue
        for prefix in prefixes_of(checkpoint, row):
            if not any(prefix + row.layer.format(i=i) in stems for i in range(8)):
                continue
            left_out = {key: derived.left_out(key) for key in row.config.defaults}
            defaults = {key: value for key, value in left_out.items() if value is not None}
            has_tokens_alone = row.inputs == RowInputs(tokens=row.inputs.tokens)
            inputs = row.inputs if has_tokens_alone else RowInputs()
            layers = row.but(prefixes=(prefix,), gguf=None, **derived.identity).without_network()
            layers = layers.but(outputs=None, inputs=inputs)
            bare = _with_defaults(layers, {}).but(prefixes=("",))
            fitting.setdefault(str(written(row_changes(bare))), _with_defaults(layers, defaults))
    return sorted(fitting.values(), key=lambda row: len(stanza_of(row)))


def _with_defaults(row: Family, defaults: Mapping[str, Any]) -> Family:
    """The row with these defaults alone."""
    return replace(row, config=replace(row.config, defaults=defaults))


def _foreign(row: Family, usual: dict[str, Any]) -> bool:
    """True if a row reads a setting that the architecture lacks: no tiny model can test it."""
    kv_heads = row.heads.kv_heads
    named = () if isinstance(kv_heads, int) else kv_heads
    common = {*named, *row.heads.head_dim}.union(*KEYS.values())
    settings = {key for key, value in row.config.defaults.items() if value not in (False, None)}
    return bool(settings - usual.keys() - common)


def guarded(row: Family, derived: Derived, understood: Mapping[str, Any]) -> Family:
    """The row, made to refuse every value of the config's options that it was not proved for.

    A saved row serves every checkpoint of its model_type, and others may have these options set.
    Bounds that this config leaves open are tried too, and become cells of the row. `understood`:
    the stack's part of the config.
    """
    for key in _open(derived):
        if _matters(row, derived, key, BOUND):
            capped = (row.but(steps__softcap=Softcap(key)), row.but(steps__clip=Clip((key,))))
            right = (each for each in capped if not _matters(each, derived, key, BOUND))
            row = next(right, row)
    for key, value in _switches(row, derived):
        if _matters(row, derived, key, not value):
            refused = _unproved(f"{key} {str(not value).lower()}")
            row = _refusing(row, derived, When(key, not value, refused=refused))
    for key, values in _options(row, derived):
        if key not in understood:
            continue
        if values and not any(_matters(row, derived, key, value) for value in values):
            continue
        value = understood[key]
        refused = _unproved(f"a {key} other than {value}")
        pinned = _refusing(row, derived, Unless(key, value, refused=refused))
        tried = derived.first.config[key], *values
        variants = _reading(row, derived, key) if values else ()
        exact = (
            variant
            for variant in variants
            if not any(_matters(variant, derived, key, value) for value in tried)
        )
        row = next(exact, pinned)
    return row


def _reading(row: Family, derived: Derived, key: str) -> Iterator[Family]:
    """Variants that read a constant from a config key: eps, the rotation's base, a size."""
    value, config = derived.first.config[key], derived.first.config
    usual = derived.left_out(key)
    row = row if usual is None else row.but(config__defaults={key: usual})
    fixed = [norm for norm in (row.norms.before, row.scores.qk_norm) if norm is not None]
    if fixed and all(norm.eps == value for norm in fixed):
        qk_norm = row.scores.qk_norm and replace(row.scores.qk_norm, eps=None)
        norm = row.norms.before and replace(row.norms.before, eps=None)
        yield row.but(
            norms__before=norm,
            scores__qk_norm=qk_norm,
            config__keys={**row.config.keys, "norm_eps": (key,)},
        )
    if isinstance(row.rope, Rope) and row.rope.theta_key not in config and not row.rope.thetas:
        yield row.but(positions__rope__theta_key=key)
    for cell in ("head_dim", "kv_heads", "value_dim"):
        if type(value) is int and not getattr(row.heads, cell):
            yield row.but(**{f"heads__{cell}": (key,)})


def _unproved(what: str) -> str:
    return f"{what}, which this row was not proved for"


def _refusing(row: Family, derived: Derived, condition: When) -> Family:
    """The row with a condition that makes it refuse, and the architecture's default for its key."""
    usual = derived.left_out(condition.key)
    row = row.but(when=(*row.when, condition))
    return row if usual is None else row.but(config__defaults={condition.key: usual})


def _open(derived: Derived) -> list[str]:
    """Bounds of scores, queries, keys and values that the config leaves open."""
    config = derived.first.config
    return [key for key in config if config[key] is None and re.search("clip|cap", key)]


def _switches(row: Family, derived: Derived) -> list[tuple[str, bool]]:
    """Boolean config values that the row does not read and that may concern attention."""
    read = {*vars(row.heads.bias).values()}
    switches = [
        (key, value)
        for key, value in derived.first.config.items()
        if isinstance(value, bool) and key not in read and not NO_ATTENTION.fullmatch(key)
    ]
    return switches[:MOST]


def _options(row: Family, derived: Derived) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Words and numbers of the config, each with values to try; none for a word of unknown meaning.

    Sizes are left out, and what the second tiny model had otherwise: the row reads those, or is not
    exact.
    """
    settled = {when.key for when in row.when}
    config = {
        key: value
        for key, value in derived.first.config.items()
        if key not in settled and not NO_ATTENTION.fullmatch(key) and not NO_OPTION.fullmatch(key)
    }
    for key, value in config.items():
        if isinstance(value, str):
            names = ("relu", "tanh") if ACTIVATION.search(key) else ()
            yield key, tuple(name for name in names if name != value)
    for key, value in [*unnamed(config, VARIED).items()][:MOST]:
        yield key, (2 * value or 1, value + 1 if type(value) is int else value / 2)


def _matters(row: Family, derived: Derived, key: str, value: object) -> bool:
    """True if the row fails on a tiny model with this config value, if it can be built."""
    config = derived.first.tiny.model.config
    values = config.to_dict()
    inside(values, derived.first.part)[key] = value
    try:
        model, observed = at_work(type(config).from_dict(values), *TRIALS[0])
    except Exception:  # whatever transformers raises of switches that do not go together
        return False
    with scratch_folder() as folder:
        model.save_pretrained(folder)
        tiny = Tiny(model, open_checkpoint(folder), Stored(model, folder), stacks(observed))
        return derived.stack in tiny.stacks and bool(nearness(row, tiny, derived.stack).problem)


@dataclass(frozen=True)
class Adopted:
    """The result of `adopt`."""

    rows: tuple[Family, ...]  # one row per verified stack
    unproved: Mapping[str, str]  # reasons, by stack, for no proof at the checkpoint's own size
    refused: Mapping[str, str]  # the nearest row's problem, by any other stack's attention modules
    beyond: tuple[str, ...] = ()  # positions and lengths up to which the rows are proved


def adopt(checkpoint: Checkpoint, rows: Iterable[Family] = FAMILIES) -> Adopted:
    """Find one row per stack that is exact on two tiny models, and on the checkpoint's own layers.

    The tiny models differ in sizes, seeds and positions; `full_size` says how the checkpoint's
    layers are compared.
    """
    rows = tuple(rows)
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        problem = f"{PROOF} has no architecture '{str(kind)[:40]}'"
        raise CheckpointError(
            f"{problem}, and code that comes with a checkpoint is not run; {WAYS}",
            file=checkpoint.name,
        )
    values = without_code(checkpoint.config, checkpoint.config.file)
    try:
        made = CONFIG_MAPPING[kind]
        config, usual = made.from_dict(values), made().to_dict()
        if not made.__module__.startswith("transformers."):  # a user's class may have no defaults
            usual |= config.to_dict()
    except Exception as error:  # whatever transformers raises of a config
        problem = f"transformers cannot read it: {class_and_line(error)}"
        raise CheckpointError(problem, file=checkpoint.config.file) from None
    rows_of: dict[str, Family] = {}
    refused: dict[str, str] = {}
    with tiny_models(config, checkpoint.name) as tinies:
        for stack in tinies[0].stacks:
            if any(stack not in tiny.stacks for tiny in tinies):
                refused[stack] = "it is seen at one size only"
                continue
            search = Search(tinies, stack, rows)
            best = search.run(_proposals(search, usual))
            row, problem = _kept(best, search, checkpoint, config.to_dict())
            if row is None:
                refused[stack] = problem
            else:
                rows_of[stack] = row
        outcomes = at_full_size(rows_of, config, checkpoint, tinies[0]) if rows_of else {}
    refused |= {stack: outcome.problem for stack, outcome in outcomes.items() if outcome.problem}
    rows_left = tuple(row for stack, row in rows_of.items() if stack not in refused)
    if not rows_left:
        reasons = "; ".join(f"{stack}: {why}" for stack, why in refused.items())
        if len(refused) == 1:
            (reasons,) = refused.values()
        raise CheckpointError(f"no row reads it exactly; nearest: {reasons}", file=checkpoint.name)
    unproved = {stack: outcome.unproved for stack, outcome in outcomes.items() if outcome.unproved}
    left = [outcome for stack, outcome in outcomes.items() if stack not in refused]
    beyond = tuple(dict.fromkeys(limit for outcome in left for limit in outcome.beyond))
    return Adopted(rows_left, unproved, refused, () if unproved else beyond)


def as_stanza(row: Family) -> str:
    """The shortest stanza of a row: complete, or what differs from one of the roots."""
    roots = [(root, base) for root in ROOTS if (base := FAMILIES.row(root)) is not None]
    return min((stanza_of(row, like) for like in (None, *roots)), key=len)


def answer_of(adopted: Adopted, checkpoint: Checkpoint, proof: str = PROOF) -> dict[str, Any]:
    """The command's answer: stanzas, problems and the file of rows that it saves, as text."""
    digest = digest_of(checkpoint.config)
    proof += f"; unproved beyond {_listed(adopted.beyond)}" if adopted.beyond else ""
    return {
        "name": str(checkpoint.name),
        "proof": proof,
        "stanzas": [as_stanza(row) for row in adopted.rows],
        "unproved": dict(adopted.unproved),
        "refused": dict(adopted.refused),
        "file": file_of(adopted.rows, proof, proved=not adopted.unproved, digest=digest).decode(),
        "model_type": str(checkpoint.config.get("model_type")),
    }


def _listed(limits: Sequence[str]) -> str:
    """Words in a row, "and" before the last."""
    return " and ".join(filter(None, (", ".join(limits[:-1]), *limits[-1:])))


def _kept(
    best: Found | None, search: Search, checkpoint: Checkpoint, understood: dict[str, Any]
) -> tuple[Family | None, str]:
    """The best row if it is verified and fits the checkpoint itself, else None and the reason."""
    if best is None:
        return None, "its attention is made of no modules that a row can name"
    if best.problem:
        guessed = [name for name in search.guessed if name not in best.problem]
        more = f"; no cell for {_listed(guessed)} made it exact" if guessed else ""
        return None, best.problem + more
    part = inside(understood, search.derived.first.part)
    row = guarded(_tidy(best.row, search), search.derived, part)
    if problem := proved(row, search.tinies, search.stack):
        return None, problem
    for placed in _placements(row, checkpoint):
        if not (problem := misfit(placed, checkpoint) or misread(placed, checkpoint, understood)):
            return placed, ""
        for older in search.older(placed, checkpoint.config):
            wrong = misfit(older, checkpoint) or misread(older, checkpoint, understood)
            if not wrong and not proved(older, search.tinies, search.stack):
                return older, ""
    problem = problem or "no such layers"
    return None, f"the row that is exact of tiny models does not fit this file: {problem}"


def _tidy(row: Family, search: Search) -> Family:
    """The row with flags for its biases, and without defaults that change nothing."""
    tiny = search.tinies[0]
    for flagged in search.flagged(row):
        row = row if search.tried(flagged).problem else flagged
    defaults = row.config.defaults
    needed = [key for key in defaults if not _read_without(key, row, tiny, search.stack)]
    return _with_defaults(row, {key: defaults[key] for key in needed})


def _read_without(key: str, row: Family, tiny: Tiny, stack: str) -> bool:
    """True if a row stays exact when neither the config nor its own defaults have this key."""

    def without(values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: without(value) for name, value in values.items() if name != key}

    checkpoint = tiny.checkpoint.with_config(without(tiny.checkpoint.config.raw))
    bare = replace(tiny, checkpoint=checkpoint)
    return not nearness(_with_defaults(row, without(row.config.defaults)), bare, stack).problem


def _placements(row: Family, checkpoint: Checkpoint) -> Iterable[Family]:
    """The row under each prefix of its layers in the checkpoint, the tiny model's prefix first."""
    (tiny_prefix,) = row.prefixes

    def unlike(prefix: str) -> tuple[bool, int]:
        return not prefix.endswith(tiny_prefix), len(prefix)

    for prefix in sorted(prefixes_of(checkpoint, row), key=unlike):
        yield row.but(prefixes=tuple(dict.fromkeys((prefix, tiny_prefix))))


class _Shapes(LayerTensors):
    """Tensors as zeros, after a check of their shapes."""

    def read(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        return np.zeros(self.tensor(name, shape).shape, np.float32)

    weights = read


def misfit(row: Family, checkpoint: Checkpoint) -> str:
    """The reason that a row does not fit a checkpoint's attention tensors; empty if it fits."""
    try:
        model = Model.of_row(checkpoint, row.but(origin=f"adopted, proved against {PROOF}"))
        layers, types = reversed(model.attention_layers), model.config.layer_types
        first_of_type = {types[index]: index for index in layers}
        tensors = model.under()
        if not any(step.compares for step in row.steps):
            tensors = _Shapes(tensors.checkpoint, tensors.prefix, tensors.needed_by)
        for index in model.attention_layers:
            if not model.attention_tensors(index):
                return f"layer {index} is not there"
        for index in first_of_type.values():
            read_layer(tensors, model.family, model.config, index)
    except CheckpointError as error:
        return first_line(error)
    return "" if model.attention_layers else "it has no layer of attention"


def misread(row: Family, checkpoint: Checkpoint, understood: dict[str, Any]) -> str:
    """The first number that a row reads otherwise from the file's config than from `understood`.

    Older files have other keys (`rope_theta` for `rope_parameters`), which tiny models never show.
    """
    try:
        stored_numbers = numbers_read(Model.of_row(checkpoint, row).reading)
        as_understood = Model.of_row(checkpoint.with_config(understood), row)
        understood_numbers = numbers_read(as_understood.reading)
    except CheckpointError as error:
        return first_line(error)
    for what, number in stored_numbers.items():
        if str(number) != str(understood_numbers[what]):
            return f"transformers reads {what} of its config.json otherwise"
    return ""
