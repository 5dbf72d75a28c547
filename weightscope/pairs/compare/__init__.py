"""Distances that heads moved between checkpoints, and what was done: `weightscope compare`."""

FINDINGS = ("compare",)  # modules that import every module here that reports findings
SIGNS = {"trajectory.csv": "compare"}  # command, by a file
SHARED_SIGNS = {"tensors.csv": "compare"}  # checkpoints whose heads are not read
HEADS = {"compare": "heads.csv"}  # its table of heads
