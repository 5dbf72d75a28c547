"""What are this checkpoint's heads? Measures, findings, comparison, figures and pages."""
