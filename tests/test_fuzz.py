"""A smaller run of every target; `python -m tests.fuzz 200000` is the large one."""

from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("tokenizers", reason="needs the extra `bigrams`")

from tests.fuzz.against import configs
from tests.fuzz.checkpoints import GOLDEN, GOOD, GOOD_GGUF, SEEDS, meet
from tests.fuzz.run import TARGETS, fuzz
from tests.support.files import encode
from weightscope.checkpoint.formats import INDEX

pytestmark = pytest.mark.check

FEW = {  # whose trials take long
    "tokenizer.json": 12, "as tokenizers reads": 12, "vocab.txt": 12, "a worker's answer": 20, "audited weights": 8,
    "audited adapter": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", encode(GOOD)), ("model.gguf", GOOD_GGUF),
     ("bitsandbytes.safetensors", GOLDEN.read_bytes())],
)  # fmt: skip
def test_seeds_of_the_fuzzer_are_valid(name: str, content: bytes, tmp_path: Path) -> None:
    assert meet(name, tmp_path, content) == "read"


def test_the_index_is_read(tmp_path: Path) -> None:
    good, _ = SEEDS[INDEX]
    assert meet(INDEX, tmp_path, good) == "read"
    assert meet(INDEX, tmp_path, b"{}") == "refused"


def test_no_number_of_a_config_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert len([*configs.all_compared(tmp_path)]) >= configs.COMPARED


@pytest.mark.parametrize("name", TARGETS)
def test_mutants_are_read_or_refused(name: str) -> None:
    if name == "as AutoConfig reads":
        pytest.importorskip("transformers")
    n = FEW.get(name, 200)
    outcomes = fuzz(n, 1, [name])
    assert sum(outcomes.values()) == n
    assert sum(count for outcome, count in outcomes.items() if not outcome.endswith(": refused")) > n / 50  # some pass
