"""The kept corpora of the guided fuzzers, met without Atheris; `python -m tests.fuzz.guided` finds more."""

import time
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra `gguf`")

from tests.fuzz.oss.harness import FOLDER, HARNESSES, corpus, meet_one

SECONDS = 5.0  # of processor time for one input; the slowest takes a tenth
LARGEST = 100_000  # bytes of all corpora


@pytest.mark.check
@pytest.mark.parametrize("name", HARNESSES)
def test_kept_inputs_are_read_or_refused(name: str, tmp_path: Path) -> None:
    meet = import_module(f"tests.fuzz.oss.fuzz_{name}").meet
    for content in corpus(name):
        started = time.process_time()
        meet_one(meet, tmp_path, content)
        assert time.process_time() - started < SECONDS, content[:1000]


def test_corpora_are_small() -> None:
    corpora = [*FOLDER.glob("*.zip")]
    assert len(corpora) == len(HARNESSES)
    assert sum(path.stat().st_size for path in corpora) <= LARGEST
