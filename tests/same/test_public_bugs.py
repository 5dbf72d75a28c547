"""Bugs of converters that were reported in public: `same` calls each a difference, by its name."""

from pathlib import Path

import pytest

from analyses.experiments.public_bugs import BUGS, Bug, enact

pytest.importorskip("transformers", reason="tiny models are built by transformers: pip install '.[runner]'")


@pytest.mark.check
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.tool}-{bug.report.rpartition('/')[2]}")
def test_a_public_bug_is_named(bug: Bug, tmp_path: Path) -> None:
    verdict, deeds, lead = enact(bug, tmp_path)
    assert verdict == "different", lead
    assert bug.named in deeds
