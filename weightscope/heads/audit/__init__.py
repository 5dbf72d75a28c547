"""Audit of one checkpoint's heads: measures, findings, comparison, figures and pages."""

FINDINGS = ("audit",)  # modules that import every module here that reports findings
SHARED_SIGNS = {"summary.csv": "audits", "spectra.npz": "audit"}  # command, by a file
HEADS = {"audit": "heads.csv"}  # its table of heads
