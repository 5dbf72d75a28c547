"""Tiny random models of an architecture: their sizes, and how they are built and initialised.

The sizes within one model differ from each other, so that no match is accidental. Code that comes
with a checkpoint is never run.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Size:
    """Sizes of one tiny model."""

    heads: int  # H query heads in G groups, r wide
    groups: int
    head_dim: int
    free: int  # width of the stream if a config says the heads' width itself; H r elsewhere
    ffn: int
    vocabulary: int
    length: int
    rope: int  # widths of a latent head's parts, and of its latents
    nope: int
    value: int
    q_rank: int
    kv_rank: int
    window: int
    grid: int  # patches along one side of an image


SIZES = (
    Size(4, 2, 24, 80, 56, 151, 17, 8, 12, 10, 14, 18, 4, 4),
    Size(6, 3, 32, 120, 88, 173, 23, 16, 20, 28, 26, 38, 6, 6),
    Size(8, 4, 32, 160, 96, 173, 23, 16, 20, 28, 26, 38, 4, 8),  # where six heads do not go
)


@dataclass(frozen=True)
class Plan:
    """Choices of sizes, bold or cautious: not every architecture takes all of them different."""

    free_width: bool
    grouped: bool
    filled: bool = False  # sizes that a config leaves open are given
    own_heads: bool = False  # heads as wide as the architecture's: its code fixes their sections
    shrunk: bool = True


PLANS = (
    Plan(True, True),
    Plan(True, True, filled=True),
    Plan(False, True, filled=True),
    Plan(False, False, filled=True),
    Plan(True, True, filled=True, own_heads=True),
    Plan(False, False, filled=True, own_heads=True),
    Plan(False, False, shrunk=False),
)
FILLED: Mapping[str, Any] = {
    "head_dim": 0, "num_key_value_heads": 0, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 28, "moe_intermediate_size": 28,
    "moe_topk": 2, "mask_token_id": 3, "attn_layer_indices": [1], "prediction_length": 4,
    "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 0,
}  # fmt: skip

MOST_PARAMETERS = 140_000_000
HEADS = (
    "", "CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "PreTraining", "SpeechSeq2Seq",
    "CTC", "ObjectDetection", "MaskGeneration", "TextToWaveform", "MultimodalLM",
)  # fmt: skip

# model_types whose eager code misreads its mask: the other way round, so that it hides what a query
# may see, or as numbers, so that 1 is added to the scores of visible keys. Fused attention, which
# `from_pretrained` takes by default, does not; under watch that is done in steps.
MASK_MISREAD = (
    "nemotron_asr_streaming",
    "nemotron_asr_streaming_encoder",
    "nemotron3_5_asr",
    "grounding-dino",
    "mm-grounding-dino",
)


def attention_of(kind: str) -> str | None:
    """The attention implementation that a type is compared with; None: transformers' default."""
    return None if kind in MASK_MISREAD else "eager"


def classes_of(config: Any) -> list[Any]:
    """Every class of transformers for models of a config, in the order of `HEADS`.

    Parts of composites are in no such list; theirs are the classes of their module.
    """
    kind, classes = type(config), list[Any]()
    for mapping in _mappings():
        with suppress(Exception):  # a class that needs packages which are not there
            listed = mapping.get(kind, ())
            classes += listed if isinstance(listed, tuple | list) else [listed]
    if not classes:
        with suppress(ImportError):
            module = import_module(kind.__module__.replace(".configuration_", ".modeling_"))
            members = vars(module).values()
            candidates = [each for each in members if getattr(each, "config_class", None) is kind]
            bases = {base for each in candidates for base in each.__mro__[1:]}
            abstract = {base for base in bases if "PreTrained" in base.__name__}
            classes = [each for each in candidates if each not in abstract]
    parts = {type(part) for part in vars(config).values()}  # whose classes are not of the whole
    return [each for each in dict.fromkeys(classes) if each.config_class not in parts]


def mappings_of_heads() -> list[Any]:
    """The classes of each auto class of `HEADS` by config."""
    names = [f"AutoModelFor{head}" if head else "AutoModel" for head in HEADS]
    autos = [getattr(transformers, name, None) for name in names]
    return [auto._model_mapping for auto in autos if auto is not None]


@cache
def _mappings() -> list[Any]:
    """The classes of every auto class by config, `HEADS` first."""
    first = mappings_of_heads()
    every = [each for each in vars(modeling_auto).values() if type(each) is type(first[0])]
    # as dicts they are equal: all are lazy
    return list({id(each): each for each in (*first, *every)}.values())


def build(config: Any, seed: int, classes: Sequence[Any] = ()) -> Any:
    """A random model of a config, by the first of these classes (or all of its own) that works."""
    problem: Exception | None = None
    for kind in classes or classes_of(config):
        try:
            with torch.device("meta"):
                parameters = kind._from_config(config).parameters()
            count = sum(parameter.numel() for parameter in parameters)
            if not 0 < count <= MOST_PARAMETERS:
                raise ValueError(f"{count} parameters are not a tiny model's")
            torch.manual_seed(seed)
            model = kind._from_config(config, attn_implementation=attention_of(config.model_type))
        except Exception as error:  # whatever transformers raises of an inconsistent config
            problem = problem or error
            continue
        randomise(model, seed)
        return model.float().eval()
    if problem:
        raise ValueError(f"cannot be built: {class_and_line(problem)}")
    raise ValueError("no class of transformers builds it")


def parameters_of(config: Any) -> set[str]:
    """The names of all parameters of a config's model; none if it cannot be built."""
    for kind in classes_of(config):
        try:
            with torch.device("meta"):
                return {name for name, _ in kind._from_config(config).named_parameters()}
        except Exception:
            continue
    return set()


def class_and_line(error: BaseException) -> str:
    """An error in a line; of a validator's wrapper, the error in it."""
    if error.__cause__ is not None and "alidation" in type(error).__name__:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter: gains about 1, biases about 0, matrices for scores of about 1.

    Frozen ones are tables with a formula, and keep it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                if parameter.ndim == 2 and "embed" in name:
                    fan_in = parameter.shape[1] ** 0.5
                parameter.copy_(1.2 * draw / fan_in**0.5)
            elif name.endswith(("weight", "gamma", "lambda1", "scale")):
                parameter.copy_(1 + 0.3 * draw)
            else:
                parameter.copy_(0.3 * draw)
