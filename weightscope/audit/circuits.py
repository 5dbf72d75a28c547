"""Roles of heads in an audit, where that takes seconds."""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import numpy as np

from weightscope.circuits.names import head_names, head_roles
from weightscope.circuits.passes import multiplications, wiring
from weightscope.circuits.wiring import Wiring
from weightscope.errors import CheckpointError
from weightscope.findings import Finding, Findings
from weightscope.model import Model

AFFORDABLE = 2 * 10**11  # multiplications; `weightscope circuits` names the heads of larger models

Roles = dict[tuple[int, int], str]  # by layer and head


def roles_of(model: Model) -> Roles:
    """The roles of heads from the weights; none of a large model, or where a tensor is missing or broken."""
    if not _affordable(model) or model.family.memory is not None:
        return {}
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # of broken scales, which are findings
            names = head_names(copy(model))  # a copy, because a model caches its last layer
    except CheckpointError:
        return {}
    return {(model.attention_layers[i], int(head)): str(names[i, head]) for i, head in np.argwhere(names != "")}


def with_roles(findings: Findings, roles: Mapping[tuple[int, int], str]) -> Findings:
    """The same findings with heads named by their roles."""

    def named(finding: Finding) -> Finding:
        members = []
        for member in finding.members:
            layer = finding.layer if member.layer is None else member.layer
            if member.what == "head" and member.index is not None and layer is not None:
                member = replace(member, name=roles.get((layer, member.index), member.name))
            members.append(member)
        return replace(finding, members=tuple(members))

    return Findings(map(named, findings))


def named_wiring(model: Model) -> tuple[Wiring, np.ndarray] | None:
    """The wiring and the roles (L, H); None of a large model, or where a tensor is missing or broken."""
    if not _affordable(model):
        return None
    model = copy(model)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            wired = wiring(model)
            return wired, head_roles(model, wired).names
    except CheckpointError:  # a finding says what is wrong
        return None


def _affordable(model: Model) -> bool:
    return multiplications(model, len(model.attention_layers)) <= AFFORDABLE
