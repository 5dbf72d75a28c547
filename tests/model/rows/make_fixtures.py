"""Make the fixtures: tiny random models written by transformers, and what its eager attention computes on them.

    python -m tests.model.rows.make_fixtures [NAME ...]

For each case of cases.py, fixtures/NAME gets config.json and model.safetensors as `save_pretrained` writes them, less
what attention does not read, and expected.npz: for every attention layer the hidden states that enter it, its scaled
scores before the softmax (minus infinity where masked), its attention and its output.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.support.cases import CASES, Case
from tests.support.random_models import inputs_of, random_model

FIXTURES = Path(__file__).parent / "fixtures"
MASKED = -1e30  # every mask is more negative than this
NOT_ATTENTION = re.compile(
    r"mlp|experts|block_sparse_moe|feed_forward|fc[12]\b|intermediate|ffn|lin[12]\b|pooler|lm_head|embed_out|linear_attn"
    r"|patch_embed|lm_predictions|predictions|cls\.|vocab_|multi_modal|vision_model\.head|projection\.weight|dense_h_to"
    r"|dense_4h|\d\.output\.|full_layer|logit_|vision_tower|generator|head\.|decoder\.(weight|bias)|final_norm|mask_token"
)


@contextmanager
def recorded_softmax(calls: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[None]:
    """Record the input and output of every softmax over attention scores: of four axes, or of heads alone."""
    softmax = torch.nn.functional.softmax

    def record(scores: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = softmax(scores, *args, **kwargs)
        if scores.ndim == 4 or (scores.ndim == 3 and scores.shape[0] > 1):
            n, m = scores.shape[-2:]  # one sequence
            calls.append(tuple(values.reshape(-1, n, m).numpy().copy() for values in (scores, result)))
        return result

    def in_steps(q: Any, k: Any, v: Any, attn_mask: Any, scale: float) -> torch.Tensor:
        return record(q @ k.transpose(-1, -2) * scale + attn_mask, dim=-1) @ v

    fused = "torch.nn.functional.scaled_dot_product_attention"
    with patch("torch.nn.functional.softmax", record), patch(fused, in_steps):
        yield


def expected(case: Case, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What the eager model computes, by layer."""
    calls: list[tuple[np.ndarray, np.ndarray]] = []
    outputs: list[np.ndarray] = []
    entering: list[np.ndarray] = []
    for name, module in model.named_modules():
        if re.search(case.output, name):
            module.register_forward_hook(lambda m, i, o: outputs.append((o[0] if o.ndim > 2 else o).numpy().copy()))
        if case.stream and re.search(case.stream, name):
            module.register_forward_pre_hook(
                lambda m, i, named: entering.append((i[0] if i else named["hidden_state"]).numpy().copy()),
                with_kwargs=True,
            )
    inputs = inputs_of(case)
    if case.tower:
        part = getattr(model, f"{case.tower}_model", None) or getattr(model, case.tower)
        inputs = {k: v for k, v in inputs.items() if (k == "input_ids") == (case.tower != "vision")}
    else:
        part = model
    with torch.no_grad(), recorded_softmax(calls):
        result = part(**inputs, **{} if case.stream else {"output_hidden_states": True})
    handed = [*entering, entering[-1]] if case.stream else [state.numpy() for state in result.hidden_states]
    states = [state.reshape(-1, state.shape[-1]) for state in handed]
    n = len(states[0])
    arrays = {"tokens": inputs["input_ids"][0].numpy()} if "input_ids" in inputs else {}
    calls = [call for call in calls if call[0].shape[-2] == n]
    # Differential attention asks for every map twice.
    calls = [made for i, made in enumerate(calls) if not i or not np.array_equal(made[0], calls[i - 1][0])]
    config = getattr(model.config, f"{case.tower}_config", model.config)
    config = getattr(config, "text_config", config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * (len(states) - 1)
    layers = [i for i, kind in enumerate(kinds) if kind not in {"linear_attention", "moe", "mlp", "conv"}]
    assert len(calls) == len(outputs) == len(layers) >= 2, (len(calls), len(outputs), len(layers))
    for layer, (scores, attention), output in zip(layers, calls, outputs, strict=True):
        arrays[f"x{layer}"] = states[layer]
        arrays[f"scores{layer}"] = np.where(scores < MASKED, -np.inf, scores)[..., :n]
        arrays[f"attention{layer}"] = attention[..., :n]
        channels_first = output.shape[1:] == (n,) != output.shape[:1]  # of a convolution
        arrays[f"output{layer}"] = output.T if channels_first else output.reshape(n, -1)
    return arrays


def make(case: Case, folder: Path) -> None:
    """Write one fixture."""
    model = random_model(case)
    arrays = expected(case, model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        tensors = load_file(Path(scratch) / "model.safetensors")
        (folder / "config.json").write_text((Path(scratch) / "config.json").read_text())
    kept = {name: tensor for name, tensor in tensors.items() if not NOT_ATTENTION.search(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for each in CASES:
        if len(sys.argv) == 1 or each.name in sys.argv[1:]:
            print(each.name, flush=True)
            make(each, FIXTURES / each.name)
