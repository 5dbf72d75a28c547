"""Bugs of converters that were reported in public: `same` calls each a difference, by its name."""

from pathlib import Path

import pytest

from tests.support.plants.bug_versions import RELEASES, Release
from tests.support.plants.bugs import BUGS, Bug, before_and_after, enacted, judged
from tests.support.slow import one_in
from weightscope.core.errors import CheckpointError

pytest.importorskip("transformers", reason="tiny models are built by transformers: pip install '.[runner]'")

pytestmark = pytest.mark.check


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.tool}-{bug.report.rpartition('/')[2]}")
def test_a_public_bug_is_named(bug: Bug, tmp_path: Path) -> None:
    plant = enacted(bug)
    row = judged(plant, plant.make(tmp_path))
    assert row["as_expected"], row


@pytest.mark.parametrize("release", one_in(3, RELEASES), ids=lambda release: release.tool)
def test_a_tool_before_and_after_the_fix(release: Release, tmp_path: Path) -> None:
    """The version with the bug is different, by its name, and the version with the fix has the same values."""
    try:
        rows = [judged(plant, plant.make(tmp_path)) for plant in before_and_after(release, tmp_path)]
    except CheckpointError as error:
        pytest.skip(f"the tool does not run here: {error}")
    assert [row["as_expected"] for row in rows] == [True, True], rows
