"""What an atlas loses by reading little: planted derivations at several budgets, and strangers that must stay apart.

    python -m analyses.experiments.atlas_losses --out out/atlas-losses

Every derivation of derivations.py of a random Llama of 8 layers x 16 heads and of a GPT-2 of two layers. Each is
compared with its base alone, as an atlas would: by bits of blocks, then by sketches of heads. The smallest budget
leaves one head a layer with 64 of 256 rows of the output projection, 7 % of attention (150 MB of a 7B are 3 %); of
GPT-2, whose heads do not lie together, one of two layers. Strangers: checkpoints drawn anew in the base's shape, all
against all. Trained strangers: the seeds of every family of tiny models (toys/train_lineage.py), and published
models."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np

import weightscope as ws
from analyses.experiments.planted_lineage import families_in
from analyses.study import Row, judge_each, study, write
from benchmarks import synthetic
from tests.support.plants.derivations import redrawn, same_spectra, shuffled, those_for
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from tests.support.plants.plant import Made, Plant
from tests.support.two_layers import TWO_LAYERS
from weightscope.core.files import Folder, scratch_folder
from weightscope.core.progress import bar
from weightscope.model.sources import Source
from weightscope.pairs.atlas.families import families_of
from weightscope.pairs.atlas.prints import Print, make_print
from weightscope.pairs.atlas.sampling import MOST_WEIGHTS, sample_of
from weightscope.pairs.atlas.values import best_of_each, distinct, log_p_of

SIZES = synthetic.Sizes(layers=8, width=256, heads=16, head_dim=16, kv_heads=16, vocabulary=512, inner=320)
STRANGERS = 40
HEADER = ("base", "derivation", "planted", "share_read", "joined_by", "bits", "likeness", "p")
NOTHING = dict.fromkeys(("bits", "likeness", "p"), float("nan"))  # cells of a pair that nothing joins
TRAINED = ("group", "a", "b", "joined_by", "bits", "p_values")


def print_of(folder: Path | str, most: int) -> Print:
    """The fingerprint of a checkpoint from so many weights."""
    answer = make_print(Source.named(str(folder)), most=most)
    assert answer is not None
    return Print.of_arrays(answer[0], Path(folder).name)


def budgets_of(folder: Path) -> dict[str, int]:
    """Weights to read: all of attention, a quarter, and the least that gives one head or layer."""
    model = ws.open_model(folder)
    whole = sample_of(model, MOST_WEIGHTS).weights
    quarter = sample_of(model, whole // 4).weights if model.family.name == "llama" else whole // 2
    least = whole // 15 if model.family.name == "llama" else whole // 2
    return {share(weights, whole): weights for weights in (whole, quarter, least)}


def share(weights: int, whole: int) -> str:
    """How much of attention that is."""
    return f"{100 * weights / whole:.0f} %"


def joined(prints: list[Print]) -> Row:
    """What an atlas joins two checkpoints by, "" where it does not; bits, likeness and p."""
    families = families_of([each.outline() for each in prints], prints.__getitem__)
    edges = [edge for family in families for edge in family.edges]
    if not edges:
        return {"joined_by": "", **NOTHING}
    return {"joined_by": edges[0].by, **{name: getattr(edges[0], name) for name in NOTHING}}


def plants_of(title: str, base: Weights, work: Path) -> Iterator[Plant]:
    """Every derivation of a base, at every budget; the base itself is written at once."""
    folder = work / title
    write_weights(base, folder)
    of_base = {budget: (print_of(folder, most), most) for budget, most in budgets_of(folder).items()}

    def make(change: Callable[[Weights], Weights], budget: str, place: Path) -> Made:
        write_weights(change(base), place)
        return Made(place, (folder,), of_base[budget])

    for name, row in those_for(base).items():
        for budget in of_base:
            cells = {"base": title, "derivation": name, "planted": "; ".join(row.kinds), "share_read": budget}
            yield Plant(f"{title}: {name}, {budget}", partial(make, row.change, budget), cells=cells)


def judged(plant: Plant, made: Made) -> Row:
    """What joins a derivation with its base."""
    of_base, most = made.more
    try:
        return joined([of_base, print_of(made.suspect, most)])
    except ws.CheckpointError as error:
        return {"joined_by": f"not read: {error}", **NOTHING}


def strangers_of(base: Weights, work: Path) -> list[Path]:
    """Checkpoints of the base's shape that share nothing with it or each other."""
    folders = []
    for number in range(STRANGERS):
        rng = np.random.default_rng([3, number])
        drawn = {part: (w.std() * rng.standard_normal(w.shape)).astype(np.float32)
                 for part, w in sorted(base.parts.items(), key=str) if w.ndim == 2}  # fmt: skip
        folders.append(work / f"stranger-{number}")
        write_weights(base.but(drawn), folders[-1])
    for change in (shuffled, redrawn, same_spectra):
        folders.append(work / f"stranger-{change.__name__}")
        write_weights(change(base), folders[-1])
    return folders


def trained_pairs(group: str, sources: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """All pairs of trained strangers: what joins them, bits of their blocks, whatever the shapes, and p by values."""
    prints = [print_of(source, MOST_WEIGHTS) for source in bar(sources, group, "checkpoint")]
    for (name, a), (other, b) in combinations(zip(sources, prints, strict=True), 2):
        blocks = min(len(a.blocks), len(b.blocks))
        bits, p = float(np.bitwise_count(a.blocks[:blocks] ^ b.blocks[:blocks]).mean()), float("nan")
        x, y = a.outline().values, b.outline().values
        if x.shape[1] == y.shape[1]:
            counts = np.array([len(y)])
            p = float(np.exp(log_p_of(best_of_each(distinct(x), y, counts), counts, x.shape[1])[0]))
        yield group, Path(name).name, Path(other).name, joined([a, b])["joined_by"], bits, p


@study("atlas-losses")
@click.option("--tiny", type=click.Path(path_type=Path), help="Folder of the tiny models; without, none are compared.")
@click.option("--model", "models", multiple=True, help="A published model that shares nothing with the others.")
def main(files: Folder, tiny: Path | None, models: tuple[str, ...]) -> None:
    """Write losses.csv, one row per derivation and budget, strangers.csv, one per budget, and trained.csv, per pair."""
    if groups := (families_in(tiny) if tiny else {}) | ({"published": list(models)} if models else {}):
        trained = [row for group, sources in groups.items() for row in trained_pairs(group, sources)]
        write(files, "trained", TRAINED, trained)
    with scratch_folder() as work:
        drawn = read_weights(str(synthetic.write(work / "drawn", SIZES)))
        llama = redrawn(drawn)
        plants = [*plants_of("llama", llama, work), *plants_of("gpt2", read_weights(TWO_LAYERS), work)]
        rows = judge_each(plants, judged, "derivations")
        write(files, "losses", HEADER, rows)
        places, table = strangers_of(llama, work), []
        for budget, most in budgets_of(work / "llama").items():
            prints = [print_of(place, most) for place in bar(places, "strangers", "checkpoint")]
            families = families_of([each.outline() for each in prints], prints.__getitem__)
            pairs = len(prints) * (len(prints) - 1) // 2
            false = sum(len(family.edges) for family in families)
            bits = [np.bitwise_count(a.blocks ^ b.blocks).mean() for k, a in enumerate(prints) for b in prints[:k]]
            table.append((budget, len(prints), pairs, false, float(np.min(bits)), float(np.mean(bits))))
        header = ("share_read", "strangers", "pairs", "joined", "least_bits", "mean_bits")
        write(files, "strangers", header, table)
    counts: dict[tuple[Any, ...], list[bool]] = defaultdict(list)
    for row in rows:
        counts[row["base"], row["share_read"]].append(row["joined_by"] in ("bits", "heads", "values"))
    for (base, budget), found in counts.items():
        click.echo(f"{base}, {budget} of attention: {sum(found)} of {len(found)} derivations joined with their base")


if __name__ == "__main__":
    main()
