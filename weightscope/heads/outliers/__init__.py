"""Which dimensions of the residual stream stand out and decide where attention goes
(outlier-dimensions paper).
"""
