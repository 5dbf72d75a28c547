"""Every attention option of every known family, set in turn: read as the eager model reads it, or refused."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import CASES, Case
from tests.support.slow import one_in
from tests.support.tiny_models import FIXTURES, Fixture, centred

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

pytestmark = pytest.mark.check

ATTENTION = re.compile(
    "att|rope|rotary|head|qk|kv|bias|norm|eps|scal|soft|window|layer_type|alibi|position|mult|clip|parallel|partial"
    "|interleav|sink|logit|share|arch|relative"
)
OTHER = re.compile(
    "drop|initializer|pad_|token|output_att|chunk|label|vocab|init|problem|_id$|is_decoder|cross|classif|hidden_states"
    "|expert|router|image|patch|tie_|^num_attention_heads$|n_head$|num_heads"
)
SCALED = ({"rope_type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 3.0})
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
FIRST = list({(case.model_type, case.tower): case for case in reversed(CASES)}.values())  # of each architecture


def alternatives(key: str, value: Any) -> Iterator[Any]:
    """What else an option of this value might be."""
    if key == "rope_parameters":
        if isinstance(value, dict) and not any(isinstance(inner, dict) for inner in value.values()):
            yield from (value | more for more in ({"partial_rotary_factor": 0.5}, {"rope_theta": 37.0}, *SCALED, YARN))
    elif isinstance(value, bool):
        yield not value
    elif value is None:
        yield from (2.5, True, 4)
    elif isinstance(value, int):
        yield from (2 * value, max(value // 2, 1))
    elif isinstance(value, float):
        yield 1.7 * value + 0.01


def trials(case: Case) -> Iterator[Case]:
    """The case with each option set to something else."""
    values = transformers.AutoConfig.for_model(case.model_type).to_dict()
    values |= json.loads((FIXTURES / case.name / "config.json").read_text())
    parts = [part for part in ("text_config", "vision_config") if part in case.config and case.tower in part]
    for part in parts or [None]:
        config = values[part] if part else values
        for key in sorted(key for key in config if ATTENTION.search(key) and not OTHER.search(key)):
            for value in alternatives(key, config[key]):
                changed = {part: case.config[part] | {key: value}} if part else {key: value}
                yield replace(case, config=case.config | changed)


def wrong(tiny: Fixture) -> float:
    """The largest error of scores and outputs, in units of what is allowed."""
    worst = 0.0
    for index in tiny.layers:
        layer, expected, x = tiny.model.layer(index), tiny.arrays[f"scores{index}"], tiny.arrays[f"x{index}"]
        seen = np.isfinite(expected)
        bound = 1e-5 * max(1.0, np.abs(expected[seen]).max())
        output = layer.output(tiny.arrays[f"attention{index}"], x)
        errors = (
            np.abs(centred(layer.scores(x), seen) - centred(expected, seen)).max() / bound,
            np.abs(output - tiny.arrays[f"output{index}"]).max() / bound / 3,
        )
        worst = max(worst, *(float(error) for error in errors))
    return worst


@pytest.mark.parametrize("case", one_in(3, FIRST), ids=lambda case: case.name)
def test_an_option_is_read_as_the_model_reads_it_or_refused(case: Case, tmp_path: Path) -> None:
    from tests.model.rows.make_fixtures import make

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = 0
    for trial in trials(case):
        folder = tmp_path / str(made)
        try:
            make(trial, folder)
        except Exception:  # a model that transformers cannot make or run with it
            continue
        made += 1
        with suppress(ws.CheckpointError):  # refused, in a line
            assert wrong(Fixture(trial, folder)) < 2, trial.config
    assert made, "no option could be set"


@pytest.mark.parametrize("slices", [1, 2])
def test_bloom_in_slices_has_no_output_bias_and_the_caveat_says_so(slices: int, tmp_path: Path) -> None:
    """transformers 5.23 adds up slices of W_O with `slow_but_exact`, and never the bias."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50}
    config = transformers.BloomConfig(**sizes, slow_but_exact=True, pretraining_tp=slices)
    made = transformers.BloomForCausalLM._from_config(config, attn_implementation="eager").eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    made.save_pretrained(tmp_path)
    with torch.no_grad():
        inner = made.transformer(torch.arange(9)[None], output_attentions=True, output_hidden_states=True)
        block = made.transformer.h[0]
        kept: list[torch.Tensor] = []
        block.self_attention.register_forward_hook(lambda module, given, result: kept.append(result[0]))
        made.transformer(torch.arange(9)[None])
    x, attention = inner.hidden_states[0][0].numpy(), inner.attentions[0][0].numpy()
    layer = ws.open_model(tmp_path).layer(0)
    bias = layer.output_bias if slices > 1 else np.zeros(24)
    assert layer.output(attention, x) - bias == pytest.approx(kept[0][0].numpy() - x, abs=1e-5)
    assert np.abs(layer.output_bias).max() > 0.1
    named = [caveat for caveat in layer.caveats if "slow_but_exact" in caveat and "pretraining_tp" in caveat]
    assert len(named) == (slices > 1)
