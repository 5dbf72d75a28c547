"""Computations and numbers of a row, to compare rows and to find unread keys."""

import re
from collections.abc import Mapping
from dataclasses import astuple, fields, replace
from typing import Any

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.core.errors import CheckpointError
from weightscope.model.config.dialects import in_layer
from weightscope.model.config.reading import Reading, read_as
from weightscope.model.config.rope import Rope
from weightscope.model.config.rules import always, listed
from weightscope.model.layers import layouts
from weightscope.model.layers.read_layer import rotation_of
from weightscope.model.rows.cells import Biases, FromConfig, Heads, QkNorm, StoredNorm
from weightscope.model.rows.family import Family

# Layouts of the same heads; tensors are compared by role, whatever tensor holds them.
STORED = (
    layouts.separate,
    layouts.stacked,
    layouts.packed,
    layouts.grouped,
    layouts.keys_with_values,
    layouts.keys_beside_values,
)
UNLIKE = ("router", "expert")  # roles of mixtures; no row describes how experts are chosen


def computed_by(row: Family) -> Family | None:
    """The computation of a configured row, without names; None if it leaves some of a layer out."""
    mlp, outputs, rope = row.mlp, row.outputs, row.positions.rope
    if mlp is None or outputs is None or not mlp.known:
        return None
    if any(role.startswith(UNLIKE) for role in row.also):
        return None
    layout = layouts.separate if row.heads.layout in STORED else row.heads.layout
    network = replace(
        mlp,
        up="",
        down="",
        gate="gate" if mlp.gate else "",
        bias=False,
        transposed=False,
        activation_keys=(),
        norm=_bare(mlp.norm),
        after_attention=_bare(mlp.after_attention),
        attention_norm=_bare(mlp.attention_norm),
        output_norm=_bare(mlp.output_norm),
    )
    inputs = replace(
        row.inputs,
        tokens="",
        positions=str(bool(row.inputs.positions)),
        types=str(bool(row.inputs.types)),
        width="",
        norm=_bare(row.inputs.norm),
    )
    turns = rope and replace(
        rope,
        theta_key="",
        theta=0,
        fraction_key="",
        fraction=None,
        width_key="",
        local=None,
        local_scaled=True,
        scaling=True,
        by_type=False,
        scaled="",
    )
    return Family(
        heads=Heads(layout=layout, bias=Biases()),
        norms=replace(row.norms, before=_bare(row.norms.before), after=_bare(row.norms.after)),
        memory=row.memory,
        inputs=inputs,
        outputs=replace(outputs, norm=_bare(outputs.norm), tokens=()),
        positions=replace(row.positions, rope=turns),
        scores=replace(row.scores, qk_norm=_bare(row.scores.qk_norm)),
        mlp=network,
        parallel=row.parallel,
        config=FromConfig(sizes=row.config.sizes, attentions=row.config.attentions),
        refused=row.refused,
        steps=row.steps,
        in_=row.in_,
    )


def differs_for_sure(a: Family, b: Family) -> bool:
    """True if no value of a key or a tensor makes two computations the same."""
    return _without_choices(a) != _without_choices(b)


def _without_choices(row: Family) -> Family:
    """A computation without what keys choose, and without what tensors may make up for."""
    rope, mlp, outputs = row.positions.rope, row.mlp, row.outputs
    if isinstance(rope, Rope) and rope.rotates is listed:
        rope = replace(rope, rotates=always)
    return replace(
        row,
        norms=replace(row.norms, before=_plain(row.norms.before), after=_plain(row.norms.after)),
        inputs=replace(row.inputs, scale=None, norm=_plain(row.inputs.norm)),
        outputs=outputs and replace(outputs, norm=_plain(outputs.norm)),
        positions=replace(row.positions, rope=rope),
        mlp=mlp and replace(mlp, activation="", norm=_plain(mlp.norm)),
    )


def _plain(norm: Any) -> Any:
    return replace(norm, offset=0.0) if isinstance(norm, StoredNorm) else norm


def _bare(norm: Any) -> Any:
    if isinstance(norm, StoredNorm):
        module = "gain" if norm.module else ""
        return replace(norm, module=module, bias=False, gain="weight", shift="bias")
    if isinstance(norm, QkNorm):
        return replace(norm, query="", key="", bias=False, gain="weight", shift="bias")
    return norm


# Config keys that may concern attention, and keys that cannot.
MATTERS = re.compile(
    r"rope|rotary|attn|attention|scal(e|ing)|norm|bias|multiplier|softcap|clip|window|alibi|sink",
    re.ASCII,
)
HARMLESS = re.compile(
    r".*(dropout|_implementation|init).*|output_attentions|norm_topk_prob"
    r"|.*(router|expert|logits?_scal).*",
    re.ASCII,
)


def unread_keys(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Config keys that may matter to attention and change nothing of what the row reads."""
    part, before = reading.part, str(numbers_read(reading))

    def is_unread(key: str) -> bool:
        """True if the row reads the same numbers with any other value of the key."""
        for value in _other_values(part[key]):
            changed = inner = dict(checkpoint.config.raw)
            if part.raw is not checkpoint.config.raw:
                for name in reading.row.part.split("."):
                    inner[name] = inner = dict(inner[name])
            inner[key] = value
            try:
                again = read_as(checkpoint.with_config(changed), reading.row)
                if again.configured.refused or str(numbers_read(again)) != before:
                    return False
            except CheckpointError:  # it is read, and does not go with the rest
                return False
        return True

    named = [key for key in part if MATTERS.search(key) and not HARMLESS.fullmatch(key)]
    return [key for key in named if part[key] not in (None, False) and is_unread(key)]


def _other_values(value: object) -> tuple[object, ...]:
    """Other values that a key might have."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, Mapping):
        return ({key: _other_values(inner)[0] for key, inner in value.items()}, None)
    return (2 * value, None) if isinstance(value, int | float) else (None,)


def numbers_read(reading: Reading) -> dict[str, Any]:
    """Every number that a row reads from a config."""
    config, family, layers = reading.config, reading.family, reading.settings.attention_layers
    head_dims = [in_layer(config, family, i)[0].head_dim for i in layers]
    flags = astuple(family.heads.bias)
    return {
        "sizes": [*head_dims, config.n_heads, config.n_kv_heads],
        "the layers": (config.n_layers, config.layer_types, layers),
        "the norm's eps": config.norm_eps,
        "the scale": [family.scores.scale(config, i) for i in layers],
        "the rotation": [_turns(rotation_of(config, family, i)) for i in layers],
        **{f"the {step.name}": [step.takes(config, i) for i in layers] for step in family.steps},
        "biases": [config.get(flag) if isinstance(flag, str) else flag for flag in flags],
        "norms": (family.norms.before, family.scores.qk_norm),
    }


def _turns(rotation: Any) -> Any:
    """Every field of a rotation, arrays as lists."""
    if rotation is None:
        return None
    turns = {}
    for field in fields(rotation):
        value = getattr(rotation, field.name)
        turns[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
    return turns
