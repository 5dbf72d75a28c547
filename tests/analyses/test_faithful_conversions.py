"""Faithful conversions raise no alarm, and running the copy gives the right output."""

from pathlib import Path

import pytest

from weightscope.core.errors import CheckpointError
from weightscope.pairs.same import VERDICTS

TYPES = ("bert", "gpt2", "gpt_neox", "gemma2", "mixtral", "qwen2_vl", "t5", "vit", "whisper")


def convert(name: str, writers: tuple[str, ...], folder: Path) -> list:
    pytest.importorskip("torch", reason="the sources are models of transformers")
    pytest.importorskip("transformers")
    from analyses.experiments.faithful_conversions import convert
    from analyses.experiments.faithful_sources import sources

    return [row for source in sources([name], folder / "sources") for row in convert(source, writers, folder / "made")]


def assert_faithful(rows: list) -> None:
    for row in rows:
        assert row.is_faithful, (row.made.options, row.verdict, row.made.expected, row.lead)
        assert row.witness == "outputs", (row.made.options, row.apart)
        assert row.by_identity != "different", row.made.options


@pytest.mark.census
@pytest.mark.parametrize("kind", TYPES)
def test_copies_of_a_tiny_model_raise_no_alarm(kind, tmp_path):
    rows = convert(kind, ("transformers", "safetensors"), tmp_path)
    assert len(rows) >= 12
    assert_faithful(rows)


@pytest.mark.check
@pytest.mark.smoke
def test_rewritten_files_of_a_tiny_llama_raise_no_alarm(tmp_path):
    rows = convert("llama", ("safetensors",), tmp_path)
    assert [row.made.options for row in rows][:2] == ["the files copied", "written again, tensors in reverse order"]
    assert_faithful(rows)
    verdicts = [row.verdict for row in rows]
    assert {"same bytes", "same values", "rounded"} <= {*verdicts} and all(each in VERDICTS for each in verdicts)


@pytest.mark.check
def test_an_original_that_cannot_be_opened_is_refused():
    pytest.importorskip("torch", reason="the sources are models of transformers")
    pytest.importorskip("transformers")
    from analyses.experiments.faithful_conversions import REFUSED, verdict_of

    def adapter_of_experts() -> None:
        raise CheckpointError("adapter_config.json: target_parameters is set")

    verdict, lead = verdict_of(lambda original, copy: original, adapter_of_experts, Path("copy"))
    assert verdict == REFUSED and "target_parameters" in lead
