"""What an audit calls each head: its role from the weights, where finding that takes seconds."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np

from weightscope.audits.findings import Finding, Findings
from weightscope.circuitry.names import head_names, head_roles
from weightscope.circuitry.passes import multiplications, wiring
from weightscope.circuitry.wiring import Wiring
from weightscope.errors import CheckpointError
from weightscope.model import Model

AFFORDABLE = 2 * 10**11  # multiplications; `weightscope circuits` names the heads of larger models
Roles = dict[tuple[int, int], str]


def named_wiring(model: Model) -> tuple[Wiring, np.ndarray] | None:
    """The wiring and the heads' roles, (L, H) text; None of a larger model, or where something is missing or broken."""
    if not _affordable(model):
        return None
    model = copy(model)  # a model keeps the last layer it was asked for
    try:
        wired = wiring(model)
        return wired, head_roles(model, wired).names
    except CheckpointError:  # findings say what is wrong
        return None


def roles_of(model: Model) -> Roles:
    """Roles by layer and head, as `named_wiring` finds them; none where it finds none."""
    if not _affordable(model) or model.family.memory is not None:
        return {}
    try:
        names = head_names(copy(model))
    except CheckpointError:
        return {}
    return {(model.attention_layers[i], int(head)): str(names[i, head]) for i, head in np.argwhere(names != "")}


def _affordable(model: Model) -> bool:
    return multiplications(model, len(model.attention_layers)) <= AFFORDABLE


def with_roles(findings: Findings, roles: Mapping[tuple[int, int], str]) -> Findings:
    """The same findings, heads called by their roles."""

    def named(finding: Finding) -> Finding:
        members = tuple(
            replace(member, name=roles.get((layer, member.index), member.name))
            if member.what == "head" and member.index is not None and layer is not None
            else member
            for member in finding.members
            for layer in (finding.layer if member.layer is None else member.layer,)
        )
        return replace(finding, members=members)

    return Findings(map(named, findings))
