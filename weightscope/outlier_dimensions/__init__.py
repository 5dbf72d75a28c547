"""Which dimensions of the residual stream stand out and decide where attention goes (outlier-dimensions paper).

`measure_outliers` runs a model and gives an `OutlierAnalysis` of three parts: `stream`, `contributions` to scores, and
a `guess` from the weights alone. `page` tells it, with the figures of `figures`, beside the paper's Table 1 in `paper`.
`study` goes from sentences to a page.
"""

from weightscope.outlier_dimensions.measure import OutlierAnalysis, measure_outliers

__all__ = ["OutlierAnalysis", "measure_outliers"]
