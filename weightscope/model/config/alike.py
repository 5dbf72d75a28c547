"""Comparison of what two rows compute, by the roles of tensors, not by names or keys."""

from dataclasses import replace
from typing import Any

from weightscope.model.layers import layouts
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


def _bare(norm: Any) -> Any:
    if isinstance(norm, StoredNorm):
        module = "gain" if norm.module else ""
        return replace(norm, module=module, bias=False, gain="weight", shift="bias")
    if isinstance(norm, QkNorm):
        return replace(norm, query="", key="", bias=False, gain="weight", shift="bias")
    return norm
