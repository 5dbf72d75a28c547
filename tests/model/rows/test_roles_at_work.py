"""What networks.json says of each row is what transformers' own models of all its types are seen to do."""

from pathlib import Path

import pytest

from tests.census.record import read
from weightscope.model.rows.table import FAMILIES, title

EXACT = sorted({row.type for row in read() if row.verdict == "exact"})


def test_networks_are_of_rows_of_the_table() -> None:
    assert FAMILIES.networks.keys() <= {title(row) for row in FAMILIES}


@pytest.mark.census
@pytest.mark.parametrize("kind", EXACT)
def test_modules_do_what_their_roles_say(kind: str, tmp_path: Path) -> None:
    """A module that was seen to do something else, or nothing, has no role in the file."""
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")
    from tests.model.rows.make_networks import shown, tiny
    from weightscope.adopting.newcomers import OutOfTime, limited_time

    try:
        with limited_time():
            seen = [*shown(tiny(kind, tmp_path))]
    except OutOfTime:
        pytest.skip("watching this type takes longer than its time")
    for row, module, role in seen:
        listed = FAMILIES.networks.get(row, {})
        stated = {
            name.partition(" as ")[0]: named_role + "".join(name.partition(" as ")[1:])
            for named_role, names in listed.items()
            for name in names
        }
        assert stated.get(module, role) == role, (row, module)
