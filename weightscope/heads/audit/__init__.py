"""Audit of one checkpoint's heads: measures, findings, comparison, figures and pages."""
