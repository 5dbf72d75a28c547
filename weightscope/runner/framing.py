"""The tokenizer of a model that is run, GGUF included, and the special tokens around its texts."""

from pathlib import Path

from weightscope.core.errors import CheckpointError, first_line
from weightscope.model.model import Model
from weightscope.model.text.sandbox import Loaded
from weightscope.model.text.sequences import Framing
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.runner.loading import NO_CODE, check_gguf, import_torch


def tokenizer_of(model: Model) -> Tokenizer:
    """A model's tokenizer: from its folder or the Hub, or out of a GGUF file, which carries its
    own.
    """
    if not model.family.inputs.tokens:
        problem = (
            f"a model of the family {model.family.name} sees images; this needs one that reads text"
        )
        raise CheckpointError(problem, file=model.config.file)
    if (file := gguf_file(model)) is None or model.tokenizer != model.source:
        return Tokenizer.load(model.tokenizer)
    return _of_gguf(file)


def framing_of(model: Model, *, own_first: bool = False) -> Framing:
    """A model's tokenizer and the special tokens around its texts: those that it adds, else
    `first_token` before them. With own_first there are none: each text begins with its own first
    token.
    """
    tokenizer = tokenizer_of(model)
    if own_first:
        return Framing(tokenizer)
    before = () if tokenizer.around else (first_token(model),)
    return Framing(tokenizer, tokenizer.around, before, model.config.n_positions)


def first_token(model: Model) -> int:
    """The token that a text begins with: what the config names as beginning of sequence, or else as
    its end.

    Most tokenizers of the Qwen and GPT-NeoX families name one but never put it there themselves.
    """
    if (file := gguf_file(model)) is None:
        named = [model.config.get(key) for key in ("bos_token_id", "eos_token_id")]
    else:
        named = _of_gguf(file).facts["first"]
    tokens = [
        token
        for each in named
        for token in (each if isinstance(each, list) else [each])
        if type(token) is int
    ]
    if not tokens:
        problem = (
            "neither 'bos_token_id' nor 'eos_token_id' is there, and a text needs a first token"
        )
        raise CheckpointError(problem, file=model.config.file)
    if not 0 <= tokens[0] < model.embeddings.n_tokens:
        problem = f"the first token of texts is {tokens[0]}; the embedding has {model.embeddings.n_tokens} rows"
        raise CheckpointError(problem, file=model.config.file)
    return tokens[0]


def gguf_file(model: Model) -> Path | None:
    """The GGUF file that a model was opened from; None for another."""
    file = Path(model.checkpoint.files[0].path)
    return file if file.suffix == ".gguf" else None


def _of_gguf(file: Path) -> Tokenizer:
    stat = file.stat()
    return Tokenizer.sandboxed(file, gguf_tokenizer, str(file), (stat.st_size, stat.st_mtime_ns))


def gguf_tokenizer(file: str, written: tuple[int, int]) -> Loaded:
    """What transformers makes of the vocabulary in a GGUF file: called in a child process, once for
    each `written`.
    """
    import_torch()
    from transformers import AutoTokenizer

    path = Path(file)
    check_gguf(path)
    try:
        made = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, **NO_CODE
        )
    except Exception as error:  # of whatever class: transformers has none of its own
        raise CheckpointError(
            f"transformers cannot read its tokenizer: {first_line(error)}"
        ) from None
    return made.backend_tokenizer, {"first": [made.bos_token_id, made.eos_token_id]}
