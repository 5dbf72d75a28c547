"""Heads of layers without a softmax in an audit: how long a state lasts, spectra of its maps."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from weightscope.core.errors import CheckpointError, counted
from weightscope.core.progress import bar
from weightscope.core.results import ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table, column
from weightscope.model.layers.factored import core_singular_values, inner_products, triangle
from weightscope.model.layers.mixer import Mixer
from weightscope.model.metrics.spectra import copying_score, effective_rank, eigenvalues
from weightscope.model.model import Model
from weightscope.report.findings import indexed

FIXED = "the input part of a step is taken to be zero"
RANDOM = "The same of random normal factors of these shapes, as at initialisation."


class MixerRow(NamedTuple):
    """One head of a layer without a softmax; its singular values as in heads.csv."""

    layer: int = column("Its index in the checkpoint.")
    head: int = column("Head that has a state; 0 where a layer has one for each channel.")
    kind: str = column("Kind of layer.")
    time_scale: float = column(
        "Tokens after which 1/e of the state is left, if nothing but the bias sets the step "
        "(median over channels where each has its own).",
        symbol="time scale",
        unit="tokens",
    )
    time_scale_min: float = column("Of the head's channels.", symbol="least", unit="tokens")
    time_scale_max: float = column("Of the head's channels.", symbol="largest", unit="tokens")
    qk_sigma1: float = column("Largest singular value of W_QK.", symbol="$σ₁(W_QK)$")
    qk_effective_rank: float = column("Effective rank of W_QK.", symbol="$erank(W_QK)$")
    qk_effective_rank_random: float = column(RANDOM, symbol="of random factors")
    vo_sigma1: float = column("Largest singular value of W_VO.", symbol="$σ₁(W_VO)$")
    vo_effective_rank: float = column("Effective rank of W_VO.", symbol="$erank(W_VO)$")
    vo_effective_rank_random: float = column(RANDOM, symbol="of random factors")
    vo_copying_score: float = column(
        "Share of positive eigenvalue mass of W_VO; about 0.32 at random.",
        symbol="copying score",
        format=".3f",
    )


class OfMap(NamedTuple):
    """Measures of one map W = left right'."""

    sigma1: float
    effective_rank: float
    copying: float


def measure_map(left: np.ndarray, right: np.ndarray) -> OfMap:
    """Measures of left right', (d, r) each; NaN where a factor is not finite."""
    left_gram, right_gram, cross = inner_products(left, right)
    s = core_singular_values(triangle(left, left_gram), triangle(right, right_gram))
    copying = copying_score(eigenvalues(cross)) if np.isfinite(cross).all() else np.nan
    return OfMap(float(s[0]), float(effective_rank(s)), float(copying))


@cache
def rank_of_random(d: int, r: int) -> float:
    """The effective rank of left right' with normal factors (d, r); one draw, always the same."""
    left, right = np.random.default_rng(0).standard_normal((2, d, r), np.float32)
    return measure_map(left, right).effective_rank


@holds_arrays
class MeasuredMixers(ShowsShapes):
    """Layers without a softmax, measured."""

    table: Table  # one row per head; it is mixers.csv
    layers: dict[int, str]  # kind of each layer that has a state
    caveats: tuple[str, ...]  # operations between the maps and what the layers compute
    names: tuple[str, ...]  # tensors that were read
    broken: dict[int, set[str]]  # by layer, the tensors in which NaN or infinity was read
    notes: tuple[str, ...]  # layers without a state or that cannot be read, in sentences

    @property
    def by_layer(self) -> Table:
        """One row per layer: its kind, and medians over its heads."""
        medians = [name for name in self.table.names if name not in ("layer", "head", "kind")]
        rows = []
        for layer, kind in self.layers.items():
            heads = self.table.where(self.table["layer"] == layer)
            extremes = {
                "time_scale_min": np.min(heads["time_scale_min"]),
                "time_scale_max": np.max(heads["time_scale_max"]),
            }
            of_heads = (extremes.get(name, np.median(heads[name])) for name in medians)
            rows.append((layer, kind, len(heads), *of_heads))
        columns = [self.table.column(name) for name in medians]
        header: list[str | Column] = ["layer", "kind", "heads", *columns]
        caption = f"Medians over the heads of a layer. Time scales where {FIXED}."
        return Table.of_rows(header, rows, caption)

    @property
    def where(self) -> str:
        """The layers with a state by their kind, in words."""
        by_kind: dict[str, list[int]] = {}
        for layer, kind in self.layers.items():
            by_kind.setdefault(kind, []).append(layer)
        return ", ".join(f"{kind} in {indexed('layer', i)}" for kind, i in by_kind.items())

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on the table's rows, and on layers without one."""
        if not len(self.table):
            return self.notes
        heads = counted(len(self.table), "head")
        between = f" Between its matrices and what is computed: {'; '.join(self.caveats)}."
        rest = between if self.caveats else ""
        return f"mixers.csv has {heads} without a softmax ({self.where}).{rest}", *self.notes


def measured_mixers(model: Model, layers: Sequence[int] | None = None) -> MeasuredMixers | None:
    """Measure the layers without a softmax; None if the model has none among `layers`.

    The model is an unchecked one: NaN makes NaN measures, which are a finding.
    """
    indices = [i for i in model.mixer_layers if layers is None or i in layers]
    if not indices:
        return None
    rows, kinds, broken = list[MixerRow](), dict[int, str](), dict[int, set[str]]()
    caveats, names, left_out = dict[str, None](), list[str](), dict[str, list[int]]()
    for index in bar(indices, "layers without a softmax", "layer"):
        try:
            mixer = model.mixer(index)
        except CheckpointError as error:
            left_out.setdefault(f"could not be read: {error}", []).append(index)
            continue
        names += (of_layer := model.mixer_names(index))
        if noted := (model.checkpoint.noted or set()).intersection(of_layer):
            broken[index] = noted
        if mixer.n_heads:
            kinds[index] = mixer.kind
            caveats |= dict.fromkeys(mixer.caveats)
            with np.errstate(invalid="ignore", over="ignore"):  # broken weights are a finding
                rows += measured_heads(mixer)
        else:
            left_out.setdefault(mixer.refused, []).append(index)
    notes = [
        f"Without a softmax and not measured, {indexed('layer', layers)}: {why}."
        for why, layers in left_out.items()
    ]
    table = Table.of(MixerRow, rows)
    return MeasuredMixers(table, kinds, tuple(caveats), tuple(names), broken, tuple(notes))


def measured_heads(mixer: Mixer) -> Iterator[MixerRow]:
    """One row per head; query and key heads that several share are measured once."""
    nothing = OfMap(np.nan, np.nan, np.nan)
    of_keys: dict[int, OfMap] = {}
    for index, scales in enumerate(mixer.time_scales):
        qk, vo, randomly = nothing, nothing, [np.nan, np.nan]
        if not mixer.refused:
            head = mixer.head(index)
            if head.key_head not in of_keys:
                of_keys[head.key_head] = measure_map(head.w_q, head.w_k)
            qk, vo = of_keys[head.key_head], measure_map(head.w_v, head.w_o.T)
            randomly = [rank_of_random(*w.shape) for w in (head.w_q, head.w_v)]
        yield MixerRow(
            layer=mixer.index,
            head=index,
            kind=mixer.kind,
            time_scale=float(np.median(scales)),
            time_scale_min=float(np.min(scales)),
            time_scale_max=float(np.max(scales)),
            qk_sigma1=qk.sigma1,
            qk_effective_rank=qk.effective_rank,
            qk_effective_rank_random=randomly[0],
            vo_sigma1=vo.sigma1,
            vo_effective_rank=vo.effective_rank,
            vo_effective_rank_random=randomly[1],
            vo_copying_score=vo.copying,
        )
