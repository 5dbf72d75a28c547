"""GGUF files as llama.cpp's converter writes them, and as ggml's quantiser does from these.

The converter comes in the source distribution of llama-cpp-python; the folder with convert_hf_to_gguf.py is named by
the environment variable LLAMA_CPP. The quantiser is the shared library in the package xllamacpp, called by ctypes.
"""

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from analyses.experiments.faithful_sources import Made, Source, outputs
from weightscope.pairs.same import QUANTISED, ROUNDED, SAME_VALUES, VERDICTS

OUT_TYPES = {"f32": ("ALL_F32", SAME_VALUES), "f16": ("MOSTLY_F16", ROUNDED), "bf16": ("MOSTLY_BF16", ROUNDED),
             "q8_0": ("MOSTLY_Q8_0", QUANTISED)}  # fmt: skip
OF_GGML = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
           "TQ1_0", "TQ2_0", "MXFP4")  # fmt: skip
BY_IMPORTANCE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
                 "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")  # fmt: skip
TO_EXP = ("bamba", "jamba")  # types whose state spaces are stored as -exp(A_log), which float32 rounds
FEWEST = 1 << 20  # parameters of a model whose rows are whole blocks: tiny ones have none
MOST = 1 << 25  # of a model that ggml's searches with an importance matrix are run on
NO_WITNESS = "transformers does not read this file"
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KEPT = r"\.(gate|router)\.weight$|wpe|position_embeddings"  # in float32, by the converter


@cache
def converter() -> Any:
    """llama.cpp's package `conversion`; None where it is not there."""
    folder = os.environ.get("LLAMA_CPP", "")
    if not Path(folder, "convert_hf_to_gguf.py").is_file():
        return None
    sys.path.append(folder)
    import conversion
    import conversion.base

    return conversion


def convert(source: Path, out: Path, kind: str, pack: Callable[[np.ndarray], np.ndarray] | None = None) -> bool:
    """Convert a folder, with stand-ins for tokens; whether the converter knows its architecture.

    The vocabulary is not what is judged here: tiny models have none. With `pack` the matrices are in the type `kind` of
    ggml, and all else in float32, as llama-quantize --pure writes a file.
    """
    conversion = converter()
    import gguf  # the converter's own

    hparams = conversion.ModelBase.load_hparams(source, False)
    try:
        model_class = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    except (NotImplementedError, KeyError):
        return False

    is_bert = model_class.set_vocab.__qualname__.startswith("BertModel")

    def set_vocab(self: Any) -> None:
        count = self.hparams.get("vocab_size") or self.hparams["text_config"]["vocab_size"]
        self.gguf_writer.add_tokenizer_model("bert" if is_bert else "gpt2")
        self.gguf_writer.add_token_list([f"token {i}" for i in range(count)])

    add_tensor = gguf.GGUFWriter.add_tensor

    def add_packed(self: Any, name: str, array: np.ndarray, raw_dtype: Any = None) -> None:
        stored = gguf.GGMLQuantizationType[kind]
        fits = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0] == 0 and "norm" not in name
        if pack is not None and fits:
            packed = pack(array.reshape(-1, array.shape[-1]))  # (n, bytes of a row)
            array, raw_dtype = packed.reshape(*array.shape[:-1], -1), stored
        add_tensor(self, name, array, raw_dtype=raw_dtype)

    with (
        torch.inference_mode(),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        patch.object(model_class, "set_vocab", set_vocab),
        patch.object(gguf.GGUFWriter, "add_tensor", add_packed if pack else add_tensor),
    ):
        model_class(source, gguf.LlamaFileType[kind if pack is None else "ALL_F32"], out, eager=True).write()
    return True


def conversions(source: Source, work: Path) -> Iterator[Made]:
    """convert_hf_to_gguf.py with each --outtype; then ggml's types, with an importance matrix and without."""
    if converter() is None or source.model is None:
        return
    about = "llama.cpp convert_hf_to_gguf.py", os.environ.get("LLAMA_CPP_VERSION", "unknown")
    copy = work / "copy.gguf"
    for name, (kind, expected) in OUT_TYPES.items():
        work.mkdir(parents=True, exist_ok=True)
        try:
            if not convert(source.folder, copy, kind):
                return
        except Exception as error:  # a tiny model that the converter's own checks refuse
            print(f"{source.name}: the converter fails: {type(error).__name__}: {str(error)[:100]}")
            return
        weakest = max(expected, ROUNDED if source.kind in TO_EXP else expected, key=VERDICTS.index)
        witness = _witness(source, copy, partial(_stored, kind=name, kept=KEPT))
        yield Made(*about, "GGUF", f"--outtype {name}", weakest, copy, *witness)
    if source.model.num_parameters() < FEWEST or (library := ggml()) is None:
        return
    about = "ggml_quantize_chunk", version("xllamacpp")
    is_small = source.model.num_parameters() <= MOST
    for importance, kinds in ((False, OF_GGML), *([(True, BY_IMPORTANCE)] if is_small else [])):
        for kind in kinds:
            work.mkdir(parents=True, exist_ok=True)
            pack = partial(quantise, library, kind=kind, importance=importance)
            convert(source.folder, copy, kind, pack)
            options = f"{kind}{', importance matrix' if importance else ''}"
            witness = _witness(source, copy, partial(_stored, kind=kind, pack=pack))
            yield Made(*about, "GGUF", options, QUANTISED, copy, *witness)


# The witness: transformers' own loader of GGUF files, and the model with its weights rounded or quantised in memory.

Runs = Callable[[], tuple[Any, Any]]
Packing = Callable[[np.ndarray], np.ndarray]


def _witness(
    source: Source, copy: Path, change: Callable[[str, torch.Tensor, bool], torch.Tensor]
) -> tuple[Runs | None, str]:
    """The model that the file should be and the file as transformers reads it; or why nothing runs it."""
    kind = type(source.model)
    try:
        read = kind.from_pretrained(copy.parent, gguf_file=copy.name, dtype=torch.float32, attn_implementation="eager")
        outputs(read.eval(), source.inputs)
    except Exception:  # a type, or a part of one, that its loader does not know
        return None, NO_WITNESS
    turned = {f"{name}.weight" for name, module in source.model.named_modules() if type(module).__name__ == "Conv1D"}
    return lambda: (source.with_weights(lambda name, weight: change(name, weight, name in turned)), read), ""


def _stored(
    name: str, weight: torch.Tensor, turned: bool, *, kind: str, pack: Packing | None = None, kept: str = "$^"
) -> torch.Tensor:
    """A weight as a file of this type holds it; `turned`: stored (in, out) in transformers."""
    import gguf

    if weight.dim() < 2 or "norm" in name or re.search(kept, name):
        return weight
    if kind in FLOATS:
        return weight.to(FLOATS[kind]).float()
    stored = gguf.GGMLQuantizationType[kind.upper()]
    rows = (weight.T if turned else weight).contiguous().numpy()
    if rows.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:
        return weight if pack else weight.half().float()  # what the converter falls back to
    flat = rows.reshape(-1, rows.shape[-1])
    packed = pack(flat) if pack else gguf.quants.quantize(flat, stored)
    values = torch.from_numpy(gguf.quants.dequantize(packed, stored).reshape(rows.shape).copy())
    return values.T if turned else values


# ggml's own routines


@cache
def ggml() -> Any:
    """The shared library with ggml; None where it is not installed."""
    with_library = importlib.util.find_spec("xllamacpp")
    try:
        version("xllamacpp")
    except PackageNotFoundError:
        return None
    if with_library is None or not with_library.submodule_search_locations:
        return None
    file = next(Path(with_library.submodule_search_locations[0]).glob("xllamacpp*.so"))
    library = ctypes.CDLL(str(file))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    return library


def quantise(library: Any, rows: np.ndarray, *, kind: str, importance: bool) -> np.ndarray:
    """Rows (n, width) in a type of ggml, (n, bytes); the importance matrix is random."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[number]
    rows = np.ascontiguousarray(rows, np.float32)
    packed = np.empty((len(rows), rows.shape[1] // values * size), np.uint8)
    weights = np.random.default_rng(0).chisquare(1, rows.shape[1]).astype(np.float32) + 1e-3
    library.ggml_quantize_chunk(
        int(number), rows.ctypes.data, packed.ctypes.data, 0, *rows.shape, weights.ctypes.data if importance else None
    )
    return packed
