"""What other tools say of planted lineages, put in the words of `lineage` and counted."""

import pytest

from analyses.experiments import lineage_peers

pytestmark = pytest.mark.check


@pytest.mark.parametrize(
    ("label", "verdict"),
    [
        ("EXACT_COPY", "derived"),
        ("SAME_LINEAGE", "derived"),
        ("LIKELY_MERGE", "derived"),
        ("SAME_FAMILY_UNRESOLVED", "undecided"),
        ("NO_MATCH", "unrelated"),
        ("Confirmed Match", "derived"),
        ("High-Confidence Match (metadata only)", "derived"),
        ("Weak Match", "undecided"),
        ("Not Matched (metadata only)", "unrelated"),
        ("error: KeyError: 'x'", "undecided"),
    ],
)
def test_every_answer_is_one_of_three(label, verdict):
    assert lineage_peers.verdict_of(label) == verdict


def row(name, group, planted, verdicts, scores):
    row = dict(zip((f"{tool}_verdict" for tool in lineage_peers.TOOLS), verdicts, strict=True))
    row |= dict(zip((f"{tool}_score" for tool in lineage_peers.TOOLS), scores, strict=True))
    return {"name": name, "group": group, "planted": planted, **row}


ROWS = [
    row("a", "", "cast", ("derived", "derived", "derived"), (0.9, 1.0, 0.9)),
    row("b", "", "layers removed", ("unrelated", "derived", "undecided"), (None, 1.0, 0.7)),
    row("c", "another seed", "", ("undecided", "derived", "undecided"), (0.6, 1.0, 0.8)),
]


def test_answers_are_counted_by_kind_and_tool():
    table = lineage_peers.by_kind(ROWS, {"a": "derived", "b": "derived", "c": "unrelated"})
    lines = {line: number for number, line in enumerate(table["what"])}
    total, strangers = lines["all derived"], lines["all strangers"]
    assert table["pairs"][total] == 2 and table["pairs"][strangers] == 1
    assert table["weightscope_derived"][total] == 2 and table["weightscope_unrelated"][strangers] == 1
    assert table["modeldna_derived"][total] == 1 and table["modeldna_unrelated"][total] == 1
    assert table["kit_derived"][strangers] == 1  # it accuses a stranger


def test_a_tool_is_judged_by_how_its_scores_separate():
    assert lineage_peers.separation(ROWS, "modeldna") == 0.5  # above the stranger once, and once no score
    assert lineage_peers.separation(ROWS, "kit") == 0.5
    assert lineage_peers.separation(ROWS, "kit_weights") == 0.5
