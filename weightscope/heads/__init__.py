"""Questions about one checkpoint, a folder each; none imports PyTorch but through the runner.

`tensors` reads every tensor by role, `audit` every head's spectra, `circuits` which heads read
which, `detok` the first layer; `norms`, `outliers` and `sinks` run the model. Each has measure,
figures and page.
"""
