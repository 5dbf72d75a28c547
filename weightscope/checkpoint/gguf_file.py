"""A GGUF file as a checkpoint: tensors under their Hugging Face names, and the config that its keys amount to.

What converting to GGUF changes is undone. For the llama architecture that is the order of the rows of Q and K: ggml
rotates neighbouring coordinates, Hugging Face the two halves of a head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.gguf_header import MAX_HEADER_BYTES, GgufEntry, parse_gguf
from weightscope.checkpoint.header import MAX_OFFSET, TensorEntry
from weightscope.checkpoint.local import OpenFile
from weightscope.checkpoint.tensor import StoredTensor, Tensor, WholeTensor
from weightscope.errors import CheckpointError


@dataclass(frozen=True)
class Architecture:
    """What converting a family to GGUF does.

    Attributes
    ----------
    model_type : str
        As config.json calls it.
    permuted : bool
        Whether the rows of Q and K were put in another order.
    """

    model_type: str
    permuted: bool


# By general.architecture. Mistral's files say llama too: to ggml they are the same.
ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),
    "qwen2": Architecture("qwen2", permuted=False),
    "qwen3": Architecture("qwen3", permuted=False),
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Meaning in config.json -> key after the architecture's name.
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
PLAIN = ("F32", "F16", "F64", "BF16")


class GgufFile(OpenFile):
    """One GGUF file.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    tensors : dict of TensorEntry
        By Hugging Face name.
    config : dict
        What its keys amount to, as config.json would have it.

    Raises
    ------
    CheckpointError
        The gguf package is not installed, the file is not right, or its architecture is not read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        text = self.read(0, min(self.size, MAX_HEADER_BYTES)).tobytes()
        keys, entries, data_start = parse_gguf(text, file=path)
        architecture = keys.get("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"is of architecture '{str(architecture)[:40]}'; read are {known}", file=path)
        self.architecture = ARCHITECTURES[architecture]
        self.config = self._config(keys, architecture + ".")
        located = {name: self._locate(name, entry, data_start) for name, entry in entries.items()}
        self._refuse_overlaps(located)
        self._rope_factors(located)
        self.tensors = {_hugging_face_name(name): entry for name, entry in located.items()}
        if len(self.tensors) != len(located):
            raise CheckpointError("has two tensors that mean the same", file=path)
        self.config["vocab_size"] = _rows(self.tensors.get("model.embed_tokens.weight"))
        self.config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors

    def _config(self, keys: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        config = {meaning: _shortest(keys[prefix + key]) for meaning, key in SIZES.items() if prefix + key in keys}
        config["model_type"] = self.architecture.model_type
        for head, width in (("num_attention_heads", "hidden_size"), ("num_key_value_heads", "num_attention_heads")):
            count, whole = config.get(head, config.get(width)), config.get(width)
            if type(count) is not int or type(whole) is not int or not 0 < count <= whole <= 10**7 or whole % count:
                raise CheckpointError(
                    f"has {str(count)[:40]} for {head} and {str(whole)[:40]} for {width}", file=self.path
                )
            config[head] = count
        scaling = keys.get(prefix + "rope.scaling.type", "none")
        if scaling == "linear":
            factor = keys.get(prefix + "rope.scaling.factor")
            config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif scaling != "none":
            raise CheckpointError(f"scales its rotations by '{str(scaling)[:40]}', which is not read", file=self.path)
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if keys.get(prefix + "rope.dimension_count", head_dim) != head_dim:
            raise CheckpointError("rotates a part of each head alone, which is not read", file=self.path)
        if keys.get(prefix + "expert_count"):
            raise CheckpointError("has experts; mixtures under this architecture are not read", file=self.path)
        return config

    def _locate(self, name: str, entry: GgufEntry, data_start: int) -> TensorEntry:
        """Where a tensor lies, checked against its type and the file's size."""
        constants = _package().constants

        def refuse(problem: str) -> CheckpointError:
            return CheckpointError(problem, file=self.path, tensor=name)

        try:
            kind = constants.GGMLQuantizationType(entry.type)
            per_block, block_bytes = constants.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise refuse(f"is of type {entry.type}, which the gguf package does not know") from None
        row = entry.shape[-1] if entry.shape else 1
        if row % per_block:
            raise refuse(f"has rows of {row}, which blocks of {per_block} do not divide")
        n_bytes = prod(entry.shape) // per_block * block_bytes
        start = data_start + entry.offset
        if not 0 <= start <= start + n_bytes <= min(self.size, MAX_OFFSET):
            raise refuse(f"ends at byte {start + n_bytes}, but the file has {self.size}; is it cut short?")
        return TensorEntry(kind.name, entry.shape, start, start + n_bytes)

    def _refuse_overlaps(self, located: Mapping[str, TensorEntry]) -> None:
        end = 0
        for name, entry in sorted(located.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start < end:
                raise CheckpointError("overlaps the tensor before it", file=self.path, tensor=name)
            end = max(end, entry.stop)

    def _rope_factors(self, located: dict[str, TensorEntry]) -> None:
        """Llama 3's scaling: a file has the factors it amounts to, which tell it and are checked against it."""
        entry = located.pop("rope_freqs.weight", None)
        if entry is None:
            return
        factors = GgufTensor("rope_freqs.weight", entry, self).read().reshape(-1).astype(np.float64)
        theta, factor, original = self.config.get("rope_theta", 10000.0), float(factors.max(initial=1.0)), 8192
        low, high = 1.0, 4.0  # as every Llama 3 has them
        if type(theta) is not float or not 1 < theta < 1e12 or not len(factors) or factors.min() <= 0:
            raise CheckpointError(
                f"has rotations of base {str(theta)[:40]}, scaled by what is not read", file=self.path
            )
        wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if not np.allclose(1 / factors, (1 - smooth) / factor + smooth, rtol=1e-3):
            raise CheckpointError("scales its rotations in a way that is not Llama 3's", file=self.path)
        self.config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low}
        self.config["rope_scaling"] |= {"high_freq_factor": high, "original_max_position_embeddings": original}

    def present(self) -> dict[str, Tensor]:
        """The tensors as Hugging Face has them."""
        heads = {"q": self.config["num_attention_heads"], "k": self.config["num_key_value_heads"]}
        tensors: dict[str, Tensor] = {}
        for name, entry in self.tensors.items():
            stored = GgufTensor(name, entry, self)
            projection = re.search(r"self_attn\.([qk])_proj\.", name)
            permuted = projection is not None and self.architecture.permuted
            tensors[name] = PermutedTensor(stored, heads[projection[1]]) if projection and permuted else stored
        return tensors


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor of one of ggml's types, which the gguf package dequantises."""

    def check_readable(self) -> None:
        if self.dtype not in PLAIN and self.dtype not in _dequantised_types():
            raise self.refuse(f"is of ggml type {self.dtype}, which the gguf package does not dequantise")

    def rows(self, start: int, stop: int) -> np.ndarray:
        if len(self.shape) == 1 and self.dtype not in PLAIN:  # a block holds many rows of one element
            self.check_rows(start, stop)
            return self.read()[start:stop]
        return super().rows(start, stop)

    def decode(self, raw: np.ndarray) -> np.ndarray:
        if self.dtype in PLAIN:
            return super().decode(raw)
        if not len(raw):
            return np.empty(0, np.float32)
        package = _package()
        kind = package.constants.GGMLQuantizationType[self.dtype]
        block_bytes = package.constants.GGML_QUANT_SIZES[kind][1]
        with np.errstate(over="ignore", invalid="ignore"):  # hostile scales; what comes of them is found and named
            return package.quants.dequantize(raw.reshape(-1, block_bytes), kind).reshape(-1)


@dataclass(frozen=True)
class PermutedTensor(WholeTensor):
    """Q or K (or its bias), its rows put back: within a head ggml has them 0, d/2, 1, d/2 + 1 ...

    Attributes
    ----------
    stored : GgufTensor
    n_heads : int
        Heads of this projection: key-value heads for K.
    """

    stored: GgufTensor
    n_heads: int

    def __post_init__(self) -> None:
        if not self.shape or self.shape[0] % (2 * self.n_heads):
            raise self.stored.refuse(f"has shape {self.shape}, which {self.n_heads} heads do not divide")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.stored.name

    @property
    def file(self) -> Any:  # type: ignore[override]
        return self.stored.file

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.stored,)

    @property
    def checked(self) -> bool:  # type: ignore[override]
        return self.stored.checked

    def unchecked(self) -> Tensor:
        return replace(self, stored=replace(self.stored, checked=False))

    def read(self) -> np.ndarray:
        rows = self.stored.read()
        pairs = rows.reshape(self.n_heads, self.shape[0] // (2 * self.n_heads), 2, *self.shape[1:])  # (H, d/2, 2, in)
        return pairs.swapaxes(1, 2).reshape(self.shape)


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that means it: 1e-05 where the file has 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _rows(entry: TensorEntry | None) -> int | None:
    return entry.shape[0] if entry is not None and entry.shape else None


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays as it is."""
    found = re.fullmatch(r"(?:blk\.(\d{1,7})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if not found or found[2] not in NAMES:
        return name
    layer = f"model.layers.{int(found[1])}." if found[1] else ""
    return f"{layer}{NAMES[found[2]]}.{found[3]}"


def _package() -> Any:
    """The gguf package, an extra."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise CheckpointError("GGUF files need the gguf package: pip install 'weightscope[gguf]'") from None
    return gguf


def _dequantised_types() -> set[str]:
    return {kind.name for kind in _package().quants._type_traits}
