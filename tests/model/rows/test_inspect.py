"""`weightscope inspect` on every fixture: its description, and the bytes that an audit would read."""

import pytest

from tests.support.tiny_models import NAMES, fixture
from weightscope.cli.inspection import describe
from weightscope.model.model import Model


def lines_of(model: Model) -> list[str]:
    """What a file or a program reads."""
    return "\n".join(part if isinstance(part, str) else part.text() for part in describe(model)).splitlines()


def test_inspect_describes_every_fixture(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(fixture=name):
            model = fixture(name).model
            config, described = model.config, lines_of(model)
            lines = dict(line.split(maxsplit=1) for line in described if not line.startswith(" "))
            assert lines["family"].startswith(f"{model.family.name} (model_type {config.model_type})")
            assert lines["heads"].startswith(f"{config.n_heads} heads x {config.head_dim} dims, {config.n_kv_heads} ")
            indented = [line.removeprefix("  ") for line in described if line.startswith("  ")]
            tensors = [line for line in indented if not line.startswith(" ") and line.startswith(model.prefix)]
            assert len(tensors) == len(model.attention_tensors(model.attention_layers[0]))


def test_layers_that_are_not_attention_are_listed() -> None:
    assert any(line.strip() == "without attention: 0, 2" for line in lines_of(fixture("qwen3_next").model))
