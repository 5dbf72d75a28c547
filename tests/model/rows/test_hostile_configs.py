"""Whatever a config.json says, a model opens or a CheckpointError says why not: no other error, no warning, no NaN."""

import json
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weightscope as ws
from tests.support.tiny_models import FIXTURES, NAMES, fixture
from weightscope.model.config.reading import decide
from weightscope.model.layers.rotation import GridRotation
from weightscope.model.model import Model
from weightscope.model.opened import Opened

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([10**7, 10**12, 0.0, 1.0, -0.5, 1e-300, 1e300, float("nan"), float("inf")]),
    st.sampled_from(["", "8", "yarn", "default"]),
    st.lists(st.sampled_from([0, 1, -1, "full_attention", "sliding_attention", None, 1e-320]), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention"]), st.none(), max_size=2),
)


def places(config: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a config, those inside objects too."""
    inner = [place for key, value in config.items() if isinstance(value, dict) for place in places(value, (*path, key))]
    return [(*path, key) for key in config] + inner


@st.composite
def changed_configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A fixture's name and its config, of either dialect, with one or two values replaced."""
    name = draw(st.sampled_from(NAMES))
    dialect = draw(st.sampled_from(sorted((FIXTURES / name).glob("config*.json"))))
    config = json.loads(dialect.read_text())
    all_places = places(config)
    for place in draw(st.lists(st.sampled_from(all_places), min_size=1, max_size=2)):
        inner = config
        for key in place[:-1]:
            inner = inner[key] if isinstance(inner.get(key), dict) else {}
        inner[place[-1]] = draw(VALUES)
    return name, config


@given(changed_configs())
@settings(max_examples=300, deadline=None)
def test_hostile_config_opens_or_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    name, config = case
    opened, tower = fixture(name).model.checkpoint, fixture(name).case.tower or None
    checkpoint = opened.with_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            model = Model(Opened(checkpoint), decide(checkpoint, tower=tower))
            for index in model.attention_layers[:2]:
                layer = model.layer(index)
                x = np.random.default_rng(0).normal(size=(12, model.config.d_model)).astype(np.float32)
                assert np.isfinite(layer.head(0).qk_at(1).left).all()
                if not isinstance(layer.rotation, GridRotation):  # how many patches fit is the caller's business
                    assert np.isfinite(layer.scores(x)).all()
            if model.family.inputs.tokens and model.attention_layers[:1] == (0,):
                embeddings, first = model.embeddings, model.first_layer
                assert np.isfinite(embeddings.sigma(np.arange(3))).all() and first.n_heads == model.config.n_heads
        except ws.CheckpointError as error:
            assert "\n" not in str(error)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    embeddings = fixture("bert").model.embeddings
    with pytest.raises(ws.CheckpointError, match="no token 24: the vocabulary has 24"):
        embeddings.sigma(np.array([0, 24]))
    with pytest.raises(ws.CheckpointError, match="no token -1: the vocabulary has 24"):
        embeddings.rows(np.array([-1]))
    np.testing.assert_array_equal(embeddings.rows(np.array([[3, 9], [4, 3]])), embeddings.tokens[[[3, 9], [4, 3]]])
