"""Choose matrices to train or to merge by their weights, in a file for the tool that does it."""

# The measure, and how the comment of a file calls it. The highest come first.
BY = {
    "snr": ("snr", "signal-to-noise ratio as Spectrum defines it (arXiv 2406.06623)"),
    "stable-rank": ("stable_rank", "stable rank"),
    "alpha": ("alpha", "exponent of a power law of its spectrum"),
    "change": ("change", "relative change from the base"),
}
TOOLS = ("axolotl", "peft", "mergekit")
