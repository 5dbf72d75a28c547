"""The audit's page: findings first, a heat map a measure, the spectra of any head on a click. One file, no network."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.audits.audit import Audit, Measured, spectra_arrays
from weightscope.audits.directions import HeadDirections
from weightscope.audits.finding import Finding, as_json
from weightscope.audits.head_table import MEASURES, middle_names
from weightscope.folder import Files
from weightscope.pages.page import write_template

OPEN = 12  # findings of a kind that are shown without a click


def write_audit_page(files: Files | Path, title: str, lead: str, results: Audit) -> None:
    """Write report.html; whatever a checkpoint calls itself or its tokens is shown as text.

    Raises
    ------
    CheckpointError
        The file cannot be written.
    """
    found = results.heads
    write_template(
        files,
        "report.html",
        "audit.html",
        title=title,
        lead=lead,
        caveats=found.caveats,
        kinds=[list(findings) for _, findings in groupby(results.findings, key=lambda finding: finding.kind)],
        most_open=OPEN,
        measures=[measure for measure in MEASURES if measure.name in found.columns],
        facts=_facts(found, results.findings, results.directions),
    )


def _facts(found: Measured, findings: Sequence[Finding], directions: Sequence[HeadDirections]) -> dict[str, Any]:
    """What the page's script draws from."""
    spectra = {name: array for name, array in spectra_arrays(found.measured).items() if "singular_values" in name}
    return {
        "layers": found.layers.tolist(),
        "heads": int(found.columns["qk_sigma1"].shape[1]),
        "kv_heads": found.kv_heads.tolist(),
        "measures": [{"name": m.name, "log": m.log} for m in MEASURES if m.name in found.columns],
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
