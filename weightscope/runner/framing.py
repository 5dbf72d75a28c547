"""The tokenizer of a model that is run, GGUF included, and the special tokens around its texts."""

from itertools import chain
from pathlib import Path

from weightscope.core.errors import CheckpointError, first_line
from weightscope.model.model import Model
from weightscope.model.text.sandbox import Loaded
from weightscope.model.text.sequences import Framing
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.runner.loading import NO_CODE, check_gguf, import_torch


def tokenizer_of(model: Model) -> Tokenizer:
    """A model's tokenizer, from its folder or the Hub; a GGUF file carries its own."""
    if not model.family.inputs.tokens:
        sees = f"a model of the family {model.family.name} sees images"
        problem = f"{sees}; this needs one that reads text"
        raise CheckpointError(problem, file=model.config.file)
    if (file := gguf_file(model)) is None or model.tokenizer != model.source:
        return Tokenizer.load(model.tokenizer)
    return _of_gguf(file)


def framing_of(model: Model, *, own_first: bool = False) -> Framing:
    """A model's tokenizer and the special tokens around its texts.

    These are the tokenizer's own, else `first_token`. With own_first there are none: each text
    begins with its own first token.
    """
    tokenizer = tokenizer_of(model)
    if own_first:
        return Framing(tokenizer)
    before = () if tokenizer.around else (first_token(model),)
    return Framing(tokenizer, tokenizer.around, before, model.config.n_positions)


def first_token(model: Model) -> int:
    """The first token of a text: the config's beginning of sequence, or else its end.

    Most tokenizers of the Qwen and GPT-NeoX families name one but never put it there themselves.
    """
    if (file := gguf_file(model)) is None:
        named = [model.config.get(key) for key in ("bos_token_id", "eos_token_id")]
    else:
        named = _of_gguf(file).facts["first"]
    listed = [each if isinstance(each, list) else [each] for each in named]
    token = next((token for token in chain(*listed) if type(token) is int), None)
    if token is None:
        problem = "neither 'bos_token_id' nor 'eos_token_id' is there"
        why = "a text needs a first token"
        raise CheckpointError(f"{problem}, and {why}", file=model.config.file)
    n_tokens = model.embeddings.n_tokens
    if not 0 <= token < n_tokens:
        problem = f"the first token of texts is {token}; the embedding has {n_tokens} rows"
        raise CheckpointError(problem, file=model.config.file)
    return token


def gguf_file(model: Model) -> Path | None:
    """The GGUF file that a model was opened from; None for another."""
    file = Path(model.checkpoint.files[0].path)
    return file if file.suffix == ".gguf" else None


def _of_gguf(file: Path) -> Tokenizer:
    stat = file.stat()
    return Tokenizer.sandboxed(file, gguf_tokenizer, str(file), (stat.st_size, stat.st_mtime_ns))


def gguf_tokenizer(file: str, written: tuple[int, int]) -> Loaded:
    """transformers' reading of a GGUF file's vocabulary, in a child, once for each `written`."""
    import_torch()
    from transformers import AutoTokenizer

    path = Path(file)
    check_gguf(path)
    try:
        options = {"gguf_file": path.name, "local_files_only": True} | NO_CODE
        made = AutoTokenizer.from_pretrained(str(path.parent), **options)
    except Exception as error:  # any class: transformers has none of its own
        problem = f"transformers cannot read its tokenizer: {first_line(error)}"
        raise CheckpointError(problem) from None
    return made.backend_tokenizer, {"first": [made.bos_token_id, made.eos_token_id]}
