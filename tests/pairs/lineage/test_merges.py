"""A weighted sum of two bases, rounded to a coarser float, came after both."""

from collections.abc import Callable
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.plants.derivations import averaged, cast, drifted, updated
from tests.support.plants.named_parts import Weights, read_weights, write_weights
from weightscope.model.model import open_model
from weightscope.pairs.lineage.direction import merge_share

Maker = Callable[[list[Path], list[float], str, str], Path]


@pytest.fixture
def summed(tmp_path: Path) -> Maker:
    """A function that writes a weighted sum of checkpoints, in a float, under a name."""

    def write(sources: list[Path], shares: list[float], dtype: str, name: str) -> Path:
        weights: list[Weights] = [read_weights(source) for source in sources]
        write_weights(cast(averaged(weights, shares), dtype), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def tuned(base: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and what was trained from it, both in one float."""
    folder = tmp_path_factory.mktemp("merges")
    for name, weights in (("a", read_weights(base)), ("b", drifted(read_weights(base), 0.3))):
        write_weights(cast(weights, request.param), folder / name)
    return folder / "a", folder / "b"


def share(suspect: Path, first: Path, second: Path) -> float | None:
    return merge_share(*map(open_model, (suspect, first, second)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight", [0.3, 0.5, 1.5])
def test_rounded_sum_is_recomputed_from_both(
    tuned: tuple[Path, Path], summed: Maker, dtype: str, weight: float
) -> None:
    a, b = tuned
    merged = summed([a, b], [weight, 1 - weight], dtype, "merged")
    assert share(merged, a, b) == pytest.approx(weight, abs=1e-6)
    assert share(merged, b, a) == pytest.approx(1 - weight, abs=1e-6)
    assert share(a, merged, b) is None
    assert share(b, merged, a) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight", [0.5, 0.9])
def test_base_that_was_made_from_the_sum_did_not_come_first(
    tuned: tuple[Path, Path], summed: Maker, dtype: str, weight: float
) -> None:
    """The sum of `made` and b is a again: the weights of a alone decide which of the two was rounded."""
    a, b = (summed([each], [1.0], "bfloat16", each.name) for each in tuned)
    made = summed([a, b], [1 / weight, 1 - 1 / weight], dtype, "made")
    assert share(a, made, b) is None


def test_sums_that_show_no_direction(tuned: tuple[Path, Path], base: Path, summed: Maker, tmp_path: Path) -> None:
    """In float32, of three bases, trained further, or one base alone."""
    a, b = tuned
    write_weights(updated(read_weights(base), 4, 0.1), tmp_path / "third")
    assert share(summed([a, b], [0.4, 0.6], "float32", "exact"), a, b) is None
    assert share(summed([a, b, tmp_path / "third"], [0.4, 0.3, 0.3], "bfloat16", "three"), a, b) is None
    write_weights(
        cast(drifted(averaged([read_weights(a), read_weights(b)], [0.4, 0.6]), 0.01), "bfloat16"), tmp_path / "c"
    )
    assert share(tmp_path / "c", a, b) is None
    assert share(summed([a], [1.0], "bfloat16", "alone"), a, b) is None


def test_merge_is_derived_from_both(base: Path, summed: Maker, tmp_path: Path) -> None:
    write_weights(drifted(read_weights(base), 0.3), tmp_path / "tune")
    merged = summed([base, tmp_path / "tune"], [0.4, 0.6], "bfloat16", "merged")
    result = ws.lineage(merged, [base, tmp_path / "tune"])
    assert result.verdict == "derived"
    assert result.came_first == "base"
    bases, how = "base (0.40) and tune (0.60)", "rounding their weighted sum"
    assert result.lead.startswith(f"merged was derived from {bases}: it can be recomputed from them by {how}, and ")
    backwards = ws.lineage(base, [merged, tmp_path / "tune"])
    assert backwards.verdict == "related"
    assert backwards.came_first is None
