"""A run that begins where an intervention does ends as a whole run does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import runner_of  # noqa: E402
from weightscope.runner import Activations, Runner  # noqa: E402
from weightscope.runner.runner import Intervention, losses_under  # noqa: E402

pytestmark = pytest.mark.check

TEXTS = [np.random.default_rng(n).integers(3, 20, n) for n in (11, 8)]


def runs_of_the_first_block(runner: Runner) -> list[None]:
    """Grows by one whenever it computes."""
    runs: list[None] = []
    inmost = next(module for module in runner.blocks[0].modules() if not list(module.children()))
    inmost.register_forward_hook(lambda module, args, made: runs.append(None))
    return runs


def faded(seen: Activations) -> np.ndarray:
    return seen.output * np.linspace(0, 1, seen.output.shape[-1])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "qwen3", "gemma2", "bloom"])
def test_layers_below_an_intervention_are_run_once_a_text(name: str, tmp_path: Path) -> None:
    runner = runner_of(name, tmp_path)
    runs = runs_of_the_first_block(runner)
    check_against_whole_runs(runner, runs, expected=3 * len(TEXTS) + 1)  # one: the last is tried on a few tokens first
    assert not any("forward" in vars(block) for block in runner.blocks)


def test_a_model_whose_layers_share_more_than_the_stream_is_run_whole(tmp_path: Path) -> None:
    """As where later layers attend to the keys of earlier ones: here the last adds what the first one's MLP made."""
    runner = runner_of("llama", tmp_path)
    shared: list[Any] = []
    runner.network.register_forward_pre_hook(lambda module, args: shared.clear())
    runner.blocks[0].mlp.register_forward_hook(lambda module, args, made: shared.append(made))
    runner.blocks[-1].register_forward_pre_hook(lambda block, args: (args[0] + shared[0], *args[1:]))
    runs = runs_of_the_first_block(runner)
    check_against_whole_runs(runner, runs, expected=4 * len(TEXTS) + 1)


def check_against_whole_runs(runner: Runner, runs: list[None], expected: int) -> None:
    last = max(runner.layers)
    where = [[0], [last], [0, last]]
    plain, *changed = losses_under(runner, TEXTS, [Intervention(layers, faded) for layers in where])
    assert len(runs) == expected
    np.testing.assert_array_equal(plain, runner.losses(TEXTS))
    for layers, losses in zip(where, changed, strict=True):
        np.testing.assert_allclose(losses, runner.losses(TEXTS, faded, layers), rtol=1e-6)
        assert np.abs(losses - plain).min() > 1e-4
