"""Toy models of the two sink mechanisms: what they are made of, and what training makes of them, over three seeds."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="the toy models need the extra `runner`")

from analyses.toys.sinks import attention as toys  # noqa: E402
from analyses.toys.sinks import broadcast, nop, training, vit  # noqa: E402
from analyses.toys.sinks.__main__ import STAGES, main  # noqa: E402
from analyses.toys.sinks.diagnosis import strongest_sink  # noqa: E402
from analyses.toys.sinks.mosaics import CLASSES, NOTHING, PATCHES, mosaics  # noqa: E402
from analyses.toys.sinks.training import Size  # noqa: E402
from weightscope.heads.sinks import strength as sinks  # noqa: E402

pytestmark = pytest.mark.check

SEEDS = (0, 1, 2)
NOP_SIZE = Size(width=32, tokens=16, batch=64, steps=300, rate=5e-3, every=300)
VIT_SIZE = vit.Size(width=16, heads=2, layers=2, images=50, batch=8, steps=2, rate=1e-3)
BROADCAST_SIZE = Size(width=16, tokens=8, batch=64, steps=400, rate=8e-3, every=400)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def nop_runs() -> list[tuple[nop.NopModel, nop.NopRun]]:
    """Models that shall give flagged tokens no update."""
    return [nop.train_nop(nop.Task(), "softmax", toys.Options(), NOP_SIZE, seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def broadcast_runs() -> list[tuple[broadcast.BroadcastRun, list[toys.Trace]]]:
    runs = []
    for seed in SEEDS:
        model, run, _ = broadcast.train_broadcast("softmax", toys.Options(), BROADCAST_SIZE, seed)
        x = torch.randn(32, BROADCAST_SIZE.tokens, BROADCAST_SIZE.width, generator=torch.Generator().manual_seed(99))
        runs.append((run, toys.traces(model, x)))
    return runs


def plain_softmax(row: np.ndarray) -> np.ndarray:
    return np.exp(row - row.max()) / np.exp(row - row.max()).sum()


FORMULAS = {
    "softmax": plain_softmax,
    "clipped": lambda row: np.array([min(max((1.03 + 0.03) * p - 0.03, 0), 1) for p in plain_softmax(row)]),
    "relu": lambda row: np.array([max(s, 0) / len(row) for s in row]),
    "polynomial": lambda row: np.array([s * s * s / math.sqrt(len(row)) for s in row]),
    "sigmoid": lambda row: np.array([1 / (1 + math.exp(-(s - math.log(len(row))))) for s in row]),
    "squared relu": lambda row: np.array([max(s, 0) ** 2 / len(row) for s in row]),
    "gelu": lambda row: np.array([s * (1 + math.erf(s / math.sqrt(2))) / 2 / len(row) for s in row]),
    "softplus": lambda row: np.array([math.log(1 + math.exp(s)) / len(row) for s in row]),
    "identity": lambda row: row / len(row),
    "relu6": lambda row: np.array([min(max(s, 0), 6) / len(row) for s in row]),
}


@pytest.mark.parametrize("kind", toys.WEIGHTS)
def test_each_kind_of_attention_is_its_formula(kind: str) -> None:
    scores = 3 * np.random.default_rng(0).normal(size=(4, 5, 7))
    weights = toys.WEIGHTS[kind](torch.from_numpy(scores)).numpy()
    for row in np.ndindex(4, 5):
        assert weights[row] == pytest.approx(FORMULAS[kind](scores[row]))


def test_only_a_softmax_has_to_give_its_attention_away() -> None:
    """Against scores that are all very low, the others but the clipped and the odd one withhold it."""
    low = torch.full((1, 6), -30.0)
    assert toys.softmax(low).sum() == pytest.approx(1)
    assert toys.WEIGHTS["relu"](low).sum() == 0 and toys.sigmoid(low).sum() < 1e-9


def test_clipped_softmax_reaches_nought_and_one() -> None:
    weights = toys.clipped_softmax(torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 0.0]]))
    assert weights[0].tolist() == [0, 1, 0]
    assert weights[1] == pytest.approx(np.full(3, 1.06 / 3 - 0.03))


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_an_open_gate_is_plain_softmax_and_a_closed_one_writes_nothing(gate: str) -> None:
    class Forced(torch.nn.Module):
        def __init__(self, logit: float, width: int) -> None:
            super().__init__()
            self.logit, self.width = logit, width

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.full((*z.shape[:2], self.width), self.logit)

    torch.manual_seed(0)
    gated = toys.PreNormAttention(12, 3, 4, toys.Options(gate=gate))
    plain = toys.PreNormAttention(12, 3, 4, toys.Options())
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if not k.startswith("gate")})
    x = torch.randn(2, 5, 12)
    assert not torch.allclose(gated(x), plain(x))
    width = gated.gate.out_features
    assert width == {"headwise": 3, "elementwise": 12}[gate]
    gated.gate = Forced(40.0, width)
    assert torch.equal(gated(x), plain(x))
    gated.gate = Forced(-200.0, width)
    assert not gated(x).any()


def test_a_headwise_gate_scales_each_head_of_each_token_by_one_number() -> None:
    torch.manual_seed(0)
    layer = toys.PreNormAttention(12, 3, 4, toys.Options(gate="headwise"))
    x = torch.randn(2, 5, 12)
    trace = layer.trace(x)
    gates = torch.sigmoid(layer.gate(layer.norm(x))).detach().numpy()  # (b, n, h)
    written = trace.attention @ trace.updates  # (b, h, n, d)
    by_hand = sum(gates[:, :, head, None] * written[:, head] for head in range(3))
    assert layer(x).detach().numpy() == pytest.approx(by_hand, abs=1e-6)


def test_the_trace_adds_up_to_what_the_layer_writes_and_its_factors_to_its_scores() -> None:
    torch.manual_seed(0)
    layer = toys.PreNormAttention(12, 3, 4, toys.Options())
    torch.nn.init.uniform_(layer.norm.weight, 0.5, 2)
    x = torch.randn(2, 5, 12)
    trace = layer.trace(x)
    assert (trace.attention @ trace.updates).sum(axis=1) == pytest.approx((trace.after - trace.before), abs=1e-6)
    centred = x - x.mean(dim=-1, keepdim=True)
    unit = (centred / (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt()).numpy()
    for head in range(3):
        scores = trace.queries[:, head] @ trace.keys[:, head].transpose(0, 2, 1)
        assert scores == pytest.approx(unit @ layer.qk(head).dense() @ unit.transpose(0, 2, 1), abs=1e-4)


@pytest.mark.parametrize("variant", [name for name, options in toys.VARIANTS.items() if options.registers])
def test_registers_are_seen_by_attention_and_their_rows_discarded(variant: str) -> None:
    options = toys.VARIANTS[variant]
    torch.manual_seed(0)
    for model, x, shape in (
        (nop.NopModel(NOP_SIZE, options), torch.randn(3, 15, 32), (3, 15, 32)),
        (broadcast.BroadcastModel(BROADCAST_SIZE, options), torch.randn(3, 8, 16), (3, 8, 16)),
        (vit.Vit(VIT_SIZE, options), torch.randn(3, PATCHES, 16), (3, CLASSES)),
    ):
        before = model(x)
        assert before.shape == shape
        assert toys.traces(model, x)[0].attention.shape[-1] == {15: 16, 8: 8, PATCHES: 1 + PATCHES}[x.shape[1]] + 4
        with torch.no_grad():
            model.registers.tokens.add_(torch.randn(model.registers.tokens.shape))
        assert not torch.allclose(model(x), before)


def test_a_sink_of_no_value_and_a_spectral_spike_do_the_no_op(nop_runs: list) -> None:
    """Fig. 2: the sink's value norm is under a tenth of the others', and one singular value of W_QK stands out."""
    for _, run in nop_runs:
        assert run.sink == 0 and run.ratio < 0.1
        assert run.flagged_attention > 0.8 > 0.3 > run.other_attention
        assert run.singular_values[0] > 2 * run.singular_values[1]


def test_without_a_no_op_there_is_neither_sink_nor_spike() -> None:
    _, run = nop.train_nop(nop.Task(damping=1.0), "softmax", toys.Options(), NOP_SIZE, 0)
    assert run.strength < 3 / NOP_SIZE.tokens and run.ratio > 0.3
    assert run.singular_values[0] < 1.5 * run.singular_values[1]


def test_one_seed_is_one_training() -> None:
    size = replace(NOP_SIZE, steps=5)
    first, again = (nop.train_nop(nop.Task(), "softmax", toys.Options(), size, 7)[1] for _ in range(2))
    another_seed = nop.train_nop(nop.Task(), "softmax", toys.Options(), size, 8)[1]
    assert first == again and first.loss != another_seed.loss


def test_an_interrupted_training_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = replace(NOP_SIZE, steps=30, every=5)
    arguments = (nop.Task(), "softmax", toys.Options(), size, 3)
    _, uninterrupted = nop.train_nop(*arguments)
    save = training.Kept.save

    def save_and_stop(self: training.Kept, step: int, *state: Any) -> None:
        save(self, step, *state)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "SECONDS_BETWEEN_SAVES", 0)
    monkeypatch.setattr(training.Kept, "save", save_and_stop)
    for _ in range(12):
        with pytest.raises(KeyboardInterrupt):
            nop.train_nop(*arguments, tmp_path)
    monkeypatch.setattr(training.Kept, "save", save)
    _, resumed = nop.train_nop(*arguments, tmp_path)
    assert asdict(resumed) == asdict(uninterrupted)
    _, measured = nop.train_nop(*arguments, tmp_path)  # trained already
    assert asdict(measured) == asdict(uninterrupted)
    longer = replace(size, steps=31)  # another training under the same name
    assert len(nop.train_nop(nop.Task(), "softmax", toys.Options(), longer, 3, tmp_path)[1].steps) == len(
        uninterrupted.steps
    )


def test_the_broadcast_writes_one_vector_everywhere(broadcast_runs: list) -> None:
    """Fig. 3: the strongest sink is the selected token, its value is as large as others', the update of rank one."""
    for run, _ in broadcast_runs:
        layer = max(run.layers, key=lambda layer: layer.match)
        assert run.loss < 0.3 * run.payload
        assert layer.match > 0.8 and layer.broadcast > 0.8
        assert layer.rank < 1.2 and layer.ratio > 0.7
        assert layer.query_similarity > 0.9


def test_lemma_3_holds_of_trained_layers(nop_runs: list, broadcast_runs: list) -> None:
    x = torch.randn(32, NOP_SIZE.tokens - 1, NOP_SIZE.width, generator=torch.Generator().manual_seed(99))
    trained = [trace for model, _ in nop_runs for trace in toys.traces(model, x)]
    trained += [trace for _, traces in broadcast_runs for trace in traces]
    assert len(trained) == 9
    for trace in trained:
        attention = trace.attention.astype(np.float64)
        attention /= attention.sum(axis=-1, keepdims=True)  # in float32 they sum to 1 up to rounding
        sink = strongest_sink(attention).position
        bounds = sinks.rank_one(attention, trace.updates, sink)
        assert (bounds.distance <= bounds.bound * (1 + 1e-9)).all()
        assert (bounds.residual <= bounds.residual_bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("probability", nop.PROBABILITIES)
def test_flags_come_as_often_as_asked_and_damp_what_they_flag(probability: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, 8, generator=generator)
    gate = torch.nn.functional.normalize(torch.randn(8, generator=generator), dim=0)
    task = nop.Task(damping=0.25, probability=probability)
    flags, target = task.flags(x, gate), task.target(x, gate)
    assert float(flags.float().mean()) == pytest.approx(probability, abs=0.02)
    assert torch.equal(target[flags], 0.25 * x[flags]) and torch.equal(target[~flags], x[~flags])


def test_the_broadcast_target_adds_the_rotated_selected_token() -> None:
    generator = torch.Generator().manual_seed(0)
    task = broadcast.Task.drawn(6, generator)
    x = torch.randn(5, 4, 6, generator=generator)
    target, rotation = task.target(x).numpy(), task.rotation.numpy()
    assert rotation @ rotation.T == pytest.approx(np.eye(6), abs=1e-6)
    for sequence in range(5):
        along = [float(x[sequence, j].numpy() @ task.selector.numpy()) for j in range(4)]
        payload = x[sequence, along.index(max(along))].numpy() @ rotation
        assert target[sequence] == pytest.approx(x[sequence].numpy() + payload, abs=1e-6)


def test_a_trial_changes_what_it_says() -> None:
    """The selected token alone is moved along the selector; MLPs go; layers come; noise stays in training."""
    generator, size = torch.Generator().manual_seed(0), BROADCAST_SIZE
    plain = broadcast.Task.drawn(size.width, generator).tokens(5, size, torch.Generator().manual_seed(1))
    task = broadcast.Task.drawn(size.width, torch.Generator().manual_seed(0), margin=3.0)
    moved = task.tokens(5, size, torch.Generator().manual_seed(1)) - plain
    for sequence, selected in enumerate(task.selected(plain)):
        assert torch.allclose(moved[sequence, selected], 3 * task.selector, atol=1e-6)
        moved[sequence, selected] = 0
    assert not moved.any()
    deep = broadcast.BroadcastModel(size, toys.Options(), broadcast.Setting(layers=3, feed_forward=False))
    assert len(deep.attention) == 3 and len(deep.mlp) == 0
    short = replace(size, steps=1, every=1)
    quiet, noisy = (
        broadcast.train_broadcast("", toys.Options(), short, 0, broadcast.Setting(noise=noise))[1] for noise in (0, 1)
    )
    assert quiet.payload == noisy.payload and quiet.loss != noisy.loss


def test_a_patch_is_labelled_with_the_digit_it_lies_on() -> None:
    drawn = mosaics(60, 0, test=False)
    bright = drawn.patches.max(axis=-1) > 0.9  # (images, PATCHES): surely ink
    assert (drawn.labels[bright] != NOTHING).all() and (drawn.labels == NOTHING).any()
    assert not bright[drawn.labels == NOTHING].any()
    for labels, subject in zip(drawn.labels, drawn.classes, strict=True):
        assert (labels == subject).sum() >= 16  # a subject covers four cells of four patches
        assert (labels != NOTHING).sum() % 4 == 0
    assert not np.array_equal(drawn.patches, mosaics(60, 0, test=True).patches)
    assert np.array_equal(drawn.patches, mosaics(60, 0, test=False).patches)


def test_the_command_trains_once_and_draws_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nop, "DEFAULT_SIZE", replace(NOP_SIZE, batch=4, steps=2, every=1))
    monkeypatch.setattr(
        nop, "PAPER_SIZE", replace(nop.PAPER_SIZE, width=8, batch=4, steps=9, every=1, looks=2, change=9.0)
    )
    monkeypatch.setattr(broadcast, "DEFAULT_SIZE", replace(BROADCAST_SIZE, batch=4, steps=2, every=1))
    small = replace(BROADCAST_SIZE, batch=4, steps=2, every=1)
    trials = {name: broadcast.TRIALS[name] for name in ("as it is", "three layers")}
    monkeypatch.setattr(broadcast, "TRIALS", {name: (setting, small) for name, (setting, _) in trials.items()})
    monkeypatch.setattr(vit, "DEFAULT_SIZE", VIT_SIZE)
    for name in ("TEST_IMAGES", "PROBE_IMAGES", "DIAGNOSED"):
        monkeypatch.setattr(vit, name, 30)
    result = CliRunner().invoke(main, ["--out", str(tmp_path), "--seeds", "1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = {path.name for path in tmp_path.iterdir()}
    figures = {
        "nop",
        "nop-emergence",
        "broadcast",
        "trials",
        "kinds-of-attention",
        "mitigation",
        "mitigation-mechanisms",
    }
    assert "report.html" in written
    assert {f"{name}.{suffix}" for name in figures for suffix in ("png", "svg", "figure.csv")} <= written
    assert {f"{stage}.{suffix}" for stage in STAGES for suffix in ("json", "csv")} <= written
    assert len((tmp_path / "vit.csv").read_text().splitlines()) == 1 + len(toys.GATES_AND_REGISTERS)

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    for module, train in ((nop, "train_nop"), (broadcast, "train_broadcast"), (vit, "train_vit")):
        monkeypatch.setattr(module, train, never)
    (tmp_path / "nop.png").unlink()
    again = CliRunner().invoke(main, ["--out", str(tmp_path), "--seeds", "1", "--only", "nop"], catch_exceptions=False)
    assert again.exit_code == 0 and (tmp_path / "nop.png").exists()


def test_a_score_is_flat_once_two_means_agree_and_ends_the_training() -> None:
    size = nop.UntilFlat(width=32, tokens=16, batch=8, steps=40, rate=5e-3, every=1, looks=3, change=0.01)
    assert not size.is_flat([0.5] * 5)  # too few
    assert size.is_flat([0.1, 0.5, 0.51, 0.49, 0.495, 0.505, 0.5])
    assert not size.is_flat([0.5, 0.5, 0.5, 0.52, 0.52, 0.52])
    stopped = nop.train_nop(nop.Task(), "softmax", toys.Options(), replace(size, change=9.0), 0)[1]
    complete = nop.train_nop(nop.Task(), "softmax", toys.Options(), replace(size, change=0.0), 0)[1]
    assert stopped.steps == [1, 2, 3, 4, 5, 6] and len(complete.steps) == 40
    assert stopped.score == complete.score[:6]


def test_without_results_there_is_nothing_to_draw(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path), "--redraw"], catch_exceptions=False)
    assert result.exit_code == 2 and "nop.json" in result.stderr
