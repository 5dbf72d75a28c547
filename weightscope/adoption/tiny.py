"""Tiny random models of any architecture that transformers has. Never code that comes with a checkpoint."""

from typing import Any

import torch
import transformers

MOST_PARAMETERS = 75_000_000
HEADS = ("", "CausalLM", "Seq2SeqLM", "ImageTextToText", "MaskedLM", "PreTraining", "SpeechSeq2Seq", "CTC",
         "ObjectDetection", "MaskGeneration", "TextToWaveform", "MultimodalLM")  # fmt: skip

# model_types whose eager code takes its mask the other way round, and hides what a query may see. Fused attention does
# not; under watch it is done in steps.
FUSED = ("nemotron_asr_streaming", "nemotron_asr_streaming_encoder", "nemotron3_5_asr")


def build(config: Any, seed: int) -> torch.nn.Module:
    """A random model of a config, by the bare class that transformers has for it, or else by one with a head.

    Raises
    ------
    ValueError
        No class of transformers builds it, or it is no tiny one.
    """
    problem: Exception | None = None
    for head in HEADS:
        auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel", None)
        if auto is None or type(config) not in auto._model_mapping:
            continue
        try:
            with torch.device("meta"):
                count = sum(one.numel() for one in auto.from_config(config).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count} parameters are not a tiny model's")
            torch.manual_seed(seed)
            how = "sdpa" if config.model_type in FUSED else "eager"
            model = auto.from_config(config, attn_implementation=how)
        except Exception as error:  # whatever transformers raises of a config that does not fit together
            problem = problem or error
            continue
        randomise(model, seed)
        return model.float().eval()
    raise ValueError(f"cannot be built: {first_line(problem)}" if problem else "no class of transformers builds it")


def parameters_of(config: Any) -> set[str]:
    """The names of all parameters of a config's model, which is not filled; none where it cannot be built."""
    for head in HEADS:
        auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel", None)
        if auto is not None and type(config) in auto._model_mapping:
            try:
                with torch.device("meta"):
                    return {name for name, _ in auto.from_config(config).named_parameters()}
            except Exception:  # whatever transformers raises of a flag that does not go with others
                continue
    return set()


def first_line(error: BaseException) -> str:
    """An error in a line: what a validator found, where one wraps it."""
    if error.__cause__ is not None and "alidation" in type(error).__name__:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn anew: gains of norms about 1, biases about 0, matrices so that scores are about 1.

    Frozen ones are tables with a formula, and keep it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            draw = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                fan_in = (
                    parameter[0].numel() if parameter.ndim > 2 or "embed" not in name else parameter.shape[1] ** 0.5
                )
                parameter.copy_(1.2 * draw / fan_in**0.5)
            elif name.endswith(("weight", "gamma", "lambda1", "scale")):
                parameter.copy_(1 + 0.3 * draw)
            else:
                parameter.copy_(0.3 * draw)
