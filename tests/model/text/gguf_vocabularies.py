"""Vocabularies of GGUF files, made of the tokenizer that comes with the package, and llama.cpp's tokens of some texts.

    python -m tests.model.text.gguf_vocabularies LIBRARY    # writes llama_cpp_tokens.json

LIBRARY is a shared library that exports llama.cpp's C functions, as xllamacpp 2026.10.11549 ships it.
"""

import ctypes
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightscope.core.embedded import FOLDER

RECORDED = Path(__file__).with_name("llama_cpp_tokens.json")
SPECIAL = ("<|first|>", "<|last|>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = (
    "The cats sat, didn't they?  They'd sat on the mats\n\nuntil 1845; THEY'LL be 12345678 of 2 in 1900.",
    "  two spaces \n\n\n and lines\r\n\tof code: def f(x):\n        return x**2 + 1  # \t\n",
    "don't DON'T I'm I'M we'll it's IT'S you've o'clock 's 'tis",
    "naïve café — “quotes” … ½ ² Ⅷ ٣ 漢字かな 한국어 🐈‍⬛ \u3000\u00a0\x85 x",
    "a<|first|>b <|last|>\n<|first|><s> <unk> </s>x",
    "...!!!\n\n??\n ,,, --\n1,000.50 3.14 2nd 1st\n 7 8  9",
    " ",
    "\n",
    "",
)


def embedded_tokenizer() -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as lines, of the tokenizer that comes with the package."""
    model = json.loads((FOLDER / "tokenizer.json").read_text())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def byte_level(pre: str | None, **changed: Any) -> dict[str, Any]:
    """Keys of a GGUF file of GPT-2's kind; `changed` adds some, and None leaves one out."""
    tokens, merges = embedded_tokenizer()
    types = [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED]
    lists = {"tokens": [*tokens, *SPECIAL], "merges": merges, "token_type": types}
    first, last = len(tokens), len(tokens) + 1
    keys = {"model": "gpt2", "pre": pre, **lists, "bos_token_id": first, "eos_token_id": last}
    return {name: value for name, value in (keys | changed).items() if value is not None}


def of_scores(**changed: Any) -> dict[str, Any]:
    """Keys of a GGUF file of Llama's kind: letters first, then the embedded tokens, by score."""
    words = [token.replace("Ġ", "▁") for token in embedded_tokenizer()[0]]
    words = [word for word in words if word.isascii() or ("▁" in word and word.replace("▁", "").isascii())]
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|first|>": USER_DEFINED}
    pieces = special | {f"<0x{byte:02X}>": BYTE for byte in range(256)} | dict.fromkeys(words, NORMAL)
    scores = [0.0 if kind != NORMAL else 260.0 - index for index, kind in enumerate(pieces.values())]
    lists = {"tokens": [*pieces], "scores": scores, "token_type": [*pieces.values()]}
    keys = {"model": "llama", "pre": "default", **lists, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {name: value for name, value in (keys | changed).items() if value is not None}


# By a name in the file of recorded tokens
VOCABULARIES = {
    **{name: byte_level(name) for name in ("gpt-2", "smollm", "starcoder", "refact", "llama-bpe", "qwen2")},
    "smollm, both ends": byte_level("smollm", add_bos_token=True, add_eos_token=True),
    "llama": of_scores(),
    "llama, no prefix": of_scores(add_space_prefix=False, add_bos_token=False),
}


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file without tensors that has these keys of a tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, float: writer.add_float32}
            add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class ModelParams(ctypes.Structure):
    """llama_model_params, as far as it is set here."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int) for name in ("layers", "split", "load", "lazy", "main")),
        *((name, ctypes.c_void_p) for name in ("shares", "progress", "data", "keys")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "mtp")),
    )


def tokens_of_llama_cpp(library: str, path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts, special ones in and around them included."""
    llama = ctypes.CDLL(library)
    llama.llama_model_default_params.restype = ModelParams
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
    llama.llama_model_load_from_file.restype = llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    llama.llama_tokenize.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_bool, ctypes.c_bool,
    ]  # fmt: skip
    params = llama.llama_model_default_params()
    assert params.extra and not (params.vocab_only or params.check)  # the layout is the one above
    params.vocab_only = True
    vocabulary = llama.llama_model_get_vocab(llama.llama_model_load_from_file(str(path).encode(), params))
    ids = []
    for text in texts:
        content, room = text.encode(), (ctypes.c_int * (len(text.encode()) + 8))()
        n = llama.llama_tokenize(vocabulary, content, len(content), room, len(room), True, True)
        assert n >= 0
        ids.append([*room[:n]])
    return ids


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = {
            name: write_gguf(Path(folder, f"{n}.gguf"), keys) for n, (name, keys) in enumerate(VOCABULARIES.items())
        }
        answers = {name: tokens_of_llama_cpp(sys.argv[1], path, TEXTS) for name, path in made.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in answers.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
