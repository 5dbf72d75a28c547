"""The kinds of findings: what each is called, how grave it is, and what to look at next."""

from typing import NamedTuple

SEVERITIES = ("error", "warning", "note")  # the gravest first


class Kind(NamedTuple):
    """A kind of finding.

    Attributes
    ----------
    title : str
        What it is called.
    look_next : str
        What to look at next.
    severity : {"error", "warning", "note"}
        An error is broken, a warning is seldom meant, a note is worth knowing and usual in trained models.
    """

    title: str
    look_next: str
    severity: str = "note"


# The gravest first.
KINDS: dict[str, Kind] = {
    "not_finite": Kind(
        "weights that are not finite",
        "Read the tensor again from its source; if it is the same there, the training run or the conversion broke it.",
        "error",
    ),
    "overflow": Kind(
        "weights that overflow",
        "Read the tensor again from its source; if it is the same there, the run diverged or a scale is wrong.",
        "error",
    ),
    "zero_head": Kind(
        "zero head",
        "Check whether the head was pruned on purpose; if not, compare with the checkpoint before it.",
        "warning",
    ),
    "near_dead_head": Kind(
        "near-dead head",
        "Zero the head and measure the loss: it may be pruned, or its learning rate was too small.",
        "warning",
    ),
    "rank_collapsed": Kind(
        "rank-collapsed head",
        "Look at its spectrum in the report and at the singular values of its two factors: which one collapsed?",
        "warning",
    ),
    "zero_tensor": Kind(
        "tensor of zeros",
        "Check whether it is meant: a conversion that missed it leaves zeros too.",
        "warning",
    ),
    "duplicate_layers": Kind(
        "layers with the same tensors",
        "Check whether the layers were copied on purpose, to make a model deeper; if so, expect them to do the same.",
        "warning",
    ),
    "tensor_missing": Kind(
        "tensors that one checkpoint lacks",
        "Check that both were saved whole: weights that are tied may be left out, others may have been lost.",
        "warning",
    ),
    "odd_dtype": Kind(
        "unexpected dtype",
        "Check how the checkpoint was saved: one tensor kept in another precision is often a slip.",
        "warning",
    ),
    "duplicate_heads": Kind(
        "duplicate heads",
        "Compare the two heads' attention on text; copied layers and unbroken symmetry look like this.",
        "warning",
    ),
    "different_families": Kind(
        "checkpoints of different families",
        "Check that the heads are meant to be compared: norms, positions and biases may enter them differently.",
        "warning",
    ),
    "permuted_heads": Kind(
        "permuted heads",
        "The layer computes what it did; undo the order before weights are averaged, merged or subtracted.",
    ),
    "moved_most": Kind(
        "head that moved beyond the others",
        "Compare its spectra before and after, and the tokens along its first directions in the two audits.",
    ),
    "unmoved_layers": Kind(
        "layers that did not move",
        "Check that they were frozen on purpose.",
    ),
    "spectral_spike": Kind(
        "spectral spike",
        "A sink candidate: see which tokens lie along its first direction, then measure its attention on text.",
    ),
    "outlier_head": Kind(
        "head outside the distribution",
        "Compare its spectrum with its layer's other heads, and with the same head at another training step.",
    ),
    "layer_off_trend": Kind(
        "layer off the trend",
        "Compare the layer with its neighbours: another scale here means another norm gain, learning rate or merge.",
    ),
    "norm_off_role": Kind(
        "tensor off its role's norms",
        "Compare it with the same tensor of the layers beside it, and with an earlier checkpoint.",
    ),
    "duplicate_tensors": Kind(
        "tensors with the same values",
        "Tied weights are meant to be equal, and buffers often are; other copies waste memory.",
    ),
    "constant_rows": Kind(
        "rows of one value",
        "See what the rows are for: padding and tokens that training never met are usual, pruned neurons too.",
    ),
    "outlier_dimension": Kind(
        "outlier dimension",
        "Expect massive activations in this dimension; keep it in higher precision when the model is quantised.",
    ),
    "undertrained_rows": Kind(
        "undertrained embedding rows",
        "Prompt with these tokens: rows that training hardly met give erratic output; padding rows may be removed.",
    ),
    "oversized_rows": Kind(
        "oversized embedding rows",
        "See which tokens or positions these are: the first position and special tokens often carry a sink's norm.",
    ),
}
