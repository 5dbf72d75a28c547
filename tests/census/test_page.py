"""docs/architectures.md is what the committed census says, in words for people."""

import re
from pathlib import Path

from tests.census.record import mechanism, page, read
from weightscope.model.rows.table import OF, RECORD

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def test_the_page_is_of_the_committed_census() -> None:
    version = RECORD.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix(OF)
    assert PAGE.read_text(encoding="utf-8") == page(read(), version)


def test_every_refusal_is_in_plain_words() -> None:
    refused = [row for row in read() if row.verdict == "refused"]
    assert len(refused) == 120
    for row in refused:
        why = mechanism(row.reason)
        assert why and not re.search(r"safetensors|tower|looked for|tensor …|`|Error|Traceback", why), (row.type, why)
    assert "keys that also serve as values" in next(row.reason for row in refused if row.type == "deepseek_v4")
