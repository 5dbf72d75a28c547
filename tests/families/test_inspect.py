"""`weightscope inspect` on every fixture: what it is, and what an audit would read of it."""

import pytest

from tests.support.tiny_models import NAMES, fixture
from weightscope.cli.inspection import describe
from weightscope.model import Model


def lines_of(model: Model) -> list[str]:
    """What a file or a program reads."""
    return "\n".join(part if isinstance(part, str) else part.text() for part in describe(model)).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_is_described(name: str) -> None:
    model = fixture(name).model
    lines = dict(line.split(maxsplit=1) for line in lines_of(model) if not line.startswith(" "))
    assert lines["family"].startswith(f"{model.family.name} (model_type {model.config.model_type})")
    assert lines["heads"].startswith(f"{model.config.n_heads} of {model.config.head_dim}, {model.config.n_kv_heads} ")
    indented = [line.removeprefix("  ") for line in lines_of(model) if line.startswith("  ")]
    read = [line for line in indented if not line.startswith(" ") and line.startswith(model.prefix)]
    assert len(read) == len(model.attention_tensors(model.attention_layers[0]))


def test_layers_that_are_not_attention_are_listed() -> None:
    assert any(line.strip() == "not attention: 0, 2" for line in lines_of(fixture("qwen3_next").model))
