"""The tables of the papers' claims: every row is what the files say, and no row is without one."""

import pytest

from tests.support.claims import CLAIMS, HEADER, Claim
from tests.support.quoted import ROOT

pytestmark = pytest.mark.docs

ROWS = [(page, claim) for (page, _), claims in CLAIMS.items() for claim in claims()]


@pytest.mark.parametrize(("page", "claim"), ROWS, ids=lambda each: each.paper[:60] if isinstance(each, Claim) else each)
def test_a_claim_is_judged_as_the_files_judge_it(page: str, claim: Claim) -> None:
    assert f"\n{claim.row()}\n" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in CLAIMS))
def test_no_claim_is_judged_without_a_file(page: str) -> None:
    tables = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(HEADER)[1:]
    shown = [line for table in tables for line in table.split("\n\n")[0].splitlines()]
    assert shown == [claim.row() for name, claim in ROWS if name == page]
