"""A smaller run of the fuzz target; `python -m tests.fuzz 200000` is the large one."""

from pathlib import Path

import pytest

from tests.fuzz import GOLDEN, GOOD, GOOD_GGUF, fuzz, meet
from tests.support.files import encode


@pytest.mark.parametrize(
    ("name", "content", "outcome"),
    [("model.safetensors", encode(GOOD), "read"), ("model.gguf", GOOD_GGUF, "read"),
     ("bitsandbytes.safetensors", GOLDEN.read_bytes(), "read")],
)  # fmt: skip
def test_what_mutants_start_from_is_good(name: str, content: bytes, outcome: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    assert meet(tmp_path, name, content) == outcome


@pytest.mark.parametrize("seed", [1, 2])
def test_mutants_are_read_or_refused(seed: int) -> None:
    pytest.importorskip("gguf")
    outcomes = fuzz(1500, seed)
    assert sum(outcomes.values()) == 1500
    assert sum(count for outcome, count in outcomes.items() if not outcome.endswith(": refused")) > 200  # some pass
