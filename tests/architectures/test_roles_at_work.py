"""What networks.toml says of each row is what transformers' own models of all its types are seen to do."""

import pytest

from tests.census.record import read
from weightscope.architectures import FAMILIES
from weightscope.architectures.table import title

EXACT = sorted({row.type for row in read() if row.verdict == "exact"})


def test_networks_are_of_rows_of_the_table() -> None:
    assert FAMILIES.networks.keys() <= {title(row) for row in FAMILIES}


@pytest.mark.check
@pytest.mark.parametrize("kind", EXACT)
def test_modules_do_what_their_roles_say(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
    pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")
    from tests.architectures.make_networks import shown, tiny

    for row, module, role in shown(tiny(kind, tmp_path_factory.mktemp("tiny"))):
        listed = FAMILIES.networks.get(row, {})
        stated = {named: role for role, names in listed.items() for named in names}
        said = stated.get(module, stated.get(f"{module} as alternating", ""))
        assert said in ("", role.partition(" as ")[0]), (row, module)
