"""Section 5 of the detokenization paper: the six terms give the model's own attention on text."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import case_of
from weightscope.heads.detok.first_layer import FirstLayer

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")

from tests.support.random_models import random_model  # noqa: E402
from weightscope.core.files import Files  # noqa: E402
from weightscope.heads.detok.on_text import check_on_text  # noqa: E402
from weightscope.runner import Runner  # noqa: E402

pytestmark = pytest.mark.check

TEXTS = [np.array([3, 1, 4, 15, 9, 2, 6, 5]), np.array([2, 7, 18, 2, 8, 1, 8, 2])]


def opened(name: str, folder: Path) -> tuple[FirstLayer, Runner]:
    network = random_model(case_of(name))
    network.save_pretrained(folder)
    model = ws.open_model(folder)
    return FirstLayer(model), Runner(model, network)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt"])
def test_the_six_terms_give_the_attention_on_text(name: str, tmp_path: Path) -> None:
    first, runner = opened(name, tmp_path)
    check = check_on_text(first, runner, TEXTS, query=5)
    assert check.difference < 1e-5
    expected, rows = np.zeros_like(check.attention), []
    for tokens in TEXTS:
        with torch.no_grad():
            alpha = runner.network(torch.from_numpy(tokens)[None], output_attentions=True).attentions[0][0].numpy()
        expected += alpha[:, 5, :6] / len(TEXTS)
        rows.append(alpha[:, 5, :6])
    np.testing.assert_allclose(check.attention, expected, atol=1e-6)
    low, high = (np.minimum(*rows), np.maximum(*rows))  # of two texts, percentiles lie between them
    np.testing.assert_allclose(check.spread, [low + 0.025 * (high - low), low + 0.975 * (high - low)], atol=1e-6)


def test_any_number_of_threads_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, runner = opened("gpt2", tmp_path)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr("weightscope.core.compute.cores.usable_cores", lambda threads=threads: threads)
        results.append(check_on_text(first, runner, TEXTS, query=5))
    for name in results[0].contributions:
        assert (results[0].contributions[name] == results[1].contributions[name]).all()
        assert (results[0].drawn[name] == results[1].drawn[name]).all()


def test_contributions_are_means_over_texts(tmp_path: Path) -> None:
    first, runner = opened("gpt2", tmp_path)
    both, *each = (check_on_text(first, runner, texts, query=5) for texts in (TEXTS, TEXTS[:1], TEXTS[1:]))
    for name, c in both.contributions.items():
        np.testing.assert_allclose(c, sum(text.contributions[name] for text in each) / 2, rtol=1e-9)
    files = Files()
    both.write_tables(files)
    rows = files.contents["contributions.csv"].decode().splitlines()
    assert len(rows) == 1 + 6 * len(first.heads)
    header, first_row = (row.split(",") for row in rows[:2])
    assert float(first_row[header.index("c_paper")]) == pytest.approx(both.drawn["ee"][0, 1:].mean(), rel=1e-4)
    assert both.heads["ee"] == pytest.approx([c[1:].mean() for c in both.contributions["ee"]])


def test_a_norm_inside_attention_is_refused_with_its_caveat(tmp_path: Path) -> None:
    first, runner = opened("qwen3", tmp_path)
    with pytest.raises(ws.CheckpointError, match=r"differs from its six terms' by .*the q/k-norm"):
        check_on_text(first, runner, TEXTS, query=5)
