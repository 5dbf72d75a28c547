"""Plant faults in one layer after the other of a checkpoint, and in all, and count which of them an audit finds.

    python -m analyses.planted_faults SOURCE... [--out out/planted-faults]

Every fault is planted in the stored weights of a layer, in memory, and the layer is measured again. The findings are
compared with those of the checkpoint as it is, whose errors and warnings are false alarms if it is healthy. Ranks are
judged by the reference of other checkpoints, which leaves out the one at hand.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np

import weightscope as ws
from analyses.inputs import out_option
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.audits.audit import AuditOptions, measured_layer
from weightscope.audits.duplicates import duplicates
from weightscope.audits.factors import factor_findings
from weightscope.audits.findings import findings_of, head_findings
from weightscope.audits.measures import Arrays, MeasuredHeads
from weightscope.audits.reference import OWN, Reference, Standing
from weightscope.cli.command import EndsInOneLine
from weightscope.files import Folder
from weightscope.findings import Findings
from weightscope.progress import bar
from weightscope.sources import folder_names
from weightscope.tables import Table

FACTORS = ("q", "k", "v")
OPTIONS = AuditOptions(deltas=(0,), directions=0)


def changed(layer: Layer, change: Callable[[np.ndarray], np.ndarray], names: tuple[str, ...]) -> Layer:
    """The layer with some of its stored factors q, k, v (A, d, r) and o (H, r, d) changed."""
    maps = {name: getattr(layer, name) for name in names if name != "o"}
    new = {name: replace(affine, stored=change(np.asarray(affine.stored))) for name, affine in maps.items()}
    return replace(layer, **new, **({"w_o": change(np.asarray(layer.w_o))} if "o" in names else {}))


def large_value_bias(layer: Layer) -> Layer:
    """A bias of 10,000 for every value."""
    return replace(layer, v=replace(layer.v, bias=layer.v.bias + np.float32(1e4)))


def noise(layer: Layer) -> Layer:
    """Noise of half a standard deviation on all four factors."""
    rng = np.random.default_rng(layer.index)
    return changed(
        layer,
        lambda w: w + (0.5 * w.std(dtype=np.float64) * rng.standard_normal(w.shape)).astype(w.dtype),
        (*FACTORS, "o"),
    )


def initialised_anew(layer: Layer) -> Layer:
    """All four factors drawn anew, with the standard deviation that they had."""
    rng = np.random.default_rng(layer.index)
    return changed(
        layer, lambda w: (w.std(dtype=np.float64) * rng.standard_normal(w.shape)).astype(w.dtype), (*FACTORS, "o")
    )


def swapped(layer: Layer) -> Layer:
    """Keys and values swapped."""
    return replace(layer, k=layer.v, v=layer.k)


def scaled_queries(layer: Layer) -> Layer:
    """W_Q times 30."""
    return changed(layer, lambda w: 30 * w, ("q",))


def of_another_layer(layer: Layer, other: Layer) -> Layer:
    """Keys and values of another layer."""
    return replace(layer, k=other.k, v=other.v)


def collapsed_head(layer: Layer) -> Layer:
    """Queries of the first head cut to four directions."""

    def cut(w: np.ndarray) -> np.ndarray:
        u, s, vt = np.linalg.svd(w[0], full_matrices=False)
        return np.concatenate([((u[:, :4] * s[:4]) @ vt[:4])[None].astype(w.dtype), w[1:]])

    return changed(layer, cut, ("q",))


def copied_head(layer: Layer) -> Layer:
    """The last head becomes the first, moved by a tenth of its norm."""
    rng = np.random.default_rng(layer.index)

    def copied(w: np.ndarray) -> np.ndarray:
        noise = 0.1 * np.sqrt((w[0].astype(np.float64) ** 2).mean()) * rng.standard_normal(w[0].shape)
        return np.concatenate([w[:-1], (w[0] + noise)[None].astype(w.dtype)]) if len(w) > 1 else w

    return changed(layer, copied, (*FACTORS, "o"))


def copied_layer(layer: Layer, other: Layer) -> Layer:
    """Another layer in its place."""
    return replace(other, index=layer.index)


def o_transposed(layer: Layer) -> Layer:
    """W_O transposed, where it is square."""
    n_heads, r, d = layer.w_o.shape
    return replace(layer, w_o=np.asarray(layer.w_o).reshape(d, d).T.reshape(n_heads, r, d))


def squares_transposed(layer: Layer) -> Layer:
    """All factors that are square transposed."""

    def transposed(affine: Affine) -> Affine:
        matrix = _whole(affine)
        return _with(affine, matrix.T) if len(matrix) == matrix.shape[1] else affine

    return replace(o_transposed(layer), **{name: transposed(getattr(layer, name)) for name in FACTORS})


def q_k_exchanged(layer: Layer) -> Layer:
    """Queries and keys exchanged, with their biases."""
    return replace(layer, q=layer.k, k=layer.q)


def v_o_exchanged(layer: Layer) -> Layer:
    """Values and outputs exchanged as they are stored, with their biases."""
    n_heads, r, d = layer.w_o.shape
    value = replace(layer.v, bias=np.asarray(layer.output_bias, np.float32).reshape(layer.v.bias.shape))
    outputs = _whole(layer.v).reshape(n_heads, r, d)
    return replace(layer, v=_with(value, np.asarray(layer.w_o).reshape(d, d)), w_o=outputs)


def _whole(affine: Affine) -> np.ndarray:
    """All heads of a factor as one matrix, (A, d, r) -> (d, A r)."""
    stored = np.asarray(affine.stored)
    return stored.transpose(1, 0, 2).reshape(stored.shape[1], -1)


def _with(affine: Affine, matrix: np.ndarray) -> Affine:
    """The factor with another matrix (d, A r)."""
    count, d, r = affine.shape
    return replace(affine, stored=matrix.reshape(d, count, r).transpose(1, 0, 2))


FAULTS: dict[str, tuple[Callable[..., Layer], str]] = {
    "value bias of 10000": (large_value_bias, "large_bias"),
    "noise of 0.5 standard deviations": (noise, "noise_floor"),
    "K and V swapped": (swapped, "swapped_factors"),
    "Q times 30": (scaled_queries, "unbalanced_factors"),
    "layer initialised anew": (initialised_anew, "untrained_layer"),
    "K and V of another layer": (of_another_layer, "mixed_factors"),
    "a head's queries cut to rank 4": (collapsed_head, "rank_collapsed"),
    "a head copied, moved by 10 %": (copied_head, "duplicate_heads"),
    "another layer in its place": (copied_layer, "duplicate_heads"),
    "W_O transposed": (o_transposed, "transposed_factors"),
    "all square factors transposed": (squares_transposed, "transposed_factors"),
    "Q and K exchanged": (q_k_exchanged, "swapped_factors"),
    "V and O exchanged": (v_o_exchanged, "swapped_factors"),
}
WITH_ANOTHER = (of_another_layer, copied_layer)
EVERYWHERE = (swapped, o_transposed, squares_transposed, q_k_exchanged, v_o_exchanged)  # planted in all layers too
FITS: dict[Callable[..., Layer], Callable[[Layer], bool]] = {
    swapped: lambda layer: layer.k.shape == layer.v.shape,
    o_transposed: lambda layer: np.prod(layer.w_o.shape[:2]) == layer.d_model,
    squares_transposed: lambda layer: np.prod(layer.w_o.shape[:2]) == layer.d_model,
    q_k_exchanged: lambda layer: layer.q.shape == layer.k.shape,
    v_o_exchanged: lambda layer: layer.v.shape[0] * layer.v.shape[2] == layer.d_model == np.prod(layer.w_o.shape[:2]),
}  # other faults can be planted in any layer


def planted(source: str) -> list[tuple[str, str, int, int, int, int]]:
    """Rows: model, fault, layers that it was planted in, named right, given any new warning, false alarms before."""
    model = ws.open_model(source)
    layers: dict[int, Arrays] = {
        index: measured_layer(model.layer(index), [], OPTIONS)
        for index in bar(model.attention_layers, "measuring", "layer")
    }
    heads = MeasuredHeads(layers, model.config.d_model)
    standing = Standing(model, heads, Reference.load(OWN))
    alarms = sum(finding.severity != "note" for finding in findings_of(model.unchecked(), heads, standing))
    clean = _findings(model, layers, standing, {})
    rows = []
    for name, (plant, kind) in FAULTS.items():
        fits = FITS.get(plant, lambda layer: True)
        tried = [
            index for index in model.attention_layers if _separate(model.layer(index)) and fits(model.layer(index))
        ]

        def broken(index: int, plant: Callable[..., Layer] = plant) -> Layer:
            others = (model.layer(_next(model, index)),) if plant in WITH_ANOTHER else ()
            return plant(model.layer(index), *others)

        for places in (
            [[[index] for index in tried], [tried]] if plant in EVERYWHERE else [[[index] for index in tried]]
        ):
            named = warned = 0
            where = ", in all layers" if places == [tried] and len(tried) != 1 else ""
            for together in bar(places, name + where, "layer"):
                planted_in = {index: broken(index) for index in together}
                measured = layers | {index: measured_layer(of, [], OPTIONS) for index, of in planted_in.items()}
                found = _findings(model, measured, standing, planted_in)
                for index in together:
                    here, before = _warned(found, index), _warned(clean, index)
                    named, warned = named + (kind in here), warned + bool(here - before)
            rows.append((model.name, name + where, len(tried), named, warned, alarms))
    return rows


def _separate(layer: Layer) -> bool:
    """Whether its factors are matrices of their own."""
    return all(isinstance(getattr(layer, factor), Affine) for factor in FACTORS)


def _next(model: ws.Model, index: int) -> int:
    """The next layer of attention; after the last, the first."""
    layers = model.attention_layers
    return layers[(layers.index(index) + 1) % len(layers)]


def _warned(findings: Findings, index: int) -> set[str]:
    """Kinds of the warnings and errors that concern a layer."""
    return {
        finding.kind
        for finding in findings
        if finding.severity != "note" and index in {finding.layer, *(member.layer for member in finding.members)}
    }


def _findings(model: ws.Model, layers: dict[int, Arrays], standing: Standing, broken: dict[int, Layer]) -> Findings:
    heads = MeasuredHeads(layers, model.config.d_model)
    seen = SimpleNamespace(layer=lambda index: broken.get(index) or model.layer(index))
    alike = duplicates(seen, heads)  # type: ignore[arg-type]  # it asks for layers only
    return Findings([*head_findings(heads, standing=standing), *factor_findings(model, heads), *alike])


@click.command("planted-faults", cls=EndsInOneLine)
@click.argument("sources", nargs=-1, required=True)
@out_option("out/planted-faults")
def main(sources: tuple[str, ...], out: Path) -> None:
    """Write a table for every SOURCE: for each fault, in how many layers it was planted and found."""
    for source, name in zip(sources, folder_names(sources), strict=True):
        table = Table.of_rows(("model", "fault", "layers", "named", "warned", "false_alarms"), planted(source))
        Folder(out).text(f"{name}.csv", table.csv())
        click.echo(str(out / f"{name}.csv"))


if __name__ == "__main__":
    main()
