"""The training of the model that ships with the package."""

import pytest

pytest.importorskip("torch", reason="the model is trained by PyTorch")

import torch
import transformers

from analyses.toys.train_embedded import Run, trained

pytestmark = pytest.mark.check


def test_no_hook_stays_after_a_run() -> None:
    """A second run would drop positions by the share of the first, too."""
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    run = Run(1, stopped=0, span=8, rate=1e-3, repeats=(0, 0), shortest=2, without_positions=1.0)
    for _ in range(2):
        assert [*trained(model, run, torch.zeros(100, dtype=torch.long))] == []
        assert not model.transformer.wpe._forward_hooks
