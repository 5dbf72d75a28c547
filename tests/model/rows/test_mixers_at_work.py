"""Roles of mixers without a softmax are proved by their equations: what transformers computes follows from the tensors
of the saved file under these roles, and from no others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.model.rows.mixers_at_work import MIXED, mamba_of_heads  # noqa: E402
from tests.model.rows.mixers_models import KINDS, tiny_mixers  # noqa: E402
from weightscope.model.model import Model, open_tensors  # noqa: E402
from weightscope.model.rows.names import Tensors  # noqa: E402

TOKENS = 9
NOT_READ = {"decay.query", "decay.key", "decay.within"}  # lightning attention's, which follow from the slope


class Watched(dict[str, np.ndarray]):
    """Arrays by role, which note what was read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def __getitem__(self, role: str) -> np.ndarray:
        self.read.add(role)
        return super().__getitem__(role)


def mixers(tensors: Tensors) -> Iterator[tuple[str, int, str, Watched]]:
    """Kind, layer, module and arrays by role of every mixer of a checkpoint."""
    reader = tensors.readers[0]
    for layer in range(reader.config.n_layers):
        stem = reader.prefix + reader.family.stored_name(reader.config, layer)
        for mixer in reader.family.mixer:
            kind, _, module = mixer.partition(":")
            arrays = {
                tensor.role.removeprefix("mixer."): tensor.array().astype(np.float64)
                for tensor in tensors
                if tensor.role.startswith("mixer.") and tensor.name.startswith(f"{stem}{module}.")
            }
            if arrays:
                yield kind, layer, f"{stem}{module}", Watched(arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixers_output_follows_from_its_tensors_by_role(kind: str, tmp_path: Path) -> None:
    model = tiny_mixers(kind)
    model.save_pretrained(tmp_path)
    opened = open_tensors(tmp_path)
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
            entered = given[0] if given else named.get("hidden_states", named.get("input_states"))
            made = made[0] if isinstance(made, tuple) else made
            seen[name] = entered[0].double().numpy(), made[0].double().numpy()

        return hook

    of_model = [*mixers(opened.tensors)]
    assert of_model
    paths = {name.removeprefix(f"{model.base_model_prefix}."): name for name, _ in model.named_modules()}
    saved = [module.removeprefix(opened.tensors.readers[0].prefix) for _, _, module, _ in of_model]
    places = [paths.get(module) or paths[module.replace(".attention", ".self_attn")] for module in saved]
    for place in places:
        model.get_submodule(place).register_forward_hook(watch(place), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=False)
    for place, (mixer, layer, _, arrays) in zip(places, of_model, strict=True):
        x, y = seen[place]
        config = getattr(model.config, "text_config", model.config)
        compute = mamba_of_heads if config.model_type == "zamba" else MIXED[mixer]
        made = compute(arrays, x, config)
        assert np.abs(made - y).max() < 2e-4 * np.abs(y).max(), (layer, mixer)
        assert arrays.keys() - arrays.read <= NOT_READ, (layer, mixer)


def test_attention_keeps_its_roles_where_a_mixer_has_its_names(tmp_path: Path) -> None:
    """Kimi Linear's layers of both kinds have a q_proj."""
    tiny_mixers("kimi_linear").save_pretrained(tmp_path)
    model = open_tensors(tmp_path)
    assert isinstance(model, Model)
    for tensor in model.tensors:
        if tensor.name.endswith("self_attn.q_proj.weight"):
            attends = model.config.layer_types[tensor.layer or 0] == "full_attention"
            assert tensor.role == ("q" if attends else "mixer.q")
