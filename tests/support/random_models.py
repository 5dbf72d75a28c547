"""Tiny random models of transformers, one a case of cases.py, and inputs for them."""

import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

import weightscope as ws
from tests.support.cases import Case, case_of
from weightscope.runner import Runner


def random_model(case: Case) -> torch.nn.Module:
    """The case's model with every parameter drawn anew, norms and biases included."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    if head_class := getattr(transformers, case.head, None) if case.head else None:
        model = head_class._from_config(config, attn_implementation="eager").eval()
    else:
        auto = getattr(transformers, f"AutoModelFor{case.head}" if case.head else "AutoModel")
        model = auto.from_config(config, attn_implementation="eager").eval()
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    for name, parameter in model.named_parameters():
        draw = np.asarray(rng.normal(size=tuple(parameter.shape)), np.float32)
        is_norm = (parameter.ndim == 1 and name.endswith("weight")) or "lambda" in name
        with torch.no_grad():
            parameter.copy_(torch.tensor(1 + 0.3 * draw if is_norm else 0.4 * draw))
    return model


def runner_of(name: str, folder: Path) -> Runner:
    """A case's random model, saved in a folder and run by weightscope."""
    network = random_model(case_of(name))
    network.save_pretrained(folder)
    return Runner(ws.open_model(folder), network)


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    """Tokens that are no special ones, and an image; whichever the model takes."""
    rng = np.random.default_rng(len(case.name))
    if case.inputs:
        return {
            name: torch.from_numpy(rng.normal(size=given).astype(np.float32))
            if isinstance(given, tuple)
            else torch.tensor(given)
            for name, given in case.inputs.items()
        }
    tokens = torch.from_numpy(rng.integers(3, 20, size=(1, case.length)))
    if case.model_type in {"clip", "siglip"}:
        side = case.config["vision_config"]["image_size"]
        return {"input_ids": tokens, "pixel_values": torch.from_numpy(image(rng, side))}
    if "image_size" in case.config:
        return {"pixel_values": torch.from_numpy(image(rng, case.config["image_size"]))}
    return {"input_ids": tokens}


def image(rng: np.random.Generator, side: int) -> np.ndarray:
    return rng.normal(size=(1, 1, side, side)).astype(np.float32)
