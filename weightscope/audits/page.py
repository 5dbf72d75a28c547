"""The audit's page: findings first, a heat map a measure, the spectra of any head on a click. One file, no network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from weightscope.audits.audit import Audit, Measured, spectra_arrays
from weightscope.audits.directions import HeadDirections
from weightscope.audits.finding import Finding, as_json
from weightscope.audits.head_table import MEASURES, middle_names
from weightscope.errors import printable
from weightscope.folder import write_text

OPEN = 12  # findings of a kind that are shown without a click


@dataclass(frozen=True)
class Facts:
    """What the page says of the checkpoint beside its heads.

    Attributes
    ----------
    title, lead : str
    """

    title: str
    lead: str


def write_audit_page(path: Path, facts: Facts, results: Audit) -> None:
    """Write the page; whatever a checkpoint calls itself or its tokens is shown as text.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    found = results.heads
    here = files("weightscope.pages")
    page, style, own_style, script = (
        (here / name).read_text(encoding="utf-8") for name in ("audit.html", "page.css", "audit.css", "audit.js")
    )
    caveats = "".join(f'<p class="lead">{_text(caveat)}</p>' for caveat in found.caveats)
    write_text(
        path,
        Template(page).substitute(
            title=_text(facts.title),
            lead=_text(facts.lead),
            caveats=caveats,
            style=style + own_style,
            script=script,
            findings=_findings(results.findings, found),
            reading=_reading(found),
            facts=_embedded(_data(found, results.findings, results.directions)),
        ),
    )


def _text(value: object) -> str:
    return escape(printable(value))


def _findings(findings: Sequence[Finding], found: Measured) -> str:
    """Findings by kind, the gravest first."""
    if not findings:
        return "<p>None. Nothing in these weights stands out.</p>"
    index = {int(layer): i for i, layer in enumerate(found.layers)}
    parts = []
    for kind, group in groupby(findings, key=lambda finding: finding.kind):
        several = list(group)
        items = "".join(f"<li>{_where(finding, index)} {_text(finding.text)}</li>" for finding in several)
        title = f"{_text(several[0].title)} ({len(several)})"
        shown = " open" if len(several) <= OPEN else ""
        parts.append(
            f'<details class="kind" id="{escape(kind)}"{shown}><summary>{title}</summary>'
            f'<p>{_text(several[0].look_next)}</p><ul class="findings">{items}</ul></details>'
        )
    return "".join(parts)


def _where(finding: Finding, index: Mapping[int, int]) -> str:
    if finding.layer is None:
        return ""
    at = f'data-layer="{index[finding.layer]}" data-head="{finding.head or 0}"'
    return f'<button class="where" {at}>{_text(finding.where)}</button>'


def _reading(found: Measured) -> str:
    rows = "".join(
        f"<dt>{_text(m.symbol)}<br><small>{_text(m.name)}</small></dt><dd>{_text(m.meaning)}</dd>"
        for m in MEASURES
        if m.name in found.columns
    )
    return f'<dl class="reading">{rows}</dl>'


def _data(found: Measured, findings: Sequence[Finding], directions: Sequence[HeadDirections]) -> dict[str, Any]:
    spectra = {name: array for name, array in spectra_arrays(found.measured).items() if "singular_values" in name}
    return {
        "layers": found.layers.tolist(),
        "heads": int(found.columns["qk_sigma1"].shape[1]),
        "kv_heads": found.kv_heads.tolist(),
        "measures": [{"name": m.name, "symbol": m.symbol, "log": m.log} for m in MEASURES if m.name in found.columns],
        "names": list(found.columns),
        "columns": {name: _plain(column, 6) for name, column in found.columns.items()},
        "spectra": {name: _plain(array, 4) for name, array in spectra.items()},
        "forms": middle_names(found.measured),
        "findings": [
            {name: finding[name] for name in ("layer", "head", "title", "text")} for finding in as_json(findings)
        ],
        "directions": {f"{one.layer}.{one.head}": [line.as_json() for line in one.lines] for one in directions},
    }


def _plain(array: np.ndarray, digits: int) -> Any:
    """An array as nested lists, floats to `digits` significant ones, None where they are not finite."""
    if array.ndim:
        return [_plain(part, digits) for part in array]
    if array.dtype.kind == "f":
        return float(f"{array:.{digits}g}") if np.isfinite(array) else None
    return array.item()


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
