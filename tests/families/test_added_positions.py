"""DETR and its line, given the positions that their attention modules are given: scores and outputs are the same."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.audits import audit_of

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers")

KINDS = ("detr", "table-transformer", "conditional_detr")
Given = tuple[str, str]  # a module and the name of an argument
ATTN, CROSS = "{}coder.layers.1.self_attn", "decoder.layers.{}.encoder_attn"
# A model and a stack of it, a layer, what attends there, the stream, and what else `scores` is given, side by side.
STACKS: tuple[tuple[str, str, int, str, Given, dict[str, tuple[Given, ...]]], ...] = (
    ("detr", "encoder", 1, ATTN.format("en"), (ATTN.format("en"), "hidden_states"),
     {"added": ((ATTN.format("en"), "position_embeddings"),)}),
    ("detr", "cross", 1, CROSS.format(1), (CROSS.format(1), "hidden_states"),
     {"memory": ((CROSS.format(1), "key_value_states"),), "added": ((CROSS.format(1), "position_embeddings"),),
      "added_to_memory": ((CROSS.format(1), "encoder_position_embeddings"),)}),
    ("table-transformer", "decoder", 1, ATTN.format("de"), ("decoder.layers.1.self_attn_layer_norm", "input"),
     {"added": ((ATTN.format("de"), "object_queries"),)}),
    ("table-transformer", "cross", 1, CROSS.format(1), ("decoder.layers.1.encoder_attn_layer_norm", "input"),
     {"memory": ((CROSS.format(1), "key_value_states"),), "added": ((CROSS.format(1), "object_queries"),),
      "added_to_memory": ((CROSS.format(1), "spatial_position_embeddings"),)}),
    ("conditional_detr", "decoder", 1, ATTN.format("de"), (ATTN.format("de"), "hidden_states"),
     {"added": ((ATTN.format("de"), "query_position_embeddings"),)}),
    *(("conditional_detr", "cross", layer, CROSS.format(layer), (CROSS.format(layer), "hidden_states"),
       {"memory": ((CROSS.format(layer), "encoder_hidden_states"),),
        "added": tuple((CROSS.format(layer), name) for name in names),
        "added_to_memory": ((CROSS.format(layer), "encoder_position_embeddings"),)})
      for layer, names in ((0, ("query_position_embeddings", "query_sine_embed")), (1, ("query_sine_embed",)))),
)  # fmt: skip


class Seen:
    """A tiny model as it was saved, what its modules were given by name, and what they gave."""

    def __init__(self, kind: str, folder: Path) -> None:
        from weightscope.adoption.inputs import Inputs
        from weightscope.adoption.shrinking import tiny_config
        from weightscope.adoption.sizes import PLANS, SIZES
        from weightscope.adoption.tiny import build

        self.folder = folder
        self.given: dict[Given, np.ndarray] = {}
        self.gave: dict[str, list[np.ndarray]] = {}
        config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]()
        model: Any = build(tiny_config(config, SIZES[0], PLANS[0]), 1)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name))
        with torch.no_grad():
            model(pixel_values=Inputs(model, SIZES[0], 1).pixels(), output_attentions=True)
        model.save_pretrained(folder)

    def _before(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            rows = {key: value for key, value in named.items() if isinstance(value, torch.Tensor) and value.ndim == 3}
            self.given |= {(name, key): value[0].numpy().copy() for key, value in rows.items()}

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self.gave[name] = [one[0].numpy() for one in output if isinstance(one, torch.Tensor)]

        return hook


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    transformers.logging.disable_progress_bar()
    return {kind: Seen(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.mark.parametrize("stack", STACKS, ids=lambda one: f"{one[0]}-{one[1]}-{one[2]}")
def test_stacks_are_the_eager_models(stack: Any, seen: dict[str, Seen]) -> None:
    kind, tower, index, module, stream, more = stack
    one = seen[kind]
    x, given = one.given[stream], {name: np.hstack([one.given[of] for of in parts]) for name, parts in more.items()}
    assert all(np.ptp(array) > 0.1 for array in given.values())  # positions that matter
    layer = ws.open_model(one.folder, tower=tower).layer(index)
    output, attention = one.gave[module][:2]
    scores = np.exp(layer.scores(x, **given))
    np.testing.assert_allclose(scores / scores.sum(-1, keepdims=True), attention, atol=1e-5)
    memory = {"memory": given["memory"]} if "memory" in given else {}
    np.testing.assert_allclose(layer.output(attention, x, **memory), output, atol=1e-4)
    assert any("what positions add to scores" in said for said in layer.caveats)


def test_without_positions_a_layer_says_what_it_needs(seen: dict[str, Seen]) -> None:
    layer = ws.open_model(seen["detr"].folder, tower="encoder").layer(0)
    with pytest.raises(ws.CheckpointError, match=r"adds positions .* say which, `added=`, or 0 for none"):
        layer.scores(np.zeros((3, layer.d_model), np.float32))


@pytest.mark.parametrize("tower", ["encoder", "decoder", "cross"])
def test_each_stack_is_audited(tower: str, seen: dict[str, Seen], tmp_path: Path) -> None:
    result = audit_of(seen["conditional_detr"].folder, tmp_path, "--tower", tower)
    assert result.exit_code == 0, result.output
    assert "what positions add to scores" in result.output
