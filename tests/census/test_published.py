"""Rows of remote code read tiny models of its published descriptions exactly, and name all their tensors."""

import pytest

from weightscope.model.rows.table import PUBLISHED, lines

KINDS = sorted({line["type"] for line in lines(PUBLISHED)})


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_published_descriptions_are_read_as_the_record_says(kind: str) -> None:
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="attention is watched by transformers, not installed")
    from tests.census import published

    (description,) = (each for each in published.PUBLISHED if each.kind == kind)
    rows = [(row.stack, row.verdict, row.row, row.unnamed) for row in published.census(description)]
    recorded = [line for line in lines(PUBLISHED) if line["type"] == kind]
    assert rows == [(line["stack"], line["verdict"], line["row"], int(line["unnamed"])) for line in recorded]


def test_every_description_is_exact_with_all_roles() -> None:
    for line in lines(PUBLISHED):
        assert line["verdict"] == "exact" and line["unnamed"] == "0" and line["reason"], line["type"]
