"""A small run of every property; `python -m tests.properties 2000` is the long one."""

import pytest
from hypothesis import given

from tests.properties.cases import GROUPS, SOURCES, Case, cases, drawn
from tests.properties.characters import kinds, swept
from tests.properties.relations import failures
from tests.properties.saved import SAVED
from tests.support.slow import mostly_checked

FEW = ("llama", "gpt2", "identity/mlx")


@drawn(3, derandomize=True)
@given(cases(FEW))
def test_verdicts_agree_on_three_models(case: Case) -> None:
    assert failures(case) == []


@pytest.mark.census
@pytest.mark.parametrize("group", GROUPS)
def test_verdicts_agree_on_every_family(group: str) -> None:
    @drawn(10, derandomize=True)
    @given(cases(SOURCES, (group,)))
    def run(case: Case) -> None:
        assert failures(case) == []

    run()


@pytest.mark.parametrize("case", mostly_checked(SAVED, fast=()), ids=str)
def test_what_once_failed(case: Case) -> None:
    assert failures(case) == []


@pytest.mark.parametrize("kind", mostly_checked(kinds(), fast=["identity"]))
def test_a_changed_character_is_seen(kind: str) -> None:
    number, missed = swept(kind, step=211)
    assert number and missed == []


@pytest.mark.census
@pytest.mark.parametrize("kind", kinds())
def test_every_changed_character_is_seen(kind: str) -> None:
    assert swept(kind)[1] == []
