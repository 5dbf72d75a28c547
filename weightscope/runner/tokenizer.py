"""The tokenizer of a model that is run, GGUF included, and the token that its texts begin with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope.errors import CheckpointError
from weightscope.model import Model
from weightscope.runner.loading import NO_CODE, first_line, import_torch
from weightscope.text.sandbox import served
from weightscope.text.sandbox_child import Loaded
from weightscope.text.sequences import Framing, added_tokens
from weightscope.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(model: Model) -> "Tokenizer":
    """A model's tokenizer: from its folder or the Hub, or out of a GGUF file, which carries its own."""
    if not model.family.inputs.tokens:
        problem = f"a model of the family {model.family.name} sees images; this needs one that reads text"
        raise CheckpointError(problem, file=model.config.file)
    gguf = _gguf(model) if model.tokenizer == model.source else None
    return load_tokenizer(model.tokenizer) if gguf is None else _from_gguf(gguf)


def framing_of(model: Model) -> Framing:
    """A model's tokenizer and the special tokens around its texts: those that it adds, else `first_token`
    before them.
    """
    tokenizer = tokenizer_of(model)
    added = added_tokens(tokenizer)
    return Framing(tokenizer, added, () if added else (first_token(model),), model.config.n_positions)


def first_token(model: Model) -> int:
    """The token that a text begins with: what the config names as beginning of sequence, or else as its end.

    Most tokenizers of the Qwen and GPT-NeoX families name one but never put it there themselves.
    """
    gguf = _gguf(model)
    if gguf is None:
        named = [model.config.get(key) for key in ("bos_token_id", "eos_token_id")]
    else:
        named = _from_gguf(gguf).facts["first"]
    tokens = [token for each in named for token in (each if isinstance(each, list) else [each]) if type(token) is int]
    if not tokens:
        problem = "neither 'bos_token_id' nor 'eos_token_id' is there, and a text needs a first token"
        raise CheckpointError(problem, file=model.config.file)
    if not 0 <= tokens[0] < model.embeddings.n_tokens:
        problem = f"the first token of texts is {tokens[0]}; the embedding has {model.embeddings.n_tokens} rows"
        raise CheckpointError(problem, file=model.config.file)
    return tokens[0]


def _gguf(model: Model) -> Path | None:
    return model.where if isinstance(model.where, Path) and model.where.suffix == ".gguf" else None


def _from_gguf(file: Path) -> Any:
    stat = file.stat()
    return served(file, gguf_tokenizer, str(file), (stat.st_size, stat.st_mtime_ns))


def gguf_tokenizer(file: str, written: tuple[int, int]) -> Loaded:
    """What transformers makes of the vocabulary in a GGUF file: called in a child process, once for each `written`."""
    import_torch()
    from transformers import AutoTokenizer

    path = Path(file)
    try:
        made = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True, **NO_CODE)
    except Exception as error:  # of whatever class: transformers has none of its own
        raise CheckpointError(f"transformers cannot read its tokenizer: {first_line(error)}") from None
    return made.backend_tokenizer, {"first": [made.bos_token_id, made.eos_token_id]}
