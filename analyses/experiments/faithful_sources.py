"""The checkpoints that are converted, and what they compute: tiny random models of many types, and real ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import weightscope as ws
from weightscope.adopting.config_keys import tiny_config
from weightscope.adopting.inputs import Inputs
from weightscope.adopting.tiny_models import PLANS, SIZES, build, classes_of

logging.disable_progress_bar()
logging.set_verbosity_error()

TINY = (
    "afmoe", "albert", "apertus", "arcee", "bamba", "bart", "bert", "big_bird", "biogpt", "bloom", "clip", "codegen",
    "cohere", "cohere2", "deberta-v2", "deepseek_v2", "deepseek_v3", "dinov2", "distilbert", "electra", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "hubert", "jamba",
    "lfm2", "llama", "llama4_text", "llava", "mbart", "minimax", "mistral", "mixtral", "modernbert", "mpnet", "mpt",
    "mt5", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "pegasus", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next", "roberta", "seed_oss", "siglip", "smollm3", "stablelm",
    "starcoder2", "swin", "t5", "vit", "wav2vec2", "whisper", "xglm", "xlm-roberta",
)  # fmt: skip
# Types that block formats of 256 values are written of: with these sizes all their rows are blocks.
WIDE = ("gemma2", "gpt2", "llama", "mixtral", "phi3", "qwen2", "qwen3", "stablelm")
SIZES_OF_WIDE: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 160, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# llama.cpp's Gemma 2 has no key for the scale of scores, and takes one over the root of head_dim. Its converter needs
# n_ctx of GPT-2, which has as many key-value heads as heads and a hidden layer of four times the width.
OF_TYPE: Mapping[str, Any] = {
    "mixtral": {"num_local_experts": 4}, "gemma2": {"query_pre_attn_scalar": 64},
    "gpt2": {"n_ctx": 64, "num_key_value_heads": 4, "intermediate_size": 1024},
}  # fmt: skip
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # classes whose outputs are logits


@dataclass
class Source:
    """A checkpoint, its model in float32, and inputs that it runs on."""

    name: str
    folder: Path
    model: Any  # of transformers; None where weights are missing
    inputs: Mapping[str, torch.Tensor]
    gguf: Path | None = None  # the file that transformers dequantised it from

    @property
    def kind(self) -> str:
        """Its model_type."""
        return str(self.model.config.model_type)

    @property
    def is_tied(self) -> bool:
        """Whether its head is its token embedding."""
        try:
            head, tokens = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        except NotImplementedError:  # a model without tokens
            return False
        return head is not None and getattr(head, "weight", None) is getattr(tokens, "weight", head)

    def with_weights(self, change: Any) -> Any:
        """The model with every number that a file stores changed in memory: change(name, weight)."""
        model = deepcopy(self.model)
        with torch.no_grad():
            for name, weight in model.state_dict(keep_vars=True).items():
                if weight.is_floating_point():
                    weight.copy_(change(name, weight.clone()))
        return model

    def load(self, folder: Path, **options: Any) -> Any:
        """A copy as transformers reads it, in float32."""
        return (
            type(self.model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).eval()
        )


class Made(NamedTuple):
    """A copy, and how it was made."""

    writer: str
    version: str
    container: str
    options: str
    expected: str  # verdict
    copy: Path
    runs: Callable[[], tuple[Any, Any]] | None  # the model that the copy should be, and the copy as it runs
    no_witness: str = ""  # why nothing runs the copy
    original: Callable[[], Any] | None = None  # opens it, where it is not the source


Writer = Callable[[Source, Path], Iterator[Made]]


def outputs(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first output with numbers: logits where the class has a head."""
    with torch.no_grad():
        result = model(**inputs)
    named = dict(result.items()) if hasattr(result, "items") else dict(enumerate(result))
    for key in ("logits", "last_hidden_state"):
        if key in named:
            return named[key].double()
    return next(each for each in named.values() if isinstance(each, torch.Tensor)).double()


def sources(names: Sequence[str], work: Path) -> Iterator[Source]:
    """These, or all: model types as tiny models, "wide-TYPE", and real checkpoints: folders and GGUF files."""
    for name in names or (*TINY, *(f"wide-{kind}" for kind in WIDE)):
        if Path(name).exists():
            yield dequantised(Path(name), work) if name.endswith(".gguf") else real(Path(name))
            continue
        source = wide(name.removeprefix("wide-"), work / name) if name.startswith("wide-") else tiny(name, work / name)
        if source is not None:
            yield source


def real(folder: Path) -> Source:
    """A checkpoint as it is; nothing runs one that lacks weights."""
    kind = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return Source(folder.name, folder, None, {}) if info["missing_keys"] else _saved(folder.name, folder, model)


def dequantised(file: Path, work: Path) -> Source:
    """A GGUF file as transformers dequantises it, saved in float32."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    model.hf_quantizer = None  # it holds no codes any more
    del model.config.quantization_config
    model.save_pretrained(folder := work / file.stem)
    return replace(_saved(file.stem, folder, model), gguf=file)


def tiny(kind: str, folder: Path) -> Source | None:
    """A tiny random model of a type, with a head where it has one; None where none can be built."""
    for plan in PLANS:
        with suppress(Exception):  # whatever transformers raises of sizes that do not fit together
            config = tiny_config(CONFIG_MAPPING[kind](), SIZES[0], plan)
            classes = classes_of(config)
            heads = [each for each in classes if each.__name__.endswith(LANGUAGE)]
            model = build(config, 1, heads or classes)
            model.save_pretrained(folder)
            ws.open_model(folder)  # a config that its row refuses, as one without a layer of attention, is no source
            return _saved(kind, folder, model)
    return None


def wide(kind: str, folder: Path) -> Source:
    """A random model whose rows are whole blocks of 256."""
    config = CONFIG_MAPPING[kind](**{**SIZES_OF_WIDE, **OF_TYPE.get(kind, {})})
    model = build(config, 2, [each for each in classes_of(config) if each.__name__.endswith(LANGUAGE)])
    model.save_pretrained(folder)
    return _saved(f"wide-{kind}", folder, model)


def _saved(name: str, folder: Path, model: Any) -> Source:
    """The source with the first inputs that its model runs on."""
    model.eval()
    problem: Exception = ValueError(f"{name}: nothing to run it on")
    for attempt in Inputs(model, SIZES[0], 1).attempts():
        try:
            outputs(model, attempt)
        except Exception as error:  # the next inputs, then
            problem = error
            continue
        return Source(name, folder, model, attempt)
    raise problem
