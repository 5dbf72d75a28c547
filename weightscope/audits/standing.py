"""Where the heads of a checkpoint stand among those of others: percentiles, and phrases that say them."""

import numpy as np

from weightscope.audits.findings import Finding
from weightscope.audits.measures import MeasuredHeads
from weightscope.audits.reference import Reference, comparable, compared, thirds_of, width_of
from weightscope.errors import counted
from weightscope.fingerprint import weights_digest, weights_size
from weightscope.model import Model
from weightscope.tables import Column, Table

FEW = 20  # checkpoints: with fewer a page says how coarse their percentiles are


class Standing:
    """Where the heads of a checkpoint stand among those of others.

    Parameters
    ----------
    model : Model
        The checkpoint. It may be in the reference itself, and is left out of it.
    heads : MeasuredHeads
    reference : Reference

    Attributes
    ----------
    reference : Reference
        The others.
    itself : bool
        Whether the checkpoint was left out.
    grids : dict of (L, H) arrays
        Percentiles by measure.
    counts : dict of (L,) int arrays
        Among how many checkpoints, by measure and layer.
    """

    def __init__(self, model: Model, heads: MeasuredHeads, reference: Reference) -> None:
        self._heads = heads
        sizes = {one.size for one in reference.checkpoints}  # no other file is read through for its digest
        self.reference = reference.without(weights_digest(model)) if weights_size(model) in sizes else reference
        self.itself = len(self.reference.checkpoints) < len(reference.checkpoints)
        self._thirds = thirds_of(heads.layers.tolist(), model.attention_layers)
        self.grids: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = {}
        thirds = np.array(self._thirds)
        for name in compared(heads):
            values, grid, counts = comparable(heads, name), np.full((len(thirds), heads.n_heads), np.nan), 0 * thirds
            for third in set(self._thirds):
                rows = thirds == third
                grid[rows], counts[rows] = self.reference.percentiles(name, third, values[rows])
            if counts.any():
                self.grids[name], self.counts[name] = grid, counts

    @property
    def table(self) -> Table:
        """A row a head: layer, head and a percentile a measure; its csv() is percentiles.csv."""
        own = self._heads.table.select("layer", "head").columns
        return Table(
            [*own, *(Column(name, np.round(grid.ravel(), 1), format=".0f") for name, grid in self.grids.items())]
        )

    def of(self, finding: Finding) -> str:
        """Where a finding's number stands in its layer, as a phrase; empty where that is unknown."""
        if finding.measure not in self.grids or finding.layer is None:
            return ""
        third = self._thirds[self._heads.layers.tolist().index(finding.layer)]
        value = np.array(finding.number) / width_of(self._heads, finding.measure)
        percentile, count = self.reference.percentiles(finding.measure, third, value)
        return phrase(float(percentile), count)

    @property
    def described(self) -> str:
        """What percentiles are, of how many checkpoints, and how far that goes."""
        count = len(self.reference.checkpoints)
        if not count:
            return "There is no other checkpoint to compare with."
        few = f" That is few: from one checkpoint to the next it is a step of {100 / count:.0f}." if count < FEW else ""
        itself = " This checkpoint is one of the reference's, and is left out." if self.itself else ""
        return (
            f"Percentiles are of {counted(count, 'checkpoint')}.{few}{itself} In each the share of heads below the "
            "value is counted, in the same third of the layers; the percentile is the mean of these shares, so that "
            "every checkpoint counts as one, however many heads it has. Ranks are compared as shares of a head's "
            "width; norms as they are, and they grow with a model's width."
        )


def phrase(percentile: float, count: int) -> str:
    """`97th percentile of 14 checkpoints`; empty where it is unknown.

    Examples
    --------
    >>> phrase(96.6, 14), phrase(100.0, 1), phrase(51.2, 5)
    ('97th percentile of 14 checkpoints', 'above all heads of 1 checkpoint', '51st percentile of 5 checkpoints')
    """
    if np.isnan(percentile) or not count:
        return ""
    of = counted(count, "checkpoint")
    if percentile in (0, 100):
        return f"{'above' if percentile else 'below'} all heads of {of}"
    whole = min(max(round(percentile), 1), 99)
    ending = "th" if 10 < whole < 14 else {1: "st", 2: "nd", 3: "rd"}.get(whole % 10, "th")
    return f"{whole}{ending} percentile of {of}"
