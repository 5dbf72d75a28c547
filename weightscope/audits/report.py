"""What an audit leaves behind for people: the page, the figures, and a summary for the terminal."""

from collections import Counter
from pathlib import Path

import numpy as np

from weightscope.audits.audit import Audit
from weightscope.audits.figures import depth_figure, head_maps, spectra_figure
from weightscope.audits.finding import KINDS
from weightscope.audits.page import write_audit_page
from weightscope.errors import printable
from weightscope.model import Model
from weightscope.pages.style import save
from weightscope.wording import counted

SHOWN = 12  # findings in the terminal's summary


def write_report(model: Model, results: Audit, out: Path) -> None:
    """Write heads, spectra and depth as PNG and SVG, and report.html.

    Raises
    ------
    CheckpointError
        A file cannot be written.
    """
    for name, figure in (("heads", head_maps), ("spectra", spectra_figure), ("depth", depth_figure)):
        save(figure(results.heads), out, name)
    checkpoint = model.checkpoint
    name = checkpoint.folder.resolve().name if checkpoint.name == "model.safetensors" else checkpoint.name
    notes = [f"{note[0].upper()}{note[1:]}." for note in results.notes]
    write_audit_page(out, f"The heads of {name}", " ".join([*headline(model, results), *notes]), results)


def headline(model: Model, results: Audit) -> list[str]:
    """What was looked at and what was found, in a few sentences."""
    found = results.heads
    n_layers, n_heads = found.columns["qk_sigma1"].shape
    config = model.config
    kv = f", {config.n_kv_heads} key-value heads" if config.n_kv_heads != config.n_heads else ""
    routes = np.concatenate([found.columns["qk_route"].ravel(), found.columns["vo_route"].ravel()])
    careful = int((routes == "qr").sum())
    counts = Counter(finding.kind for finding in results.findings)
    told = ", ".join(f"{counts[kind]} × {title}" for kind, (title, _) in KINDS.items() if counts[kind])
    return [
        f"{model.family.name}, {counted(n_layers, 'layer')} of {counted(n_heads, 'head')}{kv}, width {config.d_model}.",
        f"Findings: {told}." if told else "No findings.",
        *([f"{careful} of {len(routes)} spectra took the accurate QR route."] if careful else []),
    ]


def summary(model: Model, results: Audit, out: Path) -> list[str]:
    """The audit on a terminal, a line each."""
    lines, findings = headline(model, results), results.findings
    for finding in findings[:SHOWN]:
        lines.append(f"  {finding.title:30s} {finding.where:22s} {finding.text}")
    if len(findings) > SHOWN:
        lines.append(f"  and {len(findings) - SHOWN} more")
    for label, name in (("σ₁(W_QK)", "qk_sigma1"), ("effective rank of W_QK", "qk_effective_rank"),
                        ("σ₁(W_VO)", "vo_sigma1"), ("copying score", "vo_copying_score")):  # fmt: skip
        values = results.heads.columns[name]
        known = values[np.isfinite(values)]
        if len(known):
            low, middle, high = np.percentile(known, (5, 50, 95))
            lines.append(f"{label}: median {middle:.3g}, 90 % of heads from {low:.3g} to {high:.3g}")
    return [printable(line) for line in [*lines, str(out / "report.html")]]
