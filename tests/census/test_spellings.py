"""The committed comparison of rows with transformers' renaming of tensors, and the verdicts that it must not have."""

import pytest

from tests.census.spelling_record import ALIKE, REFUSED, WRONG, Line, differences, written

RECORD = {line.type: line for line in written()}
# Types with rules whose tensors have the same names on both sides in a tiny model, or that is not built so small.
WITHOUT_LINE = {
    "apertus1p5_text",
    "colqwen2",
    "dory",
    "dots3_note_audio_encoder",
    "ernie4_5_vl_moe",
    "gemma3n_text",
    "gemma4_unified",
    "hyperclovax_vision_v2",
    "jev",
    "mlcd",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen3_5_text",
    "qwen3_vl_moe",
    "sapiens2",
    "timm_wrapper",
    "tipsv2_dpt",
}


def test_no_spelling_is_misread() -> None:
    assert not [line.type for line in RECORD.values() if line.verdict == WRONG]
    assert sum(line.verdict == ALIKE for line in RECORD.values()) >= 80
    assert all(line.reason for line in RECORD.values() if line.verdict not in (ALIKE, WRONG))


def test_differences_name_what_a_record_has_not() -> None:
    old = [Line("a", ALIKE), Line("b", REFUSED, "why"), Line("c", ALIKE, unmet="x")]
    assert not differences(old, old)
    new = [Line("a", REFUSED, "no row"), Line("b", ALIKE), Line("c", ALIKE, unmet="x, y"), Line("d", WRONG, "q")]
    assert differences(old, new) == [
        "spelling of a: alike -> refused no row",
        "spelling of b: refused -> alike",
        "spelling of c: rules that no file met are x, y",
        "spelling of d: new, WRONG q",
    ]


@pytest.mark.check
def test_no_type_is_renamed_that_the_record_does_not_know() -> None:
    from transformers import conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    renamed = {kind for kind in conversion_mapping._build_checkpoint_conversion_mapping() if kind in CONFIG_MAPPING}
    assert not renamed - RECORD.keys() - WITHOUT_LINE, "run python -m tests.census.spellings --against"


@pytest.mark.check
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "vit", "kimi_k25", "deepseek_ocr2", "llava"])
def test_the_record_is_what_is_read_today(kind: str) -> None:
    from tests.census.spellings import line

    assert line(kind) == RECORD[kind]
