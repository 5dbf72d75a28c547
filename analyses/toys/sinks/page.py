"""The report of the toys: their figures, what the figures show, and what differs from the paper."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from analyses.toys.sinks import figures
from weightscope.core.files import Files
from weightscope.core.tables import Table
from weightscope.report.pages.page import Figure, Section, write_page
from weightscope.report.pages.style import save

Run = Mapping[str, Any]
PLAIN = "softmax"
LEAD = (
    "Small models trained on tasks that need one kind of sink each, after the two-sink-mechanisms paper's section 3 "
    "and appendices A and C, and a small ViT after its section 5. Fig. 2 aside they are smaller than the paper's; all "
    "are trained for fewer steps. Other changes are listed with the figures. A dot is one training; seeds differ in "
    "initialisation and sequences."
)


def write_toys_report(
    files: Files, runs: Mapping[str, Sequence[Run]], sizes: Mapping[str, Mapping[str, Any]], example: Any
) -> None:
    """Draw the figures of each stage in `runs` and write report.html. `example` has the arrays of the broadcast."""
    sections = []
    if "nop" in runs or "nop-paper" in runs:
        sections.append(_nop(files, runs, sizes))
    if "broadcast" in runs:
        sections.append(_broadcast(files, runs["broadcast"], sizes["broadcast"], example))
    if "trials" in runs:
        sections.append(_trials(files, runs["trials"]))
    if {"nop", "broadcast"} <= set(runs):
        sections.append(_kinds(files, runs["nop"], runs["broadcast"]))
    if "vit" in runs:
        sections.append(_vit(files, runs["vit"], sizes["vit"]))
    write_page(files, "report.html", "Two kinds of sink, in toys", LEAD, sections)


def _trained(size: Mapping[str, Any]) -> str:
    return (
        f"width {size['width']}, {size['tokens']} tokens, {size['steps']:,} steps of {size['batch']} sequences at a "
        f"rate of {size['rate']:g}"
    )


def _nop(files: Files, stages: Mapping[str, Sequence[Run]], sizes: Mapping[str, Mapping[str, Any]]) -> Section:
    text = (
        "The adaptive no-op (section 3.1, appendix A.1). The paper has width 64, 32 tokens, 30,000 steps of 2,048. "
        "Changed here: the first token is a learned vector alone, not added to a random token, and the gate vector has "
        "mean zero, so that LayerNorm leaves it whole."
    )
    both = {name: stages[name] for name in ("nop-paper", "nop") if name in stages}
    (stage, runs), *_ = both.items()
    plain = _of([run for run in runs if run["variant"] == PLAIN], damping=0, probability=0.5)
    ratio, attention = _range(plain, lambda run: run["ratio"]), _range(plain, lambda run: run["flagged_attention"])
    cancelled = max(run["cancelled"] for group in both.values() for run in group if run["variant"] == PLAIN)
    caption = (
        f"Fig. 2, at {_trained(sizes[stage])}{_until(sizes[stage], plain)}. The sink's value norm is {ratio} of the "
        f"others', and flagged tokens give it {attention} of their attention. Right: singular values of $W_QK$ with a "
        "no-op to learn and with none. Lemma 1's other no-op, a sink that cancels what the other keys write, does not "
        f"come: `cancelled`, 1 where it does, is {cancelled:.2f} at most over all trainings of a softmax."
    )
    drawn = [Figure(save(figures.nop_figure(runs), files, "nop"), caption)]
    if "nop" in stages:
        caption = f"Fig. 7, at {_trained(sizes['nop'])}. Sink score during training; bands are the range over seeds. "
        emergence = save(figures.emergence_figure(stages["nop"]), files, "nop-emergence")
        drawn.append(Figure(emergence, caption + _emergence(stages["nop"])))
    return Section("A sink that does nothing", text, drawn)


def _until(size: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The rule that ended a training early, and when it did."""
    if "looks" not in size:
        return ""
    steps = ", ".join(f"{run['steps'][-1]:,}" for run in runs)
    return (
        f", ended once the mean sink score of {size['looks']} looks, {size['every']} steps apart, was within "
        f"{size['change']:g} of the mean of as many before: after {steps}"
    )


def _emergence(runs: Sequence[Run]) -> str:
    """Steps to half of each setting's last score, by frequency; and the last score by damping."""
    plain = [run for run in runs if run["variant"] == PLAIN]
    frequency = {p: _of(plain, damping=0, probability=p) for p in sorted({run["probability"] for run in plain})}
    steps = {p: np.mean([steps_to_sink(run) for run in group]) for p, group in frequency.items()}
    reached = ", ".join(f"{mean:.0f} at p = {p:g}" for p, mean in steps.items())
    damping = {d: _of(plain, damping=d, probability=0.5) for d in sorted({run["damping"] for run in plain})}
    scores = ", ".join(f"{np.mean([run['strength'] for run in group]):.2f} at {d:g}" for d, group in damping.items())
    return f"Steps to half of the last score, mean over seeds: {reached}. Last score by damping: {scores}."


def steps_to_sink(run: Run) -> float:
    """Steps until the sink score is half of the way from its first to its last value."""
    score = np.array(run["score"])
    return float(run["steps"][int(np.argmax(score >= (score[0] + score[-1]) / 2))])


def _broadcast(files: Files, runs: Sequence[Run], size: Mapping[str, Any], example: Any) -> Section:
    text = (
        f"The broadcast (section 3.2, eq. 3, appendix A.2), here at {_trained(size)}; the paper has width 64, 32 "
        "tokens, 30,000 steps of 1,024 at a rate of 0.0005. Also changed: the selector has mean zero, like the gate "
        "vector."
    )
    plain = [run for run in runs if run["variant"] == PLAIN]
    strength = [_range(plain, lambda run, i=i: run["layers"][i]["strength"]) for i in (0, 1)]
    ranks = [_range(plain, lambda run, i=i: run["layers"][i]["rank"]) for i in (0, 1)]
    figure = Figure(
        save(figures.broadcast_figure(runs, example), files, "broadcast"),
        "Fig. 3, and what differs: in the paper one layer broadcasts and the other attends along its diagonal with an "
        f"update of higher rank. Here both broadcast: strongest keys get {strength[0]} of the attention in layer 1 and "
        f"{strength[1]} in layer 2, at stable ranks of {ranks[0]} and {ranks[1]}. The code that the authors published "
        "(KempnerInstitute/attention_sink, commit a83cd592) does the same at the paper's size: a run stored there ends "
        "with 0.92 of the attention of layer 1 and 0.96 of layer 2 on the selected token, and over five seeds the "
        "strongest keys get 0.89 and 0.91. It does not contain the code for Fig. 3.",
    )
    names = ("loss", *(f"layer{i}_{key}" for i in (0, 1) for key in A2))
    rows = [
        (run["seed"], run["loss"], *(layer.get(key, np.nan) for layer in run["layers"] for key in A2)) for run in plain
    ]
    table = Table.of_rows(("seed", *names), rows, "Quantities of appendix A.2 for the softmax; means over sequences.")
    return Section("A sink that broadcasts", text, [figure, table])


NO_DIAGONAL = "In no trial does a layer give tokens half of their own attention."
A2 = (
    "match", "strength", "selected_ratio", "key_ratio", "update_spread", "query_similarity", "diagonal", "loss_without"
)  # fmt: skip


def _trials(files: Files, runs: Sequence[Run]) -> Section:
    diagonal = [run["variant"] for run in runs if _is_diagonal(run)]
    answer = f"A diagonal emerges with: {', '.join(diagonal)}." if diagonal else NO_DIAGONAL
    text = (
        "What would make the second layer a diagonal? Each training has one change: weight decay, noise on the "
        "targets, a selected token that cannot be confused with another, depth, no MLPs, or the paper's width, length "
        "and rate; with --paper-size also its 30,000 steps, in batches of 64 instead of 1,024."
    )
    alone = [run["variant"] for run in runs if len(run["layers"]) > 1 and _broadcasting(run) == 1]
    highest = max(layer["rank"] for run in runs for layer in run["layers"])
    figure = Figure(
        save(figures.trials_figure(runs), files, "trials"),
        f"{answer} The highest stable rank of an update is {highest:.2f}. A layer whose strongest key gets about $1/n$ "
        "of the attention spreads it evenly and writes the mean of all tokens, which also has rank one. Exactly one of "
        f"several layers broadcasts with: {', '.join(alone) or 'none'}.",
    )
    return Section("Where is the diagonal layer?", text, [figure])


def _broadcasting(run: Run) -> int:
    """How many layers' strongest keys get half of the attention or more."""
    return sum(layer["strength"] >= 0.5 for layer in run["layers"])


def _is_diagonal(run: Run) -> bool:
    """Whether tokens give themselves half of their attention in some layer."""
    return any(layer["diagonal"] >= 0.5 for layer in run["layers"])


def _kinds(files: Files, nop: Sequence[Run], broadcast: Sequence[Run]) -> Section:
    text = (
        "Gates and registers (eqs 24-29) and attention without a softmax: clipped (eqs 30-32), sigmoid with "
        "$b = -ln n$ (eqs 40-42), and the general family $φ(S) / n^a$ (eqs 36-37): ReLU with $a = 1$ (eq. 33), "
        "polynomial attention, $S^3$, with $a = 1/2$ (eq. 38), and the other $φ$ with $a = 1$."
    )
    default = [run for run in nop if run["damping"] == 0 and run["probability"] == 0.5]
    withheld = [
        name for name in dict.fromkeys(run["variant"] for run in default)
        if all(run["flagged_weight"] < 0.5 for run in default if run["variant"] == name)
    ]  # fmt: skip
    figure = Figure(
        save(figures.kinds_figure(nop, broadcast), files, "kinds-of-attention"),
        "Ticks are means over seeds. The weights of flagged tokens sum to less than half of a softmax's with: "
        f"{', '.join(withheld) or 'none'}. If weights can be negative, shares are of their magnitudes.",
    )
    return Section("Which kinds of attention have a sink", text, [figure])


def _vit(files: Files, runs: Sequence[Run], size: Mapping[str, Any]) -> Section:
    text = (
        f"A ViT of {size['layers']} layers of {size['heads']} heads and width {size['width']}, trained on class "
        f"labels of mosaics of digits for {size['steps']:,} steps. The paper's Table 1 is about ViT-L trained on "
        "ImageNet without labels; this model neither confirms nor refutes it. Here a sink is a key that gets at least "
        "half of the attention of the average query, a weaker rule than for sink events."
    )
    plain = np.mean([run["patch_iou"] for run in runs if run["variant"] == PLAIN])
    differences = {
        name: np.mean([run["patch_iou"] for run in runs if run["variant"] == name]) - plain
        for name in dict.fromkeys(run["variant"] for run in runs) if name != PLAIN
    }  # fmt: skip
    changes = ", ".join(f"{name} {100 * change:+.1f}" for name, change in differences.items())
    events = 100 * np.mean([layer["event"] for run in runs for layer in run["layers"]])
    table_1 = Figure(
        save(figures.mitigation_figure(runs), files, "mitigation"),
        f"Table 1. Mean IoU of the patch probe is {100 * plain:.1f} % for the plain model; differences in points: "
        f"{changes}. By the rule of sink events, {events:.1f} % of pairs of a head and an image have a sink.",
    )
    plane = Figure(
        save(figures.mechanisms_figure(runs), files, "mitigation-mechanisms"),
        "Fig. 6 of this model: value-norm ratio and stable rank of its sinks, by layer.",
    )
    return Section("Gates and registers in a small ViT", text, [table_1, plane])


def _of(runs: Sequence[Run], **values: float) -> list[Run]:
    return [run for run in runs if all(run[name] == value for name, value in values.items())]


def _range(runs: Sequence[Run], measure: Callable[[Run], float]) -> str:
    """The range over the trainings, as text."""
    values = [measure(run) for run in runs]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
