"""What attention adds up: the lengths of alpha f(x), compared with alpha (norm-based-attention paper).

`measure_norms` runs a model and returns a `NormAnalysis`; `page` reports it, with the figures of `figures` and the
paper's numbers. `study` goes from texts to a page.
"""

from weightscope.norms.measure import NormAnalysis, measure_norms

__all__ = ["NormAnalysis", "measure_norms"]
