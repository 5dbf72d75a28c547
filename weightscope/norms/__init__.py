"""What attention adds up, not what it weighs: lengths of alpha f(x) beside alpha (norm-based-attention paper).

`measure_norms` runs a model and gives a `NormAnalysis`; `page` tells it, with the figures of `figures`, beside the
paper's numbers in `paper`. `study` goes from texts to a page.
"""

from weightscope.norms.measure import NormAnalysis, measure_norms

__all__ = ["NormAnalysis", "measure_norms"]
