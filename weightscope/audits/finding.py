"""What a finding is, and in which order findings are told."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

# What each kind is called, and what to look at next, the gravest first.
KINDS: dict[str, tuple[str, str]] = {
    "not_finite": (
        "weights that are not finite",
        "Read the tensor again from its source; if it is the same there, the training run or the conversion broke it.",
    ),
    "zero_head": (
        "zero head",
        "Check whether the head was pruned on purpose; if not, compare with the checkpoint before it.",
    ),
    "near_dead_head": (
        "near-dead head",
        "Zero the head and measure the loss: it may be pruned, or its learning rate was too small.",
    ),
    "rank_collapsed": (
        "rank-collapsed head",
        "Look at its spectrum in the report and at the singular values of its two factors: which one collapsed?",
    ),
    "spectral_spike": (
        "spectral spike",
        "A sink candidate: see which tokens lie along its first direction, then measure its attention on text.",
    ),
    "duplicate_heads": (
        "duplicate heads",
        "Compare the two heads' attention on text; copied layers and unbroken symmetry look like this.",
    ),
    "outlier_head": (
        "head outside the distribution",
        "Compare its spectrum with its layer's other heads, and with the same head at another training step.",
    ),
    "layer_off_trend": (
        "layer off the trend",
        "Compare the layer with its neighbours: another scale here means another norm gain, learning rate or merge.",
    ),
    "outlier_dimension": (
        "outlier dimension",
        "Expect massive activations in this dimension; keep it in higher precision when the model is quantised.",
    ),
    "undertrained_rows": (
        "undertrained embedding rows",
        "Prompt with these tokens: rows that training hardly met give erratic output; padding rows may be removed.",
    ),
    "oversized_rows": (
        "oversized embedding rows",
        "See which tokens or positions these are: the first position and special tokens often carry a sink's norm.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """Something in a checkpoint that a person should look at.

    Attributes
    ----------
    kind : str
        A key of `KINDS`.
    layer, head : int or None
        Where; None where it concerns a whole layer or the model.
    map : str or None
        "qk" or "vo".
    measure : str
        What `number` is.
    number : float
        The value that made it a finding.
    usual : float or None
        What it is in the rest of the checkpoint.
    text : str
        The finding in a sentence.
    items : tuple of int
        Other heads, dimensions or rows that belong to it, by index.
    """

    kind: str
    layer: int | None
    head: int | None
    map: str | None
    measure: str
    number: float
    usual: float | None
    text: str
    items: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        return KINDS[self.kind][0]

    @property
    def look_next(self) -> str:
        return KINDS[self.kind][1]

    @property
    def where(self) -> str:
        """`layer 3 head 7 qk`, as far as it is known."""
        places = (("layer", self.layer), ("head", self.head))
        parts = [f"{name} {index}" for name, index in places if index is not None]
        return " ".join([*parts, *([self.map] if self.map else [])]) or "model"


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest kind first, then by layer and head."""
    ranks = list(KINDS)
    far = 10**9

    def key(finding: Finding) -> tuple[int, int, int]:
        layer, head = (far if x is None else x for x in (finding.layer, finding.head))
        return ranks.index(finding.kind), layer, head

    return sorted(findings, key=key)


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """What findings.json holds: a list, empty where there is nothing to say; infinities as text."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not isfinite(value) else value

    return [
        {name: plain(value) for name, value in asdict(finding).items()}
        | {"title": finding.title, "look_next": finding.look_next}
        for finding in findings
    ]
