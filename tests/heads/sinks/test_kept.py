"""A run that was interrupted goes on where it was, and changes no number."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import weightscope as ws

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.two_layers import TWO_LAYERS
from weightscope.heads.sinks import bias
from weightscope.model.text.sequences import read_texts

pytestmark = pytest.mark.check

SIZES = bias.TextSizes(texts=2, tokens=32, evaluated=2)


def csv_of(found: bias.SinkBias) -> list[str]:
    return [table.csv() for table in (found.layers, found.heads, found.patching)]


def test_finished_texts_are_not_run_again(tmp_path: Path) -> None:
    model, texts = ws.open_model(TWO_LAYERS), read_texts()
    complete = bias.sink_bias(model, texts, SIZES)
    plain, calls = bias.losses_under, []

    def broken_off(runner, given, interventions):
        if calls:
            raise KeyboardInterrupt
        calls.append(given)
        return plain(runner, given, interventions)

    with patch.object(bias, "losses_under", broken_off), pytest.raises(KeyboardInterrupt):
        bias.sink_bias(model, texts, SIZES, keep=tmp_path)
    with patch.object(bias, "measure_updates", None):
        resumed = bias.sink_bias(model, texts, SIZES, keep=tmp_path)
    assert csv_of(resumed) == csv_of(complete)
    with patch.object(bias, "measure_updates", None), patch.object(bias, "losses_under", None):
        again = bias.sink_bias(model, texts, SIZES, keep=tmp_path)
    assert csv_of(again) == csv_of(complete)
    np.testing.assert_array_equal(again.updates.mu, complete.updates.mu)


def test_broken_files_are_recomputed_and_each_text_has_its_file(tmp_path: Path) -> None:
    kept = bias.Kept(tmp_path, ws.open_model(TWO_LAYERS))
    a, b = ({"text": np.array(tokens)} for tokens in ([1, 2], [1, 3]))
    assert kept.get(a, lambda: {"losses": np.ones(2)})["losses"].tolist() == [1, 1]
    assert kept.get(a, lambda: {"losses": np.zeros(2)})["losses"].tolist() == [1, 1]
    assert kept.get(b, lambda: {"losses": np.zeros(2)})["losses"].tolist() == [0, 0]
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert kept.get(a, lambda: {"losses": np.full(2, 7.0)})["losses"].tolist() == [7, 7]
