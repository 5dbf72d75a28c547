"""What README and pages say of the toys, asked of the trainings that figures/ holds."""

import json
from collections import defaultdict
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the toy models need the extra `runner`")

from analyses.toys.sinks.__main__ import STAGES
from analyses.toys.sinks.attention import GATES_AND_REGISTERS, VARIANTS
from analyses.toys.sinks.broadcast import LONG_TRIALS, TRIALS
from analyses.toys.sinks.nop import UntilFlat
from analyses.toys.sinks.page import PLAIN, steps_to_sink, write_toys_report
from weightscope.core.files import Files

pytestmark = pytest.mark.check

KEPT = Path(__file__).parents[2] / "figures" / "sink-toys"
WITHHOLD = ("ReLU", "squared ReLU", "GELU", "softplus", "ReLU6", "sigmoid")  # weights that all can be small


def stage(name: str) -> dict[str, Any]:
    return json.loads((KEPT / f"{name}.json").read_text())


def runs_of(name: str, **values: float) -> dict[str, list[dict[str, Any]]]:
    """Trainings by variant, of those with these values."""
    by_variant = defaultdict(list)
    for run in stage(name)["runs"].values():
        if all(run[key] == value for key, value in values.items()):
            by_variant[run["variant"]].append(run)
    return by_variant


def test_every_kind_of_attention_was_trained_with_every_seed() -> None:
    for name, variants in (("nop", VARIANTS), ("broadcast", VARIANTS), ("vit", GATES_AND_REGISTERS)):
        variants = runs_of(name, damping=0, probability=0.5) if name == "nop" else runs_of(name)
        assert {variant: sorted(run["seed"] for run in runs) for variant, runs in variants.items()} == {
            variant: [0, 1, 2] for variant in variants
        }, name


def test_a_sink_comes_soonest_where_a_no_op_is_neither_rare_nor_common() -> None:
    """Fig. 7A: entropy of the flag speeds the sink up, and no frequency goes without one."""
    steps = {}
    for probability in (0.1, 0.3, 0.5, 0.7, 0.9):
        runs = runs_of("nop", damping=0, probability=probability)[PLAIN]
        steps[probability] = np.mean([steps_to_sink(run) for run in runs])
        assert all(run["strength"] > 2 / 16 and run["flagged_attention"] > 0.7 for run in runs)
    assert max(steps[0.3], steps[0.5]) < min(steps[0.1], steps[0.7], steps[0.9])


def test_damping_is_enough_for_a_sink_and_nothing_to_damp_leaves_none() -> None:
    """Fig. 7B: a tenth of the token left makes the same sink as none; half of it a weaker one; all of it no sink."""
    by_damping = {
        damping: runs_of("nop", damping=damping, probability=0.5)[PLAIN] for damping in (0, 0.01, 0.1, 0.5, 1)
    }
    strength = {damping: [run["strength"] for run in runs] for damping, runs in by_damping.items()}
    assert min(strength[0] + strength[0.01] + strength[0.1]) > 0.4
    assert min(strength[0.5]) > 0.2 and max(strength[0.5]) < min(strength[0.1])
    assert max(strength[1]) < 0.07  # 1/16 is even
    assert all(run["ratio"] < 0.05 for damping in (0, 0.01, 0.1) for run in by_damping[damping])


def test_the_papers_size_has_the_same_sink_and_spike_and_ends_flat() -> None:
    """Fig. 2 at width 64: no value, one singular value, and neither where nothing is damped."""
    content = stage("nop-paper")
    size = UntilFlat(**content["size"])
    assert (size.width, size.tokens, size.batch) == (64, 32, 2048)
    for run in content["runs"].values():
        assert size.is_flat(run["score"]) and not size.is_flat(run["score"][:-1])
        first, second = run["singular_values"][:2]
        if run["damping"] == 0:
            assert run["sink"] == 0 and run["ratio"] < 0.01 and run["flagged_attention"] > 0.9 and first > 3 * second
        else:
            assert run["strength"] < 2 / 32 and run["ratio"] > 0.5 and first < 1.5 * second


def test_no_sink_does_nothing_by_cancelling_the_others() -> None:
    """Lemma 1's second no-op; `cancelled` is 1 where it comes."""
    runs = list(stage("nop")["runs"].values())
    assert max(run["cancelled"] for run in runs) < 0.1


def test_what_gates_and_registers_do_to_the_no_ops_sink() -> None:
    """A headwise gate needs none; an elementwise one sends the tokens there that do write; registers keep it."""
    default = runs_of("nop", damping=0, probability=0.5)
    for name in ("headwise gate", "headwise gate + registers"):
        assert all(run["strength"] < 0.07 and run["flagged_attention"] < 0.08 for run in default[name])
    for run in default["elementwise gate"]:
        assert run["flagged_attention"] < 0.02 and run["other_attention"] > 0.9 and run["ratio"] > 2
    assert all(run["ratio"] < 0.05 and run["flagged_attention"] > 0.4 for run in default["registers"])


def test_gelu_keeps_a_sink_in_two_seeds_and_registers_take_it_over_in_each() -> None:
    default = runs_of("nop", damping=0, probability=0.5)
    gelu = {run["seed"]: (run["sink"], run["flagged_attention"]) for run in default["GELU"]}
    assert {seed: (place, round(share, 2)) for seed, (place, share) in gelu.items() if share > 0.1} == {
        0: (0, 0.35), 1: (0, 0.42),
    }  # fmt: skip
    for name in set(WITHHOLD) - {"GELU"}:
        assert all(run["strength"] < 0.08 and run["flagged_attention"] < 0.08 for run in default[name]), name
    registers = default["registers"]
    assert all(run["sink"] > 16 for run in registers)  # behind the sixteen tokens
    assert sorted(round(run["flagged_attention"], 2) for run in registers) == [0.49, 0.95, 0.96]


def test_attention_without_a_softmax_withholds_itself_in_place_of_a_sink() -> None:
    default = runs_of("nop", damping=0, probability=0.5)
    assert all(run["flagged_weight"] == pytest.approx(1, abs=1e-3) for run in default[PLAIN])
    for name in WITHHOLD:
        assert all(run["flagged_weight"] < 0.2 and run["ratio"] > 0.5 for run in default[name]), name
    for name in ("identity", "polynomial"):  # they do neither, and do the task worst
        assert all(run["strength"] < 0.1 and run["flagged_weight"] > 0.5 for run in default[name]), name
        assert min(run["loss"] for run in default[name]) > max(
            run["loss"] for variant in WITHHOLD for run in default[variant]
        )


def test_every_kind_of_attention_broadcasts_at_rank_one() -> None:
    """Lemma 3, in the layer that finds the selected token more often; weights that are the scores find it least."""
    for name, runs in runs_of("broadcast").items():
        for run in runs:
            layer = max(run["layers"], key=lambda layer: layer["match"])
            assert layer["match"] > (0.8 if name != "identity" else 0.6) and layer["rank"] < 1.05, name


def test_no_trial_finds_the_papers_diagonal_layer() -> None:
    trial_runs = runs_of("trials")
    trials = TRIALS | LONG_TRIALS
    assert set(trial_runs) == set(trials)
    for name, (run,) in trial_runs.items():
        n = trials[name][1].tokens
        assert all(layer["diagonal"] < 2 / n for layer in run["layers"]), name


def test_no_gate_or_register_improves_the_patch_probe() -> None:
    iou = {name: 100 * np.mean([run["patch_iou"] for run in runs]) for name, runs in runs_of("vit").items()}
    assert max(iou, key=iou.__getitem__) == PLAIN
    for name in ("headwise gate + registers", "elementwise gate + registers"):
        assert 1.5 < iou[PLAIN] - iou[name] < 2.5


def test_the_page_says_what_was_changed_and_what_differs() -> None:
    stages = {name: stage(name) for name in STAGES}
    with np.load(KEPT / "broadcast-example.npz") as example:
        files = Files()
        runs = {name: list(stage["runs"].values()) for name, stage in stages.items()}
        write_toys_report(files, runs, {name: stage["size"] for name, stage in stages.items()}, dict(example))
    page = unescape(" ".join(files.contents["report.html"].decode().split()))
    for sentence in (
        "Changed here: the first token is a learned vector alone",
        "Fig. 2, at width 64, 32 tokens, 30,000 steps of 2048 sequences at a rate of 0.003, ended once",
        "Here both broadcast",
        "In no trial does a layer give tokens half of their own attention",
        "Exactly one of several layers broadcasts with: weight decay 1, paper's width, length and rate.",
        "headwise gate + registers -2.1",
    ):
        assert sentence in page, sentence
