"""The device's benchmark runs, at a small size and on no device."""

from click.testing import CliRunner

from benchmarks.device import SMALL, main, run


def test_every_work_is_timed_on_the_device_and_beside_it():
    seconds_of = run("array_api_strict", SMALL, heads=1)
    assert set(seconds_of["A small vocabulary"]) == {"products", "auroc", "ratio", "sigma"}
    assert all(took > 0 for seconds in seconds_of.values() for took in seconds.values())


def test_it_prints_a_line_a_work():
    result = CliRunner().invoke(main, ["--device", "cpu", "--small", "--heads", "1"], catch_exceptions=False)
    assert result.exit_code == 0
    for work in (
        "A small vocabulary: AUROC of 2 heads",
        "sigma over 40 positions",
        "singular values of 8",
        "audit of 1",
    ):
        assert work in result.output
