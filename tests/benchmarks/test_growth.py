"""How benchmarks measure growth and limits: known powers are found, and costs belong to the process asked for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from benchmarks import commands, limits
from benchmarks.commands import anonymous_megabytes, python_cost
from benchmarks.growth import DOUBLINGS, SERIES, TINY, in_this_process, power
from benchmarks.limits import floors, limit
from benchmarks.results import Bench, Measured
from benchmarks.synthetic import PLACES, PROFILES, Sizes, write

LIMITS = {"cached": 1e9, "disk": 0.0, "flops32": 1e11, "flops64": 5e10, "load": 0.0}


def test_a_power_law_s_exponent_is_found() -> None:
    assert power((1, 2, 4), [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert power((1, 2, 4), [5.0, 5.0, 5.0]) == pytest.approx(0)
    assert power((4,), [1.0]) is None


def test_every_series_grows_in_what_it_names_alone() -> None:
    for series in SERIES:
        if series.against != "cores":
            assert [getattr(series.sizes(value), series.against) for value in series.values] == list(series.values)
            shared = {"kv_heads": 0, series.against: 0} if series.against == "heads" else {series.against: 0}
            assert len({replace(series.sizes(value), **shared) for value in series.values}) == 1
    assert DOUBLINGS[0] == 1
    assert {series.against for series in SERIES if series.work == "audit"} == {
        "layers", "heads", "width", "vocabulary", "cores",
    }  # fmt: skip


@pytest.mark.skipif(not anonymous_megabytes(), reason="the system does not say how much memory is anonymous")
def test_costs_are_those_of_the_process() -> None:
    code = "import time\nheld = b'x' * 100_000_000\nwhile time.process_time() < 0.3: 0"
    cost = python_cost("-c", code)
    assert 100 < cost.peak < 130 and 0.3 <= cost.cpu < 5 and cost.wall > 0.3


def test_a_command_that_fails_is_no_cost() -> None:
    with pytest.raises(RuntimeError, match="inspect /nowhere: "):
        commands.command_cost("inspect", "/nowhere")


@pytest.mark.parametrize(
    ("sizes", "shards"), [(Sizes(), 1), (Sizes(layers=3, inner=24), 4), (Sizes(inner=16, experts=3), 2)]
)
def test_synthetic_checkpoints_are_read_as_what_they_are(tmp_path: Path, sizes: Sizes, shards: int) -> None:
    model = ws.open_model(write(tmp_path, sizes, shards))
    assert len(model.checkpoint) == len(list(sizes.shapes)) and len(model.checkpoint.files) == shards
    assert (model.config.n_layers, model.config.d_model, model.config.head_dim) == (sizes.layers, 64, 16)
    first, second = (model.layer(layer).head(0) for layer in (0, 1))
    assert first.qk.svdvals()[0] > 0 and abs(first.w_q - second.w_q).max() > 0


def test_maps_have_the_singular_values_of_real_heads_and_no_two_are_equal(tmp_path: Path) -> None:
    sizes = Sizes(layers=2, width=1024, heads=4, head_dim=64, kv_heads=2)
    model = ws.open_model(write(tmp_path, sizes, spectra=True))
    moved = ws.open_model(write(tmp_path / "moved", sizes, spectra=True, moved=0.1))
    heads = [head for layer in (0, 1) for head in model.layer(layer).heads]
    for head in heads:
        for w, profile in ((head.qk, PROFILES["qk"]), (head.vo, PROFILES["vo"])):
            s = np.linalg.svd(np.asarray(w.left, float) @ np.asarray(w.right, float).T, compute_uv=False)[:64]
            expected = np.log(np.interp(np.linspace(0, 1, 64), PLACES, profile))
            exponents = np.log(s[1:] / s[0]) / expected[1:]
            assert np.ptp(exponents) < 0.02 and 0.6 < exponents.mean() < 1.4
    firsts = [head.qk.svdvals()[0] for head in heads]
    assert len(set(np.round(firsts, 6))) == len(heads)
    pairs = zip(heads, (head for layer in (0, 1) for head in moved.layer(layer).heads), strict=True)
    apart = [np.linalg.norm(b.w_q - a.w_q) / np.linalg.norm(a.w_q) for a, b in pairs]
    assert apart == pytest.approx([0.1] * len(heads), rel=0.1)


def test_holes_take_no_room(tmp_path: Path) -> None:
    file = write(tmp_path, Sizes(vocabulary=2_000_000, width=640), holes=True) / "model.safetensors"
    assert file.stat().st_size > 2.5e9 and 512 * file.stat().st_blocks < 1e6
    assert ws.open_model(tmp_path).embeddings.n_tokens == 2_000_000


def test_a_limit_is_the_longer_of_reading_and_multiplying() -> None:
    assert limit(Measured("a", 9.0, reads=3e9, flops32=1e11), LIMITS) == pytest.approx(3)
    assert limit(Measured("a", 9.0, reads=3e9, flops32=3e11, flops64=5e10), LIMITS) == pytest.approx(4)


def test_the_table_of_floors_has_the_works_whose_amounts_are_known() -> None:
    measured = [Measured("known", 6.0, reads=3e9, flops64=5e10), Measured("help", 0.2)]
    *_, row = floors(Bench({"processor": "x"}, measured, LIMITS)).splitlines()
    assert row == "| known | 2.0 x | 3.0 s | 3 GB |  | 50 G |"
    assert "help" not in floors(Bench({"processor": "x"}, measured, LIMITS))


def test_the_machine_s_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES", 1 << 24)
    monkeypatch.setattr(limits, "N", 256)
    reached = limits.machine_limits()
    assert min(reached["cached"], reached["flops32"], reached["flops64"]) > 1e7


def test_a_size_is_measured_once_for_all_series_and_beside_a_tiny_one() -> None:
    shared = [series.sizes(value) for series in SERIES if series.work == "audit" for value in series.values]
    assert len(set(shared)) < len(shared)
    taken = in_this_process("circuits", TINY)
    assert taken.peak < 50 and 0 < taken.tiny < 5 * min(cpu for _, cpu in taken.rounds)
