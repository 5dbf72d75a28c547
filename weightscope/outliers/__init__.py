"""Which dimensions of the residual stream stand out and decide where attention goes (outlier-dimensions paper).

`measure_outliers` runs a model and returns an `OutlierAnalysis` with three parts: `stream`, `contributions` to scores,
and a `guess` from the weights alone. `page` reports it, with the figures of `figures` and the paper's Table 1. `study`
goes from sentences to a page.
"""

from weightscope.outliers.measure import OutlierAnalysis, measure_outliers

__all__ = ["OutlierAnalysis", "measure_outliers"]
